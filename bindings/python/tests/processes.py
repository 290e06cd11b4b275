"""The other process of a test, and waiting for what it does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import concurrent.futures
    from pathlib import Path


class Peer:
    """Another process."""

    def __init__(self, pool: concurrent.futures.ProcessPoolExecutor, run_dir: Path) -> None:
        self._pool = pool
        self._run_dir = str(run_dir)

    def __call__(self, function: Any, *arguments: Any, **options: Any) -> Any:
        return self.start(function, *arguments, **options).result(60)

    def start(self, function: Any, *arguments: Any, **options: Any) -> concurrent.futures.Future[Any]:
        return self._pool.submit(function, self._run_dir, *arguments, **options)


def wait_for(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        time.sleep(0.002)
