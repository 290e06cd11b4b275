"""Denoising loops of real diffusers pipelines, interrupted after some steps: bit for bit what they are otherwise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import stagewire
import torch
from stagewire import checkpointing, errors, local

diffusers = pytest.importorskip("diffusers", reason="needs diffusers")

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEPS = 6
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
SCHEDULERS: dict[str, Callable[[], Any]] = {
    "unipc": lambda: diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0),
    "unipc-3": lambda: diffusers.UniPCMultistepScheduler(**FLOW, flow_shift=3.0, solver_order=3),
    "dpm++": lambda: diffusers.DPMSolverMultistepScheduler(**FLOW, flow_shift=3.0, solver_order=3),
    "deis": lambda: diffusers.DEISMultistepScheduler(**FLOW, flow_shift=3.0),
    "euler": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    # Draws from torch's own generator.
    "euler-sde": lambda: diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True),
    "heun": lambda: diffusers.FlowMatchHeunDiscreteScheduler(shift=3.0),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(kind: str, scheduler: str, dtype: torch.dtype = torch.float32) -> Any:
    """A pipeline with small random weights, the same each time."""
    torch.manual_seed(7)
    if kind == "wan":
        transformer = diffusers.WanTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=4,
            out_channels=4,
            text_dim=8,
            freq_dim=16,
            ffn_dim=16,
            num_layers=1,
        )
        make = diffusers.WanPipeline
        rest = dict.fromkeys(["vae", "text_encoder", "tokenizer"])
    elif kind == "flux":
        transformer = diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 4, 8),
        )
        make = diffusers.FluxPipeline
        rest = dict.fromkeys(["vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"])
    else:
        transformer = diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=8,
            caption_projection_dim=16,
            pooled_projection_dim=8,
            out_channels=4,
        )
        make = diffusers.StableDiffusion3Pipeline
        rest = {f"{part}{n}": None for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")} | {"vae": None}
    transformer.eval()
    if dtype is not torch.float32:
        transformer.to(dtype)
    pipe = make(transformer=transformer, scheduler=SCHEDULERS[scheduler](), **rest)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call(kind: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What a job asks of it; nothing that a call before has touched."""
    noise = torch.Generator().manual_seed(1)

    def given(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=noise).to(dtype)

    common = {"num_inference_steps": STEPS, "output_type": "latent", "return_dict": False}
    common["generator"] = torch.Generator().manual_seed(3)
    if kind == "wan":
        size = {"height": 32, "width": 32, "num_frames": 5}
        return {**common, **size, "prompt_embeds": given(1, 5, 8), "negative_prompt_embeds": given(1, 5, 8)}
    size = {"height": 64, "width": 64}
    pooled = {"pooled_prompt_embeds": given(1, 8)}
    if kind == "flux":
        return {**common, **size, **pooled, "prompt_embeds": given(1, 5, 8)}
    negative = {"negative_prompt_embeds": given(1, 5, 8), "negative_pooled_prompt_embeds": given(1, 8)}
    return {**common, **size, **pooled, **negative, "prompt_embeds": given(1, 5, 8)}


def denoise(kind: str, dtype: torch.dtype, **more: Any) -> stagewire.Stage[Any]:
    @stagewire.stage("denoise", setup=lambda: None)
    def stage(ctx: stagewire.Context, pipe: Any) -> stagewire.Bundle:
        torch.manual_seed(5)
        (latents,) = checkpointing.run(ctx, pipe, **{**call(kind, dtype), **more})
        return {"latents": latents}

    return stage


def interrupted(stage: Any, after: int, pipe: Any, resume: Any = None) -> stagewire.Yielded:
    with pytest.raises(stagewire.Yielded) as yielded:
        local.run_stage(stage, {}, {}, model=pipe, yield_after=after, resume=resume)
    assert yielded.value.done == after
    return yielded.value


CASES = [
    *(("wan", scheduler, torch.float32) for scheduler in SCHEDULERS),
    ("wan", "unipc", torch.bfloat16),
    ("wan", "dpm++", torch.bfloat16),
    ("wan", "euler", torch.bfloat16),
    ("flux", "euler", torch.float32),
    ("flux", "euler", torch.bfloat16),
    ("sd3", "euler", torch.float32),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:diffusers")
@pytest.mark.parametrize(("kind", "scheduler", "dtype"), CASES, ids=str)
def test_an_interrupted_loop_comes_out_the_same(kind: str, scheduler: str, dtype: torch.dtype) -> None:
    plain = build(kind, scheduler, dtype)
    torch.manual_seed(5)
    (whole,) = plain(**call(kind, dtype))
    total = len(plain.scheduler.timesteps)
    stage = denoise(kind, dtype)
    seen: list[int] = []
    first, second = build(kind, scheduler, dtype), build(kind, scheduler, dtype)
    for after in (1, 2, total // 2, total - 1):
        # The second worker has made something else before, and goes on with something else afterwards.
        state = interrupted(stage, after, first)
        seen.clear()
        made = local.run_stage(
            stage, {}, {}, model=second, resume=state, on_progress=lambda *progress: seen.append(progress[1])
        )
        assert made["latents"].dtype == whole.dtype
        assert torch.equal(made["latents"], whole), f"after step {after} of {total}"
        assert seen == list(range(after + 1, total + 1)), "no step is done twice"
    # Twice, and back on the first one.
    state = interrupted(stage, total - 1, second, resume=interrupted(stage, 2, first))
    made = local.run_stage(stage, {}, {}, model=first, resume=state)
    assert torch.equal(made["latents"], whole)


def test_a_callback_may_change_the_latents_and_nothing_else() -> None:
    seen: list[int] = []

    def halve(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append(index)
        return {"latents": tensors["latents"] / 2}

    (whole,) = build("wan", "unipc")(**call("wan"), callback_on_step_end=halve)
    stage = denoise("wan", torch.float32, callback_on_step_end=halve)
    seen.clear()
    state = interrupted(stage, 3, build("wan", "unipc"))
    made = local.run_stage(stage, {}, {}, model=build("wan", "unipc"), resume=state)
    assert torch.equal(made["latents"], whole)
    assert seen == list(range(STEPS))

    def drop_negative(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"negative_prompt_embeds": None}

    stage = denoise("wan", torch.float32, callback_on_step_end=drop_negative)
    with pytest.raises(errors.Unsupported, match="changes negative_prompt_embeds, which is not saved"):
        local.run_stage(stage, {}, {}, model=build("wan", "unipc"))


def test_a_checkpoint_of_another_loop_is_refused() -> None:
    state = interrupted(denoise("wan", torch.float32), 2, build("wan", "unipc"))
    others = [torch.Generator(), torch.Generator()]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"num_inference_steps": STEPS + 1}, "has other timesteps than this scheduler"),
        ({"generator": others}, "has states of 2 random number generators, and this call on cpu has 3"),
        ({}, "is of a UniPCMultistepScheduler, and this scheduler is a FlowMatchEulerDiscreteScheduler"),
    ]
    for change, why in cases:
        stage = denoise("wan", torch.float32, **change)
        with pytest.raises(errors.Invalid, match=why) as refused:
            local.run_stage(stage, {}, {}, model=build("wan", "unipc" if change else "euler"), resume=state)
        assert refused.value.reason == "checkpointing.state"
    with pytest.raises(errors.Invalid, match="of a WanPipeline, not 'stagewire-diffusers-1' of a FluxPipeline"):
        local.run_stage(denoise("flux", torch.float32), {}, {}, model=build("flux", "euler"), resume=state)
    # And the pipeline is as it was.
    (whole,) = build("wan", "unipc")(**call("wan"))
    pipe = build("wan", "unipc")
    with pytest.raises(errors.Invalid):
        local.run_stage(denoise("wan", torch.float32, num_inference_steps=3), {}, {}, model=pipe, resume=state)
    assert torch.equal(local.run_stage(denoise("wan", torch.float32), {}, {}, model=pipe)["latents"], whole)


def test_pipelines_that_may_keep_something_are_refused() -> None:
    class CogVideoXPipeline:
        """Keeps the prediction before in a local variable of its loop."""

    pipe = CogVideoXPipeline()
    assert not checkpointing.supports(pipe)
    assert checkpointing.supports(build("flux", "euler"))
    with pytest.raises(errors.Unsupported, match="nobody has seen that a CogVideoXPipeline goes on") as refused:
        local.run_stage(denoise("wan", torch.float32), {}, {}, model=pipe)
    assert refused.value.reason == "checkpointing.pipeline"


class Sampler:
    """As `DPMSolverSDEScheduler` keeps one."""

    def __call__(self, sigma: float, sigma_next: float) -> float:
        return sigma - sigma_next


@pytest.mark.parametrize("kept", [object(), Sampler()], ids=["object", "what can be called"])
def test_a_scheduler_that_keeps_what_cannot_be_saved_is_refused(kept: object) -> None:
    pipe = build("wan", "unipc")
    pipe.scheduler.noise_sampler = kept
    with pytest.raises(errors.Unsupported, match=f"keeps a {type(kept).__name__} in 'noise_sampler'"):
        local.run_stage(denoise("wan", torch.float32), {}, {}, model=pipe, yield_after=1)
