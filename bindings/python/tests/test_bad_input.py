"""What bad input gets: a typed error at the call that names both values, and nothing that stays behind."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from processes import wait_for
from stagewire import errors
from stagewire.diffusion import DiffusionConnector, HostStore, StageHandle, StagePayload
from stagewire.worker import failure

if TYPE_CHECKING:
    from collections.abc import Iterator

X = torch.zeros(4, 5)
HELD = ("live_payloads", "live_bytes", "regions", "consumers", "allocated_bytes", "segments")


@pytest.fixture(scope="module", params=[["shm", "cma", "tcp"], ["shm"], ["shm", "tcp"]], ids="+".join)
def conn(request: pytest.FixtureRequest) -> Iterator[DiffusionConnector]:
    te_config = {"transports": request.param}
    with (
        tempfile.TemporaryDirectory(prefix="sw-") as folder,
        DiffusionConnector("p", te_config=te_config, run_dir=Path(folder) / "run", arena_bytes="1MiB") as made,
    ):
        yield made


def held(conn: DiffusionConnector) -> dict[str, int]:
    wait_for(lambda: conn.stats()["pins_held"] == 0, "consumers have let go")
    stats = conn.stats()
    return {name: stats[name] for name in HELD}


@pytest.mark.parametrize(
    ("given", "reason", "message"),
    [
        ({"kind": "picture"}, "payload.kind", 'unknown payload kind "picture"'),
        ({"lease": "forever"}, "payload.lease", 'unknown lease "forever"; it is one of delete_on_consume, ttl'),
        ({"lease": 30}, "payload.lease", "unknown lease 30"),
        ({"num_chunks": 0}, "payload.chunks", "num_chunks is 0; it must be 1 to 65536"),
        ({"num_chunks": -3}, "payload.chunks", "num_chunks is -3; it must be 1 to 65536"),
        ({"num_chunks": 5}, "payload.chunks", r"dimension 0 of shape \[4, 5\] into 5 chunks"),
        ({"num_chunks": 70_000}, "payload.chunks", "num_chunks is 70000"),
        ({"num_chunks": 2.0}, "payload.chunks", "num_chunks is 2.0"),
        ({"num_chunks": True}, "payload.chunks", "num_chunks is True"),
        ({"num_chunks": 2, "chunk_dim": 2}, "payload.chunks", "chunk_dim 2 is out of range.* 2 dim"),
        ({"num_chunks": 1, "chunk_dim": 2}, "payload.chunks", "chunk_dim 2 is out of range.* 2 dim"),
        ({"num_chunks": 2, "chunk_dim": 1 << 40}, "payload.chunks", "chunk_dim is 1099511627776"),
        ({"num_chunks": 1 << 70}, "payload.chunks", "num_chunks is 1180591620717411303424"),
        ({"tensor": torch.tensor(1.0), "num_chunks": 2}, "payload.chunks", "chunk_dim 0 is out of range.* 0 dim"),
        ({"tensor": torch.zeros(0, 3), "num_chunks": 2}, "payload.chunks", r"shape \[0, 3\] into 2 chunks"),
        ({"num_chunks": 2, "chunk_dim": -1}, "payload.chunks", "chunk_dim is -1; dimensions count from 0"),
        ({"num_chunks": 2, "chunk_dim": "t"}, "payload.chunks", "chunk_dim is 't'"),
        ({"metadata": {"x": {1, 2}}}, "payload.metadata", "metadata must be JSON-like .* set"),
        ({"metadata": float("nan")}, "payload.metadata", "metadata must be JSON-like"),
        ({"metadata": {1: 2}}, "payload.metadata", "names in it must be text"),
        ({"tensors": {"x": X}}, "payload.bundle", "give tensor= or tensors=, not both"),
        ({"tensor": None}, "payload.bundle", "give tensor= or tensors=, not neither"),
        ({"tensor": "text"}, "tensor.type", "'tensor' is a str, not a tensor"),
        ({"tensor": X.to_sparse()}, "tensor.not_shareable", "cannot be shared"),
        ({"tensor": torch.zeros(2, requires_grad=True)}, "tensor.not_shareable", r"detach\(\) it first"),
        ({"tensor": torch.zeros(2, device="meta")}, "tensor.not_shareable", "cannot be shared: .* meta"),
    ],
)
def test_payloads(conn: DiffusionConnector, given: dict[str, Any], reason: str, message: str) -> None:
    before = held(conn)
    payload = StagePayload(request_id="r", **{"tensor": X, **given})
    for publish in (conn.publish, conn.open):
        with pytest.raises(errors.Invalid, match=message) as caught:
            publish(payload)
        assert caught.value.reason == reason
    assert held(conn) == before


def test_a_bundle_of_which_one_is_bad(conn: DiffusionConnector) -> None:
    before = held(conn)
    for bad, reason in [(object(), "tensor.type"), ([X, "text"], "tensor.type"), ({"x": X}, "tensor.type")]:
        with pytest.raises(errors.Invalid) as caught:
            conn.publish(StagePayload(request_id="r", tensors={"good": X, "more": [X, X], "bad": bad}))
        assert caught.value.reason == reason
        assert "bad" in caught.value.details["tensor"]
    assert held(conn) == before


def test_payloads_larger_than_the_arena(run_dir: Path) -> None:
    with DiffusionConnector("p", te_config={"transports": ["shm"]}, run_dir=run_dir, arena_bytes="1MiB") as conn:
        before = held(conn)
        large = torch.zeros(1 << 19)
        for bundle in ({"x": large}, {"first": X, "x": large}, {"x": [X, large]}):
            with pytest.raises(errors.Exhausted, match=r"tensor \d \(2\.0 MiB\) in the arena.* 1\.0 MiB") as caught:
                conn.publish(StagePayload(request_id="r", tensors=bundle))
            assert caught.value.reason == "arena.exhausted"
        assert {**held(conn), "segments": 0} == {**before, "segments": 0}


def test_payloads_larger_than_the_store(run_dir: Path) -> None:
    with HostStore("1MiB", run_dir=run_dir) as store, DiffusionConnector("p", "store", run_dir=run_dir) as conn:
        before = held(conn)
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1 << 19)))
        with pytest.raises(errors.Invalid, match=r"2\.0 MiB is larger than the whole store \(1\.0 MiB\)"):
            handle.wait(10)
        with pytest.raises(errors.Invalid, match="larger than the whole store"):
            conn.fetch(handle)
        assert held(conn) == before
        assert (store.live(), store.usage()[0]) == ([], 0)


class OnDevice:
    """A tensor in the memory of some device."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)

    def __dlpack__(self, **options: Any) -> Any:
        raise AssertionError


def read_only() -> Any:
    array: Any = np.zeros((4, 5), dtype=np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("dst", "kind", "message"),
    [
        (torch.zeros(5, 4), errors.Invalid, r"dst 'tensor' has shape \[5, 4\], the payload has \[4, 5\]"),
        (torch.zeros(4, 5, 1), errors.Invalid, r"has shape \[4, 5, 1\], the payload has \[4, 5\]"),
        (torch.zeros(4, 5, dtype=torch.bfloat16), errors.Invalid, "has dtype bfloat16, the payload has float32"),
        (torch.zeros(5, 4).T, errors.Invalid, r"is not contiguous: its strides are \[1, 4\] elements"),
        (read_only(), errors.Invalid, "is read-only"),
        (OnDevice(), errors.Unsupported, "'tensor'.*memory of device 3 of DLPack type 2"),
        ({"y": X}, errors.Invalid, r"dst has the names \['y'\], the payload has \['tensor'\]"),
        ({"tensor": [X]}, errors.Invalid, "'tensor' is a list, not a tensor"),
        (7, errors.Invalid, "is a int, not a tensor"),
    ],
)
def test_destinations(conn: DiffusionConnector, dst: Any, kind: type[Exception], message: str) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=X))
    before = held(conn)
    for consume in (conn.consume, conn.fetch):
        with pytest.raises(kind, match=message):
            consume(handle, dst=dst)
    assert held(conn) == before
    assert torch.equal(conn.fetch(handle, framework="torch"), X), "the payload is still there"


def test_every_flipped_bit_of_a_handle_is_noticed(conn: DiffusionConnector) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=X, metadata={"prompt": "a red cat"}))
    before, data = held(conn), handle.to_bytes()
    for position in range(len(data)):
        for bit in (1, 0x80):
            forged = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
            with pytest.raises((errors.Corrupt, errors.Unsupported, errors.Invalid)):
                StageHandle.from_bytes(forged)
    for length in range(len(data)):
        with pytest.raises((errors.Corrupt, errors.Invalid)):
            conn.consume(data[:length])
    with pytest.raises((errors.Corrupt, errors.Invalid)):
        conn.consume(data + b"\0")
    with pytest.raises(errors.Unsupported, match="version 7; this build reads version"):
        StageHandle.from_bytes(data[:4] + b"\x07\x00" + data[6:])
    assert held(conn) == before
    conn.release(handle)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"request_id": "\ud800"}, "argument.text"),
        ({"request_id": 7}, "argument.type"),
        ({"kind": 7}, "argument.type"),
        ({"metadata": {"prompt": "\udfff"}}, "payload.metadata"),
        ({"metadata": {"\ud800": 1}}, "payload.metadata"),
    ],
)
def test_what_others_cannot_be_told(conn: DiffusionConnector, given: dict[str, Any], reason: str) -> None:
    before = held(conn)
    payload = StagePayload(**{"request_id": "r", "tensor": X, **given})
    for publish in (conn.publish, conn.open):
        with pytest.raises(errors.Invalid) as caught:
            publish(payload)
        assert caught.value.reason == reason
        str(caught.value).encode()
    assert held(conn) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda conn, _: conn.publish("payload"),
        lambda conn, _: conn.publish(StagePayload(request_id="r", tensor=X), consumer="text"),
        lambda conn, _: conn.publish(StagePayload(request_id="r", tensor=X), expires="soon"),
        lambda conn, _: conn.consume("text"),
        lambda conn, _: conn.fetch(None),
        lambda conn, handle: conn.fetch(handle, deadline="soon"),
        lambda conn, handle: conn.fetch(handle, deadline=True),
        lambda conn, handle: conn.consume(handle, on_chunk=3),
        lambda conn, _: conn.release(5),
        lambda _, handle: handle.wait("soon"),
        lambda _, handle: handle.wait_released("soon"),
        lambda _, handle: DiffusionConnector(7),  # type: ignore[arg-type]
        lambda _, handle: DiffusionConnector("p", arena_bytes=1.5),  # type: ignore[arg-type]
        lambda _, handle: DiffusionConnector("p", run_dir=3),  # type: ignore[arg-type]
        lambda _, handle: HostStore(1.5),  # type: ignore[arg-type]
    ],
)
def test_wrong_types(conn: DiffusionConnector, call: Any) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=X, lease="pinned"))
    before = held(conn)
    with pytest.raises(errors.Invalid, match="it must be") as caught:
        call(conn, handle)
    assert caught.value.reason == "argument.type"
    assert held(conn) == before
    conn.release(handle)


@pytest.mark.parametrize("forged", [b"", b"x", bytes(100), b"\xff" * 300])
def test_forged_handles(conn: DiffusionConnector, forged: bytes) -> None:
    for call in (conn.consume, conn.fetch, conn.release, StageHandle.from_bytes):
        with pytest.raises((errors.Corrupt, errors.Invalid, errors.Unsupported)) as caught:
            call(forged)
        assert caught.value.reason in {"handle.malformed", "handle.version"}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, dtype=torch.uint8).expand(1 << 45),
        np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 45,), (0,)),
        np.broadcast_to(np.zeros(1, np.uint8), (1 << 45,)),
    ],
    ids=["torch", "numpy", "read-only"],
)
def test_copies_that_find_no_memory(conn: DiffusionConnector, tensor: Any) -> None:
    """Their elements are all the same one; a copy of them is larger than the memory of any host."""
    before, copies = held(conn), conn.stats()["contiguous_copies"]
    with pytest.raises(errors.Exhausted, match=str(1 << 45)) as caught:
        conn.publish(StagePayload(request_id="r", tensor=tensor))
    assert caught.value.reason == "tensor.memory"
    assert (held(conn), conn.stats()["contiguous_copies"]) == (before, copies)


def test_an_address_with_more_behind_it_is_none(conn: DiffusionConnector) -> None:
    for address in (b"", conn.address[:-1], conn.address + b"x"):
        with pytest.raises(errors.Invalid, match="no address of a connector") as caught:
            conn.publish(StagePayload(request_id="r", tensor=X), consumer=address)
        assert caught.value.reason == "connector.address"


def test_destinations_of_a_bundle(conn: DiffusionConnector) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensors={"a": X, "b": [X, X], "none": None}))
    before = held(conn)
    one, memory = torch.zeros(4, 5), torch.zeros(50)
    apart = [torch.zeros(4, 5), torch.zeros(4, 5)]
    for dst, message in [
        ({"a": one, "b": [one, apart[0]], "none": None}, r"dst 'a' and dst 'b\[0\]' share memory"),
        ({"a": one, "b": [memory[:20].view(4, 5), memory[10:30].view(4, 5)], "none": None}, "share memory"),
        ({"a": one, "b": apart, "none": torch.zeros(1)}, "dst 'none' is a Tensor, the payload has None"),
        ({"a": one, "b": apart[:1], "none": None}, "dst 'b' is a list of 1, the payload has a list of 2"),
    ]:
        with pytest.raises(errors.Invalid, match=message) as caught:
            conn.fetch(handle, dst=dst)
        assert caught.value.reason == "consume.destination"
    assert held(conn) == before
    conn.fetch(handle, dst={"a": one, "b": apart, "none": None})


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (RuntimeError("half \ud800 text"), r"RuntimeError: half \\ud800 text"),
        (errors.Exhausted("half \ud800 text", reason="stage.memory"), r"half \\ud800 text"),
        (Unspeakable(), r"Unspeakable: \(its text cannot be had\)"),
    ],
)
def test_whatever_a_stream_is_left_by_fails_the_payload(conn: DiffusionConnector, raised: Any, told: str) -> None:
    with pytest.raises(type(raised)), conn.open(StagePayload(request_id="r", tensor=X, num_chunks=2)) as stream:
        raise raised
    with pytest.raises(errors.StagewireError, match=told):
        conn.fetch(stream.handle)
    stream.fail("again")
    assert (stream.handle.done(), stream.handle.wait(1), stream.handle.mode) == (True, True, "p2p")
    failed = failure.of("denoise", raised)
    assert all(text.encode() for text in (failed.message, *failed.details.values()))


@pytest.mark.parametrize("index", [-1, 2, 1 << 40, "0", None, 1.0, True])
def test_chunks_that_there_are_not(conn: DiffusionConnector, index: Any) -> None:
    with conn.open(StagePayload(request_id="r", tensor=X, num_chunks=2)) as stream:
        with pytest.raises(errors.Invalid) as caught:
            stream.ready(index)
        assert caught.value.reason == "payload.chunks"
    conn.release(stream.handle)


def test_a_stream_that_nobody_has_any_more_fails(conn: DiffusionConnector) -> None:
    handle = conn.open(StagePayload(request_id="r", tensor=X, num_chunks=2)).handle
    gc.collect()
    with pytest.raises(errors.Internal, match="before every chunk was ready"):
        conn.fetch(handle, deadline=20)


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), 1e300])
def test_times_that_are_none(conn: DiffusionConnector, seconds: float) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=X))
    payload = StagePayload(request_id="r", tensor=X)
    calls: list[Any] = [
        lambda: handle.wait(seconds),
        lambda: handle.exception(seconds),
        lambda: handle.wait_released(seconds),
        lambda: handle.wait_unread(seconds),
        lambda: conn.fetch(handle, deadline=seconds),
        lambda: conn.publish(payload, expires=seconds),
        lambda: DiffusionConnector("p", deadline=seconds),
    ]
    for call in calls:
        with pytest.raises(errors.Invalid) as caught:
            call()
        assert caught.value.reason == "argument.seconds"
        assert len(caught.value.message) < 200
    conn.release(handle)


def test_a_closed_connector_refuses_at_the_call(run_dir: Path) -> None:
    conn = DiffusionConnector("p", run_dir=run_dir)
    handle = conn.publish(StagePayload(request_id="r", tensor=X))
    conn.close()
    payload = StagePayload(request_id="r", tensor=X)
    calls: list[Any] = [
        lambda: conn.publish(payload),
        lambda: conn.open(payload),
        lambda: conn.consume(handle),
        lambda: conn.fetch(handle),
        lambda: conn.allocate((3,)),
        lambda: conn.register(torch.zeros(3)),
    ]
    for call in calls:
        with pytest.raises(errors.Cancelled) as caught:
            call()
        assert caught.value.reason == "connector.closed"
    assert (handle.done(), handle.cancel(), handle.wait(1), handle.wait_released(1)) == (True, False, True, True)
