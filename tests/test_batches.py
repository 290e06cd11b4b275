"""Batches with real processes: what waits runs together, and each job ends on its own."""

from __future__ import annotations

from deployment import DEADLINE, ROOT, Deployment, eventually, toml

PARAMS = {
    "name": {"type": "string"},
    "gate": {"type": "string"},
    "size": {"type": "integer", "default": 1, "shape": True},
}


def test_what_waits_runs_together_and_ends_apart(deploy, folder):
    stages = [{"name": "paint", "max-batch": 4}]
    deployment: Deployment = deploy(toml(ROOT / "tests" / "pipelines" / "batch.py", stages, [], PARAMS)).start()
    gate = folder / "gate"
    gate.mkdir()

    def submit(name: str, size: int = 1):
        return deployment.client.submit(name=name, gate=str(gate), size=size)

    def at(name: str) -> None:
        eventually(f"{name} begins a batch", lambda: (gate / f"at-{name}").exists())

    for name in ("first", "a"):
        (gate / f"hold-{name}").touch()
    first = submit("first")
    at("first")
    jobs = {name: submit(name) for name in ("a", "bad", "stopped", "b", "c")}
    other = submit("other", size=2)
    (gate / "hold-first").unlink()
    at("a")
    jobs["stopped"].cancel()
    eventually("the cancelled one is known to be", lambda: jobs["stopped"].refresh().info["state"] != "active")
    (gate / "hold-a").unlink()

    together = ["a", "bad", "stopped", "b"]
    expected = {"a": together, "b": together, "c": ["c"]}
    for name, batch in expected.items():
        result = jobs[name].result(timeout=DEADLINE)
        assert (result["name.txt"].read(), result.info) == (name.encode(), {"batch": batch})
    assert jobs["bad"].wait(timeout=DEADLINE) == "failed"
    assert "this one cannot be painted" in jobs["bad"].refresh().info["failure"]["message"]
    assert jobs["stopped"].wait(timeout=DEADLINE) == "cancelled"
    assert [job.result(timeout=DEADLINE).info["batch"] for job in (first, other)] == [["first"], ["other"]]
    (worker,) = deployment.workers("paint")
    assert worker["slots"] == {"advertised": 4, "free": 4, "reserved": 0, "running": 0, "stopping": 0}
    assert deployment.stop() == 130
    assert deployment.left() == []


def test_what_raises_for_a_batch_fails_alone(deploy, folder):
    stages = [{"name": "paint", "max-batch": 4}]
    deployment: Deployment = deploy(toml(ROOT / "tests" / "pipelines" / "batch.py", stages, [], PARAMS)).start()
    gate = folder / "gate"
    gate.mkdir()

    def submit(name: str):
        return deployment.client.submit(name=name, gate=str(gate))

    for name in ("first", "a"):
        (gate / f"hold-{name}").touch()
    first = submit("first")
    eventually("the first one holds the worker", lambda: (gate / "at-first").exists())
    jobs = {name: submit(name) for name in ("a", "poison", "stopped", "b")}
    (gate / "hold-first").unlink()
    eventually("the batch begins", lambda: (gate / "at-a").exists())
    jobs["stopped"].cancel()
    eventually("the cancelled one is known to be", lambda: jobs["stopped"].refresh().info["state"] != "active")
    (gate / "hold-a").unlink()

    for name in ("a", "b"):
        assert jobs[name].result(timeout=DEADLINE).info["batch"] == [name], "it ran again, alone"
    assert jobs["poison"].wait(timeout=DEADLINE) == "failed"
    said = jobs["poison"].refresh().info["failure"]
    assert (said["class"], "along with this one" in said["message"]) == ("invalid", True)
    assert jobs["stopped"].wait(timeout=DEADLINE) == "cancelled"
    assert first.result(timeout=DEADLINE).info["batch"] == ["first"]
    assert sorted(path.name for path in gate.iterdir()) == ["at-a", "at-b", "at-first", "at-poison"]
    assert submit("next").result(timeout=DEADLINE).info["batch"] == ["next"]
    assert deployment.stop() == 130
    assert deployment.left() == []


def test_a_stage_of_single_jobs_takes_no_batches(deploy):
    config = toml(
        ROOT / "tests" / "pipelines" / "mirror.py", [{"name": "mirror", "workers": 0}], [], {"image": {"type": "input"}}
    )
    deployment: Deployment = deploy(config).start()
    done = deployment.command("worker", "--pipeline", str(deployment.config), "--stage", "mirror", "--max-batch", "2")
    assert done.returncode == 2
    assert "takes one job at a time" in done.stderr
    assert "batch=True" in done.stderr
