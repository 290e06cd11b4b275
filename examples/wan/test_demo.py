"""What the demo shows, and that it finds what a deployment leaves behind."""

import io
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from leftovers import Traces
from watch import Watch, human

# A process as a worker would be if it did not stop: it names the run directory and holds shared memory.
HOLDER = """
import os, sys
memory = os.memfd_create("stagewire-test")
os.ftruncate(memory, 4096)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_a_process_and_its_shared_memory_are_found_and_then_gone(tmp_path, holder):
    traces = Traces(tmp_path)
    assert not traces.memory
    traces.look()
    assert list(traces.processes) == [holder.pid]
    assert len(traces.memory) == 1
    left = traces.left()
    assert [line.split()[0] for line in left] == ["process", "shared"], left
    traces.kill()
    holder.wait()
    assert traces.left() == []


def test_shared_memory_that_another_process_keeps_is_found(tmp_path, holder):
    traces = Traces(tmp_path)
    traces.look()
    descriptors = Path(f"/proc/{holder.pid}/fd").iterdir()
    memory = next(path for path in descriptors if "memfd" in str(path.readlink()))
    with memory.open() as kept:
        other = subprocess.Popen(["sleep", "60"], pass_fds=[kept.fileno()])
    try:
        holder.kill()
        holder.wait()
        assert [f"in process {other.pid}" in line for line in traces.left()] == [True]
    finally:
        other.kill()
        other.wait()


def test_sockets_and_files_are_found(tmp_path):
    traces = Traces(tmp_path)
    (tmp_path / "peers").mkdir()
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "decode-0.log").touch()
    (tmp_path / "worker.token").touch()
    assert traces.left() == []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "peers" / "a.data"))
        assert traces.left() == [f"socket {tmp_path}/peers/a.data"]
    (tmp_path / "peers" / "a.data").unlink()
    (tmp_path / "server.json").touch()
    assert traces.left() == [f"file {tmp_path}/server.json"]


def event(seconds, kind, stage="", progress=None, **data):
    progress = SimpleNamespace(done=progress[0], total=progress[1], unit=progress[2]) if progress else None
    ends = kind in ("succeeded", "failed", "cancelled")
    return SimpleNamespace(
        at_ns=int(seconds * 1e9) + 1, type=kind, stage=stage, progress=progress, data=data, ends=ends
    )


EVENTS = [
    event(0.0, "submitted"),
    event(0.1, "running", "encode", worker="encode-0"),
    event(0.2, "published", "encode", payload={"nbytes": 32768, "chunks": 1, "mode": "p2p"}),
    event(0.3, "stage_done", "encode"),
    event(0.4, "running", "decode", worker="decode-0"),
    event(0.5, "progress", "decode", (1, 9, "frame")),
    event(0.6, "requeued", "decode", failure={"message": "worker decode-0 died"}),
    event(0.7, "running", "decode", worker="decode-0"),
    event(0.8, "progress", "decode", (9, 9, "frame")),
    event(1.0, "stage_done", "decode"),
    event(1.1, "succeeded"),
]


def test_plain_lines_where_there_is_no_terminal():
    out = io.StringIO()
    watch = Watch(["encode", "decode"], out)
    for each in EVENTS:
        watch.see(each)
    text = out.getvalue()
    assert "\x1b" not in text
    assert "0.20 s  encode  hands over 32.0 KiB, whole, p2p" in text
    assert "0.80 s  decode  frame 9/9" in text
    assert text.splitlines()[-1].endswith("succeeded")
    assert watch.requeued == ["decode: worker decode-0 died"]
    assert (watch.first_frame - watch.began, watch.ended - watch.began) == (800_000_000, 1_100_000_000)


def test_bars_on_a_terminal_are_drawn_over():
    out = io.StringIO()
    out.isatty = lambda: True
    watch = Watch(["encode", "decode"], out)
    for each in EVENTS:
        watch.see(each)
    frames = out.getvalue().split("\x1b[2F")
    assert len(frames) == len(EVENTS)
    assert "░" in frames[5]
    assert "░" not in frames[-1]


@pytest.mark.parametrize(("nbytes", "text"), [(1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB")])
def test_human(nbytes, text):
    assert human(nbytes) == text
