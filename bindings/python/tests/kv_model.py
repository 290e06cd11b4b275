"""Small hybrid models with random weights, and their KV caches in the paged pools of tensor-parallel ranks.

A model runs whole in one process; what each of an engine's ranks would hold of its cache is written into pools of that
rank. So the pools have what real ranks have, and the logits say whether the cache that came over is the one that left.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from stagewire import kv
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = 16
STEPS = 32
# Several windows of prompt, in prefill chunks that end inside a page and at one; the last is shorter than the window.
CHUNKS = [(0, 70), (70, 128), (128, 139)]
SEQ_LEN = CHUNKS[-1][1]

_SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "head_dim": 16,
    "initializer_range": 0.3,
    "sliding_window": 24,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@functools.cache
def build(name: str) -> PreTrainedModel:
    """The model of this name: the same weights in every process."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    if name == "gpt-oss":
        config = GptOssConfig(
            **_SMALL,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=64,
            num_local_experts=4,
            num_experts_per_tok=2,
            rope_parameters={"rope_type": "default", "rope_theta": 150000.0},
        )
        return GptOssForCausalLM(config).to(torch.bfloat16).eval()
    gemma = Gemma3TextConfig(
        **_SMALL, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96
    )
    return Gemma3ForCausalLM(gemma).eval()


def prompt() -> torch.Tensor:
    return torch.randint(3, _SMALL["vocab_size"], (1, SEQ_LEN), generator=torch.Generator().manual_seed(3))


def engine(model: PreTrainedModel, tp_size: int) -> kv.Engine:
    """The geometry of the model's cache: full layers and window layers, each kind with a pool of its own."""
    config = model.config
    layers = {
        "full": [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"],
        "swa": [layer for layer, kind in enumerate(config.layer_types) if kind == "sliding_attention"],
    }
    components = [
        kv.Component(
            name,
            layers=len(ids),
            layer_ids=ids,
            kv_heads=config.num_key_value_heads,
            k_dim=config.head_dim,
            v_dim=config.head_dim,
            dtype=model.dtype,
            window=config.sliding_window - 1 if name == "swa" else None,
        )
        for name, ids in layers.items()
    ]
    return kv.Engine(tp_size=tp_size, page_size=PAGE, components=components, num_pages={"full": 24, "swa": 12})


@dataclass
class Pools:
    """The pools of all ranks of an engine, and the pages of one sequence. Whatever is not written is NaN."""

    engine: kv.Engine
    seed: int
    # Whose shared memory they are in, if they are.
    connector: kv.Connector | None = None
    pages: dict[str, list[int]] = field(init=False)
    ranks: list[dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = {each.name: self._table(each) for each in self.engine.components}
        self.ranks = [
            {each.name: (self._layers(each, rank), self._layers(each, rank)) for each in self.engine.components}
            for rank in range(self.engine.tp_size)
        ]

    def _table(self, component: kv.Component) -> list[int]:
        """Scattered pages, in no order; none where the window has left."""
        shuffled = torch.randperm(
            self.engine.num_pages[component.name] - 1, generator=torch.Generator().manual_seed(self.seed)
        )
        count = -(-SEQ_LEN // PAGE)
        gone = (SEQ_LEN - component.window) // PAGE if component.window else 0
        return [-1] * gone + [1 + page for page in shuffled.tolist()[: count - gone]]

    def _layers(self, component: kv.Component, rank: int) -> list[torch.Tensor]:
        heads = len(self.heads(component, rank))
        shape = (self.engine.num_pages[component.name], PAGE, heads, component.k_dim)
        dtype = getattr(torch, component.dtype.removeprefix("torch."))
        make = torch.empty if self.connector is None else self.connector.allocate
        return [make(shape, dtype=dtype).fill_(torch.nan) for _ in range(component.layers)]

    def heads(self, component: kv.Component, rank: int) -> range:
        """The heads of a rank, by the definition: split evenly, or replicated over neighbours."""
        total, tp = component.kv_heads, self.engine.tp_size
        if total >= tp:
            return range(rank * total // tp, (rank + 1) * total // tp)
        return range(rank * total // tp, rank * total // tp + 1)

    def _slots(self, component: kv.Component, lo: int, hi: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(lo, hi)
        return torch.tensor(self.pages[component.name])[tokens // PAGE], tokens % PAGE

    def write(self, component: kv.Component, layer: int, lo: int, both: tuple[torch.Tensor, torch.Tensor]) -> None:
        """K and V of one layer from the token `lo` on, ``[1, heads, tokens, dim]``, into the pools of all ranks."""
        slots = self._slots(component, lo, lo + both[0].shape[2])
        for rank, pools in enumerate(self.ranks):
            heads = self.heads(component, rank)
            for pool, values in zip(pools[component.name], both, strict=True):
                pool[layer][slots] = values[0, heads.start : heads.stop].transpose(0, 1)

    def read(self, component: kv.Component, layer: int, lo: int, hi: int) -> list[torch.Tensor]:
        """K and V of one layer for the tokens ``[lo, hi)``, put together from all ranks; replicas must agree."""
        slots, both = self._slots(component, lo, hi), []
        for kind in (0, 1):
            whole = torch.full((component.kv_heads, hi - lo, component.k_dim), torch.nan, dtype=self._dtype(component))
            for rank, pools in enumerate(self.ranks):
                heads = self.heads(component, rank)
                values = pools[component.name][kind][layer][slots].transpose(0, 1)
                there = whole[heads.start : heads.stop]
                assert there.isnan().all() or there.equal(values), f"rank {rank} has other bytes than its replica"
                whole[heads.start : heads.stop] = values
            both.append(whole[None])
        return both

    def _dtype(self, component: kv.Component) -> torch.dtype:
        return self.ranks[0][component.name][0][0].dtype


def prefill(model: PreTrainedModel, pools: Pools) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Runs the prompt chunk by chunk; yields each chunk, once it is in the pools, and the logits of its last token."""
    cache = DynamicCache(config=model.config)
    for lo, hi in CHUNKS:
        with torch.inference_mode():
            logits = model(input_ids=prompt()[:, lo:hi], cache=cache).logits[:, -1]
        for component in pools.engine.components:
            for layer, place in enumerate(component.layer_ids or ()):
                held = cache.layers[place]
                if component.window is None:
                    pools.write(component, layer, lo, (held.keys[:, :, lo:hi], held.values[:, :, lo:hi]))
                elif hi == SEQ_LEN:
                    # A window's layer keeps the window alone.
                    pools.write(component, layer, hi - component.window, (held.keys, held.values))
        yield lo, hi, logits


class Prefill:
    """The ranks of a prefill engine in a process of its own."""

    def __init__(self, run_dir: str, name: str, tp_size: int, transport: str) -> None:
        self.model = build(name)
        self.connector = kv.Connector("prefill", transports=[transport, "tcp"], run_dir=run_dir)
        shared = self.connector if transport == "shm" else None
        self.pools = Pools(engine(self.model, tp_size), seed=1, connector=shared)
        self.senders = [
            kv.Sender(self.connector, self.pools.engine, rank, buffers) for rank, buffers in enumerate(self.pools.ranks)
        ]

    def run(self, room: int) -> None:
        """Runs the prompt, and hands over each chunk once it is computed; the logits go along with the last."""
        rooms = [sender.room(room, SEQ_LEN) for sender in self.senders]
        pages = self.pools.pages
        for lo, hi, logits in prefill(self.model, self.pools):
            last = hi == SEQ_LEN
            part = {"full": pages["full"][lo // PAGE : -(-hi // PAGE)]}
            if last:
                part["swa"] = [page for page in pages["swa"] if page >= 0]
            for made in rooms:
                aux = logits.float().numpy().tobytes() if last else None
                made.send((lo, hi), part, last=last, aux=aux)
        assert all(made.wait_released(30) for made in rooms)
        assert [made.phase for made in rooms] == ["success"] * len(rooms)


_PREFILL: list[Prefill] = []


def start(run_dir: str, name: str, tp_size: int, transport: str) -> list[bytes]:
    """Starts prefill, in place of what was there, and returns the handles of its ranks."""
    while _PREFILL:
        for sender in (old := _PREFILL.pop()).senders:
            sender.close()
        old.connector.close()
    _PREFILL.append(Prefill(run_dir, name, tp_size, transport))
    return [sender.handle for sender in _PREFILL[0].senders]


def run(room: int) -> None:
    """Runs the prompt."""
    _PREFILL[0].run(room)


def resumed(model: PreTrainedModel, pools: Pools) -> DynamicCache:
    """The cache of the prompt, from the pools alone."""
    cache = DynamicCache(config=model.config)
    for component in pools.engine.components:
        for layer, place in enumerate(component.layer_ids or ()):
            first = 0 if component.window is None else SEQ_LEN - component.window
            keys, values = pools.read(component, layer, first, SEQ_LEN)
            held = cache.layers[place]
            held.lazy_initialization(keys, values)
            held.keys, held.values = keys, values
            if component.window is not None:
                held.cumulative_length = SEQ_LEN
    return cache


def decode(model: PreTrainedModel, cache: DynamicCache, first: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The next greedy tokens after the logits of the prompt, and the logits of each."""
    tokens, all_logits = [], [first]
    for _ in range(STEPS):
        token = all_logits[-1].argmax(-1, keepdim=True)
        tokens.append(int(token))
        with torch.inference_mode():
            all_logits.append(model(input_ids=token, cache=cache).logits[:, -1])
    return tokens, torch.cat(all_logits)


def colocated(model: PreTrainedModel) -> tuple[list[int], torch.Tensor]:
    """The same in one engine, without pools."""
    cache = DynamicCache(config=model.config)
    for lo, hi in CHUNKS:
        with torch.inference_mode():
            logits = model(input_ids=prompt()[:, lo:hi], cache=cache).logits[:, -1]
    return decode(model, cache, logits)
