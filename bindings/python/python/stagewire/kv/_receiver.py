"""Decode's side."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Generic, TypeVar

from .._arguments import data, flag, seconds
from .._native import KvReceiver, KvReceiverRoom
from ..errors import Unsupported
from ._errors import as_incompatible
from ._rank import Rank
from ._room import Blocking, Room
from ._values import MOST_WIDE, counts, ordered, size, tables

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ._buffers import Buffers
    from ._connector import Connector
    from ._geometry import Engine
    from ._values import Pages

_Room = TypeVar("_Room", bound=Room[KvReceiverRoom])


class Receiving(Room[KvReceiverRoom]):
    """A room at decode."""

    __slots__ = ()

    @property
    def nbytes(self) -> int:
        """Bytes that have come so far."""
        return self._native.nbytes

    @property
    def aux(self) -> bytes | None:
        """What prefill has sent along, once the room has succeeded."""
        return self._native.aux


class ReceiverRoom(Receiving, Blocking[KvReceiverRoom]):
    """A room at decode. `wait` waits until all pages are here, and prefill has confirmed that they are good."""

    __slots__ = ()


class BaseReceiver(Rank[KvReceiver], abc.ABC, Generic[_Room]):
    """One rank of a decode engine, which reads pages of prefill's caches into its own.

    Args:
        connector: What moves the bytes.
        engine: The engine.
        rank: Its rank, as for `Sender`.
        buffers: The rank's memory, as for `Sender`; it is written to.
        heartbeat: Seconds in which a sender must let hear of itself.
        misses: How many such times may pass in silence before the next one is the last.

    Raises:
        Invalid: The buffers do not fit the engine, are not contiguous, or are read-only (``kv.buffers``).
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
    ) -> None:
        super().__init__(KvReceiver, connector, engine, rank, buffers, heartbeat, misses)

    def writers(self, sender: bytes) -> list[int]:
        """Ranks of prefill that this one needs bytes of, where `sender` is the handle of any rank there.

        Raises:
            Incompatible: The engines cannot hand over to each other.
        """
        try:
            return self._native.writers(data("sender", sender))
        except Unsupported as error:
            raise as_incompatible(error) from None

    def room(
        self,
        room: int,
        senders: Iterable[bytes],
        seq_len: int,
        *,
        pages: Pages,
        prefix: Mapping[str, int] | None = None,
        exact_window: bool = False,
        life: int = 0,
        deadline: float = 60.0,
    ) -> _Room:
        """Opens a room, and reads whatever prefill announces into its pages. Returns at once.

        Until the room is released its pages are its own: do not read or write them, nor give them to another room.

        Args:
            room: Its number, the same as at prefill; prefill may open it later.
            senders: Handles of prefill's ranks: of all, or at least of `writers`, where each rank of prefill is some
                rank's writer.
            seq_len: Tokens of the prompt, without the one that prefill samples.
            pages: For each component the page of each logical page of the sequence, -1 where none is needed.
            prefix: Tokens that are here already, whole pages. Of a window, only if its pages were kept.
            exact_window: Read the needed tokens only, in every component, not the rest of their pages.
            life: The same as at prefill.
            deadline: Seconds after which it fails.

        Raises:
            Incompatible: The engines cannot hand over to each other. Other rooms go on.
            Invalid: A sender or a page table is missing. What is wrong with a page fails the room.
            Conflict: A page is still another room's (``kv.page_in_use``).
        """
        number = size("room", room, MOST_WIDE, reason="argument.type")
        try:
            native = self._native.room(
                number,
                size("life", life, MOST_WIDE, reason="argument.type"),
                [data("senders", handle) for handle in ordered("senders", senders)],
                size("seq_len", seq_len, MOST_WIDE, reason="kv.tokens"),
                tables("pages", pages),
                counts("prefix", prefix, "kv.prefix"),
                flag("exact_window", exact_window),
                seconds("deadline", deadline),
            )
        except Unsupported as error:
            raise as_incompatible(error) from None
        return self._made(number, native)

    @abc.abstractmethod
    def _made(self, number: int, native: KvReceiverRoom) -> _Room:
        """The room for the caller."""

    def stats(self) -> Mapping[str, int]:
        """``rooms`` that have pages."""
        return {"rooms": self._native.live()}


class Receiver(BaseReceiver[ReceiverRoom]):
    __doc__ = BaseReceiver.__doc__

    def _made(self, number: int, native: KvReceiverRoom) -> ReceiverRoom:
        return ReceiverRoom(number, native)
