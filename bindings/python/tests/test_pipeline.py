"""Loading pipeline modules, and the stages in them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import stagewire
from stagewire import errors, pipeline
from stagewire.stages import Artefact, Payload, Result, Stage

GOOD = """
    import stagewire

    def load():
        return "model"

    @stagewire.stage("encode", setup=load)
    def encode(ctx, model):
        return {"x": None}

    @stagewire.stage("decode")
    def decode(ctx):
        return stagewire.Result({})
"""


def write(folder: Path, text: str, name: str = "pipeline.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def test_stages_are_found_in_order(tmp_path: Path) -> None:
    loaded = pipeline.load(write(tmp_path, GOOD))
    assert list(loaded.stages) == ["encode", "decode"]
    assert loaded.stage("encode").load() == "model"
    assert loaded.stage("decode").load() is None


def test_neighbours_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    write(tmp_path, "NAME = 'decode'", "sw_neighbour.py")
    text = """
        import stagewire
        from sw_neighbour import NAME

        stages = [stagewire.stage(NAME)(lambda ctx: None)]
    """
    assert list(pipeline.load(write(tmp_path, text)).stages) == ["decode"]


def test_an_unknown_stage_names_those_there_are(tmp_path: Path) -> None:
    loaded = pipeline.load(write(tmp_path, GOOD))
    with pytest.raises(
        errors.NotFound, match=r"no stage 'decoder' \(did you mean 'decode'\?\); its stages: encode, decode"
    ):
        loaded.stage("decoder")
    with pytest.raises(errors.NotFound, match="no stage 'zzz'; its stages: encode, decode"):
        loaded.stage("zzz")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        (
            "x = 1\n\nraise RuntimeError('no weights')",
            errors.Internal,
            r"pipeline\.py:3 raised .*RuntimeError: no weights",
        ),
        (
            "def f():\n    1 / 0\n\nf()",
            errors.Internal,
            r"pipeline\.py:2 raised while it was imported: ZeroDivisionError",
        ),
        ("import stagewire\nif True\n    pass", errors.Internal, r"pipeline\.py:2 raised .*SyntaxError"),
        ("import not_installed.sub", errors.Internal, r"pipeline\.py:1 imports 'not_installed'.*install not_installed"),
        ("x = 1", errors.Invalid, "defines no stage: decorate a function"),
        (
            "import stagewire\na = stagewire.stage('a')(lambda ctx: None)\nb = stagewire.stage('a')(lambda ctx: None)",
            errors.Invalid,
            "defines stage 'a' twice",
        ),
        (
            "import stagewire\n\n@stagewire.stage('a', setup=dict)\ndef a(ctx): ...",
            errors.Internal,
            r"pipeline\.py:3 raised .*called as a\(ctx, model\), but it is defined as a\(ctx\)",
        ),
    ],
)
def test_bad_modules(tmp_path: Path, text: str, kind: type[Exception], message: str) -> None:
    before = set(sys.modules)
    with pytest.raises(kind, match=message):
        pipeline.load(write(tmp_path, text))
    assert "stagewire_pipeline_pipeline" not in set(sys.modules) - before or kind is errors.Invalid


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match="there is no pipeline file"):
        pipeline.load(tmp_path / "none.py")


@pytest.mark.parametrize("name", ["", "Encode", "2d", "a/b", "é", "a" * 65, 7])
def test_stage_names_are_checked(name: Any) -> None:
    with pytest.raises(errors.Invalid, match="is not a stage name"):
        stagewire.stage(name)


def test_a_stage_is_still_a_function() -> None:
    @stagewire.stage("double")
    def double(ctx: Any) -> Any:
        return {"x": ctx * 2}

    assert isinstance(double, Stage)
    assert double(4) == {"x": 8}


def test_results_become_payloads(tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(b"from disk")
    result = Result(
        {"a.mp4": Artefact(b"12"), "b.png": Artefact(bytearray(b"3")), "c.x": Artefact(tmp_path / "f.bin", "x/y")},
        info={"fps": 12},
    )
    payload = result.to_payload()
    assert payload.kind == "frames"
    assert payload.metadata == {
        "artefacts": [
            {"name": "a.mp4", "media_type": "video/mp4"},
            {"name": "b.png", "media_type": "image/png"},
            {"name": "c.x", "media_type": "x/y"},
        ],
        "info": {"fps": 12},
    }
    assert bytes(payload.tensors["c.x"]) == b"from disk"


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "..", "a\0b"])
def test_artefact_names_hold_no_paths(name: str) -> None:
    with pytest.raises(errors.Invalid, match="is not a file name"):
        Result({name: Artefact(b"")}).to_payload()


def test_artefacts_are_wrapped() -> None:
    with pytest.raises(errors.Invalid, match=r"'a' is a bytes: wrap its bytes in stagewire\.Artefact"):
        Result({"a": b"1"}).to_payload()  # type: ignore[dict-item]


def test_errors_survive_pickling() -> None:
    import pickle

    error = errors.from_failure("not_found", "a.b", "gone", {"x": "1"})
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.reason, str(again), again.details) == (errors.NotFound, "a.b", "gone", {"x": "1"})


def test_unknown_classes_are_internal() -> None:
    assert type(errors.from_failure("from_the_future", "a.b", "x")) is errors.Internal


def test_payload_defaults() -> None:
    assert Payload({}).kind == "feature"
    assert Payload({}).metadata is None
