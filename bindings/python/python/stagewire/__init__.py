"""Stagewire serves generative models whose stages run in different processes.

* `stage`, `fuse`, `Payload`, `Result`, `Artefact`, `Context`: what a pipeline module is written in.
* `stagewire.checkpointing`: denoising loops of diffusers that can be interrupted, and go on from there.
* `stagewire.modular.stages`: a diffusers modular pipeline handed over whole.
* `stagewire.diffusion.DiffusionConnector`: hands tensors from process to process, without a server.
* `stagewire.mooncake.EngineTransport`: moves tensors between hosts over Mooncake's transfer engine.
* `stagewire.kv`: KV caches between engines of different tensor-parallel size, planned and moved.
* `Client`, `AsyncClient`: submit jobs to a server, follow them, fetch what they made.
* `Orchestrator`: serves a pipeline from within a program, for as long as that wants it.
* `stagewire.errors`: one exception class for each class of error.
* ``python -m stagewire.worker``: runs one stage; ``stagewire up`` starts it.

Importing this package imports neither torch nor NumPy nor an HTTP client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._fused import fuse
from ._native import Tensor, __version__
from .context import Checkpoint, Context, Input
from .errors import Cancelled, StagewireError, Yielded
from .stages import Artefact, Payload, Result, Stage, stage

if TYPE_CHECKING:
    from .client import AsyncClient, Client
    from .orchestrator import Orchestrator

__all__ = [
    "Artefact",
    "AsyncClient",
    "Cancelled",
    "Checkpoint",
    "Client",
    "Context",
    "Input",
    "Orchestrator",
    "Payload",
    "Result",
    "Stage",
    "StagewireError",
    "Tensor",
    "Yielded",
    "__version__",
    "fuse",
    "stage",
]

_LAZY = {"AsyncClient": "client", "Client": "client", "Orchestrator": "orchestrator"}
_MODULES = {"checkpointing", "client", "conformance", "diffusion", "kv", "local", "modular", "mooncake", "pipeline"}


def __getattr__(name: str) -> Any:
    """Imports what needs more than the standard library when it is first used."""
    if name in _LAZY:
        return getattr(importlib.import_module(f".{_LAZY[name]}", __name__), name)
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
