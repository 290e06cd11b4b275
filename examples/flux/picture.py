"""The finished files of a picture: a PNG, and the floats themselves to compare them bit for bit."""

import io

import numpy as np
from PIL import Image


def files(pixels: np.ndarray) -> dict[str, bytes]:
    """Every file by name.

    Args:
        pixels: `[H, W, 3]` in `[0, 1]`.
    """
    with io.BytesIO() as png, io.BytesIO() as npy:
        Image.fromarray((pixels * 255).round().astype(np.uint8)).save(png, "PNG")
        np.save(npy, pixels, allow_pickle=False)
        return {"picture.png": png.getvalue(), "picture.npy": npy.getvalue()}
