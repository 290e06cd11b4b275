"""Clients of a Stagewire server: submit jobs, follow them, fetch what they made.

```python
import stagewire

with stagewire.Client() as client:                       # finds the server through the run directory
    job = client.submit(prompt="a red cat", steps=4)
    for event in job.events():
        print(event.type, event.stage, event.progress)
    job.result()["video.mp4"].save("cat.mp4")
```

`AsyncClient` has the same names for asyncio.
"""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx2

from . import _http, _inputs
from ._http import Event, Following, Place, Progress
from .aio import AsyncClient, AsyncJob
from .errors import NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = ["AsyncClient", "AsyncJob", "Client", "Event", "Job", "JobResult", "Progress", "ResultArtefact"]


class Client:
    """Talks to one server, also when it restarts in between. Threads may share it.

    Args:
        url: Address of the server, ``http://127.0.0.1:8000``; default ``STAGEWIRE_URL``.
        run_dir: Run directory in which the server is looked up; default ``STAGEWIRE_RUN_DIR``, else the usual place.
        token: Bearer token, for a server that listens beyond this host; default: what is in ``STAGEWIRE_TOKEN_FILE``.

    Raises:
        Invalid: The options contradict each other.
    """

    def __init__(
        self, url: str | None = None, *, run_dir: str | os.PathLike[str] | None = None, token: str | None = None
    ) -> None:
        self._place = Place(url, run_dir, token)
        self._http = httpx2.Client(**_http.options())

    def submit(
        self,
        params: Mapping[str, Any] | None = None,
        /,
        *,
        job_class: str | None = None,
        queue_deadline: float | None = None,
        idempotency_key: str | None = None,
        **named: Any,
    ) -> Job:
        """Submits a job.

        Args:
            params: Parameters by name, for names that are no Python names.
            job_class: Its class, such as ``interactive``; None is the pipeline's default.
            queue_deadline: Seconds after which the job is dropped if it has not begun; None leaves that to its class.
            idempotency_key: Submitting again with the same key and parameters gives the same job. Without it each call
                makes a key of its own, so that a call that is repeated because the connection broke makes one job.
            named: Parameters by name: ``client.submit(prompt="a red cat")``. One of type ``input`` takes a
                `pathlib.Path` or bytes, which are uploaded, or what `upload` returned.

        Raises:
            Invalid: A parameter is unknown, missing, of another type or out of range; there is no such class; the
                deadline is below 1 ms or above 366 days.
            Conflict: The key was used with other parameters, or for another class or deadline.
            Exhausted: Too many jobs wait.
            Unavailable: No server answers.
        """
        params, named = self._uploaded(params or {}), self._uploaded(named)
        body = _http.submission(params, named, job_class, queue_deadline)
        key = idempotency_key or str(uuid.uuid4())
        return Job(self, self._json("POST", "/v1/jobs", json=body, headers={"idempotency-key": key}))

    def upload(self, source: str | os.PathLike[str] | bytes, *, media_type: str | None = None) -> str:
        """Sends a picture, a clip or another file, and returns its name for a parameter of type ``input``.

        The name is the digest of the bytes: sending the same again gives the same. The server drops it some time after
        the last job that referred to it.

        Args:
            source: Path of the file, or its bytes.
            media_type: For example ``image/png``; by default what the name of the file suggests.

        Raises:
            Invalid: It is larger than the server takes.
            Exhausted: There is no room for it.
            Unavailable: No server answers.
            OSError: The file cannot be read.
        """
        headers = _inputs.headers(source, media_type)
        sent = self._json("POST", "/v1/inputs", body=lambda: _inputs.pieces(source), headers=headers)
        return str(sent["name"])

    def _uploaded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with names in place of files, which the server then has."""
        if files := _inputs.in_params(params):
            _inputs.check(files, self.pipeline()["params"])
        return {**params, **{name: self.upload(file) for name, file in files.items()}}

    def job(self, job_id: str) -> Job:
        """The job of this id.

        Raises:
            NotFound: There is none.
        """
        return Job(self, self._json("GET", _http.job_path(job_id)))

    def jobs(self) -> list[Job]:
        """The jobs that the server knows, newest first."""
        return [Job(self, job) for job in self._json("GET", "/v1/jobs")["jobs"]]

    def dead_letters(self) -> list[dict[str, Any]]:
        """Jobs that failed for good, newest first: why, and what became of their attempts."""
        found: list[dict[str, Any]] = []
        path: str | None = "/v1/dead-letters"
        while path is not None:
            page = self._json("GET", path)
            found += page["dead_letters"]
            path = _http.next_page("/v1/dead-letters", page)
        return found

    def redrive(self, job_id: str) -> Job:
        """Tries a dead letter again, under its id, as if submitted now.

        Raises:
            NotFound: There is no such job.
            Conflict: It is no dead letter.
            Exhausted: The queue is full.
        """
        return Job(self, self._json("POST", _http.letter_path(job_id, "/redrive")))

    def discard(self, job_id: str) -> Job:
        """Keeps a dead letter no longer: it is a failed job like others.

        Raises:
            NotFound: There is no such job.
            Conflict: It is no dead letter.
        """
        return Job(self, self._json("POST", _http.letter_path(job_id, "/discard")))

    def pipeline(self) -> dict[str, Any]:
        """What the server serves: stages, parameters, workers."""
        found: dict[str, Any] = self._json("GET", "/v1/pipeline")
        return found

    def pools(self) -> dict[str, Any]:
        """What each stage and each of its workers does and holds."""
        found: dict[str, Any] = self._json("GET", "/v1/pools")
        return found

    def drain(
        self, worker: str | None = None, *, stage: str | None = None, deadline: float | None = None
    ) -> list[dict[str, Any]]:
        """Has a worker, or all that a stage has now, leave without losing anything. Returns those that drain.

        What runs goes on to its end; after `deadline` seconds it is queued again for other workers.

        Raises:
            NotFound: No such worker is attached, or there is no such stage.
        """
        body = _http.drain(worker, stage, deadline)
        answer: dict[str, list[dict[str, Any]]] = self._json("POST", "/v1/pipeline/drain", json=body)
        return answer["workers"]

    def pause(self) -> None:
        """Lets no more jobs begin, until `resume`. Those that have begun go on."""
        self._json("POST", "/v1/pipeline/pause")

    def resume(self) -> None:
        """Lets jobs begin again."""
        self._json("POST", "/v1/pipeline/resume")

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _send(
        self, method: str, path: str, *, body: Callable[[], Any] | None = None, **options: Any
    ) -> httpx2.Response:
        headers = {**self._place.headers(), **options.pop("headers", {})}
        for again in (True, False):
            url = self._place.url(path)
            if body is not None:
                options["content"] = body()
            try:
                return self._http.request(method, url, headers=headers, **options)
            except httpx2.TransportError as error:
                # A server that restarted has another port: look once more.
                if not again or self._place.url(path) == url:
                    raise self._place.unreachable(url, error) from error
        raise AssertionError

    def _json(self, method: str, path: str, **options: Any) -> Any:
        return _http.decode(self._send(method, path, **options))

    @contextlib.contextmanager
    def _stream(
        self, path: str, headers: Mapping[str, str], timeout: httpx2.Timeout | None = None
    ) -> Iterator[httpx2.Response]:
        url = self._place.url(path)
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        headers = {**self._place.headers(), **headers}
        try:
            with self._http.stream("GET", url, headers=headers, **options) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _http.failure(answer)
                yield answer
        except httpx2.TransportError as error:
            raise self._place.unreachable(url, error) from error


class Job:
    """One job of a server.

    Attributes:
        id: Its id, a UUID.
        state: Its state when last asked: ``active``, ``cancelling``, ``succeeded``, ``failed`` or ``cancelled``.
        info: All that the server said of it when last asked.
    """

    def __init__(self, client: Client, info: dict[str, Any]) -> None:
        self._client = client
        self.info = info
        self.id: str = info["id"]
        self.state: str = info["state"]

    def refresh(self) -> Self:
        """Asks the server for the job's state."""
        return self._now(self._client._json("GET", _http.job_path(self.id)))

    def events(self, *, after: str | None = None, timeout: float | None = None) -> Iterator[Event]:
        """Yields what happens to the job, from its beginning until it has ended.

        Goes on where it stopped when the connection breaks or the server restarts within a minute.

        Args:
            after: Leave out events up to the one of this `Event.id`.
            timeout: Seconds; None is without limit.

        Raises:
            Deadline: The job has not ended in time; it goes on.
            Unavailable: The server has been away for more than a minute.
        """
        follow = Following(self.id, after, timeout)
        while not follow.done:
            try:
                limits = _http.stream_timeout(follow.remaining())
                with self._client._stream(_http.job_path(self.id, "/events"), follow.headers(), limits) as answer:
                    for piece in answer.iter_raw():
                        yield from follow.feed(piece)
                        follow.remaining()
                # The server ends the stream when the job has ended, or when it shuts down itself.
                if not follow.done and self.refresh().state in _http.ENDED:
                    return
            except Unavailable as error:
                time.sleep(follow.away(error))

    def wait(self, timeout: float | None = None) -> str:
        """Waits until the job has ended and returns its state: ``succeeded``, ``failed`` or ``cancelled``.

        Args:
            timeout: Seconds; None is without limit.

        Raises:
            Deadline: It has not ended in time; it goes on.
            Unavailable: The server has been away for more than a minute.
        """
        if self.state not in _http.ENDED:
            for _event in self.events(timeout=timeout):
                pass
            self.refresh()
        return self.state

    def result(self, timeout: float | None = None) -> JobResult:
        """Waits until the job has ended and returns what it made.

        Raises:
            StagewireError: The job failed; class, reason and message are those of its failure. An exception of a stage
                function is `Internal`, and its text is in the message.
            Cancelled: The job was cancelled.
            Deadline: It has not ended in time; it goes on.
        """
        self.wait(timeout)
        _http.ended(self.info)
        return JobResult(self._client, self.id, self._client._json("GET", _http.job_path(self.id, "/result")))

    def cancel(self) -> Self:
        """Asks the job to stop. It does at its next step; `wait` says when. Does nothing to a job that has ended."""
        return self._now(self._client._json("POST", _http.job_path(self.id, "/cancel")))

    def timeline(self) -> dict[str, Any]:
        """When each stage ran and each chunk was handed over."""
        found: dict[str, Any] = self._client._json("GET", _http.job_path(self.id, "/timeline"))
        return found

    def _now(self, info: dict[str, Any]) -> Self:
        self.info, self.state = info, info["state"]
        return self

    def __repr__(self) -> str:
        return f"Job(id={self.id!r}, state={self.state!r})"


class JobResult:
    """What a job made: its artefacts by name.

    Attributes:
        info: What the last stage said about them; any JSON value.
        artefacts: The artefacts by name.
    """

    def __init__(self, client: Client, job_id: str, data: dict[str, Any]) -> None:
        self.info: Any = data.get("info")
        self.artefacts = {item["name"]: ResultArtefact(client, job_id, item) for item in data["artefacts"]}

    def __getitem__(self, name: str) -> ResultArtefact:
        if name not in self.artefacts:
            raise NotFound(f"there is no artefact {name!r}, only {', '.join(self.artefacts)}", reason="result.artefact")
        return self.artefacts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.artefacts)

    def __repr__(self) -> str:
        return f"JobResult({list(self.artefacts.values())!r})"


class ResultArtefact:
    """One finished file, still at the server.

    Attributes:
        name: The name that the stage gave it.
        media_type: For example ``video/mp4``.
        nbytes: Its size in bytes.
    """

    def __init__(self, client: Client, job_id: str, item: dict[str, Any]) -> None:
        self._client = client
        self._path: str = item["url"]
        self.job_id = job_id
        self.name: str = item["name"]
        self.media_type: str = item["media_type"]
        self.nbytes: int = item["nbytes"]

    def read(self) -> bytes:
        """The bytes of the file."""
        answer = self._client._send("GET", self._path)
        if not answer.is_success:
            raise _http.failure(answer)
        return answer.content

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the file to `path`, or into it where that is a folder. It is there whole or not at all.

        Raises:
            OSError: It cannot be written.
        """
        target = Path(path)
        if target.is_dir():
            target /= Path(self.name).name
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        try:
            with part.open("xb") as file, self._client._stream(self._path, {}) as answer:
                for piece in answer.iter_bytes():
                    file.write(piece)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target

    def __repr__(self) -> str:
        return f"ResultArtefact(name={self.name!r}, media_type={self.media_type!r}, nbytes={self.nbytes})"
