"""`stagewire.kv`: the public surface, bad input, and a prompt moved by the descriptors of its plans."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from stagewire import kv
from stagewire.errors import Exhausted, Invalid, StagewireError, Unsupported

FULL = kv.Component("full", layers=18, kv_heads=8, k_dim=64, v_dim=64, dtype="bfloat16")
SWA = kv.Component("swa", layers=18, kv_heads=8, k_dim=64, v_dim=64, dtype="bfloat16", window=127)
TABLES = {"full": [5, 6, 7, 9, 2], "swa": [-1, -1, 11, 12, 4]}
TARGETS = {"full": [3, 4, 8, 9, 10], "swa": [-1, -1, 6, 7, 8]}


def engine(tp_size: int, **changes: Any) -> kv.Engine:
    values: dict[str, Any] = {"tp_size": tp_size, "page_size": 64, "components": [FULL, SWA], **changes}
    return kv.Engine(**values)


def planned(pair: kv.Pair, src_rank: int, dst_rank: int, **changes: Any) -> kv.Plan:
    values: dict[str, Any] = {"seq_len": 300, "src_pages": TABLES, "dst_pages": TARGETS, **changes}
    return pair.plan(src_rank, dst_rank, **values)


def test_a_pair_has_its_routes_and_plans() -> None:
    pair = kv.handshake(engine(1, num_pages={"full": 4096, "swa": 64}), engine(4))
    assert pair.routes() == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert pair.writers(3) == [0]
    plan = planned(pair, 0, 2)
    assert plan.token_range("full") == (0, 0, 300)
    assert plan.token_range("swa") == (128, 173, 300)
    assert (plan.src_rank, plan.dst_rank, plan.packing("swa")) == (0, 2, "gather")
    rows = plan.descriptors()
    names = ("component", "src_layer", "dst_layer", "kv", "src_off", "dst_off", "nbytes")
    assert rows.dtype.names == names
    assert rows.dtype["src_off"] == np.uint64
    assert rows["nbytes"].sum() == plan.nbytes == 256 * (320 + 192) * 36
    order = rows[["component", "kv", "dst_layer", "dst_off"]]
    assert (np.sort(order) == order).all()
    # The published first descriptor of this pair, that of the first token.
    first = rows[(rows["component"] == 0) & (rows["src_off"] == 131584)][0]
    assert first.item()[4:] == (131584, 163840, 256)
    exact = planned(pair, 0, 2, exact_window=True)
    assert exact.nbytes == 256 * (300 + 127) * 36


def test_records_expand_to_the_descriptors() -> None:
    pair = kv.handshake(engine(4), engine(2))
    for src_rank, dst_rank in pair.routes():
        plan = planned(pair, src_rank, dst_rank, exact_window=True)
        expanded = [
            (
                *record.item()[:4],
                record["src_off"] + row * record["src_pitch"],
                record["dst_off"] + row * record["dst_pitch"],
            )
            for record in plan.records()
            for row in range(int(record["rows"]))
        ]
        assert expanded == [row.item()[:6] for row in plan.descriptors()]
        assert plan.packing("full") == "scatter"


def test_a_prompt_arrives_byte_for_byte() -> None:
    """Rows of token and head, by the definition: [pages, tokens, heads, dim] on each rank."""
    heads, page, dim, seq_len = 6, 4, 2, 14
    component = kv.Component("full", layers=1, kv_heads=heads, k_dim=dim, v_dim=dim, dtype="uint8")
    pair = kv.handshake(
        kv.Engine(tp_size=2, page_size=page, components=[component]),
        kv.Engine(tp_size=3, page_size=page, components=[component]),
    )
    assert pair.routes() == [(0, 0), (0, 1), (1, 1), (1, 2)]
    random = np.random.default_rng(6)
    cache = random.integers(0, 255, (2, 8, page, heads, dim), dtype=np.uint8)
    src_pages, dst_pages = [5, 2, 3, 7], [1, 2, 6, 4]
    out = random.integers(0, 255, (3, 2, 8, page, heads // 3, dim), dtype=np.uint8)
    wanted = out.copy()
    for rank in range(3):
        for src, dst in zip(src_pages, dst_pages, strict=True):
            wanted[rank, :, dst] = cache[:, src, :, 2 * rank : 2 * rank + 2]
    for src_rank, dst_rank in pair.routes():
        source = np.ascontiguousarray(cache[:, :, :, 3 * src_rank : 3 * src_rank + 3])
        plan = pair.plan(
            src_rank, dst_rank, seq_len=seq_len, src_pages={"full": src_pages}, dst_pages={"full": np.array(dst_pages)}
        )
        for _, _, _, which, src_off, dst_off, nbytes in plan.descriptors().tolist():
            moved = source[which].reshape(-1)[src_off : src_off + nbytes]
            out[dst_rank, which].reshape(-1)[dst_off : dst_off + nbytes] = moved
    assert (out == wanted).all()


def test_chunks_are_the_whole() -> None:
    pair = kv.handshake(engine(2), engine(1))
    whole = planned(pair, 1, 0)
    parts = [planned(pair, 1, 0, tokens=chunk) for chunk in ((0, 100), (100, 300))]
    assert sum(part.nbytes for part in parts) == whole.nbytes
    assert parts[0].token_range("full") == (0, 0, 64)
    assert parts[1].token_range("full") == (64, 64, 300)
    only = planned(pair, 1, 0, components=["swa"], prefix={"full": 64})
    assert only.nbytes == 192 * 512 * 36
    with pytest.raises(Invalid, match="no component of this plan"):
        only.token_range("full")


def test_the_window_moves_whole_after_the_chunks() -> None:
    pair = kv.handshake(engine(1), engine(4))
    parts = [planned(pair, 0, 2, tokens=chunk, components=["full"]) for chunk in ((0, 100), (100, 280), (280, 300))]
    window = planned(pair, 0, 2, components=["swa"])
    assert window.token_range("swa") == (128, 173, 300)
    rows = np.concatenate([part.descriptors() for part in (*parts, window)])
    assert (np.sort(rows) == np.sort(planned(pair, 0, 2).descriptors())).all()


def test_more_rows_than_memory_holds() -> None:
    component = kv.Component("full", layers=2**16, kv_heads=2, k_dim=1, v_dim=1, dtype="uint8")
    sides = [kv.Engine(tp_size=tp, page_size=2**20, components=[component]) for tp in (1, 2)]
    table = {"full": range(1, 129)}
    plan = kv.handshake(*sides).plan(0, 0, seq_len=2**27, src_pages=table, dst_pages=table)
    with pytest.raises(Exhausted) as raised:
        plan.descriptors()
    assert (raised.value.reason, raised.value.details["entries"]) == ("kv.memory", str(2**44))
    assert len(plan.records()) == 2**17


def test_layers_are_paired_by_id() -> None:
    def layers(ids: list[int]) -> kv.Engine:
        component = kv.Component("full", layers=2, kv_heads=1, k_dim=1, v_dim=1, dtype="uint8", layer_ids=ids)
        assert hash(component) == hash(component)
        return kv.Engine(tp_size=1, page_size=1, components=[component])

    pages = {"full": [1]}
    plan = kv.handshake(layers([10, 20]), layers([20, 10])).plan(0, 0, seq_len=1, src_pages=pages, dst_pages=pages)
    assert [(kv_, src, dst) for _, src, dst, kv_, *_ in plan.descriptors().tolist()] == [
        (0, 1, 0),
        (0, 0, 1),
        (1, 1, 0),
        (1, 0, 1),
    ]
    with pytest.raises(kv.Incompatible, match=r"\[10, 20\].*\[10, 30\]"):
        kv.handshake(layers([10, 20]), layers([10, 30]))


def test_types_go_by_what_they_are() -> None:
    def stored(dtype: Any) -> kv.Engine:
        return kv.Engine(tp_size=1, page_size=1, components=[kv.Component("a", layers=1, k_dim=1, dtype=dtype)])

    kv.handshake(stored("fp8_e4m3"), stored("torch.float8_e4m3fn"))
    kv.handshake(stored("float8_e8m0fnu"), stored(np.dtype(np.uint8)))
    with pytest.raises(kv.Incompatible, match="float8_e4m3fn of 1 bytes at prefill and float8_e5m2 of 1 bytes"):
        kv.handshake(stored("fp8_e4m3"), stored("fp8_e5m2"))


def test_engines_meet_as_bytes() -> None:
    hello = engine(4).to_bytes()
    again = pickle.loads(pickle.dumps(engine(4, num_pages={"swa": 64})))
    assert again == copy.deepcopy(again) == engine(4, num_pages={"swa": 64})
    assert kv.handshake(engine(2), hello).routes() == kv.handshake(engine(2), engine(4)).routes()
    with pytest.raises(kv.Incompatible) as raised:
        kv.handshake(engine(2), b"\xff\xff" + hello[2:])
    assert (raised.value.reason, raised.value.details["theirs"]) == ("kv.version", "65535")
    with pytest.raises(kv.Incompatible) as raised:
        kv.handshake(engine(2), hello[:-3])
    assert raised.value.reason == "kv.hello"


def test_engines_do_not_change() -> None:
    pages = {"swa": 64}
    components = [FULL, SWA]
    side = engine(4, components=components, num_pages=pages)
    hello = side.to_bytes()
    pages["swa"] = 1
    components.pop()
    assert (side.components, dict(side.num_pages)) == ((FULL, SWA), {"swa": 64})
    with pytest.raises(TypeError):
        side.num_pages["swa"] = 1  # type: ignore[index]
    assert side.to_bytes() == hello
    same = engine(4, num_pages={"swa": 64})
    assert (side, hash(side)) == (same, hash(same))
    assert len({side, same, engine(4), engine(2)}) == 3
    assert dataclasses.replace(side, tp_size=2) == engine(2, num_pages={"swa": 64})


@pytest.mark.parametrize(
    ("changes", "reason", "values"),
    [
        ({"page_size": 16}, "kv.page_size", ("64", "16")),
        ({"cp_size": 2}, "kv.context", ("1", "2")),
        ({"pp_size": 2}, "kv.pipeline", ("1", "2")),
        ({"tp_size": 3}, "kv.head_split", ("1", "3")),
        ({"components": [SWA, FULL]}, "kv.components", ("full (mha), swa (mha)", "swa (mha), full (mha)")),
    ],
)
def test_refusals(changes: dict[str, Any], reason: str, values: tuple[str, str]) -> None:
    with pytest.raises(kv.Incompatible) as raised:
        kv.handshake(engine(1), engine(**{"tp_size": 1, **changes}))
    refusal = raised.value
    assert isinstance(refusal, Unsupported)
    assert (refusal.reason, refusal.details["prefill"], refusal.details["decode"]) == (reason, *values)
    assert all(value in str(refusal) for value in values)
    again = pickle.loads(pickle.dumps(refusal))
    assert (type(again), again.reason, again.details) == (kv.Incompatible, reason, refusal.details)
    # The same process goes on.
    assert kv.handshake(engine(1), engine(1)).routes() == [(0, 0)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"src_pages": {**TABLES, "full": [5, 6, 7, 9]}}, "kv.table_length"),
        ({"dst_pages": {"full": [3, 4, 8, 9, 10]}}, "kv.no_table"),
        ({"src_pages": {**TABLES, "full": [5, 0, 7, 9, 2]}}, "kv.not_resident"),
        ({"src_pages": {**TABLES, "swa": [-1, -1, -1, 12, 4]}}, "kv.not_resident"),
        ({"src_pages": {**TABLES, "full": [5, 6, 7, 9, 2**40]}}, "kv.past_pool"),
        ({"dst_pages": {**TARGETS, "full": [3, 4, 8, 9, 3]}}, "kv.written_twice"),
        ({"prefix": {"full": 63}}, "kv.prefix"),
        ({"prefix": {"other": 64}}, "kv.unknown_component"),
        ({"components": ["other"]}, "kv.unknown_component"),
        ({"tokens": (0, 301)}, "kv.tokens"),
        ({"tokens": (0, 1, 2)}, "argument.type"),
        ({"tokens": (-1, 5)}, "kv.tokens"),
        ({"seq_len": -1}, "kv.tokens"),
        ({"seq_len": "300"}, "kv.tokens"),
        ({"seq_len": 2**70}, "kv.tokens"),
        ({"prefix": 64}, "argument.type"),
        ({"prefix": {"full": 1.5}}, "kv.prefix"),
        ({"prefix": {"full": -64}}, "kv.prefix"),
        ({"exact_window": "no"}, "argument.type"),
        ({"exact_window": 1}, "argument.type"),
        ({"exact_window": None}, "argument.type"),
        ({"components": "full"}, "argument.type"),
        ({"components": [3]}, "argument.type"),
        ({"src_pages": None}, "argument.type"),
        ({"src_pages": {**TABLES, "full": None}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": "56792"}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": [5.0, 6, 7, 9, 2]}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": np.zeros((5, 5), dtype=np.int64)}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": [5, 6, 7, 9, 2**63]}}, "argument.type"),
        ({"src_pages": {3: [1]}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": [5, True, 7, 9, 2]}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": np.ones(5, dtype=np.bool_)}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": np.ones(5)}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": np.array(5)}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": {5, 6, 7, 9, 2}}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": dict.fromkeys([5, 6, 7, 9, 2])}}, "argument.type"),
        ({"src_pages": {**TABLES, "full": [5, 10**5000, 7, 9, 2]}}, "argument.type"),
        ({"tokens": {0, 64}}, "argument.type"),
        ({"seq_len": 10**5000}, "kv.tokens"),
    ],
)
def test_what_is_wrong_with_a_room(changes: dict[str, Any], reason: str) -> None:
    pair = kv.handshake(engine(1, num_pages={"full": 4096, "swa": 64}), engine(4))
    with pytest.raises(Invalid) as raised:
        planned(pair, 0, 2, **changes)
    assert raised.value.reason == reason, raised.value
    assert planned(pair, 0, 2).nbytes > 0


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.int64, ">i4", object])
def test_tables_of_any_integers(dtype: Any) -> None:
    pair = kv.handshake(engine(1), engine(4))
    arrays: dict[str, Any] = {name: np.array(table, dtype=dtype) for name, table in TABLES.items()}
    strided: dict[str, Any] = {name: np.repeat(np.array(table, dtype=dtype), 2)[::2] for name, table in TARGETS.items()}
    plan = planned(pair, 0, 1, src_pages=arrays, dst_pages=strided)
    assert (plan.descriptors() == planned(pair, 0, 1).descriptors()).all()
    tuples = planned(pair, 0, 1, src_pages={name: tuple(table) for name, table in TABLES.items()})
    assert (tuples.descriptors() == plan.descriptors()).all()


def test_details_have_the_values_of_what_is_wrong() -> None:
    pair = kv.handshake(engine(1), engine(4))
    with pytest.raises(Invalid, match=r"prefix\['full'\] is 1.5") as raised:
        planned(pair, 0, 2, prefix={"full": 1.5})
    assert raised.value.details == {"prefix": "1.5", "component": "full"}
    with pytest.raises(Invalid) as raised:
        planned(pair, -1, 2)
    assert (raised.value.reason, raised.value.details) == ("kv.route", {"src_rank": "-1"})
    for what, value, expected in (
        ("kind", "full", "one of mha, mla, block_scale, mamba, dsa"),
        ("layout", "NHD", "one of nhd, hnd, vectorized_5d, page_major"),
        ("dtype", "auto", "a type of PyTorch, as it is stored"),
    ):
        values: dict[str, Any] = {"layers": 1, "k_dim": 1, "dtype": "uint8", what: value}
        with pytest.raises(Invalid, match=value) as raised:
            kv.Component("full", **values)
        details = {"component": "full", "field": what, "value": f'"{value}"', "expected": expected}
        assert (raised.value.reason, raised.value.details) == ("kv.geometry", details)


def test_a_rank_that_sends_nothing_there() -> None:
    pair = kv.handshake(engine(4), engine(2))
    with pytest.raises(Invalid) as raised:
        planned(pair, 1, 1)
    assert (raised.value.reason, raised.value.details["writers"]) == ("kv.route", "[2, 3]")


@pytest.mark.parametrize(
    "changes",
    [
        {"layers": 0},
        {"layers": -1},
        {"layers": 1.0},
        {"layers": True},
        {"layers": 10**5000},
        {"kv_heads": 2**40},
        {"k_dim": 0},
        {"dtype": "auto"},
        {"dtype": None},
        {"kind": "full"},
        {"layout": "NHD"},
        {"scales": 48},
        {"layer_ids": [1]},
        {"layer_ids": 3},
        {"layers": 1, "layer_ids": {1}},
        {"window": -1},
        {"name": ""},
        {"name": "\ud800"},
        {"name": 7},
    ],
)
def test_components_that_make_no_sense(changes: dict[str, Any]) -> None:
    values = {"name": "full", "layers": 18, "kv_heads": 8, "k_dim": 64, "v_dim": 64, "dtype": "bfloat16", **changes}
    with pytest.raises(Invalid):
        kv.Component(**values)


@pytest.mark.parametrize(
    "changes",
    [
        {"tp_size": 0},
        {"page_size": None},
        {"components": []},
        {"components": [FULL, FULL]},
        {"components": ["full"]},
        {"components": FULL},
        {"num_pages": {"other": 1}},
        {"num_pages": {"full": -1}},
        {"num_pages": [1]},
        {"num_pages": {3: 1}},
        {"num_pages": {"\ud800": 1}},
    ],
)
def test_engines_that_make_no_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        engine(**{"tp_size": 1, **changes})


def test_handshakes_take_engines() -> None:
    for wrong in (None, FULL, {"tp_size": 1}):
        with pytest.raises(StagewireError, match="an Engine, or its bytes"):
            kv.handshake(engine(1), wrong)  # type: ignore[arg-type]


def test_numpy_is_imported_by_the_calls_that_need_it() -> None:
    program = """
import sys
from stagewire import kv

component = kv.Component("a", layers=1, kv_heads=1, k_dim=1, v_dim=1, dtype="uint8")
engine = kv.Engine(tp_size=1, page_size=1, components=[component])
pages = {"a": [1]}
plan = kv.handshake(engine, engine).plan(0, 0, seq_len=1, src_pages=pages, dst_pages=pages)
assert plan.nbytes == 2 and "numpy" not in sys.modules
assert len(plan.descriptors()) == 2 and "numpy" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
