"""What the connectors have in common, whether they block or are awaited: arguments, errors, and what is done."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from . import _arguments, _config, _rundir
from ._allocate import allocate
from ._bundle import Imported, wrap
from ._consume import Destinations, Reader
from ._device import Copier, Staging
from ._handle import Described, Published, naming
from ._native import Connector, Handle, Registered, payload_place
from ._order import Order
from ._payload import ONE
from .errors import Cancelled, Invalid, StagewireError, Unsupported

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from ._bundle import Framework
    from ._mooncake_backend import Backend, Reading
    from ._mooncake_either import Either
    from ._mooncake_guard import Guard, Guarded
    from ._mooncake_publication import Placing
    from ._native import Consumer, Publication
    from ._payload import StagePayload

TransferMode: TypeAlias = Literal["p2p", "store", "auto"]
"""``p2p``: the consumer reads the producer's memory. ``store``: a store takes a copy, and the producer is free.
``auto``: ``p2p`` where the consumer is known and alive or no store runs, else ``store``."""

_MODES = ("p2p", "store", "auto")

MOONCAKE = "mooncake-store"
"""Where a handle says that its payload is in Mooncake Store."""

MOONCAKE_OTHERWISE = "mooncake-store-otherwise"
"""Where it says that its payload is there when its producer has it no more."""

# What comes out of publish, open, consume, fetch.
Handed = TypeVar("Handed")
Streaming = TypeVar("Streaming")
Chunks = TypeVar("Chunks")
Whole = TypeVar("Whole")


class BaseConnector(abc.ABC, Generic[Handed, Streaming, Chunks, Whole]):
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
            host, which need it, too; further keys are those of `stagewire.mooncake_store.MooncakeStore`. What `open`
            publishes does not move there.
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
        self.role = _arguments.text("role", role)
        self.transfer_mode: TransferMode = transfer_mode
        self.deadline = _arguments.seconds("deadline", deadline)
        self._verify = verify
        self._closed = False
        # By address and size.
        self._registered: dict[tuple[int, int], Registered] = {}
        self._lock = threading.Lock()
        self._copies = 0
        self._copied_bytes = 0
        self._under_way: list[Publication] = []
        self._copier = Copier()
        mooncake = _config.store(store_config)
        transports, size = _config.transports(te_config), _arguments.nbytes("arena_bytes", arena_bytes)
        reached = _config.network(network)
        self._run_dir = _rundir.find(run_dir)
        self._native = Connector(self._run_dir, role, arena_bytes=size, transports=transports, network=reached)
        self._store: Backend | None = None
        self._guard: Guard | None = None
        if mooncake is not None:
            try:
                self._store, self._guard = _backend(mooncake, role, self.deadline, self._native)
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
    ) -> Handed:
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
            Exhausted: The shared memory is full, or there is no memory for a copy.
            Cancelled: The connector is closed.
        """
        return self._start(lambda: self._order(payload, consumer, expires, strict=strict))

    def open(self, payload: StagePayload, *, consumer: bytes | None = None, expires: float | None = None) -> Streaming:
        """Publishes a payload whose chunks become visible by `StreamingPublish.ready`, one by one.

        Arguments and errors are those of `publish`; a tensor in host memory that is not contiguous is refused, because
        later writes to it would not be seen. A store takes it when the last chunk is there.

        Of a tensor on a CUDA device, chunks are copied when they are ready, and visible once the stream that was the
        current one at `StreamingPublish.ready` has come so far.
        """
        order = self._order(payload, consumer, expires, strict=True)
        if self._store is not None and self.transfer_mode == "store":
            raise Unsupported(
                f"request {order.request_id!r}: open() is not for payloads in Mooncake Store, which takes complete "
                "ones: use publish()",
                reason="connector.mode",
            )
        with naming(order.request_id, self.role):
            staging = Staging(self._copier, self._room_for)
            imported = order.imported(staging.take)
            publication = self._expose(order, imported, staging, open_=True, mode=self.transfer_mode)
            return self._stream(publication, staging)

    def consume(
        self,
        handle: Described | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
        on_chunk: Callable[[int, Any], object] | None = None,
    ) -> Chunks:
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
            on_chunk: Is called once for each chunk as it comes, with its index and the chunk, whatever the order and
                whatever the iterator is at, and before the chunk is yielded: on a thread of its own, one call at a time
                (by ``stagewire.aio``: in the event loop). What it raises, the iterator raises.

        Raises:
            Invalid: `dst` is not what the payload needs; the message has both values.
            Unavailable: The producer died (reason ``peer.lost``).
            NotFound: The payload is gone: consumed, released or expired.
            Conflict: Another consumer is at it.
            Deadline: No further chunk in time.
            StagewireError: The producer failed; class and reason are its own.
        """
        _arguments.function("on_chunk", on_chunk)
        return self._chunks(self._reader(handle, dst, framework, deadline, arrivals=on_chunk is not None), on_chunk)

    def fetch(
        self,
        handle: Described | bytes,
        dst: Any = None,
        *,
        framework: Framework | None = None,
        deadline: float | None = None,
    ) -> Whole:
        """The whole payload: a tensor, or a dict for a bundle. Arguments and errors are those of `consume`."""
        return self._whole(functools.partial(self._reader, handle, dst, framework, deadline))

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
        self._check_open()
        return allocate(self._native, shape, dtype, framework)

    def register(self, tensor: Any) -> Registered:
        """Registers a tensor's memory once: publishing it again and again registers nothing more.

        Tensors of `allocate` are registered already. The connector keeps the memory until `release` of the result, or
        until it is closed; registering the same memory again gives the same result. Before the memory is written again,
        wait for `StageHandle.wait_unread`.

        Raises:
            Invalid: It is not contiguous, or has no elements.
            Unsupported: It is not in host memory, or this connector copies what it publishes.
        """
        self._check_open()
        memory = wrap("tensor", tensor)
        place = (memory.data_ptr, memory.nbytes)
        with self._lock:
            # What was released is forgotten: its memory may be that of others by now.
            self._registered = {at: known for at, known in self._registered.items() if not known.released}
            if place not in self._registered or not memory.contiguous:
                self._registered[place] = self._native.register(memory)
            return self._registered[place]

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
            "registered": len(self._registered),
        }
        stored = {} if self._store is None else self._store.stats()
        counts = {**self._native.stats(), **own, **stored}
        for name, more in ({} if self._guard is None else self._guard.stats()).items():
            counts[name] = counts.get(name, 0) + more
        return counts

    @abc.abstractmethod
    def _start(self, order: Callable[[], Order]) -> Handed:
        """Takes the order now, and publishes."""

    @abc.abstractmethod
    def _stream(self, publication: Publication, staging: Staging) -> Streaming:
        """What shows the chunks."""

    @abc.abstractmethod
    def _chunks(self, reader: Reader, on_chunk: Callable[[int, Any], object] | None) -> Chunks:
        """Chunk after chunk."""

    @abc.abstractmethod
    def _whole(self, reader: Callable[[], Reader]) -> Whole:
        """All of it."""

    def _check_open(self) -> None:
        if self._closed:
            raise Cancelled(f"the connector of {self.role} is closed; make a new one", reason="connector.closed")

    def _order(self, payload: StagePayload, consumer: bytes | None, expires: float | None, *, strict: bool) -> Order:
        order = Order.take(self.role, payload, consumer, expires, strict=strict)
        with naming(order.request_id, self.role):
            self._check_open()
        return order

    def _put(self, order: Order) -> Publication | Placing | Guarded:
        """Publishes, and copies what has to be copied."""
        with naming(order.request_id, self.role):
            staging = Staging(self._copier, self._room_for, order.events)
            imported = order.imported(None if order.strict else staging.take)
            reason = self._why_mooncake(order)
            if self._store is not None and reason is not None:
                self._count(imported)
                return self._store.publish(order, imported, staging, reason=reason)
            # The store that a payload falls back to is one, not each that there is.
            guarding = self._store is not None and self.transfer_mode == "auto"
            publication = self._expose(
                order, imported, staging, open_=False, mode="p2p" if guarding else self.transfer_mode
            )
            for index in range(publication.handle.num_chunks if staging else 0):
                staging.ready(publication, index)
            if self._store is None or self._guard is None or order.consumer is None or not guarding:
                return publication
            guarded = self._store.guarded(order, imported, publication)
            self._guard.add(guarded, order.consumer)
            return guarded

    def _why_mooncake(self, order: Order) -> str | None:
        """Why a payload goes to Mooncake Store at once; None where it does not."""
        if self._store is None or self.transfer_mode == "p2p":
            return None
        if self.transfer_mode == "store":
            return "requested"
        if order.consumer is None:
            return "consumer_unknown"
        if order.lease == "cached":
            return "lease"
        return None if self._native.is_alive(order.consumer) else "consumer_lost"

    def _expose(
        self, order: Order, imported: Imported, staging: Staging, *, open_: bool, mode: TransferMode
    ) -> Publication:
        publication = self._native.publish(
            order.request_id,
            order.kind,
            imported.entries,
            order.metadata,
            order.chunking,
            order.lease,
            (mode, order.consumer, self.deadline),
            open=open_ or bool(staging),
            verify=self._verify,
            deadline=order.expires,
        )
        if staging:
            staging.begin(publication.handle.num_chunks)
        self._count(imported)
        with self._lock:
            self._under_way = [earlier for earlier in self._under_way if not earlier.settled]
            if not publication.settled:
                self._under_way.append(publication)
        return publication

    def _room_for(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.allocate(shape, dtype)

    def _count(self, imported: Imported) -> None:
        with self._lock:
            self._copies += imported.copies
            self._copied_bytes += imported.copied_bytes

    def _reader(
        self,
        handle: Described | bytes,
        dst: Any,
        framework: Framework | None,
        deadline: float | None,
        *,
        arrivals: bool = False,
    ) -> Reader:
        self._check_open()
        if not isinstance(handle, Described):
            handle = Described.from_bytes(handle)
        native = handle.native()
        single = [name for name, _ in native.entries] == [ONE] and isinstance(native.entries[0][1], tuple)
        if dst is not None and single and not hasattr(dst, "items"):
            dst = {ONE: dst}
        within = self.deadline if deadline is None else _arguments.seconds("deadline", deadline)
        with naming(native.request_id, native.stage):
            place = payload_place(native, MOONCAKE)
            if place is not None and dst is None:
                dst = self._room(native, framework)
            destinations = None if dst is None else Destinations(native, dst)
            tensors = None if destinations is None else destinations.tensors
            otherwise = None if self._store is None else payload_place(native, MOONCAKE_OTHERWISE)
            if place is not None and tensors is not None:
                reading: Any = self._mooncake(native).consumer(native, place, tensors, within)
            else:
                arrivals = arrivals and otherwise is None
                reading = self._native.consume(native, tensors, deadline=within, arrivals=arrivals)
        reader = Reader(native, reading, destinations, framework, single=ONE if single else None)
        if otherwise is not None:
            reader.consumer = self._either(native, otherwise, reader, reading, destinations, framework, within)
        return reader

    def _either(
        self,
        native: Handle,
        place: bytes,
        reader: Reader,
        consumer: Consumer,
        destinations: Destinations | None,
        framework: Framework | None,
        within: float,
    ) -> Either:
        """What reads from Mooncake Store what the producer has no more."""
        from ._mooncake_either import Either

        def elsewhere(first: int) -> Reading:
            room = destinations or Destinations(native, self._room(native, framework))
            reading = self._mooncake(native).otherwise(native, place, room.tensors, within, first)
            reader.read_into(room)
            return reading

        return Either(consumer, elsewhere)

    def _mooncake(self, handle: Handle) -> Backend:
        if self._store is None:
            raise Unsupported(
                f"payload {handle.payload_id} is in a Mooncake Store: give the connector its store_config",
                reason="store.none",
            )
        return self._store

    def _room(self, handle: Handle, framework: Framework | None) -> dict[str, Any]:
        """Tensors for a payload that cannot be mapped."""

        def one(spec: tuple[str, tuple[int, ...]]) -> Any:
            return self.allocate(spec[1], spec[0], framework=framework)

        return {
            name: None if spec is None else [one(item) for item in spec] if isinstance(spec, list) else one(spec)
            for name, spec in handle.entries
        }

    def _release(self, handle: Described | bytes) -> None:
        if not isinstance(handle, Described):
            handle = Described.from_bytes(handle)
        if isinstance(handle, Published) and handle.cancel():
            return
        native = handle.native()
        place = payload_place(native, MOONCAKE)
        if place is None:
            try:
                self._native.release(native)
            finally:
                if self._store is not None and payload_place(native, MOONCAKE_OTHERWISE) is not None:
                    with naming(native.request_id, native.stage):
                        self._store.discard_otherwise(native)
        else:
            with naming(native.request_id, native.stage):
                self._mooncake(native).discard(native, place)

    def _release_own(self, handle: Handle) -> bool:
        """Ends a payload of this process, for `StageHandle.cancel`."""
        if self._store is not None and self._store.release(handle.payload_id):
            return True
        return self._native.release_own(handle)

    def _close(self) -> None:
        self._closed = True
        until = time.monotonic() + self.deadline
        self._copier.close(until)
        with self._lock:
            under_way, self._under_way = self._under_way, []
            registered, self._registered = self._registered, {}
        for memory in registered.values():
            memory.release()
        try:
            for publication in under_way:
                # Whoever wants to know why it failed asks the handle.
                with contextlib.suppress(StagewireError):
                    publication.wait_settled(max(0.0, until - time.monotonic()))
        finally:
            if self._guard is not None:
                self._guard.close(max(0.0, until - time.monotonic()))
            if self._store is not None:
                self._store.close()
            self._native.close()


def _backend(options: Mapping[str, Any], role: str, deadline: float, native: Connector) -> tuple[Backend, Guard]:
    from ._mooncake_backend import Backend
    from ._mooncake_guard import Guard

    store = Backend(options, role, deadline)
    return store, Guard(native, store, deadline)
