"""`kill -9` at random moments under load: what the server acknowledged is done once, with the right bytes.

Moments are drawn, not synchronised with anything. `STAGEWIRE_SEED` draws others than those of 1.
"""

from __future__ import annotations

import collections
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest
import stagewire
from stagewire import errors

from conftest import ROUNDS
from deployment import DEADLINE, STAGEWIRE, Deployment, eventually, toy
from pipelines.toy import expected

SEED = int(os.environ.get("STAGEWIRE_SEED", "1"))
UNDER_WAY = 8
"""Jobs at once."""
WORK = {"frames": 199, "steps": 60}
"""Some hundred milliseconds of each job."""


def total(full: int) -> int:
    """How many rounds: all of them with `make soak`, a tenth otherwise."""
    return full if ROUNDS else full // 10


class Load:
    """Submits jobs from a thread of its own and keeps some under way, whatever happens to the server."""

    def __init__(self, deployment: Deployment) -> None:
        self.client = deployment.client
        self.jobs: dict[int, stagewire.Job] = {}
        self.ended = threading.Event()
        self.trouble: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _run(self) -> None:
        try:
            for seed in range(1_000_000):
                self._submit(seed)
                while not self.ended.is_set() and sum(not done(job) for job in self._recent()) >= UNDER_WAY:
                    self.ended.wait(0.01)
                if self.ended.is_set():
                    return
        except BaseException as trouble:
            self.trouble = trouble

    def _submit(self, seed: int) -> None:
        """Until it is acknowledged: with the same key it stays the same job."""
        while not self.ended.is_set():
            try:
                self.jobs[seed] = self.client.submit(seed=seed, idempotency_key=f"job-{seed}", **WORK)
                return
            except errors.Unavailable:
                self.ended.wait(0.01)

    def _recent(self) -> list[stagewire.Job]:
        return list(self.jobs.values())[-4 * UNDER_WAY :]


def done(job: stagewire.Job) -> bool:
    try:
        return job.state not in ("active", "cancelling") or job.refresh().state not in ("active", "cancelling")
    except errors.Unavailable:
        return False


def check(job: stagewire.Job, seed: int) -> None:
    """It ended well, once, with the right bytes."""
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert job.result()["video.bin"].read() == expected(seed, **WORK)
    decoded = [attempt for attempt in attempts(job, "decode") if attempt["end"] == "completed"]
    assert len(decoded) == 1, json.dumps(job.info)


def attempts(job: stagewire.Job, stage: str) -> list[dict]:
    return [attempt for attempt in job.refresh().info["attempts"] if attempt["stage"] == stage]


class Workers:
    """Workers beside those of `up`, which waits longer and longer before it starts another: these come back at once."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.processes = {self._start(stage): stage for stage in ("encode", "denoise", "decode") for _ in range(2)}

    def _start(self, stage: str) -> subprocess.Popen:
        command = [STAGEWIRE, "worker", "--pipeline", str(self.deployment.config), "--stage", stage]
        with self.deployment.said.open("ab") as said:
            return subprocess.Popen(command, env=self.deployment.env, stdout=said, stderr=said)

    def again(self) -> None:
        """Another one for each that has died."""
        for process in [process for process in self.processes if process.poll() is not None]:
            stage = self.processes.pop(process)
            self.processes[self._start(stage)] = stage

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(timeout=DEADLINE)


@pytest.fixture
def workers(deploy) -> Iterator[Workers]:
    workers = Workers(deploy(toy()).start())
    yield workers
    workers.stop()


def test_workers_that_are_killed_at_random_cost_no_job(workers):
    chance = random.Random(SEED)
    deployment: Deployment = workers.deployment
    killed: collections.Counter[str] = collections.Counter()
    with Load(deployment) as load:
        for _ in range(total(200)):
            victims = eventually("a stage has two workers", lambda: spare(deployment))
            time.sleep(chance.uniform(0, 0.05))
            victim = chance.choice(victims)
            deployment.kill_worker(victim["pid"])
            killed[victim["stage"]] += 1
            eventually("it is missed", lambda pid=victim["pid"]: pid not in pids(deployment), seconds=1)
            workers.again()
    assert load.trouble is None
    losses = 0
    for seed, job in load.jobs.items():
        if job.wait(timeout=DEADLINE) == "failed":
            # Chance hit the workers of one job three times, which looks like a job that kills them.
            lost = [attempt for attempt in job.refresh().info["attempts"] if attempt["end"] == "worker_lost"]
            assert len({attempt["incarnation"] for attempt in lost}) == 3, json.dumps(job.info)
            job = deployment.client.redrive(job.id)
        check(job, seed)
        losses += sum(attempt["end"] == "worker_lost" for attempt in job.info["attempts"])
    print(f"{len(load.jobs)} jobs, killed {dict(killed)}, attempts lost {losses}")
    assert losses, "nobody was killed at work"
    workers.stop()
    assert deployment.stop() == 130
    assert deployment.left() == []


def spare(deployment: Deployment) -> list[dict]:
    """Workers that are not the only one of their stage. One without a pid has just died."""
    workers = deployment.client.pipeline()["workers"]
    ready = [worker for worker in workers if worker["state"] == "ready" and worker["pid"]]
    of_stage = collections.Counter(worker["stage"] for worker in ready)
    return [worker for worker in ready if of_stage[worker["stage"]] > 1]


def pids(deployment: Deployment) -> list[int]:
    return [worker["pid"] for worker in deployment.client.pipeline()["workers"]]


@pytest.mark.parametrize("mode", ["p2p", "store"])
def test_a_server_that_is_killed_at_random_forgets_nothing_and_repeats_nothing(deploy, mode):
    chance = random.Random(f"{SEED} {mode}")
    deployment: Deployment = deploy(toy(mode)).start()
    before = sorted(pids(deployment))
    with Load(deployment) as load:
        for _ in range(total(100) // 2):
            known = len(load.jobs)
            eventually("the server works", lambda known=known: len(load.jobs) > known or load.trouble)
            time.sleep(chance.uniform(0, 0.2))
            deployment.kill_server()
            deployment.start()
            assert sorted(pids(deployment)) == before, "the workers were not taken over"
    assert load.trouble is None
    ids = {job.id for job in load.jobs.values()}
    assert len(ids) == len(load.jobs), "one job for each key"
    print(f"{len(load.jobs)} jobs, {len(ids)} ids")
    for seed, job in load.jobs.items():
        check(job, seed)
        for attempt in attempts(job, "denoise"):
            # What was granted in the moment of the kill may never have reached its worker.
            assert attempt["end"] in ("completed", "not_running"), json.dumps(job.info)
    listed = json.loads(deployment.command("jobs", "--limit", "1000", "--json").stdout)
    assert {job["id"] for job in listed["jobs"]} <= ids, "a job that nobody asked for"
    assert deployment.stop() == 130
    assert deployment.left() == []
