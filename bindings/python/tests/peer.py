"""What the other process of a test does. Runs in a process of its own, which keeps one connector per run directory."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from stagewire.diffusion import DiffusionConnector, StageHandle, StagePayload
from stagewire.errors import StagewireError

_CONNECTORS: dict[tuple[str, str], DiffusionConnector] = {}
_OPEN: dict[str, Any] = {}


def connector(run_dir: str, role: str, **options: Any) -> DiffusionConnector:
    """The connector of this process for a role."""
    key = (run_dir, role)
    if key not in _CONNECTORS:
        _CONNECTORS[key] = DiffusionConnector(role, run_dir=run_dir, **options)
    return _CONNECTORS[key]


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def flat(bundle: Any) -> Any:
    """Tensors as (dtype, shape, bytes), for sending."""
    if bundle is None:
        return None
    if isinstance(bundle, dict):
        return {name: flat(value) for name, value in bundle.items()}
    if isinstance(bundle, list):
        return [flat(value) for value in bundle]
    return (str(bundle.dtype).removeprefix("torch."), tuple(bundle.shape), bits(bundle))


def consume(run_dir: str, handle: bytes, how: str = "chunks", **options: Any) -> Any:
    """Reads a payload: its chunks, or the whole of it; into destinations or without."""
    conn = connector(run_dir, "consumer")
    named = StageHandle.from_bytes(handle)
    dst: Any = None
    if how.endswith("dst"):
        dst = {
            name: None if spec is None else [_like(*one) for one in spec] if isinstance(spec, list) else _like(*spec)
            for name, spec in named.spec.items()
        }
        if list(named.spec) == ["tensor"]:
            dst = dst["tensor"]
    if how.startswith("fetch"):
        return flat(conn.fetch(named, dst, **options))
    return [flat(chunk) for chunk in conn.consume(named, dst, **options)]


def _like(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def consume_error(run_dir: str, handle: bytes, **options: Any) -> tuple[str, str, str, dict[str, str], float]:
    """Reads a payload that cannot be read: class, reason, message, details and seconds of the error."""
    begin = time.monotonic()
    try:
        consume(run_dir, handle, **options)
    except StagewireError as error:
        return error.error_class, error.reason, str(error), error.details, time.monotonic() - begin
    raise AssertionError("it was readable")


def publish(run_dir: str, shape: tuple[int, ...], **options: Any) -> bytes:
    """Publishes a range as float32 and returns the handle."""
    tensor = torch.arange(int(torch.Size(shape).numel()), dtype=torch.float32).reshape(shape)
    payload = StagePayload(request_id="from-peer", tensor=tensor, **options)
    return connector(run_dir, "producer").publish(payload).to_bytes()


def open_publish(run_dir: str, count: int) -> bytes:
    """Opens a payload of `count` chunks, none of them ready."""
    tensor = torch.arange(count * 2, dtype=torch.int64).reshape(count, 2)
    payload = StagePayload(request_id="stream", tensor=tensor, chunk_dim=0, num_chunks=count)
    stream = connector(run_dir, "producer").open(payload)
    _OPEN[run_dir] = stream
    return stream.handle.to_bytes()


def stream(run_dir: str, what: str, *arguments: Any) -> None:
    """Calls a method of the open stream."""
    getattr(_OPEN[run_dir], what)(*arguments)


def stats(run_dir: str, role: str = "consumer") -> dict[str, int]:
    """Numbers of the connector."""
    gc.collect()
    return connector(run_dir, role).stats()


def address(run_dir: str) -> bytes:
    """The address of the consumer."""
    return connector(run_dir, "consumer").address


def close(run_dir: str) -> None:
    """Closes this process's connectors of the run directory."""
    for key in [key for key in _CONNECTORS if key[0] == run_dir]:
        _CONNECTORS.pop(key).close()
    _OPEN.pop(run_dir, None)
