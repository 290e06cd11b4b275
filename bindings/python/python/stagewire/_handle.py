"""What travels in a queue in place of a payload."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, Self

from . import _arguments
from ._native import Handle
from ._tensor_header import encode_header
from .errors import Conflict, Deadline, Invalid, StagewireError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._mooncake_guard import Guarded
    from ._mooncake_publication import Placing
    from ._native import Publication


@contextlib.contextmanager
def naming(request: str, stage: str, chunk: str = "") -> Iterator[None]:
    """Errors say whose payload it is, where they do not yet."""
    try:
        yield
    except StagewireError as error:
        if error.message.startswith("request "):
            raise
        where = f'request "{request}", stage {stage}{chunk and f", chunk {chunk}"}'
        details = {"request": request, "stage": stage, **error.details}
        raise type(error)(f"{where}: {error.message}", reason=error.reason, details=details) from error.__cause__


class Described:
    """A handle as everybody sees it: names a published payload, says what it is, and is the right to read it."""

    __slots__ = ("_native",)

    def __init__(self, native: Handle) -> None:
        self._native = native

    def native(self) -> Handle:
        """It, once it says where the payload is."""
        return self._native

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Reads what `to_bytes` made.

        Raises:
            Invalid: These bytes are no handle.
            Unsupported: They are of another version.
            Corrupt: They are truncated or damaged.
        """
        return cls(Handle.from_bytes(_arguments.data("handle", data)))

    def to_bytes(self) -> bytes:
        """The handle as bytes: versioned, with a checksum; no pickle.

        Of a payload on its way into Mooncake Store that is possible once it is there: waited for by the blocking
        connector, refused by that for asyncio before `wait` is over.

        Raises:
            StagewireError: What publishing into Mooncake Store failed with.
            Conflict: It is not over.
        """
        return self.native().to_bytes()

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


class Published(Described):
    """What the producer's handles have in common, whether they block or are awaited."""

    __slots__ = ("_publication", "_release")

    def __init__(
        self,
        native: Handle,
        publication: Publication | Placing | Guarded | None = None,
        release: Callable[[Handle], bool] | None = None,
    ) -> None:
        super().__init__(native)
        self._publication = publication
        self._release = release

    def native(self) -> Handle:
        """It, once it says where the payload is."""
        placing = self._publication
        if placing is None or not hasattr(placing, "placed"):
            return self._native
        self._arrive()
        return placing.placed

    def _arrive(self) -> None:
        """Sees to it that publishing is over."""
        if not self.done():
            raise Conflict(
                f"request {self.request_id!r}: the payload is on its way into Mooncake Store, and nobody can be told "
                "yet where it is: await wait() first",
                reason="publish.under_way",
            )

    @property
    def mode(self) -> str:
        """``p2p`` or ``store``; at the producer that of now, for the payload may have fallen back to the store."""
        return self._native.mode if self._publication is None else self._publication.mode[0]

    @property
    def mode_reason(self) -> str | None:
        """Why the payload goes the way that `mode` names; None where another process has published it.

        ``requested``, ``consumer_alive``, ``consumer_unknown``, ``consumer_lost``, ``no_store``, or ``lease``: only
        stores keep payloads of its lease.
        """
        return None if self._publication is None else self._publication.mode[1]

    def done(self) -> bool:
        """Whether publishing is over: the payload is where its mode says, or that failed, or was cancelled."""
        return self._publication is None or self._publication.settled

    def cancel(self) -> bool:
        """Gives the payload up: ends what is under way, and frees the memory that this process holds of it.

        Returns:
            Whether there was something to give up: False where somebody else holds the payload by now, or nobody.
        """
        if self._publication is None or self._release is None:
            return False
        return self._publication.cancel() or self._release(self._native)

    def _mine(self) -> Publication | Placing | Guarded:
        if self._publication is None:
            raise Unsupported(
                f"payload {self.payload_id} was published by another handle: only its producer can wait for its end",
                reason="handle.not_mine",
            )
        return self._publication

    def _late(self, timeout: float | None) -> Deadline:
        return Deadline(
            f"request {self.request_id!r}: publishing is not over after {timeout} s", reason="publish.deadline"
        )


def limit(timeout: float | None) -> float | None:
    """How long somebody waits; None is without limit.

    Raises:
        Invalid: It is no number of seconds.
    """
    return None if timeout is None else _arguments.seconds("timeout", timeout)


class StageHandle(Published):
    """Names a published payload, says what it is, and is the right to read it. Small; put it into any queue.

    It is a secret: whoever has it can read the payload. It may be handed over at once and stays good wherever the
    payload goes. At the producer it also tells how publishing goes on.
    """

    __slots__ = ()

    def wait(self, timeout: float | None = None) -> bool:
        """At the producer: waits until the payload is where its mode says.

        For ``store``, the store has every byte then, and the producer may change or free the tensors, or end. For
        ``p2p``, room is kept in a store, where the mode is ``auto`` and one runs; else it is so at once.

        Args:
            timeout: Seconds; None is without limit, but for the connector's deadline.

        Returns:
            Whether it is there in time.

        Raises:
            StagewireError: What publishing failed with.
            Cancelled: It was cancelled.
        """
        within = limit(timeout)
        with naming(self.request_id, self.stage):
            return self._publication is None or self._publication.wait_settled(within)

    def _arrive(self) -> None:
        self.wait()

    def exception(self, timeout: float | None = None) -> StagewireError | None:
        """At the producer: waits as `wait` does and returns what publishing failed with; None where it did not.

        Raises:
            Deadline: It is not over in time.
        """
        within = limit(timeout)
        try:
            in_time = self.wait(within)
        except StagewireError as error:
            return error
        if not in_time:
            raise self._late(timeout)
        return None

    def wait_released(self, timeout: float | None = None) -> bool:
        """At the producer: waits until this process need not keep the payload any more.

        That is when it was consumed, released or has expired; or went to a store.

        Args:
            timeout: Seconds; None is without limit.

        Returns:
            Whether that happened in time.

        Raises:
            Unsupported: This handle came from another process.
        """
        return self._mine().wait_released(limit(timeout))

    def wait_unread(self, timeout: float | None = None) -> bool:
        """At the producer: waits until nobody reads the payload's memory any more, so that it may be written again.

        That is later than `wait_released` where consumers keep views of the memory itself. Arguments, result and errors
        are the same.
        """
        return self._mine().wait_unread(limit(timeout))
