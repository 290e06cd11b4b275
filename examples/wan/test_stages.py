"""The stage functions of `pipeline.py` and `modular.py`, run in this process: the same frames as the whole pipeline."""

import io
import tomllib
from pathlib import Path

import numpy as np
import pytest
import stagewire
import torch
from stagewire import local, pipeline

import model

HERE = Path(__file__).parent
GIVEN = {"prompt": "a red cat", "seed": 3, "steps": 3, "width": 64, "height": 48, "frames": 9}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=list(model.DTYPES))
def dtype(request, monkeypatch):
    monkeypatch.setenv("WAN_DTYPE", request.param)
    return model.DTYPES[request.param]


def params(config: str, **given) -> dict:
    """What a job would get: what was given, and the defaults of the TOML file."""
    declared = tomllib.loads((HERE / config).read_text())["pipeline"]["params"]
    defaults = {name: spec["default"] for name, spec in declared.items() if "default" in spec}
    return {**defaults, **GIVEN, **given}


def stages(module: str) -> list:
    return list(pipeline.load(HERE / module).stages.values())


def whole(dtype) -> np.ndarray:
    pipe = model.modular_pipeline(dtype)
    latents = model.start_latents(GIVEN["seed"], GIVEN["width"], GIVEN["height"], GIVEN["frames"])
    videos = pipe(
        prompt=GIVEN["prompt"],
        max_sequence_length=model.MAX_TOKENS,
        latents=latents,
        width=GIVEN["width"],
        height=GIVEN["height"],
        num_frames=GIVEN["frames"],
        num_inference_steps=GIVEN["steps"],
        output="videos",
    )
    return np.asarray(videos)[0]


def frames(result: stagewire.Result) -> np.ndarray:
    return np.load(io.BytesIO(result.artefacts["frames.npy"].content()), allow_pickle=False)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_stages_give_the_frames_of_the_whole_pipeline(dtype, chunks):
    seen = []
    result = local.run(
        stages("pipeline.py"),
        params("stagewire.toml"),
        num_chunks=chunks,
        chunk_dim=2,
        on_progress=lambda *progress: seen.append(progress),
    )
    np.testing.assert_array_equal(frames(result), whole(dtype))
    assert result.info == {"frames": 9, "fps": model.FPS, "height": 48, "width": 64}
    steps = [("denoise", done, 3, "step") for done in (1, 2, 3)]
    assert seen == [*steps, *(("decode", done, 9, "frame") for done in (1, 5, 9))]


def test_the_modular_pipeline_handed_over_whole_gives_them_too(dtype):
    result = local.run(stages("modular.py"), params("modular.toml"))
    np.testing.assert_array_equal(frames(result), whole(dtype))


def test_a_cancelled_job_stops_at_its_next_step_and_the_next_one_is_not_affected():
    encode, denoise, _ = stages("pipeline.py")
    wanted = params("stagewire.toml")
    embeds = {"encode": local.as_payload("encode", local.run_stage(encode, wanted, {}))}
    pipe = denoise.load()
    before = local.run_stage(denoise, wanted, embeds, model=pipe)
    seen = []

    def cancel(_stage, done, *_):
        seen.append(done)
        if done == 2:
            raise stagewire.Cancelled("cancelled")

    with pytest.raises(stagewire.Cancelled):
        local.run_stage(denoise, wanted, embeds, model=pipe, on_progress=cancel)
    assert seen == [1, 2]
    after = local.run_stage(denoise, wanted, embeds, model=pipe)
    assert torch.equal(before.tensors["latents"], after.tensors["latents"])


@pytest.mark.parametrize("module", ["pipeline.py", "modular.py"])
def test_a_job_that_is_interrupted_after_each_step_comes_out_the_same(dtype, module):
    encode, denoise, _ = stages(module)
    wanted = params(module.replace("pipeline.py", "stagewire.toml").replace("modular.py", "modular.toml"), steps=5)
    inputs = {"encode": local.as_payload("encode", local.run_stage(encode, wanted, {}))}
    workers = [denoise.load() for _ in range(2)]
    whole = local.run_stage(denoise, wanted, inputs, model=workers[0])
    state, seen = None, []
    for done in range(1, 5):
        with pytest.raises(stagewire.Yielded) as yielded:
            local.run_stage(
                denoise,
                wanted,
                inputs,
                model=workers[done % 2],
                yield_after=done,
                resume=state,
                on_progress=lambda *progress: seen.append(progress[1]),
            )
        state = yielded.value
    made = local.run_stage(denoise, wanted, inputs, model=workers[0], resume=state)
    assert seen == [1, 2, 3, 4], "each step once"
    assert torch.equal(made.tensors["latents"], whole.tensors["latents"])


def test_a_size_that_the_model_cannot_make_is_refused_before_any_work():
    encode = stages("pipeline.py")[0]
    with pytest.raises(ValueError, match="width and height must be multiples of 16, got 100x48"):
        local.run_stage(encode, params("stagewire.toml", width=100), {})
