"""What travels in a queue in place of a payload."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Self

from ._native import Handle, Pending, Publication
from ._tensor_header import encode_header
from .errors import Deadline, Invalid, StagewireError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable


class Described:
    """A handle as everybody sees it: names a published payload, says what it is, and is the right to read it."""

    __slots__ = ("_native",)

    def __init__(self, native: Handle) -> None:
        self._native = native

    def native(self) -> Handle:
        """Where the payload is."""
        return self._native

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` made.

        Raises:
            Invalid: These bytes are no handle.
            Unsupported: They are of another version.
            Corrupt: They are truncated or damaged.
        """
        return cls(Handle.from_bytes(bytes(data)))

    def to_bytes(self) -> bytes:
        """The handle as bytes: versioned, with a checksum; no pickle."""
        return self._native.to_bytes()

    @property
    def payload_id(self) -> str:
        """Id of the payload, a UUID."""
        return self._native.payload_id

    @property
    def request_id(self) -> str:
        """The request that the payload belongs to."""
        return self._native.request_id

    @property
    def stage(self) -> str:
        """Role of the connector that published it."""
        return self._native.stage

    @property
    def kind(self) -> str:
        """``embedding``, ``latent``, ``checkpoint``, ``feature`` or ``frames``."""
        return self._native.kind

    @property
    def mode(self) -> str:
        """``p2p`` or ``store``."""
        return self._native.mode

    @property
    def metadata(self) -> Any:
        """The producer's metadata."""
        return json.loads(self._native.metadata)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return self._native.nbytes

    @property
    def num_chunks(self) -> int:
        """Number of chunks, at least 1."""
        return self._native.num_chunks

    @property
    def chunk_dim(self) -> int | None:
        """The dimension that it is cut along; None where it is not cut."""
        return self._native.chunk_dim

    @property
    def spec(self) -> dict[str, Any]:
        """``{name: (dtype, shape) | None | [(dtype, shape), ...]}``; dtypes by PyTorch's names: ``bfloat16``."""
        return dict(self._native.entries)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the one tensor.

        Raises:
            Invalid: The payload is a bundle: see `spec`.
        """
        return self._one()[1]

    @property
    def dtype(self) -> str:
        """Dtype of the one tensor, by PyTorch's name.

        Raises:
            Invalid: The payload is a bundle: see `spec`.
        """
        return self._one()[0]

    def tensor_header(self) -> bytes:
        """What the one tensor is, as Mooncake's header of 304 bytes: see `stagewire.mooncake.encode_header`.

        Raises:
            Invalid: The payload is a bundle: see `spec`.
            Unsupported: Mooncake has no such dtype.
        """
        return encode_header(*self._one())

    def _one(self) -> tuple[str, tuple[int, ...]]:
        values = [value for _, value in self._native.entries]
        if len(values) == 1 and isinstance(values[0], tuple):
            return values[0]
        raise Invalid(
            f"payload {self.payload_id} is a bundle of {len(values)} names: see spec", reason="payload.bundle"
        )

    def __repr__(self) -> str:
        return (
            f"StageHandle(request_id={self.request_id!r}, stage={self.stage!r}, kind={self.kind!r}, "
            f"mode={self.mode!r}, nbytes={self.nbytes}, num_chunks={self.num_chunks})"
        )


class Placing:
    """A payload on its way to where its mode says, and what came of it. Threads may share it."""

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self._lock = threading.Lock()
        self._taken = False
        self._stored: Handle | None = None
        self._error: StagewireError | None = None

    def result(self) -> tuple[Handle | None, StagewireError | None]:
        """The handle of where it is now, or the error; once it is over."""
        with self._lock:
            if not self._taken:
                self._taken = True
                try:
                    self._stored = self.pending.take()
                except StagewireError as error:
                    self._error = error
            return self._stored, self._error


class Published(Described):
    """What the producer's handles have in common, whether they block or are awaited."""

    __slots__ = ("_placing", "_publication", "_release")

    def __init__(
        self,
        native: Handle,
        publication: Publication | None = None,
        placing: Placing | None = None,
        release: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(native)
        self._publication = publication
        self._placing = placing
        self._release = release

    def to_bytes(self) -> bytes:
        """The handle as bytes: versioned, with a checksum; no pickle.

        In mode ``store`` it waits until the payload is there.

        Raises:
            StagewireError: What publishing failed with.
        """
        return self.native().to_bytes()

    def native(self) -> Handle:
        """Where the payload is; in mode ``store`` it waits until it is there."""
        if self._placing is None:
            return self._native
        self._placing.pending.wait(None)
        stored, error = self._placing.result()
        if error is not None or stored is None:
            raise error or AssertionError
        return stored

    @property
    def mode(self) -> str:
        """``p2p`` or ``store``."""
        return super().mode if self._placing is None else "store"

    def done(self) -> bool:
        """Whether publishing is over: the payload is where its mode says, or that failed, or was cancelled."""
        return self._placing is None or self._placing.pending.done()

    def cancel(self) -> bool:
        """Gives the payload up: ends what is under way, and frees the memory that this process holds of it.

        Returns:
            Whether there was something to give up: False where somebody else holds the payload by now, or nobody.
        """
        if self._placing is not None:
            self._placing.pending.cancel()
        return self._release is not None and self._release(self.payload_id)

    def _mine(self) -> Publication:
        if self._publication is None:
            raise Unsupported(
                f"payload {self.payload_id} was published by another handle: only its producer can wait for its end",
                reason="handle.not_mine",
            )
        return self._publication

    def _settled(self) -> None:
        """Raises what publishing failed with; it is over."""
        if self._placing is not None and (error := self._placing.result()[1]) is not None:
            raise error


class StageHandle(Published):
    """Names a published payload, says what it is, and is the right to read it. Small; put it into any queue.

    It is a secret: whoever has it can read the payload. At the producer it also tells how publishing goes on.
    """

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> bool:
        """At the producer: waits until the payload is where its mode says; at once for ``p2p``.

        Args:
            timeout: Seconds; None is without limit, but for the connector's deadline.

        Returns:
            Whether it is there in time.

        Raises:
            StagewireError: What publishing failed with.
            Cancelled: It was cancelled.
        """
        if self._placing is not None and not self._placing.pending.wait(timeout):
            return False
        self._settled()
        return True

    def exception(self, timeout: float | None = None) -> StagewireError | None:
        """At the producer: waits as `wait` does and returns what publishing failed with; None where it did not.

        Raises:
            Deadline: It is not over in time.
        """
        if self._placing is None:
            return None
        if not self._placing.pending.wait(timeout):
            raise Deadline(
                f"request {self.request_id!r}: publishing is not over after {timeout} s", reason="publish.deadline"
            )
        return self._placing.result()[1]

    def wait_released(self, timeout: float | None = None) -> bool:
        """At the producer: waits until the payload was consumed, released or has expired.

        Args:
            timeout: Seconds; None is without limit.

        Returns:
            Whether that happened in time.

        Raises:
            Unsupported: This handle came from another process.
        """
        return self._mine().wait_released(timeout)
