"""Tensors between hosts over Mooncake's own transfer engine, with RDMA or NVLink where its wheel has them.

```python
from stagewire.mooncake import EngineTransport

# the producer
transport = EngineTransport("10.0.0.7", token=secret)
region = transport.register(latents)
queue.put((transport.address, region.reference))   # small; whoever has them may read the tensor

# the consumer, on another host
address, reference = queue.get()
transport = EngineTransport("10.0.0.8", token=secret)
transport.read(address, reference, into=dst)
region.release()                                    # the producer: waits until nobody reads any more
```

The engine moves the bytes; Stagewire pins the memory meanwhile, checks who may have it, notices a peer that died, and
keeps to deadlines. It never uses the engine's synchronous calls, which spin: it submits, and looks again after a pause.

An engine's calls need the GIL. A program that keeps it, in a long loop of pure Python, delays transfers, and those of
many records most.

Mooncake's data port knows no authentication and is open on every interface, whatever ``host`` says: use it in trusted
networks only. Over TCP, only what is registered can be reached; targets of `EngineTransport.read` are not.

An engine knows no CUDA streams. Each call that takes a tensor on a device first waits for what the current stream of
that device has queued. Work on other streams is the caller's to wait for, and so is work that is queued after
`EngineTransport.register`, before peers may read.

Needs one of Mooncake's wheels, such as ``mooncake-transfer-engine``; it is imported when the first engine is made.

Tensors in Mooncake Store begin with a header of 304 bytes. `encode_header` makes it, so that a peer's ``get_tensor``
reads what is put as header and bytes; `decode_tensor` reads what a peer's ``put_tensor`` put.
"""

from __future__ import annotations

import importlib
import json
import shutil
import socket
import struct
import tempfile
import weakref
from typing import TYPE_CHECKING, Any, Self

from . import _native
from ._bundle import exporter
from ._native import Tensor
from ._tensor_header import TensorHeader, decode_header, encode_header
from .errors import Corrupt, Invalid, StagewireError, Unavailable, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._bundle import Framework
    from ._native import EnginePin, EngineRegion

__all__ = [
    "EngineTransport",
    "Pinned",
    "Record",
    "Region",
    "TensorHeader",
    "decode_header",
    "decode_tensor",
    "encode_header",
    "make_engine",
]

Record = tuple[int, int, int, int, int, int]
"""One strided copy: source offset, destination offset, bytes of a row, rows, source pitch, destination pitch."""


def make_engine(host: str, protocol: str = "tcp", devices: str = "") -> tuple[Any, str]:
    """Makes and initialises an engine that finds its peers without a metadata server.

    Args:
        host: Address of this host as others reach it.
        protocol: ``tcp``, ``rdma``, or another that the wheel was built with.
        devices: Names of RDMA devices, separated by commas; all that fit where empty.

    Returns:
        The engine, and the name by which other engines reach it.

    Raises:
        Unsupported: No wheel of Mooncake is installed, a library is missing that it needs, or the engine took another
            protocol: where it finds no device for ``rdma``, it says nothing and uses TCP.
        Unavailable: The engine does not start.
    """
    try:
        engine = importlib.import_module("mooncake.engine").TransferEngine()
    except ImportError as error:
        raise Unsupported(
            f"Mooncake cannot be imported: {error}; install mooncake-transfer-engine, or its variant for this host",
            reason="mooncake.missing",
        ) from error
    returned = engine.initialize(host, "P2PHANDSHAKE", protocol, devices)
    if returned != 0:
        raise Unavailable(
            f"Mooncake's engine does not start on {host} with {protocol!r}: it returned {returned}",
            reason="mooncake.start",
        )
    port = engine.get_rpc_port()
    taken = _protocol(port)
    if taken != protocol:
        raise Unsupported(
            f"Mooncake's engine was to use {protocol!r} and uses {taken!r}: this host has no device for it, or the "
            "wheel was built without it",
            reason="mooncake.protocol_unavailable",
        )
    return engine, f"{host}:{port}"


def decode_tensor(data: bytes | bytearray | memoryview, *, framework: Framework | None = None) -> Any:
    """The tensor in an object that a peer's ``put_tensor`` made: a view of the object's bytes, without a copy.

    Args:
        data: The whole object, header first.
        framework: ``torch``, ``numpy`` or ``native``; by default torch where it is imported or the dtype needs it.

    Raises:
        Corrupt: It is no such object, or is truncated.
        Unsupported: Its header is of another version, or it is one part of a sharded tensor.
    """
    header = decode_header(data)
    body = memoryview(data).cast("B")[header.offset : header.offset + header.nbytes]
    if len(body) < header.nbytes:
        raise Corrupt(
            f"the object has {len(body)} bytes of tensor, its header says {header.nbytes}", reason="mooncake.header"
        )
    tensor = Tensor.from_buffer(body).view(header.dtype, header.shape)
    return exporter(framework, [header.dtype])(tensor)


def _protocol(port: int) -> str:
    """What an engine of this host says that it moves bytes with."""
    request = b"{}"
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        # Length, kind of message (1 asks for the description), JSON; the answer is the same.
        connection.sendall(struct.pack("<QB", 1 + len(request), 1) + request)
        with connection.makefile("rb") as answer:
            (length,) = struct.unpack("<Q", answer.read(8))
            return str(json.loads(answer.read(length)[1:])["protocol"])


def _address(host: str) -> str:
    """The first address that a name stands for."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise Invalid(f"{host!r} is no address of this host: {error}", reason="argument.address") from error


class EngineTransport:
    """This process, as others with such a transport reach it.

    Args:
        host: Address of this host as others reach it.
        protocol: What the engine moves bytes with.
        devices: Names of RDMA devices, separated by commas.
        engine: An engine that is initialised on ``host`` with ``protocol`` already; one is made where it is left out.
        rebuild: Makes another engine, and its name, when the one in use no longer reaches a peer that lives;
            `make_engine` with the same arguments where it is left out.
        bind: Where this process listens for the control connections of its peers; a free port of ``host`` where it is
            left out.
        token: What peers must know, the same in all processes. Required unless ``bind`` is a loopback address.
        run_dir: Folder for this process's socket; a temporary one where it is left out.

    Raises:
        Invalid: ``host`` or ``bind`` is no address.
        Unsupported: As `make_engine`.
        Unavailable: As `make_engine`, or a socket cannot be made.
        Unauthenticated: A token is missing.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        protocol: str = "tcp",
        devices: str = "",
        engine: Any = None,
        rebuild: Callable[[], tuple[Any, str]] | None = None,
        bind: str | None = None,
        token: str | None = None,
        run_dir: str | None = None,
    ) -> None:
        def make() -> tuple[Any, str]:
            return make_engine(host, protocol, devices)

        self._remove: Callable[[], object] = lambda: None
        address = _address(host)
        name = f"{host}:{engine.get_rpc_port()}" if engine is not None else ""
        if engine is None:
            engine, name = make()
        if run_dir is None:
            run_dir = tempfile.mkdtemp(prefix="sw-engine-")
            self._remove = weakref.finalize(self, shutil.rmtree, run_dir, ignore_errors=True)
        self._native = _native.EngineTransport(
            engine,
            name,
            registers_local=protocol != "tcp",
            rebuild=rebuild or make,
            run_dir=run_dir,
            bind=bind or (f"[{address}]:0" if ":" in address else f"{address}:0"),
            advertise=None if bind is None else address,
            token=token,
        )

    @property
    def address(self) -> bytes:
        """How others reach this process; give it to them together with a region's reference."""
        return self._native.address

    def register(self, memory: Any, *, writable: bool = False) -> Region:
        """Lets peers read memory, and write it where it is ``writable``.

        It stays in place until its region is released and nobody reads it any more. What peers may read must not change
        meanwhile; what they may write must not be looked at before the region has ended.

        Args:
            memory: A contiguous tensor, in host memory or on a CUDA device, or anything with a buffer.
            writable: Whether peers may write it.

        Raises:
            Invalid: It is empty, not contiguous, or read-only and to be written.
            Unavailable: The engine does not take it.
        """
        return Region(self._native.register(_span(memory), writable=writable))

    def pin(self, address: bytes, reference: bytes, *, deadline: float | None = 30.0) -> Pinned:
        """Holds a region of a peer in place, for as long as the result lives or until it is closed.

        Raises:
            Unavailable: The peer cannot be reached, or has died.
            NotFound: It does not have the region any more.
            Denied: The reference is not for that region.
            Deadline: It did not answer in time.
        """
        return Pinned(self._native.pin(address, reference, deadline))

    def read(
        self,
        address: bytes,
        reference: bytes,
        into: Any,
        *,
        records: Sequence[Record] | None = None,
        deadline: float | None = 30.0,
    ) -> None:
        """Copies a peer's region into memory of this process: `pin`, then `Pinned.read`."""
        with self.pin(address, reference, deadline=deadline) as pinned:
            pinned.read(into, records=records, deadline=deadline)

    def stats(self) -> dict[str, int]:
        """Counts by name: transfers and their bytes, what is in flight, regions, pins, connections."""
        return self._native.stats()

    def close(self) -> None:
        """Registers nothing any more, and ends the connections. What peers have pinned stays until they let go."""
        self._native.close()
        self._remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class Region:
    """Memory that peers may reach. It is released when this is garbage-collected, at the latest."""

    def __init__(self, native: EngineRegion) -> None:
        self._native = native

    @property
    def reference(self) -> bytes:
        """What a peer needs to pin it. A secret: whoever has it may read the memory, or write it."""
        return self._native.reference

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds it."""
        return self._native.is_idle

    def release(self, timeout: float | None = None) -> bool:
        """Takes no new pins, and waits until those there are have ended. False where that takes longer."""
        return self._native.release(timeout)


class Pinned:
    """A region of a peer, held in place."""

    def __init__(self, native: EnginePin) -> None:
        self._native = native

    @property
    def nbytes(self) -> int:
        """Bytes of the region."""
        return self._native.nbytes

    def read(self, into: Any, *, records: Sequence[Record] | None = None, deadline: float | None = 30.0) -> None:
        """Copies the region, or records of it, into memory of this process.

        Args:
            into: A contiguous tensor, in host memory or on a CUDA device, or anything with a writable buffer.
            records: What goes where; the whole region to the beginning of ``into`` where it is left out.
            deadline: Seconds it may take; None waits as long as the peer lives.

        Raises:
            Invalid: A record lies outside the region or ``into``.
            Unavailable: The peer died, or the engine failed.
            Deadline: It took longer. Bytes may still arrive in ``into``, which is kept until then: use it for nothing
                else.
        """
        self._native.read(_span(into), _records(self._native, records), deadline)

    def write(self, source: Any, *, records: Sequence[Record] | None = None, deadline: float | None = 30.0) -> None:
        """Copies memory of this process, or records of it, into the region, which its owner registered as writable.

        Raises:
            Denied: The region is not writable.
            Invalid: A record lies outside ``source`` or the region.
            Unavailable: The peer died, the engine failed, or time ran out: then the bytes may still be written.
        """
        self._native.write(_span(source), _records(self._native, records), deadline)

    def close(self) -> None:
        """Lets go of the region. A transfer that is under way keeps it until it has ended."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


def _records(native: EnginePin, records: Sequence[Record] | None) -> list[Record]:
    return [(0, 0, native.nbytes, 1, 0, 0)] if records is None else list(records)


def _span(memory: Any) -> tuple[int, int, int | None, bool, Any]:
    """Address, bytes, index of the CUDA device, whether it is read-only, owner.

    Waits for what the current stream of that device has queued: the engine knows no streams.
    """
    kind, index = memory.__dlpack_device__() if hasattr(memory, "__dlpack_device__") else (1, 0)
    if int(kind) == 2:  # CUDA, in DLPack's numbers
        if not memory.is_contiguous():
            raise Invalid("the tensor is not contiguous; use .contiguous()", reason="argument.memory")
        import torch

        torch.cuda.current_stream(memory.device).synchronize()
        return memory.data_ptr(), memory.nbytes, int(index), False, memory
    tensor = _host(memory)
    if not tensor.contiguous:
        raise Invalid("the tensor is not contiguous; make it so first", reason="argument.memory")
    return tensor.data_ptr, tensor.nbytes, None, tensor.read_only, tensor


def _host(memory: Any) -> Tensor:
    if not hasattr(memory, "__dlpack__"):
        return Tensor.from_buffer(memory)
    try:
        return Tensor.from_dlpack(memory)
    except StagewireError:
        raise
    except BufferError:
        # NumPy exports no read-only array by DLPack.
        return Tensor.from_buffer(memory)
