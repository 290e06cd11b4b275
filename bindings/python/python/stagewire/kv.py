"""KV caches between engines of different tensor-parallel size: handshake, routes and plans.

    full = kv.Component("full", layers=18, kv_heads=8, k_dim=64, v_dim=64, dtype="bfloat16")
    swa = kv.Component("swa", layers=18, kv_heads=8, k_dim=64, v_dim=64, dtype="bfloat16", window=127)
    prefill = kv.Engine(tp_size=1, page_size=64, components=[full, swa])
    decode = kv.Engine(tp_size=4, page_size=64, components=[full, swa])
    pair = kv.handshake(prefill, decode)
    for src_rank, dst_rank in pair.routes():
        plan = pair.plan(src_rank, dst_rank, seq_len=8192, src_pages=..., dst_pages=...)
        plan.descriptors()

Plans say which bytes go where; they move none. Page tables give one physical page for each logical page of the
sequence, -1 where it is not resident. `Plan.descriptors` and `Plan.records` need NumPy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import KW_ONLY, dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from ._arguments import flag, shown, text, whole
from ._native import KvEngine, KvPair, KvPlan, kv_handshake
from .errors import Invalid, Unsupported

if TYPE_CHECKING:
    import numpy

__all__ = ["Component", "Engine", "Incompatible", "Pair", "Plan", "handshake"]

Pages: TypeAlias = Mapping[str, Iterable[int]]
"""Page tables by component."""

_MOST = 2**32 - 1
_MOST_WIDE = 2**63 - 1
_WHERE = ("component", "src_layer", "dst_layer", "kv")
_DESCRIPTOR = ("src_off", "dst_off", "nbytes")
_RECORD = ("src_off", "dst_off", "width", "rows", "src_pitch", "dst_pitch")


class Incompatible(Unsupported):
    """Two engines cannot hand over to each other, whatever the room. Nothing has moved; other pairs go on.

    ``details`` has both sides' values as ``prefill`` and ``decode``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_incompatible, (self.message, self.reason, self.details))


def _incompatible(message: str, reason: str, details: dict[str, str]) -> Incompatible:
    return Incompatible(message, reason=reason, details=details)


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
            put(self, what, _size(what, getattr(self, what)))
        for what in ("window", "scales"):
            if getattr(self, what) is not None:
                put(self, what, _size(what, getattr(self, what)))
        if self.layer_ids is not None:
            put(self, "layer_ids", tuple(_size("layer_ids", layer) for layer in _ordered("layer_ids", self.layer_ids)))
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
            put(self, what, _size(what, getattr(self, what)))
        put(self, "components", tuple(_ordered("components", self.components)))
        for component in self.components:
            if not isinstance(component, Component):
                raise _wrong("components", component, "a list of Component")
        num_pages = _counts("num_pages", self.num_pages, "kv.geometry")
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


def handshake(prefill: Engine | bytes, decode: Engine | bytes) -> Pair:
    """Pairs two engines, either of them as `Engine.to_bytes` gave it in another process.

    Raises:
        Incompatible: They cannot hand over to each other; ``reason`` and ``details`` say why.
    """
    sides = []
    for what, side in (("prefill", prefill), ("decode", decode)):
        if not isinstance(side, Engine | bytes):
            raise _wrong(what, side, "an Engine, or its bytes")
        sides.append(side.to_bytes() if isinstance(side, Engine) else side)
    try:
        return Pair(kv_handshake(*sides))
    except Unsupported as refusal:
        raise _incompatible(refusal.message, refusal.reason, refusal.details) from None


class Pair:
    """Two engines that can hand over to each other. `handshake` makes it."""

    def __init__(self, native: KvPair) -> None:
        self._native = native

    def routes(self) -> list[tuple[int, int]]:
        """Every (source rank, destination rank) that moves bytes: one writer for each head, no redundant replica."""
        return self._native.routes()

    def writers(self, dst_rank: int) -> list[int]:
        """The source ranks that `dst_rank` gets bytes from: how many completions it waits for."""
        return self._native.writers(_size("dst_rank", dst_rank, reason="kv.route"))

    def plan(
        self,
        src_rank: int,
        dst_rank: int,
        *,
        seq_len: int,
        src_pages: Pages,
        dst_pages: Pages,
        prefix: Mapping[str, int] | None = None,
        tokens: tuple[int, int] | None = None,
        components: Iterable[str] | None = None,
        exact_window: bool = False,
    ) -> Plan:
        """Plans what one rank sends to another for one room.

        Args:
            src_rank: The source's rank; offsets of data-parallel replicas do not matter.
            dst_rank: The destination's rank.
            seq_len: Tokens of the prompt, the same on both sides.
            src_pages: The source's page tables.
            dst_pages: The destination's page tables.
            prefix: Tokens that the destination holds already, whole pages. Of a window, only if its pages were kept.
            tokens: One prefill chunk, ``(lo, hi)``. Without `exact_window` both are rounded down to whole pages, but
                for the end of the sequence: then the chunks of a prompt share no page and leave none out. A chunk
                cuts windows as well.
            components: The components that move; all by default. To move a window once, plan the chunks without it
                and then it alone, with ``tokens=None``.
            exact_window: Move the needed tokens only, in every component, not the rest of their pages.

        Raises:
            Invalid: Something is wrong with this room; the pair goes on. ``reason`` says what, ``details`` has the
                component.
            Unsupported: `exact_window` would cut a page whose layout cannot be cut.
        """
        planned = self._native.plan(
            (_size("src_rank", src_rank, reason="kv.route"), _size("dst_rank", dst_rank, reason="kv.route")),
            _size("seq_len", seq_len, _MOST_WIDE, reason="kv.tokens"),
            _tables("src_pages", src_pages),
            _tables("dst_pages", dst_pages),
            _counts("prefix", prefix, "kv.prefix"),
            None if tokens is None else _chunk(tokens),
            None if components is None else [text("components", name) for name in _list("components", components)],
            flag("exact_window", exact_window),
        )
        return Plan(planned)


class Plan:
    """What one rank sends to another for one room. It was proven: each needed destination byte is written once."""

    def __init__(self, native: KvPlan) -> None:
        self._native = native
        self._sections = {name: (tokens, packing) for name, tokens, packing in native.sections()}

    def descriptors(self) -> numpy.ndarray[Any, Any]:
        """One row for each run of bytes, by (component, kv, dst_layer, dst_off); rows that touch on both sides are one.

        Fields: component (its index), src_layer, dst_layer, kv (0 = K, 1 = V), src_off, dst_off, nbytes. Offsets are
        relative to the start of that layer's K or V buffer on that rank; they are unsigned, of 64 bits. Layers count
        those of the rank's pipeline stage.

        Raises:
            Exhausted: There is no memory for so many (``kv.memory``).
        """
        return _array(self._native.descriptors(), _DESCRIPTOR)

    def records(self) -> numpy.ndarray[Any, Any]:
        """The same as strided records, one for each run of pages.

        Fields: component, src_layer, dst_layer, kv, src_off, dst_off, width, rows, src_pitch, dst_pitch.

        Raises:
            Exhausted: There is no memory for so many (``kv.memory``).
        """
        return _array(self._native.records(), _RECORD)

    @property
    def nbytes(self) -> int:
        """Bytes that move; ``2**64 - 1`` where they are more."""
        return self._native.nbytes

    @property
    def src_rank(self) -> int:
        """The source's rank, without the offset of data-parallel replicas."""
        return self._native.ranks[0]

    @property
    def dst_rank(self) -> int:
        """The destination's rank, without the offset of data-parallel replicas."""
        return self._native.ranks[1]

    def token_range(self, component: str) -> tuple[int, int, int]:
        """First page-aligned token, first needed token, end.

        Raises:
            Invalid: The plan has no such component.
        """
        return self._section(component)[0]

    def packing(self, component: str) -> str:
        """Which side copies through scratch where a transport moves runs of bytes only.

        ``none``: both sides have the same heads, whole page runs move. ``gather``: the source is wider, so it gathers.
        ``scatter``: the destination is wider, so it scatters. ``rows``: neither side's slice is whole.

        Raises:
            Invalid: The plan has no such component.
        """
        return self._section(component)[1]

    def _section(self, component: str) -> tuple[tuple[int, int, int], str]:
        found = self._sections.get(text("component", component))
        if found is None:
            raise Invalid(
                f"{component!r} is no component of this plan; there are {', '.join(self._sections)}",
                reason="kv.unknown_component",
                details={"component": component},
            )
        return found


def _array(rows: bytearray, fields: tuple[str, ...]) -> numpy.ndarray[Any, Any]:
    import numpy as np

    layout = [(name, np.uint32) for name in _WHERE] + [(name, np.uint64) for name in fields]
    table: numpy.ndarray[Any, Any] = np.frombuffer(rows, dtype=np.dtype(layout))
    return table


def _wrong(what: str, value: Any, expected: str) -> Invalid:
    return Invalid(
        f"{what} is {shown(value)}; it must be {expected}",
        reason="argument.type",
        details={"argument": what, "expected": expected},
    )


def _size(
    what: str, value: Any, most: int = _MOST, *, reason: str = "kv.geometry", component: str | None = None
) -> int:
    return whole(what, value, f"it must be a whole number from 0 to {most}", most, reason=reason, of=component)


def _list(what: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes):
        raise _wrong(what, value, "a list")
    try:
        return list(value)
    except TypeError:
        raise _wrong(what, value, "a list") from None


def _ordered(what: str, value: Any) -> list[Any]:
    if isinstance(value, Mapping | AbstractSet):
        raise _wrong(what, value, "a list")
    return _list(what, value)


def _mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(what, value, "a mapping by component")
    return value


def _counts(what: str, value: Any, reason: str) -> dict[str, int]:
    counts = {} if value is None else _mapping(what, value)
    return {
        text(what, name): _size(what, count, _MOST_WIDE, reason=reason, component=name)
        for name, count in counts.items()
    }


def _chunk(tokens: Any) -> tuple[int, int]:
    bounds = _ordered("tokens", tokens)
    if len(bounds) != 2:
        raise _wrong("tokens", tokens, "(lo, hi)")
    lo, hi = (_size("tokens", token, _MOST_WIDE, reason="kv.tokens") for token in bounds)
    return lo, hi


def _tables(what: str, tables: Any) -> dict[str, list[int]]:
    return {text(what, name): _pages(f"{what}[{name!r}]", table) for name, table in _mapping(what, tables).items()}


def _pages(what: str, table: Any) -> list[int]:
    # Arrays of NumPy and tensors of PyTorch give numbers of Python at once.
    table = table.tolist() if hasattr(table, "tolist") else table
    try:
        table = _ordered(what, table)
        pages = [operator.index(page) for page in table]
        if any(isinstance(page, bool) for page in table):
            raise TypeError
    except TypeError:
        raise _wrong(what, table, "whole numbers, one for each page of the sequence") from None
    if pages and not (min(pages) >= -(2**63) and max(pages) < 2**63):
        raise _wrong(what, table, "whole numbers of 64 bits")
    return pages
