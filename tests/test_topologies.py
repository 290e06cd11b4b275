"""The shapes in `examples/topologies`, served by real processes: what comes out is what plain function calls give."""

from __future__ import annotations

import json
import sys
import urllib.request

import numpy as np
import pytest
from stagewire import errors

from deployment import DEADLINE, ROOT, Deployment

FOLDER = ROOT / "examples" / "topologies"
sys.path.insert(0, str(FOLDER))

import stages  # noqa: E402

PROMPT, SEED, FRAMES, STEPS = "waves at night", 7, 5, 4
GIVEN = {"seed": SEED, "frames": FRAMES, "steps": STEPS}


@pytest.fixture
def serve(deploy):
    def serve(name: str) -> Deployment:
        text = (FOLDER / f"{name}.toml").read_text()
        return deploy(text.replace('"stages.py"', json.dumps(str(FOLDER / "stages.py")))).start()

    return serve


def denoised(text: np.ndarray, image: np.ndarray | float = 0.0) -> np.ndarray:
    latents = stages.noise(SEED, FRAMES) + np.float32(image)
    for _ in range(STEPS):
        latents = stages.denoised(latents, text)
    return latents


def video(text: np.ndarray, image: np.ndarray | float = 0.0) -> bytes:
    return stages.decoded(denoised(text, image)).tobytes()


def made(job, name: str) -> bytes:
    assert job.wait(timeout=DEADLINE) == "succeeded", job.refresh().info
    return job.result()[name].read()


def phases(job) -> dict[str, str]:
    return {stage["name"]: stage["state"] for stage in job.refresh().info["stages"]}


def nothing_is_left(deployment: Deployment) -> None:
    stats = deployment.stats()
    assert (stats["live_payloads"], stats["store"]["payloads"]) == (0, 0), stats
    assert deployment.stop() == 130
    assert deployment.left() == []


def test_encode_denoise_decode_and_embeddings_in_place_of_the_encoder(serve):
    deployment = serve("encode-denoise-decode")
    job = deployment.client.submit(prompt=PROMPT, **GIVEN)
    assert made(job, "video.bin") == video(stages.embeds(PROMPT))
    assert phases(job) == {"encode": "done", "denoise": "done", "decode": "done"}
    other = stages.embeds("something else")
    job = deployment.client.submit(prompt=PROMPT, embeds=stages.as_file(other), **GIVEN)
    assert made(job, "video.bin") == video(other)
    assert phases(job) == {"encode": "skipped", "denoise": "done", "decode": "done"}
    nothing_is_left(deployment)


def test_two_denoisers_and_the_prompt_for_both(serve):
    deployment = serve("two-denoisers")
    job = deployment.client.submit(prompt=PROMPT, **GIVEN)
    text, latents = stages.embeds(PROMPT), stages.noise(SEED, FRAMES)
    for step in range(STEPS):
        latents = stages.denoised(latents, text)
        if step >= stages.BOUNDARY:
            latents = np.float32(0.9) * latents
    assert made(job, "video.bin") == stages.decoded(latents).tobytes()
    nothing_is_left(deployment)


def test_picture_and_sound_are_decoded_apart_and_joined(serve):
    deployment = serve("audio-video")
    latents = denoised(stages.embeds(PROMPT))
    picture, sound = (stages.decoded(latents).tobytes(), stages.heard(stages.soundtrack(latents)).tobytes())
    jobs = [deployment.client.submit(prompt=PROMPT, silent=silent, **GIVEN) for silent in (False, True)]
    assert made(jobs[0], "film.bin") == picture + sound
    assert made(jobs[1], "film.bin") == picture
    assert [phases(job)["decode-audio"] for job in jobs] == ["done", "skipped"]
    nothing_is_left(deployment)


def test_embeddings_given_and_no_encoder_at_all(serve):
    deployment = serve("embeddings-given")
    text = stages.embeds(PROMPT)
    job = deployment.client.submit(embeds=stages.as_file(text), **GIVEN)
    assert made(job, "video.bin") == video(text)
    with pytest.raises(errors.Invalid, match="embeds is missing"):
        deployment.client.submit(**GIVEN)
    nothing_is_left(deployment)


def test_an_image_is_encoded_beside_the_text(serve):
    deployment = serve("image-to-video")
    picture = bytes(range(200))
    job = deployment.client.submit(prompt=PROMPT, image=picture, **GIVEN)
    assert made(job, "video.bin") == video(stages.embeds(PROMPT), stages.image_latent(picture))
    nothing_is_left(deployment)


def test_one_fused_stage_moves_and_stores_nothing(serve):
    deployment = serve("fused")
    jobs = [deployment.client.submit(prompt=PROMPT, **GIVEN) for _ in range(3)]
    for job in jobs:
        assert made(job, "video.bin") == video(stages.embeds(PROMPT))
        heard = [event.type for event in job.events(timeout=DEADLINE)]
        assert not {"published", "chunk"} & set(heard), heard
    counted = metrics(deployment)
    assert counted['stagewire_sched_attempts_total{event="completed"}'] == "3"
    assert counted['stagewire_sched_payloads_total{event="published"}'] == "0"
    assert counted["stagewire_store_used_bytes"] == "0"
    nothing_is_left(deployment)


def metrics(deployment: Deployment) -> dict[str, str]:
    server = json.loads((deployment.run_dir / "server.json").read_text())
    with urllib.request.urlopen(f"http://{server['http']}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
