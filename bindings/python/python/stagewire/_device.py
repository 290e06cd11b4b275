"""Tensors on a CUDA device: copied once into shared memory, behind what their producer has queued for them."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from ._arguments import printable
from ._bundle import cut, each
from .errors import Cancelled, Deadline, Internal, StagewireError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ._mooncake_client import Until
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


# Seconds between two looks at streams that have not come so far: the first, and after a while.
_PAUSE, _PAUSE_LATER = 0.00005, 0.001


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    events: Events
    run: Callable[[], None]
    give_up: Callable[[Exception], None]


class Copier:
    """A thread of one connector that copies what streams of devices are done with. None waits for another's stream.

    Attributes:
        copies: Tensors copied so far.
        copied_bytes: Their bytes.
    """

    def __init__(self) -> None:
        self.copies = 0
        self.copied_bytes = 0
        self._streams: dict[Any, Any] = {}
        self._waiting: list[_Copy] = []
        self._is_copying = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def submit(self, events: Events, run: Callable[[], None], give_up: Callable[[Exception], None]) -> _Copy:
        """Does it once the streams have come so far, or has it given up: it raises, or it was too late.

        Raises:
            Cancelled: The connector is closed.
        """
        copy = _Copy(events, run, give_up)
        with self._changed:
            if self._closed:
                raise _closed()
            self._waiting.append(copy)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stagewire-device", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return copy

    def withdraw(self, copy: _Copy, error: Exception) -> None:
        """Has it given up, unless it has begun."""
        with self._changed:
            if copy not in self._waiting:
                return
            self._waiting.remove(copy)
            self._changed.notify_all()
        copy.give_up(error)

    def stream(self, device: Any) -> Any:
        """The side stream of a device."""
        if device not in self._streams:
            self._streams[device] = cuda().Stream(device)
        return self._streams[device]

    def close(self, until: float) -> None:
        """Waits for what was told, until then, and gives up the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._changed.wait_for(self._is_idle, max(0.0, until - time.monotonic()))
            late, self._waiting = self._waiting, []
        for copy in late:
            copy.give_up(_closed())

    def _is_idle(self) -> bool:
        return not (self._waiting or self._is_copying)

    def _run(self) -> None:
        pause = _PAUSE
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                waiting = list(self._waiting)
            if any(self._try(copy) for copy in waiting):
                pause = _PAUSE
                continue
            pause = min(2 * pause, _PAUSE_LATER)
            time.sleep(pause)

    def _try(self, copy: _Copy) -> bool:
        """Whether its streams have come so far. It is done then."""
        failed: Exception | None = None
        try:
            if not all(event.query() for event in copy.events.values()):
                return False
        except Exception as error:  # whatever the driver says
            failed = error
        with self._changed:
            if copy not in self._waiting:
                return False
            self._waiting.remove(copy)
            self._is_copying = True
        try:
            if failed is not None:
                raise failed
            copy.run()
        except Exception as error:
            copy.give_up(error)
        finally:
            with self._changed:
                self._is_copying = False
                self._changed.notify_all()
        return True


def _closed() -> Cancelled:
    return Cancelled("the connector was closed before the device was done; make a new one", reason="connector.closed")


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
        self._lock = threading.Lock()
        self._asked: set[int] = set()
        self._over: set[int] = set()

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
        with self._lock:
            if index in self._asked:
                return
            self._asked.add(index)
        self._copier.submit(
            self._moments(), lambda: self._show(publication, index), lambda error: self._fail(publication, index, error)
        )

    def fill(self, until: Until) -> None:
        """Copies all of it, and waits for that. A copy that has begun by then goes on, as a call of `until`.

        Raises:
            Internal: It cannot be copied.
            Deadline: The devices are not done until then.
            Cancelled: The connector is closed, or it was told to stop.
        """
        over, failed = threading.Event(), []

        def end(error: Exception | None = None) -> None:
            if error is None:
                self._tensors.clear()
            else:
                failed.append(error)
            until.end()
            over.set()

        def copy() -> None:
            self._copy(None, [])
            end()

        events, begun = self._moments(), time.monotonic()
        until.begin()
        try:
            submitted = self._copier.submit(events, copy, end)
        except BaseException:
            until.end()
            raise
        with until.waking(over.set):
            over.wait(until.left())
        if until.stopped:
            self._copier.withdraw(submitted, Cancelled("nobody waits for the device any more"))
            raise Cancelled("waiting for the device was given up", reason="operation.cancelled")
        if not over.is_set():
            waited = f"{time.monotonic() - begun:.3f}"
            late = Deadline(
                f"the device was not done with what its streams had queued within {waited} s; it was not stored",
                reason="tensor.device_deadline",
                details={"waited_seconds": waited},
            )
            self._copier.withdraw(submitted, late)
            raise late
        if failed:
            raise _failed(failed[0])

    def _moments(self) -> Events:
        return self._events if self._events is not None else moments(source for _, source, _ in self._tensors)

    def _copy(self, dim: int | None, slices: list[tuple[int, int]]) -> None:
        for ordinal, source, host in self._tensors:
            with cuda().stream(self._copier.stream(source.device)), _pinned(host):
                if dim is None:
                    host.copy_(source)
                else:
                    cut(host, dim, *slices[ordinal]).copy_(cut(source, dim, *slices[ordinal]))

    def _show(self, publication: Publication, index: int) -> None:
        self._copy(publication.handle.chunk_dim, publication.handle.chunk_slices(index))
        publication.ready(index)
        self._end(index)

    def _fail(self, publication: Publication, index: int, error: Exception) -> None:
        failed = _failed(error)  # the consumer is to know
        with contextlib.suppress(Exception):
            publication.fail(failed.error_class, failed.reason, failed.message)
        self._end(index)

    def _end(self, index: int) -> None:
        with self._lock:
            self._over.add(index)
            if len(self._over) == self._chunks:
                self._tensors.clear()  # the producer's memory is its own again


def _failed(error: Exception) -> StagewireError:
    if isinstance(error, StagewireError):
        return error
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
