"""A small but real Flux pipeline, built from configuration alone: no hub, no network, no files.

Everything in here is diffusers and transformers; nothing knows about Stagewire. Each component draws its weights from
its own seed, so a process that builds only the text encoders holds the very weights that a process with the whole
pipeline holds. The weights are random and the picture shows what a random network sees, not what the prompt says; the
prompt and the seed change it all the same.
"""

import os
from contextlib import contextmanager

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.utils import logging
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

MAX_TOKENS = 64
CLIP_TOKENS = 32
LATENT_CHANNELS = 16
SIZE_MULTIPLE = 16  # 8 in the VAE, times patches of 2
SEEDS = {"text_encoder": 1, "text_encoder_2": 2, "transformer": 3, "vae": 4}
ENCODERS = ("tokenizer", "tokenizer_2", "text_encoder", "text_encoder_2")
WORDS = "a an the of in on at red green blue yellow white cat dog bird fox whale river forest city sky moon night day"


def dtype_from_env() -> torch.dtype:
    """The weights' type for this process: `FLUX_DTYPE=fp32` (default) or `FLUX_DTYPE=bf16`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[os.environ.get("FLUX_DTYPE", "fp32")]


def check_size(width: int, height: int) -> None:
    """Raises `ValueError` for a size that the model cannot make."""
    if width % SIZE_MULTIPLE or height % SIZE_MULTIPLE:
        raise ValueError(f"width and height must be multiples of {SIZE_MULTIPLE}, got {width}x{height}")


def tokenizer(max_tokens: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained here in a few milliseconds. Any Unicode text has tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([WORDS], trainer)
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>", model_max_length=max_tokens
    )


def clip(dtype: torch.dtype) -> CLIPTextModel:
    """The first encoder: one vector for the whole prompt."""
    config = CLIPTextConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CLIP_TOKENS,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    with seeded("text_encoder"):
        return CLIPTextModel(config).eval().to(dtype)


def t5(dtype: torch.dtype) -> T5EncoderModel:
    """The second encoder: one vector for each token."""
    config = T5Config(vocab_size=400, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    with seeded("text_encoder_2"):
        return T5EncoderModel(config).eval().to(dtype)


def transformer(dtype: torch.dtype) -> FluxTransformer2DModel:
    with seeded("transformer"):
        model = FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=64,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 6, 6),
        )
        with torch.no_grad():
            model.context_embedder.weight.mul_(8)  # listen to the prompt
    return cast(model, dtype)


def vae(dtype: torch.dtype) -> AutoencoderKL:
    with seeded("vae"):
        model = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 16, 16),
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=4,
            scaling_factor=0.3611,
            shift_factor=0.1159,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
    return cast(model, dtype)


def makers(dtype: torch.dtype) -> dict:
    """What builds each component of the pipeline, by name."""
    return {
        "tokenizer": lambda: tokenizer(CLIP_TOKENS),
        "tokenizer_2": lambda: tokenizer(MAX_TOKENS),
        "text_encoder": lambda: clip(dtype),
        "text_encoder_2": lambda: t5(dtype),
        "transformer": lambda: transformer(dtype),
        "scheduler": FlowMatchEulerDiscreteScheduler,
        "vae": lambda: vae(dtype),
    }


def some(dtype: torch.dtype, *names: str) -> FluxPipeline:
    """A pipeline with these components; the others are missing."""
    made = {name: make() if name in names else None for name, make in makers(dtype).items()}
    pipe = FluxPipeline(**made)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def whole(dtype: torch.dtype) -> FluxPipeline:
    """The pipeline as most people call it."""
    return some(dtype, *makers(dtype))


def cast(model, dtype: torch.dtype):
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # diffusers advises from_pretrained() here; there is nothing to load from
    try:
        return model.eval().to(dtype)
    finally:
        logging.set_verbosity(before)


@contextmanager
def seeded(component: str):
    """Draws weights from the component's own seed and leaves the process's random state alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS[component])
        yield
