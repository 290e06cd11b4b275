"""Three stages that compute fast and the same everywhere, and stop where a test tells them to.

A job names a folder in its parameter `gate`. Each stage announces the points it reaches there, and waits at a point for
as long as `hold-POINT` exists in the folder: so a test can kill a process at an exact place, without sleeping. A stage
that is asked to yield while it waits announces that, too.
"""

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import stagewire

LATENT = (1, 4, 16, 16)
"""Batch, channels, height, width; the frames are a parameter."""


@stagewire.stage("encode")
def encode(ctx):
    reach(ctx, "encode")
    return {"embeds": embeds(ctx.params["seed"])}


@stagewire.stage("denoise")
def denoise(ctx):
    text = ctx.input.fetch()["embeds"]
    steps = ctx.params["steps"]
    if ctx.resume is None:
        start, latents = 0, noise(ctx.params["seed"], ctx.params["frames"])
    else:
        start, latents = ctx.resume.done, ctx.resume.tensors["latents"]
    for step in range(start, steps):
        reach(ctx, f"denoise-{step}")
        latents = denoised(latents, text)
        # Where the stage takes checkpoints, one after each step, unless one is under way.
        ctx.boundary(lambda made=latents: {"latents": made}, done=step + 1, total=steps, every=0)
    return stagewire.Payload({"latents": latents}, kind="latent")


@stagewire.stage("decode")
def decode(ctx):
    frames = []
    for index, chunk in enumerate(ctx.input.chunks()):
        reach(ctx, f"decode-{index}")
        frames.append(decoded(chunk["latents"]))
        ctx.progress(sum(part.shape[2] for part in frames), ctx.params["frames"], unit="frame")
    video = np.concatenate(frames, axis=2)
    return stagewire.Result({"video.bin": stagewire.Artefact(video.tobytes())}, info={"frames": video.shape[2]})


def expected(seed: int, frames: int, steps: int) -> bytes:
    """The bytes of `video.bin`, computed in one process."""
    latents = noise(seed, frames)
    for _ in range(steps):
        latents = denoised(latents, embeds(seed))
    return decoded(latents).tobytes()


def embeds(seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 1]).standard_normal((8, 16), dtype=np.float32)


def noise(seed: int, frames: int) -> np.ndarray:
    batch, channels, height, width = LATENT
    shape = (batch, channels, frames, height, width)
    return np.random.default_rng([seed, 2]).standard_normal(shape, dtype=np.float32)


def denoised(latents: np.ndarray, text: np.ndarray) -> np.ndarray:
    return latents * np.float32(0.5) + text.reshape(-1)[:16]


def decoded(latents: np.ndarray) -> np.ndarray:
    """Frame by frame, so that chunks give the same as the whole."""
    return np.tanh(latents) * np.float32(255)


def reach(ctx: stagewire.Context, point: str) -> None:
    """Announces a point, and waits there while the test holds it. Reports no progress: nothing has happened."""
    if not ctx.params["gate"]:
        return
    gate = Path(ctx.params["gate"])
    with contextlib.suppress(FileNotFoundError):
        (gate / f"at-{point}").write_text(str(os.getpid()))
        with (gate / "reached").open("a") as log:
            log.write(f"{point} {os.getpid()}\n")
    pause = threading.Event()
    while (gate / f"hold-{point}").exists():
        if ctx.cancelled:
            raise stagewire.Cancelled("the test's job was cancelled")
        if ctx.yield_requested:
            (gate / f"asked-at-{point}").touch()
        pause.wait(0.005)
