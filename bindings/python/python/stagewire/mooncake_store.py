"""Payloads between hosts in Mooncake Store: a master, and memory that processes of many hosts lend.

```python
from stagewire.mooncake_store import MooncakeStore

# one host
store = MooncakeStore("10.0.0.1:50051", host="10.0.0.7", segment_bytes="4GiB")
placed = store.put([latents])
queue.put(placed.to_bytes())

# another
store = MooncakeStore("10.0.0.1:50051", host="10.0.0.8")
placed = Placed.from_bytes(queue.get())
store.read(placed, into=[dst])
store.remove(placed)
```

Most programs use `DiffusionConnector` with ``store_config={"backend": "mooncake", "master": ...}`` instead.

Mooncake keeps the bytes; Stagewire makes sure of them. Every attempt to write uses keys of its own. What is written
stays until it is removed, however full the store is. A header is finished last, and says what belongs to a payload;
whoever reads verifies a digest of every byte, because a store whose objects are removed while they are read returns the
bytes of others, and success. Every call keeps to its deadline.

The bytes live in the memory of the processes that lend it, and what is where in that of the master: with either,
payloads are gone, and readers are told so. ``docs/mooncake-store.md`` says how to run it, and what it does not promise.

Needs one of Mooncake's wheels, such as ``mooncake-transfer-engine``; it is imported when the first store is made.
"""

from __future__ import annotations

import mmap
import time
import uuid
from typing import TYPE_CHECKING, Any, Self

from . import _arguments
from ._bundle import wrap
from ._mooncake_claim import Claim, Renewals
from ._mooncake_client import NO_ROOM, NOT_FOUND, Client, Until, failure
from ._mooncake_objects import Layout, Placed, Run, whole
from ._mooncake_reads import Reads
from ._mooncake_staging import Staging
from ._mooncake_writes import Writes
from ._native import Tensor
from .errors import Conflict, Deadline, Exhausted, Invalid

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["Claim", "Draft", "MooncakeStore", "Placed"]

_PAUSE = 0.005
_LONGEST_PAUSE = 0.1


class MooncakeStore:
    """This process as a client of a Mooncake Store. Threads may share it.

    Args:
        master: ``host:port`` of ``mooncake_master``, or ``etcd://host:port`` where there are several.
        host: Address of this host as others reach it.
        segment_bytes: Memory that this process lends to the store, as a number or as ``"4GiB"``. What lies there is
            lost when this process ends; 0 lends none.
        block_bytes: Most bytes of one object of Mooncake. Larger payloads become several. No segment may be smaller.
        protocol: What the wheel moves bytes with: ``tcp``, ``rdma``, or another that it was built with.
        devices: Names of RDMA devices, separated by commas.
        deadline: Seconds that a call may take where it names no other.
        start_deadline: Seconds that it may take to start.

    Raises:
        Invalid: An argument is not allowed.
        Unsupported: Mooncake's wheel is missing.
        Unavailable: The master cannot be reached, or the wheel's client does not start.
        Deadline: It does not start in time.
    """

    def __init__(
        self,
        master: str,
        *,
        host: str = "127.0.0.1",
        segment_bytes: int | str = 0,
        block_bytes: int | str = "16MiB",
        protocol: str = "tcp",
        devices: str = "",
        deadline: float = 30.0,
        start_deadline: float = 15.0,
    ) -> None:
        self.master = master
        self.deadline = deadline
        self.block_bytes = _arguments.nbytes("block_bytes", block_bytes)
        if self.block_bytes < 4096:
            raise Invalid(f"block_bytes is {self.block_bytes}; it must be 4096 or more", reason="argument.bytes")
        self._client = Client(
            master,
            host=host,
            segment_bytes=_arguments.nbytes("segment_bytes", segment_bytes),
            protocol=protocol,
            devices=devices,
            within=start_deadline,
        )
        tcp = protocol == "tcp"

        def register(memory: Tensor) -> None:
            """Other protocols move only what is registered; the caller's memory is not."""
            if not tcp:
                what = "registering a staging buffer with Mooncake Store"
                place = (memory.data_ptr, memory.nbytes)
                code = self._client.call(what, self._until(None), lambda store: store.register_buffer(*place))
                if code != 0:
                    raise failure(code, what, {"bytes": str(memory.nbytes)})

        client = self._client

        def unregister(memory: Tensor) -> None:
            if not tcp:
                client.later(lambda store: store.unregister_buffer(memory.data_ptr))

        staging = Staging(self.block_bytes, register, unregister)
        self._writes = Writes(self._client, staging, direct=tcp)
        self._reads = Reads(self._client, staging, direct=tcp)
        self._renewals = Renewals()

    def put(self, parts: Sequence[Any], *, payload_id: str | None = None, deadline: float | None = None) -> Placed:
        """Writes a payload. It stays until it is removed.

        Args:
            parts: Contiguous tensors in host memory, or anything with a buffer. They must not change meanwhile.
            payload_id: Its id, a UUID; a new one where it is left out.
            deadline: Seconds that it may take, waiting for room included.

        Raises:
            Conflict: There is a payload of this id, or somebody writes one.
            Exhausted: No room came free in time.
            Unavailable: The master, or a process that lends memory, cannot be reached.
            Deadline: It took longer.
        """
        tensors = [_contiguous(f"part {index}", part) for index, part in enumerate(parts)]
        sources = [(tensor, whole(tensor.nbytes)) for tensor in tensors]
        return self._put(sources, payload_id, self._until(deadline))

    def _put(
        self, sources: list[tuple[Tensor, Run]], payload_id: str | None, until: Until, *, pinned: bool = True
    ) -> Placed:
        layout = self._reserve([run[1] * run[2] for _, run in sources], payload_id, until, pinned=pinned)
        draft = Draft(self, layout, sources)
        with draft:
            return draft._seal(until)

    def create(
        self,
        parts: Iterable[int],
        *,
        payload_id: str | None = None,
        wait: float = 0.0,
    ) -> Draft:
        """Begins a payload: reserves its keys and its room. Nobody reads it before it is sealed.

        Args:
            parts: Bytes of each part.
            payload_id: Its id, a UUID; a new one where it is left out.
            wait: Seconds to wait for room.

        Raises:
            Conflict, Exhausted, Unavailable, Deadline: As `put`.
        """
        layout = self._reserve(list(parts), payload_id, self._until(None), _arguments.seconds("wait", wait))
        # A private mapping of no bytes is not allowed.
        memory = [Tensor.from_buffer(mmap.mmap(-1, nbytes) if nbytes else bytearray()) for nbytes in layout.parts]
        return Draft(self, layout, [(tensor, whole(tensor.nbytes)) for tensor in memory])

    def find(self, payload_id: str, *, deadline: float | None = None) -> Placed:
        """What a payload consists of, by its header.

        Raises:
            NotFound: There is none (any more), or it is still being written (reason ``store.not_sealed``).
            Unavailable, Deadline: As `put`.
            Corrupt: The header is damaged.
        """
        return self._reads.header(_uuid(payload_id), self._until(deadline))

    def read(self, placed: Placed, into: Sequence[Any], *, deadline: float | None = None) -> None:
        """Reads a payload, and verifies it.

        Args:
            placed: What `put` or `find` returned.
            into: One contiguous, writable tensor for each part, or anything with a buffer, of as many bytes. After an
                error their content is undefined; nothing writes to them any more.
            deadline: Seconds that it may take.

        Raises:
            Invalid: A destination is of another size.
            NotFound: It is not there (any more).
            Unavailable: The master, or the process that lends its memory, cannot be reached.
            Corrupt: Other bytes arrived than were written.
            Deadline: It took longer.
        """
        tensors = [_contiguous(f"destination {index}", one) for index, one in enumerate(into)]
        found = tuple(tensor.nbytes for tensor in tensors)
        if found != placed.parts:
            raise Invalid(
                f"the destinations have {list(found)} bytes, the parts of payload {placed.payload_id} "
                f"{list(placed.parts)}",
                reason="consume.destination",
            )
        if any(tensor.read_only for tensor in tensors):
            raise Invalid(f"a destination of payload {placed.payload_id} is read-only", reason="consume.destination")
        wanted = [(part, tensor, whole(tensor.nbytes)) for part, tensor in enumerate(tensors)]
        self._reads.parts(placed, wanted, self._until(deadline))

    def remove(self, placed: Placed, *, deadline: float | None = None) -> bool:
        """Takes a payload away, whoever reads it. For its one owner: others would take it from their feet.

        Returns:
            Whether it was there. Absent is what was wanted, and no error.

        Raises:
            Unavailable: The master cannot be reached.
            Deadline: It took longer.
        """
        what = f"removing payload {placed.payload_id} from Mooncake Store"

        def remove(store: Any) -> list[int]:
            # Its claims go, too: mostly there is none, or one.
            *codes, claim = store.batch_remove([*placed.keys(), placed.layout.claim_key(0)], True)
            number = 1
            while claim == 0:
                (claim,) = store.batch_remove([placed.layout.claim_key(number)], True)
                number += 1
            return [int(code) for code in codes]

        codes = self._client.call(what, self._until(deadline), remove)
        for code in codes:
            if code not in (0, NOT_FOUND):
                raise failure(code, what, {"payload": placed.payload_id})
        return codes[-1] == 0

    def claim(self, placed: Placed, *, deadline: float | None = None) -> Claim:
        """Keeps other readers that claim it out, until it is released, or this process dies.

        Of a process of another host nobody sees that it has died: its claim, which it renews while it lives, is over
        when it is 30 s old. Who may have stood still for so long finds out by `Claim.check` whether another one has
        taken it over. Of several that remove a payload, one is told that it was there.

        Raises:
            Conflict: Another reader has it.
            NotFound: It is not there (any more).
            Unavailable, Deadline: As `remove`.
        """
        return self._claim(placed, self._until(deadline))

    def _claim(self, placed: Placed, until: Until) -> Claim:
        claim = Claim.make(self._client, self._reads, placed, until)
        self._renewals.add(claim)
        return claim

    def stats(self) -> dict[str, int]:
        """Counts by name: bytes written and read, copies through staging buffers, calls that have not ended."""
        return {**self._writes.stats(), **self._reads.stats(), "calls": self._client.running}

    def close(self, deadline: float | None = None) -> bool:
        """Ends the client, and with it the memory that this process lends. Calling it again does nothing.

        Returns:
            Whether it has ended. Where a call does not end within the deadline, it ends later, by itself.
        """
        self._renewals.close()
        self._reads.close()
        return self._client.close(self.deadline if deadline is None else deadline)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _until(self, deadline: float | None) -> Until:
        return Until(self.deadline if deadline is None else _arguments.seconds("deadline", deadline))

    def _reserve(
        self,
        parts: list[int],
        payload_id: str | None,
        until: Until,
        wait: float | None = None,
        *,
        pinned: bool = True,
    ) -> Layout:
        """Reserves keys and room, or leaves nothing behind. Room is waited for as long as `wait`, else `until`."""
        payload = uuid.uuid4() if payload_id is None else _uuid(payload_id)
        begun, pause = time.monotonic(), _PAUSE
        most = until.left() if wait is None else min(until.left(), wait)
        was_full = False
        while True:
            # Each try is an attempt of its own: what became of the one before it does not matter.
            layout = Layout(payload, uuid.uuid4(), self.block_bytes, tuple(parts))
            try:
                code = self._writes.reserve(layout, until, pinned=pinned)
            except Deadline:
                if not was_full:
                    raise
                # Why it was waited for so long says more.
                code = NO_ROOM
            if code == 0:
                return layout
            what = f"payload {payload} of {layout.nbytes} bytes in blocks of at most {self.block_bytes}"
            details = {
                "payload": str(payload),
                "wanted_bytes": str(layout.nbytes),
                "block_bytes": str(self.block_bytes),
            }
            if code != NO_ROOM:
                raise failure(code, what, details)
            waited = time.monotonic() - begun
            if waited + pause > most:
                error = failure(code, what, {**details, "waited_seconds": f"{waited:.3f}"})
                raise Exhausted(f"{error.message} (waited {waited:.3f} s)", reason=error.reason, details=error.details)
            was_full = True
            until.pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


class Draft:
    """A payload that is being written. Used as a context manager it is aborted at the end, unless it was sealed."""

    def __init__(self, store: MooncakeStore, layout: Layout, sources: list[tuple[Tensor, Run]]) -> None:
        self._store = store
        self._layout: Layout | None = layout
        self._sources = sources
        self.payload_id = str(layout.payload_id)

    def part(self, index: int) -> Tensor:
        """Memory of a part, to be written to; it is copied into the store by `seal`."""
        return self._sources[index][0]

    def seal(self, *, deadline: float | None = None) -> Placed:
        """Copies the parts into the store, and makes the payload readable. The draft is gone then, also after an error.

        Raises:
            Conflict: The draft is gone.
            NotFound: The master has forgotten it, as it does after a restart, or ten minutes.
            Unavailable, Deadline: As `MooncakeStore.put`.
        """
        return self._seal(self._store._until(deadline))

    def _seal(self, until: Until) -> Placed:
        layout = self._take()
        if layout is None:
            raise Conflict(f"the draft of payload {self.payload_id} was sealed or aborted", reason="publish.ended")
        return self._store._writes.write(layout, self._sources, until)

    def abort(self, *, deadline: float | None = None) -> None:
        """Gives key and room back. Nothing, where it was sealed.

        Raises:
            Unavailable, Deadline: The master does not answer. It gives them back by itself after ten minutes.
        """
        layout = self._take()
        if layout is not None:
            self._store._writes.abandon(layout, self._store._until(deadline))

    def _take(self) -> Layout | None:
        layout, self._layout = self._layout, None
        return layout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.abort()


def _uuid(text: str) -> uuid.UUID:
    try:
        return uuid.UUID(text)
    except ValueError:
        raise Invalid(f"{text!r} is no payload id", reason="payload.id") from None


def _contiguous(name: str, value: Any) -> Tensor:
    tensor = wrap(name, value)
    if not tensor.contiguous:
        raise Invalid(f"{name} is not contiguous; make it so first", reason="argument.memory")
    return tensor
