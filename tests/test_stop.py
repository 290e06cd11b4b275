"""Whatever happens, nothing is left: processes, sockets, shared memory."""

from __future__ import annotations

import json
import os
import signal

import pytest

from deployment import DEADLINE, Deployment, Gate, eventually, toy


@pytest.mark.parametrize(("how", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)])
def test_nothing_is_left_of_an_idle_deployment(deploy, how, status):
    deployment: Deployment = deploy(toy()).start()
    assert deployment.stop(how) == status
    assert deployment.left() == []
    left = {path.name for path in deployment.run_dir.iterdir()}
    assert left <= {"worker.token", "logs"}


@pytest.mark.parametrize("point", ["encode", "denoise-1", "decode-1"])
def test_nothing_is_left_when_a_job_was_running(deploy, folder, point):
    deployment: Deployment = deploy(toy()).start()
    gate = Gate(folder / "gate")
    gate.hold(point)
    job = deployment.client.submit(gate=str(gate.folder))
    gate.reached(point)
    assert deployment.stop() == 130
    assert deployment.left() == []
    # The job is in the journal: the next server goes on with it.
    gate.open(point)
    deployment.start()
    assert job.wait(timeout=DEADLINE) == "succeeded", job.refresh().info


def test_nothing_is_left_after_a_worker_was_killed(deploy):
    deployment: Deployment = deploy(toy()).start()
    (worker,) = deployment.workers("denoise")
    deployment.kill_worker(worker["pid"])
    eventually("it is started again", lambda: others(deployment, "denoise", worker["pid"]))
    assert "worker denoise-0" in deployment.said.read_text()
    assert "was killed (signal 9" in deployment.said.read_text()
    assert deployment.stop() == 130
    assert deployment.left() == []


def others(deployment: Deployment, stage: str, pid: int) -> list[int]:
    return [worker["pid"] for worker in deployment.workers(stage) if worker["pid"] != pid]


def test_a_second_interrupt_does_not_wait(deploy, folder):
    """A worker that does not leave: its stage is stopped by the kernel, so that it cannot even hear."""
    deployment: Deployment = deploy(toy()).start()
    (worker,) = deployment.workers("decode")
    os.kill(worker["pid"], signal.SIGSTOP)
    deployment.traces.look()
    deployment.up.send_signal(signal.SIGINT)
    eventually("the workers are asked to leave", lambda: "workers" in deployment.said.read_text().splitlines()[-1])
    assert deployment.stop() == 130
    assert deployment.left() == []


def test_the_next_up_sweeps_after_a_crash_of_everything(deploy):
    deployment: Deployment = deploy(toy()).start()
    workers = [worker["pid"] for worker in deployment.client.pipeline()["workers"]]
    deployment.kill_server()
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    assert any(path.is_socket() for path in deployment.run_dir.rglob("*")), "the crash left no stale socket to sweep"
    deployment.start()
    done = deployment.command("submit", "--param", "seed=1", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["job"]["state"] == "succeeded"
    assert deployment.stop() == 130
    assert deployment.left() == []
