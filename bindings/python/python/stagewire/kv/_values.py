"""What callers give: numbers, page tables, mappings by component."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, TypeAlias

from .._arguments import shown, text, whole
from ..errors import Invalid

Pages: TypeAlias = Mapping[str, Iterable[int]]
"""Page tables by component."""

_MOST = 2**32 - 1
MOST_WIDE = 2**63 - 1
"""The largest number of tokens, rooms, and pages."""


def wrong(what: str, value: Any, expected: str) -> Invalid:
    return Invalid(
        f"{what} is {shown(value)}; it must be {expected}",
        reason="argument.type",
        details={"argument": what, "expected": expected},
    )


def size(what: str, value: Any, most: int = _MOST, *, reason: str = "kv.geometry", component: str | None = None) -> int:
    return whole(what, value, f"it must be a whole number from 0 to {most}", most, reason=reason, of=component)


def listed(what: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes):
        raise wrong(what, value, "a list")
    try:
        return list(value)
    except TypeError:
        raise wrong(what, value, "a list") from None


def ordered(what: str, value: Any) -> list[Any]:
    if isinstance(value, Mapping | AbstractSet):
        raise wrong(what, value, "a list")
    return listed(what, value)


def mapping(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(what, value, "a mapping by component")
    return value


def counts(what: str, value: Any, reason: str) -> dict[str, int]:
    counts = {} if value is None else mapping(what, value)
    return {
        text(what, name): size(what, count, MOST_WIDE, reason=reason, component=name) for name, count in counts.items()
    }


def chunk(tokens: Any) -> tuple[int, int]:
    bounds = ordered("tokens", tokens)
    if len(bounds) != 2:
        raise wrong("tokens", tokens, "(lo, hi)")
    lo, hi = (size("tokens", token, MOST_WIDE, reason="kv.tokens") for token in bounds)
    return lo, hi


def tables(what: str, tables: Any) -> dict[str, list[int]]:
    return {text(what, name): _pages(f"{what}[{name!r}]", table) for name, table in mapping(what, tables).items()}


def _pages(what: str, table: Any) -> list[int]:
    # Arrays of NumPy and tensors of PyTorch give numbers of Python at once.
    table = table.tolist() if hasattr(table, "tolist") else table
    try:
        table = ordered(what, table)
        pages = [operator.index(page) for page in table]
        if any(isinstance(page, bool) for page in table):
            raise TypeError
    except TypeError:
        raise wrong(what, table, "whole numbers, one for each page of the sequence") from None
    if pages and not (min(pages) >= -(2**63) and max(pages) < 2**63):
        raise wrong(what, table, "whole numbers of 64 bits")
    return pages
