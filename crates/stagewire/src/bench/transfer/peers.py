"""The other libraries of `stagewire bench transfer`, driven as their users drive them.

Each process takes one order per line of stdin, as JSON, and answers each with one line of JSON.
"""

import json
import mmap
import os
import sys
import time

# The libraries print to stdout; answers must not mix with that.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import numpy as np  # noqa: E402

PATTERN = np.uint64(0x9E3779B97F4A7C15)
HUGE_PAGE = 2 << 20
# Where malloc begins in the pages that it maps for a large block. Copies between pages that lie differently are slower.
MALLOC_HEADER = 16


def painted(size):
    """The bytes that the Rust side paints."""
    return (np.arange(1, size // 8 + 1, dtype=np.uint64) * PATTERN).view(np.uint8)


def pages(size, huge):
    """Memory as on the Rust side, so that the same is copied. NumPy's own has huge pages on both sides."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, size + 2 * HUGE_PAGE, flags=private)
    mapped.madvise(mmap.MADV_HUGEPAGE if huge and size >= HUGE_PAGE else mmap.MADV_NOHUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    begin = -whole.ctypes.data % HUGE_PAGE + (0 if huge else MALLOC_HEADER)
    return whole[begin : begin + size]


def source(size):
    """Painted bytes of an owner, on the pages that malloc gives."""
    memory = pages(size, huge=False)
    memory[:] = painted(size)
    return memory


def destination(size):
    """Memory of a reader, each page of which was used before."""
    memory = pages(size, huge=True)
    memory.fill(0)
    return memory


def timed(operation):
    begin = time.perf_counter_ns()
    operation()
    return time.perf_counter_ns() - begin


class Mooncake:
    """Both roles of the Transfer Engine over TCP."""

    def __init__(self):
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        done = self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        assert done == 0, f"initialize says {done}"
        self.memory = None

    def take(self, memory):
        if self.memory is not None:
            self.engine.unregister_memory(self.memory.ctypes.data)
        self.memory = memory
        done = self.engine.register_memory(memory.ctypes.data, memory.nbytes)
        assert done == 0, f"register_memory says {done}"

    def hold(self, size):
        self.take(source(size))
        return {
            "segment": f"127.0.0.1:{self.engine.get_rpc_port()}",
            "address": self.memory.ctypes.data,
        }

    def reach(self, held, size):
        self.segment, self.address, self.size = held["segment"], held["address"], size
        self.take(destination(size))
        return {}

    def sync(self):
        def read():
            done = self.engine.transfer_sync_read(self.segment, self.memory.ctypes.data, self.address, self.size)
            assert done == 0, f"transfer_sync_read says {done}"

        return {"nanos": timed(read)}

    def submit(self):
        def read():
            batch = self.engine.batch_transfer_async_read(
                self.segment, [self.memory.ctypes.data], [self.address], [self.size]
            )
            assert batch != 0, "batch_transfer_async_read failed"
            while (status := self.engine.transfer_check_status(batch)) == 0:
                time.sleep(20e-6)
            assert status == 1, f"transfer_check_status says {status}"

        return {"nanos": timed(read)}

    def check(self):
        return {"exact": bool((self.memory == painted(self.size)).all())}


class Nixl:
    """Both roles of a NIXL agent with its default backend, UCX."""

    def __init__(self):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        # The progress thread only where it is needed: it costs the initiator throughput.
        self.agent = nixl_agent(
            f"bench-{os.getpid()}",
            nixl_agent_config(enable_prog_thread=sys.argv[2] == "target", backends=["UCX"]),
        )
        self.memory = None

    def take(self, memory):
        if self.memory is not None:
            self.agent.deregister_memory(self.registered)
        self.memory = memory
        rows = [(memory.ctypes.data, memory.nbytes, 0, "")]
        self.registered = self.agent.register_memory(rows, "DRAM")

    def descriptors(self, address, pitch):
        rows = [(address + run * pitch, self.width, 0) for run in range(self.runs)]
        return self.agent.get_xfer_descs(rows, "DRAM")

    def hold(self, size):
        self.take(source(size))
        return {
            "metadata": self.agent.get_agent_metadata().hex(),
            "address": self.memory.ctypes.data,
        }

    def reach(self, held, span, size, runs):
        """Of the owner's bytes, so many runs as far apart as they are long, or all."""
        if getattr(self, "peer", None) is not None:
            self.agent.remove_remote_agent(self.peer)
        peer = self.agent.add_remote_agent(bytes.fromhex(held["metadata"]))
        self.peer = peer.decode() if isinstance(peer, bytes) else peer
        self.span, self.width, self.runs = span, size // runs, runs
        self.take(destination(size))
        self.local = self.descriptors(self.memory.ctypes.data, self.width)
        self.remote = self.descriptors(held["address"], span // runs)
        return {}

    def read(self):
        def read():
            handle = self.agent.initialize_xfer("READ", self.local, self.remote, self.peer)
            state = self.agent.transfer(handle)
            while state == "PROC":
                state = self.agent.check_xfer_state(handle)
            assert state == "DONE", state
            self.agent.release_xfer_handle(handle)

        return {"nanos": timed(read)}

    def check(self):
        expected = painted(self.span).reshape(self.runs, -1)[:, : self.width]
        return {"exact": bool((self.memory.reshape(self.runs, -1) == expected).all())}


def main():
    try:
        library = {"mooncake": Mooncake, "nixl": Nixl}[sys.argv[1]]()
    except Exception as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}"}), file=answers, flush=True)
        return
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(library, order.pop("do"))(**order)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


main()
# The libraries' threads may hang in the interpreter's end.
answers.flush()
os._exit(0)
