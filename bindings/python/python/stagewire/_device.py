"""Tensors on a CUDA device: copied once into shared memory, behind what their producer has queued for them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ._arguments import printable
from ._bundle import cut, each
from .errors import Internal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ._native import Publication


def cuda() -> Any:
    """``torch.cuda``; whoever has a tensor on a device has imported it."""
    return sys.modules["torch"].cuda


Events = dict[Any, Any]
"""How far the stream of each device must have come."""


def moments(sources: Iterable[Any]) -> Events:
    """What this thread has queued for the devices of these tensors so far."""
    events: Events = {}
    for source in sources:
        if source.device not in events:
            events[source.device] = cuda().Event()
            events[source.device].record(cuda().current_stream(source.device))
    return events


def on_devices(bundle: Mapping[str, Any]) -> list[Any]:
    """The tensors of a bundle that are on a device."""
    return [value for value in each(bundle) if getattr(value, "is_cuda", False)]


class Copier:
    """A thread of one connector that copies from devices, in the order in which it was told to.

    Attributes:
        copies: Tensors copied so far.
        copied_bytes: Their bytes.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.copied_bytes = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="stagewire-device")
        self._streams: dict[Any, Any] = {}

    def submit(self, work: Callable[[], None]) -> concurrent.futures.Future[None]:
        """Does it after everything before."""
        return self._pool.submit(work)

    def stream(self, device: Any) -> Any:
        """The side stream of a device."""
        if device not in self._streams:
            self._streams[device] = cuda().Stream(device)
        return self._streams[device]

    def close(self) -> None:
        """Waits for what was told."""
        self._pool.shutdown()


class Staging:
    """The tensors of one payload that are on a device, and their places in shared memory.

    Args:
        copier: Who copies.
        allocate: Makes the places.
        events: What has to be done on the devices before anything is copied; by default what is queued there when a
            chunk is shown.
    """

    def __init__(
        self, copier: Copier, allocate: Callable[[tuple[int, ...], Any], Any], events: Events | None = None
    ) -> None:
        self._copier = copier
        self._allocate = allocate
        self._events = events
        # Which tensor of the payload it is, where it is, and where it goes.
        self._tensors: list[tuple[int, Any, Any]] = []
        self._is_used = False
        self._chunks = 0
        self._asked: set[int] = set()
        self._shown = 0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk was said to be ready, so that each of them is shown in its time."""
        return 0 < self._chunks <= len(self._asked)

    def take(self, ordinal: int, source: Any) -> Any:
        """The place in shared memory of the payload's tensor `ordinal`."""
        host = self._allocate(tuple(source.shape), source.dtype)
        self._tensors.append((ordinal, source, host))
        self._is_used = True
        return host

    def __bool__(self) -> bool:
        return self._is_used

    def begin(self, chunks: int) -> None:
        """What was taken belongs to a payload of so many chunks, which is published by now."""
        self._chunks = chunks
        self._copier.copies += len(self._tensors)
        self._copier.copied_bytes += sum(source.nbytes for _, source, _ in self._tensors)

    def ready(self, publication: Publication, index: int) -> None:
        """Shows chunk `index` once the current streams have come so far, and its bytes are copied."""
        if index >= self._chunks:
            publication.ready(index)  # which says how many there are
        if index in self._asked:
            return
        self._asked.add(index)
        events = self._events if self._events is not None else moments(source for _, source, _ in self._tensors)
        self._copier.submit(lambda: self._show(publication, index, events))

    def fill(self) -> None:
        """Copies all of it, and waits for that.

        Raises:
            Internal: It cannot be copied.
        """
        events = self._events if self._events is not None else moments(source for _, source, _ in self._tensors)
        try:
            self._copier.submit(lambda: self._copy(events, None, [])).result()
        except Exception as error:  # whatever the driver says
            raise _failed(error) from error
        self._tensors.clear()

    def _copy(self, events: Events, dim: int | None, slices: list[tuple[int, int]]) -> None:
        for ordinal, source, host in self._tensors:
            stream = self._copier.stream(source.device)
            stream.wait_event(events[source.device])
            with cuda().stream(stream), _pinned(host):
                if dim is None:
                    host.copy_(source)
                else:
                    cut(host, dim, *slices[ordinal]).copy_(cut(source, dim, *slices[ordinal]))

    def _show(self, publication: Publication, index: int, events: Events) -> None:
        try:
            self._copy(events, publication.handle.chunk_dim, publication.handle.chunk_slices(index))
            publication.ready(index)
        except Exception as error:  # the consumer is to know
            failed = _failed(error)
            with contextlib.suppress(Exception):
                publication.fail(failed.error_class, failed.reason, failed.message)
        self._shown += 1
        if self._shown == self._chunks:
            self._tensors.clear()  # the producer's memory is its own again


def _failed(error: Exception) -> Internal:
    return Internal(f"{type(error).__name__}: {printable(error)}", reason="tensor.staging")


@contextlib.contextmanager
def _pinned(host: Any) -> Iterator[None]:
    """Locks the pages while the device writes to them: it is faster, and works without."""
    runtime = cuda().cudart()
    locked = host.nbytes > 0 and int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)) == 0
    try:
        yield
    finally:
        if locked:
            runtime.cudaHostUnregister(host.data_ptr())
