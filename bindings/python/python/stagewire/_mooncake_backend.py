"""The connector's payloads in Mooncake Store: each chunk of each tensor is a part, read straight to its place.

Who removes a payload: of ``delete_on_consume`` the consumer that has read all of it; of the other leases, and of one
that nobody consumed in time, the process that published it. What a process has published and not removed when it dies
stays in the store, but for ``cached``, until a consumer finds that its time is over.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from ._handle import StageHandle
from ._mooncake_objects import Placed
from ._native import describe_payload, parse_lease, payload_runs, place_payload
from ._payload import to_json
from .errors import Conflict, NotFound, StagewireError, Unsupported
from .mooncake_store import Claim, MooncakeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._bundle import Imported
    from ._native import Handle, Tensor
    from ._payload import StagePayload

TRANSPORT = "mooncake-store"
"""Name of the place in a handle."""

_VERSION = 1
_EXPIRES = 600.0


class Backend:
    """Publishes into a store, and consumes from it.

    Args:
        options: What `MooncakeStore` is made with.
        role: Name of the stage.
        deadline: Seconds that a payload may take into the store.

    Raises:
        StagewireError: As `MooncakeStore`.
    """

    def __init__(self, options: Mapping[str, Any], role: str, deadline: float) -> None:
        self._role = role
        self._deadline = deadline
        self._store = MooncakeStore(**options, deadline=deadline)
        self._mine: dict[str, Placed] = {}
        self._under_way: list[_Publication] = []
        self._lock = threading.Lock()
        self._expiries = _Expiries(self._remove)

    def publish(self, payload: StagePayload, imported: Imported, expires: float | None, *, auto: bool) -> PlacedHandle:
        """Begins to write a payload."""
        lease, seconds = parse_lease(payload.lease_text())
        payload_id = str(uuid.uuid4())
        handle = describe_payload(
            payload_id,
            payload.request_id,
            self._role,
            payload.kind,
            imported.entries,
            to_json(payload.metadata),
            payload.chunking(),
        )
        if seconds is None and lease == "delete_on_consume":
            seconds = _EXPIRES
        times = [one for one in (seconds, expires) if one is not None]
        sources = [
            (tensor, run)
            for chunk in range(handle.num_chunks)
            for tensor, run in zip(imported.tensors(), payload_runs(handle, chunk), strict=True)
        ]

        def put() -> Handle:
            placed = self._store._put(sources, payload_id, time.monotonic() + self._deadline, pinned=lease != "cached")
            end = min(times) if times else None
            place = {
                "version": _VERSION,
                "master": self._store.master,
                "lease": lease,
                "expires": None if end is None else time.time() + end,
                "placed": placed.to_bytes().hex(),
            }
            with self._lock:
                self._mine[payload_id] = placed
            if end is not None:
                self._expiries.add(time.monotonic() + end, payload_id)
            return place_payload(handle, TRANSPORT, json.dumps(place).encode())

        publication: Any = _Publication(handle, put, lambda: self._remove(payload_id), auto=auto)
        with self._lock:
            self._under_way = [earlier for earlier in self._under_way if not earlier.settled]
            self._under_way.append(publication)
        return PlacedHandle(handle, publication, lambda handle: self._remove(handle.payload_id))

    def consumer(self, handle: Handle, place: bytes, destinations: list[Tensor], within: float) -> Reading:
        """What reads a payload into the caller's tensors, chunk after chunk.

        Raises:
            Unsupported: The handle is of another version.
            NotFound: The payload's time is over.
        """
        said = json.loads(place)
        if said.get("version") != _VERSION:
            raise Unsupported(
                f"payload {handle.payload_id} was placed by version {said.get('version')}, this build reads "
                f"{_VERSION}: install the same version of Stagewire on all hosts",
                reason="handle.version",
            )
        placed = Placed.from_bytes(bytes.fromhex(said["placed"]))
        if said["expires"] is not None and time.time() > said["expires"]:
            with contextlib.suppress(StagewireError):
                self._store.remove(placed, deadline=within)
            raise NotFound(
                f"payload {handle.payload_id} has expired {time.time() - said['expires']:.1f} s ago",
                reason="payload.gone",
                details={"payload": handle.payload_id},
            )
        exclusive = said["lease"] == "delete_on_consume"
        return Reading(self._store, handle, placed, destinations, exclusive=exclusive, within=within)

    def live(self) -> list[str]:
        """Ids of what this process published and has not removed; consumers may have."""
        with self._lock:
            return list(self._mine)

    def stats(self) -> dict[str, int]:
        return {f"mooncake_{name}": value for name, value in self._store.stats().items()}

    def release(self, payload_id: str) -> bool:
        """Removes what this process published. Whether it was there."""
        return self._remove(payload_id)

    def _remove(self, payload_id: str) -> bool:
        with self._lock:
            placed = self._mine.pop(payload_id, None)
        return placed is not None and self._store.remove(placed)

    def close(self) -> None:
        """Ends the client, once what is under way has ended."""
        with self._lock:
            under_way, self._under_way = self._under_way, []
        until = time.monotonic() + self._deadline
        for publication in under_way:
            with contextlib.suppress(StagewireError):
                publication.wait_settled(max(0.0, until - time.monotonic()))
        self._expiries.close()
        self._store.close()


class Reading:
    """One payload being read, once, as `_native.Consumer` does it."""

    def __init__(
        self,
        store: MooncakeStore,
        handle: Handle,
        placed: Placed,
        destinations: list[Tensor],
        *,
        exclusive: bool,
        within: float,
    ) -> None:
        self._store = store
        self._handle = handle
        self._placed = placed
        self._destinations = destinations
        self._exclusive = exclusive
        self._within = within
        self._claim: Claim | None = None
        self._next = 0
        self._closed = False

    def next(self) -> list[Tensor] | None:
        """Reads the next chunk; None after the last one, when the payload is removed if it was to be."""
        self._open()
        if self._next == self._handle.num_chunks:
            self._acknowledge()
            return None
        self._read(self._next, self._next + 1)
        self._next += 1
        return self._destinations

    def fetch(self) -> list[Tensor]:
        """Reads all of it."""
        self._open()
        self._read(0, self._handle.num_chunks)
        self._acknowledge()
        return self._destinations

    def close(self) -> None:
        self._closed = True
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def _open(self) -> None:
        if self._closed:
            raise Conflict("this reader is closed: call consume again", reason="consume.closed")
        if self._exclusive and self._claim is None:
            self._claim = self._store.claim(self._placed, deadline=self._within)

    def _read(self, first: int, end: int) -> None:
        count = len(self._destinations)
        wanted = [
            (chunk * count + index, tensor, run)
            for chunk in range(first, end)
            for index, (tensor, run) in enumerate(
                zip(self._destinations, payload_runs(self._handle, chunk), strict=True)
            )
        ]
        self._store._reads.parts(self._placed, wanted, time.monotonic() + self._within)

    def _acknowledge(self) -> None:
        if self._exclusive:
            self._store.remove(self._placed, deadline=self._within)


class PlacedHandle(StageHandle):
    """The producer's handle of a payload on its way into the store."""

    __slots__ = ()

    def native(self) -> Handle:
        self.wait()
        return self._mine().handle

    def to_bytes(self) -> bytes:
        """The handle as bytes: versioned, with a checksum; no pickle. Waits until the payload is in the store.

        Raises:
            StagewireError: What publishing failed with.
        """
        return self.native().to_bytes()


class _Publication:
    """A payload on its way into the store, as `_native.Publication` is one."""

    def __init__(self, handle: Handle, put: Callable[[], Handle], remove: Callable[[], object], *, auto: bool) -> None:
        self.handle = handle
        self.mode = ("store", "consumer_unknown" if auto else "requested")
        self._over = threading.Event()
        self._pending = _Pending(self._over)
        self._cancelled = False
        self._error: StagewireError | None = None

        def run() -> None:
            try:
                self.handle = put()
            except StagewireError as error:
                self._error = error
            finally:
                self._over.set()
                self._pending.wake()
            if self._cancelled:
                # Too late to stop it, and nobody else knows of it.
                with contextlib.suppress(StagewireError):
                    remove()

        threading.Thread(target=run, name="sw-mooncake-put", daemon=True).start()

    @property
    def settled(self) -> bool:
        return self._over.is_set()

    def wait_settled(self, timeout: float | None = None) -> bool:
        if not self._over.wait(timeout):
            return False
        if self._error is not None:
            raise self._error
        return True

    def settling(self) -> _Pending:
        return self._pending

    def cancel(self) -> bool:
        self._cancelled = True
        return not self._over.is_set()

    def wait_released(self, timeout: float | None = None) -> bool:
        # This process need not keep it once the store has it.
        return self._over.wait(timeout)

    def released(self) -> _Pending:
        return self._pending

    def wait_unread(self, timeout: float | None = None) -> bool:
        # Consumers read the store's memory.
        return self._over.wait(timeout)

    def unread(self) -> _Pending:
        return self._pending

    def close(self) -> None:
        """Nothing: it goes on by itself."""


class _Pending:
    """What asyncio waits for, as `_native.Pending` is one."""

    def __init__(self, over: threading.Event) -> None:
        self._over = over
        self._ready = os.eventfd(0)

    def wake(self) -> None:
        os.eventfd_write(self._ready, 1)

    def fileno(self) -> int:
        return self._ready

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._over.wait(timeout)

    def take(self) -> None:
        """Nothing comes out."""

    def cancel(self) -> None:
        """Nothing: others may wait for it, too."""

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self._ready)


class _Expiries:
    """Does something at a time, on one thread, until it is closed."""

    def __init__(self, expire: Callable[[str], object]) -> None:
        self._expire = expire
        self._due: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, at: float, payload_id: str) -> None:
        with self._changed:
            heapq.heappush(self._due, (at, payload_id))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sw-mooncake-expire", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._changed.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                _, payload_id = heapq.heappop(self._due)
            # What cannot be reached now is found to be over by whoever consumes it.
            with contextlib.suppress(StagewireError):
                self._expire(payload_id)
