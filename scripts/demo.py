"""The demo: serves the Wan example in three processes, submits a prompt, compares with one process, stops everything.

Everything that a user would type is printed as it is run.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import stagewire

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = "examples/wan/stagewire.toml"


def main() -> int:
    options = arguments()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    # A folder of its own: a server that already runs on this machine is left alone.
    with tempfile.TemporaryDirectory(prefix="stagewire-demo-") as folder:
        os.environ["STAGEWIRE_RUN_DIR"] = f"{folder}/run"
        os.environ["STAGEWIRE_DATA_DIR"] = f"{folder}/data"
        with up() as server:
            staged = submit(options.prompt, out)
            left = processes_of(server)
        left = [pid for pid in left if Path(f"/proc/{pid}").exists()]
        sockets = [str(path) for path in Path(folder).rglob("*") if path.is_socket()]
    colocated = in_one_process(options.prompt, out)

    frames = [np.load(path, allow_pickle=False) for path in (out / "frames.npy", out / "colocated" / "frames.npy")]
    identical = frames[0].dtype == frames[1].dtype and np.array_equal(*frames)
    report(out, staged, colocated, identical)
    if left or sockets:
        print(f"left behind: processes {left}, sockets {sockets}")
    return 0 if identical and not left and not sockets else 1


class up:
    """`stagewire up`, until the block ends."""

    def __enter__(self) -> subprocess.Popen:
        command = ["stagewire", "up", PIPELINE, "--json"]
        show(command)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        # One line when every worker is ready, or the end of the stream when it failed; it has said why.
        if not self.process.stdout.readline():
            sys.exit(self.process.wait())
        return self.process

    def __exit__(self, *_exception: object) -> None:
        print("\nCtrl-C")
        self.process.send_signal(signal.SIGINT)
        self.process.wait()


def submit(prompt: str, out: Path) -> dict:
    """Seconds to the first frame and to the end, from what the server saw."""
    command = ["stagewire", "submit", prompt, "--out", f"{out}/", "--timeline", str(out / "timeline.html")]
    show(command)
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    with stagewire.Client() as client:
        events = list(client.job(json.loads(done.stdout)["job"]["id"]).events())
    begin = events[0].at_ns
    first = next(event for event in events if event.stage == "decode" and event.progress)
    return {"first_frame_s": (first.at_ns - begin) / 1e9, "total_s": (events[-1].at_ns - begin) / 1e9}


def processes_of(server: subprocess.Popen) -> list[int]:
    """The server and its workers."""
    with stagewire.Client() as client:
        return [server.pid, *(worker["pid"] for worker in client.pipeline()["workers"])]


def in_one_process(prompt: str, out: Path) -> dict:
    command = ["python", "examples/wan/colocated.py", "--prompt", prompt, "--out", str(out / "colocated")]
    show(command)
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    return json.loads(done.stdout)


def report(out: Path, staged: dict, colocated: dict, identical: bool) -> None:
    print(f"\n{'':<24}{'first frame':>12}{'total':>12}")
    for name, times in (("in three processes", staged), ("in one process", colocated)):
        print(f"{name:<24}{times['first_frame_s']:>10.2f} s{times['total_s']:>10.2f} s")
    print(f"\nThe frames are {'bit-identical' if identical else 'DIFFERENT'}.")
    files = [path for path in ("video.mp4", "video.gif", "frames.png", "timeline.html") if (out / path).exists()]
    print(f"See {', '.join(str(relative(out / path)) for path in files)}")


def relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def show(command: list[str]) -> None:
    print(f"\n$ {shlex.join(command)}", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="a red cat")
    parser.add_argument("--out", type=Path, default=ROOT / "out", metavar="DIR")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
