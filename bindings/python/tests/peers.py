"""Where the wheels of Mooncake and NIXL are that `make peers` installs. Tests without them skip, or fail where
`STAGEWIRE_REQUIRE_PEERS=1` asks for them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

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


def need_mooncake() -> None:
    """Skips the test where the wheel is missing, or fails it where it is required."""
    use_mooncake()
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        missing = f"the wheel of Mooncake is missing in {FOLDER} ({error}): run `make peers`"
        if REQUIRED:
            pytest.fail(missing)
        pytest.skip(missing)


def nixl() -> str:
    """The file of NIXL's C interface, or a skip, or a failure where it is required."""
    for found in FOLDER.glob("lib/python*/site-packages/.nixl_cu*.mesonpy.libs/libnixl_capi.so"):
        return str(found)
    missing = f"the wheel of NIXL is missing in {FOLDER}: run `make peers`"
    if REQUIRED:
        pytest.fail(missing)
    pytest.skip(missing)
