"""What a stage function sees of its job: parameters, inputs, progress and cancellation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Protocol

from .errors import Invalid, NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ._bundle import Framework

__all__ = ["Context", "Input"]


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


class Task(Protocol):
    """What carries out a context's wishes: a worker's attempt, or a run in this process."""

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
        """The same attempt as a part of its stage sees it that has a name and inputs of its own."""
        return Context(
            task=self._task,
            stage=stage,
            job_id=self.job_id,
            attempt=self.attempt,
            params=self.params,
            inputs=inputs,
            rank=self.rank,
            world=self.world,
        )

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

    def __repr__(self) -> str:
        shown = json.dumps(self.params, ensure_ascii=False)
        shown = shown if len(shown) <= 200 else shown[:200] + "…"
        return f"Context(stage={self.stage!r}, job_id={self.job_id!r}, attempt={self.attempt}, params={shown})"


class _Inputs(dict[str, Input]):
    def __init__(self, stage: str, inputs: Mapping[str, Input]) -> None:
        super().__init__(inputs)
        self._stage = stage

    def __missing__(self, name: str) -> Input:
        have = ", ".join(sorted(self)) or "none"
        raise NotFound(f"stage {self._stage!r} has no input from {name!r}; its inputs: {have}", reason="stage.input")
