"""What the two clients share: where the server is, what it answers, how an event stream goes on after a break."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2

from . import _rundir
from .errors import Conflict, Deadline, Internal, Invalid, StagewireError, Unavailable, from_failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ENDED = frozenset({"succeeded", "failed", "cancelled"})
"""States, and types of events, that end a job."""

LINGER = 60.0
"""Seconds that an event stream looks for a server that has gone away: as long as workers do."""

_SILENCE = 20.0
"""Seconds without a byte after which an event stream connects again; the server sends a sign of life more often."""

_LIMITS = {"connect": 5.0, "read": 60.0, "write": 60.0, "pool": 60.0}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an attempt has come: ``done`` of ``total``, counted in ``unit``."""

    done: int
    total: int
    unit: str


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a job.

    Attributes:
        id: Where to go on: `Job.events` with ``after=event.id`` gives what comes next.
        seq: Number of the event within the job. Progress has the number of the event before it.
        type: ``submitted``, ``queued``, ``position``, ``offered``, ``running``, ``progress``, ``published``,
            ``chunk``, ``checkpointed``, ``yielding``, ``yielded``, ``cached``, ``stage_done``, ``requeued``,
            ``cancelling``, ``succeeded``, ``failed`` or ``cancelled``; newer servers may have more.
        at_ns: When, in nanoseconds since the Unix epoch.
        stage: The stage it happened to; empty for the job as a whole.
        progress: How far the stage has come, where that is what happened.
        position: Where the job stands among those of its class that wait for the stage, from 1, where that is what
            happened.
        data: The event as the server sent it, with all that it says besides.
    """

    id: str
    seq: int
    type: str
    at_ns: int
    stage: str
    progress: Progress | None
    position: int | None
    data: dict[str, Any] = field(repr=False)

    @classmethod
    def parse(cls, event_id: str, text: str) -> Event:
        """Reads one server-sent event."""
        data = json.loads(text)
        done = data.get("progress")
        progress = Progress(int(done["done"]), int(done["total"]), str(done["unit"])) if done else None
        return cls(
            id=event_id,
            seq=int(data["seq"]),
            type=str(data["type"]),
            at_ns=int(data.get("at_ns") or 0),
            stage=str(data.get("stage") or ""),
            progress=progress,
            position=data.get("position", {}).get("rank"),
            data=data,
        )

    @property
    def ends(self) -> bool:
        """Whether this is the last event of its job."""
        return self.type in ENDED


class Place:
    """Where the server is: a fixed URL, or wherever the run directory says at the time of the call."""

    def __init__(
        self,
        url: str | None,
        run_dir: str | os.PathLike[str] | None,
        token: str | None,
    ) -> None:
        if url is not None and run_dir is not None:
            raise Invalid("url= and run_dir= name the server twice: give one of them", reason="client.options")
        if url is None and run_dir is None:
            url = os.environ.get("STAGEWIRE_URL") or None
        if url is not None and not url.startswith(("http://", "https://")):
            raise Invalid(f"url {url!r} must start with http:// or https://", reason="client.options")
        self._url = None if url is None else url.rstrip("/")
        self._run_dir = _rundir.find(run_dir)
        file = os.environ.get("STAGEWIRE_TOKEN_FILE")
        if token is None and file:
            try:
                token = Path(file).read_text(encoding="utf-8").strip()
            except OSError as error:
                raise Invalid(f"cannot read STAGEWIRE_TOKEN_FILE {file}: {error}", reason="client.options") from error
        self._token = token

    def url(self, path: str) -> str:
        """The full address of a path of the API."""
        return (self._url or _rundir.server(self._run_dir).url) + path

    def headers(self) -> dict[str, str]:
        """The token, where there is one."""
        return {} if self._token is None else {"authorization": f"Bearer {self._token}"}

    def unreachable(self, url: str, error: Exception) -> Unavailable:
        """The exception for a server that does not answer."""
        hint = "" if self._url else ", although server.json names it: it has died, or is about to start again"
        what = str(error) or type(error).__name__
        return Unavailable(
            f"no server answers at {url}{hint} ({what})", reason="server.unreachable", details={"url": url}
        )


def options() -> dict[str, Any]:
    """Options of both HTTP clients. Proxies of the environment are not for a server on this host."""
    return {"trust_env": False, "timeout": httpx2.Timeout(**_LIMITS), "headers": {"user-agent": "stagewire-python"}}


def stream_timeout(remaining: float | None) -> httpx2.Timeout:
    """Time limits of an event stream of which `remaining` seconds are left."""
    read = _SILENCE if remaining is None else max(0.001, min(_SILENCE, remaining))
    return httpx2.Timeout(**{**_LIMITS, "read": read})


def failure(answer: httpx2.Response) -> StagewireError:
    """The exception for an answer that is not a success; its body has been read."""
    try:
        error = answer.json()["error"]
        return from_failure(error["class"], error["reason"], error["message"], error.get("details"))
    except (ValueError, KeyError, TypeError):
        pass
    text = answer.text.strip()[:200]
    return Internal(
        f"{answer.url} answered {answer.status_code} with something that is not Stagewire's: {text!r}",
        reason="server.foreign",
        details={"status": str(answer.status_code)},
    )


def decode(answer: httpx2.Response) -> Any:
    """The JSON body of a success.

    Raises:
        StagewireError: The server refused, or it is no Stagewire server.
    """
    if not answer.is_success:
        raise failure(answer)
    try:
        return answer.json()
    except ValueError:
        raise failure(answer) from None


def job_path(job_id: str, rest: str = "") -> str:
    """The path of a job; what is no id finds no job."""
    return f"/v1/jobs/{_segment(job_id)}{rest}"


def letter_path(job_id: str, rest: str) -> str:
    """The path of a dead letter."""
    return f"/v1/dead-letters/{_segment(job_id)}{rest}"


def next_page(path: str, page: Mapping[str, Any]) -> str | None:
    """The path of the page after this one, if there is one."""
    return f"{path}?before={_segment(page['next'])}" if page["next"] else None


def _segment(job_id: str) -> str:
    return "".join(c if c.isascii() and (c.isalnum() or c == "-") else "_" for c in job_id)


def parameters(params: Mapping[str, Any] | None, named: Mapping[str, Any]) -> dict[str, Any]:
    """Both ways to give parameters, together.

    Raises:
        Invalid: A parameter is given both ways, or has a value that JSON cannot carry.
    """
    both = sorted(set(params or {}) & set(named))
    if both:
        raise Invalid(f"parameters given twice: {', '.join(both)}", reason="client.params")
    together = {**(params or {}), **named}
    try:
        json.dumps(together, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Invalid(f"the parameters do not fit into JSON: {error}", reason="client.params") from None
    return together


def submission(
    params: Mapping[str, Any] | None, named: Mapping[str, Any], job_class: str | None, queue_deadline: float | None
) -> dict[str, Any]:
    """The body of a submission.

    Raises:
        Invalid: As `parameters`; or the deadline is not above 0, or no number. The server judges the rest.
    """
    body: dict[str, Any] = {"params": parameters(params, named)}
    if job_class is not None:
        body["class"] = job_class
    if queue_deadline is not None:
        if not 0 < queue_deadline < math.inf:
            message = f"a queue deadline of {queue_deadline} s is not possible; it must be above 0, or left out"
            raise Invalid(message, reason="job.deadline")
        body["queue_deadline_s"] = queue_deadline
    return body


def drain(worker: str | None, stage: str | None, deadline: float | None) -> dict[str, Any]:
    """The body of a drain; what is not given is left out. The server judges the rest."""
    body = {"worker": worker, "stage": stage, "deadline_s": deadline}
    return {name: value for name, value in body.items() if value is not None}


def ended(job: Mapping[str, Any]) -> None:
    """Raises the reason why a job that has ended has no result.

    Raises:
        StagewireError: The job failed (class and reason are those of its failure) or was cancelled.
        Conflict: The job has not ended.
    """
    state, job_id = job["state"], job["id"]
    if state == "succeeded":
        return
    reported = job.get("failure")
    if reported:
        details = {**(reported.get("details") or {}), "job": job_id}
        raise from_failure(reported["class"], reported["reason"], reported["message"], details)
    if state == "cancelled":
        raise from_failure("cancelled", "job.cancelled", f"job {job_id} was cancelled", {"job": job_id})
    if state == "failed":
        raise Internal(f"job {job_id} failed", reason="job.failed", details={"job": job_id})
    raise Conflict(f"job {job_id} has not ended: it is {state}", reason="job.not_ended", details={"job": job_id})


class Sse:
    """Cuts a ``text/event-stream`` into its events, wherever the network cut it."""

    def __init__(self, last_id: str) -> None:
        self._rest = b""
        self._id = last_id
        self._data: list[str] = []

    def feed(self, piece: bytes) -> Iterator[tuple[str, str]]:
        """The events that this piece completes: the last id so far, and the data."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            text = line.removesuffix(b"\r").decode("utf-8", "replace")
            if not text and self._data:
                data, self._data = "\n".join(self._data), []
                yield self._id, data
            elif text.startswith("data:"):
                self._data.append(text.removeprefix("data:").removeprefix(" "))
            elif text.startswith("id:"):
                self._id = text.removeprefix("id:").removeprefix(" ")


class Following:
    """Where an event stream stands: what was seen, for how long the server has been away, when the caller gives up."""

    def __init__(self, job_id: str, after: str | None, timeout: float | None) -> None:
        now = time.monotonic()
        self.done = False
        self._job_id = job_id
        self._after = after or ""
        self._timeout = timeout
        self._deadline = None if timeout is None else now + timeout
        self._away_since: float | None = None
        self._pause = 0.05
        self._sse = Sse(self._after)

    def headers(self) -> dict[str, str]:
        """Where to go on, for a new connection; what was half read is forgotten."""
        self._sse = Sse(self._after)
        resume = {"last-event-id": self._after} if self._after else {}
        return {"accept": "text/event-stream", **resume}

    def remaining(self) -> float | None:
        """Seconds until the caller gives up.

        Raises:
            Deadline: It is time.
        """
        if self._deadline is None:
            return None
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise Deadline(
                f"job {self._job_id} has not ended within {self._timeout:g} s; it goes on",
                reason="client.deadline",
                details={"job": self._job_id},
            )
        return left

    def feed(self, piece: bytes) -> Iterator[Event]:
        """The new events in a piece of the stream."""
        self._away_since, self._pause = None, 0.05
        for event_id, data in self._sse.feed(piece):
            event = Event.parse(event_id, data)
            self._after = event_id
            self.done = self.done or event.ends
            yield event

    def away(self, error: StagewireError) -> float:
        """The server is away: seconds to wait before the next try.

        Raises:
            Unavailable: It has been away for longer than `LINGER`.
        """
        now = time.monotonic()
        self._away_since = self._away_since or now
        if now - self._away_since > LINGER:
            raise error
        pause, self._pause = self._pause, min(1.0, self._pause * 2)
        left = self.remaining()
        return pause if left is None else min(pause, left)
