"""How long payloads live, who may read them, and giving them up."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any

import peer
import pytest
import torch
from processes import wait_for
from stagewire import errors
from stagewire.diffusion import DiffusionConnector, Lease, StageHandle, StagePayload

if TYPE_CHECKING:
    from pathlib import Path

    from processes import Peer


def test_a_time_to_live(run_dir: Path, other: Peer) -> None:
    """Any number of consumers, until the time is over; reading does not extend it."""
    other(peer.stats)  # it has started, and imported torch
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        began = time.monotonic()
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.arange(3), lease=Lease.ttl(0.5)))
        assert len(other(peer.consume, handle.to_bytes(), framework="torch")) == 1
        reads = 0

        def read_on() -> None:
            nonlocal reads
            while time.monotonic() - began < 5:
                assert conn.fetch(handle, framework="torch").tolist() == [0, 1, 2]
                reads += 1

        with pytest.raises(errors.NotFound, match="its lease is over"):
            read_on()
        assert 0.4 < time.monotonic() - began < 2
        assert reads > 1
        assert handle.wait_released(0)
        assert conn.stats()["expired"] == 1


def test_pinned_payloads_stay_until_they_are_released(run_dir: Path, other: Peer) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        for lease in (Lease.pinned, "pinned"):
            handle = conn.publish(StagePayload(request_id="r", tensor=torch.arange(3), lease=lease))
            for _ in range(3):
                assert other(peer.consume, handle.to_bytes(), framework="torch")
            assert not handle.wait_released(0)
            conn.release(handle)
            assert handle.wait_released(5)
            kind, reason, *_ = other(peer.consume_error, handle.to_bytes())
            assert (kind, reason) == ("not_found", "payload.gone")


def test_leases_have_their_rules(run_dir: Path) -> None:
    assert [str(lease) for lease in (Lease.delete_on_consume, Lease.pinned, Lease.cached)] == [
        "delete_on_consume",
        "pinned",
        "cached",
    ]
    assert Lease.ttl(30) == Lease.ttl(30.0) != Lease.ttl(31)
    for seconds in (0, -1, float("nan"), float("inf"), True, "30"):
        with pytest.raises(errors.Invalid, match=f"{seconds!r} is no time to live") as caught:
            Lease.ttl(seconds)  # type: ignore[arg-type]
        assert caught.value.reason == "payload.lease"
    with DiffusionConnector("p", "p2p", run_dir=run_dir) as conn:
        for lease, message in [
            (Lease.cached, "a payload of lease cached is kept by stores only"),
            ("ttl(30)", '"30" is no time to live; give a whole number above 0 and one of h, m, s'),
            ("ttl(-1s)", "is no time to live"),
            ("", 'unknown lease ""; it is one of delete_on_consume'),
            (30, "unknown lease 30; it is Lease.delete_on_consume"),
            (None, "unknown lease None"),
        ]:
            with pytest.raises(errors.Invalid, match=message) as caught:
                conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1), lease=lease))  # type: ignore[arg-type]
            assert caught.value.reason == "payload.lease"
        stats = conn.stats()
        assert (stats["live_payloads"], stats["regions"], stats["published"]) == (0, 0, 0), "nothing leaked"


def test_on_chunk_sees_each_chunk_before_it_is_yielded(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.arange(6), num_chunks=3))
        told: list[Any] = []
        for index, chunk in enumerate(
            conn.consume(handle, framework="torch", on_chunk=lambda *of: told.append((of[0], of[1].tolist())))
        ):
            assert (index, chunk.tolist()) in told
        assert sorted(told) == [(0, [0, 1]), (1, [2, 3]), (2, [4, 5])]


@pytest.mark.parametrize("with_dst", [False, True])
def test_on_chunk_is_called_as_chunks_come_and_not_as_they_are_yielded(run_dir: Path, with_dst: bool) -> None:
    source = torch.arange(8)
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        stream = conn.open(StagePayload(request_id="r", tensor=source, num_chunks=4))
        told: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        dst = torch.zeros_like(source) if with_dst else None
        chunks = conn.consume(
            stream.handle, dst, framework="torch", deadline=20, on_chunk=lambda *of: told.put((of[0], of[1].tolist()))
        )
        stream.ready(0)
        assert next(chunks).tolist() == [0, 1]
        assert told.get(timeout=20) == (0, [0, 1])
        # The iterator is not asked for more meanwhile.
        for index in (3, 1, 2):
            stream.ready(index)
            assert told.get(timeout=20) == (index, [2 * index, 2 * index + 1])
        assert [chunk.tolist() for chunk in chunks] == [[2, 3], [4, 5], [6, 7]]
        assert told.empty(), "once"


def test_what_on_chunk_raises_the_iterator_raises(run_dir: Path) -> None:
    def broken(index: int, chunk: Any) -> None:
        raise ZeroDivisionError(index)

    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.arange(6), num_chunks=3))
        with pytest.raises(ZeroDivisionError):
            list(conn.consume(handle, on_chunk=broken, deadline=20))
        wait_for(lambda: conn.stats()["consumers"] == 0, "the consumer is gone")
        assert conn.fetch(handle, framework="torch").tolist() == [0, 1, 2, 3, 4, 5]


def test_cancelling_a_payload(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(1)))
        assert (handle.done(), handle.wait(0), handle.exception(0)) == (True, True, None)
        assert handle.cancel() is True
        assert handle.cancel() is False
        assert handle.wait_released(1)
        assert (conn.live(), conn.stats()["regions"]) == ([], 0)
        assert StageHandle.from_bytes(handle.to_bytes()).cancel() is False, "it is not this process's"
        stream = conn.open(StagePayload(request_id="r", tensor=torch.zeros(2), num_chunks=2))
        assert stream.handle.cancel() is True
        with pytest.raises(errors.Conflict, match="it was released"):
            stream.ready(0)


def test_without_a_chunk_dim_nothing_is_cut(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(2), chunk_dim=None))
        assert (handle.num_chunks, handle.chunk_dim) == (1, None)
        conn.release(handle)
        with pytest.raises(errors.Invalid, match="num_chunks is 2; without a chunk_dim it must be 1"):
            conn.publish(StagePayload(request_id="r", tensor=torch.zeros(2), chunk_dim=None, num_chunks=2))
        assert conn.live() == []
