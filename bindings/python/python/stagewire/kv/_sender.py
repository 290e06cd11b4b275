"""Prefill's side."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Generic, TypeVar

from .._arguments import data, flag, seconds
from .._native import KvSender, KvSenderRoom
from ._rank import Rank
from ._room import Blocking, Room
from ._values import MOST_WIDE, chunk, size, tables

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ._buffers import Buffers
    from ._connector import Connector
    from ._geometry import Engine
    from ._values import Pages

_Room = TypeVar("_Room", bound=Room[KvSenderRoom])


class Sending(Room[KvSenderRoom]):
    """A room at prefill."""

    __slots__ = ()

    def send(
        self, tokens: tuple[int, int], pages: Pages, *, last: bool = False, aux: bytes | bytearray | None = None
    ) -> None:
        """Announces a chunk, whose bytes are there and must not change until the room is released. Returns at once.

        Args:
            tokens: The computed tokens ``(lo, hi)``. A chunk begins where the one before has ended.
            pages: For each component the pages that these tokens are in, from the page of ``lo`` on. Components with a
                window, and state, go with the last chunk: then they have the pages of their window.
            last: No more come: it ends where the prompt does.
            aux: What decode gets besides, with the last chunk, at most 1 MiB: the first token, say.

        Raises:
            Invalid: It is not the next chunk, or has other pages than it should; the room goes on.
            Conflict: The room has ended (``kv.room_ended``).
        """
        self._native.send(
            chunk(tokens), tables("pages", pages), flag("last", last), None if aux is None else data("aux", aux)
        )


class SenderRoom(Sending, Blocking[KvSenderRoom]):
    """A room at prefill. `wait` waits until every rank of decode has what it needs."""

    __slots__ = ()


class BaseSender(Rank[KvSender], abc.ABC, Generic[_Room]):
    """One rank of a prefill engine, whose cache decode may read.

    Args:
        connector: What moves the bytes.
        engine: The engine.
        rank: Its rank: tensor-parallel ranks first, then pipeline stages; offsets of data-parallel replicas do not
            matter.
        buffers: The rank's memory: for each component all buffers of K, layer by layer, then all of V,
            ``[K_0, ..., V_0, ...]`` or ``(ks, vs)``; contiguous tensors of torch, NumPy or whatever has ``__dlpack__``,
            pages without a gap from page 0 on, in host memory. They are kept, and must stay where they are.
        heartbeat: Seconds in which a receiver must let hear of itself.
        misses: How many such times may pass in silence before the next one is the last.
        cut_off: Seconds that readers of a room that has failed have to let go; what they read after that is void.

    Raises:
        Invalid: The buffers do not fit the engine (``kv.buffers``), or are not contiguous.
        Unsupported: They are not in host memory.
    """

    def __init__(
        self,
        connector: Connector,
        engine: Engine,
        rank: int,
        buffers: Buffers,
        *,
        heartbeat: float = 2.0,
        misses: int = 2,
        cut_off: float = 5.0,
    ) -> None:
        cut = seconds("cut_off", cut_off)
        super().__init__(KvSender, connector, engine, rank, buffers, heartbeat, misses, cut)

    @property
    def handle(self) -> bytes:
        """What decode opens its rooms with. It is a secret: whoever has it can read the pages that are announced."""
        return self._native.handle

    def room(self, room: int, seq_len: int, *, life: int = 0, deadline: float = 60.0) -> _Room:
        """Opens a room.

        Args:
            room: Its number, which decode has, too. It may be used again once both sides have ended the room, and at
                once in a later life.
            seq_len: Tokens of the prompt, without the one that prefill samples.
            life: How often prefill has begun this room anew. Rooms of earlier lives fail (``kv.superseded``).
            deadline: Seconds after which it fails where not every rank of decode has what it needs.

        Raises:
            Conflict: This very room has not ended (``kv.room_open``), or a later life of it has begun
                (``kv.superseded``).
        """
        number = size("room", room, MOST_WIDE, reason="argument.type")
        begun = size("life", life, MOST_WIDE, reason="argument.type")
        tokens = size("seq_len", seq_len, MOST_WIDE, reason="kv.tokens")
        return self._made(number, self._native.room(number, begun, tokens, seconds("deadline", deadline)))

    @abc.abstractmethod
    def _made(self, number: int, native: KvSenderRoom) -> _Room:
        """The room for the caller."""

    def stats(self) -> Mapping[str, int]:
        """``rooms`` that are open or still read, ``receivers`` that are known."""
        rooms, receivers = self._native.live()
        return {"rooms": rooms, "receivers": receivers}


class Sender(BaseSender[SenderRoom]):
    __doc__ = BaseSender.__doc__

    def _made(self, number: int, native: KvSenderRoom) -> SenderRoom:
        return SenderRoom(number, native)
