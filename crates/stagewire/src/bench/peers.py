"""The other libraries of `stagewire bench`, driven as their users drive them.

Each process takes one order per line of stdin, as JSON, and answers each with one line of JSON.
"""

import ctypes
import importlib.util
import json
import mmap
import os
import signal
import socket
import subprocess
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


class Slices:
    """A descriptor for each row of strided records, in columns of NumPy, as SGLang makes them for each request."""

    def __init__(self, records, base):
        self.base = base
        # First byte, rows, width and pitch of the remote side, then first byte and pitch of the local one.
        self.records = np.array(records, np.uint64)

    def columns(self, at, record):
        src, dst, width, rows, src_pitch, dst_pitch = record
        first, pitch = ((src, src_pitch), (dst, dst_pitch))[at]
        return np.uint64(self.base[at]) + first + np.arange(rows, dtype=np.uint64) * pitch, width

    def side(self, at):
        """Address, length and device of each."""
        both = [self.columns(at, record) for record in self.records]
        offsets = np.concatenate([offsets for offsets, _ in both])
        nbytes = np.concatenate([np.full_like(offsets, width) for offsets, width in both])
        return np.column_stack((offsets, nbytes, np.zeros_like(offsets)))

    def exact(self, memory, span):
        source, (remote, local) = painted(span), (self.side(0), self.side(1))
        rows = zip(remote.tolist(), local.tolist(), strict=True)
        return all(
            (
                memory[to - self.base[1] : to - self.base[1] + n] == source[at - self.base[0] : at - self.base[0] + n]
            ).all()
            for (at, n, _), (to, _, _) in rows
        )


class Mooncake:
    """Both roles of the Transfer Engine over TCP."""

    def __init__(self, _role):
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

    def reach_slices(self, held, span, size, records):
        self.reach(held, size)
        self.span, self.slices = span, Slices(records, (held["address"], self.memory.ctypes.data))
        return {}

    def read_slices(self):
        """In batches of 512, as a peer takes no more than 1,024 at a time."""

        def read():
            remote, local = self.slices.side(0), self.slices.side(1)
            for first in range(0, len(remote), 512):
                part = slice(first, first + 512)
                done = self.engine.batch_transfer_sync_read(
                    self.segment, local[part, 0].tolist(), remote[part, 0].tolist(), remote[part, 1].tolist()
                )
                assert done == 0, f"batch_transfer_sync_read says {done}"

        return {"nanos": timed(read)}

    def check_slices(self):
        return {"exact": self.slices.exact(self.memory, self.span)}

    def check(self):
        return {"exact": bool((self.memory == painted(self.size)).all())}


class Nixl:
    """Both roles of a NIXL agent with its default backend, UCX."""

    def __init__(self, role):
        from nixl_cu12._api import nixl_agent, nixl_agent_config

        # The progress thread only where it is needed: it costs the initiator throughput.
        self.agent = nixl_agent(
            f"bench-{os.getpid()}",
            nixl_agent_config(enable_prog_thread=role == "target", backends=["UCX"]),
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

    def reach_slices(self, held, span, size, records):
        self.meet(held)
        self.take(destination(size))
        self.span, self.slices = span, Slices(records, (held["address"], self.memory.ctypes.data))
        return {}

    def read_slices(self):
        def read():
            self.remote, self.local = (self.agent.get_xfer_descs(self.slices.side(at), "DRAM") for at in (0, 1))
            self.transfer()

        return {"nanos": timed(read)}

    def check_slices(self):
        return {"exact": self.slices.exact(self.memory, self.span)}

    def meet(self, held):
        if getattr(self, "peer", None) is not None:
            self.agent.remove_remote_agent(self.peer)
        peer = self.agent.add_remote_agent(bytes.fromhex(held["metadata"]))
        self.peer = peer.decode() if isinstance(peer, bytes) else peer

    def reach(self, held, span, size, runs):
        """Of the owner's bytes, so many runs as far apart as they are long, or all."""
        self.meet(held)
        self.span, self.width, self.runs = span, size // runs, runs
        self.take(destination(size))
        self.local = self.descriptors(self.memory.ctypes.data, self.width)
        self.remote = self.descriptors(held["address"], span // runs)
        return {}

    def transfer(self):
        handle = self.agent.initialize_xfer("READ", self.local, self.remote, self.peer)
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        assert state == "DONE", state
        self.agent.release_xfer_handle(handle)

    def read(self):
        return {"nanos": timed(self.transfer)}

    def check(self):
        expected = painted(self.span).reshape(self.runs, -1)[:, : self.width]
        return {"exact": bool((self.memory.reshape(self.runs, -1) == expected).all())}


class Lender:
    """The master of a Mooncake Store, and memory that this process lends to it."""

    def __init__(self, segment_bytes):
        package = importlib.util.find_spec("mooncake").submodule_search_locations[0]
        port, admin_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        command = [
            os.path.join(package, "mooncake_master"),
            f"--rpc_port={port}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={admin_port}",
            "--metrics_host=127.0.0.1",
            "--enable_http_metadata_server=false",
        ]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.master = subprocess.Popen(command, preexec_fn=end_with_parent, **quiet)
        until = time.monotonic() + 30
        while not listens(port):
            assert self.master.poll() is None, "mooncake_master has ended"
            assert time.monotonic() < until, "mooncake_master does not listen"
            time.sleep(0.02)
        self.store = store_client(self.address, int(segment_bytes)) if int(segment_bytes) else None

    def reach(self):
        return {"master": self.address}


class StoreClient:
    """A client of a Mooncake Store, which writes and reads some objects of one size at a time."""

    def __init__(self, segment_bytes, master):
        from mooncake.store import ReplicateConfig

        self.store = store_client(master, int(segment_bytes))
        self.memory, self.kept, self.made = None, [], 0
        # Objects stay until they are removed, as those of the host store do.
        self.pinned = ReplicateConfig()
        self.pinned.with_hard_pin = True

    def warm(self):
        """Touches every page of the segments, so that no object is the first in its pages."""
        memory, keys = np.full(32 << 20, 1, np.uint8), []
        self.register(memory)
        while self.store.put_from(f"warm {len(keys)}", memory.ctypes.data, memory.nbytes, self.pinned) == 0:
            keys.append(f"warm {len(keys)}")
        for key in keys:
            self.remove(key)
        self.store.unregister_buffer(memory.ctypes.data)
        return {"objects": len(keys)}

    def register(self, memory):
        done = self.store.register_buffer(memory.ctypes.data, memory.nbytes)
        assert done == 0, f"register_buffer says {done}"

    def remove(self, key):
        done = self.store.remove(key, True)
        assert done == 0, f"remove says {done}"

    def hold(self, size, count):
        """Takes memory for so many objects, and keeps them in the store to be read."""
        self.release()
        self.size, self.count = size, count
        self.memory = source(size * count), destination(size * count)
        for memory in self.memory:
            self.register(memory)
        self.sources, self.destinations = (
            [memory.ctypes.data + index * size for index in range(count)] for memory in self.memory
        )
        self.kept = self.keys()
        self.write(self.kept)
        return {}

    def release(self):
        for key in self.kept:
            self.remove(key)
        for memory in self.memory or ():
            self.store.unregister_buffer(memory.ctypes.data)
        self.memory, self.kept = None, []
        return {}

    def keys(self):
        self.made += self.count
        return [f"object {number}" for number in range(self.made - self.count, self.made)]

    def write(self, keys):
        def write():
            for key, address in zip(keys, self.sources, strict=True):
                done = self.store.put_from(key, address, self.size, self.pinned)
                assert done == 0, f"put_from says {done}"

        return timed(write)

    def put(self):
        keys = self.keys()
        nanos = self.write(keys)
        for key in keys:
            self.remove(key)
        return {"nanos": nanos}

    def put_batch(self):
        keys, sizes = self.keys(), [self.size] * self.count

        def write():
            done = self.store.batch_put_from(keys, self.sources, sizes, self.pinned)
            assert not any(done), f"batch_put_from says {done}"

        nanos = timed(write)
        for key in keys:
            self.remove(key)
        return {"nanos": nanos}

    def get(self):
        def read():
            for key, address in zip(self.kept, self.destinations, strict=True):
                done = self.store.get_into(key, address, self.size)
                assert done == self.size, f"get_into says {done}"

        return {"nanos": timed(read)}

    def get_batch(self):
        sizes = [self.size] * self.count

        def read():
            done = self.store.batch_get_into(self.kept, self.destinations, sizes)
            assert list(done) == sizes, f"batch_get_into says {done}"

        return {"nanos": timed(read)}

    def buffer(self):
        """What comes closest to showing an object: memory of the client's own, which it is copied into."""
        found = []
        nanos = timed(lambda: found.append(self.store.get_buffer(self.kept[0])))
        assert found[0] is not None, "get_buffer has nothing"
        return {"nanos": nanos}

    def check(self):
        expected, found = painted(self.size * self.count), self.memory[1]
        exact = bool((found == expected).all())
        found.fill(0)
        return {"exact": exact}


class Planner:
    """A KV-cache planner of the peers' kind: a descriptor for each token of each buffer, in columns of NumPy.

    Address, length and device of both sides, as SGLang hands them to NIXL. Which slices: page tables, bytes of a page
    and of the part before the slice on both sides, bytes of the slice.
    """

    def __init__(self, spec):
        spec = json.loads(spec)
        self.page, self.buffers, self.nbytes = spec["page"], spec["buffers"], spec["nbytes"]
        self.pools = [
            [(np.array(pages, np.uint64), item, skip) for pages, item, skip in pool] for pool in spec["pools"]
        ]

    def columns(self, pages, item, skip):
        tokens = np.arange(self.page, dtype=np.uint64) * np.uint64(item // self.page) + np.uint64(skip)
        offsets = (pages[:, None] * np.uint64(item) + tokens).ravel()
        nbytes, device = np.full_like(offsets, self.nbytes), np.zeros_like(offsets)
        # Every buffer has a base of its own; 0 here, so that the addresses are the offsets.
        layers = [np.column_stack((np.uint64(0) + offsets, nbytes, device)) for _ in range(self.buffers)]
        return np.vstack(layers)

    def plan(self):
        def make():
            self.sides = [np.vstack([self.columns(*pool[side]) for pool in self.pools]) for side in (0, 1)]

        return {"nanos": timed(make)}

    def sums(self):
        """Of the addresses, to see that these are the descriptors that were asked for."""
        return {"count": len(self.sides[0]), "sums": [int(side[:, 0].sum()) for side in self.sides]}


def store_client(master, segment_bytes):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    done = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, 512 << 20, "tcp", "", master)
    assert done == 0, f"setup says {done}"
    return store


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def listens(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def end_with_parent():
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main():
    libraries = {"mooncake": Mooncake, "nixl": Nixl, "lender": Lender, "store": StoreClient, "planner": Planner}
    try:
        library = libraries[sys.argv[1]](*sys.argv[2:])
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
