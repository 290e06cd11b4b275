"""Files that jobs are given: what is one, its media type, its bytes."""

from __future__ import annotations

import contextlib
import mimetypes
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import TypeIs

PIECE = 1 << 20
"""Bytes of a file that are read at once."""


def is_bytes(value: object) -> TypeIs[bytes | bytearray | memoryview]:
    """Whether these are the bytes of a file."""
    return isinstance(value, bytes | bytearray | memoryview)


def in_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that are files: paths and bytes."""
    return {name: value for name, value in params.items() if is_bytes(value) or isinstance(value, os.PathLike)}


def check(files: Mapping[str, Any], specs: Mapping[str, Any]) -> None:
    """Refuses files where the pipeline takes none.

    Raises:
        Invalid: A parameter is of another type, or there is none of this name.
    """
    for name in files:
        kind = specs[name]["type"] if name in specs else None
        if kind != "input":
            is_what = "the pipeline has no such parameter" if kind is None else f"it is of type {kind}"
            takes = ", ".join(name for name, spec in specs.items() if spec["type"] == "input") or "none"
            raise Invalid(
                f"parameter {name!r} is given a file, and {is_what}; parameters that take files: {takes}",
                reason="client.params",
                details={"param": name},
            )


def headers(source: str | os.PathLike[str] | bytes | bytearray | memoryview, media_type: str | None) -> dict[str, str]:
    """What the server is told of a file before its bytes.

    Raises:
        OSError: It cannot be read.
    """
    if is_bytes(source):
        size, guessed = memoryview(source).nbytes, None
    else:
        size, guessed = Path(source).stat().st_size, mimetypes.guess_type(os.fspath(source))[0]
    return {
        "content-type": media_type or guessed or "application/octet-stream",
        "content-length": str(size),
    }


def pieces(source: str | os.PathLike[str] | bytes | bytearray | memoryview) -> Iterator[bytes]:
    """The bytes of a file, piece by piece."""
    if is_bytes(source):
        yield bytes(source)
        return
    with Path(source).open("rb") as file:
        while piece := file.read(PIECE):
            yield piece


@contextlib.contextmanager
def as_files(params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Parameters as a worker has them: those that are bytes are files for as long as this lasts."""
    files = in_params(params)
    if not files:
        yield dict(params)
        return
    with tempfile.TemporaryDirectory(prefix="stagewire-") as folder:
        paths = {}
        for index, (name, value) in enumerate(files.items()):
            if is_bytes(value):
                paths[name] = Path(folder) / str(index)
                paths[name].write_bytes(value)
                paths[name].chmod(0o400)
            else:
                paths[name] = Path(value)
        yield {**params, **paths}
