"""One consumer gets a payload in Mooncake Store, on whatever hosts those are that ask for it, whichever of them die."""

from __future__ import annotations

import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
from mooncake_cluster import ELSEWHERE, MIB, Child, Master, fill, need_elsewhere, until
from stagewire import _mooncake_claim, errors
from stagewire.diffusion import DiffusionConnector, StagePayload

torch = pytest.importorskip("torch", reason="torch is not installed")

if TYPE_CHECKING:
    from collections.abc import Iterator

LASTS = 2.0
ROUNDS = 100


@pytest.fixture(scope="module", autouse=True)
def _claims_last_shorter() -> Iterator[None]:
    usual, _mooncake_claim.LASTS = _mooncake_claim.LASTS, LASTS
    yield
    _mooncake_claim.LASTS = usual


def consumer(master: Master, *, elsewhere: bool = False) -> Child:
    """A consumer on this host, or on one of its own."""
    if elsewhere:
        need_elsewhere()
    under = ELSEWHERE if elsewhere else ()
    return Child(master.address, script="mooncake_connector_peer.py", under=under, claim_lasts=LASTS)


@pytest.fixture(scope="module")
def near(master: Master, lender: Child) -> Iterator[Child]:
    with consumer(master) as child:
        yield child


@pytest.fixture(scope="module")
def far(master: Master, lender: Child) -> Iterator[Child]:
    with consumer(master, elsewhere=True) as child:
        yield child


@pytest.fixture(scope="module")
def shared(master: Master, lender: Child) -> Iterator[DiffusionConnector]:
    config = {"backend": "mooncake", "master": master.address}
    with DiffusionConnector("denoise", "store", store_config=config, run_dir=tempfile.mkdtemp(prefix="sw-")) as made:
        yield made


@pytest.fixture
def conn(shared: DiffusionConnector, master: Master) -> Iterator[DiffusionConnector]:
    yield shared
    until("nothing is left behind, no claim either", master.is_empty)


def published(conn: DiffusionConnector, seed: int = 0) -> tuple[str, str]:
    """The handle of a payload of eight chunks, and its bytes."""
    tensor = torch.randint(0, 256, (8, 4096), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    handle = conn.publish(StagePayload(request_id=f"r{seed}", tensor=tensor, num_chunks=8))
    return handle.to_bytes().hex(), tensor.numpy().tobytes().hex()


def test_of_two_hosts_that_race_one_gets_the_payload(conn: DiffusionConnector, near: Child, far: Child) -> None:
    winners = []
    for seed in range(ROUNDS):
        data, expected = published(conn, seed)
        racers = [near, far] if seed % 2 else [far, near]
        for racer in racers:
            racer.tell("consume", data, bool(seed % 3))
        answers = {racer: racer.answer() for racer in racers}
        won = [racer for racer, answer in answers.items() if answer.get("bytes") == expected]
        lost = [answer["reason"] for answer in answers.values() if "reason" in answer]
        assert (len(won), len(lost)) == (1, 1), answers
        assert lost[0] in {"payload.claimed", "payload.gone"}
        winners += won
    assert {near, far} == set(winners)


def test_what_is_given_up_is_free_on_other_hosts_at_once(conn: DiffusionConnector, near: Child, far: Child) -> None:
    data, expected = published(conn)
    for _ in range(3):
        for one, other in ((near, far), (far, near)):
            assert one.ask("begin", data) == [1, 4096]
            assert other.ask("consume", data, True)["reason"] == "payload.claimed"
            one.ask("give_up")
    assert far.ask("consume", data, True)["bytes"] == expected


def test_a_claim_is_kept_for_as_long_as_its_owner_lives(conn: DiffusionConnector, near: Child, far: Child) -> None:
    for owner, other in ((near, far), (far, near)):
        data, _ = published(conn)
        assert owner.ask("begin", data) == [1, 4096]
        asked, end = 0, time.monotonic() + 3 * LASTS
        while time.monotonic() < end:
            assert other.ask("consume", data, True)["reason"] == "payload.claimed"
            asked += 1
        assert asked > 3
        assert owner.ask("end") == 7


def test_a_claim_of_a_killed_owner_is_taken_over_when_it_is_over(
    conn: DiffusionConnector, master: Master, near: Child
) -> None:
    data, expected = published(conn)
    with consumer(master, elsewhere=True) as owner:
        assert owner.ask("begin", data) == [1, 4096]
        began = time.monotonic()
    assert near.ask("consume", data, True)["reason"] == "payload.claimed"
    taken = taken_over(near, data)
    # It was renewed last before its owner died, and may have been a third of its time old before that.
    assert LASTS * 0.5 < time.monotonic() - began < LASTS * 2 + 2
    assert taken == expected


def test_an_owner_killed_before_it_removes_the_payload_has_a_successor(
    conn: DiffusionConnector, master: Master, near: Child
) -> None:
    for elsewhere in (False, True):
        data, expected = published(conn)
        with consumer(master, elsewhere=elsewhere) as owner:
            owner.ask("die_before_removing")
            owner.tell("consume", data, True)
            with pytest.raises(AssertionError, match="ended without a word"):
                owner.answer()
        assert taken_over(near, data) == expected
        assert near.ask("consume", data, True)["reason"] == "payload.gone"


def test_an_owner_that_stood_still_learns_that_it_was_succeeded(
    conn: DiffusionConnector, near: Child, far: Child
) -> None:
    data, _ = published(conn)
    assert near.ask("begin", data) == [1, 4096]
    near.stop()

    def taken() -> bool:
        return bool(far.ask("begin", data) == [1, 4096])

    until("its successor has it", taken)
    near.go_on()
    assert near.ask("end")["reason"] == "payload.claimed"
    assert far.ask("end") == 7
    assert near.ask("consume", data, True)["reason"] == "payload.gone"


def test_where_no_claim_has_room_one_gets_the_payload_all_the_same() -> None:
    """What decides then is who removes it."""
    config: dict[str, Any] = {"backend": "mooncake"}
    with (
        Master() as master,
        Child(master.address, segment_bytes=16 * MIB),
        consumer(master) as one,
        consumer(master) as other,
        DiffusionConnector(
            "denoise", "store", store_config=config | {"master": master.address}, run_dir=tempfile.mkdtemp(prefix="sw-")
        ) as conn,
    ):
        data, _ = published(conn)
        make_room = fill(conn)
        for reader in (one, other):
            assert reader.ask("begin", data) == [1, 4096]
        assert one.ask("end") == 7
        assert other.ask("end")["reason"] == "payload.gone"
        make_room()
        until("nothing is left behind", master.is_empty)


def test_what_is_gone_cannot_be_claimed(conn: DiffusionConnector) -> None:
    store: Any = conn._store
    for parts in ([b"x"], []):
        placed = store._store.put(parts)
        claim = store._store.claim(placed)
        assert store._store.remove(placed)
        # It comes too late to be renewed, or given back.
        claim.release()
        with pytest.raises(errors.NotFound) as gone:
            store._store.claim(placed)
        assert gone.value.reason == "payload.gone"


def taken_over(child: Child, data: str) -> str:
    """What a consumer gets once it gets it."""
    answers: list[Any] = []

    def got() -> bool:
        answers.append(child.ask("consume", data, True))
        return "bytes" in answers[-1] or answers[-1]["reason"] != "payload.claimed"

    until("the claim is over", got)
    return str(answers[-1].get("bytes", answers[-1]))
