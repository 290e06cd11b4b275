"""Memory that bytes pass through where they cannot be moved from or to their place."""

from __future__ import annotations

import mmap
import threading
import time
from typing import TYPE_CHECKING

from ._native import Tensor
from .errors import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

_MOST = 4


class Staging:
    """A few buffers of one size, made when they are first needed.

    Args:
        nbytes: Size of each.
        prepare: Called with address and size of each new one, such as to register it.
    """

    def __init__(self, nbytes: int, prepare: Callable[[int, int], None] | None = None) -> None:
        self.nbytes = nbytes
        self._prepare = prepare
        self._free: list[Tensor] = []
        self._made = 0
        self._changed = threading.Condition()

    def take(self, until: float) -> Staged:
        """One that nobody uses. It is free again when the last reference to it is gone.

        Raises:
            Deadline: All are in use until then.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._made < _MOST, max(0.0, until - time.monotonic())):
                raise Deadline(
                    f"all {_MOST} staging buffers of {self.nbytes} bytes are in use by calls that have not ended",
                    reason="mooncake_store.deadline",
                )
            if self._free:
                return Staged(self, self._free.pop())
            self._made += 1
        try:
            tensor = Tensor.from_buffer(mmap.mmap(-1, self.nbytes))
            if self._prepare is not None:
                self._prepare(tensor.data_ptr, tensor.nbytes)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise
        return Staged(self, tensor)

    def _give_back(self, tensor: Tensor) -> None:
        with self._changed:
            self._free.append(tensor)
            self._changed.notify()


class Staged:
    """A buffer in use, for as long as this is referred to: also by a call that nobody waits for any more."""

    __slots__ = ("_staging", "tensor")

    def __init__(self, staging: Staging, tensor: Tensor) -> None:
        self._staging = staging
        self.tensor = tensor

    def __del__(self) -> None:
        self._staging._give_back(self.tensor)
