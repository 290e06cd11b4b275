"""A model prefilled at one tensor-parallel size and decoded at another says what it says in one engine, bit for bit."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from stagewire import kv

pytest.importorskip("transformers", reason="transformers is not installed: run make setup")

import kv_model
from kv_model import PAGE, SEQ_LEN, Pools

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="module", params=["gpt-oss", "gemma-3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return kv_model.build(request.param)


@pytest.fixture(scope="module")
def expected(model: PreTrainedModel) -> tuple[list[int], torch.Tensor]:
    tokens, logits = kv_model.colocated(model)
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


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2), (4, 1), (1, 1)])
def test_decoding_goes_on_as_if_nothing_had_moved(
    model: PreTrainedModel, expected: tuple[list[int], torch.Tensor], prefill_tp: int, decode_tp: int
) -> None:
    source = Pools(kv_model.engine(model, prefill_tp), seed=1)
    target = Pools(kv_model.engine(model, decode_tp), seed=2)
    pair = kv.handshake(source.engine, target.engine)
    for lo, hi, last in kv_model.prefill(model, source):
        move(pair, source, target, components=["full"], tokens=(lo, hi))
        logits = last
    move(pair, source, target, components=["swa"], tokens=None)
    tokens, all_logits = kv_model.decode(model, kv_model.resumed(model, target), logits)
    assert tokens == expected[0]
    assert torch.equal(all_logits, expected[1])


def test_logits_tell_when_a_page_or_a_head_is_another(
    model: PreTrainedModel, expected: tuple[list[int], torch.Tensor]
) -> None:
    """Else the test above would say less than it seems to: in each buffer the first page counts, and the last."""
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
                assert not torch.equal(changed, expected[1]), (component.name, layer, kind, token, head)
                row.copy_(kept)
