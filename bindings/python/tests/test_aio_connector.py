"""The connector for asyncio: the same hand-overs, awaited, and what cancelling does."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from stagewire import aio, diffusion, errors
from stagewire.diffusion import HostStore, Lease, StagePayload

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 30))


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, f"not within 10 s: {what}"
        await asyncio.sleep(0.002)


def test_the_names_are_those_of_the_blocking_one() -> None:
    public = {name for name in vars(diffusion.DiffusionConnector) if not name.startswith("_")}
    assert public == {name for name in vars(aio.DiffusionConnector) if not name.startswith("_")}
    for kind in ("StageHandle", "StreamingPublish"):
        blocking = {name for name in dir(getattr(diffusion, kind)) if not name.startswith("_")}
        assert blocking == {name for name in dir(getattr(aio, kind)) if not name.startswith("_")}


def test_on_chunk_is_called_in_the_event_loop_as_chunks_come(run_dir: Path) -> None:
    async def test() -> None:
        async with aio.DiffusionConnector("p", run_dir=run_dir) as conn:
            told: asyncio.Queue[int] = asyncio.Queue()
            stream = conn.open(StagePayload(request_id="r", tensor=torch.arange(8), num_chunks=4))
            chunks = conn.consume(stream.handle, deadline=20, on_chunk=lambda index, chunk: told.put_nowait(index))
            stream.ready(0)
            await anext(chunks)
            assert await told.get() == 0
            for index in (3, 1, 2):
                stream.ready(index)
                assert await told.get() == index
            assert [chunk async for chunk in chunks] != []

            def broken(index: int, chunk: Any) -> None:
                raise ZeroDivisionError(index)

            handle = await conn.publish(StagePayload(request_id="r", tensor=torch.arange(8), num_chunks=4))
            with pytest.raises(ZeroDivisionError):
                async for _ in conn.consume(handle, deadline=20, on_chunk=broken):
                    pass

    run(test())


@pytest.mark.parametrize("with_dst", [False, True])
def test_whole_and_in_chunks(run_dir: Path, with_dst: bool) -> None:
    async def test() -> None:
        source = torch.arange(60.0).reshape(2, 10, 3)
        async with aio.DiffusionConnector("p", run_dir=run_dir) as p, aio.DiffusionConnector("c", run_dir=run_dir) as c:
            handle = await p.publish(StagePayload(request_id="r", tensor=source, chunk_dim=1, num_chunks=4))
            assert handle.done()
            assert await handle.wait()
            assert await handle.exception() is None
            dst = torch.zeros_like(source) if with_dst else None
            seen: list[int] = []
            chunks = c.consume(handle.to_bytes(), dst=dst, on_chunk=lambda index, chunk: seen.append(index))
            found = [chunk async for chunk in chunks]
            assert torch.equal(torch.cat(found, 1), source)
            assert sorted(seen) == [0, 1, 2, 3]
            if dst is not None:
                assert torch.equal(dst, source)
            assert await handle.wait_released(5)
            handle = await p.publish(StagePayload(request_id="r", tensors={"x": source, "none": None}))
            found = await c.fetch(handle)
            assert found["none"] is None
            assert torch.equal(found["x"], source)
            assert await handle.wait_released(5)
            assert (p.live(), c.stats()["consumers"]) == ([], 0)

    run(test())


def test_many_wait_at_once_without_threads(run_dir: Path) -> None:
    """A hundred consumers wait for chunks that are not there, more than any pool of threads has."""

    async def test() -> None:
        async with aio.DiffusionConnector("p", run_dir=run_dir) as p, aio.DiffusionConnector("c", run_dir=run_dir) as c:
            await p.publish(StagePayload(request_id="warm", tensor=torch.zeros(1)))
            before = threading.active_count()
            streams = [p.open(StagePayload(request_id=str(i), tensor=torch.full((3,), i))) for i in range(100)]
            waiting = [asyncio.create_task(c.fetch(stream.handle, framework="torch")) for stream in streams]
            await until(lambda: c.stats()["consumers"] == 100, "all of them wait")
            assert threading.active_count() == before
            for stream in reversed(streams):
                stream.ready(0)
            found = await asyncio.gather(*waiting)
            assert [int(tensor[0]) for tensor in found] == list(range(100))

    run(test())


def test_cancelling_lets_go(run_dir: Path) -> None:
    async def test() -> None:
        async with aio.DiffusionConnector("p", run_dir=run_dir) as p, aio.DiffusionConnector("c", run_dir=run_dir) as c:
            async with p.open(StagePayload(request_id="r", tensor=torch.arange(4), num_chunks=2)) as stream:

                async def read() -> list[Any]:
                    return [chunk.tolist() async for chunk in c.consume(stream.handle, framework="torch")]

                task = asyncio.create_task(read())
                await until(lambda: c.stats()["consumers"] == 1, "it waits")
                began = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await until(lambda: c.stats()["consumers"] == 0, "the consumer is gone")
                assert time.monotonic() - began < 1
                stream.ready(0)
                stream.ready(1)
            assert await read() == [[0, 1], [2, 3]], "the next one begins at chunk 0"
            open_ = p.open(StagePayload(request_id="r", tensor=torch.arange(4), num_chunks=2))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(c.fetch(open_.handle), 0.05)
            await until(lambda: c.stats()["consumers"] == 0, "the consumer is gone")

    run(test())


def test_errors_are_the_same(run_dir: Path) -> None:
    async def test() -> None:
        async with aio.DiffusionConnector("p", run_dir=run_dir) as p:
            with pytest.raises(errors.Invalid, match="num_chunks is 0"):
                await p.publish(StagePayload(request_id="r", tensor=torch.zeros(1), num_chunks=0))
            stream = p.open(StagePayload(request_id="r", tensor=torch.zeros(2), num_chunks=2))
            with pytest.raises(errors.Deadline, match="chunk 0 of 2"):
                await p.fetch(stream.handle, deadline=0.02)
            with pytest.raises(RuntimeError, match="no more"):
                async with stream:
                    raise RuntimeError("no more")
            with pytest.raises(errors.Internal, match="RuntimeError: no more"):
                await p.fetch(stream.handle)
            handle = await p.publish(StagePayload(request_id="r", tensor=torch.zeros(2), lease=Lease.pinned))
            assert not await handle.wait_released(0.01)
            assert handle.cancel()
            assert not handle.cancel()
            assert await handle.wait_released(5)

    run(test())


def test_a_store(run_dir: Path) -> None:
    async def test() -> None:
        with HostStore("16MiB", run_dir=run_dir):
            async with aio.DiffusionConnector("p", "store", run_dir=run_dir) as p:
                handles = await asyncio.gather(
                    *(p.publish(StagePayload(request_id=str(i), tensor=torch.full((100,), i))) for i in range(20))
                )
                assert all(await asyncio.gather(*(handle.wait(10) for handle in handles)))
                assert p.live() == []
            async with aio.DiffusionConnector("c", run_dir=run_dir) as c:
                found = await asyncio.gather(*(c.fetch(handle, framework="torch") for handle in handles))
                assert [int(tensor[0]) for tensor in found] == list(range(20))

    run(test())


def test_cancelling_who_publishes_gives_the_payload_up(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with aio.DiffusionConnector("p", run_dir=run_dir) as p:
            begun, go_on, made = threading.Event(), threading.Event(), list[str]()
            put = p._put

            def slow(order: Any) -> Any:
                begun.set()
                assert go_on.wait(10)
                publication = put(order)
                made.append(publication.handle.payload_id)
                return publication

            monkeypatch.setattr(p, "_put", slow)
            task = asyncio.create_task(p.publish(StagePayload(request_id="r", tensor=torch.zeros(4, 5).t())))
            await until(begun.is_set, "it publishes")
            began = time.monotonic()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.monotonic() - began < 1
            go_on.set()
            await until(lambda: made and not p.live(), "what it made is given up")

    run(test())


def test_what_is_published_is_what_it_was_at_the_call(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def moments(sources: Any) -> dict[Any, Any]:
        threads.append(threading.get_ident())
        return {source.device: None for source in sources}

    # The current streams of devices belong to a thread.
    monkeypatch.setattr("stagewire._device.moments", moments)

    async def test() -> None:
        async with aio.DiffusionConnector("p", run_dir=run_dir) as p:
            bundle: dict[str, Any] = {"x": torch.zeros(2)}
            publishing = p.publish(StagePayload(request_id="r", tensors=bundle))
            assert threads == [threading.get_ident()]
            bundle["x"] = "nothing to publish"
            assert list((await p.fetch(await publishing, framework="torch"))["x"]) == [0, 0]

    run(test())
