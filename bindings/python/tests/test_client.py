"""Both clients against a tiny server: what they send, how they read, how they go on after a break."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import stagewire
from fake_server import JOB, FakeServer, event
from stagewire import _http, errors
from stagewire.client import AsyncClient, Client

if TYPE_CHECKING:
    from collections.abc import Iterator

EVENTS = f"/v1/jobs/{JOB}/events"


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture(params=["sync", "async"])
def face(request: pytest.FixtureRequest) -> str:
    """Which of the two clients."""
    found: str = request.param
    return found


class Driver:
    """The same calls on either client."""

    def __init__(self, face: str, **options: Any) -> None:
        self.face = face
        self.options = options

    def __call__(self, what: Any) -> Any:
        if self.face == "sync":
            with Client(**self.options) as client:
                return _drain(what(client), client)
        return asyncio.run(self._run(what))

    async def _run(self, what: Any) -> Any:
        async with AsyncClient(**self.options) as client:
            return await _adrain(what(client), client)


def _drain(steps: Any, client: Client) -> Any:
    """Runs a generator of calls, sending back their results; iterators become lists."""
    answer = None
    try:
        while True:
            step = steps.send(answer)
            answer = list(step) if hasattr(step, "__next__") else step
    except StopIteration as done:
        return done.value


async def _adrain(steps: Any, client: AsyncClient) -> Any:
    answer = None
    try:
        while True:
            step = steps.send(answer)
            answer = [item async for item in step] if hasattr(step, "__anext__") else await step
    except StopIteration as done:
        return done.value


def test_submit_says_what_it_is_told(server: FakeServer, face: str) -> None:
    def steps(client: Any) -> Any:
        job = yield client.submit({"strange name": 1}, prompt="a red cat 🐈", steps=4)
        return job.id, job.state

    assert Driver(face, url=server.url, token="secret")(steps) == (JOB, "active")
    ((method, _, headers, body),) = server.asked("/v1/jobs")
    assert method == "POST"
    assert json.loads(body) == {"params": {"strange name": 1, "prompt": "a red cat 🐈", "steps": 4}}
    assert headers["authorization"] == "Bearer secret"
    assert len(headers["idempotency-key"]) == 36


def test_class_and_deadline_stand_beside_the_parameters(server: FakeServer, face: str) -> None:
    def steps(client: Any) -> Any:
        yield client.submit(prompt="x", job_class="interactive", queue_deadline=2.5)
        yield client.submit(prompt="x")

    Driver(face, url=server.url)(steps)
    bodies = [json.loads(body) for _, _, _, body in server.asked("/v1/jobs")]
    assert bodies[0] == {"params": {"prompt": "x"}, "class": "interactive", "queue_deadline_s": 2.5}
    assert bodies[1] == {"params": {"prompt": "x"}}


@pytest.mark.parametrize("deadline", [0, -1, float("nan"), float("inf")])
def test_a_deadline_that_cannot_be_is_refused(server: FakeServer, face: str, deadline: float) -> None:
    def steps(client: Any) -> Any:
        yield client.submit(prompt="x", queue_deadline=deadline)

    with pytest.raises(errors.Invalid, match=f"queue deadline of {deadline} s") as refused:
        Driver(face, url=server.url)(steps)
    assert refused.value.reason == "job.deadline"


def test_submit_refuses_what_json_cannot_carry(server: FakeServer) -> None:
    with Client(server.url) as client:
        with pytest.raises(errors.Invalid, match="do not fit into JSON"):
            client.submit(prompt={"a", "set"})
        with pytest.raises(errors.Invalid, match="given twice: prompt"):
            client.submit({"prompt": "a"}, prompt="b")
        with pytest.raises(errors.Invalid, match="do not fit into JSON"):
            client.submit(guidance=float("nan"))
    assert server.requests == []


def test_files_are_uploaded_for_parameters_that_take_them(server: FakeServer, face: str, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(b"a cat" * 1_000_000)

    def steps(client: Any) -> Any:
        yield client.submit({"image": picture}, prompt="x")
        yield client.submit(prompt="x", image=b"a dog")
        return (yield client.upload(str(picture), media_type="video/mp4"))

    def wrong(**params: Any) -> Any:
        def steps(client: Any) -> Any:
            yield client.submit(**params)

        Driver(face, url=server.url)(steps)

    assert Driver(face, url=server.url)(steps) == "blake3:5000000"
    with pytest.raises(errors.Invalid, match=r"'prompt' is given a file, and it is of type string.*: image"):
        wrong(prompt=picture)
    with pytest.raises(errors.Invalid, match="'imgae' is given a file, and the pipeline has no such parameter"):
        wrong(imgae=b"x")
    sent = [(headers["content-type"], body) for _, _, headers, body in server.asked("/v1/inputs")]
    assert sent == [
        ("image/png", b"a cat" * 1_000_000),
        ("application/octet-stream", b"a dog"),
        ("video/mp4", b"a cat" * 1_000_000),
    ]
    submitted = [json.loads(body)["params"] for *_, body in server.asked("/v1/jobs")]
    assert submitted == [{"image": "blake3:5000000", "prompt": "x"}, {"image": "blake3:5", "prompt": "x"}]


def test_events_come_in_order_wherever_the_network_cuts(server: FakeServer, face: str) -> None:
    whole = (
        b": hello\n\n"
        + event(1, "queued")
        + event(1, "progress", stage="denoise", progress={"done": 1, "total": 4, "unit": "step"})
        + event(3, "succeeded")
    )
    server.streams = [[whole[i : i + 7] for i in range(0, len(whole), 7)]]

    def steps(client: Any) -> Any:
        job = yield client.job(JOB)
        return (yield job.events())

    seen = Driver(face, url=server.url)(steps)
    assert [(e.id, e.seq, e.type, e.stage, e.ends) for e in seen] == [
        ("1.1", 1, "queued", "", False),
        ("1.1", 1, "progress", "denoise", False),
        ("1.3", 3, "succeeded", "", True),
    ]
    assert seen[1].progress == _http.Progress(1, 4, "step")
    assert seen[1].at_ns == 1001


def test_a_broken_stream_goes_on_after_the_last_event(server: FakeServer, face: str) -> None:
    half = event(3, "running")
    server.streams = [
        [event(1, "queued"), event(2, "offered"), half[:10]],
        [half],
        [event(4, "failed")],
    ]

    def steps(client: Any) -> Any:
        job = yield client.job(JOB)
        return (yield job.events())

    assert [e.seq for e in Driver(face, url=server.url)(steps)] == [1, 2, 3, 4]
    assert [headers.get("last-event-id") for _, _, headers, _ in server.asked(EVENTS)] == [None, "1.2", "1.3"]


def test_a_server_that_restarts_is_found_again(face: str, run_dir: Path) -> None:
    with FakeServer() as first, FakeServer() as second:
        first.publish(run_dir)
        first.streams = [[event(1, "queued")]]
        second.streams = [[event(2, "succeeded")]]
        second.job["state"] = "succeeded"

        def steps(client: Any) -> Any:
            job = yield client.submit(prompt="x")
            second.publish(run_dir)
            return (yield job.events())

        assert [e.seq for e in Driver(face, run_dir=run_dir)(steps)] == [2]
        assert second.asked(EVENTS)


def test_wait_and_result(server: FakeServer, face: str, tmp_path: Path) -> None:
    server.streams = [[event(1, "succeeded")]]

    def steps(client: Any) -> Any:
        job = yield client.submit(prompt="x")
        server.job["state"] = "succeeded"
        assert (yield job.wait(10)) == "succeeded"
        result = yield job.result()
        artefact = result["video.mp4"]
        assert list(result) == ["video.mp4"]
        assert (artefact.media_type, artefact.nbytes) == ("video/mp4", 7000)
        saved = yield artefact.save(tmp_path / "cat.mp4")
        into = yield artefact.save(tmp_path)
        with pytest.raises(errors.NotFound, match=r"no artefact 'x', only video\.mp4"):
            result["x"]
        return saved, into, (yield artefact.read()), result.info

    saved, into, read, info = Driver(face, url=server.url)(steps)
    assert saved == tmp_path / "cat.mp4"
    assert into == tmp_path / "video.mp4"
    assert saved.read_bytes() == into.read_bytes() == read == server.files["a"]
    assert info == {"fps": 12}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat.mp4", "video.mp4"], "nothing half is left"


def test_wait_gives_up_in_time_and_the_job_goes_on(server: FakeServer, face: str) -> None:
    def steps(client: Any) -> Any:
        job = yield client.job(JOB)
        yield job.wait(0.2)

    begin = time.monotonic()
    with pytest.raises(errors.Deadline, match=r"has not ended within 0\.2 s; it goes on"):
        Driver(face, url=server.url)(steps)
    assert time.monotonic() - begin < 5
    assert isinstance(errors.Deadline("x"), TimeoutError)


def test_a_failed_job_raises_what_its_stage_raised(server: FakeServer, face: str) -> None:
    failure = {
        "class": "invalid",
        "reason": "stage.exception",
        "message": "stage 'denoise' raised ValueError: height must be a multiple of 16",
        "details": {"stage": "denoise"},
    }
    server.job.update(state="failed", failure=failure)

    def steps(client: Any) -> Any:
        job = yield client.job(JOB)
        yield job.result()

    with pytest.raises(errors.Invalid, match="height must be a multiple of 16") as caught:
        Driver(face, url=server.url)(steps)
    assert caught.value.reason == "stage.exception"
    assert caught.value.details == {"stage": "denoise", "job": JOB}


def test_a_cancelled_job_has_no_result(server: FakeServer, face: str) -> None:
    def steps(client: Any) -> Any:
        job = yield client.job(JOB)
        yield job.cancel()
        assert job.state == "cancelling"
        server.job["state"] = "cancelled"
        server.streams = [[event(1, "cancelled")]]
        yield job.result()

    with pytest.raises(stagewire.Cancelled, match=f"job {JOB} was cancelled"):
        Driver(face, url=server.url)(steps)


def test_dead_letters_are_listed_page_by_page_redriven_and_discarded(server: FakeServer, face: str) -> None:
    def steps(client: Any) -> Any:
        letters = yield client.dead_letters()
        assert [letter["id"] for letter in letters] == ["a", JOB, "c"]
        assert (yield client.redrive(JOB)).state == "active"
        assert (yield client.discard(JOB)).state == "failed"
        yield client.redrive("../pipeline")

    with pytest.raises(errors.NotFound):
        Driver(face, url=server.url)(steps)
    assert server.requests[-1][1] == "/v1/dead-letters/___pipeline/redrive"


def test_each_error_class_has_its_exception(server: FakeServer, face: str) -> None:
    for name, kind in errors.BY_CLASS.items():
        body = {"class": name, "reason": "a.b", "message": "what to do", "details": {"found": "1", "expected": "2"}}
        server.refusal = (409, {"error": body})

        def steps(client: Any) -> Any:
            yield client.job(JOB)

        with pytest.raises(kind, match="what to do") as caught:
            Driver(face, url=server.url)(steps)
        assert type(caught.value) is kind
        assert (caught.value.reason, caught.value.details) == ("a.b", {"found": "1", "expected": "2"})
    assert len(errors.BY_CLASS) == 14


@pytest.mark.parametrize("body", [b"<html>a proxy</html>", b"{}", b'{"error": "text"}', b"[1]"])
def test_what_is_not_stagewire_is_said_so(server: FakeServer, face: str, body: bytes) -> None:
    server.refusal = (502, body)

    def steps(client: Any) -> Any:
        yield client.job(JOB)

    with pytest.raises(errors.Internal, match="answered 502 with something that is not Stagewire's"):
        Driver(face, url=server.url)(steps)


def test_no_server(face: str, run_dir: Path) -> None:
    def steps(client: Any) -> Any:
        yield client.jobs()

    with pytest.raises(errors.Unavailable, match=r"start one with `stagewire up PIPELINE\.toml`") as caught:
        Driver(face, run_dir=run_dir)(steps)
    assert caught.value.reason == "server.none"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(errors.Unavailable, match=f"no server answers at http://127.0.0.1:{port}"):
            Driver(face, url=f"http://127.0.0.1:{port}")(steps)


def test_a_server_file_of_another_version(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "server.json").write_text('{"schema": 2, "pid": 1, "http": "127.0.0.1:1", "pipeline": "p"}')
    with Client(run_dir=run_dir) as client:
        with pytest.raises(errors.Unsupported, match="schema 2, this package reads schema 1"):
            client.jobs()
        (run_dir / "server.json").write_text("torn {")
        with pytest.raises(errors.Corrupt, match="not what a server writes"):
            client.jobs()


def test_the_environment_names_the_server(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_dir: Path
) -> None:
    (tmp_path / "token").write_text("from-file\n")
    monkeypatch.setenv("STAGEWIRE_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("STAGEWIRE_URL", server.url)
    with Client() as client:
        assert [job.id for job in client.jobs()] == [JOB]
    assert server.requests[0][2]["authorization"] == "Bearer from-file"
    monkeypatch.delenv("STAGEWIRE_URL")
    monkeypatch.setenv("STAGEWIRE_RUN_DIR", str(run_dir))
    server.publish(run_dir)
    with Client() as client:
        assert client.job(JOB).state == "active"


def test_options_that_contradict_each_other() -> None:
    with pytest.raises(errors.Invalid, match="give one of them"):
        Client("http://127.0.0.1:1", run_dir="/x")
    with pytest.raises(errors.Invalid, match="must start with http"):
        Client("127.0.0.1:1")


def test_what_is_no_id_finds_no_job(server: FakeServer) -> None:
    with Client(server.url) as client, pytest.raises(errors.NotFound):
        client.job("../../healthz?x=1")
    assert server.requests[0][1] == "/v1/jobs/______healthz_x_1"


def test_events_of_an_ended_job_end(server: FakeServer, face: str) -> None:
    """The server sends nothing after the last event; the client must not ask for ever."""
    server.job["state"] = "succeeded"
    server.streams = [[b": nothing new\n\n"]]

    def steps(client: Any) -> Any:
        job = yield client.job(JOB)
        return (yield job.events(after="1.7"))

    assert Driver(face, url=server.url)(steps) == []
    assert server.asked(EVENTS)[0][2]["last-event-id"] == "1.7"


def test_operating_a_pipeline(server: FakeServer, face: str) -> None:
    def calls(client: Any) -> Any:
        drained = yield client.drain("decode-0", deadline=60)
        assert [worker["state"] for worker in drained] == ["draining"]
        yield client.drain(stage="decode")
        yield client.pause()
        yield client.resume()
        pools = yield client.pools()
        assert pools["stages"] == []

    Driver(face, url=server.url)(calls)
    asked = [(method, path, json.loads(body) if body else None) for method, path, _, body in server.requests]
    assert asked == [
        ("POST", "/v1/pipeline/drain", {"worker": "decode-0", "deadline_s": 60}),
        ("POST", "/v1/pipeline/drain", {"stage": "decode"}),
        ("POST", "/v1/pipeline/pause", None),
        ("POST", "/v1/pipeline/resume", None),
        ("GET", "/v1/pools", None),
    ]
