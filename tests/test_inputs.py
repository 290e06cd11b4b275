"""Pictures that jobs are given: from a file or from bytes to a stage that reads them, however they are sent."""

from __future__ import annotations

import asyncio
import random

import pytest
import stagewire
import stagewire.local
import stagewire.pipeline
from stagewire import errors

from deployment import DEADLINE, ROOT, Deployment, toml

MODULE = ROOT / "tests" / "pipelines" / "mirror.py"
PICTURE = random.Random(7).randbytes(3 << 20)


@pytest.fixture
def deployment(deploy) -> Deployment:
    params = {"image": {"type": "input", "default": ""}, "note": {"type": "string", "default": ""}}
    config = toml(MODULE, stages=[{"name": "mirror"}], edges=[], params=params)
    return deploy(config + '[server]\nmax-input = "4MiB"\ninput-bytes = "16MiB"\n').start()


def test_a_stage_reads_the_picture_however_it_was_sent(deployment, folder):
    path = folder / "cat.png"
    path.write_bytes(PICTURE)
    name = deployment.client.upload(path)
    assert deployment.client.upload(PICTURE) == name

    async def submit(image):
        async with stagewire.AsyncClient(run_dir=deployment.run_dir) as client:
            result = await (await client.submit(image=image)).result(timeout=DEADLINE)
            return await result["mirrored.bin"].read(), result.info

    for image in (path, PICTURE, name):
        result = deployment.client.submit(image=image).result(timeout=DEADLINE)
        assert result["mirrored.bin"].read() == PICTURE[::-1]
        assert result.info["nbytes"] == len(PICTURE)
        assert not result.info["writable"]
        made, info = asyncio.run(submit(image))
        assert (made, info) == (PICTURE[::-1], result.info)
    for given in (str(path), name):
        made = folder / "made.bin"
        done = deployment.command("submit", "--param", f"image={given}", "--out", str(made))
        assert done.returncode == 0, done.stderr
        assert made.read_bytes() == PICTURE[::-1]
    assert deployment.client.submit().result(timeout=DEADLINE).info == {"image": None}
    assert deployment.stats()["inputs"]["count"] == 1
    (stage,) = stagewire.pipeline.load(MODULE).stages.values()
    for image in (path, PICTURE):
        assert stagewire.local.run([stage], {"image": image}).artefacts["mirrored.bin"].content() == PICTURE[::-1]
    deployment.stop()
    assert deployment.left() == []


def test_what_is_no_picture_is_refused(deployment, folder):
    client = deployment.client
    nobody = "blake3:" + "0" * 64
    with pytest.raises(errors.NotFound, match=nobody) as raised:
        client.submit(image=nobody)
    assert raised.value.reason == "input.unknown"
    with pytest.raises(errors.Invalid, match=r"4\.0 MiB") as raised:
        client.submit(image=bytes(5 << 20))
    assert raised.value.reason == "input.too_large"
    with pytest.raises(errors.Invalid, match="'note' is given a file"):
        client.submit(note=folder)
    with pytest.raises(FileNotFoundError):
        client.submit(image=folder / "nothing.png")
    done = deployment.command("submit", "--param", f"image={folder / 'nothing.png'}")
    assert done.returncode == 2
    assert "nothing.png" in done.stderr


def test_an_uploaded_picture_survives_a_killed_server(deployment):
    name = deployment.client.upload(PICTURE)
    deployment.kill_server()
    deployment.start()
    result = deployment.client.submit(image=name).result(timeout=DEADLINE)
    assert result["mirrored.bin"].read() == PICTURE[::-1]
