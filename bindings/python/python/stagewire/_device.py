"""Tensors on a CUDA device: copied once into shared memory, behind what their producer has queued for them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ._bundle import cut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._native import Publication


def cuda() -> Any:
    """``torch.cuda``; whoever has a tensor on a device has imported it."""
    return sys.modules["torch"].cuda


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

    def submit(self, work: Callable[[], None]) -> None:
        """Does it after everything before."""
        self._pool.submit(work)

    def stream(self, device: Any) -> Any:
        """The side stream of a device."""
        if device not in self._streams:
            self._streams[device] = cuda().Stream(device)
        return self._streams[device]

    def close(self) -> None:
        """Waits for what was told."""
        self._pool.shutdown()


class Staging:
    """The tensors of one payload that are on a device, and their places in shared memory."""

    def __init__(self, copier: Copier, allocate: Callable[[tuple[int, ...], Any], Any]) -> None:
        self._copier = copier
        self._allocate = allocate
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
        events = {}
        for _, source, _ in self._tensors:
            if source.device not in events:
                events[source.device] = cuda().Event()
                events[source.device].record(cuda().current_stream(source.device))
        self._copier.submit(lambda: self._show(publication, index, events))

    def _show(self, publication: Publication, index: int, events: dict[Any, Any]) -> None:
        try:
            slices = publication.handle.chunk_slices(index)
            dim = publication.handle.chunk_dim
            for ordinal, source, host in self._tensors:
                stream = self._copier.stream(source.device)
                stream.wait_event(events[source.device])
                with cuda().stream(stream), _pinned(host):
                    if dim is None:
                        host.copy_(source)
                    else:
                        cut(host, dim, *slices[ordinal]).copy_(cut(source, dim, *slices[ordinal]))
            publication.ready(index)
        except Exception as error:  # whatever the driver says; the consumer is to know
            with contextlib.suppress(Exception):
                publication.fail("internal", "tensor.staging", f"{type(error).__name__}: {error}")
        self._shown += 1
        if self._shown == self._chunks:
            self._tensors.clear()  # the producer's memory is its own again


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
