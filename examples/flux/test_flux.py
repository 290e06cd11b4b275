"""The stages give the picture of the whole pipeline, bit for bit: in this process, and in three."""

import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import stagewire
import torch
from stagewire import local, pipeline
from stagewire.diffusion import DiffusionConnector, StagePayload

import parts
import whole

HERE = Path(__file__).parent
GIVEN = {"prompt": "a red cat", "seed": 3, "steps": 3, "width": 64, "height": 48}

# What a process of its own runs: one stage on what the one before has published.
STAGE = """
import json
import sys
import torch
from stagewire import local, pipeline
from stagewire.diffusion import DiffusionConnector, StagePayload

module, name, run_dir, before, params = sys.argv[1:]
torch.set_num_threads(1)
stages = pipeline.load(module).stages
with DiffusionConnector(name, run_dir=run_dir) as conn:
    given = {}
    if before:
        given[before] = local.as_payload(before, conn.fetch(bytes.fromhex(sys.stdin.readline()), framework="torch"))
    output = local.run_stage(stages[name], json.loads(params), given)
    if hasattr(output, "artefacts"):
        sys.stdout.buffer.write(output.artefacts["picture.npy"].content())
    else:
        handle = conn.publish(StagePayload(request_id="r", tensors=local.as_payload(name, output).tensors))
        print(handle.to_bytes().hex(), flush=True)
        assert handle.wait_released(60)
"""


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["fp32", "bf16"])
def dtype(request, monkeypatch):
    monkeypatch.setenv("FLUX_DTYPE", request.param)
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[request.param]


def params(**given) -> dict:
    """What a job would get: what was given, and the defaults of the TOML file."""
    declared = tomllib.loads((HERE / "stagewire.toml").read_text())["pipeline"]["params"]
    defaults = {name: spec["default"] for name, spec in declared.items() if "default" in spec}
    return {**defaults, **GIVEN, **given}


def expected(dtype) -> np.ndarray:
    return whole.paint(parts.whole(dtype), params())


def pixels(data: bytes) -> np.ndarray:
    return np.load(io.BytesIO(data), allow_pickle=False)


def test_stages_give_the_picture_of_the_whole_pipeline(dtype):
    seen = []
    stages = list(pipeline.load(HERE / "pipeline.py").stages.values())
    result = local.run(stages, params(), on_progress=lambda *progress: seen.append(progress))
    found = pixels(result.artefacts["picture.npy"].content())
    assert found.shape == (48, 64, 3)
    np.testing.assert_array_equal(found, expected(dtype))
    assert result.artefacts["picture.png"].content().startswith(b"\x89PNG")
    assert (result.info, seen) == ({"width": 64, "height": 48}, [("denoise", done, 3, "step") for done in (1, 2, 3)])


def test_so_do_three_processes_that_hand_their_tensors_over(tmp_path):
    """Each loads the components of its own stage only; handles go through pipes."""

    def start(name: str, before: str, stdin) -> subprocess.Popen:
        arguments = [str(HERE / "pipeline.py"), name, str(tmp_path / "run"), before, json.dumps(params())]
        return subprocess.Popen([sys.executable, "-c", STAGE, *arguments], stdin=stdin, stdout=subprocess.PIPE)

    encode = start("encode", "", subprocess.DEVNULL)
    denoise = start("denoise", "encode", encode.stdout)
    decode = start("decode", "denoise", denoise.stdout)
    found, _ = decode.communicate(timeout=240)
    assert [process.wait(60) for process in (encode, denoise, decode)] == [0, 0, 0]
    for process in (encode, denoise):
        process.stdout.close()
    np.testing.assert_array_equal(pixels(found), expected(torch.float32))


def test_the_two_encoders_embeddings_are_one_bundle(tmp_path):
    encode = pipeline.load(HERE / "pipeline.py").stages["encode"]
    made = local.as_payload("encode", local.run_stage(encode, params(), {}))
    with DiffusionConnector("encode", run_dir=tmp_path / "run") as conn:
        handle = conn.publish(StagePayload(request_id="r", kind="embedding", tensors=made.tensors))
        assert handle.spec == {
            "prompt_embeds": ("float32", (1, 64, 64)),
            "pooled_prompt_embeds": ("float32", (1, 32)),
        }
        conn.release(handle)


def test_prompt_and_seed_change_the_picture():
    pipe = parts.whole(torch.float32)
    cat = whole.paint(pipe, params())
    assert np.abs(cat - whole.paint(pipe, params(prompt="a blue whale"))).mean() > 0.001
    assert np.abs(cat - whole.paint(pipe, params(seed=4))).mean() > 0.01
    assert cat.std() > 0.05, "the picture is blank"


def test_a_cancelled_job_stops_at_its_next_step():
    stages = pipeline.load(HERE / "pipeline.py").stages
    embeds = {"encode": local.as_payload("encode", local.run_stage(stages["encode"], params(), {}))}
    seen = []

    def cancel(_stage, done, *_):
        seen.append(done)
        raise stagewire.Cancelled("cancelled")

    with pytest.raises(stagewire.Cancelled):
        local.run_stage(stages["denoise"], params(), embeds, on_progress=cancel)
    assert seen == [1]


def test_a_size_that_the_model_cannot_make_is_refused_before_any_work():
    encode = pipeline.load(HERE / "pipeline.py").stages["encode"]
    with pytest.raises(ValueError, match="width and height must be multiples of 16, got 100x48"):
        local.run_stage(encode, params(width=100), {})
