"""What prefill does in a process of its own: the ranks of an engine, their caches and rooms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kv_cache import PAGE, PAGES, Cache, engine, tables
from stagewire import kv

if TYPE_CHECKING:
    from collections.abc import Sequence

_PREFILL: list[Prefill] = []


class Prefill:
    """The ranks of one engine, each with a sender."""

    def __init__(self, run_dir: str, made: kv.Engine, transports: Sequence[str], **options: Any) -> None:
        self.connector = kv.Connector("prefill", transports=transports, run_dir=run_dir)
        shared = self.connector if transports[0] == "shm" else None
        self.caches = [Cache(made, rank, shared) for rank in range(made.tp_size)]
        self.senders = [kv.Sender(self.connector, made, cache.rank, cache.buffers, **options) for cache in self.caches]
        self.rooms: dict[int, list[kv.SenderRoom]] = {}

    def open(self, room: int, seq_len: int, deadline: float = 30.0) -> None:
        self.rooms[room] = [sender.room(room, seq_len, deadline=deadline) for sender in self.senders]

    def send(
        self, room: int, seed: int, lo: int, hi: int, *, seq_len: int, first: int = 1, aux: bytes | None = None
    ) -> None:
        """Computes the tokens ``[lo, hi)`` and announces them."""
        pages = tables(self.caches[0].engine, seq_len, first)
        last = hi == seq_len
        part = {"full": pages["full"][lo // PAGE : -(-hi // PAGE)]}
        if last and "swa" in pages:
            part["swa"] = [page for page in pages["swa"] if page >= 0]
        for cache, made in zip(self.caches, self.rooms[room], strict=True):
            cache.fill(seed, pages, 0 if last else lo, hi)
            made.send((lo, hi), part, last=last, aux=aux if last else None)

    def abort(self, room: int, message: str) -> None:
        for made in self.rooms[room]:
            made.abort(message)

    def close(self) -> None:
        for sender in self.senders:
            sender.close()
        self.connector.close()


def start(run_dir: str, tp_size: int, transports: Sequence[str], *, pages: int = PAGES, **options: Any) -> list[bytes]:
    """Starts prefill, in place of what was there, and returns the handles of its ranks."""
    while _PREFILL:
        _PREFILL.pop().close()
    _PREFILL.append(Prefill(run_dir, engine(tp_size, pages=pages), transports, **options))
    return [sender.handle for sender in _PREFILL[0].senders]


def do(what: str, *arguments: Any, **options: Any) -> None:
    """Calls a method of prefill."""
    getattr(_PREFILL[0], what)(*arguments, **options)


def serve(room: int, seed: int, seq_len: int, cuts: Sequence[int], first: int = 1, aux: bytes | None = None) -> None:
    """Opens a room and announces all of it, chunk by chunk."""
    _PREFILL[0].open(room, seq_len)
    for lo, hi in zip([0, *cuts], [*cuts, seq_len], strict=True):
        _PREFILL[0].send(room, seed, lo, hi, seq_len=seq_len, first=first, aux=aux)


def released(room: int, timeout: float = 20.0) -> list[str]:
    """How the room ended on each rank, once its pages are free."""
    rooms = _PREFILL[0].rooms.pop(room)
    assert all(made.wait_released(timeout) for made in rooms)
    return [made.phase if made.failure is None else f"{made.failure.reason}: {made.failure}" for made in rooms]


def stats() -> list[dict[str, int]]:
    return [dict(sender.stats()) for sender in _PREFILL[0].senders]
