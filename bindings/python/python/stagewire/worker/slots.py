"""A slot of a worker: takes one attempt after the other, or batch after batch, and runs the stage function on it."""

from __future__ import annotations

import json
import logging
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._bundle import Imported
from .._consume import Reader
from .._payload import to_json
from ..context import Checkpoint, Context
from ..errors import Cancelled, Invalid, StagewireError, Yielded
from ..local import as_payload
from ..stages import Payload, Result
from . import failure, threads

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .._bundle import Framework
    from .._native import Consumer, Handle, Pending, Task, Worker
    from ..stages import Stage

LOG = logging.getLogger("stagewire.worker")


class Slot:
    """Runs attempts on a thread of its own.

    Attributes:
        error: Why the slot ended, where it was not told to.
    """

    def __init__(self, worker: Worker, stage: Stage[Any], model: Any, compute_threads: int | None) -> None:
        self.error: StagewireError | None = None
        self._worker = worker
        self._stage = stage
        self._model = model
        self._threads = compute_threads

    def run(self) -> None:
        """Takes attempts until the worker is drained or the server stays away."""
        try:
            while (batch := self._worker.next_batch()) is not None:
                self._run(batch)
        except StagewireError as error:
            self.error = error

    def _run(self, tasks: list[Task]) -> None:
        """Runs a batch, often of one. Each attempt ends on its own."""
        threads.limit_this_thread(self._threads)
        batch = []
        for task in tasks:
            if task.cancelled:
                # While others of the batch were granted, or before it runs alone.
                self._fail(task, Cancelled("the attempt was told to stop before it began", reason="attempt.cancelled"))
            else:
                batch.append(task)
        if batch:
            self._run_together(batch)

    def _run_together(self, batch: list[Task]) -> None:
        try:
            contexts = [self._context(task, batch) for task in batch]
            outputs = self._stage.run_batch(contexts, self._model)
        except BaseException as error:
            # A stage may raise anything; the worker lives on.
            if len(batch) == 1:
                self._fail(batch[0], error)
                return
            text = "".join(traceback.format_exception(error)).rstrip()
            LOG.warning("raised for a batch of %d, each of which runs alone now:\n%s", len(batch), text)
        else:
            for task, output in zip(batch, outputs, strict=True):
                self._end(task, output)
            return
        # After the handler, so that nothing keeps what the batch had made.
        for task in batch:
            self._run([task])

    def _end(self, task: Task, output: object) -> None:
        try:
            if isinstance(output, BaseException):
                raise output
            if task.rank[0] > 0:
                # Rank 0 hands over for all.
                task.follow()
                return
            payload = self._payload(task, output)
            imported = Imported(payload.tensors)
            task.complete(payload.kind, imported.entries, to_json(payload.metadata))
        except BaseException as error:
            self._fail(task, error)

    def _fail(self, task: Task, error: BaseException) -> None:
        if isinstance(error, Yielded):
            LOG.info("job %s, attempt %d: %s", task.job_id, task.attempt, error)
        elif task.cancelled or isinstance(error, Cancelled):
            LOG.info("job %s, attempt %d: stopped: %s", task.job_id, task.attempt, error)
        elif not isinstance(error, StagewireError):
            text = "".join(traceback.format_exception(error)).rstrip()
            LOG.error("job %s, attempt %d:\n%s", task.job_id, task.attempt, text)
        told = failure.of(self._stage.name, error)
        task.fail(told.error_class, told.reason, told.message, told.details)

    def _context(self, task: Task, batch: list[Task]) -> Context:
        files = {param: None if path is None else Path(path) for param, path in task.files}
        return Context(
            task=_Reporter(task, batch),
            stage=self._stage.name,
            job_id=task.job_id,
            attempt=task.attempt,
            rank=task.rank[0],
            world=task.rank[1],
            params={**json.loads(task.params), **files},
            inputs={stage: TaskInput(task, stage, handle) for stage, handle in task.inputs},
        )

    def _payload(self, task: Task, output: object) -> Payload:
        if not task.last:
            return as_payload(self._stage.name, output)
        if isinstance(output, Result):
            return output.to_payload()
        raise Invalid(
            f"the last stage {self._stage.name!r} returned a {type(output).__name__}: return "
            "stagewire.Result({'name.ext': stagewire.Artefact(data)})",
            reason="stage.output",
            details={"stage": self._stage.name, "type": type(output).__name__},
        )


class _Reporter:
    """What carries out a context's wishes: its attempt, with those that run along with it."""

    def __init__(self, task: Task, batch: list[Task]) -> None:
        self._task = task
        self._batch = batch
        self.takes_checkpoints = task.takes_checkpoints
        self.resume: Checkpoint | None = None
        if task.resume is not None:
            handle, progress = task.resume
            self.resume = Checkpoint(_TaskCheckpoint(task, task.stage, handle), *progress)

    def report(self, done: int, total: int, unit: str) -> None:
        if done < 0 or total < 0:
            raise Invalid(f"progress is {done} of {total}: both count from 0", reason="stage.progress")
        try:
            self._task.progress(done, total, unit)
        except Cancelled:
            # What the others need goes on; what comes out for this one is dropped.
            if all(task.cancelled for task in self._batch):
                raise

    @property
    def cancelled(self) -> bool:
        return self._task.cancelled

    @property
    def yield_requested(self) -> bool:
        return self._task.yield_requested

    def checkpoint(self, state: Payload, done: int, total: int, unit: str) -> _Saving:
        entries = Imported(state.tensors).entries
        return _Saving(self._task.checkpoint(entries, to_json(state.metadata), done, total, unit))

    def yield_(self, state: Payload | None, done: int, total: int, unit: str) -> None:
        if state is None:
            self._task.yield_(None, "null", done, total, unit)
        else:
            self._task.yield_(Imported(state.tensors).entries, to_json(state.metadata), done, total, unit)


class _Saving:
    """A checkpoint on its way. See `stagewire.context.Saving`."""

    def __init__(self, pending: Pending) -> None:
        self._pending = pending
        self._error: StagewireError | None = None
        self._taken = False

    def done(self) -> bool:
        return self._pending.done()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._pending.wait(timeout):
            return False
        if not self._taken:
            self._taken = True
            try:
                self._pending.take()
            except StagewireError as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return True


class TaskInput:
    """One input of an attempt: a payload that another worker, or the store, holds. See `stagewire.context.Input`."""

    def __init__(self, task: Task, stage: str, handle: Handle) -> None:
        self._task = task
        self._handle = handle
        self.stage = stage

    @property
    def kind(self) -> str:
        """See `stagewire.context.Input.kind`."""
        return self._handle.kind

    @property
    def metadata(self) -> Any:
        """See `stagewire.context.Input.metadata`."""
        return json.loads(self._handle.metadata)

    @property
    def num_chunks(self) -> int:
        """See `stagewire.context.Input.num_chunks`."""
        return self._handle.num_chunks

    @property
    def nbytes(self) -> int:
        """See `stagewire.context.Input.nbytes`."""
        return self._handle.nbytes

    def fetch(self, *, framework: Framework | None = None, mapped: bool = False) -> dict[str, Any]:
        """See `stagewire.context.Input.fetch`."""
        whole: dict[str, Any] = self._reader(framework, mapped).whole()
        return whole

    def chunks(self, *, framework: Framework | None = None, mapped: bool = False) -> Iterator[dict[str, Any]]:
        """See `stagewire.context.Input.chunks`."""
        return self._reader(framework, mapped).chunks()

    def _reader(self, framework: Framework | None, mapped: bool) -> Reader:
        return Reader(self._handle, self._consume(private=not mapped), None, framework)

    def _consume(self, *, private: bool) -> Consumer:
        return self._task.consume(self.stage, private=private)


class _TaskCheckpoint(TaskInput):
    """The checkpoint that an attempt goes on from."""

    def _consume(self, *, private: bool) -> Consumer:
        return self._task.consume_checkpoint(private=private)
