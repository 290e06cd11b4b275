"""The sketch of the RFC (kvcache-ai/Mooncake#2873), as it stands there: two processes, every mode, either order."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peer
import pytest
import torch
from processes import Peer, wait_for
from stagewire import errors
from stagewire.diffusion import DiffusionConnector, HostStore, StageHandle, StagePayload

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = (1, 16, 21, 6, 10)
DTYPE = torch.bfloat16


def decoder(run_dir: Path) -> DiffusionConnector:
    return DiffusionConnector(role="decode", transfer_mode="auto", store_config=None, te_config=None, run_dir=run_dir)


class Vae:
    """Decodes in order, and remembers what it saw."""

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []

    def decode_chunk(self, chunk: torch.Tensor) -> None:
        self.chunks.append(chunk.clone())


@pytest.fixture(params=["p2p", "store", "auto", "auto with a store"])
def mode(request: pytest.FixtureRequest, run_dir: Path) -> Iterator[str]:
    with contextlib.ExitStack() as stack:
        if "store" in request.param:
            stack.enter_context(HostStore("16MiB", run_dir=run_dir))
        yield request.param.partition(" ")[0]


def sketch(run_dir: str, mode: str, seed: int = 1) -> bytes:
    """The producer's half."""
    conn = peer.connector(run_dir, "denoise", transfer_mode=mode, store_config=None, te_config=None)
    latents = made(seed)
    handle = conn.publish(
        StagePayload(
            request_id="req",
            kind="latent",
            tensor=latents,
            chunk_dim=2,
            num_chunks=8,
            lease="delete_on_consume",
        )
    )
    return handle.to_bytes()


def made(seed: int = 1) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(DTYPE)


def consume(conn: DiffusionConnector, handle: bytes) -> torch.Tensor:
    """The consumer's half."""
    vae = Vae()
    dst = torch.empty(SHAPE, dtype=DTYPE)
    for chunk in conn.consume(handle, dst=dst):
        vae.decode_chunk(chunk)
    assert [chunk.shape[2] for chunk in vae.chunks] == [3, 3, 3, 3, 3, 2, 2, 2]
    assert torch.equal(torch.cat(vae.chunks, dim=2), dst)
    return dst


def test_consume_after_publish(run_dir: Path, other: Peer, mode: str) -> None:
    handle = other(sketch, mode)
    with decoder(run_dir) as conn:
        assert torch.equal(consume(conn, handle), made())
        wait_for(lambda: other(peer.stats, "denoise")["live_payloads"] == 0, "the producer let go")
        with pytest.raises(errors.NotFound) as gone:
            consume(conn, handle)
        assert gone.value.reason == "payload.gone"


def test_consume_while_publish_goes_on(run_dir: Path, other: Peer, mode: str) -> None:
    """The handle may be used at once, whether the store has the payload by then, has a part of it, or has not begun."""
    with decoder(run_dir) as conn:
        for seed in range(20):
            assert torch.equal(consume(conn, other(sketch, mode, seed)), made(seed))
        wait_for(lambda: other(peer.stats, "denoise")["live_payloads"] == 0, "the producer let go")


def test_consume_before_publish(run_dir: Path, other: Peer) -> None:
    """The consumer is there first, and sees each chunk when it is computed."""
    latents = torch.empty(SHAPE, dtype=DTYPE)
    with DiffusionConnector(role="denoise", run_dir=run_dir) as conn:
        payload = StagePayload(request_id="req", kind="latent", tensor=latents, chunk_dim=2, num_chunks=8)
        with conn.open(payload) as stream:
            reading = other.start(peer.consume, stream.handle.to_bytes(), framework="torch")
            wait_for(lambda: conn.stats()["connections"] > 0, "the consumer is there")
            for index, (part, source) in enumerate(
                zip(latents.tensor_split(8, dim=2), made().tensor_split(8, dim=2), strict=True)
            ):
                part.copy_(source)
                stream.ready(index)
            found = reading.result(60)
    assert found == [peer.flat(part) for part in made().tensor_split(8, dim=2)]


@pytest.mark.parametrize("mode", ["store", "auto"])
def test_consume_after_the_producer_has_exited(run_dir: Path, mode: str) -> None:
    script = """
        import sys, torch
        sys.path.insert(0, sys.argv[3])
        import test_rfc
        from stagewire.diffusion import DiffusionConnector, StagePayload
        with DiffusionConnector("denoise", sys.argv[2], run_dir=sys.argv[1]) as conn:
            payload = StagePayload(request_id="r", tensor=test_rfc.made(), chunk_dim=2, num_chunks=8)
            handle = conn.publish(payload)
            sys.stdout.write(handle.to_bytes().hex())  # before the store has it
            assert handle.mode == "store"
    """
    folder = str(Path(__file__).parent)
    with HostStore("16MiB", run_dir=run_dir) as store:
        command = [sys.executable, "-c", textwrap.dedent(script), str(run_dir), mode, folder]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        handle = bytes.fromhex(done.stdout)
        assert store.live() == [StageHandle.from_bytes(handle).payload_id]
        with DiffusionConnector("decode", run_dir=run_dir) as conn:
            assert torch.equal(consume(conn, handle), made())
        wait_for(lambda: store.live() == [], "it was consumed")


def test_reading_goes_on_while_the_payload_moves(run_dir: Path) -> None:
    """Whoever reads a pinned payload in its producer's memory is not disturbed when the store takes it over."""
    store, reader = HostStore("16MiB", run_dir=run_dir), decoder(run_dir)
    with store, reader, DiffusionConnector("p", "store", run_dir=run_dir) as conn:
        for seed in range(20):
            payload = StagePayload(request_id="r", tensor=made(seed), chunk_dim=2, num_chunks=8, lease="pinned")
            handle = conn.publish(payload)
            assert torch.equal(consume(reader, handle.to_bytes()), made(seed))
            assert handle.wait(10)
            assert torch.equal(consume(reader, handle.to_bytes()), made(seed))
            assert store.live() == [handle.payload_id]
            conn.release(handle)
            assert store.live() == []


def test_a_slow_request_holds_up_no_other(run_dir: Path) -> None:
    """One of a batch finds no room in the store, for a while; the others are there at once."""
    small = torch.ones(1000)
    with HostStore("1MiB", run_dir=run_dir) as store, DiffusionConnector("p", "store", run_dir=run_dir) as conn:
        large = StagePayload(request_id="large", tensor=torch.zeros(150_000))
        first = conn.publish(large)
        assert first.wait(10)
        slow = conn.publish(large)
        others = [conn.publish(StagePayload(request_id=str(i), tensor=small)) for i in range(10)]
        assert all(handle.wait(10) for handle in others)
        assert not slow.done()
        conn.release(first)
        assert slow.wait(10)
        assert len(store.live()) == 11


def test_cancelling_what_waits_for_the_store(run_dir: Path) -> None:
    with HostStore("1MiB", run_dir=run_dir) as store, DiffusionConnector("p", "store", run_dir=run_dir) as conn:
        large = StagePayload(request_id="large", tensor=torch.zeros(150_000))
        first = conn.publish(large)
        assert first.wait(10)
        slow = conn.publish(large)
        assert not slow.wait(0.05)
        began = time.monotonic()
        assert slow.cancel()
        with pytest.raises(errors.Cancelled) as cancelled:
            slow.wait(1)
        assert cancelled.value.reason == "publish.cancelled"
        assert isinstance(slow.exception(1), errors.Cancelled)
        assert not slow.cancel()
        wait_for(lambda: store.live() == [first.payload_id], "the store has the first one only")
        wait_for(lambda: store.usage()[0] < 700_000, "its room is free")
        assert time.monotonic() - began < 1
        stats = conn.stats()
        assert (stats["live_payloads"], stats["regions"], stats["pins_held"]) == (0, 0, 0), "nothing leaked"
        assert not first.cancel(), "the store has it"


def test_changing_the_bundle_afterwards_changes_nothing(run_dir: Path, other: Peer) -> None:
    given: dict[str, Any] = {"a": torch.ones(3), "list": [torch.zeros(2)], "none": None}
    metadata = {"steps": [1, 2]}
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensors=given, metadata=metadata))
        given["list"].append(torch.zeros(9))
        given["list"][0] = torch.full((2,), 7.0)
        given.clear()
        metadata["steps"].append(3)
        assert handle.metadata == {"steps": [1, 2]}
        found = other(peer.consume, handle.to_bytes(), "fetch", framework="torch")
        assert found == peer.flat({"a": torch.ones(3), "list": [torch.zeros(2)], "none": None})


def test_auto_goes_by_liveness_and_says_so(run_dir: Path, other: Peer) -> None:
    payload = StagePayload(request_id="r", tensor=torch.arange(3))
    with DiffusionConnector("p", run_dir=run_dir) as conn:

        def way(consumer: bytes | None = None) -> tuple[str, str | None]:
            handle = conn.publish(payload, consumer=consumer)
            assert handle.wait(10)
            assert StageHandle.from_bytes(handle.to_bytes()).mode == handle.mode
            assert conn.fetch(handle, framework="torch").tolist() == [0, 1, 2]
            return handle.mode, handle.mode_reason

        address = other(peer.address)
        assert way() == ("p2p", "no_store")
        with HostStore("16MiB", run_dir=run_dir):
            assert way() == ("store", "consumer_unknown")
            assert way(address) == ("p2p", "consumer_alive")
            dead = subprocess.run(
                [sys.executable, "-c", ADDRESS, str(run_dir)], capture_output=True, timeout=60, check=True
            ).stdout
            assert way(dead) == ("store", "consumer_lost")
        with pytest.raises(errors.Invalid, match="these 3 bytes are no address of a connector"):
            conn.publish(payload, consumer=b"abc")
        stats = conn.stats()
        assert [stats[f"published_{way}"] for way in ("p2p_no_store", "store_consumer_unknown")] == [1, 1]
        assert [stats[f"published_{way}"] for way in ("p2p_consumer_alive", "store_consumer_lost")] == [1, 1]
        assert StageHandle.from_bytes(conn.publish(payload).to_bytes()).mode_reason is None


ADDRESS = """
import sys
from stagewire.diffusion import DiffusionConnector
with DiffusionConnector("c", run_dir=sys.argv[1]) as conn:
    sys.stdout.buffer.write(conn.address)
"""


def test_closing_waits_for_the_store(run_dir: Path) -> None:
    with HostStore("64MiB", run_dir=run_dir) as store:
        with DiffusionConnector("p", "store", run_dir=run_dir) as conn:
            handles = [
                conn.publish(StagePayload(request_id=str(i), tensor=torch.full((1 << 18,), i))) for i in range(20)
            ]
        assert sorted(store.live()) == sorted(handle.payload_id for handle in handles)


def test_only_a_store_keeps_cached_payloads(run_dir: Path) -> None:
    payload = StagePayload(request_id="r", tensor=torch.arange(3), lease="cached")
    with HostStore("16MiB", run_dir=run_dir) as store, DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(payload, consumer=conn.address)
        assert (handle.mode, handle.mode_reason) == ("store", "lease")
        assert handle.wait(10)
        for _ in range(3):
            assert conn.fetch(handle, framework="torch").tolist() == [0, 1, 2]
        assert store.live() == [handle.payload_id]
        conn.release(handle)
        assert store.live() == []


def test_the_successor_of_a_killed_consumer_begins_at_chunk_0(run_dir: Path) -> None:
    script = """
        import sys
        from stagewire.diffusion import DiffusionConnector
        conn = DiffusionConnector("decode", run_dir=sys.argv[1])
        chunks = conn.consume(bytes.fromhex(sys.argv[2]), framework="torch")
        next(chunks), next(chunks)
        print("two", flush=True)
        sys.stdin.read()
    """
    with DiffusionConnector("denoise", "p2p", run_dir=run_dir) as conn, decoder(run_dir) as successor:
        payload = StagePayload(request_id="r", tensor=made(), chunk_dim=2, num_chunks=8)
        handle = conn.publish(payload)
        command = [sys.executable, "-c", textwrap.dedent(script), str(run_dir), handle.to_bytes().hex()]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"two\n"
            with pytest.raises(errors.Conflict) as second:
                successor.fetch(handle, framework="torch")
            assert second.value.reason == "payload.claimed"
            reader.kill()
        wait_for(lambda: conn.stats()["pins_held"] == 0, "the dead one holds nothing")
        assert torch.equal(consume(successor, handle.to_bytes()), made())
        assert handle.wait_released(5)


def test_a_failure_reaches_the_consumer_within_a_second(run_dir: Path, other: Peer) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        stream = conn.open(StagePayload(request_id="r", tensor=torch.zeros(4), num_chunks=2))
        stream.ready(0)
        waiting = other.start(peer.consume_error, stream.handle.to_bytes())
        wait_for(lambda: conn.stats()["connections"] > 0, "the consumer is there")
        failed = time.monotonic()
        stream.fail(errors.Exhausted("no room for the next chunk", reason="stage.memory"))
        kind, reason, message, *_ = waiting.result(20)
        assert time.monotonic() - failed < 1
        assert (kind, reason) == ("exhausted", "stage.memory")
        assert "no room for the next chunk" in message


def test_a_store_that_spills_loses_nothing(run_dir: Path, tmp_path: Path) -> None:
    """Ten times as much as it has room for."""
    made = [torch.full((100_000,), float(i)) for i in range(25)]
    with (
        HostStore("1MiB", run_dir=run_dir, spill_dir=tmp_path / "spill", spill_bytes="64MiB") as store,
        DiffusionConnector("p", "store", run_dir=run_dir) as conn,
    ):
        handles = []
        for index, tensor in enumerate(made):
            handles.append(conn.publish(StagePayload(request_id=str(index), tensor=tensor)))
            assert handles[-1].wait(30)
            assert store.usage()[0] <= store.usage()[1] == 1 << 20
        for handle in [*handles[10:], *handles[:10]]:
            dst = torch.empty(100_000)
            assert torch.equal(conn.fetch(handle, dst=dst), made[int(handle.request_id)])
            assert store.usage()[0] <= 1 << 20
        wait_for(lambda: store.live() == [], "every payload was consumed")
    assert not [path for path in (tmp_path / "spill").rglob("*") if path.stat().st_size > 4096], "a file is left"


def test_what_was_read_can_leave_the_memory_and_come_back(run_dir: Path, tmp_path: Path) -> None:
    made = [torch.full((100_000,), float(i)) for i in range(8)]
    with (
        HostStore("1MiB", run_dir=run_dir, spill_dir=tmp_path / "spill", spill_bytes="64MiB") as store,
        DiffusionConnector("p", "store", run_dir=run_dir, deadline=20) as conn,
    ):
        handles = []
        for index, tensor in enumerate(made):
            handles.append(conn.publish(StagePayload(request_id=str(index), tensor=tensor, lease="pinned")))
            assert handles[-1].wait(30)
        for handle in handles * 3:
            dst = torch.empty(100_000)
            assert torch.equal(conn.fetch(handle, dst=dst), made[int(handle.request_id)])
            assert store.usage()[0] <= 1 << 20


def test_a_cached_payload_that_was_read_makes_room(run_dir: Path) -> None:
    with (
        HostStore("8MiB", run_dir=run_dir),
        DiffusionConnector("p", "store", run_dir=run_dir, deadline=10) as conn,
    ):
        for index in range(3):
            tensor = torch.full((6 << 20,), index, dtype=torch.uint8)
            handle = conn.publish(StagePayload(request_id=str(index), tensor=tensor, lease="cached"))
            assert handle.wait(20)
            assert torch.equal(conn.fetch(handle, dst=torch.empty_like(tensor)), tensor)


def test_nothing_is_written_into_memory_that_was_handed_back(run_dir: Path) -> None:
    """Chunks are copied ahead, also of a payload that nobody reads on."""
    dst = torch.empty(8, 1 << 20, dtype=torch.uint8)
    source = torch.ones_like(dst)
    with (
        DiffusionConnector("p", "p2p", run_dir=run_dir) as producer,
        DiffusionConnector("c", "p2p", run_dir=run_dir) as consumer,
    ):
        for _ in range(20):
            handle = producer.publish(StagePayload(request_id="r", tensor=source, num_chunks=8))
            for _ in consumer.consume(handle, dst=dst):
                break
            dst.zero_()
            producer.release(handle)
            assert handle.wait_unread(20), "a copy is under way"
            assert not dst.count_nonzero(), "bytes came late"
