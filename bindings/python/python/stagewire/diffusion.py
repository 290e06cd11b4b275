"""Hands tensors from one process to another: publish in one stage, consume in the next.

```python
from stagewire.diffusion import DiffusionConnector, StageHandle, StagePayload

# the denoiser
conn = DiffusionConnector(role="denoise")
handle = conn.publish(StagePayload(request_id="r1", kind="latent", tensor=latents, chunk_dim=2, num_chunks=8))
queue.put(handle.to_bytes())                    # any queue: the handle is small, the tensor stays

# the decoder
conn = DiffusionConnector(role="decode")
handle = StageHandle.from_bytes(queue.get())
dst = torch.empty(handle.shape, dtype=latents.dtype)
for chunk in conn.consume(handle, dst=dst):     # views of dst; without dst, read-only mapped views
    vae.decode_chunk(chunk)
```

Both processes are on one host and use the same run directory. Nothing here needs a server. For
``transfer_mode="store"`` some process of the host keeps a `HostStore`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from . import _native, _rundir, errors
from ._bundle import Imported
from ._consume import Destinations, Reader
from ._native import Connector, Handle, Publication, parse_bytes
from .errors import Invalid, Unsupported

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Mapping

    from ._bundle import Framework

__all__ = ["DiffusionConnector", "HostStore", "StageHandle", "StagePayload", "StreamingPublish", "TransferMode"]

TransferMode: TypeAlias = Literal["p2p", "store"]
"""``p2p``: the consumer reads the producer's memory. ``store``: a store takes a copy, and the producer is free."""

_NO_NAME = "tensor"
_MAX_CHUNKS = 65_536
_LEASES = ("delete_on_consume",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePayload:
    """What is published: a tensor, or a named bundle of them, and how it is cut.

    Attributes:
        request_id: The request that it belongs to; shown in errors.
        kind: ``embedding``, ``latent``, ``checkpoint``, ``feature`` or ``frames``.
        tensor: One tensor in host memory, any shape and dtype; or give `tensors`.
        tensors: ``{name: tensor | None | [tensor, ...]}``.
        metadata: Any JSON-like value; at most 16 MiB as JSON.
        chunk_dim: The dimension that every tensor is cut along: 2 cuts ``[B, C, T, H, W]`` in time.
        num_chunks: Number of chunks, 1 to that dimension's extent. Uneven where need be: 21 into 8 is 3 3 3 3 3 2 2 2.
        lease: ``delete_on_consume``: the payload is deleted once one consumer has consumed it.
    """

    request_id: str
    kind: str = "latent"
    tensor: Any = None
    tensors: Mapping[str, Any] | None = None
    metadata: Any = None
    chunk_dim: int = 0
    num_chunks: int = 1
    lease: str = "delete_on_consume"

    def _bundle(self) -> Mapping[str, Any]:
        if (self.tensor is None) == (self.tensors is None):
            given = "neither" if self.tensor is None else "both"
            raise Invalid(
                f"request {self.request_id!r}: give tensor= or tensors=, not {given}", reason="payload.bundle"
            )
        return {_NO_NAME: self.tensor} if self.tensors is None else self.tensors

    def _chunking(self) -> tuple[int, int] | None:
        if not 1 <= self.num_chunks <= _MAX_CHUNKS:
            raise Invalid(
                f"request {self.request_id!r}: num_chunks is {self.num_chunks}; it must be 1 to {_MAX_CHUNKS}",
                reason="payload.chunks",
                details={"num_chunks": str(self.num_chunks)},
            )
        if self.chunk_dim < 0:
            raise Invalid(
                f"request {self.request_id!r}: chunk_dim is {self.chunk_dim}; dimensions count from 0, outermost first",
                reason="payload.chunks",
                details={"chunk_dim": str(self.chunk_dim)},
            )
        return None if self.num_chunks == 1 else (self.chunk_dim, self.num_chunks)


class StageHandle:
    """Names a published payload, says what it is, and is the right to read it. Small; put it into any queue.

    It is a secret: whoever has it can read the payload.
    """

    __slots__ = ("_native", "_publication")

    def __init__(self, native: Handle, publication: Publication | None = None) -> None:
        self._native = native
        self._publication = publication

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

    def _one(self) -> tuple[str, tuple[int, ...]]:
        values = [value for _, value in self._native.entries]
        if len(values) == 1 and isinstance(values[0], tuple):
            return values[0]
        raise Invalid(
            f"payload {self.payload_id} is a bundle of {len(values)} names: see spec", reason="payload.bundle"
        )

    def wait_released(self, timeout: float | None = None) -> bool:
        """At the producer: waits until the payload was consumed, released or has expired.

        Args:
            timeout: Seconds; None is without limit.

        Returns:
            Whether that happened in time.

        Raises:
            Unsupported: This handle came from another process.
        """
        if self._publication is None:
            raise Unsupported(
                f"payload {self.payload_id} was published by another handle: only its producer can wait for its end",
                reason="handle.not_mine",
            )
        return self._publication.wait_released(timeout)

    def __repr__(self) -> str:
        return (
            f"StageHandle(request_id={self.request_id!r}, stage={self.stage!r}, kind={self.kind!r}, "
            f"mode={self.mode!r}, nbytes={self.nbytes}, num_chunks={self.num_chunks})"
        )


class StreamingPublish:
    """A payload whose chunks become visible one by one, while later ones are still being computed.

    As a context manager: leaving it by an exception fails the payload, and the consumer gets that reason at once.
    """

    def __init__(self, publication: Publication) -> None:
        self._publication = publication
        self.handle = StageHandle(publication.handle, publication)

    def ready(self, index: int) -> None:
        """Shows chunk `index`; its bytes must not change any more. Consumers see chunks in order.

        Raises:
            Invalid: There is no such chunk.
            Conflict: The payload has ended.
        """
        if index < 0:
            raise Invalid(f"chunk {index} does not exist: chunks count from 0", reason="payload.chunks")
        self._publication.ready(index)

    def fail(self, reason: str | BaseException) -> None:
        """Gives up: consumers get this reason instead of more chunks."""
        if isinstance(reason, errors.StagewireError):
            self._publication.fail(reason.error_class, reason.reason, reason.message)
        elif isinstance(reason, BaseException):
            self._publication.fail("internal", "stage.exception", f"{type(reason).__name__}: {reason}")
        else:
            self._publication.fail("internal", "payload.failed", reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(error)
        if error is not None or not self._publication.sealed:
            self._publication.close()


class DiffusionConnector:
    """Publishes payloads of this process and consumes those of others.

    Threads may share it. Tensors that are published must not be written to until they are released: consumers read
    them where they are.

    Args:
        role: Name of this stage: 1 to 64 of a-z, 0-9, ``-`` and ``_``.
        transfer_mode: ``p2p``: consumers read this process's memory. ``store``: a `HostStore` of the same run directory
            takes a copy, so that this process may change or free the tensors, or end, once `publish` has returned.
        run_dir: Folder through which processes find each other; default ``STAGEWIRE_RUN_DIR``, else the usual place.
        arena_bytes: Most bytes of shared memory, as a number or as ``"512MiB"``.
        deadline: Seconds that a consumer waits for bytes, and that a store may take.
        borrow: Whether consumers may read tensors where they are, where the kernel allows that. Without it each tensor
            is copied once into shared memory, which consumers then map.

    Raises:
        Invalid: Role, mode or size is not allowed.
        Unavailable: The run directory cannot be used.
    """

    def __init__(
        self,
        role: str,
        transfer_mode: TransferMode = "p2p",
        *,
        run_dir: str | os.PathLike[str] | None = None,
        arena_bytes: int | str = "1GiB",
        deadline: float = 30.0,
        borrow: bool = True,
    ) -> None:
        if transfer_mode not in ("p2p", "store"):
            raise Invalid(f"unknown transfer_mode {transfer_mode!r}; it is p2p or store", reason="connector.mode")
        if not (math.isfinite(deadline) and deadline >= 0):
            raise Invalid(f"deadline is {deadline}; it must be 0 or more seconds", reason="connector.deadline")
        self.role = role
        self.transfer_mode: TransferMode = transfer_mode
        self.deadline = deadline
        self._copies = 0
        self._copied_bytes = 0
        size = parse_bytes(str(arena_bytes))
        self._run_dir = _rundir.find(run_dir)
        self._native = Connector(self._run_dir, role, arena_bytes=size, borrow=borrow)

    def publish(self, payload: StagePayload, *, strict: bool = False, expires: float | None = None) -> StageHandle:
        """Publishes a payload; every chunk is visible at once.

        Args:
            payload: What to publish. Changing its mapping or lists afterwards changes nothing; its tensors must stay
                unmodified until they are released.
            strict: Refuse tensors that are not contiguous, instead of copying them once.
            expires: Seconds after which the payload is deleted although nobody consumed it; default 600.

        Raises:
            Invalid: Names, tensors, kind, metadata or cut are not allowed; the message has both values.
            Unsupported: A tensor is not in host memory, or of a dtype that nobody here knows.
            Exhausted: The shared memory, or the store, is full.
            Unavailable: The mode is ``store`` and no `HostStore` runs in this run directory.
        """
        if self.transfer_mode == "store":
            self._native.set_store(_rundir.store(self._run_dir))
        publication = self._publish(payload, strict=strict, expires=expires, open_=False)
        handle = StageHandle(publication.handle, publication)
        if self.transfer_mode == "p2p":
            return handle
        try:
            stored = self._native.store(publication.handle, self.deadline)
        except BaseException:
            self._native.release(handle.payload_id)
            raise
        return StageHandle(stored)

    def open(self, payload: StagePayload, *, expires: float | None = None) -> StreamingPublish:
        """Publishes a payload whose chunks become visible by `StreamingPublish.ready`, one by one.

        Arguments and errors are those of `publish`; a tensor that is not contiguous is refused, because later writes to
        it would not be seen.

        Raises:
            Unsupported: The mode is ``store``.
        """
        if self.transfer_mode != "p2p":
            raise Unsupported(
                "open() is for transfer_mode='p2p': a store takes complete payloads", reason="connector.mode"
            )
        return StreamingPublish(self._publish(payload, strict=True, expires=expires, open_=True))

    def _publish(self, payload: StagePayload, *, strict: bool, expires: float | None, open_: bool) -> Publication:
        if payload.lease not in _LEASES:
            raise Invalid(
                f"request {payload.request_id!r}: unknown lease {payload.lease!r}; it is {' or '.join(_LEASES)}",
                reason="payload.lease",
            )
        chunking = payload._chunking()
        imported = Imported(payload._bundle(), strict=strict)
        self._copies += imported.copies
        self._copied_bytes += imported.copied_bytes
        return self._native.publish(
            payload.request_id,
            payload.kind,
            imported.entries,
            to_json(payload.metadata),
            chunking,
            open=open_,
            deadline=expires,
        )

    def consume(
        self,
        handle: StageHandle | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
    ) -> Iterator[Any]:
        """Yields the payload's chunks in order, each as soon as it is complete.

        A payload published with ``tensor=`` yields tensors, one with ``tensors=`` dicts. With `dst` they are views of
        it. Without, they are views of the producer's memory where that can be mapped, which **must not be written to**,
        else of memory of their own.

        A payload with the lease ``delete_on_consume`` is deleted when the iterator has ended. One that is given up
        before leaves it for another consumer, which begins at chunk 0.

        Args:
            handle: What `publish` returned, or its bytes.
            dst: Where to write: a contiguous, writable tensor of the same shape and dtype, or a bundle
                ``{name: tensor | None | [tensor, ...]}`` of them.
            framework: ``torch``, ``numpy`` or ``native``, without `dst`. By default torch tensors where torch is
                imported or the dtype needs it, else NumPy arrays.
            deadline: Seconds without a further chunk after which it is given up; default that of the connector.

        Raises:
            Invalid: `dst` is not what the payload needs; the message has both values.
            Unavailable: The producer died (reason ``peer.lost``).
            NotFound: The payload is gone: consumed, released or expired.
            Conflict: Another consumer is at it.
            Deadline: No further chunk in time.
            StagewireError: The producer failed; class and reason are its own.
        """
        return self._reader(handle, dst, framework, deadline).chunks()

    def fetch(
        self,
        handle: StageHandle | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
    ) -> Any:
        """The whole payload: a tensor, or a dict for a bundle. Arguments and errors are those of `consume`."""
        return self._reader(handle, dst, framework, deadline).whole()

    def _reader(
        self, handle: StageHandle | bytes, dst: Any, framework: Framework | None, deadline: float | None
    ) -> Reader:
        if not isinstance(handle, StageHandle):
            handle = StageHandle.from_bytes(handle)
        native = handle._native
        single = [name for name, _ in native.entries] == [_NO_NAME] and isinstance(native.entries[0][1], tuple)
        if dst is not None and single and not hasattr(dst, "items"):
            dst = {_NO_NAME: dst}
        destinations = None if dst is None else Destinations(native, dst)
        within = self.deadline if deadline is None else deadline
        consumer = self._native.consume(native, None if destinations is None else destinations.tensors, deadline=within)
        return Reader(native, consumer, destinations, framework, single=_NO_NAME if single else None)

    def release(self, handle: StageHandle) -> None:
        """Deletes a payload of this process, consumed or not. Its memory is free when the last reader is done."""
        self._native.release(handle.payload_id)

    def live(self) -> list[str]:
        """Ids of the payloads that this process holds."""
        return self._native.live()

    def stats(self) -> dict[str, int]:
        """Numbers: payloads, bytes, pins, regions, and ``contiguous_copies`` with their ``contiguous_copied_bytes``."""
        own = {"contiguous_copies": self._copies, "contiguous_copied_bytes": self._copied_bytes}
        return {**self._native.stats(), **own}

    def close(self) -> None:
        """Releases every payload and ends every connection. Calling it again does nothing."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class HostStore:
    """Keeps payloads in the shared memory of this process, apart from the processes that made them.

    Connectors with ``transfer_mode="store"`` find it through the run directory. What is in it is lost when it is closed
    or its process ends.

    Args:
        capacity: Most bytes of payloads, as a number or as ``"512MiB"``. A full store refuses with `Exhausted`.
        run_dir: As for `DiffusionConnector`. One store per run directory; a later one takes over from an earlier one.

    Raises:
        Invalid: The size is not allowed.
        Unavailable: The run directory cannot be used.
    """

    def __init__(self, capacity: int | str = "1GiB", *, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._run_dir = _rundir.find(run_dir)
        self._native = _native.HostStore(self._run_dir, parse_bytes(str(capacity)))
        self._address = self._native.address
        _rundir.announce_store(self._run_dir, self._address)

    def usage(self) -> tuple[int, int]:
        """Bytes in use, and most bytes."""
        return self._native.usage()

    def live(self) -> list[str]:
        """Ids of the payloads in the store."""
        return self._native.live()

    def stats(self) -> dict[str, int]:
        """Numbers, as those of `DiffusionConnector.stats`."""
        return self._native.stats()

    def close(self) -> None:
        """Drops every payload. Calling it again does nothing."""
        _rundir.withdraw_store(self._run_dir, self._address)
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def to_json(metadata: Any) -> str:
    """Metadata as JSON text.

    Raises:
        Invalid: It is not JSON-like: NaN, other types, names that are no text.
    """
    try:
        if not _plain(metadata):
            raise TypeError("names in it must be text")
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
        text.encode()  # lone surrogates are no text
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(
            f"metadata must be JSON-like (None, bool, int, float, str, list, dict): {error}", reason="payload.metadata"
        ) from None
    return text


def _plain(value: Any) -> bool:
    """Whether every name is text; json.dumps would silently turn 1 into "1"."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return True
