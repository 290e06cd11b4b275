"""Mooncake Store, of a real master and real clients: what is written comes back, and nothing else."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mooncake_cluster import MIB, Child, Master, need_store, until
from mooncake_store_peer import pattern
from stagewire import conformance, errors
from stagewire.mooncake_store import MooncakeStore, Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def shared(master: Master, lender: Child) -> Iterator[MooncakeStore]:
    with MooncakeStore(master.address, block_bytes=MIB) as store:
        yield store


@pytest.fixture
def store(shared: MooncakeStore, master: Master) -> Iterator[MooncakeStore]:
    yield shared
    # What is given up goes its own way.
    until("nothing is left behind", master.is_empty)


def zeros(placed: Placed) -> list[Any]:
    return [np.zeros(size, np.uint8) for size in placed.parts]


@pytest.fixture(scope="module", params=["wire", "wheel"])
def reader(request: pytest.FixtureRequest, master: Master, lender: Child) -> Iterator[MooncakeStore]:
    """Another client, which gets bytes over the wire, or as where the protocol is not TCP: by the wheel's client."""
    with MooncakeStore(master.address) as store:
        if request.param == "wheel":
            store._reads.close()
        yield store


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [MIB], [MIB + 1], [5, 0, 3 * MIB + 17, 100], [1] * 300], ids=lambda sizes: str(sizes)[:20]
)
def test_what_is_put_comes_back(store: MooncakeStore, reader: MooncakeStore, sizes: list[int]) -> None:
    parts = [pattern(size, index) for index, size in enumerate(sizes)]
    placed = store.put(parts)
    assert placed.parts == tuple(sizes)
    into, before = zeros(placed), reader.stats()["read_staged_bytes"]
    reader.read(Placed.from_bytes(placed.to_bytes()), into)
    assert all((found == part).all() for found, part in zip(into, parts, strict=True))
    assert reader.find(placed.payload_id) == placed
    copied = reader.stats()["read_staged_bytes"] - before
    assert copied == (0 if reader._reads._segments else sum(sizes))
    assert reader.remove(placed)
    assert not store.remove(placed)


PROMISED = [
    "objects_come_back_exact",
    "nobody_reads_what_is_not_sealed",
    "put_if_absent_is_truthful",
    "aborted_drafts_leave_nothing",
    "deleted_objects_are_gone",
    "readers_keep_what_they_read",
    "fetched_bytes_are_exact",
]

# What it cannot promise; `ForeignStore::abilities` of the bindings says why.
NOT_PROMISED = [
    "deleted_drafts_are_gone",
    "a_full_store_says_what_holds_the_space",
    "a_writer_waits_for_room",
    "reserved_room_is_kept",
    "cached_objects_make_room_and_held_ones_do_not",
    "what_is_read_is_not_evicted",
    "deadlines_are_fixed",
    "what_is_over_goes_first",
]


@pytest.fixture(scope="module", params=["4096", "16MiB"])
def outcomes(request: pytest.FixtureRequest) -> dict[str, conformance.Outcome]:
    """Of the suite that the host store passes, too."""
    with (
        Master() as master,
        Child(master.address, segment_bytes=64 * MIB),
        MooncakeStore(master.address, block_bytes=request.param) as store,
    ):
        return {outcome.check: outcome for outcome in conformance.run_store(store)}


@pytest.mark.parametrize("check", PROMISED + NOT_PROMISED)
def test_it_conforms(outcomes: dict[str, conformance.Outcome], check: str) -> None:
    assert set(outcomes) == {*PROMISED, *NOT_PROMISED}
    outcome = outcomes[check]
    assert outcome.problem is None
    assert (outcome.skipped is None) == (check in PROMISED)
    if outcome.skipped is not None:
        pytest.skip(outcome.skipped)


def test_another_process_reads_and_removes(store: MooncakeStore, lender: Child) -> None:
    placed = lender.ask("put", [3 * MIB, 10], 7)
    found = Placed.from_bytes(bytes.fromhex(placed))
    into = zeros(found)
    store.read(found, into)
    assert (into[0] == pattern(3 * MIB, 7)).all()
    assert (into[1] == pattern(10, 8)).all()
    assert lender.ask("check", placed, 7) is True
    assert lender.ask("remove", placed) is True
    with pytest.raises(errors.NotFound) as gone:
        store.read(found, into)
    assert gone.value.reason == "payload.gone"
    with pytest.raises(errors.NotFound) as gone:
        store.find(found.payload_id)
    assert gone.value.reason == "payload.gone"


def test_of_two_writers_one_gets_the_id(master: Master, store: MooncakeStore, lender: Child) -> None:
    ids = [str(uuid.uuid4()) for _ in range(30)]
    with Child(master.address) as other:
        lender.tell("race", ids, 1)
        other.tell("race", ids, 2)
        won = [lender.answer(), other.answer()]
    assert sorted(won[0] + won[1]) == sorted(ids)
    for payload_id in ids:
        placed = store.find(payload_id)
        into = zeros(placed)
        store.read(placed, into)
        assert (into[0] == pattern(1000, 1 if payload_id in won[0] else 2)).all()
        assert store.remove(placed)


def test_drafts_are_seen_by_nobody_and_leave_nothing(master: Master, store: MooncakeStore, lender: Child) -> None:
    payload_id = str(uuid.uuid4())
    with store.create([MIB + 5, 0], payload_id=payload_id) as draft:
        with pytest.raises(errors.NotFound) as early:
            store.find(payload_id)
        assert early.value.reason == "store.not_sealed"
        assert lender.ask("put", [10], 1, payload_id)["reason"] == "store.exists"
        np.from_dlpack(draft.part(0))[:] = pattern(MIB + 5, 3)
        placed = draft.seal()
        with pytest.raises(errors.Conflict) as again:
            draft.seal()
        assert again.value.reason == "publish.ended"
    into = zeros(placed)
    store.read(placed, into)
    assert (into[0] == pattern(MIB + 5, 3)).all()
    assert store.remove(placed)
    with store.create([MIB], payload_id=payload_id), pytest.raises(errors.Conflict):
        store.put([b"x"], payload_id=payload_id)
    assert store.remove(store.put([pattern(10, 1)], payload_id=payload_id))


def test_what_the_dead_hold_comes_free() -> None:
    with Master("--put_start_discard_timeout_sec=2") as master, Child(master.address, segment_bytes=16 * MIB):
        store = MooncakeStore(master.address)
        payload_id = str(uuid.uuid4())
        claimed = store.put([b"read by one at a time"])
        with Child(master.address) as other:
            assert other.ask("begin", [MIB], payload_id) == payload_id
            other.ask("claim", claimed.to_bytes().hex())
        # Its keys are blocked for a while; another attempt has its own.
        with pytest.raises(errors.Conflict):
            store.put([b"x"], payload_id=payload_id)
        # Of a reader on this host one sees that it is dead.
        store.claim(claimed).release()
        assert store.remove(store.put([b"another attempt"]))

        def free(call: Callable[[], object]) -> bool:
            try:
                call()
            except errors.Conflict:
                return False
            return True

        until("the id is free", lambda: free(lambda: store.put([b"x"], payload_id=payload_id)))
        store.close()


def test_one_reader_claims_a_payload(store: MooncakeStore, lender: Child) -> None:
    placed = store.put([b"bytes"])
    with store.claim(placed):
        second = lender.ask("claim", placed.to_bytes().hex())
        assert second["reason"] == "payload.claimed"
        with pytest.raises(errors.Conflict):
            store.claim(placed)
    until("it is released", lambda: lender.ask("claim", placed.to_bytes().hex()) == placed.to_bytes().hex())
    assert lender.ask("release") is None
    assert store.remove(placed)


def test_wrong_arguments_are_told_at_the_call(store: MooncakeStore, master: Master) -> None:
    placed = store.put([b"12345"])
    with pytest.raises(errors.Invalid) as wrong:
        store.read(placed, [bytearray(4)])
    assert wrong.value.reason == "consume.destination"
    assert "[4]" in str(wrong.value)
    assert "[5]" in str(wrong.value)
    with pytest.raises(errors.Invalid):
        store.read(placed, [b"12345"])
    with pytest.raises(errors.Invalid) as wrong:
        store.put([np.zeros((4, 4))[:, :2]])
    assert wrong.value.reason == "argument.memory"
    with pytest.raises(errors.Invalid) as wrong:
        store.find("nonsense")
    assert wrong.value.reason == "payload.id"
    with pytest.raises(errors.Invalid):
        MooncakeStore("nonsense")
    with pytest.raises(errors.Invalid):
        MooncakeStore(master.address, block_bytes=100)
    assert store.remove(placed)


@pytest.mark.parametrize("at", [0, 5, 30, -1])
def test_a_damaged_header_is_refused(store: MooncakeStore, at: int) -> None:
    placed = store.put([b"12345"])
    data = bytearray(placed.to_bytes())
    data[at] ^= 1
    with pytest.raises((errors.Corrupt, errors.Unsupported)):
        Placed.from_bytes(bytes(data))
    with pytest.raises(errors.Corrupt):
        Placed.from_bytes(placed.to_bytes()[:-1])
    assert store.remove(placed)


def test_threads_share_a_store(store: MooncakeStore) -> None:
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round_ in range(20):
                part = pattern(1 + (seed * 7919 + round_ * 104729) % (2 * MIB), seed * 100 + round_)
                placed = store.put([part])
                into = zeros(placed)
                store.read(placed, into)
                assert (into[0] == part).all()
                assert store.remove(placed)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_closed_store_refuses_and_a_dead_master_is_told_at_once(master: Master) -> None:
    store = MooncakeStore(master.address)
    assert store.close()
    assert store.close()
    for call in (lambda: store.put([b"x"]), lambda: store.find(str(uuid.uuid4())), lambda: store.create([1])):
        with pytest.raises(errors.Cancelled) as closed:
            call()
        assert closed.value.reason == "mooncake_store.closed"
    begun = time.monotonic()
    with pytest.raises(errors.Unavailable) as dead:
        MooncakeStore("127.0.0.1:1")
    assert dead.value.reason == "mooncake_store.master"
    assert time.monotonic() - begun < 1


def test_a_master_that_says_nothing_is_given_up(master: Master) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        begun = time.monotonic()
        with pytest.raises(errors.Deadline) as late:
            MooncakeStore(f"127.0.0.1:{silent.getsockname()[1]}", start_deadline=1.0)
        assert late.value.reason == "mooncake_store.deadline"
        assert time.monotonic() - begun < 5


def test_a_client_that_does_not_start_says_why(master: Master) -> None:
    need_store()
    with pytest.raises(errors.Unavailable) as refused:
        MooncakeStore(master.address, protocol="pigeon", start_deadline=60.0)
    assert refused.value.reason == "mooncake_store.start"
