"""Who the one reader of a payload in Mooncake Store is.

A claim is an object that says who made it. There is at most one under a key, so that of several readers one gets it.
Nobody takes a claim away but its owner: whoever finds that the owner is no more claims the next number, which again one
of several gets. The claims of the dead go with the payload.

A reader on this host is seen to be dead at once. One of another host is taken for dead when its claim is `LASTS`
seconds old, by the clocks of both. A claim that this process has given up may still be there, or may still come: the
call that writes it, or takes it back, goes on without the reader that was cancelled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ._mooncake_client import BAD_ARGUMENTS, EXISTS, NO_ROOM, Until, failure
from ._native import Tensor
from .errors import Conflict, StagewireError

if TYPE_CHECKING:
    from ._mooncake_client import Client
    from ._mooncake_objects import Placed
    from ._mooncake_reads import Reads

LASTS = 30.0

# Seconds that giving a claim back may take.
_RELEASE = 1.0

# Seconds that it may be unclear whose a claim is, and between two looks.
_CLEAR = 1.0
_PAUSE = 0.01

# The nonces of the claims of this process that somebody makes or holds.
_wanted: set[str] = set()


@dataclasses.dataclass(frozen=True, slots=True)
class Reader:
    """A process, when it claimed, and which of its claims it is."""

    host: str
    pid: int
    started: int
    at: float
    nonce: str

    @classmethod
    def this_process(cls) -> Self:
        return cls(_host(), os.getpid(), _started(os.getpid()), time.time(), uuid.uuid4().hex)

    @property
    def is_leaving(self) -> bool:
        """Whether this process has given the claim up."""
        mine = (self.host, self.pid, self.started) == (_host(), os.getpid(), _started(os.getpid()))
        return mine and self.nonce not in _wanted

    @property
    def is_dead(self) -> bool:
        """Whether nobody reads any more, as far as that can be known here."""
        if self.host != _host():
            return time.time() - self.at > LASTS
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
    """The right to be the one reader of a payload. As a context manager it is released at the end."""

    def __init__(self, client: Client, key: str, reader: Reader) -> None:
        self._client = client
        self._key = key
        self._reader = reader
        # Whether what is under the key, if anything is, is this one.
        self._begun = False

    @classmethod
    def make(cls, client: Client, reads: Reads, placed: Placed, until: Until) -> Self:
        """Claims a payload.

        Raises:
            Conflict: Another reader has it.
            Unavailable, Deadline, Cancelled: As any call.
        """
        reader = Reader.this_process()
        _wanted.add(reader.nonce)
        try:
            for number in itertools.count():
                claim = cls(client, placed.layout.claim_key(number), reader)
                other = claim._try(reads, placed.payload_id, until)
                if other is None:
                    return claim
                if not other.is_dead:
                    raise _taken(placed.payload_id, f" (process {other.pid} of host {other.host.partition('/')[0]})")
        except BaseException:
            _wanted.discard(reader.nonce)
            raise
        raise AssertionError

    def release(self) -> None:
        """Lets others have it, this process among them. Calling it again does nothing."""
        begun = self._begun
        _wanted.discard(self._reader.nonce)
        if begun:
            # Nobody else has a claim of this number. Where the master does not answer in time, this one ends with its
            # process, or with the payload.
            with contextlib.suppress(StagewireError):
                self._client.call("giving a claim back", Until(_RELEASE), self._take_back)

    def forget(self) -> None:
        """It has gone with the payload."""
        self._begun = False
        _wanted.discard(self._reader.nonce)

    def _try(self, reads: Reads, payload_id: str, until: Until) -> Reader | None:
        """Claims this number, or says who has it."""
        what = f"claiming payload {payload_id} in Mooncake Store"
        unclear: Until | None = None
        while True:
            code = self._client.call(what, until, self._write, self._take_back)
            # A store without room for a claim must be read all the more.
            if code in (0, NO_ROOM):
                return None
            # Bad arguments are what the wheel calls a key that this very process is writing.
            if code not in (EXISTS, BAD_ARGUMENTS):
                raise failure(code, what, {"payload": payload_id})
            found = reads.small(what, self._key, until)
            # Where none can be read, it is being written, or given back.
            other = None if isinstance(found, int) else Reader.from_bytes(found)
            if other is not None and not other.is_leaving:
                return other
            unclear = unclear or Until(min(_CLEAR, until.left()))
            if not unclear.left():
                raise _taken(payload_id, "")
            until.pause(_PAUSE)

    def _write(self, store: Any) -> int:
        record = Tensor.from_buffer(self._reader.to_bytes())
        size = record.nbytes
        code = int(store.batch_put_session_start([self._key], [size], self._client.pinned)[0])
        if code != 0:
            return code
        self._begun = True
        written = store.batch_put_from_multi_buffer_ranges([self._key], [[record.data_ptr]], [[size]], [[0]])
        if list(written) != [size]:
            self._take_back(store)
            return min(int(written[0]), -1)
        return int(store.batch_put_session_end([self._key])[0])

    def _take_back(self, store: Any) -> None:
        begun, self._begun = self._begun, False
        if begun and store.batch_put_session_revoke([self._key])[0] != 0:
            store.batch_remove([self._key], True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.release()
