"""A loop that two processes run together, step by step: each adds its part, and they meet in a folder after each.

Rank 0 has the whole after a step, as after a collective, and saves it; both go on from there.
"""

import os
import threading
from pathlib import Path

import numpy as np
import stagewire

STEPS = 4


@stagewire.stage("denoise")
def denoise(ctx):
    start = ctx.resume.done if ctx.resume else 0
    value = ctx.resume.tensors["value"].copy() if ctx.resume else np.zeros(4, np.int64)
    for step in range(start, STEPS):
        parts = met(ctx, step, own=int(value[0]) * (ctx.rank + 2) + step)
        value = value * 3 + np.arange(4) + sum(parts)
        # Each is waited for, so that a test knows where the next attempt begins.
        if saving := ctx.checkpoint({"value": value}, done=step + 1, total=STEPS):
            saving.wait()
        ctx.boundary(lambda made=value: {"value": made}, done=step + 1, total=STEPS, every=None)
    return {"value": value}


@stagewire.stage("decode")
def decode(ctx):
    return stagewire.Result({}, info={"value": ctx.input.fetch()["value"].tolist()})


def met(ctx, step: int, own: int) -> list[int]:
    """What each rank has for this step, once all have, and the test does not hold it."""
    here = Path(ctx.params["folder"])
    part = here / f"{ctx.attempt}-{step}-{ctx.rank}"
    # There whole or not at all.
    part.with_suffix(".new").write_text(f"{own} {os.getpid()}")
    part.with_suffix(".new").rename(part)
    parts = [here / f"{ctx.attempt}-{step}-{rank}" for rank in range(ctx.world)]
    pause = threading.Event()
    while not all(path.exists() for path in parts) or (here / f"hold-{step}").exists():
        ctx.progress(step, STEPS)
        if ctx.yield_requested:
            (here / "asked").touch()
        pause.wait(0.005)
    return [int(path.read_text().split()[0]) for path in parts]


def expected() -> list[int]:
    """The value that one process computes."""
    value = np.zeros(4, np.int64)
    for step in range(STEPS):
        parts = [int(value[0]) * (rank + 2) + step for rank in range(2)]
        value = value * 3 + np.arange(4) + sum(parts)
    return value.tolist()
