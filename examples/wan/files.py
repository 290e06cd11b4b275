"""The finished files of a video: an MP4 (a GIF without an encoder), a sheet of its frames, the frames themselves."""

import io
import math

import imageio.v3 as iio
import numpy as np
from PIL import Image


def video(frames: np.ndarray, fps: int) -> tuple[str, bytes]:
    """Name and bytes of the video: `video.mp4`, or `video.gif` where this Python has no encoder.

    Args:
        frames: `[n, H, W, 3]` in `[0, 1]`.
        fps: Frames per second.
    """
    pictures = to_uint8(frames)
    try:
        # imageio-ffmpeg brings its own encoder.
        data = iio.imwrite(
            "<bytes>", pictures, extension=".mp4", plugin="FFMPEG", fps=fps, quality=8, ffmpeg_log_level="error"
        )
        return "video.mp4", data
    except (ImportError, OSError, RuntimeError):
        with io.BytesIO() as out:
            first, *rest = [Image.fromarray(picture) for picture in pictures]
            first.save(out, "GIF", save_all=True, append_images=rest, duration=round(1000 / fps), loop=0)
            return "video.gif", out.getvalue()


def sheet(frames: np.ndarray, gap: int = 4) -> bytes:
    """All frames on one PNG, in reading order."""
    pictures = to_uint8(frames)
    count, height, width, _ = pictures.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    paper = Image.new("RGB", (columns * (width + gap) + gap, rows * (height + gap) + gap), "white")
    for index, picture in enumerate(pictures):
        row, column = divmod(index, columns)
        paper.paste(Image.fromarray(picture), (gap + column * (width + gap), gap + row * (height + gap)))
    with io.BytesIO() as out:
        paper.save(out, "PNG")
        return out.getvalue()


def array(frames: np.ndarray) -> bytes:
    """The frames as a NumPy file, to compare them bit for bit."""
    with io.BytesIO() as out:
        np.save(out, frames, allow_pickle=False)
        return out.getvalue()


def to_uint8(frames: np.ndarray) -> np.ndarray:
    return (frames * 255).round().astype(np.uint8)


def all_of(frames: np.ndarray, fps: int) -> dict[str, bytes]:
    """Every file by name."""
    name, data = video(frames, fps)
    return {name: data, "frames.png": sheet(frames), "frames.npy": array(frames)}
