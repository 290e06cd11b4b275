"""What is published, how it is cut, and how long it lives."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, ClassVar, Self

from . import _arguments
from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

ONE = "tensor"
"""The name in the bundle of what is published with ``tensor=``."""

MAX_CHUNKS = 65_536

MAX_DIM = 63
"""More dimensions than any tensor of torch or NumPy has."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """Who keeps a payload alive, and until when, where no server does.

    - ``Lease.delete_on_consume``: one consumer at a time; deleted when one has consumed it.
    - ``Lease.ttl(30)``: any number of consumers, for 30 seconds after publishing, however often it is read.
    - ``Lease.pinned``: any number of consumers, until it is released.
    - ``Lease.cached``: any number of consumers, until a store needs the room; only a store keeps it.

    Wherever a lease is asked for, its text will do: ``"delete_on_consume"``, ``"ttl(30s)"``, ``"pinned"`` or
    ``"cached"``.
    """

    text: str

    delete_on_consume: ClassVar[Lease]
    pinned: ClassVar[Lease]
    cached: ClassVar[Lease]

    @classmethod
    def ttl(cls, seconds: float) -> Self:
        """A time to live.

        Raises:
            Invalid: It is not more than 0 seconds.
        """
        number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
        if not number or not 0 < seconds <= _arguments.LONGEST:
            raise Invalid(
                f"{seconds!r} is no time to live: it must be more than 0 seconds, and at most {_arguments.LONGEST:g}",
                reason="payload.lease",
                details={"seconds": repr(seconds)},
            )
        return cls(f"ttl({max(1, round(seconds * 1e9))}ns)")

    def __str__(self) -> str:
        return self.text


Lease.delete_on_consume = Lease("delete_on_consume")
Lease.pinned = Lease("pinned")
Lease.cached = Lease("cached")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePayload:
    """What is published: a tensor, or a named bundle of them, and how it is cut.

    A tensor is one of torch or NumPy, or anything with ``__dlpack__`` or the buffer protocol.

    Attributes:
        request_id: The request that it belongs to; shown in errors.
        kind: ``embedding``, ``latent``, ``checkpoint``, ``feature`` or ``frames``.
        tensor: One tensor, any shape and dtype; or give `tensors`.
        tensors: ``{name: tensor | None | [tensor, ...]}``.
        metadata: Any JSON-like value; at most 16 MiB as JSON.
        chunk_dim: The dimension that every tensor is cut along: 2 cuts ``[B, C, T, H, W]`` in time. None cuts nothing.
        num_chunks: Number of chunks, 1 to that dimension's extent. Uneven where need be: 21 into 8 is 3 3 3 3 3 2 2 2.
        lease: How long it lives, as a `Lease` or its text.
    """

    request_id: str
    kind: str = "latent"
    tensor: Any = None
    tensors: Mapping[str, Any] | None = None
    metadata: Any = None
    chunk_dim: int | None = 0
    num_chunks: int = 1
    lease: Lease | str = Lease.delete_on_consume

    def bundle(self) -> Mapping[str, Any]:
        """The tensors by name.

        Raises:
            Invalid: There is not exactly one of `tensor` and `tensors`.
        """
        if (self.tensor is None) == (self.tensors is None):
            given = "neither" if self.tensor is None else "both"
            raise Invalid(
                f"request {self.request_id!r}: give tensor= or tensors=, not {given}", reason="payload.bundle"
            )
        if self.tensors is None:
            return {ONE: self.tensor}
        if not hasattr(self.tensors, "items"):
            raise Invalid(
                f"request {self.request_id!r}: a bundle is a mapping {{name: tensor | None | [tensor, ...]}}, not a "
                f"{type(self.tensors).__name__}",
                reason="payload.bundle",
            )
        # What its owner does with the mapping, or with a list in it, changes nothing from now on.
        return {name: list(value) if isinstance(value, list | tuple) else value for name, value in self.tensors.items()}

    def chunking(self) -> tuple[int, int] | None:
        """Dimension and count, where it is cut.

        Raises:
            Invalid: No tensor can be cut like that.
        """
        count = self._whole("num_chunks", MAX_CHUNKS, f"it must be 1 to {MAX_CHUNKS}")
        if count == 0:
            raise self._wrong("num_chunks", f"it must be 1 to {MAX_CHUNKS}")
        if self.chunk_dim is None:
            if count != 1:
                raise self._wrong("num_chunks", "without a chunk_dim it must be 1")
            return None
        dim = self._whole("chunk_dim", MAX_DIM, "dimensions count from 0, outermost first")
        return None if count == 1 else (dim, count)

    def lease_text(self) -> str:
        """The lease as text.

        Raises:
            Invalid: It is neither a lease nor text.
        """
        known = self.lease.text if isinstance(self.lease, Lease) else self.lease
        if not isinstance(known, str):
            raise Invalid(
                f"request {self.request_id!r}: unknown lease {self.lease!r}; it is Lease.delete_on_consume, "
                "Lease.ttl(seconds), Lease.pinned or Lease.cached",
                reason="payload.lease",
                details={"lease": repr(self.lease)},
            )
        return _arguments.text("lease", known)

    def _whole(self, what: str, most: int, rule: str) -> int:
        try:
            return _arguments.whole(what, getattr(self, what), rule, most, reason="payload.chunks")
        except Invalid:
            raise self._wrong(what, rule) from None

    def _wrong(self, what: str, rule: str) -> Invalid:
        found = getattr(self, what)
        return Invalid(
            f"request {self.request_id!r}: {what} is {found!r}; {rule}",
            reason="payload.chunks",
            details={what: str(found)},
        )


def to_json(metadata: Any) -> str:
    """Metadata as JSON text.

    Raises:
        Invalid: It is not JSON-like: NaN, other types, names that are no text.
    """
    try:
        if not _plain(metadata):
            raise TypeError("names in it must be text")
        text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
        text.encode()  # lone surrogates are no text
    except (TypeError, ValueError, RecursionError) as error:
        raise Invalid(
            f"metadata must be JSON-like (None, bool, int, float, str, list, dict): {error}", reason="payload.metadata"
        ) from None
    return text


def _plain(value: Any) -> bool:
    """Whether every name is text; json.dumps would silently turn 1 into "1"."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return True
