"""What goes on in threads, as `_native` shows what goes on in its runtime: one waits for it, or an event loop does."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from ._mooncake_client import Until
from .errors import Cancelled, StagewireError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._native import Handle


class Flag:
    """Something that is over at some time, as `_native.Pending` is. Its descriptor is made for who asks for it."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._ready: int | None = None
        self._telling = threading.Lock()

    def set(self) -> None:
        """From now on it is over."""
        with self._telling:
            self._over.set()
            if self._ready is not None:
                os.eventfd_write(self._ready, 1)

    def fileno(self) -> int:
        with self._telling:
            if self._ready is None:
                self._ready = os.eventfd(1 if self._over.is_set() else 0)
            return self._ready

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def take(self) -> Any:
        """Nothing comes out."""

    def cancel(self) -> None:
        """Nothing: others may wait for it, too."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            if self._ready is not None:
                os.close(self._ready)


class Work(Flag):
    """A call on a thread of its own.

    Args:
        function: What is done.
        stop: Has it end early.
    """

    def __init__(self, function: Callable[[], Any], stop: Callable[[], None]) -> None:
        super().__init__()
        self._function = function
        self._stop = stop
        self._value: Any = None
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="sw-mooncake-read", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        self.set()

    def take(self) -> Any:
        """What it returned, or raised."""
        if self._error is not None:
            raise self._error
        return self._value

    def cancel(self) -> None:
        self._stop()


class _Settling(Flag):
    def __init__(self, placing: Placing) -> None:
        super().__init__()
        self._placing = placing

    def take(self) -> None:
        self._placing.wait_settled(0)


class Placing:
    """A payload on its way into a store, as `_native.Publication` is one.

    Args:
        handle: What it is.
        put: Brings it there, and says where that is. It stops when it is told to.
        within: Seconds that it may take.
        remove: Takes it away again.
        reason: Why it goes there.

    Attributes:
        handle: What it is.
        placed: The same, once it says where it is.
        mode: ``store``, and why.
    """

    def __init__(
        self,
        handle: Handle,
        put: Callable[[Until], Handle],
        within: float,
        remove: Callable[[], object],
        *,
        reason: str,
    ) -> None:
        self.handle = handle
        self.placed = handle
        self.mode = ("store", reason)
        self._until = Until(within)
        self._remove = remove
        self._settled = _Settling(self)
        self._unread = Flag()
        self._lock = threading.Lock()
        self._cancelled = False
        self._error: StagewireError | None = None
        threading.Thread(target=self._run, args=(put,), name="sw-mooncake-put", daemon=True).start()

    def _run(self, put: Callable[[Until], Handle]) -> None:
        placed: Handle | None = None
        error: StagewireError | None = None
        try:
            placed = put(self._until)
        except StagewireError as raised:
            error = raised
        del put
        with self._lock:
            if self._cancelled:
                error = Cancelled(
                    f"payload {self.handle.payload_id} was given up before it was in the store",
                    reason="publish.cancelled",
                )
            elif placed is not None:
                self.placed = placed
            self._error = error
            self._settled.set()
        # A call that goes on without its caller still reads the tensors.
        self._until.when_idle(self._unread.set)
        if error is not None and placed is not None:
            # Too late to stop it, and nobody else knows of it.
            with contextlib.suppress(StagewireError):
                self._remove()

    @property
    def settled(self) -> bool:
        return self._settled.done()

    @property
    def sealed(self) -> bool:
        return True

    def wait_settled(self, timeout: float | None = None) -> bool:
        if not self._settled.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def settling(self) -> Flag:
        return self._settled

    def cancel(self) -> bool:
        """Gives it up; False where it is there, or has failed."""
        with self._lock:
            if self.settled:
                return False
            self._cancelled = True
        self._until.stop()
        return True

    def wait_released(self, timeout: float | None = None) -> bool:
        # This process need not keep it once the store has it.
        return self._settled.wait(timeout)

    def released(self) -> Flag:
        return self._settled

    def wait_unread(self, timeout: float | None = None) -> bool:
        # Consumers read the store's memory.
        return self._unread.wait(timeout)

    def unread(self) -> Flag:
        return self._unread
