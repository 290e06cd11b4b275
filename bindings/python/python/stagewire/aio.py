"""Client, connector and KV caches for asyncio.

The names of `stagewire.client`, `stagewire.diffusion` and, with ``Kv`` before them, `stagewire.kv`, to be awaited.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import httpx2

from . import _http, _inputs
from ._aio_connector import DiffusionConnector, StageHandle, StreamingPublish
from ._aio_kv import KvReceiver, KvReceiverRoom, KvSender, KvSenderRoom
from ._http import Event, Following, Place
from .errors import NotFound, Unavailable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

__all__ = [
    "AsyncArtefact",
    "AsyncClient",
    "AsyncJob",
    "AsyncJobResult",
    "DiffusionConnector",
    "KvReceiver",
    "KvReceiverRoom",
    "KvSender",
    "KvSenderRoom",
    "StageHandle",
    "StreamingPublish",
]


class AsyncClient:
    """`stagewire.Client` for asyncio. Arguments and errors are the same.

    Args:
        url: Address of the server; default ``STAGEWIRE_URL``.
        run_dir: Run directory in which the server is looked up; default ``STAGEWIRE_RUN_DIR``, else the usual place.
        token: Bearer token; default: what is in ``STAGEWIRE_TOKEN_FILE``.
    """

    def __init__(
        self, url: str | None = None, *, run_dir: str | os.PathLike[str] | None = None, token: str | None = None
    ) -> None:
        self._place = Place(url, run_dir, token)
        self._http = httpx2.AsyncClient(**_http.options())

    async def submit(
        self,
        params: Mapping[str, Any] | None = None,
        /,
        *,
        job_class: str | None = None,
        queue_deadline: float | None = None,
        idempotency_key: str | None = None,
        **named: Any,
    ) -> AsyncJob:
        """Submits a job; see `stagewire.Client.submit`."""
        params, named = await self._uploaded(params or {}), await self._uploaded(named)
        body = _http.submission(params, named, job_class, queue_deadline)
        key = idempotency_key or str(uuid.uuid4())
        return AsyncJob(self, await self._json("POST", "/v1/jobs", json=body, headers={"idempotency-key": key}))

    async def upload(self, source: str | os.PathLike[str] | bytes, *, media_type: str | None = None) -> str:
        """Sends a file, and returns its name for a parameter of type ``input``; see `stagewire.Client.upload`."""
        headers = _inputs.headers(source, media_type)
        sent = await self._json("POST", "/v1/inputs", body=lambda: _pieces(source), headers=headers)
        return str(sent["name"])

    async def _uploaded(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters with names in place of files, which the server then has."""
        if files := _inputs.in_params(params):
            _inputs.check(files, (await self.pipeline())["params"])
        return {**params, **{name: await self.upload(file) for name, file in files.items()}}

    async def job(self, job_id: str) -> AsyncJob:
        """The job of this id.

        Raises:
            NotFound: There is none.
        """
        return AsyncJob(self, await self._json("GET", _http.job_path(job_id)))

    async def jobs(self) -> list[AsyncJob]:
        """The jobs that the server knows, newest first."""
        return [AsyncJob(self, job) for job in (await self._json("GET", "/v1/jobs"))["jobs"]]

    async def dead_letters(self) -> list[dict[str, Any]]:
        """Jobs that failed for good, newest first: why, and what became of their attempts."""
        found: list[dict[str, Any]] = []
        path: str | None = "/v1/dead-letters"
        while path is not None:
            page = await self._json("GET", path)
            found += page["dead_letters"]
            path = _http.next_page("/v1/dead-letters", page)
        return found

    async def redrive(self, job_id: str) -> AsyncJob:
        """Tries a dead letter again, under its id, as if submitted now.

        Raises:
            NotFound: There is no such job.
            Conflict: It is no dead letter.
            Exhausted: The queue is full.
        """
        return AsyncJob(self, await self._json("POST", _http.letter_path(job_id, "/redrive")))

    async def discard(self, job_id: str) -> AsyncJob:
        """Keeps a dead letter no longer: it is a failed job like others.

        Raises:
            NotFound: There is no such job.
            Conflict: It is no dead letter.
        """
        return AsyncJob(self, await self._json("POST", _http.letter_path(job_id, "/discard")))

    async def pipeline(self) -> dict[str, Any]:
        """What the server serves: stages, parameters, workers."""
        found: dict[str, Any] = await self._json("GET", "/v1/pipeline")
        return found

    async def pools(self) -> dict[str, Any]:
        """What each stage and each of its workers does and holds."""
        found: dict[str, Any] = await self._json("GET", "/v1/pools")
        return found

    async def drain(
        self, worker: str | None = None, *, stage: str | None = None, deadline: float | None = None
    ) -> list[dict[str, Any]]:
        """Has a worker, or all that a stage has now, leave without losing anything. Returns those that drain.

        What runs goes on to its end; after `deadline` seconds it is queued again for other workers.

        Raises:
            NotFound: No such worker is attached, or there is no such stage.
        """
        body = _http.drain(worker, stage, deadline)
        answer: dict[str, list[dict[str, Any]]] = await self._json("POST", "/v1/pipeline/drain", json=body)
        return answer["workers"]

    async def pause(self) -> None:
        """Lets no more jobs begin, until `resume`. Those that have begun go on."""
        await self._json("POST", "/v1/pipeline/pause")

    async def resume(self) -> None:
        """Lets jobs begin again."""
        await self._json("POST", "/v1/pipeline/resume")

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _send(
        self, method: str, path: str, *, body: Callable[[], Any] | None = None, **options: Any
    ) -> httpx2.Response:
        headers = {**self._place.headers(), **options.pop("headers", {})}
        for again in (True, False):
            url = self._place.url(path)
            if body is not None:
                options["content"] = body()
            try:
                return await self._http.request(method, url, headers=headers, **options)
            except httpx2.TransportError as error:
                # A server that restarted has another port: look once more.
                if not again or self._place.url(path) == url:
                    raise self._place.unreachable(url, error) from error
        raise AssertionError

    async def _json(self, method: str, path: str, **options: Any) -> Any:
        return _http.decode(await self._send(method, path, **options))

    @contextlib.asynccontextmanager
    async def _stream(
        self, path: str, headers: Mapping[str, str], timeout: httpx2.Timeout | None = None
    ) -> AsyncIterator[httpx2.Response]:
        url = self._place.url(path)
        options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        headers = {**self._place.headers(), **headers}
        try:
            async with self._http.stream("GET", url, headers=headers, **options) as answer:
                if not answer.is_success:
                    await answer.aread()
                    raise _http.failure(answer)
                yield answer
        except httpx2.TransportError as error:
            raise self._place.unreachable(url, error) from error


async def _pieces(source: str | os.PathLike[str] | bytes) -> AsyncIterator[bytes]:
    """The bytes of a file, read beside the event loop."""
    coming = _inputs.pieces(source)
    while (piece := await asyncio.to_thread(next, coming, None)) is not None:
        yield piece


class AsyncJob:
    """`stagewire.client.Job` for asyncio.

    Attributes:
        id: Its id, a UUID.
        state: Its state when last asked: ``active``, ``cancelling``, ``succeeded``, ``failed`` or ``cancelled``.
        info: All that the server said of it when last asked.
    """

    def __init__(self, client: AsyncClient, info: dict[str, Any]) -> None:
        self._client = client
        self.info = info
        self.id: str = info["id"]
        self.state: str = info["state"]

    async def refresh(self) -> Self:
        """Asks the server for the job's state."""
        return self._now(await self._client._json("GET", _http.job_path(self.id)))

    async def events(self, *, after: str | None = None, timeout: float | None = None) -> AsyncIterator[Event]:
        """Yields what happens to the job until it has ended; see `stagewire.client.Job.events`.

        Raises:
            Deadline: The job has not ended in time; it goes on.
            Unavailable: The server has been away for more than a minute.
        """
        follow = Following(self.id, after, timeout)
        while not follow.done:
            try:
                limits = _http.stream_timeout(follow.remaining())
                path = _http.job_path(self.id, "/events")
                async with self._client._stream(path, follow.headers(), limits) as answer:
                    async for piece in answer.aiter_raw():
                        for event in follow.feed(piece):
                            yield event
                        follow.remaining()
                # The server ends the stream when the job has ended, or when it shuts down itself.
                if not follow.done and (await self.refresh()).state in _http.ENDED:
                    return
            except Unavailable as error:
                await asyncio.sleep(follow.away(error))

    async def wait(self, timeout: float | None = None) -> str:
        """Waits until the job has ended and returns its state: ``succeeded``, ``failed`` or ``cancelled``.

        Raises:
            Deadline: It has not ended within `timeout` seconds; it goes on.
        """
        if self.state not in _http.ENDED:
            async for _event in self.events(timeout=timeout):
                pass
            await self.refresh()
        return self.state

    async def result(self, timeout: float | None = None) -> AsyncJobResult:
        """Waits until the job has ended and returns what it made; see `stagewire.client.Job.result`.

        Raises:
            StagewireError: The job failed; class, reason and message are those of its failure.
            Cancelled: The job was cancelled.
            Deadline: It has not ended in time; it goes on.
        """
        await self.wait(timeout)
        _http.ended(self.info)
        data = await self._client._json("GET", _http.job_path(self.id, "/result"))
        return AsyncJobResult(self._client, self.id, data)

    async def cancel(self) -> Self:
        """Asks the job to stop. It does at its next step. Does nothing to a job that has ended."""
        return self._now(await self._client._json("POST", _http.job_path(self.id, "/cancel")))

    async def timeline(self) -> dict[str, Any]:
        """When each stage ran and each chunk was handed over."""
        found: dict[str, Any] = await self._client._json("GET", _http.job_path(self.id, "/timeline"))
        return found

    def _now(self, info: dict[str, Any]) -> Self:
        self.info, self.state = info, info["state"]
        return self

    def __repr__(self) -> str:
        return f"AsyncJob(id={self.id!r}, state={self.state!r})"


class AsyncJobResult:
    """What a job made: its artefacts by name.

    Attributes:
        info: What the last stage said about them; any JSON value.
        artefacts: The artefacts by name.
    """

    def __init__(self, client: AsyncClient, job_id: str, data: dict[str, Any]) -> None:
        self.info: Any = data.get("info")
        self.artefacts = {item["name"]: AsyncArtefact(client, job_id, item) for item in data["artefacts"]}

    def __getitem__(self, name: str) -> AsyncArtefact:
        if name not in self.artefacts:
            raise NotFound(f"there is no artefact {name!r}, only {', '.join(self.artefacts)}", reason="result.artefact")
        return self.artefacts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.artefacts)


class AsyncArtefact:
    """One finished file, still at the server.

    Attributes:
        name: The name that the stage gave it.
        media_type: For example ``video/mp4``.
        nbytes: Its size in bytes.
    """

    def __init__(self, client: AsyncClient, job_id: str, item: dict[str, Any]) -> None:
        self._client = client
        self._path: str = item["url"]
        self.job_id = job_id
        self.name: str = item["name"]
        self.media_type: str = item["media_type"]
        self.nbytes: int = item["nbytes"]

    async def read(self) -> bytes:
        """The bytes of the file."""
        answer = await self._client._send("GET", self._path)
        if not answer.is_success:
            raise _http.failure(answer)
        return answer.content

    async def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the file to `path`, or into it where that is a folder. It is there whole or not at all."""
        target = Path(path)
        if target.is_dir():
            target /= Path(self.name).name
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        try:
            with part.open("xb") as file:
                async with self._client._stream(self._path, {}) as answer:
                    async for piece in answer.aiter_bytes():
                        file.write(piece)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        return target
