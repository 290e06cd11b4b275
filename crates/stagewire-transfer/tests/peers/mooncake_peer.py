"""A Mooncake Transfer Engine of the public wheel, driven by a test.

One JSON object per line on stdin is a command: `{"do": NAME, ...}` with the arguments of the function of that name.
Each is answered by one line on stdout, `@@` and a JSON object; what the engine itself prints goes elsewhere. The first
line, before any command, has the name by which peers reach this one.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

BLOCK = 65_521

engine = TransferEngine()
memory: list[np.ndarray] = []


def pattern(size: int, key: int) -> np.ndarray:
    """The bytes that the test's `bulk` makes, each combined with `key`."""
    count = -(-size // BLOCK)
    blocks = np.tile(_block(), (count, 1))
    blocks[:, :8] = np.arange(count, dtype="<u8").view(np.uint8).reshape(count, 8)
    return blocks.reshape(-1)[:size] ^ np.uint8(key)


def _block() -> np.ndarray:
    state, block = 1, bytearray()
    for _ in range(BLOCK):
        state = (state * 1_664_525 + 1_013_904_223) & 0xFFFFFFFF
        block.append(state >> 24)
    return np.frombuffer(bytes(block), np.uint8)


def allocate(size: int, key: int | None = None) -> dict[str, int]:
    """Registers memory: zeros, or a pattern."""
    fresh = np.zeros(size, np.uint8) if key is None else pattern(size, key)
    code = engine.register_memory(fresh.ctypes.data, size)
    memory.append(fresh)
    return {"code": code, "index": len(memory) - 1, "address": fresh.ctypes.data}


def unregister(index: int) -> dict[str, int]:
    return {"code": engine.unregister_memory(memory[index].ctypes.data)}


def check(index: int, key: int, at: int = 0, size: int | None = None) -> dict[str, int]:
    """Compares memory from `at` on with the beginning of a pattern: gives the first byte that differs, or -1."""
    found = memory[index][at:] if size is None else memory[index][at : at + size]
    return {"differs": _differs(found, key)}


def _differs(found: np.ndarray, key: int) -> int:
    wrong = np.flatnonzero(found != pattern(len(found), key))
    return int(wrong[0]) if len(wrong) else -1


def read(peer: str, address: int, size: int, key: int) -> dict[str, int]:
    """Reads a peer's memory, and compares it with a pattern."""
    target = np.zeros(max(size, 1), np.uint8)
    code = engine.transfer_sync_read(peer, target.ctypes.data, address, size)
    return {"code": code, "differs": _differs(target[:size], key)}


def write(peer: str, address: int, size: int, key: int) -> dict[str, int]:
    source = pattern(max(size, 1), key)
    return {"code": engine.transfer_sync_write(peer, source.ctypes.data, address, size)}


def batch_read(peer: str, addresses: list[int], size: int, key: int) -> dict[str, int]:
    """Reads pieces of one size, and compares what they give together with a pattern."""
    target = np.zeros(size * len(addresses), np.uint8)
    places = [target.ctypes.data + size * index for index in range(len(addresses))]
    code = engine.batch_transfer_sync_read(peer, places, addresses, [size] * len(addresses))
    return {"code": code, "differs": _differs(target, key)}


def write_and_notify(peer: str, address: int, size: int, key: int, name: str, message: str) -> dict[str, int]:
    source = pattern(size, key)
    notify = TransferNotify(name, message)
    code = engine.transfer_sync(peer, source.ctypes.data, address, size, TransferOpcode.Write, notify)
    return {"code": code}


def notifies() -> dict[str, list[list[str]]]:
    return {"notifies": [[notify.name, notify.msg] for notify in engine.get_notifies()]}


def probe(peer: str) -> dict[str, int]:
    return {"code": engine.send_probe(peer)}


def first_buffer(peer: str) -> dict[str, int]:
    return {"address": engine.get_first_buffer_address(peer)}


def clock(peer: str, address: int, size: int, rounds: int, writes: bool) -> dict[str, list[float]]:
    """Seconds of each of some synchronous transfers."""
    local, seconds = pattern(size, 0).copy(), []
    move = engine.transfer_sync_write if writes else engine.transfer_sync_read
    for _ in range(rounds):
        begun = time.perf_counter()
        if move(peer, local.ctypes.data, address, size) != 0:
            raise RuntimeError(f"a transfer of {size} bytes failed")
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    command.__name__: command
    for command in (
        allocate,
        unregister,
        check,
        read,
        write,
        batch_read,
        write_and_notify,
        notifies,
        probe,
        first_buffer,
        clock,
    )
}


def say(answer: dict[str, Any]) -> None:
    print(f"\n@@{json.dumps(answer)}", flush=True)


def main() -> None:
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise SystemExit("the engine does not start")
    say({"name": f"127.0.0.1:{engine.get_rpc_port()}"})
    for line in sys.stdin:
        arguments = json.loads(line)
        say(COMMANDS[arguments.pop("do")](**arguments))


if __name__ == "__main__":
    main()
