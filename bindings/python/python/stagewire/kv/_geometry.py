"""What an engine's cache is."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .._arguments import text
from .._native import KvEngine
from ._values import counts, ordered, size, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Component:
    """One pool of an engine's cache, over all its ranks.

    Each layer has a buffer for K and, where `v_dim` is not 0, one for V; with the layout ``page_major``, one buffer
    holds all layers.

    Attributes:
        name: Names the component and its page tables.
        layers: Layers of the whole engine.
        kv_heads: KV heads of the model, all ranks together, replicas not counted.
        k_dim: Elements of one head of K; the whole latent for ``mla``.
        v_dim: Elements of one head of V; 0 where there is no V buffer.
        dtype: The type that is stored: ``torch.bfloat16``, its name, or what ``--kv-cache-dtype`` takes; not ``auto``.
        window: Past tokens that the next one attends to: Hugging Face's ``sliding_window - 1``.
        kind: ``mha``, ``mla``, ``block_scale``, ``mamba`` or ``dsa``.
        layout: ``nhd``, ``hnd``, ``vectorized_5d`` or ``page_major``.
        scales: Elements that share one scale, of block-scaled formats: 32 for MXFP8.
        layer_ids: Ids of the layers, where they are paired by id instead of by position.

    Raises:
        Invalid: A value makes no sense on its own (``kv.geometry``, ``argument.type``).
    """

    name: str
    _: KW_ONLY
    layers: int
    kv_heads: int = 1
    k_dim: int
    v_dim: int = 0
    dtype: Any
    window: int | None = None
    kind: str = "mha"
    layout: str = "nhd"
    scales: int | None = None
    layer_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        for what in ("name", "kind", "layout"):
            text(what, getattr(self, what))
        put(self, "dtype", text("dtype", str(self.dtype)))
        for what in ("layers", "kv_heads", "k_dim", "v_dim"):
            put(self, what, size(what, getattr(self, what)))
        for what in ("window", "scales"):
            if getattr(self, what) is not None:
                put(self, what, size(what, getattr(self, what)))
        if self.layer_ids is not None:
            put(self, "layer_ids", tuple(size("layer_ids", layer) for layer in ordered("layer_ids", self.layer_ids)))
        # One rank, one token a page: what is wrong with the component alone is said here.
        KvEngine((1, 1, 1, 1), [self], {})


@dataclass(frozen=True)
class Engine:
    """One side of a hand-over.

    Attributes:
        tp_size: Ranks that share the heads: the attention's tensor-parallel size, data-parallel attention divided out.
        page_size: Tokens of a page.
        components: The pools, in an order that both sides share.
        num_pages: Pages of each pool, by component; they bound page ids where given. Read-only, as all of it.
        pp_size: Pipeline stages. Stage ``s`` holds the ``s``-th equal part of each component's layers, and its ranks
            follow those of the stage before.
        cp_size: Context-parallel ranks.

    Raises:
        Invalid: A value makes no sense on its own (``kv.geometry``, ``argument.type``).
    """

    _: KW_ONLY
    tp_size: int
    page_size: int
    components: Sequence[Component]
    num_pages: Mapping[str, int] = field(default_factory=dict, hash=False)
    pp_size: int = 1
    cp_size: int = 1
    _native: KvEngine = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = object.__setattr__
        for what in ("tp_size", "page_size", "pp_size", "cp_size"):
            put(self, what, size(what, getattr(self, what)))
        put(self, "components", tuple(ordered("components", self.components)))
        for component in self.components:
            if not isinstance(component, Component):
                raise wrong("components", component, "a list of Component")
        num_pages = counts("num_pages", self.num_pages, "kv.geometry")
        put(self, "num_pages", MappingProxyType(num_pages))
        sizes = (self.tp_size, self.page_size, self.pp_size, self.cp_size)
        put(self, "_native", KvEngine(sizes, self.components, num_pages))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        return (_engine, (values | {"num_pages": dict(self.num_pages)},))

    def to_bytes(self) -> bytes:
        """The form that goes to the other side: `handshake` takes it in place of an engine. Versioned, no pickle."""
        return self._native.to_bytes()


def _engine(values: dict[str, Any]) -> Engine:
    return Engine(**values)
