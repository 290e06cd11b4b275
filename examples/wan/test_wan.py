"""Stages give the bits of the whole pipeline: each part built alone, decoded whole or in slices, fp32 and bf16.

No server and no workers here; `tests/` at the top of the repository has those.
"""

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers.modular_pipelines.wan import WanBlocks

import files
import model
from causal_decoder import CausalDecoder

HERE = Path(__file__).parent
PROMPT = "a red cat"
SIZE = {"width": 64, "height": 48, "frames": 9}
CALL = {"width": 64, "height": 48, "num_frames": 9, "num_inference_steps": 3}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(model.DTYPES))
def dtype(request):
    return model.DTYPES[request.param]


@pytest.fixture(scope="module")
def latents(dtype):
    """Encode and denoise, each with parts that were built for it alone."""
    torch.set_num_threads(1)
    encode = model.modular_part(WanBlocks().sub_blocks["text_encoder"], dtype)
    denoise = model.modular_part(WanBlocks().sub_blocks["denoise"], dtype)
    names = ["prompt_embeds", "negative_prompt_embeds"]
    embeds = encode(prompt=PROMPT, max_sequence_length=model.MAX_TOKENS, output=names)
    assert all(embed.dtype == dtype for embed in embeds.values())
    return denoise(**embeds, **CALL, latents=model.start_latents(0, **SIZE), output="latents")


def whole(pipe, **kwargs):
    return pipe(
        prompt=PROMPT, max_sequence_length=model.MAX_TOKENS, latents=model.start_latents(0, **SIZE), **CALL, **kwargs
    )


def decode(latents, dtype, slices):
    pipe = model.modular_part(WanBlocks().sub_blocks["decode"], dtype)
    decoder = CausalDecoder(pipe.vae, pipe.video_processor)
    return np.concatenate([new for part in latents.split(slices, dim=2) for new in decoder.frames(part)])


@pytest.mark.parametrize("slices", [[3], [1, 2], [2, 1], [1, 1, 1]], ids=str)
def test_staged_equals_colocated(latents, dtype, slices):
    expected = np.asarray(whole(model.modular_pipeline(dtype), output="videos"))[0]
    frames = decode(latents, dtype, slices)
    assert frames.shape == (9, 48, 64, 3)
    np.testing.assert_array_equal(frames, expected)


def test_modular_equals_the_stock_pipeline_in_fp32():
    modular = np.asarray(whole(model.modular_pipeline(torch.float32), output="videos"))
    stock = np.asarray(whole(model.stock_pipeline(torch.float32)).frames)
    np.testing.assert_array_equal(modular, stock)


def fingerprint() -> str:
    parts = [model.text_encoder(torch.float32), model.transformer(torch.float32), model.vae(torch.float32)]
    digest = hashlib.sha256()
    for part in parts:
        for tensor in part.state_dict().values():
            digest.update(tensor.numpy().tobytes())
    return f"{digest.hexdigest()} {model.tokenizer()('the quiet river at dusk, 夜')['input_ids']}"


def test_another_process_builds_the_same_tokenizer_and_weights():
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import test_wan; print(test_wan.fingerprint())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == fingerprint()


def test_a_decoder_starts_afresh_after_an_abandoned_video(dtype):
    pipe = model.modular_part(WanBlocks().sub_blocks["decode"], dtype)
    latents = model.start_latents(1, **SIZE)
    expected = np.concatenate(list(CausalDecoder(pipe.vae, pipe.video_processor).frames(latents)))
    abandoned = CausalDecoder(pipe.vae, pipe.video_processor)
    next(abandoned.frames(latents))
    abandoned.close()
    again = np.concatenate(list(CausalDecoder(pipe.vae, pipe.video_processor).frames(latents)))
    np.testing.assert_array_equal(again, expected)


def test_prompt_and_seed_change_the_picture():
    pipe = model.modular_pipeline(torch.float32)

    def paint(prompt, seed):
        latents = model.start_latents(seed, **SIZE)
        videos = pipe(prompt=prompt, max_sequence_length=model.MAX_TOKENS, latents=latents, **CALL, output="videos")
        return np.asarray(videos)[0]

    cat = paint("a red cat", 0)
    assert np.abs(cat - paint("a blue whale", 0)).mean() > 0.01
    assert np.abs(cat - paint("a red cat", 1)).mean() > 0.01
    assert cat.std() > 0.05, "the picture is blank"


@pytest.mark.parametrize(("width", "height", "frames"), [(100, 48, 9), (64, 40, 9), (64, 48, 8), (64, 48, 0)])
def test_sizes_the_model_cannot_make_are_refused_with_the_reason(width, height, frames):
    with pytest.raises(ValueError, match=r"multiple"):
        model.check_size(width, height, frames)


def test_files_hold_the_frames():
    frames = np.random.default_rng(0).random((5, 32, 48, 3), dtype=np.float32)
    made = files.all_of(frames, fps=12)
    assert set(made) & {"video.mp4", "video.gif"}
    assert made["frames.png"].startswith(b"\x89PNG")
    assert np.array_equal(np.load(files.io.BytesIO(made["frames.npy"]), allow_pickle=False), frames)
