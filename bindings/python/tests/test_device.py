"""Tensors on a CUDA device: visible only behind the producer's stream, copied once, counted, refused where asked."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import peer
import pytest
import torch
from processes import Peer, wait_for
from stagewire import _device, errors
from stagewire._mooncake_client import Until
from stagewire.diffusion import DiffusionConnector, StagePayload
from test_dlpack import DTYPES, random_bits

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: publishing tensors from one cannot be tried here")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype(run_dir: Path, other: Peer, dtype: str) -> None:
    source = random_bits(dtype, (2, 5, 3))
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        payload = StagePayload(request_id="r", tensors={"a": source, "b": source.cuda()}, chunk_dim=1, num_chunks=2)
        handle = conn.publish(payload)
        found = other(peer.consume, handle.to_bytes(), "fetch", framework="torch")
        assert found == peer.flat({"a": source, "b": source})
        assert (conn.stats()["device_copies"], conn.stats()["device_copied_bytes"]) == (1, source.nbytes)


@pytest.mark.usefixtures("gpu")
def test_chunks_wait_for_the_stream(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        latents = torch.zeros(8, 1 << 20, device="cuda")
        with conn.open(StagePayload(request_id="r", tensor=latents, num_chunks=8)) as stream:
            for index in range(8):
                torch.cuda._sleep(10_000_000)
                latents[index] = index + 1
                stream.ready(index)
                latents[index] += 0.0  # whatever is queued later does not matter
        chunks = conn.consume(stream.handle, framework="torch")
        assert [chunk.unique().tolist() for chunk in chunks] == [[index + 1.0] for index in range(8)]


@pytest.mark.usefixtures("gpu")
def test_strict_refuses_and_so_do_destinations(run_dir: Path) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        with pytest.raises(errors.Unsupported, match="copy it to the host first"):
            conn.publish(StagePayload(request_id="r", tensor=torch.zeros(3, device="cuda")), strict=True)
        handle = conn.publish(StagePayload(request_id="r", tensor=torch.zeros(3)))
        with pytest.raises(errors.Unsupported, match=r"dst|device"):
            conn.fetch(handle, dst=torch.empty(3, device="cuda"))
        conn.release(handle)


class Event:
    """A stand-in for an event of a stream that has not come so far yet."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def record(self, stream: Any) -> None:
        Cuda.events.append(self)

    def query(self) -> bool:
        return self.reached.is_set()


class Cuda:
    """As much of ``torch.cuda`` as is used, over host memory."""

    events: list[Event] = []  # noqa: RUF012
    Event = Event

    class Stream:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None: ...

        def __exit__(self, *exception: object) -> None: ...

    @staticmethod
    def stream(stream: Any) -> Any:
        return stream

    @staticmethod
    def current_stream(device: Any) -> None: ...

    @staticmethod
    def cudart() -> Any:
        return Cuda

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return 0


class OnDevice(torch.Tensor):  # type: ignore[misc]
    """Host memory that says that it is on a device."""

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> type[Cuda]:
    Cuda.events = []
    monkeypatch.setattr(_device, "cuda", lambda: Cuda)
    return Cuda


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnDevice)


def test_nothing_is_visible_before_its_event(run_dir: Path, pretended: type[Cuda]) -> None:
    """The order of things, without a device."""
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        source = torch.zeros(2, 6, 3)
        payload = StagePayload(request_id="r", tensors={"x": on_device(source), "n": None}, chunk_dim=1, num_chunks=3)
        with conn.open(payload) as stream:
            chunks: Any = conn.consume(stream.handle, framework="torch", deadline=20)
            for index in range(3):
                source[:, 2 * index : 2 * index + 2] = index + 1
                stream.ready(index)
            with pytest.raises(errors.Deadline):
                next(conn.consume(stream.handle, deadline=0.05))
            for index, event in enumerate(pretended.events):
                event.reached.set()
                chunk = next(chunks)
                assert (chunk["n"], chunk["x"].unique().tolist()) == (None, [index + 1.0])
            assert next(chunks, None) is None
        stats = conn.stats()
        assert (stats["device_copies"], stats["device_copied_bytes"]) == (1, source.nbytes)
        wait_for(lambda: conn.live() == [], "it was consumed")


def test_a_stream_may_be_left_before_the_device_is_done(run_dir: Path, pretended: type[Cuda]) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        payload = StagePayload(request_id="r", tensor=on_device(torch.arange(4)), num_chunks=2)
        with conn.open(payload) as stream:
            stream.ready(0)
            stream.ready(1)
        for event in pretended.events:
            event.reached.set()
        assert conn.fetch(stream.handle, framework="torch", deadline=20).tolist() == [0, 1, 2, 3]
        with conn.open(payload) as stream:
            stream.ready(0)
        pretended.events[-1].reached.set()
        with pytest.raises(errors.Internal, match="dropped the publication before every chunk was ready"):
            conn.fetch(stream.handle, deadline=20)


def test_a_chunk_that_is_shown_twice_shows_no_other(run_dir: Path, pretended: type[Cuda]) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        payload = StagePayload(request_id="r", tensor=on_device(torch.arange(4)), num_chunks=2)
        with conn.open(payload) as stream:
            stream.ready(0)
            stream.ready(0)
            with pytest.raises(errors.Invalid):
                stream.ready(2)
            for event in pretended.events:
                event.reached.set()
            chunks: Any = conn.consume(stream.handle, framework="torch", deadline=20)
            assert next(chunks).tolist() == [0, 1]
            stream.ready(1)
            for event in pretended.events:
                event.reached.set()
            assert next(chunks).tolist() == [2, 3]
            assert next(chunks, None) is None


def test_publish_returns_before_the_device_is_done(run_dir: Path, pretended: type[Cuda]) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=on_device(torch.arange(6.0).reshape(2, 3).T)))
        with pytest.raises(errors.Deadline):
            conn.fetch(handle, deadline=0.05)
        pretended.events[0].reached.set()
        assert conn.fetch(handle, framework="torch", deadline=20).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_failed_copy_fails_the_payload(run_dir: Path, pretended: type[Cuda], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(pretended.Event, "query", broken)
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        handle = conn.publish(StagePayload(request_id="r", tensor=on_device(torch.zeros(3))))
        with pytest.raises(errors.Internal, match="RuntimeError: an illegal memory access") as failed:
            conn.fetch(handle, deadline=20)
        assert failed.value.reason == "tensor.staging"
        wait_for(lambda: conn.stats()["regions"] == 0, "its memory is free")


def test_a_slow_stream_holds_up_no_other_payload(run_dir: Path, pretended: type[Cuda]) -> None:
    with DiffusionConnector("p", run_dir=run_dir) as conn:
        slow = conn.publish(StagePayload(request_id="slow", tensor=on_device(torch.arange(3))))
        quick = conn.publish(StagePayload(request_id="quick", tensor=on_device(torch.arange(4))))
        pretended.events[1].reached.set()
        assert conn.fetch(quick, framework="torch", deadline=20).tolist() == [0, 1, 2, 3]
        pretended.events[0].reached.set()
        assert conn.fetch(slow, framework="torch", deadline=20).tolist() == [0, 1, 2]


def test_closing_does_not_wait_for_a_stream_for_ever(run_dir: Path, pretended: type[Cuda]) -> None:
    conn = DiffusionConnector("p", run_dir=run_dir, deadline=0.2)
    stream = conn.open(StagePayload(request_id="r", tensor=on_device(torch.arange(4)), num_chunks=2))
    stream.ready(0)
    closing = threading.Thread(target=conn.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    with pytest.raises(errors.StagewireError) as late:
        stream.ready(1)
    assert late.value.reason == "connector.closed"


def test_who_fills_a_place_from_a_device_waits_no_longer_than_was_said(pretended: type[Cuda]) -> None:
    copier = _device.Copier()

    def zeros(shape: tuple[int, ...], dtype: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def staging() -> tuple[_device.Staging, torch.Tensor]:
        made = _device.Staging(copier, zeros, _device.moments([on_device(torch.zeros(1))]))
        return made, made.take(0, on_device(torch.ones(3, dtype=torch.int64)))

    late, place = staging()
    until, idle = Until(0.05), threading.Event()
    with pytest.raises(errors.Deadline, match="was not done") as raised:
        late.fill(until)
    assert raised.value.reason == "tensor.device_deadline"
    until.when_idle(idle.set)
    assert idle.is_set(), "a copy that has not begun is given up"
    pretended.events[-1].reached.set()
    given_up, _ = staging()
    until = Until(60)
    threading.Timer(0.05, until.stop).start()
    with pytest.raises(errors.Cancelled):
        given_up.fill(until)
    done, filled = staging()
    pretended.events[-1].reached.set()
    done.fill(Until(20))
    assert (filled.tolist(), place.tolist()) == ([1, 1, 1], [0, 0, 0])
    copier.close(time.monotonic() + 20)


def test_a_copy_that_has_begun_is_waited_for_by_its_memory_alone(pretended: type[Cuda]) -> None:
    copier, begun, end = _device.Copier(), threading.Event(), threading.Event()

    class Slow(OnDevice):
        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            begun.set()
            end.wait(20)
            return self

    staging = _device.Staging(copier, lambda shape, dtype: torch.zeros(shape, dtype=dtype).as_subclass(Slow), {})
    staging.take(0, on_device(torch.ones(3)))
    until, idle = Until(1), threading.Event()
    with pytest.raises(errors.Deadline):
        staging.fill(until)
    assert begun.is_set()
    until.when_idle(idle.set)
    assert not idle.is_set(), "the device still writes there"
    end.set()
    assert idle.wait(20)
    copier.close(time.monotonic() + 20)


def test_a_chunk_that_two_threads_show_is_copied_once(run_dir: Path, pretended: type[Cuda]) -> None:
    """Or the last one would be taken to be there while nobody has copied it."""

    class Slow(set[int]):
        """Whoever looks acts on what was there a while ago."""

        def __contains__(self, index: object) -> bool:
            found = super().__contains__(index)
            time.sleep(0.05)
            return found

    with DiffusionConnector("p", run_dir=run_dir) as conn:
        source = torch.arange(1, 4)
        stream = conn.open(StagePayload(request_id="r", tensor=on_device(source), num_chunks=3))
        stream._staging._asked = Slow()
        both = [threading.Thread(target=stream.ready, args=(0,)) for _ in range(2)]
        for one in both:
            one.start()
        for one in both:
            one.join()
        for index in (1, 2):
            for event in pretended.events:
                event.reached.set()
            chunks: Any = conn.consume(stream.handle, framework="torch", deadline=20)
            assert next(chunks).tolist() == [1]
            chunks.close()
            stream.ready(index)
        for event in pretended.events:
            event.reached.set()
        assert conn.fetch(stream.handle, framework="torch", deadline=20).tolist() == [1, 2, 3]
