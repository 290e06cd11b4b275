"""Reads latents chunk by chunk, each as soon as it is there; the other half is `denoise.py`."""

import hashlib
import sys

import torch
from stagewire.diffusion import DiffusionConnector, StageHandle
from stagewire.errors import StagewireError

handle = StageHandle.from_bytes(bytes.fromhex(sys.stdin.readline()))
print(f"decode: {handle}", file=sys.stderr)
print(f"decode: for {handle.metadata['prompt']!r}; the handle has {len(handle.to_bytes())} bytes", file=sys.stderr)
with DiffusionConnector(role="decode") as conn:
    latents = torch.empty(handle.shape, dtype=getattr(torch, handle.dtype))
    try:
        for index, chunk in enumerate(conn.consume(handle, dst=latents)):  # views of latents, in order
            print(f"decode: chunk {index} of {handle.num_chunks}: {tuple(chunk.shape)}", file=sys.stderr)
    except StagewireError as error:
        sys.exit(f"decode: {type(error).__name__} {error.reason}: {error}")
digest = hashlib.sha256(latents.view(torch.uint8).numpy()).hexdigest()
print(f"decode: done, sha256 {digest[:16]}", file=sys.stderr)
