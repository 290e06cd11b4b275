"""The stages of every topology in this folder, with arithmetic in place of models.

What moves is small, and what comes out depends on everything that went in: so a test can compare the bytes of a job
that went through six processes with those of plain function calls.
"""

import hashlib
import io

import numpy as np
import stagewire

BOUNDARY = 2
"""Steps that the denoiser for high noise takes, where there are two."""


@stagewire.stage("encode")
def encode(ctx):
    return stagewire.Payload({"embeds": embeds(ctx.params["prompt"])}, kind="embedding")


@stagewire.stage("encode-image")
def encode_image(ctx):
    return stagewire.Payload({"image": image_latent(ctx.params["image"].read_bytes())}, kind="embedding")


@stagewire.stage("denoise")
def denoise(ctx):
    latents = noise(ctx.params["seed"], ctx.params["frames"])
    if "encode-image" in ctx.inputs:
        latents = latents + ctx.inputs["encode-image"].fetch()["image"]
    text = given_embeds(ctx)
    for step in range(ctx.params["steps"]):
        latents = denoised(latents, text)
        ctx.progress(step + 1, ctx.params["steps"])
    return stagewire.Payload({"latents": latents, "audio": soundtrack(latents)}, kind="latent")


@stagewire.stage("denoise-high")
def denoise_high(ctx):
    """The steps at which there is most noise. Hands over where it stopped."""
    latents, text = noise(ctx.params["seed"], ctx.params["frames"]), given_embeds(ctx)
    for step in range(BOUNDARY):
        latents = denoised(latents, text)
        ctx.progress(step + 1, BOUNDARY)
    return stagewire.Payload({"latents": latents}, metadata={"steps": BOUNDARY}, kind="latent")


@stagewire.stage("denoise-low")
def denoise_low(ctx):
    """The other steps, by another model: it needs the prompt as well."""
    before = ctx.inputs["denoise-high"]
    latents, text = before.fetch()["latents"], given_embeds(ctx)
    for step in range(before.metadata["steps"], ctx.params["steps"]):
        latents = np.float32(0.9) * denoised(latents, text)
        ctx.progress(step + 1, ctx.params["steps"])
    return stagewire.Payload({"latents": latents}, kind="latent")


@stagewire.stage("decode")
def decode(ctx):
    frames = [decoded(chunk["latents"]) for chunk in ctx.input.chunks()]
    video = np.concatenate(frames, axis=2)
    return stagewire.Result({"video.bin": stagewire.Artefact(video.tobytes())}, info={"chunks": len(frames)})


@stagewire.stage("decode-video")
def decode_video(ctx):
    frames = [decoded(chunk["latents"]) for chunk in ctx.input.chunks()]
    return stagewire.Payload({"frames": np.concatenate(frames, axis=2)}, kind="frames")


@stagewire.stage("decode-audio")
def decode_audio(ctx):
    return stagewire.Payload({"samples": heard(ctx.input.fetch()["audio"])}, kind="frames")


@stagewire.stage("join")
def join(ctx):
    """Picture and sound in one file; or the picture alone, where the job wants no sound."""
    film = ctx.inputs["decode-video"].fetch()["frames"].tobytes()
    if "decode-audio" in ctx.inputs:
        film += ctx.inputs["decode-audio"].fetch()["samples"].tobytes()
    return stagewire.Result({"film.bin": stagewire.Artefact(film)}, info={"sound": "decode-audio" in ctx.inputs})


generate = stagewire.fuse("generate", [encode, denoise, decode])
"""The same three stages in one process: what ran apart runs together, without a word of it changed."""


def given_embeds(ctx):
    """What the encoder made, or what came with the job in its place."""
    if "encode" in ctx.inputs:
        return ctx.inputs["encode"].fetch()["embeds"]
    return np.load(ctx.params["embeds"], allow_pickle=False)


def embeds(prompt: str) -> np.ndarray:
    seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal((8, 16), dtype=np.float32)


def as_file(array: np.ndarray) -> bytes:
    """An array as the file that a job is given."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getvalue()


def image_latent(picture: bytes) -> np.ndarray:
    pixels = np.frombuffer(hashlib.sha256(picture).digest(), dtype=np.uint8)
    return pixels.reshape(1, 4, 1, 8, 1).astype(np.float32) / 255


def noise(seed: int, frames: int) -> np.ndarray:
    """Batch, channels, frames, height, width."""
    return np.random.default_rng(seed).standard_normal((1, 4, frames, 8, 8), dtype=np.float32)


def denoised(latents: np.ndarray, text: np.ndarray) -> np.ndarray:
    return latents * np.float32(0.5) + text.reshape(-1)[:8]


def soundtrack(latents: np.ndarray) -> np.ndarray:
    """Cut along the same dimension as the picture: batch, bands, frames."""
    return latents[:, :2, :, 0, 0].copy()


def decoded(latents: np.ndarray) -> np.ndarray:
    """Frame by frame, so that chunks give the same as the whole."""
    return np.tanh(latents) * np.float32(255)


def heard(audio: np.ndarray) -> np.ndarray:
    return np.repeat(np.sin(audio), 4, axis=2)
