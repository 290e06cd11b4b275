"""Senders and receivers of KV caches for asyncio: what waits is awaited."""

from __future__ import annotations

from ._aio_connector import within
from ._native import KvReceiverRoom as NativeReceiverRoom
from ._native import KvSenderRoom as NativeSenderRoom
from .errors import StagewireError
from .kv._errors import as_incompatible
from .kv._receiver import BaseReceiver, Receiving
from .kv._room import Native, Room
from .kv._sender import BaseSender, Sending


class Awaited(Room[Native]):
    """Its waiting."""

    __slots__ = ()

    async def wait(self, timeout: float | None = None) -> bool:
        """See `stagewire.kv.SenderRoom.wait`."""
        finished = self._native.finished()
        try:
            if not await within(finished, timeout):
                return False
            finished.take()
            return True
        except StagewireError as error:
            raise as_incompatible(error) from None
        finally:
            finished.cancel()

    async def wait_released(self, timeout: float | None = None) -> bool:
        """See `stagewire.kv.SenderRoom.wait_released`."""
        released = self._native.released()
        try:
            return await within(released, timeout)
        finally:
            released.cancel()


class KvSenderRoom(Sending, Awaited[NativeSenderRoom]):
    """`stagewire.kv.SenderRoom` for asyncio."""

    __slots__ = ()


class KvReceiverRoom(Receiving, Awaited[NativeReceiverRoom]):
    """`stagewire.kv.ReceiverRoom` for asyncio."""

    __slots__ = ()


class KvSender(BaseSender[KvSenderRoom]):
    """`stagewire.kv.Sender` for asyncio: its rooms are awaited. Arguments, results and errors are the same."""

    def _made(self, number: int, native: NativeSenderRoom) -> KvSenderRoom:
        return KvSenderRoom(number, native)


class KvReceiver(BaseReceiver[KvReceiverRoom]):
    """`stagewire.kv.Receiver` for asyncio: its rooms are awaited. Arguments, results and errors are the same."""

    def _made(self, number: int, native: NativeReceiverRoom) -> KvReceiverRoom:
        return KvReceiverRoom(number, native)
