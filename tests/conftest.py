from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deployment import STAGEWIRE, Deployment

ROUNDS = int(os.environ.get("STAGEWIRE_ROUNDS", "0"))
"""How often each kill test repeats: `make soak` sets it. Without it the counts are small."""


def rounds(usual: int) -> list[int]:
    return list(range(ROUNDS or usual))


def pytest_configure() -> None:
    # A run in the background may have been told to ignore Ctrl-C, which is inherited.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not Path(STAGEWIRE).is_file():
        pytest.exit(f"there is no {STAGEWIRE}: run `make setup`", returncode=2)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Short, because paths of Unix sockets are."""
    with tempfile.TemporaryDirectory(prefix="sw-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.fixture
def deploy(folder: Path) -> Iterator[Callable[..., Deployment]]:
    """Makes deployments that end with the test."""
    made: list[Deployment] = []

    def make(config: str, env: dict[str, str] | None = None) -> Deployment:
        home = folder / str(len(made))
        home.mkdir()
        made.append(Deployment(home, config, env))
        return made[-1]

    yield make
    for deployment in made:
        deployment.end()
