"""Denoising loops of diffusers that can be interrupted between two steps, and go on from there, bit for bit the same.

```python
from stagewire import checkpointing

@stagewire.stage("denoise", setup=load_pipeline, setup_per_slot=True)
def denoise(ctx, pipe):
    latents = checkpointing.run(
        ctx, pipe, **ctx.input.fetch(), num_inference_steps=ctx.params["steps"], output_type="latent", return_dict=False
    )
    return stagewire.Payload({"latents": latents[0]}, kind="latent")
```

With ``checkpoint = true`` at the stage, the pipeline's TOML lets a job of a more urgent class interrupt it, a worker
that leaves hand its job over, and the job of a worker that died go on from its last checkpoint.

Everything that steps change is saved: the latents, the scheduler with the outputs that a multistep solver remembers
(UniPC, DPM-Solver++, DEIS, Heun, ...), and the states of the random number generators: torch's own and those of the
call. Whether that is all depends on the pipeline, so that only those are taken which were seen to come out the same;
others get `Unsupported` rather than other bits. For a loop of your own there is `Context.boundary`.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from . import _scheduler_state
from .errors import Internal, Invalid, Unsupported
from .stages import Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from .context import Checkpoint, Context

__all__ = ["run", "supports"]

_PIPELINES = frozenset({"FluxPipeline", "StableDiffusion3Pipeline", "WanPipeline"})
_LOOPS = frozenset({"WanDenoiseStep"})
_GUIDERS = frozenset({"ClassifierFreeGuidance"})
"""Others may remember something from step to step."""

_FORMAT = "stagewire-diffusers-1"


def supports(pipe: Any) -> bool:
    """Whether `run` takes this pipeline."""
    return _refusal(pipe) is None


def run(ctx: Context, pipe: Any, /, *, every: float | None = 30.0, **call: Any) -> Any:
    """Calls a pipeline, and returns what it returns. The denoising loop goes on where the last attempt has left it.

    Each step is a `Context.boundary`: it is reported as progress, and is where the attempt saves its state, yields, and
    stops when it is cancelled.

    Args:
        ctx: The attempt.
        pipe: A `WanPipeline`, `FluxPipeline` or `StableDiffusion3Pipeline`, or a modular pipeline with Wan's denoising
            loop. It runs one call at a time.
        every: Seconds between two checkpoints; None saves the state only to yield.
        call: The arguments of the call. They must be the same each time. A `callback_on_step_end` may look at the
            latents, and change them.

    Raises:
        Cancelled: The attempt must stop. Let it pass.
        Yielded: It has handed over its state. Let it pass.
        Unsupported: The pipeline, its scheduler or its guider may keep something that is not saved.
        Invalid: The checkpoint is of another pipeline, another schedule or other random number generators.
    """
    if (refusal := _refusal(pipe)) is not None:
        raise refusal
    steps = _Steps(ctx, pipe, every, call)
    return _run_stock(pipe, steps, call) if _is_stock(pipe) else _run_modular(pipe, _loop_of(pipe), steps, call)


def _is_stock(pipe: Any) -> bool:
    return type(pipe).__name__ in _PIPELINES


def _refusal(pipe: Any) -> Unsupported | None:
    if _is_stock(pipe):
        return None
    name = type(pipe).__name__
    if _loop_of(pipe) is None:
        return Unsupported(
            f"nobody has seen that a {name} goes on as it would have; known are "
            f"{', '.join(sorted(_PIPELINES | _LOOPS))}. Write the loop yourself, with ctx.boundary",
            reason="checkpointing.pipeline",
            details={"pipeline": name},
        )
    guider = type(getattr(pipe, "guider", None)).__name__
    if guider not in _GUIDERS:
        return Unsupported(
            f"the guider of this {name} is a {guider}, which may remember something; known not to are "
            f"{', '.join(sorted(_GUIDERS))}",
            reason="checkpointing.pipeline",
            details={"pipeline": name, "guider": guider},
        )
    return None


class _Steps:
    """The steps of one call: where they begin, and what there is to do after each."""

    def __init__(self, ctx: Context, pipe: Any, every: float | None, call: Mapping[str, Any]) -> None:
        self.scheduler = pipe.scheduler
        if ctx.takes_checkpoints:
            # Better now than when somebody waits.
            _scheduler_state.save(self.scheduler)
        self.latents: Any = None
        self.first = 0
        self._ctx = ctx
        self._every = every
        self._pipe = type(pipe).__name__
        given = call.get("generator") or []
        self._generators = list(given) if isinstance(given, list | tuple) else [given]
        self._tensors: dict[str, Any] = {}
        self._metadata: dict[str, Any] = {}
        if ctx.resume is not None:
            self._read(ctx.resume)

    def _read(self, resume: Checkpoint) -> None:
        metadata = resume.metadata if isinstance(resume.metadata, dict) else {}
        if metadata.get("format") != _FORMAT or metadata.get("pipeline") != self._pipe:
            found = f"{metadata.get('format')!r} of a {metadata.get('pipeline')}"
            raise Invalid(
                f"the checkpoint is {found}, not {_FORMAT!r} of a {self._pipe}: has the pipeline module changed? "
                "Redrive the job to run it from its beginning",
                reason="checkpointing.state",
            )
        self._tensors = resume.fetch(framework="torch")
        self._metadata = metadata
        self.latents = self._tensors["latents"]
        self.first = resume.done

    def begin(self, device: Any) -> Any:
        """Brings scheduler and generators to where the first step that is still to do finds them.

        Returns:
            The latents, on the device.

        Raises:
            Invalid: The checkpoint does not fit.
        """
        sources, states = self._random(device), self._tensors["random"]
        if len(sources) != len(states):
            raise Invalid(
                f"the checkpoint has states of {len(states)} random number generators, and this call on {device} has "
                f"{len(sources)}: is this another kind of device, or has `generator` changed? Redrive the job to run "
                "it from its beginning",
                reason="checkpointing.state",
                details={"saved": str(len(states)), "present": str(len(sources))},
            )
        _scheduler_state.restore(self.scheduler, self._tensors["scheduler"], self._metadata["scheduler"], device)
        for source, state in zip(sources, states, strict=True):
            source.set_state(state)
        return self.latents.to(device)

    def done(self, done: int, total: int, latents: Any) -> None:
        """A step is done."""
        self._ctx.boundary(lambda: self._state(latents), done=done, total=total, every=self._every)

    def _random(self, device: Any) -> list[Any]:
        """Where random numbers may come from: some schedulers draw from torch's own generators in any case."""
        import torch

        own = [torch.default_generator]
        if device.type == "cuda":
            own.append(torch.cuda.default_generators[device.index or 0])
        return own + self._generators

    def _state(self, latents: Any) -> Payload:
        tensors, scheduler = _scheduler_state.save(self.scheduler)
        states = [source.get_state() for source in self._random(latents.device)]
        return Payload(
            {"latents": latents.detach(), "scheduler": tensors, "random": states},
            metadata={"format": _FORMAT, "pipeline": self._pipe, "scheduler": scheduler},
        )


# ------------------------------------------------------------------------------------------------- stock pipelines


class _Skipped:
    """Stands where a pipeline looks before each step whether it was interrupted: true until the steps to skip are over.

    So every step keeps its number, and the pipeline does nothing for those that are done.
    """

    def __init__(self, count: int, begin: Callable[[], None]) -> None:
        self._left = count
        self._begin = begin

    def __bool__(self) -> bool:
        if self._left > 0:
            self._left -= 1
            return True
        if self._left == 0:
            self._left = -1
            self._begin()
        return False


def _run_stock(pipe: Any, steps: _Steps, call: dict[str, Any]) -> Any:
    theirs = call.pop("callback_on_step_end", None)
    wanted = getattr(theirs, "tensor_inputs", None) or call.pop("callback_on_step_end_tensor_inputs", ["latents"])
    scheduler = steps.scheduler
    expected = steps.first

    def on_step_end(pipeline: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        nonlocal expected
        if index != expected:
            raise Internal(
                f"step {index} came where step {expected} was due: this diffusers has another loop",
                reason="checkpointing.step",
            )
        expected += 1
        changed = {} if theirs is None else theirs(pipeline, index, timestep, tensors)
        if set(changed) - {"latents"}:
            raise Unsupported(
                f"callback_on_step_end changes {', '.join(sorted(set(changed) - {'latents'}))}, which is not saved: "
                "only latents are",
                reason="checkpointing.callback",
            )
        steps.done(index + 1, len(scheduler.timesteps), changed.get("latents", tensors["latents"]))
        return changed

    call["callback_on_step_end"] = on_step_end
    call["callback_on_step_end_tensor_inputs"] = list(dict.fromkeys([*wanted, "latents"]))
    with contextlib.ExitStack() as hooks:
        if steps.latents is not None:
            call["latents"] = steps.latents
            _go_on(pipe, steps, hooks)
        return pipe(**call)


def _go_on(pipe: Any, steps: _Steps, hooks: contextlib.ExitStack) -> None:
    """Has the pipeline's next call skip the steps that are done."""
    scheduler, latents = steps.scheduler, None

    def begin() -> None:
        nonlocal latents
        latents = steps.begin(scheduler.timesteps.device)

    def set_timesteps(*args: Any, **kwargs: Any) -> Any:
        made = theirs_set(*args, **kwargs)
        pipe._interrupt = _Skipped(steps.first, begin)
        return made

    def step(output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal latents
        if latents is not None:
            # The pipeline has them in the type that they begin with, which may be another one.
            sample, latents = latents.to(sample.device), None
        return theirs_step(output, timestep, sample, *args, **kwargs)

    theirs_set = hooks.enter_context(_hooked(scheduler, "set_timesteps", set_timesteps))
    theirs_step = hooks.enter_context(_hooked(scheduler, "step", step))


@contextlib.contextmanager
def _hooked(target: Any, name: str, hook: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Puts a function in a method's place, and gives the method."""
    method = getattr(target, name)
    # Pipelines look at the parameters.
    setattr(target, name, functools.wraps(method)(hook))
    try:
        yield method
    finally:
        delattr(target, name)


# ----------------------------------------------------------------------------------------------- modular pipelines


def _loop_of(pipe: Any) -> Any:
    """The denoising loop of a modular pipeline, where there is exactly one and it is known."""
    found = list(_loops(getattr(pipe, "_blocks", None)))
    return found[0] if len(found) == 1 and type(found[0]).__name__ in _LOOPS else None


def _loops(block: Any) -> Iterator[Any]:
    if hasattr(block, "loop_step"):
        yield block
        return
    for inner in (getattr(block, "sub_blocks", None) or {}).values():
        yield from _loops(inner)


def _run_modular(pipe: Any, loop: Any, steps: _Steps, call: dict[str, Any]) -> Any:
    def loop_step(components: Any, state: Any, *, i: int, t: Any) -> Any:
        if i < steps.first:
            return components, state
        if i == steps.first and steps.latents is not None:
            state.latents = steps.begin(state.latents.device)
        components, state = theirs(components, state, i=i, t=t)
        steps.done(i + 1, len(state.timesteps), state.latents)
        return components, state

    with _hooked(loop, "loop_step", loop_step) as theirs:
        return pipe(**call)
