"""What a stage function sees of its job: parameters, inputs, progress, cancellation and checkpoints."""

from __future__ import annotations

import json
import logging
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from .errors import Cancelled, Invalid, NotFound, StagewireError, Yielded
from .stages import Payload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._bundle import Framework
    from .stages import Bundle

__all__ = ["Checkpoint", "Context", "Input", "Saving"]

LOG = logging.getLogger("stagewire.worker")


class Input(Protocol):
    """One payload that a stage was given.

    Reading it again starts over: each call of `fetch` or `chunks` sees the whole payload.
    """

    @property
    def stage(self) -> str:
        """Name of the stage that produced it."""

    @property
    def kind(self) -> str:
        """``embedding``, ``latent``, ``checkpoint``, ``feature`` or ``frames``."""

    @property
    def metadata(self) -> Any:
        """The producer's metadata: any JSON-like value, None where there is none."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks that it arrives in, at least 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""

    def fetch(self, *, framework: Framework | None = None, mapped: bool = False) -> dict[str, Any]:
        """Waits for the whole payload: ``{name: tensor | None | [tensor, ...]}``, as published.

        Args:
            framework: ``torch``, ``numpy`` or ``native``. By default torch tensors where torch is imported or the
                dtype needs it, else NumPy arrays.
            mapped: Give views of the holder's memory where that can be mapped, without a copy. They **must not be
                written to**: torch does not know of read-only tensors, and the write ends the process. By default
                the tensors are the stage's own, copied once, and may be written to.

        Raises:
            Unavailable: The producer died (reason ``peer.lost``).
            Cancelled: The attempt was cancelled.
            StagewireError: The producer failed; class and reason are its own.
        """

    def chunks(self, *, framework: Framework | None = None, mapped: bool = False) -> Iterator[dict[str, Any]]:
        """Yields chunk after chunk, in order, each as soon as it is there.

        Each is ``{name: tensor}`` with the tensors cut along the chunk dimension: ``[B, C, t, H, W]`` of
        ``[B, C, T, H, W]``. A payload that is not cut is one chunk. Arguments and errors are those of `fetch`.
        """


class Checkpoint:
    """What an attempt before this one has left: the state of the stage function after some steps.

    Attributes:
        done: Units that are done.
        total: Units in all; 0 where that is not known.
        unit: What is counted.
    """

    def __init__(self, source: Input, done: int, total: int, unit: str) -> None:
        self.done = done
        self.total = total
        self.unit = unit
        self._source = source
        self._tensors: dict[str, Any] | None = None

    @property
    def metadata(self) -> Any:
        """The metadata that were saved with the tensors."""
        return self._source.metadata

    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors that were saved, by name: fetched when they are first looked at, and the stage's own then.

        Raises:
            Unavailable: Who held them is gone. Let it pass: the stage then runs from its beginning, and nobody is to
                blame.
        """
        if self._tensors is None:
            self._tensors = self._source.fetch()
        return self._tensors

    def fetch(self, *, framework: Framework | None = None) -> dict[str, Any]:
        """The tensors anew, as `Input.fetch` gives them."""
        return self._source.fetch(framework=framework)


class Saving(Protocol):
    """A checkpoint on its way to safety."""

    def done(self) -> bool:
        """Whether that has ended, well or not."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the server has been told of it; False where that takes more than `timeout` seconds.

        Raises:
            StagewireError: It could not be saved. The attempt goes on.
        """


class Task(Protocol):
    """What carries out a context's wishes: a worker's attempt, or a run in this process."""

    @property
    def takes_checkpoints(self) -> bool:
        """Whether the state of the function can be handed over."""

    @property
    def resume(self) -> Checkpoint | None:
        """What an attempt before this one has left."""

    @property
    def yield_requested(self) -> bool:
        """Whether the attempt should stop at its next step boundary."""

    def checkpoint(self, state: Payload, done: int, total: int, unit: str) -> Saving:
        """Saves the state."""

    def yield_(self, state: Payload | None, done: int, total: int, unit: str) -> None:
        """Hands over the state and ends the attempt."""

    def report(self, done: int, total: int, unit: str) -> None:
        """Reports progress.

        Raises:
            Cancelled: The attempt must stop.
        """

    @property
    def cancelled(self) -> bool:
        """Whether the attempt must stop."""


class Context:
    """One attempt of one stage of one job, as its stage function sees it.

    Attributes:
        params: Parameters of the job by name. One of type ``input`` is the `pathlib.Path` of its file, which must not
            be changed; None where the job gives none.
        inputs: Inputs by the name of the stage that produced them; none from a stage that the job skips.
        job_id: Id of the job, a UUID.
        stage: Name of this stage.
        attempt: Counts the attempts of the job, over all its stages.
        rank: Which process of its group this is, from 0 on; 0 where the worker is on its own. What ranks above 0 return
            is dropped: rank 0 hands over for all.
        world: Number of processes that run this attempt together.
    """

    def __init__(
        self,
        *,
        task: Task,
        stage: str,
        job_id: str,
        attempt: int,
        params: Mapping[str, Any],
        inputs: Mapping[str, Input],
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.params: dict[str, Any] = dict(params)
        self.inputs: dict[str, Input] = _Inputs(stage, inputs)
        self.job_id = job_id
        self.stage = stage
        self.attempt = attempt
        self.rank = rank
        self.world = world
        self._task = task
        self._whole = True
        self._saving: Saving | None = None
        self._saved_at = time.monotonic()

    @property
    def input(self) -> Input:
        """The one input.

        Raises:
            Invalid: The stage has no input, or several: then say which, ``ctx.inputs["encode"]``.
        """
        if len(self.inputs) == 1:
            return next(iter(self.inputs.values()))
        have = ", ".join(sorted(self.inputs)) or "none"
        raise Invalid(
            f"stage {self.stage!r} has {len(self.inputs)} inputs ({have}): ctx.input is for stages with one, "
            "use ctx.inputs[STAGE]",
            reason="stage.input",
        )

    def within(self, stage: str, inputs: Mapping[str, Input]) -> Context:
        """The same attempt as a part of its stage sees it that has a name and inputs of its own.

        It takes no checkpoints: the stage could not go on from the state of a part.
        """
        part = Context(
            task=self._task,
            stage=stage,
            job_id=self.job_id,
            attempt=self.attempt,
            params=self.params,
            inputs=inputs,
            rank=self.rank,
            world=self.world,
        )
        part._whole = False
        return part

    def progress(self, done: int, total: int, unit: str = "step") -> None:
        """Says how far the attempt has come, and is where a cancelled one stops.

        Progress also keeps the attempt alive: one that reports none for ``no-progress`` is given to another worker.

        Args:
            done: Units done.
            total: Units in all; 0 where that is not known.
            unit: What is counted, in the singular: ``step``, ``frame``.

        Raises:
            Cancelled: The attempt must stop. Let it pass.
        """
        self._task.report(done, total, unit)

    @property
    def cancelled(self) -> bool:
        """Whether the attempt must stop, for code that would rather look than catch `Cancelled`."""
        return self._task.cancelled

    @property
    def takes_checkpoints(self) -> bool:
        """Whether this stage can hand over its state: ``checkpoint = true`` in the pipeline's TOML.

        In a group, rank 0 alone does.
        """
        return self._whole and self._task.takes_checkpoints

    @property
    def resume(self) -> Checkpoint | None:
        """Where to go on: the last checkpoint of the attempts before this one. None where there is none."""
        return self._task.resume if self._whole else None

    @property
    def yield_requested(self) -> bool:
        """Whether this attempt should stop at its next step boundary, and hand over its state.

        Somebody more urgent waits, or this worker is to leave. A function that never looks goes on. In a group, rank 0
        alone is asked; once it has yielded, the others are cancelled.
        """
        return self.takes_checkpoints and self._task.yield_requested

    def checkpoint(self, state: Bundle | Payload, *, done: int, total: int = 0, unit: str = "step") -> Saving | None:
        """Saves the state of the function: an attempt that comes after this one, on any worker, starts with it.

        The tensors are copied before this returns, and may be written to then; saving goes on meanwhile. A further call
        waits for the one before. One that fails on its way is logged, and changes nothing for the attempt. A stage that
        takes no checkpoints saves nothing.

        Args:
            state: Everything that the steps change, as a bundle of tensors or, with metadata, a `Payload`; its kind is
                always ``checkpoint``.
            done: Units done; a state with no more of them than the last one is dropped.
            total: Units in all; 0 where that is not known.
            unit: What is counted, in the singular.

        Returns:
            What to wait for, for whom that matters; None where nothing is saved.

        Raises:
            Cancelled: The attempt must stop. Let it pass.
            Invalid: It is no bundle.
            StagewireError: This process has no room for it, say. The attempt goes on.
        """
        if not self.takes_checkpoints:
            return None
        self._saved_at = time.monotonic()
        self._saving = self._task.checkpoint(_state(state), done, total, unit)
        return self._saving

    def yield_(
        self, state: Bundle | Payload | None = None, *, done: int, total: int = 0, unit: str = "step"
    ) -> NoReturn:
        """Hands over the state and ends the attempt, as `yield_requested` asks: the job waits for a worker again.

        Args:
            state: As for `checkpoint`. Without any, the next attempt goes on from the last checkpoint, or begins anew.
            done: Units done.
            total: Units in all; 0 where that is not known.
            unit: What is counted, in the singular.

        Raises:
            Yielded: Always, once the attempt has ended. Let it pass.
            Cancelled: The attempt must stop. Let it pass.
            Invalid: The stage takes no checkpoints, or it is no bundle. The attempt goes on.
            StagewireError: The state could not be saved. The attempt goes on.
        """
        if not self.takes_checkpoints:
            raise Invalid(
                f"stage {self.stage!r} takes no checkpoints, so that nobody could go on from here: look at "
                "ctx.yield_requested first, and see `checkpoint` in the pipeline's TOML",
                reason="task.checkpoint",
            )
        handed_over = None if state is None else _state(state)
        self._task.yield_(handed_over, done, total, unit)
        raise Yielded(handed_over, done, total, unit)

    def boundary(
        self,
        state: Callable[[], Bundle | Payload],
        *,
        done: int,
        total: int,
        unit: str = "step",
        every: float | None = 30.0,
    ) -> None:
        """All there is to do between two steps: reports progress, saves the state now and then, yields where asked.

        ```python
        start = ctx.resume.done if ctx.resume else 0
        latents = ctx.resume.tensors["latents"] if ctx.resume else noise(ctx.params["seed"])
        for step in range(start, steps):
            latents = denoise(latents, step)
            ctx.boundary(lambda: {"latents": latents}, done=step + 1, total=steps)
        ```

        A state that cannot be saved is logged, and the attempt goes on. After the last step it only reports.

        Args:
            state: Makes what `checkpoint` takes; called only where it is needed.
            done: Units done.
            total: Units in all; 0 where that is not known, so that every step may be followed by another.
            unit: What is counted, in the singular.
            every: Seconds between two checkpoints, which is what a worker that dies costs at most; None saves the state
                only to yield.

        Raises:
            Cancelled: The attempt must stop. Let it pass.
            Yielded: The attempt has ended. Let it pass.
        """
        self.progress(done, total, unit)
        if 0 < total <= done or not self.takes_checkpoints:
            return
        try:
            if self.yield_requested:
                self.yield_(state(), done=done, total=total, unit=unit)
            due = every is not None and time.monotonic() - self._saved_at >= every
            # The next one would wait for one that is still under way.
            if due and (self._saving is None or self._saving.done()):
                self.checkpoint(state(), done=done, total=total, unit=unit)
        except (Cancelled, Invalid):
            raise
        except StagewireError as error:
            LOG.warning("job %s, attempt %d: not saved after %d %ss: %s", self.job_id, self.attempt, done, unit, error)

    def __repr__(self) -> str:
        shown = json.dumps(self.params, ensure_ascii=False)
        shown = shown if len(shown) <= 200 else shown[:200] + "…"
        return f"Context(stage={self.stage!r}, job_id={self.job_id!r}, attempt={self.attempt}, params={shown})"


def _state(state: Bundle | Payload) -> Payload:
    """What is saved: copies, so that the function may go on."""
    from ._bundle import snapshot

    tensors, metadata = (state.tensors, state.metadata) if isinstance(state, Payload) else (state, None)
    return Payload(snapshot(tensors), metadata=metadata, kind="checkpoint")


class _Inputs(dict[str, Input]):
    def __init__(self, stage: str, inputs: Mapping[str, Input]) -> None:
        super().__init__(inputs)
        self._stage = stage

    def __missing__(self, name: str) -> Input:
        have = ", ".join(sorted(self)) or "none"
        raise NotFound(f"stage {self._stage!r} has no input from {name!r}; its inputs: {have}", reason="stage.input")
