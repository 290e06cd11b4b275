"""Groups with real processes: two ranks run each attempt together."""

from __future__ import annotations

import pytest

from deployment import DEADLINE, ROOT, Deployment, eventually, toml

PARAMS = {
    "name": {"type": "string"},
    "folder": {"type": "string"},
    "bad": {"type": "integer", "default": -1},
}


@pytest.fixture
def deployment(deploy) -> Deployment:
    stages = [{"name": "denoise", "kind": "admission", "world": 2}, {"name": "decode"}]
    edges = [{"from": "denoise", "to": "decode"}]
    return deploy(toml(ROOT / "tests" / "pipelines" / "group.py", stages, edges, PARAMS)).start()


def pids(deployment: Deployment) -> dict[int, int]:
    """Processes by rank."""
    return {
        worker["group"]["rank"]: worker["pid"] for worker in deployment.workers("denoise") if worker["state"] == "ready"
    }


def test_both_ranks_run_each_attempt_and_rank_0_publishes(deployment, folder):
    ranks = pids(deployment)
    jobs = {name: deployment.client.submit(name=name, folder=str(folder)) for name in ("a", "b")}
    for name, job in jobs.items():
        parts = job.result(timeout=DEADLINE).info["parts"]
        assert parts == [f"{name}:{rank}:{ranks[rank]}" for rank in (0, 1)]
    for rank in (0, 1):
        bad = deployment.client.submit(name=f"bad-{rank}", folder=str(folder), bad=rank)
        assert bad.wait(timeout=DEADLINE) == "failed"
        assert f"rank {rank} cannot do this" in bad.refresh().info["failure"]["message"]
    after = deployment.client.submit(name="after", folder=str(folder))
    assert len(after.result(timeout=DEADLINE).info["parts"]) == 2
    assert deployment.stats()["live_payloads"] == 0
    assert deployment.stop() == 130
    assert deployment.left() == []


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_attempt_and_the_next_one_has_both_again(deployment, folder, lost):
    (folder / "hold-job").touch()
    job = deployment.client.submit(name="job", folder=str(folder))
    begun = [folder / f"job-1-{rank}" for rank in (0, 1)]
    eventually("both ranks are at it", lambda: all(path.exists() for path in begun))
    before = pids(deployment)
    deployment.kill_worker(before[lost])
    eventually("the loss is noticed", lambda: job.refresh().info["losses"]["killed_workers"] == 1)
    (folder / "hold-job").unlink()
    parts = job.result(timeout=DEADLINE).info["parts"]
    now = pids(deployment)
    assert now[lost] != before[lost]
    assert now[1 - lost] == before[1 - lost], "the other rank lives on"
    assert parts == [f"job:{rank}:{now[rank]}" for rank in (0, 1)]
    assert job.refresh().info["losses"]["killed_workers"] == 1
    assert deployment.stats()["live_payloads"] == 0


def test_a_group_goes_on_while_its_server_is_killed(deployment, folder):
    (folder / "hold-job").touch()
    job = deployment.client.submit(name="job", folder=str(folder))
    begun = [folder / f"job-1-{rank}" for rank in (0, 1)]
    eventually("both ranks are at it", lambda: all(path.exists() for path in begun))
    before = pids(deployment)
    deployment.kill_server()
    deployment.start()
    eventually("both ranks are back", lambda: pids(deployment) == before)
    (folder / "hold-job").unlink()
    parts = job.result(timeout=DEADLINE).info["parts"]
    assert parts == [f"job:{rank}:{before[rank]}" for rank in (0, 1)]
    assert not (folder / "job-2-0").exists(), "it did not begin again"


def test_a_group_without_all_its_ranks_is_no_worker(deploy, folder):
    stages = [{"name": "denoise", "kind": "admission", "workers": 0}, {"name": "decode"}]
    edges = [{"from": "denoise", "to": "decode"}]
    deployment: Deployment = deploy(toml(ROOT / "tests" / "pipelines" / "group.py", stages, edges, PARAMS)).start()
    done = deployment.command("worker", "--pipeline", str(deployment.config), "--stage", "denoise", "--group", "g")
    assert done.returncode == 2
    assert "--rank" in done.stderr
    done = deployment.command(
        *("worker", "--pipeline", str(deployment.config), "--stage", "decode"),
        *("--group", "g", "--rank", "0", "--world", "2"),
    )
    assert done.returncode != 0
    assert "admission" in done.stderr, "the server says why"
