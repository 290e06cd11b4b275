"""Tensors in the arena: written by Python, published without a copy, and free again when nobody needs them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import numpy as np
import peer
import pytest
import torch
from processes import Peer, wait_for
from stagewire import Tensor, errors
from stagewire.diffusion import DiffusionConnector, StagePayload
from test_dlpack import DTYPES, bits, random_bits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (3, 0, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_no_copy(run_dir: Path, other: Peer, dtype: str, shape: tuple[int, ...]) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        tensor = conn.allocate(shape, getattr(torch, dtype))
        source = random_bits(dtype, shape)
        tensor.copy_(source)
        handle = conn.publish(StagePayload(request_id="r", tensor=tensor), strict=True)
        stats = conn.stats()
        assert (stats["staged_bytes"], stats["contiguous_copies"]) == (0, 0)
        found = other(peer.consume, handle.to_bytes(), framework="torch")
        assert found == [(dtype, shape, bits(source))]
        assert conn.stats()["copied_bytes"] == 0


def test_consumers_map_it(run_dir: Path) -> None:
    """The consumer sees the producer's bytes themselves, also of a part that begins in the middle."""
    with DiffusionConnector("p", run_dir=run_dir) as conn, DiffusionConnector("c", run_dir=run_dir) as consumer:
        tensor = conn.allocate((4, 1000), "int32", framework="torch")
        tensor.copy_(torch.arange(4000).reshape(4, 1000))
        part = tensor[1:3, :].reshape(-1)[7:1007]
        for published in (tensor, part):
            handle = conn.publish(StagePayload(request_id="r", tensor=published))
            view = consumer.fetch(handle, framework="numpy")
            assert np.array_equal(view, published.numpy())
            published.view(-1)[0] = -1
            assert view.reshape(-1)[0] == -1, "it is another memory"
        assert consumer.stats()["copied_bytes"] == 0
        assert conn.stats()["staged_bytes"] == 0


def test_a_part_with_gaps_is_copied_once(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        tensor = conn.allocate((4, 6), "uint8", framework="torch")
        tensor.copy_(torch.arange(24).reshape(4, 6))
        handle = conn.publish(StagePayload(request_id="r", tensor=tensor[:, :3]))
        assert conn.stats()["contiguous_copies"] == 1
        assert conn.fetch(handle, framework="torch").tolist() == tensor[:, :3].tolist()


def test_memory_is_free_when_nobody_needs_it(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir, arena_bytes="1MiB") as conn:
        assert conn.stats()["allocated_bytes"] == 0
        tensor = conn.allocate((1 << 19,), "uint8")
        assert conn.stats()["allocated_bytes"] == 1 << 19
        handle = conn.publish(StagePayload(request_id="r", tensor=tensor))
        del tensor
        gc.collect()
        assert conn.stats()["allocated_bytes"] == 1 << 19, "the payload keeps it"
        conn.release(handle)
        wait_for(lambda: conn.stats()["allocated_bytes"] == 0, "it is free")
        for _ in range(10):
            view = conn.allocate((1 << 19,), "uint8")[5:]
            gc.collect()
            assert conn.stats()["allocated_bytes"] == 1 << 19, "the view keeps it, and nothing else"
            del view


def test_it_outlives_the_connector(run_dir: Path) -> None:
    conn = DiffusionConnector("p", run_dir=run_dir)
    tensor = conn.allocate((3,), "float64", framework="torch")
    tensor.fill_(2.5)
    conn.close()
    del conn
    gc.collect()
    assert tensor.tolist() == [2.5] * 3


def test_memory_of_another_connector_is_borrowed(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as mine, DiffusionConnector("c", run_dir=run_dir) as other:
        tensor = mine.allocate((100,), "float32", framework="torch")
        tensor.fill_(1.25)
        handle = other.publish(StagePayload(request_id="r", tensor=tensor))
        assert torch.equal(mine.fetch(handle, framework="torch"), tensor)


def test_frameworks(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        for dtype, kind in [
            (np.float32, np.ndarray),
            (np.dtype("int16"), np.ndarray),
            (torch.bfloat16, torch.Tensor),
            ("torch.float16", torch.Tensor),
        ]:
            made: Any = conn.allocate((2, 2), dtype)
            assert isinstance(made, kind)
            assert str(dtype).removeprefix("torch.") in str(made.dtype) or made.dtype == dtype
        assert isinstance(conn.allocate((2,), "int8", framework="native"), Tensor)
        array: Any = conn.allocate((2,), np.uint8)
        array[:] = 3
        assert array.tolist() == [3, 3], "it can be written"


def test_what_cannot_be_allocated(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir, arena_bytes="1MiB") as conn:
        for shape, dtype, message in [
            ((2,), "float99", "float99"),
            ((2,), float, "is no dtype of torch or NumPy"),
            ((2,), np.dtype("U3"), "str96"),
            ((-1,), "int8", "is no shape"),
            ((1.5,), "int8", "is no shape"),
            ((1 << 62, 8), "int64", "."),
        ]:
            with pytest.raises(errors.Invalid, match=message):
                conn.allocate(shape, dtype)  # type: ignore[arg-type]
        with pytest.raises(errors.Exhausted, match=r"2\.0 MiB"):
            conn.allocate((2 << 20,), "uint8")
        assert conn.stats()["allocated_bytes"] == 0


def test_registered_memory_is_registered_once(run_dir: Path, other: Peer) -> None:
    with DiffusionConnector("p", "p2p", run_dir=run_dir) as conn:
        mine = torch.arange(1000.0)
        registered = conn.register(mine)
        arena = conn.allocate((1000,), "float32", framework="torch")
        before = conn.stats()["registrations"]
        for step in range(5):
            for tensor in (mine, arena):
                tensor.fill_(step)
                handle = conn.publish(StagePayload(request_id="r", tensor=tensor, chunk_dim=0, num_chunks=4))
                assert not registered.unused or tensor is arena
                found = other(peer.consume, handle.to_bytes(), framework="torch")
                assert found == [("float32", (250,), bits(torch.full((250,), float(step))))] * 4
                assert handle.wait_unread(5)
        for part in (mine[10:20], arena[:1], arena[500:]):
            handle = conn.publish(StagePayload(request_id="r", tensor=part))
            found = other(peer.consume, handle.to_bytes(), framework="torch")
            assert found == [("float32", tuple(part.shape), bits(part))]
            assert handle.wait_unread(5)
        assert conn.stats()["registrations"] == before
        assert registered.unused
        registered.release()
        registered.release()
        handle = conn.publish(StagePayload(request_id="r", tensor=mine))
        assert conn.stats()["registrations"] == before + 1
        conn.release(handle)


def test_each_publication_of_registered_memory_has_a_right_of_its_own(run_dir: Path) -> None:
    """Who had an earlier payload cannot read a later one through it."""
    with DiffusionConnector("p", "p2p", run_dir=run_dir) as conn, DiffusionConnector("c", run_dir=run_dir) as reader:
        memory = conn.allocate((1000,), "float32", framework="torch")
        memory.fill_(1)
        first = conn.publish(StagePayload(request_id="first", tensor=memory, num_chunks=2))
        chunks = reader.consume(first, dst=torch.empty(1000))
        next(chunks)
        conn.release(first)
        assert not first.wait_unread(0.05), "a consumer is in the middle of it"
        chunks.close()  # type: ignore[attr-defined]
        assert first.wait_unread(5)
        memory.fill_(2)
        second = conn.publish(StagePayload(request_id="second", tensor=memory))
        with pytest.raises(errors.NotFound):
            reader.fetch(first)
        assert reader.fetch(second, framework="torch").unique().tolist() == [2.0]


def test_memory_that_is_viewed_is_not_unread(run_dir: Path) -> None:
    with DiffusionConnector("p", "p2p", run_dir=run_dir) as conn, DiffusionConnector("c", run_dir=run_dir) as reader:
        memory = conn.allocate((1000,), "float32", framework="torch")
        handle = conn.publish(StagePayload(request_id="r", tensor=memory))
        view = reader.fetch(handle, framework="torch")
        assert handle.wait_released(5)
        assert not handle.wait_unread(0.05), "a consumer sees the memory itself"
        del view
        gc.collect()
        assert handle.wait_unread(5)


def test_what_cannot_be_registered(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        for tensor in (torch.zeros(2, 3).T, torch.zeros(0), "text"):
            with pytest.raises(errors.Invalid):
                conn.register(tensor)
        assert conn.stats()["regions"] == 0


def test_a_producer_that_writes_after_publishing_is_found_out(run_dir: Path, other: Peer) -> None:
    with DiffusionConnector("p", "p2p", run_dir=run_dir, verify=True) as conn:
        tensor = torch.zeros(1000)
        handle = conn.publish(StagePayload(request_id="r", tensor=tensor, lease="pinned"))
        assert other(peer.consume, handle.to_bytes(), framework="torch") == [("float32", (1000,), bytes(4000))]
        tensor[7] = 1
        kind, *_ = other(peer.consume_error, handle.to_bytes(), framework="torch")
        assert kind == "corrupt"
        conn.release(handle)
