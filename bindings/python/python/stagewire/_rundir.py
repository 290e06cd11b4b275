"""Where a deployment keeps what its processes tell each other: the run directory."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from . import _arguments
from .errors import Corrupt, Unavailable, Unsupported


def find(run_dir: str | os.PathLike[str] | None = None) -> Path:
    """The argument, else ``STAGEWIRE_RUN_DIR``, else under ``XDG_RUNTIME_DIR``, else one under the temporary folder."""
    if run_dir is not None:
        return _arguments.path("run_dir", run_dir)
    if named := os.environ.get("STAGEWIRE_RUN_DIR"):
        return Path(named)
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "stagewire"
    # The server makes it 0700 and checks its owner.
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"stagewire-{os.getuid()}"  # noqa: S108


@dataclass(frozen=True, slots=True)
class Server:
    """What a running server says of itself in ``server.json``."""

    url: str
    pipeline: str


def server(run_dir: Path) -> Server:
    """Reads ``server.json``.

    Raises:
        Unavailable: No server runs there.
        Unsupported: The file is of a newer version.
        Corrupt: The file is not what a server writes.
    """
    path = run_dir / "server.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise Unavailable(
            f"no Stagewire server runs in {run_dir}: start one with `stagewire up PIPELINE.toml`, "
            "or name another place with run_dir=, url= or STAGEWIRE_RUN_DIR",
            reason="server.none",
            details={"run_dir": str(run_dir)},
        ) from None
    details = {"path": str(path)}
    try:
        found = json.loads(text)
        schema, http, pipeline = found["schema"], str(found["http"]), str(found["pipeline"])
    except (ValueError, KeyError, TypeError) as error:
        raise Corrupt(
            f"{path} is not what a server writes: {error!r}", reason="server.run_dir", details=details
        ) from None
    if schema != 1:
        raise Unsupported(
            f"{path} has schema {schema}, this package reads schema 1: update the package",
            reason="server.run_dir",
            details={**details, "found": str(schema), "expected": "1"},
        )
    url = http if "://" in http else f"http://{http}"
    return Server(url=url, pipeline=pipeline)
