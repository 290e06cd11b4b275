"""The client object of Mooncake Store, made safe to use.

Its calls crash the process before it is set up and after it is closed, and none has a deadline: setting it up takes
90 s where the master is dead, a read of a process that stands still 30 s. So each call runs on a thread of this module,
the caller waits as long as it wants to, and what the call touches is kept until it has really ended. The object is
thread-safe otherwise: calls run side by side.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import Cancelled, Conflict, Deadline, Exhausted, Internal, Invalid, NotFound, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .errors import StagewireError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

NO_ROOM = -200
BAD_ARGUMENTS = -600
NOT_READY = -703
NOT_FOUND = -704
EXISTS = -705
LEASE_EXPIRED = -707

_MOST_THREADS = 8

_LOCAL_BUFFER = 16 << 20
"""What the wheel copies through for calls that this package does not use; it wants some all the same."""


class Until:
    """When a caller stops waiting: at a time, or when it is told to by another thread."""

    def __init__(self, within: float) -> None:
        self._at = time.monotonic() + within
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._wake: list[Callable[[], object]] = []
        self._calls = 0
        self._idle: list[Callable[[], object]] = []

    @property
    def stopped(self) -> bool:
        """Whether it was told to."""
        return self._stopped.is_set()

    def left(self) -> float:
        """Seconds that it still waits; 0 where the time is over."""
        return 0.0 if self.stopped else max(0.0, self._at - time.monotonic())

    def pause(self, seconds: float) -> None:
        """Sleeps, unless it is told to stop."""
        self._stopped.wait(seconds)

    def stop(self) -> None:
        """Tells it to."""
        with self._lock:
            self._stopped.set()
            wake = list(self._wake)
        for one in wake:
            one()

    @contextlib.contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Has `wake` called when it is told to stop meanwhile."""
        with self._lock:
            self._wake.append(wake)
        try:
            if self.stopped:
                wake()
            yield
        finally:
            with self._lock:
                self._wake.remove(wake)

    def begin(self) -> None:
        """A call begins that may outlast the waiting."""
        with self._lock:
            self._calls += 1

    def end(self) -> None:
        """It has ended, and touches nothing any more."""
        with self._lock:
            self._calls -= 1
            idle, self._idle = (self._idle, []) if self._calls == 0 else ([], self._idle)
        for one in idle:
            one()

    def when_idle(self, then: Callable[[], object]) -> None:
        """Calls `then` once every call has ended."""
        with self._lock:
            if self._calls > 0:
                self._idle.append(then)
                return
        then()


class Client:
    """A client that is set up, until it is closed.

    Args:
        master: ``host:port`` of the master, or ``etcd://host:port`` of its etcd.
        host: Address of this host as others reach it.
        segment_bytes: Memory that this process gives to the store.
        protocol: What bytes are moved with.
        devices: Names of RDMA devices, separated by commas.
        within: Seconds that setting it up may take.

    Raises:
        Unsupported: Mooncake's wheel is missing.
        Unavailable: The master cannot be reached, or the client does not start.
        Deadline: It took longer.
    """

    def __init__(
        self, master: str, *, host: str, segment_bytes: int, protocol: str, devices: str, within: float
    ) -> None:
        wheel = _wheel()
        arguments = (host, "P2PHANDSHAKE", 0, _LOCAL_BUFFER, protocol, devices, master)
        _rehearse(arguments, master, within)
        self.evictable = wheel.ReplicateConfig()
        self.pinned = wheel.ReplicateConfig()
        self.pinned.with_hard_pin = True
        store = wheel.MooncakeDistributedStore()
        returned = int(store.setup(*arguments[:2], segment_bytes, *arguments[3:]))
        # What failed to start must not be touched again, not even to close it.
        if returned != 0:
            raise Unavailable(
                f"the client of Mooncake Store at {master} does not start on {host} with {protocol!r}: it returned "
                f"{returned}; its log lines say why",
                reason="mooncake_store.start",
                details={"master": master, "code": str(returned)},
            )
        self.master = master
        self._state = _State(store)
        self._end = weakref.finalize(self, self._state.close, 5.0)

    def call(
        self,
        what: str,
        until: Until,
        function: Callable[[Any], T],
        undo: Callable[[Any], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> T:
        """Runs `function` with the client object on a thread, and waits for it.

        Args:
            what: What it does, for errors.
            until: When to wait no longer. The call itself goes on, and `function` keeps what it refers to meanwhile.
            function: Called with the wheel's object, which it must not keep.
            undo: Called after it, where the caller has stopped waiting.
            after: Called once nothing of that goes on, or nothing of it was begun.

        Raises:
            Cancelled: The client is closed, or `until` was told to stop.
            Deadline: It takes longer.
        """
        what = f"{what} at {self.master}"
        value: T = self._state.call(what, function, undo, until, after).wait(until, what)
        return value

    def later(self, function: Callable[[Any], object]) -> None:
        """Runs `function` with the client object, and waits for nothing. Not at all, where the client is closed."""
        with contextlib.suppress(Cancelled):
            self._state.call("", function, None, Until(0), None)

    @property
    def running(self) -> int:
        """Calls that have not ended, those included that nobody waits for any more."""
        return self._state.running

    def close(self, within: float) -> bool:
        """Closes it once every call has ended: later by itself, where that takes longer. Whether it is closed."""
        self._end.detach()
        return self._state.close(within)


class _State:
    """What a client's threads share."""

    def __init__(self, store: Any) -> None:
        self.running = 0
        self._store: Any = store
        self._closing = False
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._jobs: collections.deque[_Job] = collections.deque()
        self._idle = 0
        self._threads: list[threading.Thread] = []

    def call(
        self,
        what: str,
        function: Callable[[Any], Any],
        undo: Callable[[Any], object] | None,
        until: Until,
        after: Callable[[], object] | None,
    ) -> _Job:
        """Begins a call, before whose end the object is not closed."""
        with self._lock:
            store = None if self._closing else self._store
            self.running += store is not None
        if store is None:
            if after is not None:
                after()
            raise Cancelled(f"{what}: the client is closed; make a new one", reason="mooncake_store.closed")
        until.begin()

        def leave() -> None:
            if after is not None:
                after()
            until.end()
            with self._lock:
                self.running -= 1
            self._close_if_idle()

        job = _Job(lambda: function(store), None if undo is None else lambda: undo(store), leave)
        with self._lock:
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._work.notify()
            elif len(self._threads) < _MOST_THREADS:
                self._start(self._serve)
        return job

    def _start(self, function: Callable[[], None]) -> None:
        thread = threading.Thread(target=function, name="sw-mooncake", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self, within: float = 0.0) -> bool:
        until = time.monotonic() + within
        with self._lock:
            self._closing = True
            self._work.notify_all()
            # It may take longer than its caller has time.
            self._start(self._close_if_idle)
            threads = list(self._threads)
        for thread in threads:
            # Their last references to the object must be gone, too, before the interpreter may end.
            thread.join(max(0.0, until - time.monotonic()))
        return self._closed.is_set()

    def _close_if_idle(self) -> None:
        with self._lock:
            if not self._closing or self.running > 0 or self._store is None:
                return
            store, self._store = self._store, None
        store.close()
        self._closed.set()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not self._jobs:
                    if self._closing:
                        return
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                job = self._jobs.popleft()
            job.run()
            del job


class _Job:
    """One call, and what became of it."""

    def __init__(
        self, function: Callable[[], Any], undo: Callable[[], object] | None, leave: Callable[[], None]
    ) -> None:
        self._function = function
        self._undo = undo
        self._leave = leave
        self._value: Any = None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._ended = False
        self._abandoned = False
        self._stopped = False
        # A lock is the cheapest thing to wait for.
        self._waiting = threading.Lock()
        self._waiting.acquire()

    def run(self) -> None:
        function, self._function = self._function, _nothing
        try:
            self._value = function()
        except BaseException as error:
            self._error = error
        del function
        with self._lock:
            self._ended = True
            abandoned = self._abandoned
        try:
            if abandoned and self._undo is not None:
                self._undo()
        except Exception:
            # Nobody is there to be told; what cannot be taken back now goes by the master's own deadlines.
            _LOG.warning("a call that nobody waited for cannot be undone", exc_info=True)
        finally:
            self._undo = None
            self._leave()
            if not self._stopped:
                self._waiting.release()

    def wait(self, until: Until, what: str) -> Any:
        begun = time.monotonic()
        try:
            with until.waking(self._stop):
                done = self._waiting.acquire(timeout=min(until.left(), threading.TIMEOUT_MAX))
        except BaseException:
            self._abandon()
            raise
        if self._stopped:
            raise Cancelled(f"{what} was given up; it goes on without its caller", reason="operation.cancelled")
        if not done and self._abandon():
            waited = time.monotonic() - begun
            raise Deadline(
                f"{what} takes longer than {waited:.3f} s; it goes on without its caller",
                reason="mooncake_store.deadline",
                details={"waited_seconds": f"{waited:.3f}"},
            )
        if self._error is not None:
            raise self._error
        return self._value

    def _stop(self) -> None:
        """Has the caller stop waiting, unless it has ended."""
        with self._lock:
            if self._ended or self._abandoned:
                return
            self._abandoned = self._stopped = True
        self._waiting.release()

    def _abandon(self) -> bool:
        """Stops waiting, unless it has ended meanwhile."""
        with self._lock:
            self._abandoned = self._abandoned or not self._ended
            return self._abandoned


def _wheel() -> Any:
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise Unsupported(
            f"Mooncake Store cannot be imported: {error}; install mooncake-transfer-engine, or its variant for this "
            "host",
            reason="mooncake.missing",
        ) from error


def _nothing() -> None:
    """What a call does that has been done."""


def _rehearse(arguments: tuple[Any, ...], master: str, within: float) -> None:
    """Sets a client up in another process, which can be ended: the wheel keeps the GIL for as long as it tries."""
    end = time.monotonic() + within
    if not master.startswith("etcd://"):
        _reach(master, within)
    what = f"a client of Mooncake Store at {master}"
    details = {"master": master}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", _REHEARSAL, json.dumps(arguments)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=max(0.0, end - time.monotonic()), check=False
        )
    except subprocess.TimeoutExpired:
        raise Deadline(
            f"{what} does not start within {within} s: the master does not answer, or stands still",
            reason="mooncake_store.deadline",
            details=details,
        ) from None
    if done.returncode != 0:
        said = (done.stdout + done.stderr).decode(errors="replace").strip().splitlines()
        raise Unavailable(
            f"{what} does not start with {arguments}: {said[-1] if said else done.returncode}",
            reason="mooncake_store.start",
            details=details,
        )


_REHEARSAL = """
import json, os, sys
from mooncake.store import MooncakeDistributedStore
returned = MooncakeDistributedStore().setup(*json.loads(sys.argv[1]))
if returned != 0:
    print(f"it returned {returned}", flush=True)
os._exit(returned != 0)
"""


def _reach(master: str, within: float) -> None:
    """Finds out at once that nobody listens there, which the wheel takes 90 s for."""
    host, _, port = master.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise Invalid(
            f"{master!r} is no address of a master: it is host:port, or etcd://host:port", reason="argument.address"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=max(within, 0.001)).close()
    except OSError as error:
        raise Unavailable(
            f"the master of Mooncake Store at {master} cannot be reached: {error}; start mooncake_master there",
            reason="mooncake_store.master",
            details={"master": master},
        ) from error


def failure(code: int, what: str, details: dict[str, str]) -> StagewireError:
    """What a negative number that a call returned means.

    Args:
        code: The number.
        what: What was done to what, and where.
        details: For programs.
    """
    details = {**details, "code": str(code)}
    if code == NO_ROOM:
        return Exhausted(
            f"{what}: no segment has room for it in one piece. Remove payloads, or add segments; what is larger than "
            "every segment never fits",
            reason="credit.store_bytes",
            details=details,
        )
    if code == NOT_READY:
        return NotFound(f"{what}: it is still being written", reason="store.not_sealed", details=details)
    if code == NOT_FOUND:
        return NotFound(
            f"{what}: it is not there (any more). It was consumed or released, it has expired, or it was lost with the "
            "master or with the process that lent the memory",
            reason="payload.gone",
            details=details,
        )
    if code == EXISTS:
        return Conflict(
            f"{what}: it is there already, or somebody is writing it", reason="store.exists", details=details
        )
    if -899 <= code <= -800:
        return Unavailable(
            f"{what}: the bytes cannot be moved ({code}); the process that lends the memory is dead, stopped or "
            "unreachable, and what it held may be lost",
            reason="mooncake_store.transfer",
            details=details,
        )
    if -999 <= code <= -900:
        return Unavailable(
            f"{what}: the master does not answer ({code}); what it knew is lost if it was restarted",
            reason="mooncake_store.master",
            details=details,
        )
    if code == BAD_ARGUMENTS:
        return Internal(
            f"{what}: the client refused the arguments ({code})", reason="mooncake_store.refused", details=details
        )
    return Internal(
        f"{what}: it returned {code}, see types.h of Mooncake", reason="mooncake_store.refused", details=details
    )
