"""Denoising that is interrupted: it goes on from its step, here or elsewhere, and comes out the same."""

from __future__ import annotations

import json
import os
import signal

import pytest

from deployment import DEADLINE, Deployment, Gate, eventually, toy
from pipelines.toy import expected

STEPS = 4


def begin(deployment: Deployment, gate: Gate, seed: int = 1, **more):
    """A batch job that has done two steps of four."""
    gate.hold("denoise-2")
    job = deployment.client.submit(seed=seed, steps=STEPS, gate=str(gate.folder), job_class="batch", **more)
    return job, gate.reached("denoise-2")


def checked(job, seed: int = 1) -> None:
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert job.result()["video.bin"].read() == expected(seed, frames=9, steps=STEPS)


def steps(gate: Gate) -> list[int]:
    """Steps of denoising in the order in which they were begun."""
    return [int(point.removeprefix("denoise-")) for point, _ in gate.log("denoise")]


def pids(deployment: Deployment) -> set[int]:
    return {worker["pid"] for worker in deployment.workers("denoise")}


def nothing_is_held(deployment: Deployment) -> None:
    """Checkpoints go with the job."""
    eventually("nothing is held", lambda: deployment.stats()["live_payloads"] == 0)
    eventually("the store is empty", lambda: deployment.stats()["store"]["payloads"] == 0)
    assert deployment.stop() == 130
    assert deployment.left() == []


def test_an_urgent_job_interrupts_a_batch_job_which_goes_on_from_its_step(deploy, folder):
    deployment: Deployment = deploy(toy(checkpoint=True)).start()
    gate = Gate(folder / "gate")
    batch, pid = begin(deployment, gate)
    urgent = deployment.client.submit(seed=2, steps=STEPS, job_class="interactive")
    gate.asked("denoise-2")
    gate.open("denoise-2")
    checked(urgent, seed=2)
    checked(batch)
    assert steps(gate) == [0, 1, 2, 3], "no step was done twice"
    assert {at for _, at in gate.log("denoise")} == {pid}, "it came back to the same worker"
    nothing_is_held(deployment)


@pytest.mark.parametrize("how", ["drain", "signal"])
def test_a_worker_that_leaves_hands_its_job_over(deploy, folder, how):
    deployment: Deployment = deploy(toy(checkpoint=True, denoisers=2)).start()
    gate = Gate(folder / "gate")
    batch, pid = begin(deployment, gate)
    if how == "drain":
        (name,) = (worker["name"] for worker in deployment.workers("denoise") if worker["pid"] == pid)
        assert deployment.command("drain", name).returncode == 0
    else:
        os.kill(pid, signal.SIGTERM)
    gate.asked("denoise-2")
    gate.open("denoise-2")
    checked(batch)
    assert steps(gate) == [0, 1, 2, 3], "no step was done twice"
    first, second = (at for point, at in gate.log("denoise") if point in {"denoise-2", "denoise-3"})
    assert (first, second != first) == (pid, True)
    nothing_is_held(deployment)


def test_a_killed_worker_costs_the_steps_since_its_last_checkpoint(deploy, folder):
    deployment: Deployment = deploy(toy(checkpoint=True)).start()
    gate = Gate(folder / "gate")
    batch, pid = begin(deployment, gate)
    safe = killed(deployment, batch, pid)
    gate.open("denoise-2")
    checked(batch)
    assert steps(gate) == [0, 1, 2, *range(safe, STEPS)], "it did not begin anew"
    nothing_is_held(deployment)


def killed(deployment: Deployment, job, pid: int) -> int:
    """Kills the worker once a checkpoint of it is safe. Returns the number of steps that are."""
    eventually("the server has a checkpoint", lambda: saved(job))
    deployment.kill_worker(pid)
    eventually("the server has noticed", lambda: pid not in pids(deployment))
    return saved(job)


def saved(job) -> int:
    """Steps that are safe. While a checkpoint is on its way, a step has none."""
    (denoise,) = (stage for stage in job.refresh().info["stages"] if stage["name"] == "denoise")
    return denoise.get("checkpoint", {"done": 0})["done"]


def test_a_checkpoint_outlives_the_server_and_the_worker(deploy, folder):
    deployment: Deployment = deploy(toy(checkpoint=True)).start()
    gate = Gate(folder / "gate")
    batch, pid = begin(deployment, gate)
    safe = killed(deployment, batch, pid)
    deployment.kill_server()
    gate.open("denoise-2")
    deployment.start()
    checked(batch)
    # The worker that came for the one that died may have been at it when the server died.
    assert steps(gate)[:3] == [0, 1, 2]
    assert min(steps(gate)[3:]) == safe, "it did not begin anew"
    nothing_is_held(deployment)
