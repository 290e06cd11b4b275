"""What a deployment has and what is left of it: processes, sockets, shared memory. All of it is read in /proc."""

import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Traces:
    """What one deployment uses while it runs.

    Attributes:
        run_dir: Its run directory: its processes name it on their command line.
        processes: Command lines by pid.
        memory: Inodes of its shared-memory segments. They have no name in any folder, so this is how they are known.
    """

    run_dir: Path
    processes: dict[int, str] = field(default_factory=dict)
    memory: set[int] = field(default_factory=set)

    def look(self) -> None:
        """Adds what there is now."""
        found = _processes(self.run_dir)
        self.processes.update(found)
        for pid in found:
            self.memory.update(_segments(pid))

    def left(self) -> list[str]:
        """What is still there, a line for each. Empty is how it should be."""
        lines = [f"process {pid}: {command}" for pid, command in _processes(self.run_dir).items()]
        lines += [f"socket {path}" for path in _sockets(self.run_dir)]
        for pid in _pids():
            lines += [f"shared memory {inode} in process {pid}" for inode in _segments(pid) & self.memory]
        # Logs and the workers' token may stay: the next `up` uses them again.
        lines += [f"file {path}" for path in _files(self.run_dir) if path.name != "worker.token"]
        return lines

    def kill(self) -> None:
        """Ends the processes that are still there, by force."""
        for pid in _processes(self.run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _pids() -> list[int]:
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if pid != os.getpid()]


def _processes(run_dir: Path) -> dict[int, str]:
    """Living processes with the run directory on their command line."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            # A zombie's command line is empty.
            if str(run_dir) in command:
                found[pid] = command
    return found


def _segments(pid: int) -> set[int]:
    """Inodes of the shared-memory segments named stagewire that a process has open or mapped."""
    inodes = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if str(descriptor.readlink()).startswith("/memfd:stagewire"):
                    inodes.add(descriptor.stat().st_ino)
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:stagewire" in line:
                inodes.add(int(line.split()[4]))
    return inodes


def _sockets(run_dir: Path) -> list[Path]:
    """Sockets in the run directory, and listeners bound to a path in it."""
    found = {path for path in run_dir.rglob("*") if path.is_socket()} if run_dir.exists() else set()
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        path = line.split(maxsplit=7)[7] if len(line.split(maxsplit=7)) > 7 else ""
        if path.startswith(f"{run_dir}/"):
            found.add(Path(path))
    return sorted(found)


def _files(run_dir: Path) -> list[Path]:
    """Regular files outside `logs/`."""
    found = run_dir.rglob("*") if run_dir.exists() else ()
    return sorted(path for path in found if path.is_file() and run_dir / "logs" not in path.parents)
