"""Runs the worker: ``python -m stagewire.worker``."""

from __future__ import annotations

import logging
import os
import sys

from .main import main

status = main()
# Every payload and grant is settled by now. Tearing down an interpreter that has loaded a model takes seconds in which
# whoever stops the worker would wait for nothing.
logging.shutdown()
sys.stdout.flush()
sys.stderr.flush()
os._exit(status)
