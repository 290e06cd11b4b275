"""Retries, quarantine and dead letters, with real processes: `up`, its worker, and the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import stagewire

from deployment import DEADLINE, ROOT, Deployment, eventually, toml

DEATHS = 3
"""Workers that a job may kill."""


def unlucky(**stage: object) -> str:
    return toml(
        ROOT / "tests" / "pipelines" / "unlucky.py",
        stages=[{"name": "paint", **stage}],
        edges=[],
        params={"counter": {"type": "string"}, "how": {"type": "string"}},
    )


def submit(deployment: Deployment, folder: Path, how: str, times: int) -> stagewire.Job:
    counter = folder / f"{how}-{times}"
    counter.write_text(str(times))
    return deployment.client.submit(counter=str(counter), how=how)


def ends(job: stagewire.Job) -> list[str]:
    return [attempt["end"] for attempt in job.refresh().info["attempts"]]


def test_failures_are_tried_again_and_the_dead_are_redriven(deploy, folder):
    config = unlucky(**{"max-attempts": 3, "backoff": "100ms", "max-backoff": "200ms"})
    deployment: Deployment = deploy(config).start()

    # It raises twice and then succeeds: nobody has to do anything.
    job = submit(deployment, folder, "raise", 2)
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert ends(job) == ["failed", "failed", "completed"]
    began, ended = ([attempt[member] for attempt in job.info["attempts"]] for member in ("began_ns", "ended_ns"))
    assert began[1] - ended[0] >= 50e6, "it waited"
    assert began[2] - ended[1] >= 100e6, "and longer the second time"

    # It raises once too often, and is redriven.
    job = submit(deployment, folder, "raise", 4)
    assert job.wait(timeout=DEADLINE) == "failed"
    shown = deployment.command("dlq", "show", job.id)
    assert (shown.returncode, shown.stdout.count("raised RuntimeError")) == (0, 4), shown
    assert deployment.command("dlq", "redrive", job.id).stdout == f"{job.id}  active\n"
    assert job.refresh().wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    assert job.result()["done.txt"].read() == b"done"
    assert ends(job) == ["failed"] * 4 + ["completed"]
    again = deployment.command("dlq", "redrive", job.id)
    assert again.returncode == 1, again
    assert "no dead letter" in again.stderr, again

    # One that is refused holds up no other, and what was done is said.
    dead = submit(deployment, folder, "raise", 4)
    assert dead.wait(timeout=DEADLINE) == "failed"
    both = deployment.command("dlq", "redrive", job.id, dead.id, "--json")
    assert both.returncode == 1, both
    assert "no dead letter" in both.stderr, both
    assert [redriven["id"] for redriven in json.loads(both.stdout)["jobs"]] == [dead.id]


def test_a_job_that_kills_its_workers_is_in_quarantine_until_somebody_redrives_it(deploy, folder):
    deployment: Deployment = deploy(unlucky(workers=2)).start()
    job = submit(deployment, folder, "die", DEATHS)
    assert job.wait(timeout=DEADLINE) == "failed"
    (letter,) = deployment.client.dead_letters()
    assert (letter["id"], letter["cause"]) == (job.id, "killed_workers")
    assert ends(job) == ["worker_lost"] * DEATHS
    assert len({attempt["incarnation"] for attempt in letter["attempts"]}) == DEATHS
    with pytest.raises(stagewire.StagewireError):
        job.result()
    # The cause is mended, which here is a matter of how often it has happened.
    listed = json.loads(deployment.command("dlq", "list", "--json").stdout)
    assert [letter["id"] for letter in listed["dead_letters"]] == [job.id]
    eventually("a worker is back", lambda: deployment.workers("paint"))
    job = deployment.client.redrive(job.id)
    assert job.state == "active"
    assert job.wait(timeout=DEADLINE) == "succeeded", json.dumps(job.refresh().info)
    other = submit(deployment, folder, "raise", 1)
    assert other.wait(timeout=DEADLINE) == "failed"
    assert deployment.command("dlq", "discard", "--all").stdout == f"{other.id}  failed\n"
    assert deployment.client.dead_letters() == []
