"""The connector for asyncio. What waits, waits in the runtime of this package: no thread is taken for it."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ._connector import BaseConnector
from ._handle import Described, Published, limit, naming
from ._stream import Stream
from .errors import StagewireError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from ._consume import Reader
    from ._device import Staging
    from ._mooncake_guard import Guarded
    from ._mooncake_publication import Flag, Placing
    from ._native import Pending, Publication
    from ._order import Order

T = TypeVar("T")


async def over(pending: Pending | Flag) -> None:
    """Waits until it is over. Whoever is cancelled meanwhile has not ended it."""
    if pending.done():
        return
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake() -> None:
        # It may have been cancelled before the loop saw the descriptor.
        if not woken.done():
            woken.set_result(None)

    loop.add_reader(pending.fileno(), wake)
    try:
        await woken
    finally:
        loop.remove_reader(pending.fileno())


async def result(pending: Pending | Flag) -> Any:
    """Waits for what comes out, and ends it where the task is cancelled."""
    try:
        await over(pending)
    except asyncio.CancelledError:
        pending.cancel()
        raise
    return pending.take()


async def within(pending: Pending | Flag, timeout: float | None) -> bool:
    """Waits until it is over; false where it is not within `timeout` seconds."""
    try:
        await asyncio.wait_for(over(pending), limit(timeout))
    except TimeoutError:
        return False
    return True


class StageHandle(Published):
    """`stagewire.diffusion.StageHandle` for asyncio: what waits is awaited."""

    __slots__ = ()

    async def wait(self, timeout: float | None = None) -> bool:
        """See `stagewire.diffusion.StageHandle.wait`."""
        if self._publication is None:
            return True
        settling = self._publication.settling()
        try:
            if not await within(settling, timeout):
                return False
            with naming(self.request_id, self.stage):
                settling.take()
            return True
        finally:
            settling.cancel()

    async def exception(self, timeout: float | None = None) -> StagewireError | None:
        """See `stagewire.diffusion.StageHandle.exception`."""
        within = limit(timeout)
        try:
            in_time = await self.wait(within)
        except StagewireError as error:
            return error
        if not in_time:
            raise self._late(timeout)
        return None

    async def wait_released(self, timeout: float | None = None) -> bool:
        """See `stagewire.diffusion.StageHandle.wait_released`."""
        released = self._mine().released()
        try:
            return await within(released, timeout)
        finally:
            released.cancel()

    async def wait_unread(self, timeout: float | None = None) -> bool:
        """See `stagewire.diffusion.StageHandle.wait_unread`."""
        unread = self._mine().unread()
        try:
            return await within(unread, timeout)
        finally:
            unread.cancel()


class StreamingPublish(Stream[StageHandle]):
    """`stagewire.diffusion.StreamingPublish` for asyncio: ``async with conn.open(payload) as stream``."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)


class DiffusionConnector(
    BaseConnector[
        "Coroutine[Any, Any, StageHandle]", StreamingPublish, "AsyncIterator[Any]", "Coroutine[Any, Any, Any]"
    ]
):
    """`stagewire.diffusion.DiffusionConnector` for asyncio. Arguments, results and errors are the same.

    Cancelling a task that consumes lets go of the payload at once; another consumer may then begin at its chunk 0.
    Cancelling one that publishes gives the payload up. What has to be copied is copied by a thread, and so is what
    comes from Mooncake Store.
    """

    async def release(self, handle: Described | bytes) -> None:
        """See `stagewire.diffusion.DiffusionConnector.release`."""
        await asyncio.to_thread(self._release, handle)

    async def close(self) -> None:
        """See `stagewire.diffusion.DiffusionConnector.close`."""
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def _start(self, order: Callable[[], Order]) -> Coroutine[Any, Any, StageHandle]:
        try:
            # Here, where the caller's streams are the current ones.
            return self._publish(order())
        except StagewireError as error:
            return _raise(error)

    async def _publish(self, order: Order) -> StageHandle:
        publication = await _made(lambda: self._put(order), self._give_up)
        return StageHandle(publication.handle, publication, self._release_own)

    def _give_up(self, publication: Publication | Placing | Guarded) -> None:
        if not publication.cancel():
            self._release_own(publication.handle)

    def _stream(self, publication: Publication, staging: Staging) -> StreamingPublish:
        return StreamingPublish(publication, StageHandle(publication.handle, publication, self._release_own), staging)

    def _chunks(self, reader: Reader, on_chunk: Callable[[int, Any], object] | None) -> AsyncIterator[Any]:
        return _chunks(reader, on_chunk)

    async def _whole(self, reader: Callable[[], Reader]) -> Any:
        reading = reader()
        try:
            return reading.all(await result(reading.consumer.start_fetch()))
        finally:
            await result(reading.consumer.start_close())


async def _raise(error: StagewireError) -> Any:
    raise error


async def _made(make: Callable[[], T], undo: Callable[[T], None]) -> T:
    """What a thread makes; undone where the task that waits for it is cancelled."""
    lock = threading.Lock()
    made: list[T] = []
    abandoned = False

    def run() -> None:
        one = make()
        with lock:
            made.append(one)
            late = abandoned
        if late:
            undo(one)

    try:
        await asyncio.to_thread(run)
    except asyncio.CancelledError:
        with lock:
            abandoned = True
            early = made[:]
        for one in early:
            undo(one)
        raise
    return made[0]


async def _chunks(reader: Reader, on_chunk: Callable[[int, Any], object] | None) -> AsyncIterator[Any]:
    telling = None if on_chunk is None else Telling(reader, on_chunk)
    try:
        index = 0
        while (tensors := await result(reader.consumer.start_next())) is not None:
            if telling is not None:
                await telling.wait(index)
            yield reader.chunk(index, tensors)
            index += 1
    finally:
        if telling is not None:
            telling.end()
        await result(reader.consumer.start_close())


class Telling:
    """Calls a function with each chunk as it comes, in the event loop."""

    def __init__(self, reader: Reader, on_chunk: Callable[[int, Any], object]) -> None:
        self._reader = reader
        self._on_chunk = on_chunk
        self._told: set[int] = set()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def wait(self, index: int) -> None:
        """Returns once chunk `index`, which has come, was told; raises what the function has raised."""
        while index not in self._told:
            if self._task.done():
                self._task.result()
                return
            self._changed.clear()
            await self._changed.wait()

    def end(self) -> None:
        """Has no further call begin."""
        self._task.cancel()

    async def _run(self) -> None:
        try:
            while (arrived := await result(self._reader.consumer.start_arrived())) is not None:
                index, tensors = arrived
                self._on_chunk(index, self._reader.chunk(index, tensors))
                self._told.add(index)
                self._changed.set()
        finally:
            # Not done yet: who waits looks again once it is.
            asyncio.get_running_loop().call_soon(self._changed.set)
