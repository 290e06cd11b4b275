"""Memory that bytes pass through where they cannot be moved from or to their place."""

from __future__ import annotations

import mmap
import threading
from typing import TYPE_CHECKING, Self

from ._native import Tensor
from .errors import Cancelled, Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._mooncake_client import Until

_MOST = 4


class Staging:
    """A few buffers of one size, made when they are first needed, and larger ones that are made for one use.

    Args:
        nbytes: Size of each.
        prepare: Called with each new one, such as to register it.
        forget: Called with a larger one after its use; it must keep the memory until that has an end.
    """

    def __init__(self, nbytes: int, prepare: Callable[[Tensor], None], forget: Callable[[Tensor], None]) -> None:
        self.nbytes = nbytes
        self._prepare = prepare
        self._forget = forget
        self._free: list[tuple[mmap.mmap, Tensor]] = []
        self._made = 0
        self._changed = threading.Condition()

    def take(self, until: Until, nbytes: int = 0) -> Staged:
        """One of at least so many bytes that nobody uses. It is free again when it is left, and no call holds it.

        Raises:
            Deadline: All are in use until then.
            Cancelled: It was told to stop.
        """
        if nbytes > self.nbytes:
            return Staged(self, *self._make(nbytes))
        with until.waking(self._wake), self._changed:
            free = self._changed.wait_for(lambda: self._free or self._made < _MOST or until.stopped, until.left())
            if until.stopped:
                raise Cancelled("waiting for a staging buffer was given up", reason="operation.cancelled")
            if not free:
                raise Deadline(
                    f"all {_MOST} staging buffers of {self.nbytes} bytes are in use by calls that have not ended",
                    reason="mooncake_store.deadline",
                )
            if self._free:
                return Staged(self, *self._free.pop())
            self._made += 1
        try:
            return Staged(self, *self._make(self.nbytes))
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise

    def _make(self, nbytes: int) -> tuple[mmap.mmap, Tensor]:
        memory = mmap.mmap(-1, nbytes)
        tensor = Tensor.from_buffer(memory)
        self._prepare(tensor)
        return memory, tensor

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _give_back(self, memory: mmap.mmap, tensor: Tensor) -> None:
        if tensor.nbytes > self.nbytes:
            self._forget(tensor)
            return
        with self._changed:
            self._free.append((memory, tensor))
            self._changed.notify()


class Staged:
    """A buffer in use, until everybody who uses it has done so: who took it, and calls that may go on without them.

    Nothing depends on when the last reference to this goes. An error that somebody keeps refers to all that its
    traceback has seen.
    """

    def __init__(self, staging: Staging, memory: mmap.mmap, tensor: Tensor) -> None:
        self.memory = memory
        self.tensor = tensor
        self._staging = staging
        self._users = 1
        self._lock = threading.Lock()

    def hold(self) -> Callable[[], None]:
        """Keeps it in use, until what is returned is called."""
        with self._lock:
            self._users += 1
        return self._leave

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users > 0:
                return
        self._staging._give_back(self.memory, self.tensor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._leave()
