"""A pipeline without a model: three stages that move bytes, wait, and fail when they are asked to."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
import stagewire

BIG = 1 << 100
"""More than a 64-bit integer or a float can keep."""


def load() -> dict[str, Any]:
    """What a model would be: something that knows which thread uses it."""
    return {"users": set()}


@stagewire.stage("encode")
def encode(ctx: stagewire.Context) -> Any:
    """The prompt's bytes, and whatever the job wants to go wrong."""
    wrong = ctx.params["wrong"]
    if wrong == "value":
        raise ValueError("height must be a multiple of 16, got 15")
    if wrong == "exit":
        raise SystemExit("the stage wants to leave")
    if wrong == "memory":
        raise MemoryError
    if wrong == "type":
        return 3
    if wrong == "result":
        return stagewire.Result({})
    prompt = np.frombuffer(ctx.params["prompt"].encode(), dtype=np.uint8)
    metadata = {"prompt": ctx.params["prompt"], "big": BIG}
    return stagewire.Payload({"prompt": prompt, "none": None}, metadata=metadata, kind="embedding")


@stagewire.stage("denoise")
def denoise(ctx: stagewire.Context) -> Any:
    """A tensor `[2, 7, size]` of int32 that depends on the prompt alone."""
    given = ctx.input.fetch(framework="numpy")
    assert given["none"] is None
    assert list(ctx.input.metadata.items()) == [("prompt", ctx.params["prompt"]), ("big", BIG)]
    for step in range(ctx.params["steps"]):
        if ctx.params["nap"]:
            time.sleep(ctx.params["nap"])
        ctx.progress(step + 1, ctx.params["steps"])
    if ctx.params["wrong"] == "empty":
        return {"latents": np.zeros((2, 0, 1), dtype=np.int32)}
    seed = int(given["prompt"].sum())
    latents = np.random.default_rng(seed).integers(0, 1 << 30, (2, 7, ctx.params["size"]), dtype=np.int32)
    return stagewire.Payload({"latents": latents}, metadata={"prompt": ctx.params["prompt"]}, kind="latent")


@stagewire.stage("decode", setup=load, setup_per_slot=True)
def decode(ctx: stagewire.Context, model: dict[str, Any]) -> Any:
    """The latents as a file, and who decoded them."""
    model["users"].add(threading.get_ident())
    parts = []
    for chunk in ctx.input.chunks(framework="numpy"):
        parts.append(chunk["latents"].copy())
        ctx.progress(len(parts), ctx.input.num_chunks, unit="chunk")
    if ctx.params["wrong"] == "last":
        return {"latents": parts[0]}
    latents = np.concatenate(parts, axis=1)
    info = {
        "metadata": ctx.input.metadata,
        "chunks": [part.shape[1] for part in parts],
        "pid": os.getpid(),
        "users": len(model["users"]),
    }
    return stagewire.Result({"latents.bin": stagewire.Artefact(latents.tobytes())}, info=info)
