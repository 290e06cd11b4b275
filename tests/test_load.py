"""Many jobs at once: they finish, and everything that they used is given back."""

from __future__ import annotations

from pathlib import Path

from deployment import DEADLINE, Deployment, eventually, toy
from pipelines.toy import expected

JOBS = 50


def test_fifty_jobs_with_two_decoders_give_everything_back(deploy):
    deployment: Deployment = deploy(toy(decoders=2)).start()
    run(deployment)  # connections, mappings and pools are made now, and kept
    before = settled(deployment)
    run(deployment)
    eventually(f"everything is given back: {before}", lambda: holdings(deployment) == before, seconds=10)
    assert deployment.stop() == 130
    assert deployment.left() == []


def run(deployment: Deployment) -> None:
    jobs = [deployment.client.submit(seed=seed, frames=33) for seed in range(JOBS)]
    decoders = set()
    for seed, job in enumerate(jobs):
        decoders |= {event.data["worker"] for event in job.events(timeout=DEADLINE) if worked(event, "decode")}
        assert job.refresh().state == "succeeded", job.info
        assert job.result()["video.bin"].read() == expected(seed, frames=33, steps=3)
    assert decoders == {"decode-0", "decode-1"}, "one of the decoders had nothing to do"


def worked(event, stage: str) -> bool:
    return event.type == "running" and event.stage == stage


def settled(deployment: Deployment) -> dict:
    """The holdings once they no longer change: releases are on their way for a moment after the last job."""
    return eventually("all is at rest", lambda: (now := holdings(deployment))["payloads"] == 0 and now, seconds=10)


def holdings(deployment: Deployment) -> dict:
    """What jobs take and must give back: as the server counts it, and as the kernel counts it in every process."""
    deployment.traces.look()
    stats = deployment.stats()
    pids = [pid for pid in deployment.traces.processes if Path(f"/proc/{pid}/fd").exists()]
    return {
        **stats,
        "sockets": sum(descriptors(pid, "socket:") for pid in pids),
        "segments": sum(descriptors(pid, "/memfd:stagewire") for pid in pids),
        "processes": len(pids),
    }


def descriptors(pid: int, kind: str) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += str(link.readlink()).startswith(kind)
        except OSError:
            continue  # closed in between
    return count
