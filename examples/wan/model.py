"""A small but real Wan pipeline, built from configuration alone: no hub, no network, no files.

Everything in here is diffusers and transformers; nothing knows about Stagewire. Each component draws its weights from
its own seed, so a process that builds only the text encoder holds the very weights that a process with the whole
pipeline holds. That is what lets `pipeline.py` split the pipeline over three processes and `colocated.py` check the
result bit for bit.

The weights are random, so the video shows what a random network sees, not what the prompt says. To make that worth
looking at, the weights are *shaped* while they are drawn, never trained: the kernels of the VAE decoder are random
mixtures of channels under a soft brush (`paint`), and the transformer's answer is the same for the four latent pixels
of a patch. The prompt then chooses colours and shapes, the seed where they start.
"""

import os
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel
from diffusers.modular_pipelines.wan import WanBlocks
from diffusers.utils import logging
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

MAX_TOKENS = 64
TEXT_DIM = 64
LATENT_CHANNELS = 16
SIZE_MULTIPLE = 16  # 8 in the VAE, times patches of 2 in the transformer
FRAMES_PER_LATENT = 4  # the first latent frame makes one frame, each later one makes four
FPS = 12

SEEDS = {"text_encoder": 11, "transformer": 12, "vae": 26}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

# What the tokenizer learns its words from.
WORDS = """
a an the of in on over under with and at by to from red green blue yellow orange purple black white golden silver pink
cat dog bird fish horse fox bear whale owl tiger river mountain forest ocean desert city street house garden bridge
castle island sky sun moon star cloud rain snow storm wind fire water smoke night day dawn dusk morning evening winter
summer walking running flying swimming sleeping dancing jumping singing slow fast bright dark soft warm cold old young
tiny huge quiet wild abstract painting photograph film portrait landscape closeup cinematic watercolour oil neon light
"""


def dtype_from_env() -> torch.dtype:
    """The weights' type for this process: `WAN_DTYPE=fp32` (default) or `WAN_DTYPE=bf16`."""
    name = os.environ.get("WAN_DTYPE", "fp32")
    if name not in DTYPES:
        raise ValueError(f"WAN_DTYPE is {name!r}; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_size(width: int, height: int, frames: int) -> None:
    """Raises `ValueError` for a size that the model cannot make (pixels, pixels, frames)."""
    if width % SIZE_MULTIPLE or height % SIZE_MULTIPLE:
        raise ValueError(f"width and height must be multiples of {SIZE_MULTIPLE}, got {width}x{height}")
    if frames < 1 or (frames - 1) % FRAMES_PER_LATENT:
        raise ValueError(f"frames must be 1 more than a multiple of {FRAMES_PER_LATENT}, got {frames}")


def start_latents(seed: int, width: int, height: int, frames: int) -> torch.Tensor:
    """Where denoising starts: noise `[1, C, T, H/8, W/8]`, float32, coarse in space and slow in time."""
    check_size(width, height, frames)
    size = ((frames - 1) // FRAMES_PER_LATENT + 1, height // 8, width // 8)
    coarse = [2 + size[0] // 4, 2 + size[1] // 6, 2 + size[2] // 6]
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1, LATENT_CHANNELS, *coarse, generator=generator)
    return torch.nn.functional.interpolate(noise, size=size, mode="trilinear", align_corners=True)


# ---------------------------------------------------------------------------------------------------- components


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained here on `WORDS` in a few milliseconds. Any Unicode text has tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")


def text_encoder(dtype: torch.dtype) -> UMT5EncoderModel:
    config = UMT5Config(
        vocab_size=600, d_model=TEXT_DIM, d_kv=16, d_ff=128, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=1
    )
    with _seeded("text_encoder"):
        return UMT5EncoderModel(config).eval().to(dtype)


def transformer(dtype: torch.dtype) -> WanTransformer3DModel:
    with _seeded("transformer"):
        model = WanTransformer3DModel(
            num_attention_heads=4,
            attention_head_dim=32,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            text_dim=TEXT_DIM,
            freq_dim=64,
            ffn_dim=256,
            num_layers=4,
        )
        with torch.no_grad():
            for block in model.blocks:
                block.attn2.to_out[0].weight.mul_(8)  # listen to the prompt
            weight, bias = model.proj_out.weight, model.proj_out.bias
            weight.copy_(weight[:LATENT_CHANNELS].repeat(4, 1))  # the same answer for all pixels of a patch
            bias.copy_(bias[:LATENT_CHANNELS].repeat(4))
    return _cast(model, dtype)


def vae(dtype: torch.dtype) -> AutoencoderKLWan:
    with _seeded("vae"):
        model = AutoencoderKLWan(
            base_dim=8,
            z_dim=LATENT_CHANNELS,
            num_res_blocks=1,
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[2.0] * LATENT_CHANNELS,
        )
        paint(model.decoder)
    return _cast(model, dtype)


def scheduler() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


@torch.no_grad()
def paint(decoder: torch.nn.Module, gain: float = 2.5) -> None:
    """Draws the decoder's convolutions anew: random in the channels, a soft brush in space and time.

    The brush looks back in time, as the causal convolutions do, and mostly at the present.
    """
    brush = {"time": torch.tensor([0.05, 0.2, 0.75]), "space": torch.tensor([0.25, 0.5, 0.25])}
    for name, conv in decoder.named_modules():
        if not isinstance(conv, (torch.nn.Conv2d, torch.nn.Conv3d)):
            continue
        out_channels, in_channels, *kernel = conv.weight.shape
        mix = torch.randn(out_channels, in_channels) * gain / in_channels**0.5
        if name.endswith("time_conv"):  # doubles the frame rate: first half-way from the past, then the present
            halves = torch.tensor([[0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
            mix = torch.eye(in_channels).repeat(2, 1)
            stroke = halves.repeat_interleave(in_channels, 0).view(out_channels, 1, 3, 1, 1)
        else:
            if name == "conv_out":  # balanced colours
                mix = (mix - mix.mean(1, keepdim=True)) * 0.6
            stroke = torch.ones(())
            for axis, taps in enumerate(kernel):
                along_time = len(kernel) == 3 and axis == 0
                stroke = stroke[..., None] * (brush["time" if along_time else "space"] if taps == 3 else torch.ones(1))
        conv.weight.copy_(mix.view(*mix.shape, *[1] * len(kernel)) * stroke)
        conv.bias.zero_()


@contextmanager
def _seeded(component: str):
    """Draws weights from the component's own seed and leaves the process's random state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS[component])
        yield


@contextmanager
def quiet(level: int = logging.ERROR):
    """Keeps diffusers from logging below `level`."""
    before = logging.get_verbosity()
    logging.set_verbosity(level)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _cast(model, dtype: torch.dtype):
    with quiet():  # diffusers advises from_pretrained() here; there is nothing to load from
        return model.eval().to(dtype)


# ----------------------------------------------------------------------------------------------------- pipelines


def makers(dtype: torch.dtype) -> dict:
    """What builds each component of the pipeline, by name."""
    return {
        "tokenizer": tokenizer,
        "text_encoder": lambda: text_encoder(dtype),
        "transformer": lambda: transformer(dtype),
        "scheduler": scheduler,
        "vae": lambda: vae(dtype),
    }


def modular_part(blocks, dtype: torch.dtype):
    """A runnable modular pipeline for `blocks`, with the components that these blocks ask for and no others."""
    _silence(blocks)
    pipe = blocks.init_pipeline()
    wanted = pipe.pretrained_component_names
    pipe.update_components(**{name: make() for name, make in makers(dtype).items() if name in wanted})
    return pipe


def _silence(blocks) -> None:
    """No progress bars on stderr, at any depth."""
    if hasattr(blocks, "set_progress_bar_config"):
        blocks.set_progress_bar_config(disable=True)
    for block in blocks.sub_blocks.values():
        _silence(block)


def modular_pipeline(dtype: torch.dtype):
    """The whole pipeline as diffusers' modular pipeline: text_encoder, denoise, decode."""
    return modular_part(WanBlocks(), dtype)


def stock_pipeline(dtype: torch.dtype) -> WanPipeline:
    """The whole pipeline as the `WanPipeline` class that most people call."""
    pipe = WanPipeline(**{name: make() for name, make in makers(dtype).items()})
    pipe.set_progress_bar_config(disable=True)
    return pipe
