"""`kv.Sender` and `kv.Receiver`: rooms between processes, and whatever goes wrong with them."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import kv_peer
import numpy as np
import peers
import pytest
from kv_cache import FULL, PAGES, SWA, Cache, engine, table, tables
from processes import wait_for
from remote import Remote
from stagewire import aio, errors, kv

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A window that begins inside a page, a last page that is not full.
SEQ_LEN = 30
FAST = {"heartbeat": 0.2, "misses": 2}


@pytest.fixture(scope="module")
def prefill() -> Iterator[Remote]:
    """A process for prefill, whose engine each test starts anew."""
    with Remote() as made:
        yield made


@pytest.fixture
def connector(run_dir: Path) -> Iterator[kv.Connector]:
    with kv.Connector("decode", run_dir=run_dir) as made:
        yield made


class Decode:
    """The ranks of a decode engine."""

    def __init__(self, connector: kv.Connector, tp_size: int, handles: list[bytes], **options: Any) -> None:
        self.engine = engine(tp_size)
        self.handles = handles
        self.caches = [Cache(self.engine, rank) for rank in range(tp_size)]
        self.receivers = [
            kv.Receiver(connector, self.engine, cache.rank, cache.buffers, **options) for cache in self.caches
        ]

    def open(self, room: int, *, first: int = 1, seq_len: int = SEQ_LEN, **options: Any) -> list[kv.ReceiverRoom]:
        pages = tables(self.engine, seq_len, first)
        return [made.room(room, self.handles, seq_len, pages=pages, **options) for made in self.receivers]

    def check(self, seed: int, *, first: int = 1, seq_len: int = SEQ_LEN, **options: Any) -> None:
        for cache in self.caches:
            cache.check(seed, tables(self.engine, seq_len, first), seq_len, **options)


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp", "mooncake"])
@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 1), (1, 2), (4, 2), (2, 2), (1, 8), (8, 1)])
def test_a_prompt_arrives_chunk_by_chunk(
    prefill: Remote, run_dir: Path, connector: kv.Connector, transport: str, src_tp: int, dst_tp: int
) -> None:
    handles = prefill(kv_peer.start, str(run_dir), src_tp, [transport, "tcp"])
    decode = Decode(connector, dst_tp, handles)
    rooms = decode.open(7)
    assert {room.phase for room in rooms} == {"bootstrapping"}
    prefill(kv_peer.serve, 7, seed=1, seq_len=SEQ_LEN, cuts=[10, 16], first=9, aux=b"first token")
    for room in rooms:
        assert room.wait(20)
        assert (room.phase, room.failure, room.aux) == ("success", None, b"first token")
        assert room.wait_released(20)
    decode.check(1)
    pair = kv.handshake(engine(src_tp), engine(dst_tp))
    moved = sum(
        pair.plan(
            *route, seq_len=SEQ_LEN, src_pages=tables(decode.engine, SEQ_LEN), dst_pages=tables(decode.engine, SEQ_LEN)
        ).nbytes
        for route in pair.routes()
    )
    assert sum(room.nbytes for room in rooms) == moved
    assert prefill(kv_peer.released, 7) == ["success"] * src_tp
    assert [made.stats() for made in decode.receivers] == [{"rooms": 0}] * dst_tp


def _receive(run_dir: str, handles: list[bytes], tp_size: int, transport: str) -> list[str]:
    """All of decode's side of room 7, in a process of its own."""
    with kv.Connector("decode", run_dir=run_dir, transports=[transport]) as connector:
        decode = Decode(connector, tp_size, handles)
        rooms = decode.open(7)
        assert all(room.wait(30) and room.wait_released(30) for room in rooms)
        decode.check(1)
        return [room.phase for room in rooms]


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 1), (1, 2)])
def test_a_prompt_arrives_over_nixl(run_dir: Path, monkeypatch: pytest.MonkeyPatch, src_tp: int, dst_tp: int) -> None:
    """In two processes of their own, as its libraries change the one that loads them."""
    monkeypatch.setenv("NIXL_CAPI_LIB", peers.nixl())
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")
    with Remote() as prefill, Remote() as decode:
        handles = prefill(kv_peer.start, str(run_dir), src_tp, ["nixl"])
        prefill(kv_peer.serve, 7, seed=1, seq_len=SEQ_LEN, cuts=[10, 16], first=9)
        assert decode(_receive, str(run_dir), handles, dst_tp, "nixl") == ["success"] * dst_tp
        assert prefill(kv_peer.released, 7) == ["success"] * src_tp


def test_what_decode_holds_is_not_sent_again(prefill: Remote, run_dir: Path, connector: kv.Connector) -> None:
    """Full pages of a prefix were kept, those of the window evicted; with `exact_window`, tokens rather than pages."""
    handles = prefill(kv_peer.start, str(run_dir), 2, ["cma"])
    decode = Decode(connector, 1, handles)
    prefill(kv_peer.serve, 1, seed=2, seq_len=SEQ_LEN, cuts=[20])
    (room,) = decode.open(1, prefix={"full": 12}, exact_window=True)
    assert room.wait(20)
    decode.check(2, prefix={"full": 12})
    assert room.nbytes == (SEQ_LEN - 12) * 4 * 24 * 2 + 6 * 4 * 32
    full, swa = decode.caches[0].buffers["full"][0][0], decode.caches[0].buffers["swa"][0][0]
    assert (full[1:4] == 255).all(), "pages of the prefix are shared, and must not be written"
    assert (full[8, 2:] == 255).all(), "behind the last token"
    assert (swa[tables(decode.engine, SEQ_LEN)["swa"][-2], 2:] != 255).any()


def test_pages_of_a_room_that_was_given_up_are_used_again(
    prefill: Remote, run_dir: Path, connector: kv.Connector
) -> None:
    handles = prefill(kv_peer.start, str(run_dir), 2, ["tcp"])
    decode = Decode(connector, 1, handles)
    for round_ in range(10):
        prefill(kv_peer.do, "open", round_, SEQ_LEN)
        prefill(kv_peer.do, "send", round_, 3, 0, 10, seq_len=SEQ_LEN, first=3)
        (given_up,) = decode.open(round_)
        wait_for(lambda room=given_up: room.nbytes > 0, "the first chunk is here")
        if round_ % 2:
            given_up.abort("the client has gone")
        else:
            prefill(kv_peer.do, "abort", round_, "out of memory")
        with pytest.raises(errors.Cancelled) as failed:
            given_up.wait(20)
        assert failed.value.reason == "kv.aborted"
        assert ("the client has gone" if round_ % 2 else "out of memory") in str(failed.value)
        assert given_up.wait_released(20)
        # The very pages, at once, for another prompt.
        prefill(kv_peer.serve, 100 + round_, seed=round_, seq_len=SEQ_LEN, cuts=[], first=11)
        (room,) = decode.open(100 + round_)
        assert room.wait(20)
        decode.check(round_)
        how = prefill(kv_peer.released, round_)
        assert all(one.startswith("kv.aborted") for one in how), how
        assert prefill(kv_peer.released, 100 + round_) == ["success", "success"]


def test_pages_of_a_room_are_not_given_to_another(prefill: Remote, run_dir: Path, connector: kv.Connector) -> None:
    handles = prefill(kv_peer.start, str(run_dir), 1, ["cma"])
    decode = Decode(connector, 1, handles)
    (room,) = decode.open(1)
    with pytest.raises(errors.Conflict) as refused:
        decode.open(2)
    assert refused.value.reason == "kv.page_in_use"
    assert refused.value.details["by"] == "1"
    room.abort()
    assert room.wait_released(20)
    decode.open(2)[0].abort()


def test_a_killed_prefill_fails_the_room_and_frees_the_pages(run_dir: Path, connector: kv.Connector) -> None:
    with Remote() as dying:
        decode = Decode(connector, 2, dying(kv_peer.start, str(run_dir), 1, ["cma"]))
        dying(kv_peer.do, "open", 1, SEQ_LEN)
        dying(kv_peer.do, "send", 1, 4, 0, 10, seq_len=SEQ_LEN)
        rooms = decode.open(1)
        wait_for(lambda: all(room.phase == "transferring" for room in rooms), "the first chunk is announced")
        dying.kill()
        began = time.monotonic()
        for room in rooms:
            with pytest.raises(errors.Unavailable) as failed:
                room.wait(20)
            assert failed.value.reason == "kv.peer_lost"
            assert failed.value.details["room"] == "1"
            assert room.wait_released(20)
        # The promise is one second, on a machine that has time.
        assert time.monotonic() - began < 5
    with Remote() as another:
        decode.handles = another(kv_peer.start, str(run_dir), 1, ["cma"])
        another(kv_peer.serve, 1, seed=5, seq_len=SEQ_LEN, cuts=[])
        assert all(room.wait(20) for room in decode.open(1))
        decode.check(5)


def test_a_silent_prefill_fails_the_room(run_dir: Path, connector: kv.Connector) -> None:
    with Remote() as silent:
        decode = Decode(connector, 1, silent(kv_peer.start, str(run_dir), 1, ["cma"]), **FAST)
        silent(kv_peer.do, "open", 1, SEQ_LEN)
        (room,) = decode.open(1)
        wait_for(lambda: room.phase == "waiting", "both sides have met")
        with silent.stopped(), pytest.raises(errors.Unavailable) as failed:
            room.wait(20)
        assert failed.value.reason == "kv.silent"


def _decode(run_dir: str, handles: list[bytes], room: int) -> None:
    _KEPT.append(kv.Connector("decode", run_dir=run_dir))
    decode = Decode(_KEPT[0], 1, handles)
    _KEPT.extend([decode, *decode.open(room)])
    wait_for(lambda: _KEPT[-1].nbytes > 0, "the first chunk is here")


_KEPT: list[Any] = []


def test_a_killed_decode_fails_the_room_and_frees_the_pages(prefill: Remote, run_dir: Path) -> None:
    handles = prefill(kv_peer.start, str(run_dir), 2, ["cma"], **FAST)
    with Remote() as dying:
        prefill(kv_peer.do, "open", 1, SEQ_LEN)
        prefill(kv_peer.do, "send", 1, 4, 0, 10, seq_len=SEQ_LEN)
        dying(_decode, str(run_dir), handles, 1)
    how = prefill(kv_peer.released, 1)
    assert all(one.startswith("kv.peer_lost") and "room 1: rank 0 of decode" in one for one in how), how


def test_an_engine_that_does_not_fit_is_refused_and_others_are_served(
    prefill: Remote, run_dir: Path, connector: kv.Connector
) -> None:
    handles = prefill(kv_peer.start, str(run_dir), 2, ["cma"])
    good = Decode(connector, 1, handles)
    (room,) = good.open(1)
    other = kv.Component("full", layers=2, kv_heads=4, k_dim=16, v_dim=8, dtype="int8")
    bad = engine(1, components=[other, SWA])
    cache = Cache(bad, 0)
    with kv.Receiver(connector, bad, 0, cache.buffers) as receiver:
        with pytest.raises(kv.Incompatible) as refused:
            receiver.room(2, handles, SEQ_LEN, pages=tables(bad, SEQ_LEN))
        assert refused.value.reason == "kv.dtype"
        assert "uint8" in refused.value.details["prefill"]
        assert "int8" in refused.value.details["decode"]
        with pytest.raises(kv.Incompatible):
            receiver.writers(handles[0])
        assert all((buffer == 255).all() for *_, buffer in cache.each())
    prefill(kv_peer.serve, 1, seed=6, seq_len=SEQ_LEN, cuts=[8])
    assert room.wait(20)
    good.check(6)


def test_many_rooms_at_once(prefill: Remote, run_dir: Path) -> None:
    """For asyncio, all of them in flight together."""
    count = 128 if os.environ.get("STAGEWIRE_SOAK") else 16
    handles = prefill(kv_peer.start, str(run_dir), 4, ["tcp"], pages=1 + 8 * count)

    async def test() -> None:
        with kv.Connector("decode", run_dir=run_dir) as connector:
            made = engine(1, pages=1 + 8 * count)
            cache = Cache(made, 0)
            with aio.KvReceiver(connector, made, 0, cache.buffers) as receiver:
                rooms = [
                    receiver.room(at, handles, SEQ_LEN, pages=tables(made, SEQ_LEN, 1 + 8 * at)) for at in range(count)
                ]
                waiting = [asyncio.create_task(room.wait(60)) for room in rooms]
                for at in range(count):
                    await asyncio.to_thread(
                        prefill, kv_peer.serve, at, seed=at, seq_len=SEQ_LEN, cuts=[10], first=1 + 8 * (count - 1 - at)
                    )
                assert all(await asyncio.gather(*waiting))
                assert all([await room.wait_released(20) for room in rooms])
                for at in range(count):
                    cache.check_tokens(at, tables(made, SEQ_LEN, 1 + 8 * at), SEQ_LEN)

    asyncio.run(test())
    assert all(prefill(kv_peer.released, at) == ["success"] * 4 for at in range(count))
    stats = [{"rooms": 0, "receivers": 0}] * 4
    wait_for(lambda: prefill(kv_peer.stats) == stats, "the receiver is forgotten")


def test_a_cancelled_task_has_not_ended_the_room(prefill: Remote, run_dir: Path, connector: kv.Connector) -> None:
    handles = prefill(kv_peer.start, str(run_dir), 1, ["cma"])

    async def test() -> None:
        cache = Cache(engine(1), 0)
        receiver = aio.KvReceiver(connector, cache.engine, 0, cache.buffers)
        room = receiver.room(1, handles, SEQ_LEN, pages=tables(cache.engine, SEQ_LEN))
        assert not await room.wait(0.01)
        waiting = asyncio.create_task(room.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        prefill(kv_peer.serve, 1, seed=7, seq_len=SEQ_LEN, cuts=[])
        assert await room.wait(20)
        assert room.failure is None
        receiver.close()
        cache.check(7, tables(cache.engine, SEQ_LEN), SEQ_LEN)

    asyncio.run(test())


def test_the_names_are_those_of_the_blocking_ones() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in dir(kind) if not name.startswith("_")}

    for name in ("Sender", "SenderRoom", "Receiver", "ReceiverRoom"):
        assert public(getattr(kv, name)) == public(getattr(aio, f"Kv{name}"))


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kv.Sender]:
    with kv.Connector("both", run_dir=tmp_path_factory.mktemp("sw") / "run") as connector:
        cache = Cache(engine(1), 0)
        with kv.Sender(connector, cache.engine, 0, cache.buffers) as made:
            made.connector = connector  # type: ignore[attr-defined]
            yield made


CHUNK = {"full": [1, 2], "swa": [1, 2]}


@pytest.mark.parametrize(
    ("reason", "words", "arguments", "options"),
    [
        ("kv.chunk", "the chunk before", ((5, 8), {"full": [2]}), {}),
        ("kv.chunk", "has no tokens", ((0, 0), {}), {}),
        ("kv.chunk", "has page 0", ((0, 8), {"full": [1, 0]}), {}),
        ("kv.chunk", "no part of 8 tokens", ((0, 9), {"full": [1, 2, 3]}), {}),
        ("kv.chunk", "2 pages of it, and 1", ((0, 8), {"full": [1], "swa": [1, 2]}), {"last": True}),
        ("kv.chunk", "2 pages of it, and 0", ((0, 8), {"full": [1, 2]}), {"last": True}),
        ("kv.chunk", "last chunk only", ((0, 4), {"full": [1]}), {"aux": b"x"}),
        ("kv.aux", "1048577 bytes", ((0, 8), CHUNK), {"last": True, "aux": bytes((1 << 20) + 1)}),
        ("kv.unknown_component", "other", ((0, 8), {**CHUNK, "other": [1]}), {"last": True}),
        ("kv.tokens", "tokens is -1", ((-1, 8), CHUNK), {}),
        ("argument.type", "tokens is 8", (8, CHUNK), {}),
        ("argument.type", "pages is [1]", ((0, 8), [1]), {}),
        ("argument.type", "last is str", ((0, 8), CHUNK), {"last": "yes"}),
        ("argument.type", "aux is str", ((0, 8), CHUNK), {"last": True, "aux": "x"}),
        ("argument.type", "pages['full'] is [1.5]", ((0, 8), {"full": [1.5]}), {}),
    ],
)
def test_a_wrong_chunk_is_refused_and_the_room_goes_on(
    sender: kv.Sender, reason: str, words: str, arguments: Any, options: dict[str, Any]
) -> None:
    room = sender.room(1, 8)
    rest = (0, 8), CHUNK
    if words == "the chunk before":
        room.send((0, 4), {"full": [1]})
        rest = (4, 8), {"full": [2], "swa": [1, 2]}
    with pytest.raises(errors.Invalid) as refused:
        room.send(*arguments, **options)
    assert refused.value.reason == reason
    assert words in str(refused.value)
    assert room.phase == "bootstrapping"
    room.send(*rest, last=True, aux=b"x")
    room.abort("enough")
    assert room.wait_released(20)
    assert isinstance(room.failure, errors.Cancelled)
    with pytest.raises(errors.Conflict) as ended:
        room.send((0, 8), CHUNK)
    assert ended.value.reason == "kv.room_ended"


def test_a_number_is_used_once_at_a_time(sender: kv.Sender) -> None:
    room = sender.room(5, 8)
    with pytest.raises(errors.Conflict) as refused:
        sender.room(5, 8)
    assert refused.value.reason == "kv.room_open"
    room.abort()
    assert room.wait_released(20)
    sender.room(5, 8).abort()


def test_a_later_life_of_a_number_ends_the_one_before_and_is_not_taken_for_it(sender: kv.Sender) -> None:
    cache = Cache(engine(1), 0)
    old = sender.room(8, 8)
    with kv.Receiver(sender.connector, cache.engine, 0, cache.buffers) as receiver:  # type: ignore[attr-defined]
        early = receiver.room(8, [sender.handle], 8, pages=tables(cache.engine, 8), life=1)
        new = sender.room(8, 8, life=1)
        assert isinstance(old.failure, errors.Conflict)
        assert old.failure.reason == "kv.superseded"
        with pytest.raises(errors.Conflict) as refused:
            sender.room(8, 8)
        assert refused.value.reason == "kv.superseded"
        new.send((0, 8), CHUNK, last=True)
        assert early.wait(20)
        assert early.wait_released(20)
        late = receiver.room(8, [sender.handle], 8, pages=tables(cache.engine, 8))
        with pytest.raises(errors.Conflict) as told:
            late.wait(20)
        assert told.value.reason == "kv.superseded"
        assert late.wait_released(20)
    assert new.wait(20)


def test_a_room_that_nobody_reads_ends_in_time(sender: kv.Sender) -> None:
    room = sender.room(6, 8, deadline=0.05)
    with pytest.raises(errors.Deadline, match=r"room 6: .* at rank 0 of prefill") as late:
        room.wait(20)
    assert late.value.reason == "kv.deadline"
    assert room.wait_released(20)


def wrong_buffers() -> Iterator[Any]:
    good = Cache(engine(1), 0).buffers
    yield "kv.buffers", "nothing", {}
    yield "kv.buffers", "full, other", {"full": good["full"], "other": good["swa"]}
    yield "kv.buffers", "4 was given", {"full": good["full"][0], "swa": good["swa"]}
    yield "kv.buffers", "need more", {"full": [[b[1:] for b in ks] for ks in good["full"]], "swa": good["swa"]}
    yield "tensor.type", "'swa[0][0]' is a int", {"full": good["full"], "swa": [[1], [2]]}
    yield "argument.type", "a mapping by component", [good["full"]]


@pytest.mark.parametrize(("reason", "words", "buffers"), list(wrong_buffers()))
def test_buffers_that_do_not_fit_are_refused(sender: kv.Sender, reason: str, words: str, buffers: Any) -> None:
    connector = sender.connector  # type: ignore[attr-defined]
    for make in (kv.Sender, kv.Receiver):
        with pytest.raises(errors.Invalid) as refused:
            make(connector, engine(1), 0, buffers)
        assert refused.value.reason == reason
        assert words in str(refused.value)


def test_memory_that_cannot_be_written_in_place_is_refused(sender: kv.Sender) -> None:
    connector = sender.connector  # type: ignore[attr-defined]
    good = Cache(engine(1), 0).buffers
    strided = [np.empty((PAGES, 4, 4, 32), np.uint8)[..., ::2], good["swa"][1][0]]
    for make, reason in ((kv.Sender, "tensor.not_contiguous"), (kv.Receiver, "kv.buffers")):
        with pytest.raises(errors.Invalid, match="not contiguous") as refused:
            make(connector, engine(1), 0, {**good, "swa": strided})
        assert refused.value.reason == reason
    good["swa"][0][0].flags.writeable = False
    with pytest.raises(errors.Invalid, match="read-only"):
        kv.Receiver(connector, engine(1), 0, good)


@pytest.mark.parametrize(
    ("error", "reason", "changes"),
    [
        (errors.Invalid, "kv.handle", {"senders": [b"nonsense"]}),
        (errors.Invalid, "argument.type", {"senders": ["text"]}),
        (errors.Invalid, "kv.writers", {"senders": []}),
        (errors.Invalid, "kv.unknown_component", {"pages": {"other": [1]}}),
        (errors.Invalid, "kv.prefix", {"prefix": {"full": -1}}),
        (errors.Invalid, "kv.tokens", {"seq_len": 1.5}),
        (errors.Invalid, "argument.seconds", {"deadline": -1.0}),
    ],
)
def test_a_wrong_room_is_refused(sender: kv.Sender, error: Any, reason: str, changes: dict[str, Any]) -> None:
    cache = Cache(engine(1), 0)
    given: dict[str, Any] = {"senders": [sender.handle], "seq_len": 8, "pages": tables(cache.engine, 8), **changes}
    with kv.Receiver(sender.connector, cache.engine, 0, cache.buffers) as receiver:  # type: ignore[attr-defined]
        with pytest.raises(error) as refused:
            receiver.room(1, **given)
        assert refused.value.reason == reason
        assert receiver.stats() == {"rooms": 0}


@pytest.mark.parametrize(
    ("reason", "pages", "options"),
    [
        ("kv.table_length", {"full": [1]}, {}),
        ("kv.not_resident", {"full": [1, -1]}, {}),
        ("kv.not_resident", {"full": [0, 1]}, {}),
        ("kv.past_pool", {"full": [1, PAGES]}, {}),
        ("kv.written_twice", {"full": [1, 1]}, {}),
        ("kv.prefix", {}, {"prefix": {"full": 3}}),
        ("kv.no_table", {"full": None}, {}),
    ],
)
def test_wrong_pages_fail_their_room_alone(
    sender: kv.Sender, reason: str, pages: dict[str, Any], options: dict[str, Any]
) -> None:
    cache = Cache(engine(1), 0)
    wrong = {name: ids for name, ids in {**tables(cache.engine, 8), **pages}.items() if ids is not None}
    with kv.Receiver(sender.connector, cache.engine, 0, cache.buffers) as receiver:  # type: ignore[attr-defined]
        theirs = [sender.room(number, 8) for number in (1, 2)]
        for room in theirs:
            room.send((0, 8), CHUNK, last=True)
        bad = receiver.room(1, [sender.handle], 8, pages=wrong, **options)
        with pytest.raises(errors.Invalid) as failed:
            bad.wait(20)
        assert failed.value.reason == reason
        assert failed.value.details["room"] == "1"
        assert bad.wait_released(20)
        good = receiver.room(2, [sender.handle], 8, pages=tables(cache.engine, 8))
        assert good.wait(20)
        assert all(room.wait_released(20) for room in theirs)
        assert [room.phase for room in theirs] == ["failed", "success"]


def test_sides_that_disagree_on_the_prompt_fail(sender: kv.Sender) -> None:
    cache = Cache(engine(1), 0)
    with kv.Receiver(sender.connector, cache.engine, 0, cache.buffers) as receiver:  # type: ignore[attr-defined]
        theirs = sender.room(1, 8)
        theirs.send((0, 8), CHUNK, last=True)
        room = receiver.room(1, [sender.handle], 9, pages=tables(cache.engine, 9))
        with pytest.raises(errors.Invalid) as failed:
            room.wait(20)
        assert failed.value.reason == "kv.seq_len"
        assert (failed.value.details["prefill"], failed.value.details["decode"]) == ("8", "9")
        with pytest.raises(errors.StagewireError) as told:
            theirs.wait(20)
        assert told.value.reason == "kv.seq_len"


def test_what_is_closed_is_closed(run_dir: Path) -> None:
    with kv.Connector("both", run_dir=run_dir) as connector:
        cache, other = Cache(engine(1), 0), Cache(engine(1), 0)
        sender = kv.Sender(connector, cache.engine, 0, cache.buffers)
        receiver = kv.Receiver(connector, cache.engine, 0, other.buffers)
        theirs = sender.room(1, 8)
        room = receiver.room(1, [sender.handle], 8, pages=tables(cache.engine, 8))
        sender.close()
        for one in (theirs, room):
            with pytest.raises(errors.StagewireError) as failed:
                one.wait(20)
            assert failed.value.reason == "kv.closed"
        for call in (lambda: sender.room(2, 8), sender.stats):
            with pytest.raises(errors.Cancelled, match="closed"):
                call()
        receiver.close()
        with pytest.raises(errors.Cancelled, match="closed"):
            receiver.stats()
        assert room.wait_released(20)
        assert "phase='failed'" in repr(room)
    assert (FULL.name, table(SWA, 8, 1)) == ("full", [1, 2])
