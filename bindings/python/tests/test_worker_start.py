"""Starting a worker: what it refuses, with which words and status; as its own process, as `stagewire up` starts it."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from stagewire import errors
from stagewire.worker import failure, options

PIPELINE = """
    import stagewire

    @stagewire.stage("encode")
    def encode(ctx):
        return {}

    @stagewire.stage("decode", setup=lambda: 1 / 0)
    def decode(ctx, model):
        return stagewire.Result({})
"""

TOML = """
    [pipeline]
    name = "toy"
    module = "pipeline.py"

    [[stage]]
    name = "encode"
    slots = 3
    threads = 2

    [[stage]]
    name = "decode"

    [server]
    arena-bytes = "64MiB"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pipeline.py").write_text(textwrap.dedent(PIPELINE))
    (tmp_path / "stagewire.toml").write_text(textwrap.dedent(TOML))
    return tmp_path


def start(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stagewire.worker", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_no_server(folder: Path, run_dir: Path) -> None:
    done = start(
        "--pipeline", folder / "pipeline.py", "--stage", "encode", "--run-dir", run_dir, "--attach-within", "0.1"
    )
    assert done.returncode == 3, done.stderr
    assert str(run_dir) in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((run_dir / "peers").iterdir()), "no socket is left"


@pytest.mark.parametrize("name", ["pipeline.py", "stagewire.toml"])
def test_an_unknown_stage(folder: Path, run_dir: Path, name: str) -> None:
    done = start("--pipeline", folder / name, "--stage", "decoder", "--run-dir", run_dir)
    assert done.returncode == 2
    assert f"{name} has no stage 'decoder' (did you mean 'decode'?); its stages: encode, decode" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_module_that_raises(folder: Path, run_dir: Path) -> None:
    (folder / "pipeline.py").write_text("import json\n\njson.loads('{')\n")
    done = start("--pipeline", folder / "stagewire.toml", "--stage", "encode", "--run-dir", run_dir)
    assert done.returncode == 1
    assert f"{folder}/pipeline.py:3 raised while it was imported: JSONDecodeError" in done.stderr
    assert "Traceback" in done.stderr, "the author of the module wants to see where"


def test_a_module_that_needs_what_is_not_installed(folder: Path, run_dir: Path) -> None:
    (folder / "pipeline.py").write_text("import torch_of_tomorrow\n")
    done = start("--pipeline", folder / "pipeline.py", "--stage", "encode", "--run-dir", run_dir)
    assert done.returncode == 1
    assert "imports 'torch_of_tomorrow', which this Python" in done.stderr
    assert "install torch_of_tomorrow there, or choose another Python with --python" in done.stderr


def test_a_setup_that_raises(folder: Path, run_dir: Path) -> None:
    done = start("--pipeline", folder / "pipeline.py", "--stage", "decode", "--run-dir", run_dir)
    assert done.returncode == 1
    assert "pipeline.py:8 raised while stage 'decode' was set up: ZeroDivisionError" in done.stderr
    assert not run_dir.exists(), "it did not attach before its model was loaded"


def test_sigterm_while_it_looks_for_a_server(folder: Path, run_dir: Path) -> None:
    command = [sys.executable, "-m", "stagewire.worker", "--pipeline", str(folder / "pipeline.py"), "--stage", "encode"]
    with subprocess.Popen([*command, "--run-dir", str(run_dir)], stderr=subprocess.PIPE, text=True) as worker:
        peers = run_dir / "peers"
        deadline = time.monotonic() + 30
        while not (peers.is_dir() and len(list(peers.iterdir())) == 2):
            assert time.monotonic() < deadline, "it did not begin to attach"
            time.sleep(0.005)
        worker.terminate()
        _, talk = worker.communicate(timeout=10)
    assert worker.returncode == 128 + signal.SIGTERM, talk
    assert "Traceback" not in talk
    assert not list(peers.iterdir()), "no socket is left"


def test_no_pipeline(tmp_path: Path) -> None:
    done = start("--pipeline", tmp_path / "none.toml", "--stage", "encode")
    assert (done.returncode, "there is no pipeline file" in done.stderr) == (2, True)
    done = start("--pipeline", tmp_path / "none.py", "--stage", "encode")
    assert (done.returncode, "there is no pipeline file" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--stage", "a"), "--pipeline"),
        (("--pipeline", "p.py", "--stage", "a", "--slots", "0"), "'0' is not a number of at least 1"),
        (("--pipeline", "p.py", "--stage", "a", "--arena-bytes", "big"), "is not a number of bytes"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    done = start(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_options_come_from_the_toml(folder: Path, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
    monkeypatch.setenv("STAGEWIRE_RUN_DIR", str(run_dir))
    path = str(folder / "stagewire.toml")
    found = options.parse(["--pipeline", path, "--stage", "encode"])
    assert (found.module, found.pipeline, found.slots, found.threads) == (folder / "pipeline.py", "toy", 3, 2)
    assert (found.arena_bytes, found.run_dir) == (64 << 20, run_dir)
    assert found.name.startswith("encode-")
    monkeypatch.setenv("STAGEWIRE_TORCH_THREADS", "5")
    found = options.parse(["--pipeline", path, "--stage", "encode", "--slots", "1", "--name", "x"])
    assert (found.slots, found.threads, found.name) == (1, 5, "x")
    found = options.parse(["--pipeline", path, "--stage", "encode", "--threads", "4", "--arena-bytes", "1MiB"])
    assert (found.threads, found.arena_bytes) == (4, 1 << 20)
    monkeypatch.setenv("STAGEWIRE_TORCH_THREADS", "many")
    with pytest.raises(errors.Invalid, match="STAGEWIRE_TORCH_THREADS: 'many' is not a number of at least 1"):
        options.parse(["--pipeline", path, "--stage", "encode"])


@pytest.mark.parametrize(
    ("text", "message"),
    [("[pipeline\n", "stagewire.toml"), ("[pipeline]\nname = 'x'\n", "names no Python module")],
)
def test_tomls_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "stagewire.toml").write_text(text)
    with pytest.raises(errors.Invalid, match=message):
        options.parse(["--pipeline", str(tmp_path / "stagewire.toml"), "--stage", "a"])


def raised(error: BaseException) -> failure.StageFailure:
    try:
        raise error
    except BaseException as caught:
        return failure.of("denoise", caught)


def test_exceptions_become_failures() -> None:
    told = raised(ValueError("height must be a multiple of 16"))
    assert told.error_class == "invalid"
    assert told.reason == "stage.exception"
    assert told.message == "stage 'denoise' raised ValueError: height must be a multiple of 16"
    assert told.details["exception"] == "ValueError"
    assert told.details["at"].startswith("test_worker_start.py:")
    assert raised(MemoryError()).error_class == "exhausted"
    assert raised(MemoryError()).message == "stage 'denoise' raised MemoryError"
    assert raised(NotImplementedError("x")).error_class == "unsupported"
    assert raised(ModuleNotFoundError("x")).error_class == "unsupported"
    assert raised(KeyError("x")).error_class == "internal"
    assert raised(SystemExit(3)).error_class == "internal"
    own = raised(errors.Unavailable("gone", reason="peer.lost", details={"pid": "7"}))
    assert (own.error_class, own.reason, own.message) == ("unavailable", "peer.lost", "stage 'denoise': gone")
    assert own.details["pid"] == "7"
