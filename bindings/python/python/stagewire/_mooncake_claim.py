"""Who the one reader of a payload in Mooncake Store is.

A claim is an object that says who made it. Claims have numbers, and there is at most one under each, so that of several
readers one gets it; who has the highest number has the payload. An owner that lives renews its claim by writing the
next number, and gives it back by writing there that it has ended. Whoever finds that the owner is no more writes the
next number, too: either the owner gets it, or its successor, and the owner learns of that by its next renewal. Numbers
are not taken away before the payload is, so that nobody finds one free that was passed already.

A reader on this host is seen to be dead at once. One of another host is taken for dead when its claim is `LASTS`
seconds old, by the clocks of both. A claim that this process has given up may still be there, or may still come: the
call that writes it, or ends it, goes on without the reader that was cancelled.

Where the store has no room for a claim, there is none: then the removal of the payload alone decides which of several
readers has got it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ._mooncake_client import BAD_ARGUMENTS, EXISTS, NO_ROOM, NOT_FOUND, Until, failure
from ._native import Tensor
from .errors import Conflict, StagewireError

if TYPE_CHECKING:
    from ._mooncake_client import Client
    from ._mooncake_objects import Placed
    from ._mooncake_reads import Reads

LASTS = 30.0
"""Seconds after which a claim of another host that was not renewed is over."""

# A claim is renewed when it is so old, as a part of what it lasts, and looked at twice as often.
_RENEWED = 1 / 3

# Seconds that giving a claim back may take.
_RELEASE = 1.0

# Seconds that it may be unclear whose a claim is, and between two looks.
_CLEAR = 1.0
_PAUSE = 0.01

# The nonces of the claims of this process that somebody makes or holds.
_wanted: set[str] = set()


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """A process, when it claimed, which of its claims it is, and whether that has ended."""

    host: str
    pid: int
    started: int
    at: float
    nonce: str
    ended: bool = False

    @classmethod
    def this_process(cls) -> Self:
        return cls(_host(), os.getpid(), _started(os.getpid()), time.time(), uuid.uuid4().hex)

    @property
    def is_over(self) -> bool:
        """Whether nobody reads any more, as far as that can be known here."""
        if self.ended:
            return True
        if self.host != _host():
            return time.time() - self.at > LASTS
        if (self.pid, self.started) == (os.getpid(), _started(os.getpid())):
            return self.nonce not in _wanted
        try:
            return _started(self.pid) != self.started
        except OSError:
            return True

    def to_bytes(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """None, where somebody else wrote there."""
        try:
            return cls(**json.loads(data))
        except (ValueError, TypeError):
            return None


def _host() -> str:
    """This boot of this host, and the numbering of its processes: containers have their own."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> int:
    """When a process that runs was started, in ticks since the host was.

    Raises:
        ProcessLookupError: It has ended.
    """
    # The name of the program stands in brackets, and may contain anything.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return int(fields[19])


def _taken(payload_id: str, who: str) -> Conflict:
    return Conflict(
        f"payload {payload_id} is being read by another consumer{who}, and its first consumer deletes it",
        reason="payload.claimed",
        details={"payload": payload_id},
    )


class Claim:
    """The right to be the one reader of a payload. As a context manager it is released at the end.

    It is renewed for as long as somebody refers to it.
    """

    def __init__(self, client: Client, placed: Placed, reader: Reader) -> None:
        self._client = client
        self._placed = placed
        self._reader = reader
        # Held while it is renewed or ended, and by nobody who waits for anything else.
        self._writing = threading.Lock()
        # Its highest number; none, where it has none or has ended.
        self._number: int | None = None
        self._renewed = time.monotonic()
        # Why there is nothing to renew any more, as the wheel numbers it.
        self._lost = 0

    @classmethod
    def make(cls, client: Client, reads: Reads, placed: Placed, until: Until) -> Self:
        """Claims a payload.

        Raises:
            Conflict: Another reader has it.
            NotFound: It is not there (any more).
            Unavailable, Deadline, Cancelled: As any call.
        """
        reader = Reader.this_process()
        _wanted.add(reader.nonce)
        try:
            claim = cls(client, placed, reader)
            number = 0
            while (other := claim._try(number, reads, until)) is not None:
                if not other.is_over and not claim._is_passed(number, until):
                    host = other.host.partition("/")[0]
                    raise _taken(placed.payload_id, f" (process {other.pid} of host {host})")
                number += 1
        except BaseException:
            _wanted.discard(reader.nonce)
            raise
        return claim

    def check(self, until: Until) -> None:
        """Sees to it that no other reader has taken it over.

        Raises:
            Conflict: One has, since this claim could not be renewed in time.
            NotFound: The payload is not there any more.
            Unavailable, Deadline, Cancelled: As any call.
        """
        if self._number is not None and not self._lost and self._age > LASTS:
            self._client.call(f"renewing the claim of payload {self._placed.payload_id}", until, self._renew)
        if self._lost == NOT_FOUND:
            raise failure(NOT_FOUND, f"reading payload {self._placed.payload_id}", {"payload": self._placed.payload_id})
        if self._lost:
            raise _taken(self._placed.payload_id, ", which took it over")

    def release(self) -> None:
        """Lets others have it, this process among them. Calling it again does nothing."""
        _wanted.discard(self._reader.nonce)
        if self._number is not None:
            # Where the master does not answer in time, this claim ends with its process, its time, or the payload.
            with contextlib.suppress(StagewireError):
                self._client.call("giving a claim back", Until(_RELEASE), self._end)

    def forget(self) -> None:
        """It has gone with the payload."""
        self._number = None
        _wanted.discard(self._reader.nonce)

    @property
    def _age(self) -> float:
        return time.monotonic() - self._renewed

    def renew_if_due(self) -> None:
        """Has it renewed where it is so old, and waits for nothing."""
        if self._number is not None and not self._lost and self._age > LASTS * _RENEWED:
            self._client.later(self._renew)

    def _try(self, number: int, reads: Reads, until: Until) -> Reader | None:
        """Claims this number, or says who has it."""
        payload_id = self._placed.payload_id
        what = f"claiming payload {payload_id} in Mooncake Store"

        def write(store: Any) -> int:
            code = self._put(store, number, self._reader)
            if code == 0:
                self._number = number
            return code

        unclear: Until | None = None
        while True:
            code = self._client.call(what, until, write, self._end)
            # A store without room for a claim must be read all the more.
            if code in (0, NO_ROOM):
                return None
            # Bad arguments are what the wheel calls a key that this very process is writing.
            if code not in (EXISTS, BAD_ARGUMENTS):
                raise failure(code, what, {"payload": payload_id})
            found = reads.small(what, self._placed.layout.claim_key(number), until)
            # Where none can be read, it is being written.
            other = None if isinstance(found, int) else Reader.from_bytes(found)
            if other is not None:
                return other
            unclear = unclear or Until(min(_CLEAR, until.left()))
            if not unclear.left():
                raise _taken(payload_id, "")
            until.pause(_PAUSE)

    def _is_passed(self, number: int, until: Until) -> bool:
        """Whether there is a higher number than this one."""
        what = f"looking who has payload {self._placed.payload_id} in Mooncake Store"
        key = self._placed.layout.claim_key(number + 1)
        return self._client.call(what, until, lambda store: int(store.is_exist(key))) == 1

    def _renew(self, store: Any) -> None:
        with self._writing:
            if self._number is None or self._lost or self._age <= LASTS * _RENEWED:
                return
            now = time.monotonic()
            code = self._put(store, self._number + 1, dataclasses.replace(self._reader, at=time.time()))
            if code == 0:
                self._number += 1
                self._renewed = now
            # Its successor has the next number. After other errors it stays as old as it is, and is tried again.
            if code in (EXISTS, NOT_FOUND):
                self._lost = code

    def _end(self, store: Any) -> None:
        with self._writing:
            number, self._number = self._number, None
            if number is None:
                return
            code = self._put(store, number + 1, dataclasses.replace(self._reader, ended=True))
            if code == NO_ROOM:
                # The next best: nobody has gone past it yet, but who is just about to.
                store.batch_remove([self._placed.layout.claim_key(number)], True)
            elif code == NOT_FOUND:
                store.batch_remove([self._placed.layout.claim_key(one) for one in range(number + 1)], True)

    def _put(self, store: Any, number: int, reader: Reader) -> int:
        """Writes a claim of a payload that is there: 0, or the number that says why not."""
        key, record = self._placed.layout.claim_key(number), Tensor.from_buffer(reader.to_bytes())
        size = record.nbytes
        code = int(store.batch_put_session_start([key], [size], self._client.pinned)[0])
        if code != 0:
            return code
        written = list(store.batch_put_from_multi_buffer_ranges([key], [[record.data_ptr]], [[size]], [[0]]))
        code = int(store.batch_put_session_end([key])[0]) if written == [size] else min(int(written[0]), -1)
        if code != 0:
            store.batch_put_session_revoke([key])
            return code
        # Who removes a payload looks for claims last. One that came later than that would stay for ever.
        there = int(store.is_exist(self._placed.keys()[0]))
        if there == 0:
            store.batch_remove([key], True)
        return {0: NOT_FOUND, 1: 0}.get(there, there)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()


class Renewals:
    """Has the claims of a store renewed while they are referred to, on a thread that the first of them starts."""

    def __init__(self) -> None:
        self._claims: weakref.WeakSet[Claim] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        # Its thread does not keep it.
        weakref.finalize(self, self._closed.set)

    def add(self, claim: Claim) -> None:
        with self._lock:
            self._claims.add(claim)
            if self._thread is None:
                arguments = (weakref.ref(self), self._closed)
                self._thread = threading.Thread(target=_keep, args=arguments, name="sw-mooncake-claims", daemon=True)
                self._thread.start()

    def renew(self) -> None:
        with self._lock:
            claims = list(self._claims)
        for claim in claims:
            claim.renew_if_due()

    def close(self) -> None:
        self._closed.set()


def _keep(renewals: weakref.ref[Renewals], closed: threading.Event) -> None:
    while not closed.wait(LASTS * _RENEWED / 2):
        found = renewals()
        if found is None:
            return
        found.renew()
        del found
