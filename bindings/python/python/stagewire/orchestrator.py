"""A pipeline that is served from within a Python program, for as long as the program wants it.

```python
import stagewire

with stagewire.Orchestrator("examples/wan/stagewire.toml") as wan:   # returns once every worker has its model
    job = wan.submit(prompt="a red cat", steps=4)
    job.result()["video.mp4"].save("cat.mp4")
```

Server and workers are processes of their own: a crash in a model's native code, or this interpreter's lock, is nothing
to them. They end with the `with` block, and when this process dies, however that happens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import weakref
from pathlib import Path
from typing import IO

from . import _arguments
from ._http import Place
from .client import Client
from .errors import Invalid, NotFound, StagewireError, Unavailable, from_failure

__all__ = ["Orchestrator"]

_PREFIX = "stagewire-own-"
_END = 20.0
"""Seconds that the processes have to end beyond what the workers were given."""


class Orchestrator(Client):
    """Serves a pipeline from start to `close`, and is a client of it. Threads may share it.

    By default nothing of it stays: jobs, results and whatever lies in the run directory go with it. `data_dir` keeps
    jobs and results; another orchestrator with the same one goes on with jobs that have not ended.

    Args:
        config: The pipeline's TOML file.
        data_dir: Where jobs and results are kept; default: nowhere.
        run_dir: Where other processes find the server, such as workers of your own; default: a private one.
        python: The Python that runs the workers; default: this one.
        binary: The program `stagewire`; default: beside this Python, else on ``PATH``.
        start_timeout: Seconds until every worker must have loaded its model.
        stop_timeout: Seconds that a worker has to leave before it is ended by force.

    Raises:
        Invalid: The file, or what it names, is wrong; the message is that of `stagewire up`.
        NotFound: There is no program `stagewire`.
        StagewireError: It could not start. Nothing is left running then.
    """

    def __init__(
        self,
        config: str | os.PathLike[str],
        *,
        data_dir: str | os.PathLike[str] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        python: str | os.PathLike[str] | None = None,
        binary: str | os.PathLike[str] | None = None,
        start_timeout: float = 600.0,
        stop_timeout: float = 10.0,
    ) -> None:
        program = _program(binary)
        _sweep()
        folder = _Folder()
        own = folder.path
        self.run_dir = own / "run" if run_dir is None else _arguments.path("run_dir", run_dir)
        data = own / "data" if data_dir is None else _arguments.path("data_dir", data_dir)
        command = [program, "up", os.fspath(config), "--json", "--until-input-ends"]
        command += ["--run-dir", str(self.run_dir), "--data-dir", str(data)]
        command += ["--python", os.fspath(python or sys.executable)]
        command += ["--start-timeout", str(start_timeout), "--stop-timeout", str(stop_timeout)]
        try:
            self._processes = _Processes(command, folder, stop_timeout + _END)
        except BaseException:
            folder.remove()
            raise
        # Also where nobody calls `close`: when this object is not used any more, or the interpreter ends.
        self._end = weakref.finalize(self, self._processes.end)
        try:
            self._processes.ready()
            super().__init__(run_dir=self.run_dir)
            self._place = _OwnPlace(self.run_dir, self._processes)
        except BaseException:
            self._end()
            raise

    def close(self) -> None:
        """Ends workers and server, and waits until they have ended. Jobs that run are stopped."""
        super().close()
        self._end()


class _OwnPlace(Place):
    """Where the server is, as long as it lives."""

    def __init__(self, run_dir: Path, processes: _Processes) -> None:
        super().__init__(None, run_dir, None)
        self._processes = processes

    def url(self, path: str) -> str:
        if (ended := self._processes.ended()) is not None:
            raise ended
        return super().url(path)


class _Processes:
    """`stagewire up` and the workers that it has started."""

    def __init__(self, command: list[str], folder: _Folder, patience: float) -> None:
        self._folder = folder
        self._patience = patience
        self._log = folder.path / "up.log"
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        with self._log.open("wb") as log:
            # A process group of its own: Ctrl-C is for this process, which ends the others in its own time. The folder
            # is theirs, too, so that nobody takes it for left over while they live.
            self._up = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
                pass_fds=[folder.lock.fileno()],
            )

    def ready(self) -> None:
        """Waits until every worker is, or it could not start."""
        if self._up.stdout is None or not self._up.stdout.readline():
            self._up.wait()
            raise self._failure("could not start")

    def ended(self) -> StagewireError | None:
        """Why nobody answers any more."""
        return None if self._up.poll() is None else self._failure("has ended")

    def _failure(self, what: str) -> StagewireError:
        status = self._up.returncode
        try:
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return Unavailable("the orchestrator was closed", reason="orchestrator.closed")
        errors = [line.removeprefix("error: ") for line in said if line.startswith("error: ")]
        message = errors[-1] if errors else "\n".join(said[-5:]) or "it said nothing"
        details = {"status": str(status)}
        if named := re.search(r" \[(\w+): ([\w.]+)\]$", message):
            return from_failure(named[1], named[2], message, details)
        kind = Invalid if status == _USAGE else Unavailable
        text = f"the orchestrator {what} (exit status {status}): {message}"
        return kind(text, reason="orchestrator.ended", details=details)

    def end(self) -> None:
        """Ends everything. Returns when nothing is left."""
        # Its standard input ends with that, which asks it to stop.
        try:
            self._up.communicate(timeout=self._patience)
        except subprocess.TimeoutExpired:
            self._up.kill()
            self._up.communicate()
        self._folder.remove()


_USAGE = 2
# What the arguments say is not for the environment to say otherwise.
_NOT_INHERITED = {"STAGEWIRE_RUN_DIR", "STAGEWIRE_DATA_DIR", "STAGEWIRE_PYTHON"}


class _Folder:
    """A private folder, which is locked while anybody lives who uses it."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.lock: IO[bytes] = (self.path / "lock").open("wb")
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.lock.close()


def _sweep() -> None:
    """Removes what orchestrators left whose process was killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # Another user's, or it went away just now.
        with contextlib.suppress(OSError), (left / "lock").open("rb") as lock:
            if left.stat().st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)


def _program(binary: str | os.PathLike[str] | None) -> str:
    if binary is not None:
        path = _arguments.path("binary", binary)
        if not os.access(path, os.X_OK):
            raise NotFound(
                f"binary {path} is no program that can be run",
                reason="orchestrator.binary",
                details={"binary": str(path)},
            )
        return str(path)
    beside = Path(sys.executable).parent
    found = shutil.which("stagewire", path=str(beside)) or shutil.which("stagewire")
    if found is None:
        raise NotFound(
            f"there is no program stagewire in {beside} or on PATH: build it, or say where it is with binary=",
            reason="orchestrator.binary",
        )
    return found
