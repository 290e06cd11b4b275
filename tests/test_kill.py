"""`kill -9` of a worker, and of the server, at chosen places: the job completes, with the same bytes."""

from __future__ import annotations

import json

import pytest

from conftest import rounds
from deployment import DEADLINE, Deployment, Gate, eventually, toy
from pipelines.toy import expected

# Who dies, and where the job stands then. Where another stage runs, the victim holds a payload of the job that was
# handed over from its memory.
PLACES = [
    ("encode", "encode"),
    ("encode", "denoise-1"),
    ("denoise", "denoise-1"),
    ("denoise", "decode-1"),
    ("decode", "decode-1"),
]


@pytest.mark.parametrize("turn", rounds(2))
@pytest.mark.parametrize(("victim", "point"), PLACES, ids=lambda value: str(value))
def test_a_killed_worker_costs_time_and_nothing_else(deploy, folder, victim, point, turn):
    deployment: Deployment = deploy(toy()).start()
    gate = Gate(folder / "gate")
    gate.hold(point)
    job = deployment.client.submit(seed=turn, gate=str(gate.folder))
    gate.reached(point)
    (worker,) = deployment.workers(victim)
    deployment.kill_worker(worker["pid"])
    eventually("the server has noticed", lambda: worker["pid"] not in pids(deployment, victim), seconds=1)
    gate.open(point)
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert job.result()["video.bin"].read() == expected(turn, frames=9, steps=3)
    deployment.stop()
    assert deployment.left() == []


def pids(deployment: Deployment, stage: str) -> list[int]:
    return [worker["pid"] for worker in deployment.workers(stage)]


@pytest.mark.parametrize("mode", ["p2p", "store"])
def test_another_decoder_takes_over(deploy, folder, mode):
    deployment: Deployment = deploy(toy(mode, decoders=2)).start()
    gate = Gate(folder / "gate")
    gate.hold("decode-1")
    job = deployment.client.submit(seed=5, gate=str(gate.folder))
    first = gate.reached("decode-1")
    (gate.folder / "at-decode-1").unlink()
    deployment.kill_worker(first)
    assert gate.reached("decode-1") != first
    gate.open("decode-1")
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert job.result()["video.bin"].read() == expected(5, frames=9, steps=3)


@pytest.mark.parametrize("turn", rounds(2))
@pytest.mark.parametrize("mode", ["p2p", "store"])
@pytest.mark.parametrize("point", ["encode", "denoise-1", "decode-1"])
def test_a_killed_server_finishes_what_it_acknowledged(deploy, folder, mode, point, turn):
    deployment: Deployment = deploy(toy(mode)).start()
    gate = Gate(folder / "gate")
    gate.hold(point)
    held = deployment.client.submit(seed=turn, gate=str(gate.folder))
    behind = [deployment.client.submit(seed=100 + turn + index) for index in range(3)]
    gate.reached(point)
    before = {stage: pids(deployment, stage) for stage in ("encode", "denoise", "decode")}
    deployment.kill_server()
    deployment.start()
    after = {stage: pids(deployment, stage) for stage in before}
    assert after == before, "the workers were not taken over"
    gate.open(point)
    for seed, job in [(turn, held), *((100 + turn + index, job) for index, job in enumerate(behind))]:
        assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
        assert job.result()["video.bin"].read() == expected(seed, frames=9, steps=3)
    deployment.stop()
    assert deployment.left() == []


def test_workers_also_outlive_a_server_that_was_killed_while_they_worked(deploy, folder):
    """The attempt that ran when the server died is the attempt that completes."""
    deployment: Deployment = deploy(toy()).start()
    gate = Gate(folder / "gate")
    gate.hold("denoise-2")
    job = deployment.client.submit(seed=3, gate=str(gate.folder))
    pid = gate.reached("denoise-2")
    (gate.folder / "at-denoise-0").unlink()
    deployment.kill_server()
    deployment.start()
    gate.open("denoise-2")
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert pids(deployment, "denoise") == [pid]
    assert not (gate.folder / "at-denoise-0").exists(), "denoise began again"
    assert job.result()["video.bin"].read() == expected(3, frames=9, steps=3)
