"""A stage that several processes run together: each computes its half, and they meet in a folder, as over a network."""

import os
import threading
from pathlib import Path

import stagewire


@stagewire.stage("denoise")
def denoise(ctx):
    name, here = ctx.params["name"], Path(ctx.params["folder"])
    pause = threading.Event()
    part = here / f"{name}-{ctx.attempt}-{ctx.rank}"
    part.write_text(f"{name}:{ctx.rank}:{os.getpid()}")
    others = [here / f"{name}-{ctx.attempt}-{rank}" for rank in range(ctx.world)]
    while not all(other.exists() for other in others) or (here / f"hold-{name}").exists():
        ctx.progress(0, 1)
        pause.wait(0.005)
    bad = ctx.params["bad"]
    if bad == ctx.rank:
        raise ValueError(f"rank {ctx.rank} cannot do this")
    # As in a collective: rank 0 cannot end without the others. A rank above 0 may have ended by then.
    while bad > 0:
        ctx.progress(0, 1)
        pause.wait(0.005)
    return stagewire.Payload({}, metadata=[other.read_text() for other in others], kind="latent")


@stagewire.stage("decode")
def decode(ctx):
    return stagewire.Result({}, info={"parts": ctx.input.metadata})
