"""Compute threads and gradients of the process and of each of its slots."""

from __future__ import annotations

import os
import sys


def limit_before_import(threads: int | None) -> None:
    """Sets the variables that OpenMP and MKL read when they are loaded."""
    if threads is not None:
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
            os.environ[variable] = str(threads)


def limit_this_thread(threads: int | None) -> None:
    """Tells torch, where it is loaded, for this thread: how many threads to compute with, and to keep no gradients.

    Results depend on the number of threads bit for bit, so a pipeline that is to give the same bits everywhere gives
    every worker the same number.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "set_num_threads"):
        return
    if threads is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
