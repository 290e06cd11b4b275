"""Exceptions of stage functions as failures that others can read."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import NamedTuple

from .._arguments import printable
from ..errors import StagewireError


class StageFailure(NamedTuple):
    """An exception in the form that crosses processes."""

    error_class: str
    reason: str
    message: str
    details: dict[str, str]


def of(stage: str, error: BaseException) -> StageFailure:
    """The failure for an exception that a stage function raised.

    Stagewire's own exceptions keep class and reason. A `ValueError` is the model's judgement of the parameters, so it
    is ``invalid``; memory that ran out is ``exhausted``; any other exception is ``internal``.
    """
    details = {"stage": stage, "exception": _name(type(error)), "at": _place(error)}
    if isinstance(error, StagewireError):
        message = f"stage {stage!r}: {printable(error)}"
        own = {printable(name): printable(value) for name, value in error.details.items()}
        return StageFailure(error.error_class, printable(error.reason), message, {**details, **own})
    text = printable(error)
    message = f"stage {stage!r} raised {_name(type(error))}" + (f": {text}" if text else "")
    return StageFailure(_class(error), "stage.exception", message, details)


def _class(error: BaseException) -> str:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return "exhausted"
    if isinstance(error, ModuleNotFoundError | NotImplementedError):
        return "unsupported"
    if isinstance(error, ValueError):
        return "invalid"
    return "internal"


def _name(kind: type[BaseException]) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
