"""What a worker is told: command line, environment, and the pipeline's TOML file where it is given one."""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _rundir
from .._native import parse_bytes
from ..errors import Invalid, NotFound, StagewireError

if TYPE_CHECKING:
    from collections.abc import Sequence

_ARENA = 1 << 30


@dataclass(frozen=True, slots=True)
class Options:
    """How to run one worker.

    Attributes:
        module: The pipeline's Python file.
        pipeline: Name of the pipeline; empty where only the Python file is known.
        stage: The stage to run.
        slots: Attempts at once.
        max_batch: Attempts of one shape that run together.
        member: Group, rank and number of ranks; None for a worker on its own.
        numa: The NUMA node that it runs on, where that is known.
        rail: The rail of the network that it is on, where that is known.
        name: Shown to people.
        run_dir: Where the server is found.
        threads: Compute threads, for OpenMP and torch; None leaves them alone.
        arena_bytes: Most bytes of shared memory.
        attach_within: Seconds to look for the server at first.
    """

    module: Path
    pipeline: str
    stage: str
    slots: int
    max_batch: int
    member: tuple[str, int, int] | None
    numa: int | None
    rail: int | None
    name: str
    run_dir: Path
    threads: int | None
    arena_bytes: int
    attach_within: float


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line; ends the process with status 2 where it is wrong, as argparse does.

    Raises:
        Invalid: The TOML file cannot be used.
        NotFound: There is no such file, or no such stage in it.
    """
    parser = argparse.ArgumentParser(
        prog="python -m stagewire.worker",
        description="Runs one worker of one stage: loads its model, attaches to the server, works until SIGTERM.",
    )
    parser.add_argument("--pipeline", type=Path, required=True, metavar="FILE", help="the TOML file or Python module")
    parser.add_argument("--stage", required=True, metavar="NAME", help="the stage to run")
    parser.add_argument(
        "--slots", type=_positive, metavar="N", help="attempts at once [default: as in the TOML, else 1]"
    )
    parser.add_argument(
        "--max-batch",
        type=_positive,
        metavar="N",
        help="jobs of one shape that run together [default: as in the TOML, else 1]",
    )
    parser.add_argument("--group", metavar="NAME", help="the group that runs every attempt together")
    parser.add_argument("--rank", type=int, metavar="N", help="which rank of it, from 0 on")
    parser.add_argument("--world", type=_positive, metavar="N", help="number of its ranks")
    parser.add_argument("--numa", type=_natural, metavar="N", help="the NUMA node that it runs on")
    parser.add_argument("--rail", type=_natural, metavar="N", help="the rail of the network that it is on")
    parser.add_argument("--name", metavar="NAME", help="shown to people [default: STAGE-PID]")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where the server is found [STAGEWIRE_RUN_DIR]")
    parser.add_argument(
        "--threads", type=_positive, metavar="N", help="threads of OpenMP and torch [STAGEWIRE_TORCH_THREADS]"
    )
    parser.add_argument(
        "--arena-bytes", type=_size, metavar="SIZE", help="most shared memory, as 512MiB [default: 1GiB]"
    )
    parser.add_argument(
        "--attach-within",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long to look for the server at first [default: 60]",
    )
    given = parser.parse_args(arguments)
    member = None
    if any(option is not None for option in (given.group, given.rank, given.world)):
        if None in (given.group, given.rank, given.world) or not 0 <= given.rank < given.world:
            parser.error("--group, --rank and --world go together, and ranks count from 0 to below world")
        member = (given.group, given.rank, given.world)
    deployment, stage = _from_toml(given.pipeline, given.stage) if given.pipeline.suffix == ".toml" else ({}, {})
    server = deployment.get("server", {})
    pipeline = deployment.get("pipeline", {})
    module = given.pipeline.parent / pipeline["module"] if pipeline else given.pipeline
    threads = given.threads or _threads_from_env() or stage.get("threads")
    arena = given.arena_bytes or (parse_bytes(str(server["arena-bytes"])) if "arena-bytes" in server else _ARENA)
    return Options(
        module=module,
        pipeline=str(pipeline.get("name", "")),
        stage=given.stage,
        slots=given.slots or int(stage.get("slots", 1)),
        max_batch=given.max_batch or int(stage.get("max-batch", 1)),
        member=member,
        numa=given.numa,
        rail=given.rail,
        name=given.name or f"{given.stage}-{os.getpid()}",
        run_dir=_rundir.find(given.run_dir),
        threads=threads,
        arena_bytes=arena,
        attach_within=given.attach_within,
    )


def _from_toml(path: Path, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file and the entry of the stage. The server checks the file whole; this reads what a worker needs."""
    try:
        deployment = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFound(f"there is no pipeline file {path}", reason="pipeline.not_found") from None
    except (OSError, ValueError) as error:
        raise Invalid(f"{path}: {error}", reason="pipeline.toml") from None
    module = deployment.get("pipeline", {}).get("module")
    if not isinstance(module, str):
        raise Invalid(
            f'{path} names no Python module: write module = "pipeline.py" under [pipeline]', reason="pipeline.toml"
        )
    stages = {entry.get("name"): entry for entry in deployment.get("stage", [])}
    if stage not in stages:
        have = ", ".join(str(name) for name in stages)
        near = difflib.get_close_matches(stage, [name for name in stages if isinstance(name, str)], n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise NotFound(f"{path} has no stage {stage!r}{hint}; its stages: {have}", reason="pipeline.stage")
    return deployment, stages[stage]


def _threads_from_env() -> int | None:
    text = os.environ.get("STAGEWIRE_TORCH_THREADS")
    if not text:
        return None
    try:
        return _positive(text)
    except argparse.ArgumentTypeError as error:
        raise Invalid(f"STAGEWIRE_TORCH_THREADS: {error}", reason="worker.options") from None


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def _natural(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except StagewireError as error:
        raise argparse.ArgumentTypeError(error.message) from None
