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

Both processes are on one host and use the same run directory, or on two hosts and have a ``network``. Nothing here
needs a server. For
``transfer_mode="store"`` some process of the host keeps a `HostStore`. `stagewire.aio` has the same names for asyncio.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

from . import _config, _rundir
from ._bundle import Imported, dtype_name, exporter, framework_of, wrap
from ._consume import Destinations, Reader
from ._device import Copier, Staging
from ._handle import Described, StageHandle
from ._host_store import HostStore
from ._native import Connector, Handle, Publication, Registered, parse_bytes, payload_place
from ._payload import ONE, Lease, StagePayload, to_json
from ._stream import StreamingPublish
from .errors import Invalid, StagewireError, Unsupported

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ._bundle import Framework
    from ._mooncake_backend import Backend

__all__ = [
    "DiffusionConnector",
    "HostStore",
    "Lease",
    "StageHandle",
    "StagePayload",
    "StreamingPublish",
    "TransferMode",
]

TransferMode: TypeAlias = Literal["p2p", "store", "auto"]
"""``p2p``: the consumer reads the producer's memory. ``store``: a store takes a copy, and the producer is free.
``auto``: ``p2p`` where the consumer is known and alive or no store runs, else ``store``."""

_MODES = ("p2p", "store", "auto")

MOONCAKE = "mooncake-store"
"""Where a handle says that its payload is in Mooncake Store."""


class DiffusionConnector:
    """Publishes payloads of this process and consumes those of others.

    Threads may share it. Tensors that are published must not be written to until they are released: consumers read
    them where they are.

    Args:
        role: Name of this stage: 1 to 64 of a-z, 0-9, ``-`` and ``_``.
        transfer_mode: ``p2p``: consumers read this process's memory. ``store``: a `HostStore` of the same run directory
            takes a copy, so that this process may change or free the tensors, or end, once `StageHandle.wait` says so.
            ``auto``: ``p2p`` where the consumer is known and alive, or where no store runs, else ``store``; where that
            consumer dies before it is done, the payload goes to the store. `StageHandle.mode` and
            `StageHandle.mode_reason` tell which way and why.
        store_config: Which store keeps payloads: ``{"backend": "host"}``, the default, is the `HostStore` of the run
            directory. ``{"backend": "mooncake", "master": "10.0.0.1:50051"}`` is a Mooncake Store, for consumers on any
            host, which need it, too; further keys are those of `stagewire.mooncake_store.MooncakeStore`. A payload does
            not move there when a consumer dies: ``auto`` chooses it where the consumer is not known.
        te_config: What carries the bytes, the preferred one first: ``{"transports": ["shm", "cma", "tcp"]}`` is the
            default. A tensor is offered by the first that takes it where it is: ``shm`` takes this connector's shared
            memory, which consumers map; ``cma`` any memory, for consumers on this host; ``tcp``, ``mooncake`` (its wire
            protocol, spoken natively) and ``nixl`` (where it is installed) any, for consumers on any host. What none
            takes is copied once into shared memory, if ``shm`` is named. A consumer reads by what a payload is offered
            by, else over ``tcp``, as far as both sides name it.
        network: How connectors on other hosts reach this one: ``{"bind": "10.0.0.5", "token": "..."}``. ``bind`` is an
            address of this host, with a port or any free one; ``advertise`` the address that others are told, where it
            is another; ``token`` what every connector of the deployment must know. Without it, only processes of
            this host are let in. Nothing is encrypted.
        run_dir: Folder through which processes of a host find each other; default ``STAGEWIRE_RUN_DIR``, else the usual
            place.
        arena_bytes: Most bytes of shared memory, as a number or as ``"512MiB"``.
        deadline: Seconds that a consumer waits for bytes, and that a store may take.
        verify: Have consumers compare each chunk with a digest that is taken as it is shown, which finds a producer
            that writes to what it has published. Everything is read twice: for debugging.

    Raises:
        Invalid: Role, mode, size or configuration is not allowed.
        Unavailable: The run directory cannot be used.
    """

    def __init__(
        self,
        role: str,
        transfer_mode: TransferMode = "auto",
        store_config: Mapping[str, Any] | None = None,
        te_config: Mapping[str, Any] | None = None,
        *,
        network: Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        arena_bytes: int | str = "1GiB",
        deadline: float = 30.0,
        verify: bool = False,
    ) -> None:
        if transfer_mode not in _MODES:
            raise Invalid(
                f"unknown transfer_mode {transfer_mode!r}; it is {' or '.join(_MODES)}", reason="connector.mode"
            )
        if not (math.isfinite(deadline) and deadline >= 0):
            raise Invalid(f"deadline is {deadline}; it must be 0 or more seconds", reason="connector.deadline")
        self.role = role
        self.transfer_mode: TransferMode = transfer_mode
        self.deadline = deadline
        self._verify = verify
        self._registered: list[Registered] = []
        self._lock = threading.Lock()
        self._copies = 0
        self._copied_bytes = 0
        self._under_way: list[Publication] = []
        self._copier = Copier()
        mooncake = _config.store(store_config)
        transports, size = _config.transports(te_config), parse_bytes(str(arena_bytes))
        reached = _config.network(network)
        self._run_dir = _rundir.find(run_dir)
        self._native = Connector(self._run_dir, role, arena_bytes=size, transports=transports, network=reached)
        self._store: Backend | None = None
        if mooncake is not None:
            try:
                self._store = _mooncake(mooncake, role, deadline)
            except BaseException:
                self._native.close()
                raise

    @property
    def address(self) -> bytes:
        """How a producer says that this process is the consumer: see `publish`."""
        return self._native.address

    def publish(
        self,
        payload: StagePayload,
        *,
        consumer: bytes | None = None,
        strict: bool = False,
        expires: float | None = None,
    ) -> StageHandle:
        """Publishes a payload and returns at once; every chunk is visible as soon as its bytes are there.

        Args:
            payload: What to publish. Changing its mapping or lists afterwards changes nothing; its tensors must stay
                unmodified until they are released, or are in a store.
            consumer: `address` of the connector that is to consume it, where that is known, for ``auto``.
            strict: Refuse what would be copied: tensors that are not contiguous, or are on a device.
            expires: Seconds after which the payload is deleted although nobody consumed it; default 600.

        Raises:
            Invalid: Names, tensors, kind, metadata, lease or cut are not allowed; the message has both values.
            Unsupported: A tensor is neither in host memory nor on a CUDA device, or of a dtype that nobody here knows;
                or the mode is ``store`` and no store runs in this run directory.
            Exhausted: The shared memory is full.
        """
        auto = self.transfer_mode == "auto" and consumer is None
        if self._store is not None and (auto or self.transfer_mode == "store"):
            imported = Imported(payload.bundle(), strict=strict)
            self._count(imported)
            return self._store.publish(payload, imported, expires, auto=auto)
        publication = self._publish(payload, consumer=consumer, strict=strict, expires=expires)
        return StageHandle(publication.handle, publication, self._native.release_own)

    def open(
        self, payload: StagePayload, *, consumer: bytes | None = None, expires: float | None = None
    ) -> StreamingPublish:
        """Publishes a payload whose chunks become visible by `StreamingPublish.ready`, one by one.

        Arguments and errors are those of `publish`; a tensor in host memory that is not contiguous is refused, because
        later writes to it would not be seen. A store takes it when the last chunk is there.

        Of a tensor on a CUDA device, chunks are copied when they are ready, and visible once the stream that was the
        current one at `StreamingPublish.ready` has come so far.
        """
        if self._store is not None and self.transfer_mode == "store":
            raise Unsupported(
                "open() is not for payloads in Mooncake Store, which takes complete ones: use publish()",
                reason="connector.mode",
            )
        publication, staging = self._open(payload, consumer=consumer, expires=expires)
        handle = StageHandle(publication.handle, publication, self._native.release_own)
        return StreamingPublish(publication, handle, staging)

    def _publish(
        self, payload: StagePayload, *, consumer: bytes | None, strict: bool, expires: float | None
    ) -> Publication:
        staging = Staging(self._copier, self._allocate)
        place = None if strict else staging.take
        imported = Imported(payload.bundle(), strict=strict, place=place)
        publication = self._expose(payload, imported, staging, consumer=consumer, expires=expires, open_=bool(staging))
        if staging:
            for index in range(publication.handle.num_chunks):
                staging.ready(publication, index)
        return publication

    def _open(
        self, payload: StagePayload, *, consumer: bytes | None, expires: float | None
    ) -> tuple[Publication, Staging]:
        staging = Staging(self._copier, self._allocate)
        imported = Imported(payload.bundle(), strict=True, place=staging.take)
        return self._expose(payload, imported, staging, consumer=consumer, expires=expires, open_=True), staging

    def _allocate(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.allocate(shape, dtype)

    def _expose(
        self,
        payload: StagePayload,
        imported: Imported,
        staging: Staging,
        *,
        consumer: bytes | None,
        expires: float | None,
        open_: bool,
    ) -> Publication:
        lease, chunking, metadata = payload.lease_text(), payload.chunking(), to_json(payload.metadata)
        publication = self._native.publish(
            payload.request_id,
            payload.kind,
            imported.entries,
            metadata,
            chunking,
            lease,
            (self.transfer_mode, consumer, self.deadline),
            open=open_,
            verify=self._verify,
            deadline=expires,
        )
        if staging:
            staging.begin(publication.handle.num_chunks)
        self._count(imported)
        with self._lock:
            self._under_way = [earlier for earlier in self._under_way if not earlier.settled]
            if not publication.settled:
                self._under_way.append(publication)
        return publication

    def _count(self, imported: Imported) -> None:
        with self._lock:
            self._copies += imported.copies
            self._copied_bytes += imported.copied_bytes

    def consume(
        self,
        handle: Described | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
        on_chunk: Callable[[int, Any], object] | None = None,
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
            on_chunk: Is called with the index and the chunk when it is complete, before it is yielded.

        Raises:
            Invalid: `dst` is not what the payload needs; the message has both values.
            Unavailable: The producer died (reason ``peer.lost``).
            NotFound: The payload is gone: consumed, released or expired.
            Conflict: Another consumer is at it.
            Deadline: No further chunk in time.
            StagewireError: The producer failed; class and reason are its own.
        """
        return self._reader(handle, dst, framework, deadline).chunks(on_chunk)

    def fetch(
        self,
        handle: Described | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
    ) -> Any:
        """The whole payload: a tensor, or a dict for a bundle. Arguments and errors are those of `consume`."""
        return self._reader(handle, dst, framework, deadline).whole()

    def _reader(
        self, handle: Described | bytes, dst: Any, framework: Framework | None, deadline: float | None
    ) -> Reader:
        if not isinstance(handle, Described):
            handle = Described.from_bytes(handle)
        native = handle.native()
        single = [name for name, _ in native.entries] == [ONE] and isinstance(native.entries[0][1], tuple)
        if dst is not None and single and not hasattr(dst, "items"):
            dst = {ONE: dst}
        within = self.deadline if deadline is None else deadline
        place = payload_place(native, MOONCAKE)
        if place is not None and dst is None:
            dst = self._room(native, framework)
        destinations = None if dst is None else Destinations(native, dst)
        if place is not None:
            if self._store is None or destinations is None:
                raise Unsupported(
                    f"payload {native.payload_id} is in a Mooncake Store: give the connector its store_config",
                    reason="store.none",
                )
            reading: Any = self._store.consumer(native, place, destinations.tensors, within)
            return Reader(native, reading, destinations, framework, single=ONE if single else None)
        consumer = self._native.consume(native, None if destinations is None else destinations.tensors, deadline=within)
        return Reader(native, consumer, destinations, framework, single=ONE if single else None)

    def _room(self, handle: Handle, framework: Framework | None) -> dict[str, Any]:
        """Tensors for a payload that cannot be mapped."""

        def one(spec: tuple[str, tuple[int, ...]]) -> Any:
            return self.allocate(spec[1], spec[0], framework=framework)

        return {
            name: None if spec is None else [one(item) for item in spec] if isinstance(spec, list) else one(spec)
            for name, spec in handle.entries
        }

    def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, framework: Framework | None = None) -> Any:
        """A tensor in this connector's shared memory: publishing it, or a contiguous part of it, copies nothing.

        Its elements are whatever was there before. Its memory is free again when the tensor, its views and every
        payload over it are gone. Before it is written again, wait for `StageHandle.wait_unread`.

        Args:
            shape: Extents of its dimensions.
            dtype: Of torch or NumPy, or PyTorch's name of one: ``"bfloat16"``.
            framework: ``torch``, ``numpy`` or ``native``; by default that of `dtype`; where that is text, as in
                `consume`.

        Raises:
            Invalid: There is no such dtype or shape.
            Exhausted: The shared memory is full.
        """
        extents, name = tuple(shape), dtype_name(dtype)
        if any(not isinstance(extent, int) or extent < 0 for extent in extents):
            raise Invalid(f"{extents} is no shape: extents are whole numbers from 0", reason="tensor.shape")
        export = exporter(framework or framework_of(dtype), [name])
        return export(self._native.allocate(name, extents))

    def register(self, tensor: Any) -> Registered:
        """Registers a tensor's memory once: publishing it again and again registers nothing more.

        Tensors of `allocate` are registered already. The connector keeps the memory until `release` of the result, or
        until it is closed. Before the memory is written again, wait for `StageHandle.wait_unread`.

        Raises:
            Invalid: It is not contiguous, or has no elements.
            Unsupported: It is not in host memory, or this connector copies what it publishes.
        """
        registered = self._native.register(wrap("tensor", tensor))
        with self._lock:
            self._registered.append(registered)
        return registered

    def release(self, handle: Described) -> None:
        """Deletes a payload, consumed or not, wherever it is. Its memory is free when the last reader is done.

        Does nothing to one that has ended.

        Raises:
            Denied: The handle is forged.
            Unavailable: Who holds it does not answer.
        """
        if self._store is not None and self._store.release(handle.payload_id):
            return
        native = handle.native()
        if payload_place(native, MOONCAKE) is None:
            self._native.release(native)

    def live(self) -> list[str]:
        """Ids of the payloads that this process holds."""
        return self._native.live() + ([] if self._store is None else self._store.live())

    def stats(self) -> dict[str, int]:
        """Numbers: payloads, bytes, pins, regions.

        ``contiguous_copies`` and ``device_copies`` count the tensors that were copied once to be published, because
        they were not contiguous or were on a device; ``…_copied_bytes`` their bytes. ``published_<mode>_<reason>``
        counts payloads by their way.
        """
        own = {
            "contiguous_copies": self._copies,
            "contiguous_copied_bytes": self._copied_bytes,
            "device_copies": self._copier.copies,
            "device_copied_bytes": self._copier.copied_bytes,
        }
        stored = {} if self._store is None else self._store.stats()
        return {**self._native.stats(), **own, **stored}

    def close(self) -> None:
        """Releases every payload and ends every connection. Calling it again does nothing.

        What is on its way into a store is waited for, within the connector's deadline.
        """
        self._copier.close()
        with self._lock:
            under_way, self._under_way = self._under_way, []
            registered, self._registered = self._registered, []
        for memory in registered:
            memory.release()
        until = time.monotonic() + self.deadline
        try:
            for publication in under_way:
                # Whoever wants to know why it failed asks the handle.
                with contextlib.suppress(StagewireError):
                    publication.wait_settled(max(0.0, until - time.monotonic()))
        finally:
            if self._store is not None:
                self._store.close()
            self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _mooncake(options: Mapping[str, Any], role: str, deadline: float) -> Backend:
    from ._mooncake_backend import Backend

    return Backend(options, role, deadline)
