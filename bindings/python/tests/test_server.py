"""The package with the real server and its workers: jobs, failures, cancellation, deaths and restarts.

Needs the `stagewire` binary: what `make setup` or `cargo build` made, or `STAGEWIRE_BINARY`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import stagewire
from stagewire import errors
from stagewire.client import AsyncClient, Client

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
TARGET = HERE.parents[2] / "target"
BUILT = [path for path in (TARGET / "release/stagewire", TARGET / "debug/stagewire") if path.is_file()]
BINARY = Path(os.environ.get("STAGEWIRE_BINARY") or (BUILT or [TARGET / "release/stagewire"])[0])

pytestmark = pytest.mark.skipif(not BINARY.is_file(), reason=f"no stagewire binary at {BINARY}: run make setup")


class Deployment:
    """A server and its workers in a run directory of their own."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{len(self.processes)}-{command[0]}.log").open("wb")
        env = {**os.environ, "STAGEWIRE_RUN_DIR": str(self.run_dir), "STAGEWIRE_PYTHON": sys.executable}
        process = subprocess.Popen([str(BINARY), *command], stdout=log, stderr=subprocess.STDOUT, env=env)
        log.close()
        self.processes.append(process)
        return process

    def serve(self, command: str = "serve") -> subprocess.Popen[bytes]:
        data = str(self.folder / "data")
        return self.start(command, str(HERE / "toy/stagewire.toml"), "--data-dir", data)

    def worker(self, stage: str, *more: str) -> subprocess.Popen[bytes]:
        return self.start("worker", "--pipeline", str(HERE / "toy/stagewire.toml"), "--stage", stage, *more)

    def client(self) -> Client:
        return Client(run_dir=self.run_dir)

    def wait_ready(self, workers: int = 3) -> None:
        """Until so many workers are ready, and every stage has one."""

        def ready() -> bool:
            for process in self.processes:
                assert process.poll() in {None, 0, -signal.SIGKILL}, self.logs()
            try:
                with self.client() as client:
                    found = client.pipeline()
            except errors.Unavailable:
                return False
            return bool(found["ready"]) and sum(w["state"] == "ready" for w in found["workers"]) == workers

        wait_for(ready, "every stage has a worker", self.logs)

    def logs(self) -> str:
        files = [*self.folder.glob("*.log"), *self.run_dir.glob("logs/*.log")]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')}" for file in files)

    def stop(self) -> None:
        """Ends what still runs, workers first, as an operator would."""
        for process in reversed(self.processes):
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                pytest.fail(f"{process.args!r} did not stop\n{self.logs()}")


def wait_for(condition: Any, what: str, logs: Any = str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, f"not within 60 s: {what}\n{logs()}"
        time.sleep(0.02)


@contextlib.contextmanager
def deployment() -> Iterator[Deployment]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        made = Deployment(Path(folder))
        try:
            yield made
        finally:
            made.stop()


@pytest.fixture(scope="module")
def up() -> Iterator[Deployment]:
    """One deployment for the tests that leave it as it was, started as a user would."""
    with deployment() as made:
        made.serve("up")
        made.wait_ready()
        yield made


@pytest.fixture
def single() -> Iterator[Deployment]:
    """A deployment of a test's own: a server, and workers that outlive it."""
    with deployment() as made:
        made.serve()
        wait_for(lambda: (made.run_dir / "server.json").exists(), "the server is up", made.logs)
        yield made


def expected(prompt: str, size: int = 1000) -> bytes:
    seed = sum(prompt.encode())
    latents = np.random.default_rng(seed).integers(0, 1 << 30, (2, 7, size), dtype=np.int32)
    return bytes(latents.tobytes())


def test_a_job(up: Deployment) -> None:
    prompt = 'a red cat 🐈 \u2028 "quoted"'
    with up.client() as client:
        job = client.submit(prompt=prompt, steps=3, nap=0.05)
        events = list(job.events(timeout=60))
        result = job.result()
        made = result["latents.bin"].read()
    kinds = [(event.type, event.stage) for event in events]
    assert kinds[-1] == ("succeeded", "")
    for stage in ("encode", "denoise", "decode"):
        assert [kind for kind, of in kinds if of == stage and kind != "progress"].count("stage_done") == 1
    steps = [event.progress for event in events if event.type == "progress" and event.stage == "denoise"]
    assert steps
    assert (steps[-1].done, steps[-1].total, steps[-1].unit) == (3, 3, "step")  # type: ignore[union-attr]
    assert made == expected(prompt)
    assert result["latents.bin"].nbytes == 2 * 7 * 1000 * 4
    assert result.info["metadata"] == {"prompt": prompt}
    assert result.info["chunks"] == [3, 2, 2]


def test_the_asyncio_client(up: Deployment, tmp_path: Path) -> None:
    async def run() -> list[Path]:
        async with AsyncClient(run_dir=up.run_dir) as client:
            jobs = await asyncio.gather(*(client.submit(prompt=f"p{i}") for i in range(8)))
            results = await asyncio.gather(*(job.result(60) for job in jobs))
            return [await r["latents.bin"].save(tmp_path / str(i)) for i, r in enumerate(results)]

    for index, path in enumerate(asyncio.run(run())):
        assert path.read_bytes() == expected(f"p{index}")


def test_large_payloads(up: Deployment) -> None:
    with up.client() as client:
        job = client.submit(prompt="p" * 60_000, size=500_000)
        assert job.result(60)["latents.bin"].read() == expected("p" * 60_000, 500_000)


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        ("value", errors.Invalid, "stage 'encode' raised ValueError: height must be a multiple of 16, got 15"),
        ("exit", errors.Internal, "stage 'encode' raised SystemExit: the stage wants to leave"),
        ("memory", errors.Exhausted, "stage 'encode' raised MemoryError"),
        ("type", errors.Invalid, "stage 'encode' returned a int: a stage that another one follows returns"),
        ("result", errors.Invalid, "stage 'encode' returned a Result: a stage that another one follows returns"),
        ("empty", errors.Invalid, r"cannot cut dimension 1 of shape \[2, 0, 1\] into .*: it has 0 elements"),
        ("last", errors.Invalid, "last stage 'decode' returned a dict: return stagewire.Result"),
    ],
)
def test_failures_of_stages_reach_the_client_and_the_worker_lives_on(
    up: Deployment, wrong: str, kind: type[errors.StagewireError], message: str
) -> None:
    with up.client() as client:
        before = {worker["pid"] for worker in client.pipeline()["workers"]}
        job = client.submit(prompt="x", wrong=wrong)
        with pytest.raises(kind, match=message) as caught:
            job.result(60)
        assert type(caught.value) is kind
        assert caught.value.details["job"] == job.id
        assert job.state == "failed"
        assert client.submit(prompt="x").wait(60) == "succeeded"
        assert {worker["pid"] for worker in client.pipeline()["workers"]} == before


def test_parameters_are_checked(up: Deployment) -> None:
    with up.client() as client:
        with pytest.raises(errors.Invalid, match='did you mean "prompt"'):
            client.submit(promt="x")
        with pytest.raises(errors.Invalid, match="steps must be an integer"):
            client.submit(prompt="x", steps="many")
        with pytest.raises(errors.NotFound):
            client.job("00000000-0000-7000-8000-000000000000")


def test_submitting_twice_with_one_key(up: Deployment) -> None:
    with up.client() as client:
        first = client.submit(prompt="x", idempotency_key="key-1")
        assert client.submit(prompt="x", idempotency_key="key-1").id == first.id
        with pytest.raises(errors.Conflict):
            client.submit(prompt="y", idempotency_key="key-1")
        first.wait(60)


def test_cancel_takes_effect_at_the_next_step(up: Deployment) -> None:
    with up.client() as client:
        job = client.submit(prompt="x", steps=10_000, nap=0.02)
        for event in job.events(timeout=60):
            if event.type == "progress" and event.stage == "denoise":
                break
        begin = time.monotonic()
        job.cancel()
        assert job.wait(20) == "cancelled"
        assert time.monotonic() - begin < 2
        with pytest.raises(stagewire.Cancelled):
            job.result()
        assert job.cancel().state == "cancelled"
        # The slot is free again.
        assert client.submit(prompt="y").wait(60) == "succeeded"


def test_a_result_needs_an_end(up: Deployment) -> None:
    with up.client() as client:
        job = client.submit(prompt="x", steps=200, nap=0.02)
        with pytest.raises(errors.Deadline, match="it goes on"):
            job.result(0.1)
        job.cancel()
        job.wait(20)


def test_a_worker_that_is_killed(single: Deployment) -> None:
    """The denoiser dies in the middle, and again while it holds a payload that nobody has read yet."""
    for stage in ("encode", "denoise"):
        single.worker(stage)
    decoder = single.worker("decode")
    single.wait_ready()
    with single.client() as client:
        job = client.submit(prompt="x", steps=50, nap=0.02)
        for event in job.events(timeout=60):
            if event.type == "progress" and event.stage == "denoise":
                break
        single.processes[2].kill()
        single.processes[2].wait()
        single.worker("denoise")
        assert job.result(60)["latents.bin"].read() == expected("x")
        assert "requeued" in [event.type for event in job.events(timeout=10)]

        decoder.kill()
        decoder.wait()
        job = client.submit(prompt="y")
        wait_for(lambda: "published" in _types(job, "denoise"), "the latents wait for a decoder", single.logs)
        single.processes[-1].kill()
        single.processes[-1].wait()
        single.worker("denoise")
        single.worker("decode")
        assert job.result(60)["latents.bin"].read() == expected("y")


def _types(job: Any, stage: str) -> list[str]:
    found = []
    with contextlib.suppress(errors.Deadline):
        for event in job.events(timeout=0.2):
            if event.stage == stage:
                found.append(event.type)
    return found


def test_a_worker_that_is_told_to_stop_finishes_first(single: Deployment) -> None:
    for stage in ("encode", "denoise", "decode"):
        single.worker(stage)
    single.wait_ready()
    with single.client() as client:
        job = client.submit(prompt="x", steps=50, nap=0.02)
        for event in job.events(timeout=60):
            if event.type == "progress" and event.stage == "denoise":
                break
        denoiser = single.processes[2]
        denoiser.terminate()
        assert job.result(60)["latents.bin"].read() == expected("x"), "what it made stayed until it was read"
        assert denoiser.wait(20) == 0
        assert "requeued" not in [event.type for event in job.events(timeout=10)]


def test_a_worker_that_is_drained_leaves_its_payloads_to_the_store(single: Deployment) -> None:
    single.worker("encode")
    denoiser = single.worker("denoise", "--name", "painter")
    with single.client() as client:
        job = client.submit(prompt="x")

        def held() -> bool:
            return any(worker["payloads"] for worker in client.pools()["stages"][1]["workers"])

        wait_for(held, "the denoiser holds latents for a decoder that is not there", single.logs)
        assert [worker["state"] for worker in client.drain("painter")] == ["draining"]
        assert denoiser.wait(20) == 0

        def left() -> bool:
            return bool(client.pools()["stages"][1]["slots"]["advertised"] == 0)

        # The server hears of the end of a process at about the same time.
        wait_for(left, "the denoiser has gone", single.logs)
        assert client.pools()["stages"][1]["payloads"] == 1
        single.worker("decode")
        assert job.result(60)["latents.bin"].read() == expected("x"), "read from the store"
        assert "requeued" not in [event.type for event in job.events(timeout=10)]


OTHER_THREAD = """
import signal
import threading

import stagewire


def get_signals():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Event().wait()


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
threading.Thread(target=get_signals, daemon=True).start()


@stagewire.stage("encode")
def encode(ctx):
    raise NotImplementedError
"""
"""A module one of whose threads gets each SIGTERM, while the main thread waits."""


def test_a_signal_that_another_thread_gets_ends_a_worker(single: Deployment) -> None:
    (single.folder / "pipeline.py").write_text(OTHER_THREAD)
    pipeline = single.folder / "stagewire.toml"
    pipeline.write_text((HERE / "toy/stagewire.toml").read_text())
    worker = single.start("worker", "--pipeline", str(pipeline), "--stage", "encode")

    def ready() -> bool:
        with single.client() as client:
            return [one["state"] for one in client.pipeline()["workers"]] == ["ready"]

    wait_for(ready, "the worker is ready", single.logs)
    worker.terminate()
    assert worker.wait(20) == 0, single.logs()


def test_an_idle_server_takes_no_more_than_a_hundredth_of_a_core(single: Deployment) -> None:
    for stage in ("encode", "denoise", "decode"):
        single.worker(stage)
    single.wait_ready()
    stat = Path(f"/proc/{single.processes[0].pid}/stat")

    def cpu() -> float:
        user, system = stat.read_text().rsplit(")", 1)[1].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    before, begin = cpu(), time.monotonic()
    # A span to measure over, not something to wait for.
    time.sleep(5)
    assert cpu() - before <= 0.01 * (time.monotonic() - begin)


def test_two_slots_have_a_model_each(up: Deployment) -> None:
    with up.client() as client:
        jobs = [client.submit(prompt=str(i)) for i in range(20)]
        users = [job.result(60).info["users"] for job in jobs]
    assert set(users) == {1}, "each slot is one thread with a model of its own"


def test_a_server_that_is_killed_and_comes_back(single: Deployment) -> None:
    for stage in ("encode", "denoise", "decode"):
        single.worker(stage)
    single.wait_ready()
    with single.client() as client:
        job = client.submit(prompt="x", steps=100, nap=0.02)
        seen = []
        for event in job.events(timeout=60):
            seen.append(event.type)
            if event.type == "progress" and event.stage == "denoise" and len(seen) < 1000:
                server = single.processes[0]
                if server.poll() is None:
                    server.kill()
                    server.wait()
                    single.serve()
        assert seen[-1] == "succeeded"
        assert job.result(60)["latents.bin"].read() == expected("x")
    assert all(process.poll() is None for process in single.processes[1:]), "workers outlive a server"


def test_nothing_is_left_behind(run_dir: Path) -> None:
    with deployment() as made:
        process = made.serve("up")
        made.wait_ready()
        with made.client() as client:
            assert client.submit(prompt="x").wait(60) == "succeeded"
            pids = [worker["pid"] for worker in client.pipeline()["workers"]]
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        process.wait(30)
        assert time.monotonic() - begin < 8, "idle workers leave at once"
        assert sorted(path.name for path in made.run_dir.iterdir()) == ["logs", "worker.token"]
        for pid in pids:
            assert not Path(f"/proc/{pid}").exists()
