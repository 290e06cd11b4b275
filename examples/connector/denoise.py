"""Makes latents chunk by chunk and publishes each as soon as it is made; the other half is `decode.py`.

python denoise.py | python decode.py
"""

import hashlib
import sys
import time

import torch
from stagewire.diffusion import DiffusionConnector, StagePayload

SHAPE = [1, 16, 21, 60, 104]  # 81 frames of 832x480 of Wan
CHUNKS = 8

with DiffusionConnector(role="denoise") as conn:
    latents = conn.allocate(SHAPE, torch.bfloat16)  # in shared memory: consumers map it, nothing is copied
    payload = StagePayload(
        request_id="r1",
        kind="latent",
        tensor=latents,
        metadata={"prompt": "a red cat", "fps": 16},
        chunk_dim=2,
        num_chunks=CHUNKS,
    )
    with conn.open(payload) as stream:
        # The handle goes through any queue, here a pipe. The tensor stays.
        print(stream.handle.to_bytes().hex(), flush=True)
        noise = torch.Generator().manual_seed(0)
        for index, chunk in enumerate(latents.tensor_split(CHUNKS, dim=2)):
            time.sleep(0.05)  # the model works
            chunk.copy_(torch.randn(chunk.shape, generator=noise))
            stream.ready(index)  # from now on this chunk must not change
        released = stream.handle.wait_released(timeout=60)
    digest = hashlib.sha256(latents.view(torch.uint8).numpy()).hexdigest()
    print(f"denoise: {'released' if released else 'nobody came'}, sha256 {digest[:16]}", file=sys.stderr)
    print(f"denoise: {conn.stats()['staged_bytes']} bytes were copied to publish {latents.nbytes}", file=sys.stderr)
