"""Many jobs at once: they finish, and everything that they used is given back."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from deployment import DEADLINE, Deployment, eventually, toy
from pipelines.toy import embeds, expected, noise

JOBS = 50
FRAMES = 33
PAYLOADS = [embeds(0).nbytes, noise(0, FRAMES).nbytes]
POOL = 16 * sum(PAYLOADS) + (1 << 20)
"""Bytes of shared memory that may stay in the pools: what `max-held` payloads of each stage take. The two
rounds of jobs publish four times as much."""


@pytest.mark.parametrize("mode", ["p2p", "store"])
def test_fifty_jobs_with_two_decoders_give_everything_back(deploy, mode):
    deployment: Deployment = deploy(toy(mode, decoders=2)).start()
    run(deployment)  # connections, mappings and pools are made now, and kept
    before = settled(deployment)
    run(deployment)
    eventually("everything is given back", lambda: nothing_more(deployment, before), seconds=10)
    assert shared_memory(deployment) <= POOL
    assert deployment.stop() == 130
    assert deployment.left() == []


def run(deployment: Deployment) -> None:
    jobs = [deployment.client.submit(seed=seed, frames=FRAMES) for seed in range(JOBS)]
    decoders = set()
    for seed, job in enumerate(jobs):
        decoders |= {event.data["worker"] for event in job.events(timeout=DEADLINE) if worked(event, "decode")}
        assert job.refresh().state == "succeeded", job.info
        assert job.result()["video.bin"].read() == expected(seed, frames=FRAMES, steps=3)
    assert decoders == {"decode-0", "decode-1"}, "one of the decoders had nothing to do"


def worked(event, stage: str) -> bool:
    return event.type == "running" and event.stage == stage


def nothing_more(deployment: Deployment, before: dict) -> bool:
    more = {name: (value, now) for name, value in before.items() if value != (now := holdings(deployment)[name])}
    print("not given back (before, now):", more)
    return not more


def settled(deployment: Deployment) -> dict:
    """The holdings at rest: releases are on their way for a moment after the last job."""
    return eventually("all is at rest", lambda: (now := holdings(deployment))["live_payloads"] == 0 and now, seconds=10)


def holdings(deployment: Deployment) -> dict:
    """What jobs take and must give back: as the server counts it, and as the kernel counts it in every process."""
    stats, pids = deployment.stats(), processes(deployment)
    return {
        "live_payloads": stats["live_payloads"],
        "live_payload_bytes": stats["live_payload_bytes"],
        "slots": [(stage["name"], stage["slots"]["free"], stage["slots"]["advertised"]) for stage in stats["stages"]],
        "streams": stats["streams"],
        "store": stats["store"],
        "transfer": stats["transfer"],
        "processes": len(pids),
        "sockets": sum(descriptors(pid, "socket:") for pid in pids),
    }


def shared_memory(deployment: Deployment) -> int:
    """Bytes of shared memory that the kernel has given out, each segment once."""
    found = {}
    for pid in processes(deployment):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()).startswith("/memfd:stagewire"):
                    found[link.stat().st_ino] = link.stat().st_blocks * 512
    return sum(found.values())


def processes(deployment: Deployment) -> list[int]:
    deployment.traces.look()
    return [pid for pid in deployment.traces.processes if Path(f"/proc/{pid}/fd").exists()]


def descriptors(pid: int, kind: str) -> int:
    count = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed in between
            count += str(link.readlink()).startswith(kind)
    return count
