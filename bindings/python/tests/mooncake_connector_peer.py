"""A consumer on another host: it shares nothing with the producer but the master."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import peers

peers.use_mooncake()

from mooncake_child import serve  # noqa: E402
from stagewire import _mooncake_claim  # noqa: E402
from stagewire.diffusion import DiffusionConnector, StageHandle, StagePayload, TransferMode  # noqa: E402


def pattern(seed: int) -> Any:
    """Eight rows that differ from seed to seed."""
    import torch

    return torch.randint(0, 256, (8, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Peer:
    """The commands, by name."""

    def __init__(
        self,
        master: str,
        mode: TransferMode = "store",
        claim_lasts: float | None = None,
        deadline: float = 20.0,
        **options: Any,
    ) -> None:
        if claim_lasts is not None:
            _mooncake_claim.LASTS = claim_lasts
        config = {"backend": "mooncake", "master": master, **options}
        self.connector = DiffusionConnector(
            "decode", mode, store_config=config, run_dir=tempfile.mkdtemp(prefix="sw-"), deadline=deadline
        )
        self.reading: Any = None
        self.handle: Any = None

    def address(self) -> str:
        return self.connector.address.hex()

    def publish(self, seed: int, lease: str, consumer: str) -> str:
        """Publishes eight chunks for a consumer."""
        payload = StagePayload(request_id=f"r{seed}", tensor=pattern(seed), num_chunks=8, lease=lease)
        self.handle = self.connector.publish(payload, consumer=bytes.fromhex(consumer))
        data: bytes = self.handle.to_bytes()
        return data.hex()

    def way(self) -> list[str]:
        """Which way what was published last goes, and why."""
        return [self.handle.mode, self.handle.mode_reason]

    def stats(self) -> dict[str, int]:
        return self.connector.stats()

    def live(self) -> int:
        return len(self.connector.live())

    def release(self, data: str) -> None:
        self.connector.release(bytes.fromhex(data))

    def consume(self, data: str, into: bool) -> dict[str, Any]:
        """The shapes of all chunks, in order, and the sum and the hash of what came."""
        import torch

        handle = StageHandle.from_bytes(bytes.fromhex(data))
        dst: Any = None
        if into:
            dst = torch.zeros(handle.shape, dtype=getattr(torch, handle.dtype))
        shapes, bytes_ = [], b""
        for chunk in self.connector.consume(handle, dst=dst, framework=None if into else "torch"):
            shapes.append(list(chunk.shape))
            bytes_ += chunk.contiguous().view(torch.uint8).numpy().tobytes()
        return {"shapes": shapes, "bytes": bytes_.hex(), "stats": self.connector.stats()}

    def fetch(self, data: str) -> dict[str, Any]:
        found = self.connector.fetch(bytes.fromhex(data), framework="torch")
        return {name: None if value is None else str(value) for name, value in found.items()}

    def begin(self, data: str) -> list[int]:
        """The shape of the first chunk, and no more."""
        self.reading = self.connector.consume(bytes.fromhex(data), framework="torch")
        return list(next(self.reading).shape)

    def end(self) -> int:
        """How many more chunks there were."""
        return sum(1 for _ in self.reading)

    def rest(self) -> str:
        """The bytes of the other chunks."""
        return b"".join(chunk.numpy().tobytes() for chunk in self.reading).hex()

    def give_up(self) -> None:
        self.reading.close()

    def die_before_removing(self) -> None:
        """From now on this process ends at once where it would remove what it has read."""
        store: Any = self.connector._store

        def remove(*_: object, **__: object) -> None:
            # The first process of a host of its own cannot kill itself.
            os._exit(1)

        store._store.remove = remove


if __name__ == "__main__":
    serve(Peer)
