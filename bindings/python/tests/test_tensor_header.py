"""Mooncake's header before a tensor: what its wheel writes is read, and what is written here, its wheel reads."""

from __future__ import annotations

import ctypes
import socket
import struct
import subprocess
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import peers
import pytest
import torch
from stagewire import errors
from stagewire.diffusion import DiffusionConnector, StagePayload
from stagewire.mooncake import decode_header, decode_tensor, encode_header
from test_dlpack import DTYPES, bits, random_bits

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KNOWN = [dtype for dtype in DTYPES if dtype != "complex64"]
SHAPES: list[tuple[int, ...]] = [(), (1,), (7,), (0, 3), (2, 3, 4), (1, 1, 2, 1, 3, 1, 1, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KNOWN)
def test_there_and_back(dtype: str, shape: tuple[int, ...]) -> None:
    source = random_bits(dtype, shape)
    header = encode_header(dtype, shape)
    found = decode_header(header)
    assert (found.dtype, found.shape, found.offset, found.nbytes) == (dtype, shape, 304, source.nbytes)
    back = decode_tensor(header + bits(source), framework="torch")
    assert (back.dtype, tuple(back.shape), bits(back)) == (source.dtype, shape, bits(source))


def test_nothing_is_copied() -> None:
    memory = bytearray(encode_header("int32", (2,)) + struct.pack("<2i", 5, 6))
    view = decode_tensor(memory, framework="numpy")
    memory[304:308] = struct.pack("<i", 9)
    assert view.tolist() == [9, 6]
    view[1] = 7
    assert memory[308:] == struct.pack("<i", 7)


def test_handles_have_it(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        latents = torch.zeros(1, 16, 21, 2, 3, dtype=torch.bfloat16)
        handle = conn.publish(StagePayload(request_id="r", tensor=latents))
        assert handle.tensor_header() == encode_header("bfloat16", latents.shape)
        conn.release(handle)
        handle = conn.publish(StagePayload(request_id="r", tensors={"a": None}))
        with pytest.raises(errors.Invalid, match="is a bundle"):
            handle.tensor_header()
        conn.release(handle)


def test_what_mooncake_does_not_have() -> None:
    with pytest.raises(errors.Unsupported, match=r"no complex64; they have float32, .*float8_e5m2"):
        encode_header("complex64", (1,))
    with pytest.raises(errors.Unsupported, match="at most 8 dimensions, this one has 9"):
        encode_header("int8", (1,) * 9)
    with pytest.raises(errors.Invalid, match="is no shape"):
        encode_header("int8", (-1,))


def test_headers_that_are_none() -> None:
    good = encode_header("int32", (2, 3)) + bytes(24)

    def changed(offset: int, layout: str, value: Any) -> bytes:
        return good[:offset] + struct.pack(layout, value) + good[offset + struct.calcsize(layout) :]

    for data, kind, message in [
        (b"", errors.Corrupt, "0 bytes are no Mooncake tensor: its header has 304"),
        (good[:303], errors.Corrupt, "303 bytes"),
        (changed(0, "<I", 0), errors.Corrupt, "it begins with 0x0, a Mooncake tensor with 0x4d4f4f4e"),
        (changed(4, "<H", 2), errors.Unsupported, "version 2 and 304 bytes, this package reads version 1"),
        (changed(6, "<H", 312), errors.Unsupported, "version 1 and 312 bytes"),
        (changed(8, "<i", 15), errors.Corrupt, "dtype 15 and 2 dimensions"),
        (changed(8, "<i", -1), errors.Corrupt, "dtype -1"),
        (changed(12, "<i", 9), errors.Corrupt, "9 dimensions"),
        (changed(12, "<i", 3), errors.Corrupt, "3 dimensions of"),
        (changed(24, "<Q", 8), errors.Corrupt, "from byte 8 on"),
        (changed(32, "<Q", 23), errors.Corrupt, "says 23 bytes .* takes 24 bytes"),
        (changed(32, "<Q", 2**63), errors.Corrupt, "takes 24 bytes"),
        (changed(40, "<q", 4), errors.Unsupported, r"the part \[2, 3\] of a sharded tensor of \[4, 3\]"),
        (changed(168, "<i", 1), errors.Unsupported, "sharded"),
        (good[:-1], errors.Corrupt, "there are 327 in all"),
    ]:
        with pytest.raises(kind, match=message) as caught:
            decode_header(data)
        assert caught.value.reason == "mooncake.header"
    with pytest.raises(errors.Corrupt, match="the object has 0 bytes of tensor, its header says 24"):
        decode_tensor(good[:304])


@pytest.fixture
def wheel() -> Any:
    store = peers.need_mooncake("mooncake.store")
    for name in ("_serialize_tensor", "_deserialize_tensor", "_tensor_metadata_size"):
        if not hasattr(store, name):
            peers.is_missing(f"this wheel of Mooncake shows no {name}")
    return store


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", KNOWN)
def test_it_is_the_header_of_the_wheel(wheel: Any, dtype: str, shape: tuple[int, ...]) -> None:
    source = random_bits(dtype, shape)
    theirs, pointer, size, _owner = wheel._serialize_tensor(source)
    ours = encode_header(dtype, shape)
    assert ours == bytes(theirs)
    assert wheel._tensor_metadata_size() == len(ours)
    back = decode_tensor(bytes(theirs) + (ctypes.string_at(int(pointer), int(size)) if size else b""))
    assert (tuple(back.shape), bits(back)) == (shape, bits(source))
    read = wheel._deserialize_tensor(ours + bits(source))
    assert (read.dtype, tuple(read.shape), bits(read)) == (source.dtype, shape or (1,), bits(source))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def store(wheel: Any, tmp_path: Path) -> Iterator[Any]:
    port = free_port()
    options = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={free_port()}"]
    log = tmp_path / "master.log"
    with log.open("wb") as out:
        master = subprocess.Popen(
            [peers.FOLDER / "bin" / "mooncake_master", *options], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        until = time.monotonic() + 20
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                assert master.poll() is None, log.read_text(errors="replace")
                assert time.monotonic() < until, "the master does not listen"
                time.sleep(0.05)
        client = wheel.MooncakeDistributedStore()
        assert client.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", f"127.0.0.1:{port}") == 0
        yield client
        client.close()
    finally:
        master.kill()
        master.wait()


def test_peers_read_ours_and_theirs_are_read(store: Any) -> None:
    source = random_bits("bfloat16", (1, 16, 5, 6, 7))
    header = encode_header("bfloat16", source.shape)
    assert store.put_parts("ours", header, bits(source)) == 0
    read = store.get_tensor("ours")
    assert (read.dtype, read.shape, bits(read)) == (source.dtype, source.shape, bits(source))
    assert store.put_tensor("theirs", source.transpose(1, 2)) == 0
    back = decode_tensor(store.get("theirs"), framework="torch")
    assert (back.dtype, back.shape, bits(back)) == (source.dtype, (1, 5, 16, 6, 7), bits(source.transpose(1, 2)))
    assert store.put_tensor("whole", torch.arange(6)) == 0
    assert np.array_equal(decode_tensor(store.get("whole"), framework="numpy"), np.arange(6))
