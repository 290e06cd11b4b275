"""From the command line to a working worker, and back to an exit status."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

from .. import pipeline
from .._native import Worker, log_to_stderr
from ..errors import Invalid, StagewireError, Unavailable
from . import options, threads
from .slots import Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..stages import Stage
    from .options import Options

LOG = logging.getLogger("stagewire.worker")

DONE = 0
FAILED = 1
USAGE = 2
NO_SERVER = 3

LEAVE_WITHIN = 5.0
"""Seconds that a drained worker waits for others to be done with its payloads."""

# Seconds after which a signal is handled at the latest.
_LOOK_FOR_SIGNALS = 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a worker until it is told to stop; returns the exit status."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    log_to_stderr()
    # A stage that writes into mapped memory, or a native library that crashes: the log says where.
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        given = options.parse(arguments)
        return _run(given)
    except Unavailable as error:
        LOG.error("%s", error)
        return NO_SERVER if error.reason in {"server.none", "server.unreachable"} else FAILED
    except StagewireError as error:
        if error.__cause__ is not None:
            # What the pipeline's own code raised: its author wants to see where.
            traceback.print_exception(error.__cause__)
        LOG.error("%s", error)
        return USAGE if error.error_class in {"invalid", "not_found"} else FAILED
    except _Terminated:
        # Before there was anything to finish.
        return 128 + signal.SIGTERM
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


class _Terminated(BaseException):
    """SIGTERM came before the worker was ready."""


def _terminate(_number: int, _frame: object) -> None:
    raise _Terminated


def _run(given: Options) -> int:
    threads.limit_before_import(given.threads)
    begin = time.monotonic()
    LOG.info("%s: loading stage %s of %s", given.name, given.stage, given.module)
    stage = pipeline.load(given.module).stage(given.stage)
    _check(stage, given)
    threads.limit_this_thread(given.threads)
    models = _load(stage, given)
    LOG.info("%s: loaded in %.1f s", given.name, time.monotonic() - begin)
    worker = Worker.attach(
        run_dir=str(given.run_dir),
        pipeline=given.pipeline,
        stage=given.stage,
        name=given.name,
        slots=given.slots,
        max_batch=given.max_batch,
        member=given.member,
        numa=given.numa,
        rail=given.rail,
        arena_bytes=given.arena_bytes,
        attach_within=given.attach_within,
    )
    LOG.info("%s: ready, %d slot%s", given.name, given.slots, "s" if given.slots > 1 else "")
    return _serve(worker, stage, models, given)


def _check(stage: Stage[Any], given: Options) -> None:
    """Refuses batches that the stage, or several slots, could not run.

    Raises:
        Invalid: The stage takes one job at a time, or there are several slots.
    """
    if given.max_batch == 1:
        return
    if not stage.batch:
        raise Invalid(
            f"stage {stage.name!r} of {given.module} takes one job at a time, not batches of {given.max_batch}: "
            f'declare it as @stagewire.stage("{stage.name}", batch=True) with a function of a list of contexts',
            reason="worker.options",
        )
    if given.slots > 1:
        raise Invalid(
            f"a worker runs batches of {given.max_batch} in one slot, not in {given.slots}: start more workers instead",
            reason="worker.options",
        )


def _load(stage: Stage[Any], given: Options) -> list[Any]:
    """One model for each slot, or one for all of them.

    Raises:
        StagewireError: `setup` raised; the message says where.
    """
    count = given.slots if stage.setup_per_slot else 1
    try:
        loaded = [stage.load() for _ in range(count)]
    except StagewireError:
        raise
    except Exception as error:
        raise pipeline.code_error(given.module, error, f"while stage {stage.name!r} was set up") from error
    return loaded if stage.setup_per_slot else loaded * given.slots


def _serve(worker: Worker, stage: Stage[Any], models: list[Any], given: Options) -> int:
    """Works until every slot has ended: after a signal once what runs is done, or when the server stays away."""
    slots = [Slot(worker, stage, model, given.threads) for model in models]
    running = [threading.Thread(target=slot.run, name=f"slot-{i}", daemon=True) for i, slot in enumerate(slots)]
    _stop_on_signals(worker, given.name)
    for thread in running:
        thread.start()
    for thread in running:
        # The system may hand a signal to any thread, which does not wake this one; it is handled here all the same.
        while thread.is_alive():
            thread.join(_LOOK_FOR_SIGNALS)
    errors = [slot.error for slot in slots if slot.error is not None]
    if errors:
        worker.close()
        raise errors[0]
    # Others may still read what this worker made.
    worker.leave(LEAVE_WITHIN)
    LOG.info("%s: done", given.name)
    return DONE


def _stop_on_signals(worker: Worker, name: str) -> None:
    asked = False

    def stop(number: int, _frame: object) -> None:
        nonlocal asked
        if asked:
            LOG.warning("%s: second signal, leaving what runs", name)
            os._exit(128 + number)
        asked = True
        LOG.info("%s: %s, finishing what runs", name, signal.Signals(number).name)
        worker.drain()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
