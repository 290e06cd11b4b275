"""The same picture from `FluxPipeline` in one process, to compare with that of the stages.

python examples/flux/whole.py "a red cat" --out out/whole
"""

import argparse
from pathlib import Path

import torch

import parts
import picture


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the Flux example in one process.")
    parser.add_argument("prompt", nargs="?", default="a red cat")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=256, help="pixels, a multiple of 16")
    parser.add_argument("--height", type=int, default=256, help="pixels, a multiple of 16")
    parser.add_argument("--threads", type=int, default=1, help="as many as each stage has: bits depend on it")
    parser.add_argument("--out", type=Path, default=Path("out/whole"), metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in picture.files(paint(parts.whole(parts.dtype_from_env()), vars(options))).items():
        (options.out / name).write_bytes(data)
        print(options.out / name)


def paint(pipe, params):
    """One call of the whole pipeline: `[H, W, 3]` float32 in `[0, 1]`."""
    return pipe(
        prompt=params["prompt"],
        width=params["width"],
        height=params["height"],
        num_inference_steps=params["steps"],
        generator=torch.Generator().manual_seed(params["seed"]),
        max_sequence_length=parts.MAX_TOKENS,
        output_type="np",
    ).images[0]


if __name__ == "__main__":
    main()
