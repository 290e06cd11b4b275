"""Flux in three stages: two text encoders, the transformer, the VAE, each in a process of its own.

    stagewire up examples/flux/stagewire.toml
    stagewire submit "a red cat" --out cat.png

`FluxPipeline` cuts well: without its other components, `encode_prompt` and a call with `prompt_embeds` and
`output_type="latent"` are the first two stages; the third is what the pipeline does after its loop. Set
`FLUX_DTYPE=bf16` for bfloat16 weights.
"""

import stagewire
import torch

import parts
import picture


def load_encoders():
    return parts.some(parts.dtype_from_env(), *parts.ENCODERS)


def load_denoiser():
    return parts.some(parts.dtype_from_env(), "transformer", "scheduler")


def load_decoder():
    return parts.some(parts.dtype_from_env(), "vae")


@stagewire.stage("encode", setup=load_encoders)
@torch.inference_mode()
def encode(ctx, pipe):
    """Prompt to embeddings: CLIP's `[1, 32]` for all of it, T5's `[1, tokens, 64]` for each token."""
    parts.check_size(ctx.params["width"], ctx.params["height"])  # refuse before the work starts
    embeds, pooled, _ids = pipe.encode_prompt(ctx.params["prompt"], prompt_2=None, max_sequence_length=parts.MAX_TOKENS)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}


@stagewire.stage("denoise", setup=load_denoiser, setup_per_slot=True)
def denoise(ctx, pipe):
    """Embeddings to packed latents, `[1, height/16 * width/16, 64]`."""
    steps = ctx.params["steps"]

    def report(_pipe, step, _time, tensors):
        ctx.progress(step + 1, steps)  # a cancelled job ends here
        return tensors

    latents = pipe(
        **ctx.input.fetch(),
        width=ctx.params["width"],
        height=ctx.params["height"],
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(ctx.params["seed"]),
        callback_on_step_end=report,
        output_type="latent",
    ).images
    return stagewire.Payload({"latents": latents}, kind="latent")


@stagewire.stage("decode", setup=load_decoder)
@torch.inference_mode()
def decode(ctx, pipe):
    """Packed latents to the picture, as the end of `FluxPipeline.__call__` does."""
    packed = ctx.input.fetch()["latents"]
    latents = pipe._unpack_latents(packed, ctx.params["height"], ctx.params["width"], pipe.vae_scale_factor)
    latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
    pixels = pipe.vae.decode(latents, return_dict=False)[0]
    pixels = pipe.image_processor.postprocess(pixels, output_type="np")[0]
    return stagewire.Result(
        {name: stagewire.Artefact(data) for name, data in picture.files(pixels).items()},
        info={"width": pixels.shape[1], "height": pixels.shape[0]},
    )
