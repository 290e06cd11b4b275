"""Reading a payload that is with its producer, or has moved to Mooncake Store, or moves there meanwhile."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

from ._mooncake_publication import Work
from .errors import Conflict, Deadline, NotFound, StagewireError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._mooncake_backend import Reading
    from ._native import Consumer, Pending, Tensor


class Either:
    """One payload being read, once, as `_native.Consumer` does it: from its producer, and from the store for the rest.

    Args:
        consumer: Reads from the producer.
        elsewhere: What reads from the store, from this chunk on.
    """

    def __init__(self, consumer: Consumer, elsewhere: Callable[[int], Reading]) -> None:
        self._consumer: Consumer | None = consumer
        self._elsewhere = elsewhere
        self._reading: Reading | None = None
        self._next = 0
        self._closed = False
        self._lock = threading.Lock()
        self._one_at_a_time = threading.Lock()
        self._under_way: Pending | Work | None = None
        self._arrivals: queue.SimpleQueue[tuple[int, list[Tensor]] | None] = queue.SimpleQueue()

    def next(self) -> list[Tensor] | None:
        """Reads the next chunk; None after the last one."""
        tensors: list[Tensor] | None = self._read(lambda at: at.start_next())
        if tensors is not None:
            self._arrivals.put((self._next, tensors))
            self._next += 1
        return tensors

    def start_next(self) -> Work:
        return Work(self.next, self._stop)

    def arrived(self) -> tuple[int, list[Tensor]] | None:
        """The next chunk that was read; None where there are no more."""
        return self._arrivals.get()

    def start_arrived(self) -> Work:
        return Work(self.arrived, lambda: self._arrivals.put(None))

    def fetch(self) -> list[Tensor]:
        """Reads all of it."""
        tensors: list[Tensor] = self._read(lambda at: at.start_fetch())
        return tensors

    def start_fetch(self) -> Work:
        return Work(self.fetch, self._stop)

    def close(self) -> None:
        """Gives it up. Nothing is written into the destinations any more when this returns."""
        self._stop()
        with self._one_at_a_time:
            consumer, self._consumer = self._consumer, None
            reading, self._reading = self._reading, None
        for one in (consumer, reading):
            if one is not None:
                one.close()

    def start_close(self) -> Work:
        return Work(self.close, lambda: None)

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            pending = self._under_way
        self._arrivals.put(None)
        if pending is not None:
            pending.cancel()

    def _read(self, start: Callable[[Consumer | Reading], Pending | Work]) -> Any:
        if not self._one_at_a_time.acquire(blocking=False):
            raise Conflict(
                "another thread is reading this payload through the same iterator: call consume again",
                reason="consume.busy",
            )
        try:
            if self._reading is None and self._consumer is not None:
                try:
                    return self._await(start(self._consumer))
                except (NotFound, Unavailable, Deadline) as error:
                    self._consumer.close()
                    self._consumer = None
                    try:
                        self._reading = self._elsewhere(self._next)
                    except StagewireError:
                        # What became of it at its producer says more than that it is not in the store, either.
                        raise error from None
            if self._reading is None:
                raise Conflict("this reader is closed: call consume again", reason="consume.closed")
            return self._await(start(self._reading))
        finally:
            self._one_at_a_time.release()

    def _await(self, pending: Pending | Work) -> Any:
        with self._lock:
            self._under_way = pending
            closed = self._closed
        if closed:
            pending.cancel()
        try:
            pending.wait()
            return pending.take()
        except BaseException:
            pending.cancel()
            raise
        finally:
            with self._lock:
                self._under_way = None
