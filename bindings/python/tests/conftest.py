from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import peer
import pytest
from mooncake_cluster import MIB, Child, Master
from processes import Peer

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


@pytest.fixture(scope="session")
def pool() -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as made:
        yield made


@pytest.fixture
def other(pool: concurrent.futures.ProcessPoolExecutor, run_dir: Path) -> Iterator[Peer]:
    made = Peer(pool, run_dir)
    yield made
    made(peer.close)


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    """A master of Mooncake Store, for all tests of a file."""
    with Master() as master:
        yield master


@pytest.fixture(scope="module")
def lender(master: Master) -> Iterator[Child]:
    """A process that lends it memory."""
    with Child(master.address, segment_bytes=128 * MIB) as child:
        yield child
