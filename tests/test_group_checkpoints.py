"""Groups that are interrupted: two ranks go on together from the step that rank 0 has saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployment import DEADLINE, ROOT, Deployment, eventually, toml
from pipelines.group_steps import STEPS, expected

HELD = 2
"""The step at which a test holds both ranks."""


@pytest.fixture
def deployment(deploy) -> Deployment:
    stages = [{"name": "denoise", "kind": "admission", "world": 2, "checkpoint": True}, {"name": "decode"}]
    edges = [{"from": "denoise", "to": "decode"}]
    params = {"folder": {"type": "string"}}
    return deploy(toml(ROOT / "tests" / "pipelines" / "group_steps.py", stages, edges, params)).start()


def begin(deployment: Deployment, folder: Path):
    """A job that has done so many steps, of which the last is saved."""
    (folder / f"hold-{HELD}").touch()
    job = deployment.client.submit(folder=str(folder), job_class="batch")
    eventually("both ranks are there", lambda: all((folder / f"1-{HELD}-{rank}").exists() for rank in (0, 1)))
    eventually("the last step is saved", lambda: saved(job) == HELD)
    return job


def saved(job) -> int:
    """Steps that are safe."""
    (denoise,) = (stage for stage in job.refresh().info["stages"] if stage["name"] == "denoise")
    return denoise.get("checkpoint", {"done": 0})["done"]


def ranks(deployment: Deployment) -> dict[int, int]:
    """Processes by rank."""
    return {
        worker["group"]["rank"]: worker["pid"] for worker in deployment.workers("denoise") if worker["state"] == "ready"
    }


def steps(folder: Path) -> list[int]:
    """Steps that rank 0 has begun, over all attempts. The other one may be a step ahead when it is stopped."""
    made = [path.name.split("-") for path in folder.glob("*-*-0")]
    return sorted(int(step) for _, step, _ in made)


def checked(deployment: Deployment, job, folder: Path, again: list[int]) -> None:
    """It came out the same, having done no more than these steps twice, and nothing is held."""
    (folder / f"hold-{HELD}").unlink(missing_ok=True)
    assert job.result(DEADLINE).info["value"] == expected()
    assert steps(folder) == sorted([*range(STEPS), *again])
    eventually("nothing is held", lambda: deployment.stats()["live_payloads"] == 0)
    eventually("the store is empty", lambda: deployment.stats()["store"]["payloads"] == 0)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_group_that_lost_a_rank_goes_on_from_its_step(deployment, folder, lost):
    job = begin(deployment, folder)
    before = ranks(deployment)
    deployment.kill_worker(before[lost])
    eventually("it is started again", lambda: ranks(deployment).get(lost, before[lost]) != before[lost])
    checked(deployment, job, folder, again=[HELD])
    assert ranks(deployment)[1 - lost] == before[1 - lost], "the other rank lives on"


def test_a_group_makes_way_and_goes_on_from_its_step(deployment, folder):
    batch = begin(deployment, folder)
    (folder / "urgent").mkdir()
    urgent = deployment.client.submit(folder=str(folder / "urgent"), job_class="interactive")
    eventually("rank 0 is asked", (folder / "asked").exists)
    (folder / f"hold-{HELD}").unlink()
    assert urgent.result(DEADLINE).info["value"] == expected()
    checked(deployment, batch, folder, again=[])
    (denoise,) = (stage for stage in batch.refresh().info["stages"] if stage["name"] == "denoise")
    assert denoise["preemptions"] == 1
