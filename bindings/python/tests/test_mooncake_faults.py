"""Mooncake Store when processes die, stop, or meddle: exact bytes, or an error with a reason, in time."""

from __future__ import annotations

import functools
import json
import signal
import time
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from mooncake_cluster import MIB, Child, Master, until
from mooncake_store_peer import pattern
from stagewire import errors
from stagewire._mooncake_client import Until
from stagewire.errors import StagewireError
from stagewire.mooncake import make_engine
from stagewire.mooncake_store import MooncakeStore, Placed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOST = {"payload.gone", "mooncake_store.transfer", "mooncake_store.master", "mooncake_store.deadline"}


@pytest.fixture
def master() -> Iterator[Master]:
    with Master("--client_ttl=2") as master:
        yield master


@pytest.fixture
def lender(master: Master) -> Iterator[Child]:
    with Child(master.address, segment_bytes=64 * MIB) as child:
        yield child


@pytest.fixture(params=["wire", "wheel"])
def store(request: pytest.FixtureRequest, master: Master, lender: Child) -> Iterator[MooncakeStore]:
    """Reads over the wire, or as where the protocol is not TCP: by the wheel's client."""
    store = MooncakeStore(master.address, block_bytes=MIB, deadline=10.0)
    if request.param == "wheel":
        store._reads.close()
    yield store
    store.close(2.0)


def zeros(placed: Placed) -> list[Any]:
    return [np.zeros(size, np.uint8) for size in placed.parts]


def raised(call: Callable[[], object]) -> StagewireError | None:
    try:
        call()
    except StagewireError as error:
        return error
    return None


def reason(call: Callable[[], object]) -> str | None:
    """Of the error that it raises, if it does."""
    error = raised(call)
    return None if error is None else error.reason


def test_the_lender_is_killed(store: MooncakeStore, lender: Child) -> None:
    placed = store.put([pattern(3 * MIB, 1)])
    lender.kill()
    begun = time.monotonic()
    assert reason(lambda: store.read(placed, zeros(placed))) in LOST
    assert time.monotonic() - begun < 11
    begun = time.monotonic()
    assert reason(lambda: store.put([pattern(3 * MIB, 1)], deadline=1.0)) in LOST | {"credit.store_bytes"}
    assert time.monotonic() - begun < 2
    # Once the master knows, it says so.
    until("the master knows", lambda: reason(lambda: store.read(placed, zeros(placed))) == "payload.gone", within=60)


def test_errors_that_are_kept_keep_no_buffers() -> None:
    """Their tracebacks refer to everything that the failed calls had in hand."""
    with Master("--client_ttl=60") as master, Child(master.address, segment_bytes=64 * MIB) as lender:
        store = MooncakeStore(master.address, block_bytes=MIB)
        store._reads.close()
        placed = store.put([pattern(3 * MIB, 1)])
        lender.kill()
        kept = [raised(lambda: store.read(placed, zeros(placed))) for _ in range(6)]
        assert [error and error.reason for error in kept] == ["mooncake_store.transfer"] * 6
        store.close(2.0)


def test_the_master_is_killed_and_comes_back(store: MooncakeStore, master: Master) -> None:
    placed = store.put([pattern(3 * MIB, 1)])
    master.kill()
    begun = time.monotonic()
    assert reason(lambda: store.read(placed, zeros(placed), deadline=1.0)) in LOST
    assert reason(lambda: store.put([b"x"], deadline=1.0)) in LOST
    assert reason(lambda: store.remove(placed, deadline=1.0)) in LOST
    assert time.monotonic() - begun < 4
    master.start()
    answers: list[Placed] = []
    reasons: set[str | None] = set()

    def puts() -> bool:
        reasons.add(reason(lambda: answers.append(store.put([pattern(3 * MIB, 2)]))))
        return bool(answers)

    until("the store takes payloads again", puts, within=30)
    assert reasons <= LOST | {"credit.store_bytes", None}
    # What it knew before is lost. Its room has been given to others, and their bytes are not taken for the old ones.
    assert reason(lambda: store.read(placed, zeros(placed))) == "payload.gone"
    assert not store.remove(placed)
    into = zeros(answers[-1])
    store.read(answers[-1], into)
    assert (into[0] == pattern(3 * MIB, 2)).all()


def test_a_lender_that_stands_still_holds_nobody_up(store: MooncakeStore, lender: Child, master: Master) -> None:
    placed = store.put([pattern(3 * MIB, 1)])
    into = zeros(placed)
    lender.stop()
    for call in (
        lambda: store.read(placed, into, deadline=0.5),
        lambda: store.put([pattern(2 * MIB, 3)], deadline=0.5),
    ):
        begun = time.monotonic()
        assert reason(call) == "mooncake_store.deadline"
        assert time.monotonic() - begun < 1.5
    # Memory that was read into has a new purpose now; late bytes must not come into it.
    into[0][:] = 7
    lender.go_on()
    until("every call has ended", lambda: store.stats()["calls"] == 0, within=40)
    assert (into[0] == 7).all()
    until("what was given up is gone", lambda: master.metric("master_key_count") <= 4, within=40)


def test_a_claim_that_was_given_up_holds_nobody_of_its_process_up(store: MooncakeStore, lender: Child) -> None:
    """However late the call comes to its end that makes the claim, or takes it back."""
    placed = store.put([b"x"])
    for _ in range(5):
        lender.stop()
        assert reason(lambda: store.claim(placed, deadline=0.3)) == "mooncake_store.deadline"
        lender.go_on()
        with store.claim(placed):
            assert reason(lambda: store.claim(placed)) == "payload.claimed"
    assert store.remove(placed)


def test_who_gives_up_undoes_nothing_of_others(store: MooncakeStore, lender: Child, master: Master) -> None:
    placed = store.put([b"x"])
    assert lender.ask("claim", placed.to_bytes().hex()) == placed.to_bytes().hex()
    for _ in range(3):
        master.send(signal.SIGSTOP)
        try:
            assert reason(lambda: store.claim(placed, deadline=0.3)) == "mooncake_store.deadline"
        finally:
            master.send(signal.SIGCONT)
        until("every call has ended", lambda: store.stats()["calls"] == 0)
        assert reason(lambda: store.claim(placed)) == "payload.claimed"
    lender.ask("release")

    payload_id = str(uuid.uuid4())
    with store.create([MIB], payload_id=payload_id) as draft:
        for _ in range(50):
            again = functools.partial(store.put, [b"x"], payload_id=payload_id, deadline=0.0)
            assert reason(again) in {"mooncake_store.deadline", "store.exists"}
        until("every call has ended", lambda: store.stats()["calls"] == 0)
        np.from_dlpack(draft.part(0))[:] = pattern(MIB, 3)
        written = draft.seal()
    into = zeros(written)
    store.read(written, into)
    assert (into[0] == pattern(MIB, 3)).all()


def test_a_master_that_stands_still_holds_nobody_up(store: MooncakeStore, master: Master) -> None:
    placed = store.put([b"x"])
    master.send(signal.SIGSTOP)
    try:
        for call in (
            lambda: store.put([b"y"], deadline=0.5),
            lambda: store.read(placed, zeros(placed), deadline=0.5),
            lambda: store.find(placed.payload_id, deadline=0.5),
            lambda: store.remove(placed, deadline=0.5),
            lambda: store.claim(placed, deadline=0.5),
        ):
            begun = time.monotonic()
            assert reason(call) in {"mooncake_store.deadline", "mooncake_store.master"}
            assert time.monotonic() - begun < 1.5
        assert not store.close(0.2)
        assert reason(lambda: store.put([b"x"])) == "mooncake_store.closed"
    finally:
        master.send(signal.SIGCONT)
    until("it closes by itself", lambda: store.close(1.0), within=40)


def test_bytes_of_others_are_not_taken_for_a_payload(store: MooncakeStore, master: Master) -> None:
    """Removed and written again while it is read: the store says success, and returns a mixture."""
    with Child(master.address) as other:
        other.tell("replace_forever", 8 * MIB)
        exact = gone = 0
        for _ in range(40):
            data, seed = other.answer()
            placed = Placed.from_bytes(bytes.fromhex(data))
            # It is taken away as soon as the other process reads this line.
            assert other.process.stdin is not None
            other.process.stdin.write(json.dumps(data) + "\n")
            other.process.stdin.flush()
            into = zeros(placed)
            outcome = reason(functools.partial(store.read, placed, into, deadline=2.0))
            # The wheel may fail by itself, or wait, where what it reads has gone.
            assert outcome in {None, *LOST}
            if outcome is None:
                assert (into[0] == pattern(8 * MIB, seed)).all()
                exact += 1
            else:
                gone += 1
        assert exact + gone == 40
        assert gone > 0


def test_blocks_may_be_larger_than_those_of_the_reader(store: MooncakeStore, master: Master) -> None:
    with Child(master.address, block_bytes=16 * MIB) as other:
        placed = Placed.from_bytes(bytes.fromhex(other.ask("put", [8 * MIB, 100], 3)))
        into = zeros(placed)
        store.read(placed, into)
        for index, part in enumerate(into):
            assert (part == pattern(len(part), 3 + index)).all()


def test_what_somebody_wrote_into_the_store_is_found(store: MooncakeStore, lender: Child) -> None:
    """Mooncake's data port lets anybody write anywhere."""
    placed = store.put([pattern(2 * MIB, 1)])
    blocks = list(placed.layout.blocks())
    key = placed.layout.key(blocks[1])
    buffer: Any = store._client.call(
        "asking",
        Until(5),
        lambda raw: raw.get_replica_desc(key)[0].get_memory_descriptor().buffer_descriptor,
    )
    engine, _ = make_engine("127.0.0.1")
    junk: Any = np.zeros(100, np.uint8)
    written = engine.transfer_sync_write(buffer.transport_endpoint, junk.ctypes.data, buffer.buffer_address + 5, 100)
    assert written == 0
    with pytest.raises(errors.Corrupt) as other:
        store.read(placed, zeros(placed))
    assert other.value.reason == "payload.digest"
    assert other.value.details["block"] == "1"


def test_a_full_store_loses_nothing(store: MooncakeStore) -> None:
    """Unread payloads would be evicted within 50 ms at nine tenths; these stay, until the store is full to the brim."""
    kept: list[tuple[Placed, int]] = []

    def put() -> None:
        seed = len(kept)
        kept.append((store.put([pattern(4 * MIB - 1000, seed)], deadline=3.0), seed))

    full = None
    while full is None:
        full = raised(put)
    assert full.reason == "credit.store_bytes"
    assert float(full.details["waited_seconds"]) > 0.5
    assert full.details["wanted_bytes"] == str(4 * MIB - 1000)
    assert len(kept) >= 13
    for placed, seed in kept:
        into = zeros(placed)
        store.read(placed, into)
        assert (into[0] == pattern(4 * MIB - 1000, seed)).all()
    assert store.remove(kept[0][0])
    assert store.put([pattern(3 * MIB, 0)])


def test_larger_than_every_segment_is_refused_or_cut(store: MooncakeStore, master: Master) -> None:
    with Child(master.address, segment_bytes=64 * MIB):
        # Larger than either segment, and smaller than both.
        placed = store.put([pattern(90 * MIB, 1)])
        into = zeros(placed)
        store.read(placed, into)
        assert (into[0] == pattern(90 * MIB, 1)).all()
        assert store.remove(placed)
    large = MooncakeStore(master.address, block_bytes=80 * MIB)
    refused = raised(lambda: large.put([np.zeros(80 * MIB, np.uint8)], deadline=0.2))
    assert refused is not None
    assert refused.reason == "credit.store_bytes"
    assert refused.details["block_bytes"] == str(80 * MIB)
    large.close(2.0)


def test_a_lease_shorter_than_the_read_is_no_error() -> None:
    with Master("--default_kv_lease_ttl=1") as master, Child(master.address, segment_bytes=128 * MIB):
        store = MooncakeStore(master.address, block_bytes=32 * MIB)
        placed = store.put([pattern(64 * MIB, 1)])
        for _ in ("wire", "wheel"):
            into = zeros(placed)
            store.read(placed, into)
            assert (into[0] == pattern(64 * MIB, 1)).all()
            store._reads.close()
        store.close()
