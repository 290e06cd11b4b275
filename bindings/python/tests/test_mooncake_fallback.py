"""A payload that is with its producer goes to Mooncake Store when its consumer is lost, and is found there."""

from __future__ import annotations

import asyncio
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from mooncake_cluster import MIB, Child, Master, fill, until
from stagewire import aio
from stagewire.diffusion import DiffusionConnector

torch = pytest.importorskip("torch", reason="torch is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator

PEER = "mooncake_connector_peer.py"
FALLEN = ["store", "consumer_lost"]


def expected(seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    drawn: bytes = torch.randint(0, 256, (8, 4096), dtype=torch.uint8, generator=generator).numpy().tobytes()
    return drawn


@pytest.fixture(scope="module")
def successor(master: Master, lender: Child) -> Iterator[Child]:
    with Child(master.address, script=PEER) as child:
        yield child


@pytest.fixture
def producer(master: Master, lender: Child) -> Iterator[Child]:
    with Child(master.address, script=PEER, mode="auto") as child:
        yield child


@pytest.fixture
def consumer(master: Master, lender: Child) -> Iterator[Child]:
    with Child(master.address, script=PEER) as child:
        yield child


@pytest.fixture(autouse=True)
def _nothing_stays(master: Master) -> Iterator[None]:
    yield
    until("nothing is left behind", master.is_empty)


def fallen(producer: Child) -> None:
    until("the payload is in the store", lambda: producer.ask("way") == FALLEN)


@pytest.mark.parametrize("into", [True, False])
def test_what_a_killed_consumer_had_begun_is_read_after_its_producer_was_killed(
    producer: Child, consumer: Child, successor: Child, into: bool
) -> None:
    data = producer.ask("publish", 1, "delete_on_consume", consumer.ask("address"))
    assert producer.ask("way") == ["p2p", "consumer_alive"]
    assert consumer.ask("begin", data) == [1, 4096]
    consumer.kill()
    fallen(producer)
    counts = producer.ask("stats")
    assert (counts["published_p2p_consumer_alive"], counts["published_store_consumer_lost"]) == (0, 1)
    assert counts["published_p2p_requested"] == 0
    producer.kill()
    found = successor.ask("consume", data, into)
    assert found.get("bytes") == expected(1).hex(), found
    assert len(found["shapes"]) == 8
    assert successor.ask("consume", data, into)["reason"] in {"peer.lost", "payload.gone"}


def test_what_its_consumer_has_read_moves_nowhere(producer: Child, consumer: Child, master: Master) -> None:
    for seed in range(3):
        data = producer.ask("publish", seed, "delete_on_consume", consumer.ask("address"))
        assert consumer.ask("consume", data, bool(seed % 2))["bytes"] == expected(seed).hex()
    consumer.kill()
    until("nothing is held", lambda: producer.ask("live") == 0)
    assert producer.ask("way") == ["p2p", "consumer_alive"]
    assert producer.ask("stats")["mooncake_written_bytes"] == 0


def test_a_consumer_that_is_dead_already_costs_no_detour(producer: Child, consumer: Child, successor: Child) -> None:
    address = consumer.ask("address")
    consumer.kill()
    data = producer.ask("publish", 2, "delete_on_consume", address)
    assert producer.ask("way") == FALLEN
    producer.kill()
    assert successor.ask("consume", data, True)["bytes"] == expected(2).hex()


def test_a_payload_moves_when_its_successor_has_given_it_up(
    producer: Child, consumer: Child, successor: Child, master: Master
) -> None:
    data = producer.ask("publish", 3, "delete_on_consume", consumer.ask("address"))
    assert successor.ask("begin", data) == [1, 4096]
    consumer.kill()
    # The whole of it is still read from its producer, where it was begun.
    assert successor.ask("rest") == expected(3)[4096:].hex()
    assert producer.ask("way") == ["p2p", "consumer_alive"]

    with Child(master.address, script=PEER) as another:
        data = producer.ask("publish", 4, "delete_on_consume", another.ask("address"))
        assert successor.ask("begin", data) == [1, 4096]
    successor.ask("give_up")
    fallen(producer)
    assert successor.ask("consume", data, False)["bytes"] == expected(4).hex()


def test_a_reader_follows_in_the_middle(producer: Child, consumer: Child, successor: Child) -> None:
    data = producer.ask("publish", 5, "pinned", consumer.ask("address"))
    assert successor.ask("begin", data) == [1, 4096]
    consumer.kill()
    fallen(producer)
    producer.kill()
    assert successor.ask("rest") == expected(5)[4096:].hex()
    assert successor.ask("consume", data, True)["bytes"] == expected(5).hex()
    # Nobody else would: it is pinned, and who published it is dead.
    successor.ask("release", data)


def test_whoever_published_it_releases_it_wherever_it_is(producer: Child, consumer: Child, successor: Child) -> None:
    data = producer.ask("publish", 6, "pinned", consumer.ask("address"))
    consumer.kill()
    fallen(producer)
    assert producer.ask("live") == 1
    producer.ask("release", data)
    assert producer.ask("live") == 0
    assert successor.ask("consume", data, True)["reason"] == "payload.gone"


def test_where_the_store_is_full_a_payload_stays_with_its_producer() -> None:
    with (
        Master() as master,
        Child(master.address, segment_bytes=16 * MIB),
        Child(master.address, script=PEER, mode="auto", deadline=1.0) as producer,
        Child(master.address, script=PEER) as consumer,
        Child(master.address, script=PEER) as successor,
        DiffusionConnector(
            "fill",
            store_config={"backend": "mooncake", "master": master.address},
            run_dir=tempfile.mkdtemp(prefix="sw-"),
        ) as filling,
    ):
        make_room = fill(filling)
        data = producer.ask("publish", 7, "delete_on_consume", consumer.ask("address"))
        consumer.kill()
        until("the move is given up", lambda: producer.ask("stats")["mooncake_unmoved"] == 1)
        assert producer.ask("way") == ["p2p", "consumer_alive"]
        assert successor.ask("consume", data, True)["bytes"] == expected(7).hex()
        make_room()
        until("nothing is left behind", master.is_empty)


def test_asyncio(producer: Child, consumer: Child, master: Master) -> None:
    async def test() -> None:
        config = {"backend": "mooncake", "master": master.address}
        run_dir = tempfile.mkdtemp(prefix="sw-")
        async with aio.DiffusionConnector("decode", "store", store_config=config, run_dir=run_dir) as conn:
            for seed in (8, 9):
                data = bytes.fromhex(producer.ask("publish", seed, "delete_on_consume", consumer.ask("address")))
                if seed == 9:
                    consumer.kill()
                    fallen(producer)
                told: list[int] = []

                def tell(index: int, _: Any, told: list[int] = told) -> None:
                    told.append(index)

                chunks = conn.consume(data, framework="torch", on_chunk=tell)
                found = [chunk.clone() async for chunk in chunks]
                assert torch.cat(found).numpy().tobytes() == expected(seed)
                assert told == list(range(8))

    asyncio.run(test())
