"""Looks at what the demo wrote: the video decodes, the frames are there, the page is whole."""

import re
import sys
from pathlib import Path

import imageio.v3 as imageio
import numpy as np

out = Path(sys.argv[1])
staged = np.load(out / "frames.npy", allow_pickle=False)
colocated = np.load(out / "colocated" / "frames.npy", allow_pickle=False)
assert staged.shape == (25, 112, 192, 3), staged.shape
assert staged.dtype == colocated.dtype, (staged.dtype, colocated.dtype)
np.testing.assert_array_equal(staged, colocated)
assert staged.std() > 0.01, "the frames are blank"

video = imageio.imread(out / "video.mp4", plugin="FFMPEG")
assert video.shape == staged.shape, (video.shape, staged.shape)
# Compressed, so near and not equal; frames of another job would be far.
shown = staged * 255.0 if staged.dtype.kind == "f" else staged.astype(float)
error = np.abs(video.astype(float) - shown).mean()
assert error < 16, f"the video differs from the frames by {error:.1f} of 255"

assert imageio.imread(out / "frames.png").ndim == 3
page = (out / "timeline.html").read_text(encoding="utf-8")
assert page.lstrip().lower().startswith("<!doctype html>"), page[:80]
for word in ("encode", "denoise", "decode", "p2p"):
    assert word in page, f"the timeline does not show {word}"
assert not re.search(r"(?:src|href)\s*=\s*[\"']https?://", page), "the timeline is not self-contained"
print(f"demo: {len(video)} frames, bit-identical; the mp4 is {error:.1f} of 255 off on average; page {len(page)} bytes")
