"""The connector for asyncio. What waits, waits in the runtime of this package: no thread is taken for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

from . import diffusion
from ._handle import Described, Published
from ._stream import Stream
from .errors import StagewireError, Unsupported

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from ._bundle import Framework
    from ._consume import Reader
    from ._native import Pending, Registered
    from ._payload import StagePayload


async def over(pending: Pending) -> None:
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


async def result(pending: Pending) -> Any:
    """Waits for what comes out, and ends it where the task is cancelled."""
    try:
        await over(pending)
    except asyncio.CancelledError:
        pending.cancel()
        raise
    return pending.take()


async def _within(pending: Pending, timeout: float | None) -> bool:
    try:
        await asyncio.wait_for(over(pending), timeout)
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
            if not await _within(settling, timeout):
                return False
            settling.take()
            return True
        finally:
            settling.cancel()

    async def exception(self, timeout: float | None = None) -> StagewireError | None:
        """See `stagewire.diffusion.StageHandle.exception`."""
        try:
            in_time = await self.wait(timeout)
        except StagewireError as error:
            return error
        if not in_time:
            raise self._late(timeout)
        return None

    async def wait_released(self, timeout: float | None = None) -> bool:
        """See `stagewire.diffusion.StageHandle.wait_released`."""
        released = self._mine().released()
        try:
            return await _within(released, timeout)
        finally:
            released.cancel()

    async def wait_unread(self, timeout: float | None = None) -> bool:
        """See `stagewire.diffusion.StageHandle.wait_unread`."""
        unread = self._mine().unread()
        try:
            return await _within(unread, timeout)
        finally:
            unread.cancel()


class StreamingPublish(Stream[StageHandle]):
    """`stagewire.diffusion.StreamingPublish` for asyncio: ``async with conn.open(payload) as stream``."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)


class DiffusionConnector:
    """`stagewire.diffusion.DiffusionConnector` for asyncio. Arguments, results and errors are the same.

    Cancelling a task that consumes lets go of the payload at once; another consumer may then begin at its chunk 0.
    """

    def __init__(
        self,
        role: str,
        transfer_mode: diffusion.TransferMode = "auto",
        store_config: Mapping[str, Any] | None = None,
        te_config: Mapping[str, Any] | None = None,
        *,
        network: Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        arena_bytes: int | str = "1GiB",
        deadline: float = 30.0,
        verify: bool = False,
    ) -> None:
        self._blocking = diffusion.DiffusionConnector(
            role,
            transfer_mode,
            store_config,
            te_config,
            network=network,
            run_dir=run_dir,
            arena_bytes=arena_bytes,
            deadline=deadline,
            verify=verify,
        )
        if self._blocking._store is not None:
            self._blocking.close()
            raise Unsupported(
                "payloads in Mooncake Store are for the blocking connector, stagewire.diffusion.DiffusionConnector",
                reason="connector.config",
            )

    @property
    def address(self) -> bytes:
        """See `stagewire.diffusion.DiffusionConnector.address`."""
        return self._blocking.address

    async def publish(
        self,
        payload: StagePayload,
        *,
        consumer: bytes | None = None,
        strict: bool = False,
        expires: float | None = None,
    ) -> StageHandle:
        """See `stagewire.diffusion.DiffusionConnector.publish`. What has to be copied is copied by a thread."""
        start = self._blocking._publish
        publication = await asyncio.to_thread(start, payload, consumer=consumer, strict=strict, expires=expires)
        return StageHandle(publication.handle, publication, self._blocking._native.release_own)

    def open(
        self, payload: StagePayload, *, consumer: bytes | None = None, expires: float | None = None
    ) -> StreamingPublish:
        """See `stagewire.diffusion.DiffusionConnector.open`."""
        publication, staging = self._blocking._open(payload, consumer=consumer, expires=expires)
        handle = StageHandle(publication.handle, publication, self._blocking._native.release_own)
        return StreamingPublish(publication, handle, staging)

    def consume(
        self,
        handle: Described | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
        on_chunk: Callable[[int, Any], object] | None = None,
    ) -> AsyncIterator[Any]:
        """See `stagewire.diffusion.DiffusionConnector.consume`: ``async for chunk in conn.consume(handle)``."""
        return _chunks(self._blocking._reader(handle, dst, framework, deadline), on_chunk)

    async def fetch(
        self,
        handle: Described | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
    ) -> Any:
        """See `stagewire.diffusion.DiffusionConnector.fetch`."""
        reader = self._blocking._reader(handle, dst, framework, deadline)
        try:
            return reader.all(await result(reader.consumer.start_fetch()))
        finally:
            await result(reader.consumer.start_close())

    def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, framework: Framework | None = None) -> Any:
        """See `stagewire.diffusion.DiffusionConnector.allocate`."""
        return self._blocking.allocate(shape, dtype, framework=framework)

    def register(self, tensor: Any) -> Registered:
        """See `stagewire.diffusion.DiffusionConnector.register`."""
        return self._blocking.register(tensor)

    async def release(self, handle: Described) -> None:
        """See `stagewire.diffusion.DiffusionConnector.release`."""
        await asyncio.to_thread(self._blocking.release, handle)

    def live(self) -> list[str]:
        """See `stagewire.diffusion.DiffusionConnector.live`."""
        return self._blocking.live()

    def stats(self) -> dict[str, int]:
        """See `stagewire.diffusion.DiffusionConnector.stats`."""
        return self._blocking.stats()

    async def close(self) -> None:
        """See `stagewire.diffusion.DiffusionConnector.close`."""
        await asyncio.to_thread(self._blocking.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


async def _chunks(reader: Reader, on_chunk: Callable[[int, Any], object] | None) -> AsyncIterator[Any]:
    try:
        index = 0
        while (tensors := await result(reader.consumer.start_next())) is not None:
            yield reader.chunk(index, tensors, on_chunk)
            index += 1
    finally:
        await result(reader.consumer.start_close())
