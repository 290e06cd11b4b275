"""Loads a pipeline: a Python file whose decorated functions are the stages."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Internal, Invalid, NotFound, StagewireError
from .stages import Stage

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import ModuleType

__all__ = ["Pipeline", "load"]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of one pipeline module.

    Attributes:
        path: The module's file.
        stages: Stages by name, in the order of definition.
    """

    path: Path
    stages: Mapping[str, Stage[Any]]

    def stage(self, name: str) -> Stage[Any]:
        """The stage of this name.

        Raises:
            NotFound: There is none; the message lists those there are.
        """
        found = self.stages.get(name)
        if found is not None:
            return found
        have = ", ".join(self.stages)
        near = difflib.get_close_matches(name, self.stages, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise NotFound(
            f"{self.path} has no stage {name!r}{hint}; its stages: {have}",
            reason="pipeline.stage",
            details={"pipeline": str(self.path), "stage": name, "stages": have},
        )


def load(path: str | os.PathLike[str]) -> Pipeline:
    """Imports the file and collects its stages.

    The file's folder is put on ``sys.path``, so that it can import its neighbours.

    Raises:
        NotFound: There is no such file.
        Internal: The module raised while it was imported; the message names the file and line.
        Invalid: The module has no stage, or two of the same name.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise NotFound(
            f"there is no pipeline file {file}", reason="pipeline.not_found", details={"pipeline": str(file)}
        )
    module = _import(file)
    stages: dict[str, Stage[Any]] = {}
    for found in _collect(vars(module).values()):
        if stages.setdefault(found.name, found) is not found:
            raise Invalid(
                f"{file} defines stage {found.name!r} twice: give each stage a name of its own",
                reason="pipeline.duplicate_stage",
            )
    if not stages:
        raise Invalid(
            f'{file} defines no stage: decorate a function with @stagewire.stage("name")', reason="pipeline.no_stages"
        )
    return Pipeline(path=file, stages=stages)


def _collect(values: Iterable[object]) -> Iterator[Stage[Any]]:
    """Stages among a module's values, each once: alone, or in a list as `stagewire.modular.stages` makes it."""
    seen: set[int] = set()
    for value in values:
        group = value if isinstance(value, list | tuple) else (value,)
        for item in group:
            if isinstance(item, Stage) and id(item) not in seen:
                seen.add(id(item))
                yield item


def _import(file: Path) -> ModuleType:
    name = f"stagewire_pipeline_{file.stem}"
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise Invalid(f"{file} is not a Python file: its name must end in .py", reason="pipeline.not_python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise code_error(file, error, "while it was imported") from error
    return module


def code_error(path: Path, error: Exception, when: str) -> StagewireError:
    """The exception for one that the pipeline's own code raised; names file and line.

    Args:
        path: The pipeline's file.
        error: What was raised.
        when: Completes "raised …": "while it was imported".
    """
    file = path.resolve()
    where = f"{file}:{_line(file, error)}"
    details = {"pipeline": str(file), "at": where, "exception": type(error).__name__}
    if isinstance(error, ModuleNotFoundError) and error.name:
        top = error.name.partition(".")[0]
        return Internal(
            f"{where} imports {error.name!r}, which this Python ({sys.executable}) does not have: "
            f"install {top} there, or choose another Python with --python",
            reason="pipeline.import",
            details=details,
        )
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Internal(f"{where} raised {when}: {text}", reason="pipeline.code", details=details)


def _line(file: Path, error: Exception) -> int:
    """The line of `file` that the exception passed through last."""
    if isinstance(error, SyntaxError) and error.filename == str(file):
        return error.lineno or 1
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    return (lines[-1] if lines else None) or 1
