"""The real Wan pipeline: in three processes it gives the bits that one process gives."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import numpy as np
import pytest

from conftest import rounds
from deployment import DEADLINE, ROOT, Deployment, eventually

WAN = ROOT / "examples" / "wan"
SMALL = {"width": 64, "height": 48, "frames": 9, "steps": 3}
PROMPT = "a red cat in the rain"


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def dtype(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def colocated(dtype, tmp_path_factory) -> np.ndarray:
    """The frames of one process, whole: diffusers' own pipeline."""
    out = tmp_path_factory.mktemp(dtype)
    size = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    command = [
        sys.executable,
        str(WAN / "colocated.py"),
        "--prompt",
        PROMPT,
        "--dtype",
        dtype,
        "--out",
        str(out),
        *size,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return np.load(out / "frames.npy", allow_pickle=False)


def wan(mode: str, handover: str) -> str:
    """The example's own file, with another mode or handover."""
    text = (WAN / "stagewire.toml").read_text().replace('mode = "p2p"', f'mode = "{mode}"')
    text = text.replace('module = "pipeline.py"', f"module = {json.dumps(str(WAN / 'pipeline.py'))}")
    if handover == "whole":
        lines = [line for line in text.splitlines() if not line.startswith(("chunks =", "chunk-dim ="))]
        return "\n".join(lines).replace('handover = "stream"', 'handover = "whole"')
    return text.replace("chunks = 4", "chunks = 3")  # as many as SMALL has latent frames


def frames(job) -> np.ndarray:
    assert job.wait(timeout=DEADLINE) == "succeeded", job.refresh().info
    return np.load(io.BytesIO(job.result()["frames.npy"].read()), allow_pickle=False)


def same(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Bit by bit: -0.0 is not 0.0 here."""
    return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("handover", ["whole", "stream"])
@pytest.mark.parametrize("mode", ["p2p", "store"])
def test_three_processes_give_the_bits_of_one(deploy, dtype, colocated, mode, handover):
    deployment: Deployment = deploy(wan(mode, handover), env={"WAN_DTYPE": dtype}).start()
    job = deployment.client.submit(prompt=PROMPT, **SMALL)
    assert same(frames(job), colocated)
    chunks = [event.data["handover"] for event in job.events() if event.type == "chunk"]
    latents = [chunk for chunk in chunks if chunk["from"] == "denoise"]
    assert len(latents) == (3 if handover == "stream" else 1)
    assert {chunk["mode"] for chunk in chunks} == {mode}


@pytest.mark.parametrize("dtype", ["fp32"], indirect=True)
@pytest.mark.parametrize("turn", rounds(1))
@pytest.mark.parametrize("victim", ["encode", "denoise", "decode"])
def test_a_killed_worker_does_not_change_the_bits(deploy, dtype, colocated, victim, turn):
    deployment: Deployment = deploy(wan("p2p", "stream"), env={"WAN_DTYPE": dtype}).start()
    (before,) = deployment.workers(victim)
    job = deployment.client.submit(prompt=PROMPT, **SMALL)
    # While the next stage is at work, the victim holds a payload of the job. The decoder dies at its own work.
    watched = {"encode": "denoise", "denoise": "decode", "decode": "decode"}[victim]
    next(event for event in job.events(timeout=DEADLINE) if event.stage == watched and event.type == "progress")
    deployment.kill_worker(before["pid"])
    assert same(frames(job), colocated)
    eventually("another worker is there", lambda: [w for w in deployment.workers(victim) if w["pid"] != before["pid"]])
    assert deployment.stop() == 130
    assert deployment.left() == []


def test_a_job_that_moves_to_another_process_between_two_steps_keeps_its_bits(deploy):
    text = wan("p2p", "whole").replace('kind = "admission"', 'kind = "admission"\nworkers = 2')
    deployment: Deployment = deploy(text).start()
    long = {**SMALL, "steps": 60}
    undisturbed = frames(deployment.client.submit(prompt=PROMPT, **long))
    job = deployment.client.submit(prompt=PROMPT, **long)
    events = (event for event in job.events(timeout=DEADLINE) if event.stage == "denoise")
    worker = next(event.data["worker"] for event in events if event.type == "running")
    next(event for event in events if event.type == "progress")
    deployment.client.drain(worker)
    assert same(frames(job), undisturbed)
    ran = [event.data["worker"] for event in job.events() if (event.stage, event.type) == ("denoise", "running")]
    assert len(ran) == 2, ran
    assert ran[0] == worker != ran[1]
