"""`stagewire up` as the tests drive it: start, kill, look at what it holds, stop, see that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import stagewire

ROOT = Path(__file__).resolve().parent.parent
STAGEWIRE = os.environ.get("STAGEWIRE_BINARY") or str(ROOT / "target" / "release" / "stagewire")
sys.path.insert(0, str(ROOT / "examples" / "wan"))

from leftovers import Traces  # noqa: E402

DEADLINE = 120.0
"""Seconds that anything may take; nothing here takes so long unless it hangs."""


def eventually(what: str, look: Callable[[], Any], seconds: float = DEADLINE) -> Any:
    """Looks until the answer is true, and returns it."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.01)
    return found


class Deployment:
    """One server and its workers in folders of their own."""

    def __init__(self, folder: Path, config: str, env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.config = folder / "stagewire.toml"
        self.config.write_text(config)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("STAGEWIRE_")}
        here = {"STAGEWIRE_RUN_DIR": str(self.run_dir), "STAGEWIRE_PYTHON": sys.executable}
        self.env = {**clean, **(env or {}), **here}
        self.traces = Traces(self.run_dir)
        self.said = folder / "up.log"
        self.up: subprocess.Popen | None = None
        self.client = stagewire.Client(run_dir=self.run_dir)

    def start(self) -> Deployment:
        """Starts `up` and waits until every worker is ready."""
        command = [STAGEWIRE, "up", str(self.config), "--data-dir", str(self.folder / "data"), "--json"]
        command += ["--run-dir", str(self.run_dir), "--stop-timeout", "2"]
        with self.said.open("ab") as said:
            # A process group of its own, as a shell would give it.
            self.up = subprocess.Popen(command, env=self.env, stdout=subprocess.PIPE, stderr=said, process_group=0)
        assert self.up.stdout is not None
        assert self.up.stdout.readline(), f"up did not become ready:\n{self.said.read_text()}"
        self.traces.look()
        return self

    def command(self, *args: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs one command of the command line."""
        options = {"timeout": DEADLINE, "capture_output": True, "text": True, **options}
        return subprocess.run([STAGEWIRE, *args], env=self.env, check=False, **options)

    def workers(self, stage: str) -> list[dict[str, Any]]:
        return [worker for worker in self.client.pipeline()["workers"] if worker["stage"] == stage]

    def stats(self) -> dict[str, Any]:
        """What the server says that jobs hold."""
        return json.loads(self.command("status", "--json").stdout)["stats"]

    def kill_worker(self, pid: int) -> None:
        self.traces.look()
        os.kill(pid, signal.SIGKILL)

    def kill_server(self) -> None:
        """`kill -9` of `up`, and with it of the server."""
        assert self.up is not None
        self.traces.look()
        self.up.kill()
        self.up.wait()

    def stop(self, how: signal.Signals = signal.SIGINT) -> int:
        """Ends `up` as Ctrl-C does. Returns its exit status."""
        assert self.up is not None
        self.traces.look()
        self.up.send_signal(how)
        return self.up.wait(timeout=DEADLINE)

    def left(self) -> list[str]:
        """What is still there after `stop`; processes that were killed need a moment to vanish."""
        deadline = time.monotonic() + 10
        while (left := self.traces.left()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return left

    def end(self) -> None:
        """Whatever state a test left it in."""
        self.client.close()
        if self.up is not None and self.up.poll() is None:
            self.stop()
        for pid in self.traces.processes:
            if _command_line(pid) == self.traces.processes[pid]:
                os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Gate:
    """Holds the stages of one toy job at chosen points."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder

    def hold(self, point: str) -> None:
        (self.folder / f"hold-{point}").touch()

    def open(self, point: str) -> None:
        (self.folder / f"hold-{point}").unlink()

    def reached(self, point: str) -> int:
        """Waits until a stage is at the point, and returns its pid."""
        path = self.folder / f"at-{point}"
        return int(eventually(f"a stage reaches {point}", lambda: path.exists() and path.read_text()))

    def asked(self, point: str) -> None:
        """Waits until the stage that waits at the point was asked to yield."""
        eventually(f"it is asked to yield at {point}", (self.folder / f"asked-at-{point}").exists)

    def log(self, stage: str) -> list[tuple[str, int]]:
        """Every point that a stage has reached, and the pid, in order."""
        lines = (line.split() for line in (self.folder / "reached").read_text().splitlines())
        return [(point, int(pid)) for point, pid in lines if point.startswith(stage)]


def toml(module: Path, stages: list[dict[str, Any]], edges: list[dict[str, Any]], params: dict[str, dict]) -> str:
    """A pipeline file."""
    lines = ["[pipeline]", 'name = "test"', f"module = {json.dumps(str(module))}"]
    for name, spec in params.items():
        lines += [f"[pipeline.params.{name}]", *_pairs(spec)]
    for kind, tables in (("stage", stages), ("edge", edges)):
        for table in tables:
            lines += [f"[[{kind}]]", *_pairs(table)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> Iterator[str]:
    return (f"{name} = {json.dumps(value)}" for name, value in table.items())


PARAMS = {
    "seed": {"type": "integer", "default": 0},
    "frames": {"type": "integer", "default": 9, "min": 3},
    "steps": {"type": "integer", "default": 3},
    "gate": {"type": "string", "default": ""},
}


def toy(
    mode: str = "p2p",
    handover: str = "stream",
    decoders: int = 1,
    slots: int = 1,
    denoisers: int = 1,
    checkpoint: bool = False,
) -> str:
    """The toy pipeline of `pipelines/toy.py`."""
    stream = {"chunks": 3, "chunk-dim": 2} if handover == "stream" else {}
    return toml(
        ROOT / "tests" / "pipelines" / "toy.py",
        stages=[
            {"name": "encode", "kind": "work-queue", "slots": slots},
            {"name": "denoise", "kind": "admission", "workers": denoisers, "slots": slots}
            | ({"checkpoint": True} if checkpoint else {}),
            {"name": "decode", "kind": "work-queue", "workers": decoders, "slots": slots},
        ],
        edges=[
            {"from": "encode", "to": "denoise", "handover": "whole", "mode": mode},
            {"from": "denoise", "to": "decode", "handover": handover, "mode": mode, **stream},
        ],
        params=PARAMS,
    )
