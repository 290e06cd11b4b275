"""The same pipeline in one process: what the staged result is compared with.

    python examples/wan/colocated.py --prompt "a red cat" --out out/colocated

Three ways to call it:

- `modular` (default): diffusers' modular pipeline, whole. The stages are made of its blocks: equal to them bit for bit
  in every dtype.
- `stock`: the `WanPipeline` class that most people call. Equal in fp32; in bf16 diffusers' two implementations round
  the timestep and the latents at different places.
- `chunked`: the blocks of `modular` one after the other, decoding frame by frame. Equal again, and the first frame
  comes early here too: that gain is the causal decoder's, not that of several processes.
"""

import argparse
import json
import time
from pathlib import Path


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    import torch
    from diffusers.utils import logging

    import files  # the heavy imports count as loading
    import model

    logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    generate = PIPELINES[options.pipeline](model.DTYPES[options.dtype])
    load_s = time.perf_counter() - began

    started = time.perf_counter()
    video, first_frame_s = generate(options, started)
    made = files.all_of(video, model.FPS)
    total_s = time.perf_counter() - started

    options.out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        (options.out / name).write_bytes(data)

    if options.json:
        report = {
            "pipeline": options.pipeline,
            "dtype": options.dtype,
            "threads": options.threads,
            "load_s": round(load_s, 3),
            "first_frame_s": round(first_frame_s, 3),
            "total_s": round(total_s, 3),
            "frames": len(video),
        }
        print(json.dumps(report))
    else:
        print(f"{options.pipeline} pipeline in one process, {options.dtype}, {options.threads} thread(s)")
        print(f"  loaded       {load_s:6.2f} s")
        print(f"  first frame  {first_frame_s:6.2f} s")
        print(f"  total        {total_s:6.2f} s")
        print(f"  written      {', '.join(str(options.out / name) for name in made)}")


def modular(dtype):
    import numpy as np

    import model

    pipe = model.modular_pipeline(dtype)

    def generate(options, started):
        video = np.asarray(pipe(**request(options), output="videos"))[0]
        return video, time.perf_counter() - started  # the first frame comes with the last one

    return generate


def stock(dtype):
    import numpy as np

    import model

    pipe = model.stock_pipeline(dtype)

    def generate(options, started):
        video = np.asarray(pipe(**request(options)).frames)[0]
        return video, time.perf_counter() - started

    return generate


def chunked(dtype):
    import numpy as np
    from diffusers.modular_pipelines.wan import WanBlocks

    import model
    from causal_decoder import CausalDecoder

    encode, denoise, decode = (model.modular_part(block, dtype) for block in WanBlocks().sub_blocks.values())

    def generate(options, started):
        wanted = request(options)
        text = {name: wanted.pop(name) for name in ("prompt", "negative_prompt", "max_sequence_length")}
        embeds = encode(**text, output=["prompt_embeds", "negative_prompt_embeds"])
        latents = denoise(**embeds, **wanted, output="latents")
        decoder = CausalDecoder(decode.vae, decode.video_processor)
        frames, first_frame_s = [], 0.0
        for new in decoder.frames(latents):
            first_frame_s = first_frame_s or time.perf_counter() - started
            frames.extend(new)
        return np.stack(frames), first_frame_s

    return generate


PIPELINES = {"modular": modular, "stock": stock, "chunked": chunked}


def request(options) -> dict:
    """A pipeline call's arguments, the same as the stages in `pipeline.py` use."""
    import model

    return {
        "prompt": options.prompt,
        "negative_prompt": options.negative_prompt,
        "max_sequence_length": model.MAX_TOKENS,
        "latents": model.start_latents(options.seed, options.width, options.height, options.frames),
        "width": options.width,
        "height": options.height,
        "num_frames": options.frames,
        "num_inference_steps": options.steps,
    }


def arguments(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Runs the Wan example in one process.")
    parser.add_argument("--prompt", default="a red cat")
    parser.add_argument("--negative-prompt", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--width", type=int, default=192, help="pixels, a multiple of 16")
    parser.add_argument("--height", type=int, default=112, help="pixels, a multiple of 16")
    parser.add_argument("--frames", type=int, default=25, help="1 more than a multiple of 4")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--threads", type=int, default=1, help="as many as each stage has: bits depend on it")
    parser.add_argument("--pipeline", choices=list(PIPELINES), default="modular")
    parser.add_argument("--out", type=Path, default=Path("out/colocated"), metavar="DIR")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
