"""Paged caches whose bytes say what they are: by the definition of the layout, and nothing of the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from stagewire import kv

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE = 4
PAGES = 24
UNTOUCHED = 255

FULL = kv.Component("full", layers=2, kv_heads=4, k_dim=16, v_dim=8, dtype="uint8")
SWA = kv.Component("swa", layers=1, kv_heads=4, k_dim=16, v_dim=16, dtype="uint8", window=6)


def engine(tp_size: int, *, components: Sequence[kv.Component] = (FULL, SWA), pages: int = PAGES) -> kv.Engine:
    return kv.Engine(
        tp_size=tp_size,
        page_size=PAGE,
        components=components,
        num_pages={component.name: pages for component in components},
    )


def table(component: kv.Component, seq_len: int, first: int) -> list[int]:
    """Pages that follow one another from `first` on; none before the window."""
    count = -(-seq_len // PAGE)
    gone = max(0, seq_len - component.window) // PAGE if component.window else 0
    return [-1] * gone + list(range(first, first + count - gone))


def tables(made: kv.Engine, seq_len: int, first: int = 1) -> dict[str, list[int]]:
    return {component.name: table(component, seq_len, first) for component in made.components}


class Cache:
    """The buffers of one rank."""

    def __init__(self, made: kv.Engine, rank: int, connector: kv.Connector | None = None) -> None:
        self.engine = made
        self.rank = rank
        self.buffers = {
            component.name: [
                [self._buffer(component, dim, connector) for _ in range(component.layers)]
                for dim in (component.k_dim, component.v_dim)
            ]
            for component in made.components
        }

    def _buffer(self, component: kv.Component, dim: int, connector: kv.Connector | None) -> Any:
        shape = (self.engine.num_pages[component.name], PAGE, len(self.heads(component)), dim)
        made = np.empty(shape, np.uint8) if connector is None else connector.allocate(shape, "uint8", framework="numpy")
        made.fill(UNTOUCHED)
        return made

    def heads(self, component: kv.Component) -> range:
        """Split evenly, or replicated over neighbours."""
        total, tp = component.kv_heads, self.engine.tp_size
        first = self.rank * total // tp
        return range(first, first + max(1, total // tp))

    def _tokens(self, component: kv.Component, kind: int, layer: int, lo: int, hi: int, seed: int) -> Any:
        """What the tokens ``[lo, hi)`` of the prompt `seed` are in one buffer."""
        dim = (component.k_dim, component.v_dim)[kind]
        heads, tokens = np.array(self.heads(component)), np.arange(lo, hi)
        whose = seed * 101 + len(component.name) * 71 + kind * 37 + layer * 17
        mixed = whose + heads[None, :, None] * 7 + tokens[:, None, None] * 29 + np.arange(dim)
        return (mixed % 251).astype(np.uint8)

    def fill(self, seed: int, pages: dict[str, list[int]], lo: int, hi: int) -> None:
        """Writes tokens ``[lo, hi)``, as prefill does."""
        for component, kind, layer, buffer in self.each():
            for token in range(lo, hi):
                if (page := pages[component.name][token // PAGE]) >= 0:
                    values = self._tokens(component, kind, layer, token, token + 1, seed)
                    buffer[page, token % PAGE] = values[0]

    def check(
        self, seed: int, pages: dict[str, list[int]], seq_len: int, *, prefix: dict[str, int] | None = None
    ) -> None:
        """Every needed token is that of the prompt `seed`; pages of nobody are untouched."""
        self.check_tokens(seed, pages, seq_len, prefix=prefix)
        for component, kind, layer, buffer in self.each():
            written = set(pages[component.name][self._first(component, seq_len, prefix) // PAGE :])
            for page in range(len(buffer)):
                where = f"{component.name}, {'KV'[kind]} of layer {layer}, rank {self.rank}, page {page}"
                assert page in written or (buffer[page] == UNTOUCHED).all(), where

    def check_tokens(
        self, seed: int, pages: dict[str, list[int]], seq_len: int, *, prefix: dict[str, int] | None = None
    ) -> None:
        """Every needed token is that of the prompt `seed`."""
        for component, kind, layer, buffer in self.each():
            first = self._first(component, seq_len, prefix)
            tokens = np.arange(first, seq_len)
            found = buffer[np.array(pages[component.name])[tokens // PAGE], tokens % PAGE]
            wanted = self._tokens(component, kind, layer, first, seq_len, seed)
            assert np.array_equal(found, wanted), f"{component.name}, {'KV'[kind]} of layer {layer}, rank {self.rank}"

    @staticmethod
    def _first(component: kv.Component, seq_len: int, prefix: dict[str, int] | None) -> int:
        """The first needed token."""
        begins = max(0, seq_len - component.window) if component.window is not None else 0
        return max(begins, (prefix or {}).get(component.name, 0))

    def each(self) -> Any:
        """Component, K or V, layer and buffer."""
        for component in self.engine.components:
            for kind, layers in enumerate(self.buffers[component.name]):
                for layer, buffer in enumerate(layers):
                    yield component, kind, layer, buffer
