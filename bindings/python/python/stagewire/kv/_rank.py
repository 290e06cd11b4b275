"""What a rank is on either side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

from .._arguments import seconds
from ._buffers import imported
from ._connector import Connector
from ._values import size, wrong

if TYPE_CHECKING:
    from collections.abc import Callable

    from .._native import KvReceiver, KvSender
    from ._buffers import Buffers
    from ._geometry import Engine

Native = TypeVar("Native", bound="KvSender | KvReceiver")


class Rank(Generic[Native]):
    """One rank of an engine, and its memory. Arguments are those of its two kinds.

    Attributes:
        engine: The engine.
        rank: Its rank.
    """

    def __init__(
        self,
        native: Callable[..., Native],
        connector: Connector,
        engine: Engine,
        rank: int,
        buffers: Buffers,
        heartbeat: float,
        misses: int,
        *more: float,
    ) -> None:
        if not isinstance(connector, Connector):
            raise wrong("connector", connector, "a kv.Connector")
        tensors = imported(engine, buffers)
        self.engine = engine
        self.rank = size("rank", rank, reason="kv.route")
        beat = (seconds("heartbeat", heartbeat), size("misses", misses, reason="argument.type"))
        self._native: Native = native(connector._native, engine._native, self.rank, tensors, beat, *more)

    def close(self) -> None:
        """Fails its rooms; nobody reads or writes its pages any more once those are released."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
