"""The whole story in one run: serve Wan in three processes, ask it for a video, check it against one process.

    python examples/wan/demo.py --prompt "a red cat"

1. starts `stagewire up examples/wan/stagewire.toml`: a server and a worker process for each stage;
2. submits the prompt and shows stages, steps and frames as the event stream tells of them;
3. writes the video, a sheet of its frames and the job's timeline;
4. runs the same pipeline in one process and compares the frames bit for bit;
5. stops everything and looks for what is left: processes, sockets, shared memory.

Exit status: 0 when all of that is as it should be, 1 when it is not, 130 after Ctrl-C.
"""

import argparse
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
import stagewire

from serving import DemoError, Deployment
from watch import Waiting, Watch, human

HERE = Path(__file__).resolve().parent


def main() -> int:
    options = arguments()
    say = sys.stderr if options.json else sys.stdout
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    folder = Path(tempfile.mkdtemp(prefix="stagewire-demo-"))
    report: dict = {"prompt": options.prompt, "dtype": options.dtype, "ok": False}
    status = 1
    try:
        deployment = Deployment(options, folder, say)
        try:
            for stage in filter(None, (options.kill, options.kill_during)):
                if stage not in deployment.stages:
                    raise DemoError(f"there is no stage {stage!r}; the stages: {', '.join(deployment.stages)}")
            deployment.start()
            staged(options, deployment, report, say)
            colocated(options, deployment, report, say)
            summary(options, report, say)
            status = 0 if report["identical"] else 1
        except KeyboardInterrupt:
            print("\nCtrl-C", file=say)
            status = 130
        except (DemoError, stagewire.StagewireError) as error:
            print(f"\ndemo: {error}", file=sys.stderr)
        finally:
            left = deployment.stop()
        report["left_behind"] = left
        if left:
            status = 1
        report["ok"] = status == 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        print(json.dumps(report))
    return status


def staged(options: argparse.Namespace, deployment: Deployment, report: dict, say) -> None:
    """Submits the prompt, follows the job, fetches what it made."""
    print(f'\nA video of "{options.prompt}", {options.dtype}', file=say)
    watch = Watch(deployment.stages, say)
    to_kill = options.kill
    with stagewire.Client(run_dir=deployment.run_dir) as client:
        job = client.submit(prompt=options.prompt, **asked(options))
        for event in job.events(timeout=options.timeout):
            watch.see(event)
            if to_kill and event.stage == (options.kill_during or to_kill) and at_work(event):
                report["killed"] = {"stage": to_kill, "pid": deployment.kill_worker(client, to_kill)}
                to_kill = None
        if job.refresh().state != "succeeded":
            raise DemoError(f"the job {job.state}: {watch.failure}\n{deployment.tail()}")
        if to_kill:
            raise DemoError(f"the job ended before a worker of {to_kill!r} could be killed")
        result = job.result()
        options.out.mkdir(parents=True, exist_ok=True)
        for name in result:
            result[name].save(options.out / name)
        page = options.out / "timeline.html"
        with urllib.request.urlopen(f"{deployment.url}/v1/jobs/{job.id}/timeline.html", timeout=30) as answer:
            page.write_bytes(answer.read())
    deployment.traces.look()
    report["files"] = [str(options.out / name) for name in [*result, "timeline.html"]]
    report["info"] = result.info
    report["requeued"] = watch.requeued
    total_s = round((watch.ended - watch.began) / 1e9, 3)
    report["staged"] = {
        # Without word of frames, as from `modular.py`, the first frame is there when all are.
        "first_frame_s": round((watch.first_frame - watch.began) / 1e9, 3) if watch.first_frame else total_s,
        "total_s": total_s,
        "handovers": [chunk for view in watch.stages.values() for chunk in view.chunks],
    }
    if say.isatty():  # elsewhere the lines have said it
        for line in watch.requeued:
            print(f"  started again: {line}", file=say)


def colocated(options: argparse.Namespace, deployment: Deployment, report: dict, say) -> None:
    """The same in one process, and the comparison."""
    folder = options.out / "colocated"
    command = [sys.executable, str(HERE / "colocated.py"), "--prompt", options.prompt, "--dtype", options.dtype]
    command += ["--threads", str(deployment.threads), "--out", str(folder), "--json"]
    command += [word for name, value in asked(options).items() for word in (f"--{name}", str(value))]
    print(f"\nThe same in one process, {deployment.threads} thread(s) as each worker has", file=say)
    waiting = Waiting(say)
    waiting.say("loads and runs")
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoError(f"colocated.py ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    report["colocated"] = json.loads(done.stdout)
    waiting.done("done")
    ours, theirs = (np.load(path / "frames.npy", allow_pickle=False) for path in (options.out, folder))
    same = ours.shape == theirs.shape and ours.dtype == theirs.dtype
    report["identical"] = bool(same and np.array_equal(ours.view(np.uint32), theirs.view(np.uint32)))
    report["frames"] = {"shape": list(ours.shape), "dtype": str(ours.dtype)}
    if not report["identical"]:
        worst = f", largest difference {np.abs(ours - theirs).max():.3g}" if same else f" {ours.shape} {theirs.shape}"
        print(f"  the frames DIFFER{worst}", file=say)


def summary(options: argparse.Namespace, report: dict, say) -> None:
    ours, theirs = report["staged"], report["colocated"]
    chunks = [chunk for chunk in ours["handovers"] if chunk["chunks"] > 1]
    took = [(chunk["end_ns"] - chunk["begin_ns"]) / 1e3 for chunk in chunks]
    lines = ["", f"{'':24}{'first frame':>12}{'total':>12}"]
    for name, times in (("three processes", ours), ("one process", theirs)):
        lines.append(f"  {name:22}" + "".join(f"{times[key]:>10.2f} s" for key in ("first_frame_s", "total_s")))
    if chunks:
        lines.append(
            "  One call returns with its last frame; the decode stage has its first one after its first chunk."
        )
    same = "bit-identical" if report["identical"] else "DIFFERENT"
    lines += ["", f"  {report['frames']['shape']} {report['frames']['dtype']} frames: {same}"]
    if chunks:
        nbytes = sum(chunk["nbytes"] for chunk in chunks)
        paths = ", ".join(sorted({f"{chunk['mode']} over {chunk['path']}" for chunk in chunks}))
        slowest = f"{max(took):.0f} µs" if max(took) < 1e4 else f"{max(took) / 1e3:.0f} ms"
        lines.append(f"  {len(chunks)} chunks of latents, {human(nbytes)}, {paths}, the slowest in {slowest}")
    if options.kill:
        lines.append(f"  a worker of {report['killed']['stage']} (pid {report['killed']['pid']}) was killed on the way")
    lines += [
        "",
        f"  written: {'  '.join(report['files'])}",
        "  The weights are random: the picture is what an untrained network makes of the prompt, not what it says.",
    ]
    print("\n".join(lines), file=say)


def asked(options: argparse.Namespace) -> dict:
    """Parameters of the job that were given; the TOML and colocated.py have the same defaults for the others."""
    names = ("seed", "steps", "width", "height", "frames")
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}


def at_work(event) -> bool:
    """Whether the event shows that its stage is at work."""
    return event.type in ("progress", "stage_done") or (event.type == "running" and event.stage == "encode")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="a red cat")
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where the files go [out]")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights [fp32]")
    parser.add_argument("--mode", choices=["p2p", "store"], help="how payloads go [as in the TOML: p2p]")
    parser.add_argument("--handover", choices=["stream", "whole"], help="of the latents [as in the TOML: stream]")
    for name in ("seed", "steps", "width", "height", "frames"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="[as in the TOML]")
    parser.add_argument("--kill", metavar="STAGE", help="kill -9 a worker of this stage while the job runs")
    parser.add_argument("--kill-during", metavar="STAGE", help="kill it while this stage is at work [its own]")
    parser.add_argument("--config", type=Path, default=HERE / "stagewire.toml", metavar="TOML", help="what to serve")
    parser.add_argument("--stagewire", type=Path, metavar="FILE", help="the binary [beside this Python, or built here]")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="for start and job, each [300]")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, talk on stderr")
    options = parser.parse_args(argv)
    options.config = options.config.resolve()
    if not options.config.is_file():
        parser.error(f"there is no file {options.config}")
    return options


if __name__ == "__main__":
    sys.exit(main())
