"""The worker process: loads one stage of a pipeline, attaches to the server, and works until it is told to stop.

``stagewire worker`` and ``stagewire up`` start it as ``python -m stagewire.worker --pipeline FILE --stage NAME``.

Exit status: 0 after SIGTERM or SIGINT, once what ran is done; 1 where the pipeline cannot be loaded or the server stays
away; 2 for wrong usage; 3 where no server runs.
"""

from __future__ import annotations

from .main import main

__all__ = ["main"]
