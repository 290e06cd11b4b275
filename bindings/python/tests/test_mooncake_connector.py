"""The connector with Mooncake Store: producer and consumer share nothing but the master."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from mooncake_cluster import MIB, Child, Master, until
from stagewire import aio, errors
from stagewire.diffusion import DiffusionConnector, Lease, StageHandle, StagePayload

torch = pytest.importorskip("torch", reason="torch is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator

CONSUMER = "mooncake_connector_peer.py"


@pytest.fixture(scope="module")
def consumer(master: Master, lender: Child) -> Iterator[Child]:
    with Child(master.address, script=CONSUMER) as child:
        yield child


@pytest.fixture(scope="module")
def shared(master: Master, lender: Child) -> Iterator[DiffusionConnector]:
    with connector(master) as conn:
        yield conn


@pytest.fixture
def conn(shared: DiffusionConnector, master: Master) -> Iterator[DiffusionConnector]:
    yield shared
    until("nothing is left behind", master.is_empty)


def connector(master: Master, **options: Any) -> DiffusionConnector:
    config = {"backend": "mooncake", "master": master.address, **options}
    return DiffusionConnector("denoise", "store", store_config=config, run_dir=tempfile.mkdtemp(prefix="sw-"))


def aio_connector(master: Master) -> aio.DiffusionConnector:
    config = {"backend": "mooncake", "master": master.address}
    return aio.DiffusionConnector("decode", "store", store_config=config, run_dir=tempfile.mkdtemp(prefix="sw-"))


def bits(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def latent(shape: tuple[int, ...] = (1, 4, 21, 32, 32), dtype: str = "bfloat16") -> Any:
    return torch.randn(shape).to(getattr(torch, dtype))


@pytest.mark.parametrize("into", [True, False])
@pytest.mark.parametrize(
    ("shape", "dim", "count", "dtype"),
    [
        ((1, 4, 21, 32, 32), 2, 8, "bfloat16"),
        ((2, 3, 8, 256, 512), 2, 4, "float32"),
        ((8, 1000), 0, 3, "float16"),
        ((5,), 0, 1, "int64"),
        ((3, 0, 2), 0, 3, "float32"),
    ],
)
def test_chunks_arrive_in_order_and_exact(
    conn: DiffusionConnector,
    consumer: Child,
    shape: tuple[int, ...],
    dim: int,
    count: int,
    dtype: str,
    into: bool,
) -> None:
    tensor = latent(shape, dtype)
    handle = conn.publish(StagePayload(request_id="r", tensor=tensor, chunk_dim=dim, num_chunks=count))
    data = handle.to_bytes()
    assert handle.wait()
    assert (StageHandle.from_bytes(data).mode, handle.mode) == ("store", "store")
    assert len(data) < 2000
    found = consumer.ask("consume", data.hex(), into)
    chunks = torch.tensor_split(tensor, count, dim)
    assert found["shapes"] == [list(chunk.shape) for chunk in chunks]
    assert bytes.fromhex(found["bytes"]) == b"".join(map(bits, chunks))


def test_the_producer_may_have_exited(master: Master, lender: Child, consumer: Child) -> None:
    script = """
import sys, tempfile, numpy
import peers; peers.use_mooncake()
from stagewire.diffusion import DiffusionConnector, StagePayload
config = {"backend": "mooncake", "master": sys.argv[1]}
conn = DiffusionConnector("denoise", "store", store_config=config, run_dir=tempfile.mkdtemp(prefix="sw-"))
payload = StagePayload(request_id="r", tensors={"a": numpy.arange(5), "b": None, "c": [numpy.ones(2), numpy.zeros(0)]})
print("@@" + conn.publish(payload).to_bytes().hex())
conn.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, master.address],
        env={"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    data = next(line[2:] for line in done.stdout.splitlines() if line.startswith("@@"))
    found = consumer.ask("fetch", data)
    assert found["a"] == "tensor([0, 1, 2, 3, 4])"
    assert found["b"] is None
    assert "[1., 1.]" in found["c"]
    until("nothing is left behind", master.is_empty)


def test_delete_on_consume_has_one_consumer_at_a_time(conn: DiffusionConnector, consumer: Child) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=latent(), chunk_dim=2, num_chunks=8))
    data = handle.to_bytes()
    assert consumer.ask("begin", data.hex()) == [1, 4, 3, 32, 32]
    with pytest.raises(errors.Conflict) as claimed:
        conn.fetch(data)
    assert claimed.value.reason == "payload.claimed"
    consumer.ask("give_up")

    def fetched() -> bool:
        try:
            conn.fetch(data)
        except errors.Conflict:
            return False
        return True

    # Its successor begins at chunk 0, and ends the payload.
    until("the claim is released", fetched)
    for late in (lambda: conn.fetch(data), lambda: list(conn.consume(data))):
        with pytest.raises(errors.NotFound) as gone:
            late()
        assert gone.value.reason == "payload.gone"
    assert consumer.ask("consume", data.hex(), True)["reason"] == "payload.gone"


def test_pinned_payloads_stay_until_they_are_released(conn: DiffusionConnector, consumer: Child) -> None:
    tensor = latent()
    handle = conn.publish(StagePayload(request_id="r", tensor=tensor, lease=Lease.pinned))
    for _ in range(2):
        assert bytes.fromhex(consumer.ask("consume", handle.to_bytes().hex(), True)["bytes"]) == bits(tensor)
    assert handle.payload_id in conn.live()
    # By whatever names it.
    conn.release(handle.to_bytes())
    assert handle.payload_id not in conn.live()
    assert consumer.ask("consume", handle.to_bytes().hex(), True)["reason"] == "payload.gone"


def test_times_to_live_end(conn: DiffusionConnector, consumer: Child, master: Master) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=latent(), lease=Lease.ttl(1.0)))
    data = handle.to_bytes()
    assert "bytes" in consumer.ask("consume", data.hex(), True)
    until("it is removed", master.is_empty)
    assert consumer.ask("consume", data.hex(), True)["reason"] == "payload.gone"
    unread = conn.publish(StagePayload(request_id="r", tensor=latent()), expires=0.2)
    assert unread.wait()
    until("what nobody consumed is removed", master.is_empty)


def test_cached_payloads_are_any_number_of_times_read(conn: DiffusionConnector, consumer: Child) -> None:
    tensor = latent()
    handle = conn.publish(StagePayload(request_id="r", tensor=tensor, lease="cached"))
    for _ in range(2):
        found = consumer.ask("consume", handle.to_bytes().hex(), True)
        assert bytes.fromhex(found["bytes"]) == bits(tensor)
    # What becomes of it is up to the store: this process keeps no account of it.
    assert handle.payload_id not in conn.live()
    conn.release(handle)


def test_cached_payloads_make_room_and_unread_ones_do_not() -> None:
    with (
        Master("--default_kv_lease_ttl=1") as master,
        Child(master.address, segment_bytes=64 * MIB),
        connector(master) as conn,
    ):

        def publish(number: int, lease: str) -> StageHandle:
            tensor = torch.full((8 * MIB,), number, dtype=torch.uint8)
            handle = conn.publish(StagePayload(request_id=f"{lease} {number}", tensor=tensor, lease=lease))
            assert handle.wait(20)
            return handle

        kept = [publish(number, lease) for number, lease in enumerate(("pinned", "delete_on_consume"))]
        # Far more than there is room for.
        cached = [publish(number, "cached") for number in range(2, 16)]
        for number, handle in enumerate(kept):
            assert (conn.fetch(handle, framework="torch") == number).all()
        gone = []
        for number, handle in enumerate(cached, 2):
            try:
                assert (conn.fetch(handle, framework="torch") == number).all()
            except errors.NotFound as error:
                gone.append(error.reason)
        assert 8 <= len(gone) < len(cached)
        assert set(gone) == {"payload.gone"}


def test_a_cancelled_payload_is_removed(conn: DiffusionConnector) -> None:
    handle = conn.publish(StagePayload(request_id="r", tensor=latent((1, 16, 31, 90, 160))))
    assert handle.cancel()
    error = handle.exception(1)
    assert isinstance(error, errors.Cancelled)
    assert error.reason == "publish.cancelled"
    assert error.message.startswith('request "r", stage denoise: ')


def test_what_a_lender_that_stands_still_holds_up_is_cancelled_within_a_second() -> None:
    with Master() as master, Child(master.address, segment_bytes=64 * MIB) as lender, connector(master) as conn:
        there = conn.publish(StagePayload(request_id="there", tensor=torch.zeros(MIB))).to_bytes()
        lender.stop()
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(MIB)))
        began = time.monotonic()
        assert handle.cancel()
        assert isinstance(handle.exception(1), errors.Cancelled)
        assert time.monotonic() - began < 1

        async def test() -> None:
            async with aio_connector(master) as other:
                moving = await other.publish(StagePayload(request_id="moving", tensor=torch.zeros(MIB)))
                with pytest.raises(errors.Conflict, match="await wait") as early:
                    moving.to_bytes()
                assert early.value.reason == "publish.under_way"
                reading = asyncio.create_task(other.fetch(there))
                assert not (await asyncio.wait([reading], timeout=0.2))[0]
                began = time.monotonic()
                reading.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await reading
                assert moving.cancel()
                assert isinstance(await moving.exception(1), errors.Cancelled)
                assert time.monotonic() - began < 1
                lender.go_on()
                assert list(await other.fetch(there, framework="torch")) == [0.0] * MIB

        asyncio.run(test())
        until("nothing is left behind", master.is_empty)


def test_asyncio(conn: DiffusionConnector, consumer: Child, master: Master) -> None:
    source = latent()

    async def test() -> None:
        payload = StagePayload(request_id="r", tensor=source, chunk_dim=2, num_chunks=8, lease=Lease.pinned)
        async with aio_connector(master) as other:
            handle = await other.publish(payload)
            assert await handle.wait(10)
            assert handle.mode == "store"
            dst = torch.zeros_like(source)
            chunks = [chunk async for chunk in other.consume(handle.to_bytes(), dst=dst)]
            assert [chunk.shape[2] for chunk in chunks] == [3, 3, 3, 3, 3, 2, 2, 2]
            assert bits(dst) == bits(source)
            assert bits(await other.fetch(handle, framework="torch")) == bits(source)
            assert consumer.ask("consume", handle.to_bytes().hex(), True)["bytes"]
            await other.release(handle)
            with pytest.raises(errors.NotFound):
                await other.fetch(handle.to_bytes())

    asyncio.run(test())


def test_the_successor_of_a_consumer_that_was_killed_does_not_wait(conn: DiffusionConnector, master: Master) -> None:
    source = latent()
    data = conn.publish(StagePayload(request_id="r", tensor=source, chunk_dim=2, num_chunks=8)).to_bytes()
    with Child(master.address, script=CONSUMER) as first:
        assert first.ask("begin", data.hex()) == [1, 4, 3, 32, 32]
        with pytest.raises(errors.Conflict, match=f"process {first.process.pid}"):
            conn.fetch(data)
    began = time.monotonic()
    assert bits(conn.fetch(data, framework="torch")) == bits(source)
    assert time.monotonic() - began < 5


def test_a_full_store_is_told_by_the_handle(conn: DiffusionConnector, master: Master) -> None:
    with connector(master) as other:
        assert other._store is not None
        other._store._deadline = 0.3
        handle = other.publish(StagePayload(request_id="r", tensor=torch.zeros(160 * MIB, dtype=torch.uint8)))
        full = handle.exception()
        assert isinstance(full, errors.Exhausted)
        assert full.reason == "credit.store_bytes"
        assert str(160 * MIB) in full.message
        with pytest.raises(errors.Exhausted):
            handle.to_bytes()


def test_a_full_store_uses_up_no_descriptors(conn: DiffusionConnector, master: Master) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connector(master) as other:
        assert other._store is not None
        other._store._deadline = 1.0
        large = torch.zeros(160 * MIB, dtype=torch.uint8)
        # Room for what the client of the store needs, and by far not for one more for each payload.
        used = sum(1 for _ in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 64, limits[1]))
        try:
            handles = [other.publish(StagePayload(request_id=f"r {i}", tensor=large)) for i in range(200)]
            assert {type(handle.exception(20)) for handle in handles} == {errors.Exhausted}
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_wrong_configurations_are_told_at_once(conn: DiffusionConnector, master: Master) -> None:
    for config in (
        {"backend": "pigeon", "master": master.address},
        {"backend": "mooncake"},
        {"backend": "mooncake", "master": master.address, "colour": "red"},
    ):
        with pytest.raises(errors.Invalid) as wrong:
            DiffusionConnector("x", "store", store_config=config)
        assert wrong.value.reason == "connector.config"
    data = conn.publish(StagePayload(request_id="r", tensor=latent())).to_bytes()
    with DiffusionConnector("x", run_dir=tempfile.mkdtemp(prefix="sw-")) as without:
        with pytest.raises(errors.Unsupported) as missing:
            without.fetch(data)
        assert missing.value.reason == "store.none"
    with pytest.raises(errors.Invalid) as wrong:
        conn.fetch(data, dst=torch.zeros(3))
    assert wrong.value.reason == "consume.destination"
    conn.fetch(data)


def test_the_first_chunk_does_not_wait_for_the_others(conn: DiffusionConnector) -> None:
    tensor = latent((1, 16, 32, 64, 64), "float32")
    handle = conn.publish(StagePayload(request_id="r", tensor=tensor, chunk_dim=2, num_chunks=8))
    dst = torch.zeros_like(tensor)
    chunks = conn.consume(handle, dst=dst)
    first = next(chunks)
    assert (first == tensor[:, :, :4]).all()
    assert (dst[:, :, 4:] == 0).all()
    assert len(list(chunks)) == 7
    assert (dst == tensor).all()
