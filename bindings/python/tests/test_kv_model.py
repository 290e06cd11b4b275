"""A model prefilled at one tensor-parallel size and decoded at another says what it says in one engine, bit for bit."""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from remote import Remote
from stagewire import kv

pytest.importorskip("transformers", reason="transformers is not installed: run make setup")

import kv_model
from kv_model import PAGE, SEQ_LEN, Pools

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


NAMES = ["gpt-oss", "gemma-3"]


@functools.cache
def expected(name: str) -> tuple[list[int], torch.Tensor]:
    """The next tokens and their logits, from one engine."""
    tokens, logits = kv_model.colocated(kv_model.build(name))
    assert len(set(tokens)) > 8, f"a model that repeats itself would notice nothing: {tokens}"
    return tokens, logits


def move(pair: kv.Pair, source: Pools, target: Pools, *, components: list[str], tokens: tuple[int, int] | None) -> None:
    """Moves the records of all routes, within this process."""
    for src_rank, dst_rank in pair.routes():
        plan = pair.plan(
            src_rank,
            dst_rank,
            seq_len=SEQ_LEN,
            src_pages=source.pages,
            dst_pages=target.pages,
            components=components,
            tokens=tokens,
        )
        for record in plan.records().tolist():
            index, src_layer, dst_layer, kind, src_off, dst_off, width, rows, src_pitch, dst_pitch = record
            name = source.engine.components[index].name
            flat = [
                pools[name][kind][layer].view(torch.uint8).flatten()[off:].as_strided((rows, width), (pitch, 1))
                for pools, layer, off, pitch in [
                    (source.ranks[src_rank], src_layer, src_off, src_pitch),
                    (target.ranks[dst_rank], dst_layer, dst_off, dst_pitch),
                ]
            ]
            flat[1].copy_(flat[0])


class Here:
    """Prefill in this process; the records of all routes are copied one by one."""

    def __call__(self, name: str, prefill_tp: int, target: Pools) -> torch.Tensor:
        model = kv_model.build(name)
        source = Pools(kv_model.engine(model, prefill_tp), seed=1)
        pair = kv.handshake(source.engine, target.engine)
        all_logits = []
        for lo, hi, logits in kv_model.prefill(model, source):
            move(pair, source, target, components=["full"], tokens=(lo, hi))
            all_logits.append(logits)
        move(pair, source, target, components=["swa"], tokens=None)
        return all_logits[-1]


class Elsewhere:
    """Prefill in another process, which hands over in rooms."""

    def __init__(self, remote: Remote, run_dir: Path, transport: str) -> None:
        self.remote = remote
        self.run_dir = run_dir
        self.transport = transport

    def __call__(self, name: str, prefill_tp: int, target: Pools) -> torch.Tensor:
        handles = self.remote(kv_model.start, str(self.run_dir), name, prefill_tp, self.transport)
        with kv.Connector("decode", run_dir=self.run_dir) as connector:
            receivers = [
                kv.Receiver(connector, target.engine, rank, buffers) for rank, buffers in enumerate(target.ranks)
            ]
            self.remote.start(kv_model.run, 7)
            rooms = [made.room(7, handles, SEQ_LEN, pages=target.pages) for made in receivers]
            assert all(room.wait(30) for room in rooms)
            self.remote.answer()
            aux = rooms[0].aux
            assert aux is not None
            for made in receivers:
                made.close()
        return torch.frombuffer(bytearray(aux), dtype=torch.float32)[None].to(kv_model.build(name).dtype)


@pytest.fixture(scope="module")
def remote() -> Iterator[Remote]:
    with Remote() as made:
        yield made


@pytest.mark.parametrize("way", ["records", "shm", "tcp", "mooncake"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_decoding_goes_on_as_if_nothing_had_moved(
    run_dir: Path, remote: Remote, name: str, prefill_tp: int, decode_tp: int, way: str
) -> None:
    model = kv_model.build(name)
    target = Pools(kv_model.engine(model, decode_tp), seed=2)
    hand_over = Here() if way == "records" else Elsewhere(remote, run_dir, way)
    logits = hand_over(name, prefill_tp, target)
    tokens, all_logits = kv_model.decode(model, kv_model.resumed(model, target), logits)
    assert tokens == expected(name)[0]
    assert torch.equal(all_logits, expected(name)[1])


@pytest.mark.parametrize("name", NAMES)
def test_logits_tell_when_a_page_or_a_head_is_another(name: str) -> None:
    """Else the test above would say less than it seems to: in each buffer the first page counts, and the last."""
    model = kv_model.build(name)
    source = Pools(kv_model.engine(model, 1), seed=1)
    *_, (_, _, logits) = kv_model.prefill(model, source)
    for component, kind in itertools.product(source.engine.components, (0, 1)):
        first = 0 if component.window is None else SEQ_LEN - component.window
        for layer in range(component.layers):
            pool = source.ranks[0][component.name][kind][layer]
            for token, head in [(first, 0), (SEQ_LEN - 1, component.kv_heads - 1)]:
                row = pool[source.pages[component.name][token // PAGE], :, head]
                kept = row.clone()
                row.neg_()
                _, changed = kv_model.decode(model, kv_model.resumed(model, source), logits)
                assert not torch.equal(changed, expected(name)[1]), (component.name, layer, kind, token, head)
                row.copy_(kept)
