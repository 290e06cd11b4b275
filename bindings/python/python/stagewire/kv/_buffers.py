"""The memory of a rank's cache, in the order of its engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from .._bundle import wrap
from ..errors import Invalid
from ._geometry import Engine
from ._values import mapping, wrong

if TYPE_CHECKING:
    from .._native import Tensor

Buffers: TypeAlias = Mapping[str, Any]
"""By component, all buffers of K, layer by layer, then all of V: ``[K_0, ..., K_n, V_0, ..., V_n]`` or ``(ks, vs)``."""


def imported(engine: Engine, buffers: Buffers) -> list[tuple[str, Tensor]]:
    """All of them, each with its name for messages.

    Raises:
        Invalid: A component lacks its buffers, or one of them is no tensor.
        Unsupported: One is not in host memory.
    """
    if not isinstance(engine, Engine):
        raise wrong("engine", engine, "an Engine")
    names = [component.name for component in engine.components]
    given = mapping("buffers", buffers)
    for name in [*given, *names]:
        if name not in names or name not in given:
            raise Invalid(
                f"buffers are given for {', '.join(map(str, given)) or 'nothing'}; the components are "
                f"{', '.join(names)}",
                reason="kv.buffers",
                details={"component": str(name)},
            )
    return [(path, wrap(path, tensor)) for name in names for path, tensor in _flat(name, given[name])]


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flat(f"{path}[{index}]", item)
    else:
        yield path, value
