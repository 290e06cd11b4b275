"""A diffusers modular pipeline handed over whole: each of its blocks becomes a stage.

Modular Diffusers cuts pipelines where Stagewire does: ``WanBlocks()`` is ``text_encoder``, ``denoise``, ``decode``, and
each block runs alone with named inputs and outputs. So a pipeline module can be as short as this:

```python
from diffusers.modular_pipelines.wan import WanBlocks
import stagewire.modular

stages = stagewire.modular.stages(
    WanBlocks(),
    names={"text_encoder": "encode"},
    components={"text_encoder": load_text_encoder, "tokenizer": load_tokenizer,
                "transformer": load_transformer, "scheduler": load_scheduler, "vae": load_vae},
    params={"steps": "num_inference_steps", "frames": "num_frames"},
    finish=write_video,
)
```

Every block gets what the blocks before it made, the parameters of the job that it has an input for, and its own
defaults for the rest. What later blocks need is handed over: tensors as they are, other JSON-like values as metadata.
Steps of a denoising loop are reported as progress, which is also where a cancelled job stops. A loop that
`stagewire.checkpointing` knows can be interrupted there, and goes on.
"""

from __future__ import annotations

import contextvars
import io
import itertools
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from . import checkpointing
from .errors import Invalid, NotFound, Unsupported
from .stages import Artefact, Output, Payload, Result, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from .context import Context

__all__ = ["Finish", "stages"]

Finish: TypeAlias = "Callable[[Context, dict[str, Any]], Result]"
"""Makes the job's result of the last block's outputs by name."""

_CONTEXT: contextvars.ContextVar[Context | None] = contextvars.ContextVar("stagewire_modular_context", default=None)


def stages(
    blocks: Any,
    *,
    components: Mapping[str, Callable[[], Any]] | None = None,
    pretrained: str | None = None,
    names: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    finish: Finish | None = None,
    setup_per_slot: bool = False,
) -> list[Stage[Any]]:
    """Makes a stage of each block of a sequential modular pipeline.

    Args:
        blocks: The pipeline's blocks, such as ``WanBlocks()``.
        components: What builds each component, by name. A worker builds only those that its own block needs.
        pretrained: Folder or repository from which diffusers loads the components that are not in `components`.
        names: Name of the stage by name of the block, where it is to be another.
        params: Name of the block's input by name of the job's parameter, where it is another. A parameter ``seed``
            becomes the input ``generator``, a CPU generator with that seed, without being named here.
        finish: Makes the result of the last block's outputs. Default: pictures as PNG, arrays as ``.npy``.
        setup_per_slot: Build the components once for each slot of a worker; needed for ``slots`` above 1, because
            blocks keep state.

    Returns:
        The stages, in the order of the blocks. Assign them to a variable of the pipeline module.

    Raises:
        Invalid: `blocks` has no blocks, or `names` names one that it does not have.
    """
    found: dict[str, Any] = dict(getattr(blocks, "sub_blocks", None) or {})
    if not found:
        raise Invalid(
            f"a {type(blocks).__name__} has no sub_blocks: give the blocks of a modular pipeline, such as WanBlocks()",
            reason="modular.blocks",
        )
    for name in names or {}:
        if name not in found:
            raise Invalid(
                f"names= has {name!r}, which is no block; the blocks: {', '.join(found)}", reason="modular.blocks"
            )
    made = []
    for index, (name, block) in enumerate(found.items()):
        later = {param.name for other in list(found.values())[index + 1 :] for param in other.inputs if param.name}
        runner = _Block(
            name=name,
            block=block,
            components=dict(components or {}),
            pretrained=pretrained,
            params=dict(params or {}),
            later=later if index + 1 < len(found) else None,
            finish=finish or default_finish,
        )
        made.append(
            Stage(
                name=(names or {}).get(name, name),
                function=runner.run,
                setup=runner.load,
                setup_per_slot=setup_per_slot,
            )
        )
    return made


class _Block:
    """One block, as a stage."""

    def __init__(
        self,
        *,
        name: str,
        block: Any,
        components: dict[str, Callable[[], Any]],
        pretrained: str | None,
        params: dict[str, str],
        later: set[str] | None,
        finish: Finish,
    ) -> None:
        self._name = name
        self._block = block
        self._components = components
        self._pretrained = pretrained
        self._params = params
        self._later = later
        self._finish = finish

    def load(self) -> Any:
        """Builds the pipeline of this block alone."""
        for loop in _loops(self._block):
            loop.progress_bar = _progress_bar
        pipe = self._block.init_pipeline(self._pretrained)
        wanted = set(pipe.component_names)
        pipe.update_components(**{n: build() for n, build in self._components.items() if n in wanted})
        missing = [n for n in pipe.pretrained_component_names if n in pipe.null_component_names]
        if missing and self._pretrained is not None:
            pipe.load_components(names=missing)
            missing = [n for n in missing if n in pipe.null_component_names]
        if missing:
            raise NotFound(
                f"block {self._name!r} needs {', '.join(missing)}: add what builds them to components=, "
                "or give pretrained=",
                reason="modular.components",
                details={"block": self._name, "missing": ", ".join(missing)},
            )
        return pipe

    def run(self, ctx: Context, pipe: Any) -> Output:
        """Runs the block on what the ones before it made."""
        received = _received(ctx)
        given = self._inputs(ctx, received)
        if checkpointing.supports(pipe):
            state = checkpointing.run(ctx, pipe, **given)
        else:
            before = _CONTEXT.set(ctx)
            try:
                state = pipe(**given)
            finally:
                _CONTEXT.reset(before)
        outputs = {*self._block.output_names, *self._block.intermediate_output_names}
        made = {name: state.get(name) for name in outputs if name in state.values}
        if self._later is None:
            wanted = [name for name in self._block.output_names if name in made]
            return self._finish(ctx, {name: made[name] for name in wanted})
        return self._payload({name: value for name, value in {**received, **made}.items() if name in self._later})

    def _inputs(self, ctx: Context, received: dict[str, Any]) -> dict[str, Any]:
        params = {self._params.get(name, name): value for name, value in ctx.params.items()}
        if "seed" in params and "generator" not in params:
            import torch

            params["generator"] = torch.Generator("cpu").manual_seed(params["seed"])
        names = [param.name for param in self._block.inputs if param.name]
        return {name: {**params, **received}[name] for name in names if name in received or name in params}

    def _payload(self, values: dict[str, Any]) -> Payload:
        tensors: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        for name, value in sorted(values.items()):
            if value is None or hasattr(value, "__dlpack__"):
                tensors[name] = value
            elif isinstance(value, list | tuple) and value and all(hasattr(item, "__dlpack__") for item in value):
                tensors[name] = list(value)
            elif isinstance(value, bool | int | float | str | list | tuple | dict):
                metadata[name] = value
            else:
                raise Unsupported(
                    f"block {self._name!r} hands over {name!r}, a {type(value).__name__}: only tensors, "
                    "lists of them, and JSON-like values can be",
                    reason="modular.output",
                    details={"block": self._name, "output": name, "type": type(value).__name__},
                )
        return Payload(tensors, metadata=metadata)


def _received(ctx: Context) -> dict[str, Any]:
    """What the blocks before made: tensors and other values by name."""
    values: dict[str, Any] = {}
    for payload in ctx.inputs.values():
        # Blocks may write into their inputs, and mapped memory does not bear that.
        values.update(payload.fetch(framework="torch"))
        values.update(payload.metadata or {})
    return values


def _loops(block: Any) -> Iterator[Any]:
    if hasattr(block, "progress_bar"):
        yield block
    for inner in (getattr(block, "sub_blocks", None) or {}).values():
        yield from _loops(inner)


def _progress_bar(iterable: Any = None, total: int | None = None) -> _Bar:
    # A plain function: diffusers copies blocks deeply, and copies of functions are the functions themselves.
    return _Bar(_CONTEXT.get(), iterable, total)


class _Bar:
    """Stands in for tqdm in a block's loop: each step is a progress report, and raises where the job is cancelled."""

    def __init__(self, ctx: Context | None, iterable: Any, total: int | None) -> None:
        self._ctx = ctx
        self._iterable = iterable
        self._total = total if total is not None else len(iterable) if hasattr(iterable, "__len__") else 0
        self._done = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable or ():
            yield item
            self.update()

    def update(self, steps: int = 1) -> None:
        self._done += steps
        if self._ctx is not None:
            self._ctx.progress(self._done, self._total, "step")


def default_finish(ctx: Context, outputs: dict[str, Any]) -> Result:  # noqa: ARG001 - the signature of `Finish`
    """Pictures as PNG, arrays and tensors as ``.npy``: ``images-0.png``, ``videos-0.npy``."""
    artefacts: dict[str, Artefact] = {}
    for name, value in outputs.items():
        items = list(_leaves(value))
        for index, item in enumerate(items):
            stem = name if len(items) == 1 else f"{name}-{index}"
            if hasattr(item, "save") and hasattr(item, "getpixel"):  # a PIL image
                memory = io.BytesIO()
                item.save(memory, format="PNG")
                artefacts[f"{stem}.png"] = Artefact(memory.getvalue(), "image/png")
            else:
                artefacts[f"{stem}.npy"] = Artefact(_npy(item), "application/x-npy")
    return Result(artefacts)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from itertools.chain.from_iterable(_leaves(item) for item in value)
    elif value is not None:
        yield value


def _npy(value: Any) -> bytes:
    import numpy as np

    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
    memory = io.BytesIO()
    np.save(memory, np.asarray(value), allow_pickle=False)
    return memory.getvalue()
