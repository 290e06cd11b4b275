from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    # A run in the background may have been told to ignore Ctrl-C, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory of its own; short, because paths of Unix sockets are."""
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        yield Path(folder) / "run"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the developer has set must not reach the tests."""
    for name in os.environ:
        if name.startswith("STAGEWIRE_"):
            monkeypatch.delenv(name)
