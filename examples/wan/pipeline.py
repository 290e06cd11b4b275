"""Wan in three stages: encode, denoise, decode, each in a process of its own.

This is all the code that serving a diffusers pipeline with Stagewire takes. The stages are cut where diffusers itself
cuts: `WanBlocks().sub_blocks` is `text_encoder`, `denoise` and `decode`, and each of them runs alone as a modular
pipeline with named inputs and outputs. `stagewire.toml` beside this file says how the stages are joined.

    stagewire up examples/wan/stagewire.toml          # one server, three workers
    stagewire submit "a red cat" --out cat.mp4

Set `WAN_DTYPE=bf16` for bfloat16 weights.
"""

import numpy as np
import stagewire
from diffusers.modular_pipelines.wan import WanBlocks
from diffusers.utils import logging
from stagewire import checkpointing

import files
import model
from causal_decoder import CausalDecoder

# ---------------------------------------------------------------------------------------------------------- setup
# Runs once in each worker, which is ready only after it. Each loads the components that its own stage needs.


def load(name: str):
    logging.set_verbosity(logging.CRITICAL)  # a stage that raises is reported by the worker, once
    return model.modular_part(WanBlocks().sub_blocks[name], model.dtype_from_env())


def load_encoder():
    return load("text_encoder")


def load_denoiser():
    return load("denoise")


def load_decoder():
    return load("decode")


# ---------------------------------------------------------------------------------------------------------- stages


@stagewire.stage("encode", setup=load_encoder)
def encode(ctx, pipe):
    """Prompt to embeddings, `[1, tokens, dim]` each."""
    model.check_size(ctx.params["width"], ctx.params["height"], ctx.params["frames"])  # refuse before the work starts
    return pipe(
        prompt=ctx.params["prompt"],
        negative_prompt=ctx.params["negative_prompt"],
        max_sequence_length=model.MAX_TOKENS,
        output=["prompt_embeds", "negative_prompt_embeds"],
    )


@stagewire.stage("denoise", setup=load_denoiser, setup_per_slot=True)
def denoise(ctx, pipe):
    """Embeddings to latents, `[1, 16, T, H/8, W/8]`, which Stagewire hands on in chunks along T.

    A more urgent job may interrupt it between two steps; it goes on from there, here or in another worker.
    """
    size = {name: ctx.params[name] for name in ("width", "height", "frames")}
    latents = checkpointing.run(
        ctx,
        pipe,
        **ctx.input.fetch(),
        latents=model.start_latents(ctx.params["seed"], **size),
        width=size["width"],
        height=size["height"],
        num_frames=size["frames"],
        num_inference_steps=ctx.params["steps"],
        output="latents",
    )
    return stagewire.Payload({"latents": latents}, kind="latent")


@stagewire.stage("decode", setup=load_decoder, setup_per_slot=True)
def decode(ctx, pipe):
    """Latents to a video. Decodes each chunk as it arrives; one chunk with everything gives the same bits."""
    decoder = CausalDecoder(pipe.vae, pipe.video_processor)
    frames: list[np.ndarray] = []
    try:
        for chunk in ctx.input.chunks():
            for new in decoder.frames(chunk["latents"]):
                frames.extend(new)
                ctx.progress(len(frames), ctx.params["frames"], unit="frame")
    finally:
        decoder.close()
    video = np.stack(frames)
    return stagewire.Result(
        {name: stagewire.Artefact(data) for name, data in files.all_of(video, model.FPS).items()},
        info={"frames": len(video), "fps": model.FPS, "height": video.shape[1], "width": video.shape[2]},
    )
