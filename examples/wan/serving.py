"""`stagewire up` for as long as a demo takes: start, wait until it is ready, stop, see that nothing is left."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import stagewire

from leftovers import Traces
from watch import Waiting

ROOT = Path(__file__).resolve().parent.parent.parent


class DemoError(Exception):
    """Ends the demo with a message."""


class Deployment:
    """`stagewire up` with a run directory and a data directory of its own: a server that already runs is left alone."""

    def __init__(self, options: argparse.Namespace, folder: Path, say) -> None:
        self.options = options
        self.say = say
        self.folder = folder
        self.run_dir = folder / "run"
        self.log = folder / "up.log"
        self.config = variant(options, folder)
        self.toml = tomllib.loads(self.config.read_text())
        self.stages = [stage["name"] for stage in self.toml["stage"]]
        self.traces = Traces(self.run_dir)
        self.process: subprocess.Popen | None = None
        self.url = ""

    @property
    def threads(self) -> int:
        """Compute threads of every stage: what the one process gets too."""
        counts = {stage.get("threads", 1) for stage in self.toml["stage"]}
        if len(counts) > 1:
            raise DemoError(f"{self.config} gives its stages different threads {sorted(counts)}: bits depend on them")
        return counts.pop()

    def start(self) -> None:
        """Starts the server and the workers, and waits until every stage has a worker with its model loaded."""
        command = [binary(self.options), "up", str(self.config), "--run-dir", str(self.run_dir)]
        command += ["--data-dir", str(self.folder / "data"), "--python", sys.executable]
        print(f"\nServing {self.options.config.name}: one server, {len(self.stages)} workers", file=self.say)
        with self.log.open("wb") as log:
            # A process group of its own: Ctrl-C comes here first, and `stop` passes it on.
            self.process = subprocess.Popen(
                command,
                env={**os.environ, "WAN_DTYPE": self.options.dtype},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        waiting = Waiting(self.say)
        deadline = time.monotonic() + self.options.timeout
        while missing := self.not_ready():
            if self.process.poll() is not None:
                raise DemoError(f"stagewire up ended with status {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise DemoError(f"not ready within {self.options.timeout:.0f} s: {missing}\n{self.tail()}")
            waiting.say(missing)
            self.traces.look()
            time.sleep(0.2)
        self.traces.look()
        waiting.done("ready")

    def not_ready(self) -> str:
        """What is waited for; empty when every stage has a ready worker."""
        try:
            self.url = f"http://{json.loads((self.run_dir / 'server.json').read_text())['http']}"
            with urllib.request.urlopen(f"{self.url}/readyz", timeout=5):
                return ""
        except urllib.error.HTTPError as answer:
            missing = json.loads(answer.read()).get("stages_without_worker", [])
            return f"workers load their models: {', '.join(missing)}"
        except (OSError, ValueError, KeyError):
            return "the server starts"

    def stop(self) -> list[str]:
        """Ends it as Ctrl-C would, and says what is left behind."""
        if self.process is None:
            return []
        print("\nStopping", file=self.say)
        began = time.monotonic()
        if self.process.poll() is None:
            self.traces.look()
            self.end(self.process)
        left = self.traces.left()
        if left:
            print("  LEFT BEHIND:\n" + "\n".join(f"    {line}" for line in left), file=self.say)
            self.traces.kill()
        else:
            ended, seconds = len(self.traces.processes), time.monotonic() - began
            print(f"  {ended} processes ended in {seconds:.1f} s; nothing is left of them", file=self.say)
        return left

    def end(self, process: subprocess.Popen) -> None:
        """Passes Ctrl-C on, and each further one too: the second does not wait for the workers."""
        deadline = time.monotonic() + 30
        process.send_signal(signal.SIGINT)
        while process.poll() is None:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
            except subprocess.TimeoutExpired:
                print("  stagewire up did not stop within 30 s: killed", file=self.say)
                process.kill()
                process.wait()

    def kill_worker(self, client: stagewire.Client, stage: str) -> int:
        """`kill -9` of a worker of the stage."""
        for worker in client.pipeline()["workers"]:
            if worker["stage"] == stage:
                os.kill(worker["pid"], signal.SIGKILL)
                return worker["pid"]
        raise DemoError(f"no worker of stage {stage!r} to kill; stages: {', '.join(self.stages)}")

    def tail(self) -> str:
        """The end of what `up` and its workers said."""
        texts = [self.log, *sorted((self.run_dir / "logs").glob("*.log"))]
        found = [(path.name, path.read_text(errors="replace").splitlines()[-12:]) for path in texts if path.exists()]
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in found if lines)


def variant(options: argparse.Namespace, folder: Path) -> Path:
    """The TOML file to serve: the example's own, or a copy with another mode or handover of the latents."""
    text = options.config.read_text()
    changed = text
    if options.mode:
        changed = changed.replace('mode = "p2p"', f'mode = "{options.mode}"')
    if options.handover == "whole":
        lines = [line for line in changed.splitlines() if not line.startswith(("chunks =", "chunk-dim ="))]
        changed = "\n".join(lines).replace('handover = "stream"', 'handover = "whole"') + "\n"
    if changed == text:
        return options.config
    module = tomllib.loads(text)["pipeline"]["module"]
    changed = changed.replace(f'module = "{module}"', f"module = {json.dumps(str(options.config.parent / module))}")
    copy = folder / options.config.name
    copy.write_text(changed)
    return copy


def binary(options: argparse.Namespace) -> str:
    """The `stagewire` binary: as given, else beside this Python, else on PATH, else the newest build."""
    if options.stagewire:
        return str(options.stagewire)
    beside = Path(sys.executable).parent / "stagewire"
    built = [ROOT / "target" / kind / "stagewire" for kind in ("release", "debug")]
    found = [str(path) for path in (beside, Path(shutil.which("stagewire") or ""), *built) if path.is_file()]
    if not found:
        raise DemoError("there is no stagewire binary: run `make setup`, or name one with --stagewire")
    return found[0]
