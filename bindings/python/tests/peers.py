"""Where the wheels of Mooncake and NIXL are that `make peers` installs. Tests without them skip, or fail where
`STAGEWIRE_REQUIRE_PEERS=1` asks for them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

# Read once: a fixture hides the variables of Stagewire from the tests.
FOLDER = Path(os.environ.get("STAGEWIRE_PEERS") or Path(__file__).parents[3] / ".peers")
REQUIRED = os.environ.get("STAGEWIRE_REQUIRE_PEERS") == "1"


def use_mooncake() -> None:
    """Has the wheel of Mooncake found by imports, after everything else."""
    for site in FOLDER.glob("lib/python*/site-packages"):
        if str(site) not in sys.path:
            sys.path.append(str(site))
    # Its log lines are not ours.
    os.environ.setdefault("GLOG_minloglevel", "2")


def is_missing(what: str) -> NoReturn:
    """Skips the test, or fails it where the wheels are required."""
    if REQUIRED:
        pytest.fail(what)
    pytest.skip(what)


def need_mooncake(module: str = "mooncake.engine") -> Any:
    """A module of the wheel. Skips the test where that, or a library that it needs, is missing, or fails it where it is
    required."""
    use_mooncake()
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing(f"{module} of Mooncake's wheel in {FOLDER} cannot be used ({error}): run `make peers`")


def nixl() -> str:
    """The file of NIXL's C interface, or a skip, or a failure where it is required."""
    for found in FOLDER.glob("lib/python*/site-packages/.nixl_cu*.mesonpy.libs/libnixl_capi.so"):
        return str(found)
    is_missing(f"the wheel of NIXL is missing in {FOLDER}: run `make peers`")
