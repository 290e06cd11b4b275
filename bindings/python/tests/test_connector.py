"""Payloads from one process to another: whole and in chunks, with and without destinations, and what goes wrong."""

from __future__ import annotations

import concurrent.futures
import itertools
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peer
import pytest
import torch
from processes import Peer, wait_for
from stagewire import errors
from stagewire.diffusion import DiffusionConnector, HostStore, StageHandle, StagePayload
from test_dlpack import DTYPES, NOT_IN_NUMPY, random_bits

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=["borrowed", "staged"])
def conn(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[DiffusionConnector]:
    te_config = None if request.param == "borrowed" else {"transports": ["shm"]}
    with DiffusionConnector("producer", run_dir=run_dir, te_config=te_config) as made:
        yield made
        wait_for(lambda: made.live() == [], "every payload is gone")


HOW = ["chunks", "chunks-dst", "fetch", "fetch-dst"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(conn: DiffusionConnector, other: Peer, dtype: str, how: str) -> None:
    source = random_bits(dtype, (2, 5, 3))
    handle = conn.publish(StagePayload(request_id="r", tensor=source))
    found = other(peer.consume, handle.to_bytes(), how, framework=None if "dst" in how else "torch")
    whole = found if how.startswith("fetch") else found[0]
    assert whole == (dtype, (2, 5, 3), peer.bits(source))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("shape", "dim", "count"),
    [
        ((1, 16, 21, 6, 8), 2, 8),
        ((1, 16, 31, 2, 3), 2, 8),
        ((7, 3), 0, 7),
        ((7, 3), 1, 2),
        ((2, 3, 4, 5), 3, 5),
        ((2, 3, 4, 5), 0, 2),
        ((5, 0, 2), 0, 3),
        ((4,), 0, 1),
    ],
    ids=str,
)
def test_chunks_along_any_dimension(
    conn: DiffusionConnector, other: Peer, shape: tuple[int, ...], dim: int, count: int, how: str
) -> None:
    source = random_bits("bfloat16", shape)
    handle = conn.publish(StagePayload(request_id="r", tensor=source, chunk_dim=dim, num_chunks=count))
    assert (handle.num_chunks, handle.chunk_dim) == (count, None if count == 1 else dim)
    found = other(peer.consume, handle.to_bytes(), how, framework=None if "dst" in how else "torch")
    if how.startswith("fetch"):
        assert found == ("bfloat16", shape, peer.bits(source))
        return
    parts = [torch.narrow_copy(source.view(torch.int16), dim, start, n) for start, n in slices(shape[dim], count)]
    assert found == [("bfloat16", tuple(part.shape), peer.bits(part)) for part in parts]


def slices(extent: int, count: int) -> list[tuple[int, int]]:
    """The rule of uneven chunks, by hand: the first ones take one more."""
    sizes = [extent // count + (1 if index < extent % count else 0) for index in range(count)]
    return list(zip(itertools.accumulate([0, *sizes]), sizes, strict=False))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)], ids=str)
def test_scalars_and_empty_tensors(conn: DiffusionConnector, other: Peer, shape: tuple[int, ...]) -> None:
    source = random_bits("float64", shape)
    for how in HOW:
        handle = conn.publish(StagePayload(request_id="r", tensor=source))
        found = other(peer.consume, handle.to_bytes(), how, framework=None if "dst" in how else "torch")
        assert (found if how.startswith("fetch") else found[0]) == ("float64", shape, peer.bits(source))


@pytest.mark.parametrize("how", HOW)
def test_bundles(conn: DiffusionConnector, other: Peer, how: str) -> None:
    tensors = {
        "prompt_embeds": random_bits("float16", (1, 4, 6)),
        "negative": None,
        "mid": [random_bits("int64", (2, 4)), random_bits("bool", (3, 5))],
        "none_of_many": [],
        "view": random_bits("float32", (4, 6)).T,
    }
    payload = StagePayload(request_id="r", kind="embedding", tensors=tensors, chunk_dim=1, num_chunks=2)
    handle = conn.publish(payload)
    assert conn.stats()["contiguous_copies"] == 1
    assert handle.spec["mid"] == [("int64", (2, 4)), ("bool", (3, 5))]
    found = other(peer.consume, handle.to_bytes(), how, framework=None if "dst" in how else "torch")
    whole = peer.flat({name: list(v) if isinstance(v, list) else v for name, v in tensors.items()})
    if how.startswith("fetch"):
        assert found == whole
        return
    assert len(found) == 2
    first = found[0]
    assert first["negative"] is None
    assert first["none_of_many"] == []
    assert first["view"] == peer.flat(tensors["view"][:, :2])
    assert found[1]["mid"] == peer.flat([tensors["mid"][0][:, 2:], tensors["mid"][1][:, 3:]])


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        True,
        [],
        {},
        2**70,
        -1,
        0.1 + 0.2,
        5e-324,
        'ünïcödé 🐈 \x00\x1f\u2028 "quoted" \\',
        {"z": 1, "a": [None, {"nested": [1.5, "x"]}], "": 0},
        "prompt " * 10_000,
    ],
    ids=lambda value: str(value)[:20],
)
def test_metadata_comes_back_as_it_was(run_dir: Path, metadata: Any) -> None:
    with DiffusionConnector("producer", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensors={}, metadata=metadata))
        back = StageHandle.from_bytes(handle.to_bytes()).metadata
        assert back == metadata
        assert type(back) is type(metadata)
        if isinstance(metadata, dict):
            assert list(back) == list(metadata), "the order is kept"
        conn.release(handle)


@pytest.mark.parametrize(
    "metadata", [float("nan"), float("inf"), {1: 2}, {"x": {None: 1}}, b"x", {1, 2}, object(), "\ud800"], ids=repr
)
def test_metadata_that_is_not_json(run_dir: Path, metadata: Any) -> None:
    with DiffusionConnector("producer", run_dir=run_dir) as conn:
        with pytest.raises(errors.Invalid, match="JSON-like") as caught:
            conn.publish(StagePayload(request_id="r", tensors={}, metadata=metadata))
        assert caught.value.reason == "payload.metadata"
        assert conn.live() == []


def test_handles_say_what_they_are(run_dir: Path) -> None:
    with DiffusionConnector("denoise", run_dir=run_dir) as conn:
        tensor = torch.zeros(1, 16, 21, 2, 2, dtype=torch.bfloat16)
        handle = conn.publish(StagePayload(request_id="job 7", tensor=tensor, chunk_dim=2, num_chunks=8))
        again = StageHandle.from_bytes(handle.to_bytes())
        assert (again.request_id, again.stage, again.kind, again.mode) == ("job 7", "denoise", "latent", "p2p")
        assert (again.shape, again.dtype, again.nbytes) == ((1, 16, 21, 2, 2), "bfloat16", tensor.nbytes)
        assert again.payload_id == handle.payload_id
        assert len(handle.to_bytes()) < 4096
        assert "capab" not in repr(handle).lower()
        assert handle.wait_released(0.01) is False
        with pytest.raises(errors.Unsupported, match="only its producer"):
            again.wait_released(0)
        conn.release(handle)
        assert handle.wait_released(5) is True


def test_wrong_handles(run_dir: Path) -> None:
    with DiffusionConnector("producer", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(2)))
        data = handle.to_bytes()
        with pytest.raises(errors.Invalid, match="7 bytes are not a Stagewire handle"):
            StageHandle.from_bytes(b"nothing")
        with pytest.raises(errors.Corrupt, match="truncated or damaged"):
            StageHandle.from_bytes(data[:-3])
        with pytest.raises(errors.Corrupt):
            StageHandle.from_bytes(data[:40] + bytes([data[40] ^ 1]) + data[41:])
        with pytest.raises(errors.Unsupported, match="version 2; this build reads version 1"):
            StageHandle.from_bytes(data[:4] + b"\x02\x00" + data[6:])
        conn.release(handle)


def test_the_payload_is_deleted_when_it_was_consumed(conn: DiffusionConnector, other: Peer) -> None:
    source = torch.ones(1000)
    handle = conn.publish(StagePayload(request_id="r", tensor=source, num_chunks=4))
    assert conn.live() == [handle.payload_id]
    other(peer.consume, handle.to_bytes())
    assert handle.wait_released(5)
    kind, reason, message, details, _ = other(peer.consume_error, handle.to_bytes())
    assert (kind, reason) == ("not_found", "payload.gone")
    assert details["payload"] == handle.payload_id
    assert 'request "r"' in message
    wait_for(lambda: conn.stats()["pins_held"] == 0, "no pin is left")
    assert conn.stats()["regions"] == 0
    assert other(peer.stats)["consumers"] == 0


def test_memory_is_given_back(run_dir: Path, other: Peer) -> None:
    import weakref

    class Owner(np.ndarray):
        pass

    array: Any = np.arange(100_000, dtype=np.int32).view(Owner)
    alive = weakref.ref(array)
    with DiffusionConnector("producer", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=array))
        expected = ("int32", (100_000,), array.tobytes())
        del array
        assert other(peer.consume, handle.to_bytes(), framework="torch") == [expected]
        wait_for(lambda: alive() is None, "the array is gone")


def test_a_dead_producer_is_noticed(run_dir: Path, other: Peer) -> None:
    """Killed while a consumer waits for its chunk: an error within a second, and nothing left of it."""
    script = """
        import sys, time, torch
        from stagewire.diffusion import DiffusionConnector, StagePayload
        conn = DiffusionConnector("producer", run_dir=sys.argv[1])
        stream = conn.open(StagePayload(request_id="r", tensor=torch.zeros(4), num_chunks=2))
        stream.ready(0)
        print(stream.handle.to_bytes().hex(), flush=True)
        time.sleep(100)
    """
    command = [sys.executable, "-c", textwrap.dedent(script), str(run_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as producer:
        assert producer.stdout is not None
        handle = bytes.fromhex(producer.stdout.readline())
        waiting = other.start(peer.consume_error, handle)
        with pytest.raises(concurrent.futures.TimeoutError):
            waiting.result(0.3)
        killed = time.monotonic()
        producer.kill()
        kind, reason, message, details, _ = waiting.result(20)
        assert time.monotonic() - killed < 1.0
    assert (kind, reason) == ("unavailable", "peer.lost")
    assert (details["stage"], details["chunk"], details["chunks"]) == ("producer", "1", "2")
    assert str(producer.pid) in message


def test_streaming(run_dir: Path, other: Peer) -> None:
    handle = StageHandle.from_bytes(other(peer.open_publish, 3))
    with DiffusionConnector("consumer", run_dir=run_dir) as conn:
        chunks = conn.consume(handle, framework="torch", deadline=20)
        other(peer.stream, "ready", 1)
        with pytest.raises(errors.Deadline, match=r"chunk 0 of 3.*not there within 50ms") as caught:
            next(conn.consume(handle, deadline=0.05))
        assert caught.value.reason == "consume.deadline"
        other(peer.stream, "ready", 0)
        assert [next(chunks).tolist(), next(chunks).tolist()] == [[[0, 1]], [[2, 3]]]
        other(peer.stream, "fail", "out of luck")
        with pytest.raises(errors.Internal, match="the producer failed: out of luck") as failed:
            next(chunks)
        assert failed.value.reason == "payload.failed"


def test_leaving_a_stream_by_an_exception_fails_it(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        payload = StagePayload(request_id="r", tensor=torch.zeros(4), num_chunks=2)
        stream = conn.open(payload)
        with pytest.raises(RuntimeError), stream:
            _give_up(stream)
        with pytest.raises(errors.Internal, match="RuntimeError: no more"):
            list(conn.consume(stream.handle, deadline=5))
        with conn.open(payload) as stream:
            stream.ready(1)
            with pytest.raises(errors.Invalid, match="chunk 2 does not exist, the payload has 2"):
                stream.ready(2)
            with pytest.raises(errors.Invalid, match="count from 0"):
                stream.ready(-1)
            stream.ready(0)
        assert len(list(conn.consume(stream.handle, deadline=5))) == 2
        with pytest.raises(errors.Invalid, match="strict=True"):
            conn.open(StagePayload(request_id="r", tensor=torch.zeros(2, 3).T))


def _give_up(stream: Any) -> None:
    stream.ready(0)
    raise RuntimeError("no more")


def test_one_consumer_at_a_time(run_dir: Path, other: Peer) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.arange(4), num_chunks=4))
        first = conn.consume(handle, framework="torch")
        assert next(first).tolist() == [0]
        kind, reason, message, _, _ = other(peer.consume_error, handle.to_bytes())
        assert (kind, reason) == ("conflict", "payload.claimed")
        assert "another consumer" in message
        first.close()  # type: ignore[attr-defined]
        # Given up before its end: the next consumer begins at chunk 0.
        assert len(other(peer.consume, handle.to_bytes(), framework="torch")) == 4
        assert handle.wait_released(5)


def test_destinations_are_views_of_the_callers_tensor(run_dir: Path, other: Peer) -> None:
    with DiffusionConnector("consumer", run_dir=run_dir) as conn:
        handle = other(peer.publish, (2, 6, 3), chunk_dim=1, num_chunks=4)
        dst = torch.full((2, 6, 3), -1.0)
        seen = []
        for chunk in conn.consume(handle, dst=dst):
            assert chunk.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr()
            seen.append(tuple(chunk.shape))
        assert seen == [(2, 2, 3), (2, 2, 3), (2, 1, 3), (2, 1, 3)]
        assert torch.equal(dst, torch.arange(36.0).reshape(2, 6, 3))
        handle = other(peer.publish, (2, 6, 3), chunk_dim=1, num_chunks=4)
        array: Any = np.empty((2, 6, 3), dtype=np.float32)
        assert conn.fetch(handle, dst=array) is array
        assert np.array_equal(array, np.arange(36, dtype=np.float32).reshape(2, 6, 3))


def test_wrong_destinations_name_both_values(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(2, 3)))
        frozen: Any = np.zeros((2, 3), dtype=np.float32)
        frozen.flags.writeable = False
        for dst, message in [
            (torch.zeros(3, 2), r"dst 'tensor' has shape \[3, 2\], the payload has \[2, 3\]"),
            (torch.zeros(2, 3, dtype=torch.float16), "has dtype float16, the payload has float32"),
            (torch.zeros(3, 2).T, r"is not contiguous: its strides are \[1, 2\] elements"),
            (frozen, "is read-only"),
            ({"x": torch.zeros(2, 3)}, r"dst has the names \['x'\], the payload has \['tensor'\]"),
            (torch.zeros(2, 3, requires_grad=True), r"detach\(\) it first"),
            ("text", "is a str, not a tensor"),
        ]:
            with pytest.raises(errors.Invalid, match=message):
                conn.consume(handle, dst=dst)
        bundle = conn.publish(StagePayload(request_id="r", tensors={"a": [torch.zeros(1)] * 2, "n": None}))
        with pytest.raises(errors.Invalid, match="dst 'a' is a list of 1, the payload has a list of 2"):
            conn.consume(bundle, dst={"a": [torch.zeros(1)], "n": None})
        with pytest.raises(errors.Invalid, match="the payload a bundle of a, n"):
            conn.consume(bundle, dst=torch.zeros(1))
        with pytest.raises(errors.Invalid) as caught:
            conn.consume(handle, dst={"x": torch.zeros(2, 3)})
        assert caught.value.reason == "consume.destination"
        assert conn.stats()["consumers"] == 0
        conn.release(handle)
        conn.release(bundle)


def test_wrong_payloads_name_both_values(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        x = torch.zeros(4, 5)
        for payload, message in [
            (StagePayload(request_id="r", tensor=x, num_chunks=0), "num_chunks is 0; it must be 1 to 65536"),
            (StagePayload(request_id="r", tensor=x, num_chunks=-1), "num_chunks is -1"),
            (StagePayload(request_id="r", tensor=x, num_chunks=70_000), "num_chunks is 70000"),
            (
                StagePayload(request_id="r", tensor=x, num_chunks=5),
                r"dimension 0 of shape \[4, 5\] into 5 chunks",
            ),
            (StagePayload(request_id="r", tensor=x, num_chunks=2, chunk_dim=2), "chunk_dim 2 is out of range.* 2 dim"),
            (StagePayload(request_id="r", tensor=x, num_chunks=2, chunk_dim=-1), "chunk_dim is -1; dimensions count"),
            (StagePayload(request_id="r", tensors={}, num_chunks=2), "no tensor to cut into 2 chunks"),
            (StagePayload(request_id="r", tensor=x, kind="picture"), 'unknown payload kind "picture"'),
            (StagePayload(request_id="r", tensor=x, lease="forever"), 'unknown lease "forever"; it is one of delete'),
            (StagePayload(request_id="r"), "give tensor= or tensors=, not neither"),
            (StagePayload(request_id="r", tensor=x, tensors={"x": x}), "not both"),
        ]:
            with pytest.raises(errors.Invalid, match=message):
                conn.publish(payload)
        stats = conn.stats()
        assert (stats["live_payloads"], stats["regions"]) == (0, 0), "nothing leaked"


def test_wrong_connectors(run_dir: Path) -> None:
    with pytest.raises(errors.Invalid, match="unknown transfer_mode 'rdma'; it is p2p or store or auto") as mode:
        DiffusionConnector("a", "rdma", run_dir=run_dir)  # type: ignore[arg-type]
    assert mode.value.reason == "connector.mode"
    for config, message in [
        ({"te_config": {"transports": ["rdma"]}}, "unknown transport 'rdma' in te_config; it is shm or cma"),
        ({"te_config": {"transports": "tcp"}}, "te_config has the transports 'tcp'; it must be a list"),
        ({"te_config": {"transports": []}}, r"te_config has the transports \[\]; it must be a list"),
        ({"te_config": {"protocol": "tcp"}}, "te_config has the unknown key 'protocol'; it may have transports"),
        ({"te_config": "tcp"}, "te_config is a str; it must be a mapping"),
        ({"store_config": {"backend": "s3"}}, "unknown backend 's3' in store_config"),
    ]:
        with pytest.raises(errors.Invalid, match=message) as caught:
            DiffusionConnector("a", run_dir=run_dir, **config)  # type: ignore[arg-type]
        assert caught.value.reason == "connector.config"
    assert not run_dir.exists(), "nothing was made"
    with pytest.raises(errors.Invalid, match='"A" is not a name'):
        DiffusionConnector("A", run_dir=run_dir)
    with pytest.raises(errors.Invalid, match="is not a number of bytes") as size:
        DiffusionConnector("a", run_dir=run_dir, arena_bytes="lots")
    assert size.value.reason == "argument.bytes"
    with pytest.raises(errors.Invalid, match="deadline is -1"):
        DiffusionConnector("a", run_dir=run_dir, deadline=-1)
    with pytest.raises(errors.Invalid, match="shorter run directory"):
        DiffusionConnector("a", run_dir=run_dir / ("x" * 120))
    with DiffusionConnector("a", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1)))
        with pytest.raises(errors.Invalid, match="deadline is -1 s; it must be 0 to 1e") as seconds:
            conn.fetch(handle, deadline=-1)
        assert seconds.value.reason == "argument.seconds"


def test_a_payload_larger_than_the_arena(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir, te_config={"transports": ["shm"]}, arena_bytes="1MiB") as conn:
        with pytest.raises(errors.Exhausted, match=r"2\.0 MiB") as caught:
            conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1 << 19)))
        assert "arena" in str(caught.value)
        assert conn.live() == []


def test_closed_connectors_say_so(run_dir: Path) -> None:
    conn = DiffusionConnector("p", run_dir=run_dir)
    conn.close()
    conn.close()
    with pytest.raises(
        errors.StagewireError, match='request "r", stage p: the connector of p is closed; make a new one'
    ) as caught:
        conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1)))
    assert caught.value.reason == "connector.closed"
    assert not list((run_dir / "peers").iterdir()), "no socket is left"


def test_released_memory_is_forgotten(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        tensor = torch.zeros(8)
        first = conn.register(tensor)
        assert conn.register(tensor) is first
        first.release()
        second = conn.register(tensor)
        assert second is not first
        assert not second.released
        assert conn.stats()["registered"] == 1


def test_a_store_with_a_folder_outlives_its_process(run_dir: Path) -> None:
    folder = run_dir.with_name("data")
    script = """
import signal, sys
from stagewire.diffusion import HostStore
store = HostStore("16MiB", run_dir=sys.argv[1], data_dir=sys.argv[2])
print("ready", flush=True)
signal.pause()
"""
    first = subprocess.Popen([sys.executable, "-c", script, run_dir, folder], stdout=subprocess.PIPE, text=True)
    with first:
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "ready\n"
            with DiffusionConnector("p", "store", run_dir=run_dir) as conn:
                handle = conn.publish(StagePayload(request_id="r", tensor=torch.arange(1000)))
                assert handle.wait(10)
                data = handle.to_bytes()
        finally:
            first.kill()
    with (
        HostStore("16MiB", run_dir=run_dir, data_dir=folder) as store,
        DiffusionConnector("c", run_dir=run_dir) as conn,
    ):
        assert store.recovered == (1, 0)
        assert torch.equal(conn.fetch(data, framework="torch"), torch.arange(1000))


def test_unread_payloads_expire(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1)), expires=0.05)
        assert handle.wait_released(5)
        assert conn.stats()["expired"] == 1
        with pytest.raises(errors.NotFound, match="nobody consumed it in time"):
            conn.fetch(handle)


@pytest.mark.parametrize("dtype", sorted(NOT_IN_NUMPY))
def test_frameworks(run_dir: Path, dtype: str) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:

        def handle(kind: str) -> StageHandle:
            return conn.publish(StagePayload(request_id="r", tensor=random_bits(kind, (3,))))

        assert isinstance(conn.fetch(handle("int8"), framework="numpy"), np.ndarray)
        assert isinstance(conn.fetch(handle(dtype)), torch.Tensor)
        native = conn.fetch(handle(dtype), framework="native")
        assert native.tobytes() == peer.bits(random_bits(dtype, (3,)))
        kept = handle(dtype)
        with pytest.raises(errors.Unsupported, match=f"NumPy has no {dtype}"):
            conn.fetch(kept, framework="numpy")
        with pytest.raises(errors.Invalid, match="unknown framework 'jax'"):
            conn.fetch(kept, framework="jax")  # type: ignore[arg-type]
        conn.release(kept)


def test_views_outlive_payload_and_connector(run_dir: Path, other: Peer) -> None:
    conn = DiffusionConnector("c", run_dir=run_dir)
    tensor = conn.fetch(other(peer.publish, (100, 100)), framework="torch")
    wait_for(lambda: other(peer.stats, "producer")["live_payloads"] == 0, "the producer let go")
    conn.close()
    assert torch.equal(tensor, torch.arange(10_000.0).reshape(100, 100))


def test_ctrl_c_ends_a_wait(run_dir: Path, other: Peer) -> None:
    """A signal while Rust waits, as from the keyboard."""
    handle = other(peer.open_publish, 2)
    with DiffusionConnector("c", run_dir=run_dir) as conn:
        chunks = conn.consume(handle, deadline=60)
        import threading

        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            next(chunks)
        assert time.monotonic() - begin < 5
        # Nothing is broken by that.
        other(peer.stream, "ready", 0)
        assert next(conn.consume(handle, framework="torch", deadline=5)).tolist() == [[0, 1]]


def test_other_threads_run_while_one_waits(run_dir: Path, other: Peer) -> None:
    import threading

    handle = other(peer.open_publish, 1)
    with DiffusionConnector("c", run_dir=run_dir) as conn:
        found: list[Any] = []
        waiter = threading.Thread(target=lambda: found.append(conn.fetch(handle, framework="torch", deadline=30)))
        waiter.start()
        turns = 0
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            turns += 1
        assert turns > 100, "this thread was held up"
        assert not found
        other(peer.stream, "ready", 0)
        waiter.join(10)
        assert found[0].tolist() == [[0, 1]]


def test_a_forked_child_is_refused(run_dir: Path) -> None:
    script = f"""
        import os
        import stagewire.errors
        from stagewire.diffusion import DiffusionConnector, StagePayload
        conn = DiffusionConnector("p", run_dir={str(run_dir)!r})
        payload = StagePayload(request_id="r", tensor=bytearray(9), lease="pinned")
        handle = conn.publish(payload)
        calls = [
            lambda: DiffusionConnector("c", run_dir={str(run_dir)!r}),
            lambda: conn.publish(payload),
            lambda: conn.fetch(handle),
            lambda: conn.allocate((3,), "uint8", framework="native"),  # the memory is the parent's, too
            lambda: conn.register(bytearray(9)),
            lambda: conn.release(handle),
            conn.close,
        ]
        pid = os.fork()
        if pid == 0:
            for index, call in enumerate(calls):
                try:
                    call()
                except stagewire.errors.Unsupported as error:
                    print(error, flush=True)
                else:
                    os._exit(1 + index)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert conn.live() == [handle.payload_id]
        conn.close()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count('use the "spawn" start method') == 7


def test_only_what_is_used_is_imported(run_dir: Path) -> None:
    """Neither torch nor NumPy nor an HTTP client comes with the package, nor with publishing and reading bytes."""
    script = f"""
        import sys
        import stagewire
        from stagewire.diffusion import DiffusionConnector, StagePayload
        with DiffusionConnector("p", run_dir={str(run_dir)!r}) as conn:
            handle = conn.publish(StagePayload(request_id="r", tensors={{"file": b"bytes"}}))
            assert conn.fetch(handle, framework="native")["file"].tobytes() == b"bytes"
        print([name for name in ("torch", "numpy", "httpx2", "diffusers") if name in sys.modules])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 4])
def test_a_store_keeps_what_its_producer_forgot(run_dir: Path, other: Peer, how: str, count: int) -> None:
    source = random_bits("bfloat16", (2, 9, 3))
    expected = peer.bits(source)
    with HostStore("16MiB", run_dir=run_dir) as store:
        with DiffusionConnector("p", "store", run_dir=run_dir) as conn:
            handle = conn.publish(StagePayload(request_id="r", tensor=source, chunk_dim=1, num_chunks=count))
            assert handle.mode == "store"
            assert handle.wait(10)
            assert handle.exception() is None
            assert conn.live() == []
            source.zero_()
        assert store.live() == [handle.payload_id]
        assert store.usage()[0] >= 108
        found = other(peer.consume, handle.to_bytes(), how, framework=None if "dst" in how else "torch")
        if how.startswith("fetch"):
            assert found == ("bfloat16", (2, 9, 3), expected)
        else:
            assert len(found) == count
        wait_for(lambda: store.live() == [], "it was consumed")
        wait_for(lambda: store.usage() == (0, 16 << 20), "its bytes are free")
    assert not (run_dir / "store.addr").exists()


def test_no_store_and_full_stores(run_dir: Path) -> None:
    with DiffusionConnector("p", "store", run_dir=run_dir, deadline=0.2) as conn:
        payload = StagePayload(request_id="r", tensor=torch.zeros(1 << 19))
        with pytest.raises(errors.Unsupported, match="it is to go to a store, and there is none") as caught:
            conn.publish(payload)
        assert caught.value.reason == "store.none"
        assert (conn.live(), conn.stats()["regions"]) == ([], 0), "nothing leaked"
        with HostStore("1MiB", run_dir=run_dir) as store:
            large = conn.publish(payload)
            with pytest.raises(errors.Invalid, match=r"2\.0 MiB is larger than the whole store \(1\.0 MiB\)"):
                large.wait(10)
            kept = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(150_000)))
            assert kept.wait(10)
            refused = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(150_000)))
            with pytest.raises(errors.Exhausted) as full:
                refused.wait(10)
            assert str(refused.exception()) == str(full.value)
            assert store.live() == [kept.payload_id]
            assert kept.payload_id in str(full.value), "it says what holds the space"
        assert conn.live() == []
        stats = conn.stats()
        assert (stats["live_payloads"], stats["regions"]) == (0, 0), "nothing leaked"
