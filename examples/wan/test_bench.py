"""The stages of `stagewire bench rfc` are those of the example: cut in two or whole, they make the same frames."""

from pathlib import Path

from stagewire import local, pipeline

STAGES = Path(__file__).parents[2] / "crates/stagewire/src/bench/rfc/stages.py"
GIVEN = {"prompt": "a red cat", "negative_prompt": "", "seed": 3, "steps": 2, "width": 32, "height": 32, "frames": 9}


def test_cut_or_whole_the_frames_are_the_same():
    stages = pipeline.load(STAGES).stages
    cut = local.run([stages["denoise"], stages["decode"]], GIVEN, num_chunks=3, chunk_dim=2)
    whole = local.run([stages["whole"]], GIVEN)
    assert cut.info["frames"] == whole.info["frames"]
    assert 0 < cut.info["first_ns"] < whole.info["first_ns"]
