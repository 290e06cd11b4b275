"""The command line against a server that works: what it prints, what it saves, how it exits."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from deployment import DEADLINE, STAGEWIRE, Deployment, Gate, eventually, toy
from pipelines.toy import expected


@pytest.fixture
def deployment(deploy) -> Deployment:
    return deploy(toy()).start()


@pytest.fixture
def gate(folder) -> Gate:
    return Gate(folder / "gate")


def begin(deployment: Deployment, *args: str) -> subprocess.Popen:
    """A command that goes on while the test does."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([STAGEWIRE, *args], env=deployment.env, process_group=0, **pipes)


def test_submit_saves_what_the_job_made(deployment, folder):
    made = folder / "made"
    made.mkdir()
    files = ["--out", str(made / "cat.bin"), "--out", f"{made}/all/", "--timeline", str(made / "cat.html")]
    done = deployment.command("submit", "--param", "seed=4", *files)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(made / "cat.bin"), f"{made}/all/video.bin"]
    for path in done.stdout.splitlines():
        assert Path(path).read_bytes() == expected(4, frames=9, steps=3)
    assert (made / "cat.html").read_text().lower().startswith("<!doctype html>")
    for words in ("encode: runs on encode-0", "denoise: done", "decode: has chunk 1/", "job: succeeded"):
        assert words in done.stderr
    assert sorted(path.name for path in made.iterdir()) == ["all", "cat.bin", "cat.html"], "no partial files"


def test_submit_shows_progress_as_it_is_made(deployment, gate):
    gate.hold("denoise-2")
    gate.hold("decode-1")
    command = begin(deployment, "submit", "--param", f"gate={gate.folder}")
    for point, progress in [("denoise-2", "denoise: step 2/3"), ("decode-1", "decode: frame 3/9")]:
        seen = []
        for line in command.stderr:
            seen.append(line)
            if progress in line:
                break
        else:
            pytest.fail(f"{progress} was not shown: {seen}")
        gate.open(point)
    command.communicate(timeout=DEADLINE)
    assert command.returncode == 0


def test_quiet_says_nothing_and_json_is_one_document(deployment, folder):
    done = deployment.command("submit", "-q", "--json", "--timeline", str(folder / "t.json"))
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["job"]["state"] == "succeeded"
    assert [artefact["name"] for artefact in document["result"]["artefacts"]] == ["video.bin"]
    assert json.loads((folder / "t.json").read_text())
    for command in ("jobs", "status", "stages"):
        assert json.loads(deployment.command(command, "--json").stdout)


def test_an_output_that_fits_no_artefact_is_named(deployment, folder):
    done = deployment.command("submit", "--out", str(folder / "cat.mp4"))
    assert done.returncode == 1
    assert "no artefact fits" in done.stderr
    assert "video.bin" in done.stderr
    assert not (folder / "cat.mp4").exists()


def test_a_job_can_be_left_looked_at_and_cancelled(deployment, gate):
    gate.hold("denoise-1")
    submitted = deployment.command("submit", "--no-wait", "--param", f"gate={gate.folder}")
    job = submitted.stdout.strip()
    gate.reached("denoise-1")
    progress = "on denoise-0, step 1/3"
    shown = eventually(
        "the step is shown", lambda: progress in (text := deployment.command("job", job).stdout) and text
    )
    assert shown.splitlines()[0] == f"{job}  active"
    assert "waits for the output of denoise" in shown
    assert job in deployment.command("jobs", "--state", "active").stdout
    cancelled = deployment.command("cancel", job)
    assert cancelled.returncode == 0, cancelled.stderr
    eventually("it is cancelled", lambda: state(deployment, job) == "cancelled")
    assert job not in deployment.command("jobs", "--state", "active").stdout


def state(deployment: Deployment, job: str) -> str:
    return json.loads(deployment.command("job", job, "--json").stdout)["state"]


def test_explain_says_what_a_job_waits_for_with_its_numbers(deployment, gate):
    gate.hold("denoise-1")
    first = deployment.client.submit(gate=str(gate.folder))
    gate.reached("denoise-1")
    waits = [deployment.client.submit(), deployment.client.submit()][-1]
    eventually("it waits for denoise", lambda: "slot" in deployment.command("explain", waits.id).stdout)
    said = deployment.command("explain", waits.id)
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0] == f"{waits.id}  active"
    assert lines[1].split() == ["STAGE", "CAUSE", "FOR"]
    at = next(index for index, line in enumerate(lines) if line.startswith("denoise"))
    assert lines[at].split()[1] == "slot", said.stdout
    for number in ("class standard", "ahead 1", "rank 2", "others 0", "advertised 1", "running 1"):
        assert number in lines[at + 1], said.stdout
    whole = json.loads(deployment.command("explain", waits.id, "--json").stdout)
    assert {"id", "state", "waiting", "choices"} == set(whole)
    assert [entry["stage"] for entry in whole["waiting"]] == ["denoise", "decode"]
    # And who got what has begun, from among whom.
    [encoded] = whole["choices"]
    assert (encoded["stage"], encoded["attempt"]) == ("encode", 1)
    assert [(one["worker"], one["chosen"]) for one in encoded["workers"]] == [("encode-0", True)]
    [why] = [line for line in lines if line.startswith("encode")]
    assert "encode-0" in why, said.stdout
    gate.open("denoise-1")
    for job in (first, waits):
        assert job.wait(timeout=DEADLINE) == "succeeded"
    ended = deployment.command("explain", waits.id).stdout.splitlines()
    assert ended[0] == f"{waits.id}  succeeded"
    # It waits for nothing.
    assert ended[1].split() == ["STAGE", "OFFERED", "TO", "WHY"]
    offered = [line.split()[:2] for line in ended[2:] if not line.startswith(" ")]
    assert offered == [["decode", "decode-0"], ["denoise", "denoise-0"], ["encode", "encode-0"]]


def test_the_deadline_has_a_status_of_its_own_and_the_job_goes_on(deployment, gate):
    gate.hold("encode")
    done = deployment.command("submit", "--timeout", "0.2", "--param", f"gate={gate.folder}")
    assert done.returncode == 4
    job = done.stderr.rsplit("stagewire job ", 1)[1].strip()
    assert state(deployment, job) == "active"
    gate.open("encode")
    eventually("it succeeds", lambda: state(deployment, job) == "succeeded")


def test_ctrl_c_cancels_the_job(deployment, gate):
    gate.hold("decode-1")
    command = begin(deployment, "submit", "--param", f"gate={gate.folder}")
    gate.reached("decode-1")
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=DEADLINE)
    assert command.returncode == 130
    assert "is being cancelled" in said
    (job,) = deployment.client.jobs()
    assert job.wait(timeout=DEADLINE) == "cancelled"


def test_submit_goes_on_when_the_server_restarts(deployment, gate, folder):
    gate.hold("denoise-2")
    out = folder / "video.bin"
    command = begin(deployment, "submit", "--param", "seed=6", "--param", f"gate={gate.folder}", "--out", str(out))
    gate.reached("denoise-2")
    deployment.kill_server()
    deployment.start()
    gate.open("denoise-2")
    _, said = command.communicate(timeout=DEADLINE)
    assert command.returncode == 0, said
    assert out.read_bytes() == expected(6, frames=9, steps=3)
