"""A pipeline that a program serves for itself: it leaves nothing, however the program ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import stagewire
from stagewire import errors

from deployment import DEADLINE, ROOT, STAGEWIRE, Gate, Traces, eventually, toml, toy
from pipelines.toy import expected


@pytest.fixture(autouse=True)
def own_temporary_folder(folder, monkeypatch):
    """So that what is left there is of this test."""
    (folder / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.fixture
def config(folder) -> Path:
    path = folder / "stagewire.toml"
    path.write_text(toy())
    return path


def serve(config: Path, **options) -> stagewire.Orchestrator:
    return stagewire.Orchestrator(config, binary=STAGEWIRE, stop_timeout=2, **options)


def left(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").iterdir()]


def test_it_serves_and_leaves_nothing(config, folder):
    with serve(config) as pipeline:
        traces = Traces(pipeline.run_dir)
        jobs = [pipeline.submit(seed=seed, frames=3, steps=2) for seed in range(3)]
        for seed, job in enumerate(jobs):
            assert job.result(DEADLINE)["video.bin"].read() == expected(seed, 3, 2)
        traces.look()
    assert eventually("all is gone", lambda: traces.left() == [])
    assert left(folder) == []
    with pytest.raises(errors.Unavailable) as closed:
        pipeline.pipeline()
    assert closed.value.reason == "orchestrator.closed"


def test_what_a_data_directory_keeps_the_next_one_goes_on_with(config, folder):
    gate = Gate(folder / "gate")
    gate.hold("denoise-0")
    with serve(config, data_dir=folder / "data") as pipeline:
        job = pipeline.submit(seed=1, frames=3, steps=2, gate=str(gate.folder))
        gate.reached("denoise-0")
    gate.open("denoise-0")
    with serve(config, data_dir=folder / "data") as pipeline:
        assert pipeline.job(job.id).result(DEADLINE)["video.bin"].read() == expected(1, 3, 2)


DIES = """
import os, signal, sys
import stagewire
pipeline = stagewire.Orchestrator(sys.argv[1], binary=sys.argv[2], stop_timeout=2)
print(pipeline.run_dir, flush=True)
sys.stdin.readline()
{end}
"""


@pytest.mark.parametrize(
    "end", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit(0)", "raise SystemExit"]
)
def test_it_ends_with_the_program_however_that_ends(config, folder, end):
    command = [sys.executable, "-c", DIES.format(end=end), str(config), STAGEWIRE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        traces = Traces(Path(program.stdout.readline().strip()))
        traces.look()
        assert len(traces.processes) >= 4, "server and three workers"
        program.stdin.write("\n")
        program.stdin.flush()
        program.wait(DEADLINE)
    assert eventually("all is gone", lambda: traces.left() == [])
    # What a program that was killed could not remove, the next one does.
    with serve(config) as pipeline:
        assert left(folder) == [pipeline.run_dir.parent.name]
    assert left(folder) == []


def test_what_lives_is_not_swept(config):
    with serve(config) as first, serve(config) as second:
        assert first.run_dir != second.run_dir
        for pipeline in (first, second):
            assert pipeline.submit(seed=1, frames=3, steps=1).wait(DEADLINE) == "succeeded"


def test_a_file_that_is_wrong_is_named_with_its_line(config, folder):
    config.write_text(config.read_text().replace("mode = ", "moda = ", 1))
    with pytest.raises(errors.Invalid, match=r"stagewire\.toml:\d+: unknown key \"moda\""):
        serve(config)
    assert left(folder) == []


def test_a_worker_that_cannot_load_is_named_with_its_log(config, folder):
    config.write_text(toml(ROOT / "tests" / "pipelines" / "broken.py", [{"name": "paint"}], [], {}))
    with pytest.raises(errors.Unavailable, match="paint-0"):
        serve(config)
    assert left(folder) == []


def test_no_program_is_said_so(config, folder):
    with pytest.raises(errors.NotFound, match="nowhere"):
        stagewire.Orchestrator(config, binary=folder / "nowhere")
    assert left(folder) == []


def test_who_asks_a_server_that_was_killed_hears_of_it(config):
    with serve(config) as pipeline:
        traces = Traces(pipeline.run_dir)
        traces.look()
        up = next(pid for pid in traces.processes if b"until-input-ends" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(up, signal.SIGKILL)

        def ended() -> bool:
            try:
                pipeline.pipeline()
            except errors.Unavailable as error:
                return error.reason == "orchestrator.ended"
            return False

        eventually("it says so", ended)
    for pid in traces.processes:
        if pid != up and Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)


def test_one_encoding_serves_all_jobs_with_its_seed(config):
    config.write_text(toy(mode="store").replace('name = "encode"', 'name = "encode"\ncache = ["seed"]'))
    with serve(config) as pipeline:
        for frames, state in [(3, "done"), (6, "cached")]:
            job = pipeline.submit(seed=7, frames=frames, steps=2)
            assert job.result(DEADLINE)["video.bin"].read() == expected(7, frames, 2)
            assert job.info["stages"][0]["state"] == state
        assert "cached" in [event.type for event in job.events()]
