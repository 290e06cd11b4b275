"""What a stage function sees of checkpoints: boundaries, yielding, going on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import stagewire
from stagewire import errors, local
from stagewire.context import Context


class Saved:
    """A checkpoint that is saved, or under way until it is."""

    def __init__(self, ended: bool) -> None:
        self.ended = ended

    def done(self) -> bool:
        return self.ended

    def wait(self, timeout: float | None = None) -> bool:
        return self.ended


class FakeTask:
    """An attempt that does what the test says, and remembers what it was told."""

    cancelled = False
    takes_checkpoints = True
    resume = None

    def __init__(self) -> None:
        self.yield_requested = False
        self.told: list[Any] = []
        self.saved = Saved(ended=True)
        self.failure: Exception | None = None

    def report(self, done: int, total: int, unit: str) -> None:
        self.told.append(done)

    def checkpoint(self, state: stagewire.Payload, done: int, total: int, unit: str) -> Saved:
        self.told.append(("checkpoint", state, done))
        if self.failure:
            raise self.failure
        return self.saved

    def yield_(self, state: stagewire.Payload | None, done: int, total: int, unit: str) -> None:
        self.told.append(("yield", state, done))
        if self.failure:
            raise self.failure


def context(task: FakeTask) -> Context:
    return Context(task=task, stage="denoise", job_id="j", attempt=1, params={}, inputs={})


def test_a_boundary_saves_when_it_is_time_and_none_is_under_way() -> None:
    task = FakeTask()
    ctx = context(task)
    calls: list[int] = []

    def state() -> stagewire.Bundle:
        calls.append(1)
        return {"x": np.zeros(2)}

    ctx.boundary(state, done=1, total=9)
    assert not calls, "30 s are not over"
    ctx.boundary(state, done=2, total=9, every=0)
    assert [told[0] for told in task.told if isinstance(told, tuple)] == ["checkpoint"]
    ctx.boundary(state, done=3, total=9, every=None)
    task.saved.ended = False
    ctx.boundary(state, done=4, total=9, every=0)
    assert len(calls) == 1, "one is under way"
    task.saved.ended = True
    ctx.boundary(state, done=5, total=9, every=0)
    assert len(calls) == 2
    task.yield_requested = True
    ctx.boundary(state, done=9, total=9, every=0)
    assert len(calls) == 2, "there is nothing to go on with"
    assert [told for told in task.told if isinstance(told, int)] == [1, 2, 3, 4, 5, 9]


def test_where_the_total_is_not_known_no_step_is_the_last() -> None:
    task = FakeTask()
    ctx = context(task)
    ctx.boundary(lambda: {"x": np.zeros(1)}, done=1, total=0, every=0)
    assert [told[0] for told in task.told if isinstance(told, tuple)] == ["checkpoint"]
    task.yield_requested = True
    with pytest.raises(stagewire.Yielded, match="yielded after 2 steps"):
        ctx.boundary(lambda: {"x": np.zeros(1)}, done=2, total=0)


def test_a_boundary_yields_where_it_is_asked_to() -> None:
    task = FakeTask()
    task.yield_requested = True
    x: Any = np.ones(3, dtype=np.float32)
    with pytest.raises(stagewire.Yielded, match="yielded after 4 of 9 steps") as yielded:
        context(task).boundary(lambda: stagewire.Payload({"x": x, "none": None}, metadata=[1]), done=4, total=9)
    assert not isinstance(yielded.value, Exception), "`except Exception` lets it pass"
    _, state, done = task.told[-1]
    x[:] = 0
    assert (state.kind, state.metadata, done) == ("checkpoint", [1], 4)
    assert np.from_dlpack(state.tensors["x"]).tolist() == [1, 1, 1], "a copy"
    assert yielded.value.checkpoint is state


def test_what_cannot_be_saved_is_logged_and_the_attempt_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    task = FakeTask()
    task.failure = errors.Exhausted("the store is full", reason="store.full")
    ctx = context(task)
    for done in (1, 2):
        task.yield_requested = done == 2
        ctx.boundary(lambda: {"x": np.zeros(1)}, done=done, total=9, every=0)
        assert f"not saved after {done} steps: the store is full" in caplog.text
    with pytest.raises(errors.Exhausted):
        ctx.yield_({"x": np.zeros(1)}, done=3)
    # What the function itself does wrong, and what it must heed, are its own.
    with pytest.raises(errors.Invalid, match="a bundle is a mapping"):
        ctx.boundary(lambda: 3, done=4, total=9)  # type: ignore[arg-type,return-value]
    task.failure = errors.Cancelled("stop", reason="job.cancelled")
    with pytest.raises(errors.Cancelled):
        ctx.boundary(dict, done=5, total=9)


def test_a_stage_that_takes_none_saves_nothing_and_cannot_yield() -> None:
    task = FakeTask()
    task.takes_checkpoints = False
    task.yield_requested = True
    ctx = context(task)
    ctx.boundary(lambda: pytest.fail("not needed"), done=1, total=9, every=0)
    assert ctx.checkpoint({}, done=1) is None
    with pytest.raises(errors.Invalid, match="takes no checkpoints") as refused:
        ctx.yield_({}, done=1)
    assert (refused.value.reason, task.told) == ("task.checkpoint", [1])


def test_a_part_of_a_fused_stage_takes_none() -> None:
    @stagewire.stage("first")
    def first(ctx: stagewire.Context) -> stagewire.Bundle:
        assert ctx.resume is None
        assert not ctx.takes_checkpoints
        assert not ctx.yield_requested
        ctx.boundary(dict, done=1, total=2)
        return {"x": np.ones(1)}

    fused = stagewire.fuse("all", [first])
    resume = stagewire.Yielded(stagewire.Payload({}), 1, 2, "step")
    assert local.run_stage(fused, {}, {}, yield_after=0, resume=resume)["x"].tolist() == [1]


@stagewire.stage("count")
def count(ctx: stagewire.Context) -> stagewire.Bundle:
    x: Any = np.zeros(2)
    start = 0
    if ctx.resume is not None:
        x, start = ctx.resume.tensors["x"], ctx.resume.done
        assert ctx.resume.metadata == {"start": start}
        assert ctx.resume.tensors["x"] is x, "fetched once"
        assert ctx.resume.fetch(framework="numpy")["x"] is not x
    for step in range(start, 4):
        x += step
        ctx.boundary(lambda: stagewire.Payload({"x": x}, metadata={"start": step + 1}), done=step + 1, total=4)  # noqa: B023
    return {"x": x}


def test_a_stage_goes_on_where_it_stopped() -> None:
    state = None
    for done in (1, 2, 3):
        with pytest.raises(stagewire.Yielded) as yielded:
            local.run_stage(count, {}, {}, yield_after=done, resume=state)
        state = yielded.value
        assert (state.done, state.total, state.unit) == (done, 4, "step")
    assert local.run_stage(count, {}, {}, resume=state)["x"].tolist() == [6, 6]
    assert local.run_stage(count, {}, {})["x"].tolist() == [6, 6]


def test_a_bundle_is_copied_before_checkpoint_returns() -> None:
    torch = pytest.importorskip("torch")
    task = FakeTask()
    strided = torch.arange(6.0).reshape(2, 3).T
    saving = context(task).checkpoint({"x": strided, "many": [strided[0], strided]}, done=1)
    assert saving is not None
    assert saving.done()
    expected = strided.clone()
    strided.zero_()
    _, state, _ = task.told[-1]
    assert torch.equal(torch.from_dlpack(state.tensors["x"]), expected)
    assert torch.equal(torch.from_dlpack(state.tensors["many"][0]), expected[0])
