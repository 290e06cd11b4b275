"""A real Mooncake Store for tests: the wheel's master, and processes that lend memory, write and read."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import peers
import pytest
from stagewire._mooncake_client import Until

if TYPE_CHECKING:
    from collections.abc import Callable

    from stagewire.diffusion import DiffusionConnector

MIB = 1 << 20


def need_store() -> None:
    """Skips the test where the wheel, or a library that it needs, is missing."""
    peers.need_mooncake("mooncake.store")


def until(what: str, condition: Callable[[], bool], within: float = 20.0) -> None:
    end = time.monotonic() + within
    while not condition():
        assert time.monotonic() < end, f"not within {within} s: {what}"
        time.sleep(0.01)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Master:
    """`mooncake_master` in a process of its own."""

    def __init__(self, *flags: str) -> None:
        need_store()
        package = importlib.util.find_spec("mooncake")
        assert package is not None
        assert package.submodule_search_locations
        self._program = Path(package.submodule_search_locations[0]) / "mooncake_master"
        self._flags = flags
        self.port, self._admin = free_port(), free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                self._program,
                f"--rpc_port={self.port}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={self._admin}",
                "--metrics_host=127.0.0.1",
                "--enable_http_metadata_server=false",
                "--logtostderr=1",
                *self._flags,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def listens() -> bool:
            assert self.process.poll() is None, "the master ended"
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port)).close()
                return True
            return False

        until("the master listens", listens)

    def metric(self, name: str) -> int:
        """A number that the master publishes."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._admin}/metrics") as answer:
            for line in answer.read().decode().splitlines():
                found, _, value = line.partition(" ")
                if found == name:
                    return int(value)
        raise AssertionError(f"the master has no {name}")

    def is_empty(self) -> bool:
        """Whether nothing is in the store, finished or not."""
        return self.metric("master_key_count") == self.metric("master_allocated_bytes") == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()


ELSEWHERE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Runs a program as on another host: its processes cannot be seen from here, and it sees none of these."""


def fill(conn: DiffusionConnector) -> Callable[[], None]:
    """Takes all room of the store that a connector uses. What it returns gives that back."""
    store: Any = conn._store
    client = store._store._client

    def take(raw: Any) -> list[str]:
        keys: list[str] = []
        size = 4 * MIB
        while size:
            key = f"filling/{len(keys)}"
            if raw.batch_put_session_start([key], [size], client.pinned)[0] == 0:
                keys.append(key)
            else:
                size //= 2
        return keys

    keys = client.call("filling", Until(10), take)

    def make_room() -> None:
        client.call("making room", Until(10), lambda raw: raw.batch_put_session_revoke(keys))

    return make_room


def need_elsewhere() -> None:
    """Skips the test where this user may not do that."""
    try:
        done = subprocess.run([*ELSEWHERE, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError as missing:
        pytest.skip(str(missing))
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())


class Child:
    """A script in a process of its own: by default a client of the store, which lends memory where it is told to."""

    def __init__(
        self,
        master: str,
        *,
        script: str = "mooncake_store_peer.py",
        under: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        environment = os.environ | {"STAGEWIRE_PEERS": str(peers.FOLDER), "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(
            [*under, sys.executable, Path(__file__).with_name(script), json.dumps({"master": master, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.answer() == "ready"

    def tell(self, command: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([command, arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("@@"):
                return json.loads(line[2:])
        raise AssertionError("the child ended without a word")

    def ask(self, command: str, *arguments: Any) -> Any:
        self.tell(command, *arguments)
        return self.answer()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.process.pid}/stat")
        until("the child stands still", lambda: ") T " in stat.read_text())

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()
