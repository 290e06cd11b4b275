"""Running stages in one process: the same context, inputs and chunks as in a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stagewire
import torch
from stagewire import errors, local


@stagewire.stage("encode", setup=lambda: 3)
def encode(ctx: stagewire.Context, scale: int) -> stagewire.Payload:
    x = torch.arange(21 * 2, dtype=torch.float32).reshape(2, 21) * scale
    return stagewire.Payload({"x": x, "none": None, "many": [x, x + 1]}, metadata={"n": [1, None]}, kind="latent")


@stagewire.stage("decode")
def decode(ctx: stagewire.Context) -> stagewire.Result:
    whole = ctx.input.fetch()
    sizes = []
    for index, chunk in enumerate(ctx.input.chunks()):
        assert chunk["none"] is None
        assert [t.shape for t in chunk["many"]] == [chunk["x"].shape] * 2
        sizes.append(chunk["x"].shape[1])
        ctx.progress(index + 1, ctx.input.num_chunks, unit="chunk")
    assert torch.equal(torch.cat([c["x"] for c in ctx.inputs["encode"].chunks()], dim=1), whole["x"])
    return stagewire.Result({}, info={"sizes": sizes, "meta": ctx.input.metadata, "prompt": ctx.params["prompt"]})


def test_a_chain_of_stages() -> None:
    seen: list[Any] = []
    result = local.run(
        [encode, decode], {"prompt": "x"}, num_chunks=8, chunk_dim=1, on_progress=lambda *a: seen.append(a)
    )
    assert result.info == {"sizes": [3, 3, 3, 3, 3, 2, 2, 2], "meta": {"n": [1, None]}, "prompt": "x"}
    assert seen[-1] == ("decode", 8, 8, "chunk")


def test_what_stages_must_return() -> None:
    @stagewire.stage("bad")
    def bad(ctx: Any) -> Any:
        return 3

    with pytest.raises(errors.Invalid, match="stage 'bad' returned a int"):
        local.run([bad, decode], {})
    with pytest.raises(errors.Invalid, match=r"last stage 'bad' returned a int, not a stagewire\.Result"):
        local.run([bad], {})


def test_inputs_are_named() -> None:
    @stagewire.stage("two")
    def two(ctx: stagewire.Context) -> Any:
        with pytest.raises(errors.Invalid, match=r"has 2 inputs \(a, b\).*ctx\.inputs\[STAGE\]"):
            _ = ctx.input
        with pytest.raises(errors.NotFound, match="no input from 'c'; its inputs: a, b"):
            _ = ctx.inputs["c"]
        return {}

    local.run_stage(two, {}, {"a": stagewire.Payload({}), "b": stagewire.Payload({})})


def test_inputs_are_the_stages_own() -> None:
    x = torch.zeros(3)

    @stagewire.stage("write")
    def write(ctx: stagewire.Context) -> Any:
        ctx.input.fetch()["x"].add_(1)
        return {}

    local.run_stage(write, {}, {"a": stagewire.Payload({"x": x})})
    assert x.tolist() == [0, 0, 0]


def test_a_picture_is_a_file_for_the_stage_whether_it_is_one_or_bytes(tmp_path: Path) -> None:
    seen: list[Path] = []

    @stagewire.stage("read")
    def read(ctx: stagewire.Context) -> stagewire.Result:
        seen.append(ctx.params["image"])
        return stagewire.Result({}, info=ctx.params["image"].read_bytes().decode())

    picture = tmp_path / "cat.png"
    picture.write_bytes(b"a cat")
    assert local.run([read], {"image": picture}).info == "a cat"
    assert local.run([read], {"image": b"a dog"}).info == "a dog"
    assert local.run_stage(read, {"image": memoryview(b"a bird")}, {}).info == "a bird"
    assert seen[0] == picture
    assert not any(path.exists() for path in seen[1:])
