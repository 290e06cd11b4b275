"""Handshake and plans: who sends which bytes where."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._arguments import flag, text
from .._native import KvPair, KvPlan, kv_handshake
from ..errors import Invalid, Unsupported
from ._errors import Incompatible
from ._geometry import Engine
from ._values import MOST_WIDE, chunk, counts, listed, size, tables, wrong

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy

    from ._values import Pages

_WHERE = ("component", "src_layer", "dst_layer", "kv")
_DESCRIPTOR = ("src_off", "dst_off", "nbytes")
_RECORD = ("src_off", "dst_off", "width", "rows", "src_pitch", "dst_pitch")


def handshake(prefill: Engine | bytes, decode: Engine | bytes) -> Pair:
    """Pairs two engines, either of them as `Engine.to_bytes` gave it in another process.

    Raises:
        Incompatible: They cannot hand over to each other; ``reason`` and ``details`` say why.
    """
    sides = []
    for what, side in (("prefill", prefill), ("decode", decode)):
        if not isinstance(side, Engine | bytes):
            raise wrong(what, side, "an Engine, or its bytes")
        sides.append(side.to_bytes() if isinstance(side, Engine) else side)
    try:
        return Pair(kv_handshake(*sides))
    except Unsupported as refusal:
        raise Incompatible(refusal.message, reason=refusal.reason, details=refusal.details) from None


class Pair:
    """Two engines that can hand over to each other. `handshake` makes it."""

    def __init__(self, native: KvPair) -> None:
        self._native = native

    def routes(self) -> list[tuple[int, int]]:
        """Every (source rank, destination rank) that moves bytes: one writer for each head, no redundant replica."""
        return self._native.routes()

    def writers(self, dst_rank: int) -> list[int]:
        """The source ranks that `dst_rank` gets bytes from: how many completions it waits for."""
        return self._native.writers(size("dst_rank", dst_rank, reason="kv.route"))

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
            (size("src_rank", src_rank, reason="kv.route"), size("dst_rank", dst_rank, reason="kv.route")),
            size("seq_len", seq_len, MOST_WIDE, reason="kv.tokens"),
            tables("src_pages", src_pages),
            tables("dst_pages", dst_pages),
            counts("prefix", prefix, "kv.prefix"),
            None if tokens is None else chunk(tokens),
            None if components is None else [text("components", name) for name in listed("components", components)],
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
