"""The tiny Wan pipeline of the examples for `stagewire bench rfc`: cut in two, and whole.

Nothing is written to a file, which would take longer than the stages: a result says when its first frames were there,
and what the frames are by their digest.
"""

import hashlib
import time

import stagewire

import pipeline
from causal_decoder import CausalDecoder


@stagewire.stage("decode", setup=pipeline.load_decoder)
def decode(ctx, pipe):
    decoder = CausalDecoder(pipe.vae, pipe.video_processor)
    digest = hashlib.sha256()
    first_ns, done = None, 0
    try:
        for chunk in ctx.input.chunks():
            for frames in decoder.frames(chunk["latents"]):
                first_ns = first_ns or time.time_ns()
                digest.update(frames.tobytes())
                done += len(frames)
                ctx.progress(done, ctx.params["frames"], unit="frame")
    finally:
        decoder.close()
    return stagewire.Result({}, info={"first_ns": first_ns, "frames": digest.hexdigest()})


denoise = stagewire.fuse("denoise", [pipeline.encode, pipeline.denoise])
whole = stagewire.fuse("whole", [pipeline.encode, pipeline.denoise, decode])
