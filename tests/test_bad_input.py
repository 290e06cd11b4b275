"""What bad input gets: an error that says what to do, and nothing that keeps running."""

from __future__ import annotations

import sys

import pytest
import stagewire
from stagewire import errors

from deployment import DEADLINE, ROOT, Deployment, toml, toy

PIPELINES = ROOT / "tests" / "pipelines"


def one_stage(module: str) -> str:
    params = {
        "prompt": {"type": "string"},
        "frames": {"type": "integer", "default": 9, "min": 1, "max": 257},
    }
    return toml(PIPELINES / module, stages=[{"name": "paint"}], edges=[], params=params)


def up(deployment: Deployment, *args: str):
    """`up` that is expected to end by itself."""
    return deployment.command("up", str(deployment.config), "--python", sys.executable, *args)


def test_a_module_that_raises_at_import_ends_up_with_its_traceback(deploy):
    deployment: Deployment = deploy(one_stage("broken.py"))
    done = up(deployment, "--data-dir", str(deployment.folder / "data"))
    assert done.returncode == 1, done.stderr
    assert "worker paint-0 ended with status" in done.stderr
    assert "No module named 'a_module_that_nobody_has'" in done.stderr
    assert deployment.left() == []


def test_a_stage_that_the_module_lacks_is_named(deploy):
    config = toml(PIPELINES / "refusing.py", stages=[{"name": "pain"}], edges=[], params={})
    deployment: Deployment = deploy(config)
    done = up(deployment, "--data-dir", str(deployment.folder / "data"))
    assert done.returncode == 1, done.stderr
    assert "has no stage 'pain'" in done.stderr
    assert "did you mean 'paint'?" in done.stderr
    assert deployment.left() == []


def test_an_arena_larger_than_the_memory_is_refused_before_anything_starts(deploy):
    deployment: Deployment = deploy(toy() + '[server]\narena-bytes = "900TiB"\n')
    done = up(deployment, "--data-dir", str(deployment.folder / "data"))
    assert done.returncode == 1
    assert "arena-bytes" in done.stderr
    assert "900.0 TiB" in done.stderr
    assert deployment.left() == []


class TestJobs:
    @pytest.fixture
    def deployment(self, deploy) -> Deployment:
        return deploy(one_stage("refusing.py")).start()

    def test_the_models_own_exception_reaches_the_client_and_the_worker_lives_on(self, deployment):
        (before,) = deployment.workers("paint")
        done = deployment.command("submit", "a cat", "--param", "frames=8")
        assert done.returncode == 1
        assert "frames is 8, it must be 1 more than a multiple of 4" in done.stderr
        job = deployment.client.submit(prompt="a cat", frames=8)
        with pytest.raises(errors.Invalid, match="frames is 8"):
            job.result(timeout=DEADLINE)
        assert deployment.client.submit(prompt="a cat").result(timeout=DEADLINE)["prompt.txt"].read() == b"a cat"
        (after,) = deployment.workers("paint")
        assert after["pid"] == before["pid"]

    @pytest.mark.parametrize(
        ("params", "words"),
        [
            ({"prompt": "x", "frmaes": 9}, ("frmaes", "frames")),
            ({}, ("prompt",)),
            ({"prompt": 7}, ("prompt", "string")),
            ({"prompt": "x", "frames": "many"}, ("frames", "integer")),
            ({"prompt": "x", "frames": 1000}, ("frames", "257")),
            ({"prompt": "x", "frames": None}, ("frames",)),
        ],
        ids=["unknown", "missing", "type", "text for number", "range", "null"],
    )
    def test_wrong_parameters_are_refused_with_what_is_right(self, deployment, params, words):
        with pytest.raises(errors.Invalid) as raised:
            deployment.client.submit(params)
        for word in words:
            assert word in raised.value.message

    def test_a_long_prompt_works_and_a_huge_one_is_refused(self, deployment, folder):
        long = "cat " * (16 << 10)
        assert len(long) == 64 << 10
        job = deployment.client.submit(prompt=long)
        assert job.result(timeout=DEADLINE)["prompt.txt"].read() == long.encode()
        huge = folder / "huge.txt"
        huge.write_text("cat " * (16 << 20))
        with huge.open() as prompt:
            done = deployment.command("submit", "-", stdin=prompt)
        assert done.returncode != 0
        assert "1.0 MiB" in done.stderr or "max-body" in done.stderr, done.stderr
        assert deployment.client.submit(prompt="x").result(timeout=DEADLINE)

    def test_an_unknown_job_is_not_found(self, deployment):
        for command in ("job", "cancel"):
            done = deployment.command(command, "0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10")
            assert done.returncode == 1
            assert "0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10" in done.stderr
            assert deployment.command(command, "../../etc").returncode in (1, 2)
        with pytest.raises(errors.NotFound):
            deployment.client.job("0192f0c1-7d2e-7a53-b6c1-0d9a3f6f5a10")

    def test_a_worker_of_another_pipeline_is_refused(self, deployment):
        other = deployment.folder / "other.toml"
        other.write_text(toy().replace('name = "test"', 'name = "other"'))
        worker = ["worker", "--pipeline", str(other), "--stage", "encode", "--python", sys.executable]
        done = deployment.command(*worker)
        assert done.returncode not in (0, None)
        for name in ("other", "test"):
            assert name in done.stderr


def test_without_a_server_the_client_says_how_to_start_one(folder):
    with (
        stagewire.Client(run_dir=folder / "nowhere") as client,
        pytest.raises(errors.Unavailable, match="stagewire up"),
    ):
        client.submit(prompt="x")
