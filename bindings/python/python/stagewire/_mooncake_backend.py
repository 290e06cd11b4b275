"""The connector's payloads in Mooncake Store: each chunk of each tensor is a part, read straight to its place.

Who removes a payload: of ``delete_on_consume`` the consumer that has read all of it; of the other leases, and of one
that nobody consumed in time, the process that published it. What a process has published and not removed when it dies
stays in the store, but for ``cached``, until a consumer finds that its time is over.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import queue
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from ._handle import naming
from ._mooncake_client import Until
from ._mooncake_guard import Guarded
from ._mooncake_objects import Placed
from ._mooncake_publication import Placing, Work
from ._native import describe_payload, parse_lease, payload_runs, place_otherwise, place_payload
from .errors import Conflict, Corrupt, NotFound, StagewireError, Unsupported
from .mooncake_store import Claim, MooncakeStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._bundle import Imported
    from ._device import Staging
    from ._mooncake_objects import Run
    from ._native import Handle, Publication, Tensor
    from ._order import Order

TRANSPORT = "mooncake-store"
"""Name of the place in a handle."""

OTHERWISE = "mooncake-store-otherwise"
"""Name of the place in a handle where the payload is when its producer has it no more."""

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
        self._under_way: list[Placing] = []
        # Cached ones, which are ours only until they are there.
        self._passing: list[Placing] = []
        self._lock = threading.Lock()
        self._expiries = _Expiries(self._remove)

    def publish(self, order: Order, imported: Imported, staging: Staging, *, reason: str) -> Placing:
        """Begins to write a payload, and says why it goes here."""
        lease, times = _life(order)
        payload_id = str(uuid.uuid4())
        handle = describe_payload(
            payload_id,
            order.request_id,
            self._role,
            order.kind,
            imported.entries,
            order.metadata,
            order.chunking,
        )
        sources = _sources(handle, imported)
        if staging:
            staging.begin(handle.num_chunks)

        def put(until: Until) -> Handle:
            if staging:
                staging.fill(until)
            placed, place = self._put(sources, payload_id, lease, min(times, default=None), until)
            return place_payload(handle, TRANSPORT, json.dumps(place | {"placed": placed.to_bytes().hex()}).encode())

        placing = Placing(handle, put, self._deadline, lambda: self._remove(payload_id), reason=reason)
        with self._lock:
            self._under_way = [earlier for earlier in self._under_way if not earlier.settled]
            self._under_way.append(placing)
            if lease == "cached":
                self._passing.append(placing)
            self._let_go()
        return placing

    def guarded(self, order: Order, imported: Imported, publication: Publication) -> Guarded:
        """A payload that another process published, once it can be moved here."""
        lease, times = _life(order)
        handle = publication.handle
        end = min(times, default=None)
        ends = None if end is None else time.monotonic() + end
        sources = _sources(handle, imported)

        def put(until: Until) -> None:
            self._put(sources, handle.payload_id, lease, None if ends is None else ends - time.monotonic(), until)

        place = {"version": _VERSION, "lease": lease, "expires": None if end is None else time.time() + end}
        known = place_otherwise(handle, OTHERWISE, json.dumps(place).encode())
        return Guarded(publication, known, put, exclusive=lease == "delete_on_consume")

    def _put(
        self, sources: list[tuple[Tensor, Run]], payload_id: str, lease: str, end: float | None, until: Until
    ) -> tuple[Placed, dict[str, Any]]:
        """Writes a payload that ends in so many seconds. What a handle says of it."""
        placed = self._store._put(sources, payload_id, until, pinned=lease != "cached")
        with self._lock:
            self._mine[payload_id] = placed
        if end is not None:
            self._expiries.add(time.monotonic() + end, payload_id)
        expires = None if end is None else time.time() + end
        return placed, {"version": _VERSION, "master": self._store.master, "lease": lease, "expires": expires}

    def _let_go(self) -> None:
        """Forgets what is the store's alone to end."""
        for placing in self._passing:
            if placing.settled:
                self._mine.pop(placing.handle.payload_id, None)
        self._passing = [placing for placing in self._passing if not placing.settled]

    def consumer(self, handle: Handle, place: bytes, destinations: list[Tensor], within: float) -> Reading:
        """What reads a payload into the caller's tensors, chunk after chunk.

        Raises:
            Unsupported: The handle is of another version.
            NotFound: The payload's time is over.
        """
        said, placed = _read(handle, place)
        return self._reading(handle, said, placed, destinations, within, 0)

    def otherwise(self, handle: Handle, place: bytes, destinations: list[Tensor], within: float, first: int) -> Reading:
        """What reads the chunks of a payload from `first` on that has moved here.

        Raises:
            NotFound: It has not.
            StagewireError: As `consumer`.
        """
        said = _said(handle, place)
        placed = self._store.find(handle.payload_id, deadline=within)
        return self._reading(handle, said, placed, destinations, within, first)

    def _reading(
        self,
        handle: Handle,
        said: dict[str, Any],
        placed: Placed,
        destinations: list[Tensor],
        within: float,
        first: int,
    ) -> Reading:
        if said["expires"] is not None and time.time() > said["expires"]:
            with contextlib.suppress(StagewireError):
                self._store.remove(placed, deadline=within)
            raise NotFound(
                f"payload {handle.payload_id} has expired {time.time() - said['expires']:.1f} s ago",
                reason="payload.gone",
                details={"payload": handle.payload_id},
            )
        exclusive = said["lease"] == "delete_on_consume"
        return Reading(self._store, handle, placed, destinations, exclusive=exclusive, within=within, first=first)

    def discard_otherwise(self, handle: Handle) -> bool:
        """Removes a payload that has moved here. Whether it had."""
        if self._remove(handle.payload_id):
            return True
        try:
            placed = self._store.find(handle.payload_id)
        except NotFound:
            return False
        return self._store.remove(placed)

    def live(self) -> list[str]:
        """Ids of what this process published and has not removed; consumers may have. What is cached is the store's."""
        with self._lock:
            self._let_go()
            return list(self._mine)

    def stats(self) -> dict[str, int]:
        return {f"mooncake_{name}": value for name, value in self._store.stats().items()}

    def release(self, payload_id: str) -> bool:
        """Removes what this process published. Whether it was there."""
        return self._remove(payload_id)

    def discard(self, handle: Handle, place: bytes) -> None:
        """Removes what anybody published."""
        placed = _read(handle, place)[1]
        with self._lock:
            self._mine.pop(handle.payload_id, None)
        self._store.remove(placed)

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


def _life(order: Order) -> tuple[str, list[float]]:
    """The name of a lease, and the seconds after which it may end."""
    lease, seconds = parse_lease(order.lease)
    if seconds is None and lease == "delete_on_consume":
        seconds = _EXPIRES
    return lease, [one for one in (seconds, order.expires) if one is not None]


def _sources(handle: Handle, imported: Imported) -> list[tuple[Tensor, Run]]:
    """The parts of a payload: of each chunk, what lies in each tensor."""
    return [
        (tensor, run)
        for chunk in range(handle.num_chunks)
        for tensor, run in zip(imported.tensors(), payload_runs(handle, chunk), strict=True)
    ]


def _read(handle: Handle, place: bytes) -> tuple[dict[str, Any], Placed]:
    """What a handle says of its place, and what is there.

    Raises:
        Unsupported: It is of another version.
        Corrupt: It is damaged.
    """
    said = _said(handle, place)
    try:
        placed = bytes.fromhex(said["placed"])
    except (ValueError, KeyError, TypeError) as error:
        raise _malformed(handle, error) from None
    return said, Placed.from_bytes(placed)


def _said(handle: Handle, place: bytes) -> dict[str, Any]:
    try:
        said: dict[str, Any] = json.loads(place)
        version, _, _ = said["version"], said["lease"], said["expires"]
    except (ValueError, KeyError, TypeError) as error:
        raise _malformed(handle, error) from None
    if version != _VERSION:
        raise Unsupported(
            f"payload {handle.payload_id} was placed by version {version}, this build reads {_VERSION}: install the "
            "same version of Stagewire on all hosts",
            reason="handle.version",
        )
    return said


def _malformed(handle: Handle, error: Exception) -> Corrupt:
    return Corrupt(
        f"payload {handle.payload_id}: its handle does not say where it is: {error!r}", reason="handle.malformed"
    )


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
        first: int = 0,
    ) -> None:
        self._store = store
        self._handle = handle
        self._placed = placed
        self._destinations = destinations
        self._exclusive = exclusive
        self._within = within
        self._claim: Claim | None = None
        self._next = first
        self._closed = False
        self._until = Until(0)
        self._one_at_a_time = threading.Lock()
        self._arrivals: queue.SimpleQueue[int | None] = queue.SimpleQueue()

    def next(self) -> list[Tensor] | None:
        """Reads the next chunk; None after the last one, when the payload is removed if it was to be."""
        with self._turn(self._next):
            if self._next == self._handle.num_chunks:
                self._acknowledge()
                return None
            self._read(self._next, self._next + 1)
            self._arrivals.put(self._next)
            self._next += 1
            return self._destinations

    def start_next(self) -> Work:
        return Work(self.next, self._stop)

    def arrived(self) -> tuple[int, list[Tensor]] | None:
        """The next chunk that was read; None where there are no more."""
        index = self._arrivals.get()
        return None if index is None else (index, self._destinations)

    def start_arrived(self) -> Work:
        return Work(self.arrived, lambda: self._arrivals.put(None))

    def fetch(self) -> list[Tensor]:
        """Reads all of it."""
        with self._turn(0):
            self._read(0, self._handle.num_chunks)
            self._acknowledge()
            return self._destinations

    def start_fetch(self) -> Work:
        return Work(self.fetch, self._stop)

    def close(self) -> None:
        """Gives it up. Nothing is written into the destinations any more when this returns."""
        self._stop()
        with self._one_at_a_time:
            claim, self._claim = self._claim, None
        if claim is not None:
            claim.release()

    def start_close(self) -> Work:
        return Work(self.close, lambda: None)

    def _stop(self) -> None:
        self._closed = True
        self._arrivals.put(None)
        self._until.stop()

    @contextlib.contextmanager
    def _turn(self, chunk: int) -> Iterator[None]:
        handle = self._handle
        where = f"{chunk} of {handle.num_chunks}" if chunk < handle.num_chunks else ""
        with naming(handle.request_id, handle.stage, where):
            if not self._one_at_a_time.acquire(blocking=False):
                raise Conflict(
                    "another thread is reading this payload through the same iterator: call consume again",
                    reason="consume.busy",
                )
            try:
                self._until = Until(self._within)
                if self._closed:
                    raise Conflict("this reader is closed: call consume again", reason="consume.closed")
                if self._exclusive and self._claim is None:
                    self._claim = self._store._claim(self._placed, self._until)
                if self._claim is not None:
                    self._claim.check(self._until)
                yield
            finally:
                self._one_at_a_time.release()

    def _read(self, first: int, end: int) -> None:
        count = len(self._destinations)
        wanted = [
            (chunk * count + index, tensor, run)
            for chunk in range(first, end)
            for index, (tensor, run) in enumerate(
                zip(self._destinations, payload_runs(self._handle, chunk), strict=True)
            )
        ]
        self._store._reads.parts(self._placed, wanted, self._until)

    def _acknowledge(self) -> None:
        claim, self._claim = self._claim, None
        if claim is None:
            return
        try:
            removed = self._store.remove(self._placed, deadline=self._within)
            claim.forget()
        except BaseException:
            claim.release()
            raise
        # One of all who remove it is told that it was there. That one has got the payload.
        if not removed:
            raise NotFound(
                f"payload {self._handle.payload_id} was read, but is gone: another consumer has got it, or it has "
                "expired or was lost meanwhile",
                reason="payload.gone",
                details={"payload": self._handle.payload_id},
            )


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
