"""`stagewire doctor` where the kernel forbids things: system calls are refused to it by a seccomp filter."""

from __future__ import annotations

import ctypes
import errno
import json
import platform
import struct
import subprocess
from collections.abc import Callable

import pytest

from deployment import DEADLINE, STAGEWIRE

# Numbers of x86-64, from asm/unistd_64.h.
CALLS = {"process_vm_readv": 310, "memfd_create": 319, "pidfd_open": 434}

needs_x86_64 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the filter knows the numbers of x86-64 alone")


def refusing(*calls: str) -> Callable[[], None]:
    """Makes this process, and what it becomes, get EPERM from these system calls."""
    load, equal, give = 0x20, 0x15, 0x06  # BPF: load the number, jump if equal, return
    program = [(load, 0, 0, 0)]
    program += [(equal, len(calls) - at, 0, CALLS[call]) for at, call in enumerate(calls)]
    program += [(give, 0, 0, 0x7FFF0000), (give, 0, 0, 0x00050000 | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))

    class Program(ctypes.Structure):
        _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    compiled = Program(len(program), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def install() -> None:
        no_new_privileges, seccomp, with_filter = 38, 22, 2
        assert code
        if prctl(no_new_privileges, 1, 0, 0, 0) or prctl(seccomp, with_filter, ctypes.byref(compiled), 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")

    return install


def doctor(*calls: str) -> tuple[dict[str, dict], dict[str, dict]]:
    """Checks and transports by name, where these calls are refused."""
    options = {"timeout": DEADLINE, "capture_output": True, "text": True}
    done = subprocess.run([STAGEWIRE, "doctor", "--json"], check=False, preexec_fn=refusing(*calls), **options)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    by_name = [{each["name"]: each for each in report[part]} for part in ("checks", "transports")]
    return by_name[0], by_name[1]


@needs_x86_64
def test_a_filter_that_forbids_to_read_other_processes_forbids_cma_alone():
    checks, transports = doctor("process_vm_readv")
    assert checks["cma"]["state"] == "missing"
    assert "process_vm_readv fails" in checks["cma"]["why"]
    assert "seccomp profile" in checks["cma"]["do"]
    assert checks["shm"]["state"] == "ok"
    assert checks["container"]["data"]["seccomp_filter"] is True
    assert (transports["cma"]["same_host"], transports["shm"]["same_host"]) == (False, True)


@needs_x86_64
def test_without_memfds_there_is_no_shm():
    checks, transports = doctor("memfd_create")
    assert checks["shm"]["state"] == "missing"
    assert "cannot create a shared-memory segment" in checks["shm"]["why"]
    assert transports["shm"]["same_host"] is False


@needs_x86_64
def test_without_pidfds_no_peer_can_be_watched():
    checks, transports = doctor("pidfd_open")
    for name in ("shm", "cma"):
        assert checks[name]["state"] == "missing"
        assert "refuses" in checks[name]["why"]
        assert transports[name]["same_host"] is False
