"""What the rooms of both sides have in common, whether they block or are awaited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar, cast

from .._arguments import text
from .._handle import limit
from ..errors import StagewireError
from ._errors import as_incompatible

if TYPE_CHECKING:
    from .._native import KvReceiverRoom, KvSenderRoom, Pending

Phase: TypeAlias = Literal["bootstrapping", "waiting", "transferring", "success", "failed"]
"""How far a room is: the sides have not all met; they have, and nothing is announced; chunks are; the other side has
everything, or everything is here; it has ended for a reason."""

Native = TypeVar("Native", "KvSenderRoom", "KvReceiverRoom")


class Room(Generic[Native]):
    """One request's cache on its way. A room that is dropped before it has ended fails.

    Attributes:
        id: Its number, the same on both sides.
    """

    __slots__ = ("_native", "id")

    def __init__(self, number: int, native: Native) -> None:
        self.id = number
        self._native: Native = native

    @property
    def phase(self) -> Phase:
        """How far it is. It never goes back, and stays ``failed`` once it is."""
        return cast("Phase", self._native.phase)

    @property
    def failure(self) -> StagewireError | None:
        """Why it failed, if it has."""
        failure = self._native.failure
        return as_incompatible(failure) if isinstance(failure, StagewireError) else None

    def abort(self, message: str = "the caller gave it up") -> None:
        """Ends it, unless it has ended; the other side is told `message`.

        Its pages are free once it is `released`, not before.
        """
        self._native.abort("cancelled", "kv.aborted", f"room {self.id}: {text('message', message)}")

    @property
    def released(self) -> bool:
        """Whether its pages may be used for something else: it has ended, and nobody reads or writes them any more."""
        return self._native.is_released

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id}, phase={self.phase!r})"


class Blocking(Room[Native]):
    """Its waiting."""

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it has succeeded; false where that is not within `timeout` seconds.

        Raises:
            StagewireError: It failed; class and reason are those of what happened, here or at the other side.
        """
        try:
            return _within(self._native.finished(), timeout)
        except StagewireError as error:
            raise as_incompatible(error) from None

    def wait_released(self, timeout: float | None = None) -> bool:
        """Waits until it is `released`; false where that is not within `timeout` seconds."""
        return _within(self._native.released(), timeout)


def _within(pending: Pending, timeout: float | None) -> bool:
    try:
        if not pending.wait(limit(timeout)):
            return False
        pending.take()
        return True
    finally:
        pending.cancel()
