"""Tensors in the shared memory of a connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _arguments
from ._bundle import dtype_name, exporter, framework_of
from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._bundle import Framework
    from ._native import Connector


def allocate(native: Connector, shape: Sequence[int], dtype: Any, framework: Framework | None) -> Any:
    """A tensor with whatever was in that memory before.

    Raises:
        Invalid: There is no such dtype or shape.
        Exhausted: The shared memory is full.
    """
    name = dtype_name(dtype)
    try:
        extents = [
            _arguments.whole("extent", extent, "it is no shape", (1 << 63) - 1, reason="tensor.shape")
            for extent in shape
        ]
    except (TypeError, Invalid):
        raise Invalid(f"{shape!r} is no shape: extents are whole numbers from 0", reason="tensor.shape") from None
    export = exporter(framework or framework_of(dtype), [name])
    return export(native.allocate(name, extents))
