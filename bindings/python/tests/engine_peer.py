"""The other process of a test with engines: one `EngineTransport`, told on stdin what to do, answering on stdout."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import numpy as np
import peers

peers.use_mooncake()

from stagewire.errors import StagewireError  # noqa: E402
from stagewire.mooncake import EngineTransport, Pinned, Region  # noqa: E402


def zeros(nbytes: int) -> Any:
    """An array of bytes."""
    return np.zeros(nbytes, np.uint8)


def pattern(nbytes: int, seed: int) -> Any:
    """Bytes that differ from offset to offset and from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Peer:
    """The commands, by name."""

    def __init__(self) -> None:
        self.transport = EngineTransport()
        self.memory: dict[str, Any] = {}
        self.regions: dict[str, Region] = {}
        self.pins: dict[str, Pinned] = {}

    def address(self) -> str:
        return self.transport.address.hex()

    def register(self, name: str, nbytes: int, seed: int, writable: bool = False) -> str:
        self.memory[name] = pattern(nbytes, seed)
        self.regions[name] = self.transport.register(self.memory[name], writable=writable)
        return self.regions[name].reference.hex()

    def release(self, name: str, timeout: float) -> bool:
        return self.regions[name].release(timeout)

    def idle(self, name: str) -> bool:
        return self.regions[name].is_idle

    def is_pattern(self, name: str, seed: int) -> bool:
        return bool((self.memory[name] == pattern(len(self.memory[name]), seed)).all())

    def read_forever(self, address: str, reference: str, nbytes: int) -> None:
        """Reads a region again and again on a thread, until this process ends."""
        pinned = self.transport.pin(bytes.fromhex(address), bytes.fromhex(reference))
        target = zeros(nbytes)
        pinned.read(target)

        def run() -> None:
            while True:
                pinned.read(target)

        threading.Thread(target=run, daemon=True).start()

    def stats(self) -> dict[str, int]:
        return self.transport.stats()


def main() -> None:
    peer = Peer()
    print("@@ready", flush=True)  # noqa: T201
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = {"value": getattr(peer, command)(*arguments)}
        except StagewireError as error:
            answer = {"reason": error.reason, "message": error.message}
        print(f"@@{json.dumps(answer)}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
