"""Runs the worker: ``python -m stagewire.worker``."""

from __future__ import annotations

import sys

from .main import main

sys.exit(main())
