"""The other process of a test with Mooncake Store."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import peers

peers.use_mooncake()

from mooncake_child import say, serve  # noqa: E402
from stagewire.errors import Conflict  # noqa: E402
from stagewire.mooncake_store import MooncakeStore, Placed  # noqa: E402


def pattern(nbytes: int, seed: int) -> Any:
    """Bytes that differ from offset to offset and from seed to seed."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Peer:
    """The commands, by name."""

    def __init__(self, master: str, **options: Any) -> None:
        self.store = MooncakeStore(master, **options)
        self.kept: list[Any] = []

    def put(self, sizes: list[int], seed: int, payload_id: str | None = None) -> str:
        parts = [pattern(size, seed + index) for index, size in enumerate(sizes)]
        return self.store.put(parts, payload_id=payload_id).to_bytes().hex()

    def begin(self, sizes: list[int], payload_id: str) -> str:
        self.kept.append(self.store.create(sizes, payload_id=payload_id))
        return payload_id

    def release(self) -> None:
        """Ends all claims and drafts."""
        for one in self.kept:
            one.__exit__()
        self.kept.clear()

    def claim(self, placed: str) -> str:
        self.kept.append(self.store.claim(Placed.from_bytes(bytes.fromhex(placed))))
        return placed

    def check(self, placed: str, seed: int) -> bool:
        """Reads a payload, and says whether it is what `put` wrote."""
        found = Placed.from_bytes(bytes.fromhex(placed))
        into: list[Any] = [np.zeros(size, np.uint8) for size in found.parts]
        self.store.read(found, into)
        return all((part == pattern(len(part), seed + index)).all() for index, part in enumerate(into))

    def remove(self, placed: str) -> bool:
        return self.store.remove(Placed.from_bytes(bytes.fromhex(placed)))

    def race(self, ids: list[str], seed: int) -> list[str]:
        """The ids that this process could put under."""
        won = []
        for payload_id in ids:
            try:
                self.put([1000], seed, payload_id)
                won.append(payload_id)
            except Conflict:
                continue
        return won

    def replace_forever(self, nbytes: int) -> None:
        """Puts a payload, announces it, takes it away while it may be read, again and again."""
        for seed in range(1 << 30):
            say([self.put([nbytes], seed), seed])
            self.remove(json.loads(sys.stdin.readline()))


if __name__ == "__main__":
    serve(Peer)
