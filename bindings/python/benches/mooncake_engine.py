"""`stagewire.mooncake` beside the same reads driven by the wheel's own Python API: submit, and look every 100 µs.

    .venv/bin/python bindings/python/benches/mooncake_engine.py [--quick] [--json FILE]

Needs the wheel (`make bench-peers`). Reads go from one process to another over TCP, interleaved in one run; a row is
the median of paired ratios, theirs to ours, with quartiles. The last row is the CPU of our threads while a transfer
stands still for 3 s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import peers

peers.use_mooncake()


from stagewire.errors import Deadline  # noqa: E402
from stagewire.mooncake import EngineTransport, Pinned, make_engine  # noqa: E402

MIB = 1 << 20
PAUSE = 100e-6


class Owner:
    """A process whose engine lets one array be read."""

    def __init__(self, nbytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--owner", str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        said = next(line for line in self.process.stdout if line.startswith("@@"))
        self.said: dict[str, Any] = json.loads(said[2:])

    @staticmethod
    def run(nbytes: int) -> None:
        memory = np.random.default_rng(1).integers(0, 256, nbytes, dtype=np.uint8)
        engine, segment = make_engine("127.0.0.1")
        transport = EngineTransport(engine=engine)
        region = transport.register(memory)
        said = {
            "address": transport.address.hex(),
            "reference": region.reference.hex(),
            "segment": segment,
            "pointer": memory.ctypes.data,
        }
        print(f"@@{json.dumps(said)}", flush=True)
        sys.stdin.read()


def theirs(engine: Any, said: dict[str, Any], target: Any, size: int) -> None:
    number = engine.batch_transfer_async_read(said["segment"], [target.ctypes.data], [said["pointer"]], [size])
    while (status := engine.transfer_check_status(number)) == 0:
        time.sleep(PAUSE)
    assert status == 1


def timed(operation: Any) -> float:
    begun = time.perf_counter()
    operation()
    return time.perf_counter() - begun


def compare(engine: Any, said: dict[str, Any], pinned: Pinned, target: Any, size: int, pairs: int) -> dict[str, Any]:
    row = [(0, 0, size, 1, 0, 0)]
    both: list[tuple[float, float]] = []
    for _ in range(pairs + 2):
        their = timed(lambda: theirs(engine, said, target, size))
        both.append((their, timed(lambda: pinned.read(target, records=row))))
    both = both[2:]
    quartiles = statistics.quantiles([their / our for their, our in both], n=4)
    our, their = (statistics.median(times) for times in ([our for _, our in both], [their for their, _ in both]))
    target_ratio = 0.95 if size >= 16 * MIB else None
    return {
        "case": f"mooncake-engine copy, {size // MIB} MiB, whole" if size >= MIB else f"mooncake-engine copy, {size} B",
        "metric": "throughput",
        "value": size / our / 1e9,
        "unit": "GB/s",
        "reference": "the wheel's Python API",
        "reference_value": size / their / 1e9,
        "ratio": quartiles[1],
        "quartiles": [quartiles[0], quartiles[2]],
        "target": f">= {target_ratio}" if target_ratio else "",
        "met": quartiles[1] >= target_ratio if target_ratio else None,
    }


def spent() -> int:
    """Nanoseconds of CPU of this thread and those that are ours by their name."""
    tasks = {task: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    mine = str(threading.get_native_id())
    ours = [task for task, name in tasks.items() if name.startswith(("sw-", "stagewire")) or task.name == mine]
    return sum(int((task / "schedstat").read_text().split()[0]) for task in ours)


def standstill(owner: Owner, pinned: Pinned, target: Any) -> dict[str, Any]:
    owner.process.send_signal(signal.SIGSTOP)
    before = spent()
    with contextlib.suppress(Deadline):
        pinned.read(target, records=[(0, 0, len(target), 1, 0, 0)], deadline=3.0)
    milliseconds = (spent() - before) / 1e6
    return {
        "case": "mooncake-engine, 3 s of standstill",
        "metric": "CPU of our threads",
        "value": milliseconds,
        "unit": "ms",
        "target": "<= 20 ms",
        "met": milliseconds <= 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller transfers")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--owner", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner:
        Owner.run(options.owner)
        return
    sizes = [4096, MIB, 16 * MIB, 64 * MIB] + ([] if options.quick else [256 * MIB])
    owner = Owner(sizes[-1])
    engine, _ = make_engine("127.0.0.1")
    transport = EngineTransport(engine=engine)
    target = np.zeros(sizes[-1], np.uint8)
    address, reference = (bytes.fromhex(owner.said[name]) for name in ("address", "reference"))
    rows = []
    try:
        with transport.pin(address, reference) as pinned:
            for size in sizes:
                rows.append(compare(engine, owner.said, pinned, target, size, 11 if options.quick else 31))
                print(
                    "{case:38} {value:8.3f} {unit}  {reference} {reference_value:.3f}  {ratio:.3f}".format(**rows[-1])
                )
            rows.append(standstill(owner, pinned, target[: 64 * MIB]))
            print("{case:38} {value:8.2f} {unit}".format(**rows[-1]))
    finally:
        owner.process.kill()
        owner.process.communicate()
    if options.json:
        load = os.getloadavg()[0]
        report = {
            "schema": 1,
            "bench": "mooncake-engine",
            "machine": {"cores": os.cpu_count(), "load": load},
            "rows": rows,
        }
        options.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
