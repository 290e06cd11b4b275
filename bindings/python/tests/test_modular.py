"""Modular pipelines handed over whole, with blocks that stand in for those of diffusers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import stagewire
import torch
from stagewire import errors, local, modular


class Param(SimpleNamespace):
    """An input of a block."""

    name: str
    default: Any = None


class Block:
    """What `stagewire.modular` asks of a block."""

    def __init__(self, inputs: dict[str, Any], outputs: list[str], components: list[str], run: Any) -> None:
        self.inputs = [Param(name=name, default=default) for name, default in inputs.items()]
        self.output_names = outputs
        self.intermediate_output_names = outputs
        self.components = components
        self.function = run
        self.sub_blocks: dict[str, Any] = {}

    def init_pipeline(self, pretrained: str | None) -> Pipe:
        return Pipe(copy.deepcopy(self), pretrained)


class Loop(Block):
    """A block with a denoising loop and its progress bar."""

    def progress_bar(self, iterable: Any = None, total: int | None = None) -> Any:
        raise AssertionError("tqdm is not for workers")


class Pipe:
    """What `init_pipeline` returns."""

    def __init__(self, block: Any, pretrained: str | None) -> None:
        self.block = block
        self.pretrained = pretrained
        self.have: dict[str, Any] = dict.fromkeys(block.components)
        self.component_names = list(block.components)
        self.pretrained_component_names = list(block.components)

    @property
    def null_component_names(self) -> list[str]:
        return [name for name, value in self.have.items() if value is None]

    def update_components(self, **components: Any) -> None:
        assert set(components) <= set(self.have)
        self.have.update(components)

    def load_components(self, names: list[str]) -> None:
        self.have.update(dict.fromkeys(names, self.pretrained))

    def __call__(self, **given: Any) -> Any:
        values = {param.name: param.default for param in self.block.inputs}
        unknown = set(given) - set(values)
        assert not unknown, f"inputs that the block does not have: {unknown}"
        values.update(given)
        values.update(self.block.function(self.block, self.have, SimpleNamespace(**values)))
        return SimpleNamespace(values=values, get=values.get)


def encode(block: Any, have: Any, given: Any) -> dict[str, Any]:
    embeds = torch.full((1, 3), float(len(given.prompt) * have["text_encoder"]))
    return {
        "prompt_embeds": embeds,
        "negative": None,
        "lists": [embeds, embeds + 1],
        "size": [4, 5],
        "unused": object(),
    }


def denoise(block: Any, have: Any, given: Any) -> dict[str, Any]:
    latents = torch.zeros(1, 2, 4)
    with block.sub_blocks["loop"].progress_bar(total=given.num_inference_steps) as bar:
        for _ in range(given.num_inference_steps):
            latents = latents + given.prompt_embeds.sum()
            given.prompt_embeds.mul_(2)  # blocks write into their inputs
            bar.update()
    if given.generator is not None:
        latents = latents + torch.rand(1, generator=given.generator)
    assert given.negative is None
    return {"latents": latents}


def decode(block: Any, have: Any, given: Any) -> dict[str, Any]:
    assert given.size == [4, 5], "handed on over a block that has no use for it"
    return {"videos": [given.latents * have["vae"]]}


def blocks() -> Any:
    middle = Block(
        {"prompt_embeds": None, "negative": None, "lists": None, "num_inference_steps": 50, "generator": None},
        ["latents"],
        [],
        denoise,
    )
    middle.sub_blocks["loop"] = Loop({}, [], [], None)
    first = Block(
        {"prompt": None, "max_length": 7},
        ["prompt_embeds", "negative", "lists", "size", "unused"],
        ["text_encoder"],
        encode,
    )
    last = Block({"latents": None, "size": None, "output_type": "np"}, ["videos"], ["vae"], decode)
    return SimpleNamespace(sub_blocks={"text_encoder": first, "denoise": middle, "decode": last})


COMPONENTS = {"text_encoder": lambda: 2, "vae": lambda: 10, "other": lambda: 1 / 0}


def test_each_block_becomes_a_stage() -> None:
    seen: list[Any] = []
    stages = modular.stages(
        blocks(), components=COMPONENTS, names={"text_encoder": "encode"}, params={"steps": "num_inference_steps"}
    )
    assert [stage.name for stage in stages] == ["encode", "denoise", "decode"]
    params = {"prompt": "abc", "steps": 3, "strange": 1}
    result = local.run(stages, params, on_progress=lambda *progress: seen.append(progress))
    assert seen == [("denoise", step, 3, "step") for step in (1, 2, 3)]
    import io

    import numpy as np

    video = np.load(io.BytesIO(bytes(result.artefacts["videos.npy"].content())))
    assert video.tolist() == np.full((1, 2, 4), 18.0 * (1 + 2 + 4) * 10).tolist()


def test_a_seed_becomes_a_generator() -> None:
    def run(seed: int) -> bytes:
        stages = modular.stages(blocks(), components=COMPONENTS)
        return bytes(
            local.run(stages, {"prompt": "a", "num_inference_steps": 1, "seed": seed}).artefacts["videos.npy"].content()
        )

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_a_cancelled_job_stops_at_its_next_step() -> None:
    stages = modular.stages(blocks(), components=COMPONENTS)
    calls = []

    def progress(stage: str, done: int, total: int, unit: str) -> None:
        calls.append(done)
        if done == 2:
            raise stagewire.Cancelled("enough")

    with pytest.raises(stagewire.Cancelled):
        local.run(stages, {"prompt": "a", "num_inference_steps": 9}, on_progress=progress)
    assert calls == [1, 2]


def test_missing_components_are_named() -> None:
    stages = modular.stages(blocks(), components={})
    with pytest.raises(errors.NotFound, match="block 'decode' needs vae: add what builds them to components="):
        stages[2].load()
    loaded: Any = modular.stages(blocks(), pretrained="folder")[2].load()
    assert loaded.have == {"vae": "folder"}


def test_what_cannot_be_handed_over_is_named() -> None:
    pipeline = blocks()
    pipeline.sub_blocks["decode"].inputs.append(Param(name="unused"))
    stages = modular.stages(pipeline, components=COMPONENTS)
    with pytest.raises(errors.Unsupported, match="block 'text_encoder' hands over 'unused', a object"):
        local.run_stage(stages[0], {"prompt": "a"}, {})


def test_wrong_blocks() -> None:
    with pytest.raises(errors.Invalid, match="a dict has no sub_blocks"):
        modular.stages({})
    with pytest.raises(
        errors.Invalid, match="names= has 'encode', which is no block; the blocks: text_encoder, denoise"
    ):
        modular.stages(blocks(), names={"encode": "x"})


def test_the_result_is_the_users_to_make() -> None:
    def finish(ctx: stagewire.Context, outputs: dict[str, Any]) -> stagewire.Result:
        return stagewire.Result({}, info={"names": list(outputs), "prompt": ctx.params["prompt"]})

    stages = modular.stages(blocks(), components=COMPONENTS, finish=finish)
    result = local.run(stages, {"prompt": "a", "num_inference_steps": 1})
    assert result.info == {"names": ["videos"], "prompt": "a"}
