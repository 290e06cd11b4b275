"""Runs a pipeline's stages one after the other in this process, without a server: to try and to test them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from ._bundle import Imported, cut, exporter
from ._inputs import as_files
from ._payload import to_json
from .context import Checkpoint, Context
from .errors import Invalid
from .stages import Payload, Result, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ._bundle import Framework
    from .errors import Yielded

__all__ = ["run", "run_stage"]


def run(
    stages: Sequence[Stage[Any]],
    params: Mapping[str, Any],
    *,
    num_chunks: int = 1,
    chunk_dim: int = 0,
    on_progress: Callable[[str, int, int, str], None] | None = None,
) -> Result:
    """Runs a chain of stages, each on the output of the one before, and returns what the last one returns.

    Args:
        stages: The stages, first to last. Each is loaded before it runs.
        params: Parameters of the job. A picture or another file is given as a `pathlib.Path` or as bytes.
        num_chunks: Chunks in which the last stage gets its input.
        chunk_dim: The dimension that they are cut along.
        on_progress: Called with (stage, done, total, unit).

    Raises:
        Invalid: A stage returned what it must not.
        Exception: Whatever a stage function raises.
    """
    with as_files(params) as given:
        return _run(stages, given, num_chunks, chunk_dim, on_progress)


def _run(
    stages: Sequence[Stage[Any]],
    params: Mapping[str, Any],
    num_chunks: int,
    chunk_dim: int,
    on_progress: Callable[[str, int, int, str], None] | None,
) -> Result:
    inputs: dict[str, Payload] = {}
    for index, stage in enumerate(stages):
        last = index + 1 == len(stages)
        chunks = (num_chunks, chunk_dim) if last else (1, 0)
        output = run_stage(stage, params, inputs, num_chunks=chunks[0], chunk_dim=chunks[1], on_progress=on_progress)
        if last:
            if not isinstance(output, Result):
                raise Invalid(
                    f"the last stage {stage.name!r} returned a {type(output).__name__}, not a stagewire.Result",
                    reason="stage.output",
                )
            return output
        inputs = {stage.name: as_payload(stage.name, output)}
    raise Invalid("there is no stage to run", reason="pipeline.no_stages")


def run_stage(
    stage: Stage[Any],
    params: Mapping[str, Any],
    inputs: Mapping[str, Payload],
    *,
    model: Any = None,
    num_chunks: int = 1,
    chunk_dim: int = 0,
    on_progress: Callable[[str, int, int, str], None] | None = None,
    yield_after: int | None = None,
    resume: Yielded | None = None,
) -> Any:
    """Runs one stage on payloads in memory, and returns what it returns.

    To see that a stage comes out the same though it is interrupted:

    ```python
    with pytest.raises(stagewire.Yielded) as yielded:
        run_stage(denoise, params, inputs, yield_after=2)
    latents = run_stage(denoise, params, inputs, resume=yielded.value)
    ```

    Args:
        stage: The stage.
        params: Parameters of the job.
        inputs: Its inputs, by the name of the stage that made them.
        model: Used in place of what its setup would load.
        num_chunks: Chunks in which it gets its inputs.
        chunk_dim: The dimension that they are cut along.
        on_progress: Called with (stage, done, total, unit).
        yield_after: Asks it to yield once it has reported so many units.
        resume: What an earlier run raised when it was asked to.

    Raises:
        Yielded: It has done what was asked.
        Exception: Whatever the stage function raises.
    """
    loaded = stage.load() if model is None else model
    given = {name: LocalInput(name, payload, num_chunks, chunk_dim) for name, payload in inputs.items()}
    task = _LocalTask(stage.name, on_progress, yield_after, resume)
    with as_files(params) as files:
        ctx = Context(task=task, stage=stage.name, job_id=str(uuid.uuid4()), attempt=1, params=files, inputs=given)
        return stage.run(ctx, loaded)


def as_payload(stage: str, output: Any) -> Payload:
    """What a stage that is not the last returned, as a payload.

    Raises:
        Invalid: It is neither a bundle nor a payload.
    """
    if isinstance(output, Payload):
        return output
    if output is None:
        return Payload({})
    if isinstance(output, Result) or not hasattr(output, "items"):
        raise Invalid(
            f"stage {stage!r} returned a {type(output).__name__}: a stage that another one follows returns "
            "{name: tensor | None | [tensor, ...]} or a stagewire.Payload",
            reason="stage.output",
            details={"stage": stage, "type": type(output).__name__},
        )
    return Payload(output)


class _LocalTask:
    cancelled = False
    takes_checkpoints = True

    def __init__(
        self,
        stage: str,
        on_progress: Callable[[str, int, int, str], None] | None,
        yield_after: int | None,
        resume: Yielded | None,
    ) -> None:
        self._stage = stage
        self._on_progress = on_progress
        self._yield_after = yield_after
        self.yield_requested = yield_after == 0
        self.resume: Checkpoint | None = None
        if resume is not None and resume.checkpoint is not None:
            source = LocalInput(stage, resume.checkpoint)
            self.resume = Checkpoint(source, resume.done, resume.total, resume.unit)

    def report(self, done: int, total: int, unit: str) -> None:
        if self._on_progress is not None:
            self._on_progress(self._stage, done, total, unit)
        self.yield_requested = self._yield_after is not None and done >= self._yield_after

    def checkpoint(self, state: Payload, done: int, total: int, unit: str) -> _Saved:  # noqa: ARG002 - for nobody here
        _check(state)
        return _Saved()

    def yield_(self, state: Payload | None, done: int, total: int, unit: str) -> None:  # noqa: ARG002 - in `Yielded`
        if state is not None:
            _check(state)


class _Saved:
    """There is nowhere to save it to."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002 - nothing to wait for
        return True


def _check(state: Payload) -> None:
    """Refuses what a worker could not publish."""
    Imported(state.tensors)
    to_json(state.metadata)


class LocalInput:
    """One input of a stage: a payload in the memory of this process. See `stagewire.context.Input`."""

    def __init__(self, stage: str, payload: Payload, num_chunks: int = 1, chunk_dim: int = 0) -> None:
        self.stage = stage
        self.kind = payload.kind
        self.metadata = payload.metadata
        self.num_chunks = num_chunks
        self._dim = chunk_dim
        self._bundle = Imported(payload.tensors)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, value in self._bundle.entries for tensor in _tensors(value))

    def fetch(self, *, framework: Framework | None = None, mapped: bool = False) -> dict[str, Any]:
        tensors = [tensor for _, value in self._bundle.entries for tensor in _tensors(value)]
        export = exporter(framework, (tensor.dtype for tensor in tensors))
        return {
            name: None
            if value is None
            else [_give(export(t), mapped) for t in value]
            if isinstance(value, list)
            else _give(export(value), mapped)
            for name, value in self._bundle.entries
        }

    def chunks(self, *, framework: Framework | None = None, mapped: bool = False) -> Iterator[dict[str, Any]]:
        whole = self.fetch(framework=framework, mapped=mapped)
        if self.num_chunks == 1:
            yield whole
            return
        for index in range(self.num_chunks):
            yield {name: self._cut(value, index) for name, value in whole.items()}

    def _cut(self, value: Any, index: int) -> Any:
        if value is None:
            return None
        if isinstance(value, list):
            return [self._cut(item, index) for item in value]
        base, longer = divmod(int(value.shape[self._dim]), self.num_chunks)
        start = index * base + min(index, longer)
        return cut(value, self._dim, start, base + (index < longer))


def _tensors(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _give(tensor: Any, mapped: bool) -> Any:
    if mapped:
        return tensor
    return tensor.clone() if hasattr(tensor, "clone") else tensor.copy()
