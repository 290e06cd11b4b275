"""How a payload lies in Mooncake Store: parts, blocks, keys, digests.

A payload is a list of parts, a part so many bytes. Parts are cut into blocks, since an object of Mooncake lies in one
segment. Each block is an object, under a key that nobody used before. One more object, the header, says what belongs to
a payload; its key is the payload's id. It is finished last.
"""

from __future__ import annotations

import dataclasses
import struct
import uuid
from typing import TYPE_CHECKING

from ._native import Tensor, run_digest
from .errors import Corrupt, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterator

Run = tuple[int, int, int, int]
"""Where a part lies in its tensor: first byte, bytes of a row, rows, bytes from row to row."""

_PREFIX = "stagewire/"
_MAGIC = b"SWMS"
_VERSION = 1
# Magic, version, unused, bytes of a block, number of parts; payload and generation follow.
_FIXED = struct.Struct("<4sHHQQ16s16s")
_DIGEST = 16


def whole(nbytes: int) -> Run:
    """The run of a tensor of so many bytes that is not cut."""
    return (0, nbytes, 1, nbytes)


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """xxh3-128."""
    tensor = Tensor.from_buffer(data)
    return run_digest((tensor, whole(tensor.nbytes), 0, tensor.nbytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A piece of a part, and the number that its key ends with."""

    number: int
    part: int
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """What belongs to a payload, and where.

    Attributes:
        payload_id: Its id, a UUID.
        generation: Drawn anew by each attempt to write it, a UUID.
        block_bytes: Most bytes of a block.
        parts: Bytes of each part.
    """

    payload_id: uuid.UUID
    generation: uuid.UUID
    block_bytes: int
    parts: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts)

    def blocks(self) -> Iterator[Block]:
        """All blocks, in order; a part of no bytes has none."""
        number = 0
        for part, nbytes in enumerate(self.parts):
            for start in range(0, nbytes, self.block_bytes):
                yield Block(number, part, start, min(self.block_bytes, nbytes - start))
                number += 1

    @property
    def header_key(self) -> str:
        """Key of the header."""
        return f"{_PREFIX}{self.payload_id}"

    def key(self, block: Block) -> str:
        """Key of a block."""
        return f"{self.header_key}/{self.generation.hex}/{block.number}"

    def claim_key(self, number: int) -> str:
        """Key that the one reader of a payload keeps others out with; each successor has the next number."""
        return f"{self.header_key}/{self.generation.hex}/reader/{number}"

    @property
    def header_bytes(self) -> int:
        """Bytes of the header."""
        return _FIXED.size + 8 * len(self.parts) + _DIGEST * (1 + sum(1 for _ in self.blocks()))


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """A payload that was written: what is where, and what it must look like.

    Attributes:
        layout: What is where.
        digests: xxh3-128 of each block.
    """

    layout: Layout
    digests: tuple[bytes, ...]

    @property
    def payload_id(self) -> str:
        """Its id, a UUID."""
        return str(self.layout.payload_id)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each part."""
        return self.layout.parts

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return self.layout.nbytes

    def keys(self) -> list[str]:
        """Of the blocks, then of the header."""
        layout = self.layout
        return [*map(layout.key, layout.blocks()), layout.header_key]

    def to_bytes(self) -> bytes:
        """The header: versioned, with a digest of itself."""
        layout = self.layout
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            0,
            layout.block_bytes,
            len(layout.parts),
            layout.payload_id.bytes,
            layout.generation.bytes,
        )
        body = b"".join((fixed, struct.pack(f"<{len(layout.parts)}Q", *layout.parts), *self.digests))
        return body + digest(body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Placed:
        """Reads what `to_bytes` made.

        Raises:
            Unsupported: It is of another version.
            Corrupt: It is damaged, or something else.
        """

        def damaged(how: str) -> Corrupt:
            return Corrupt(
                f"the header of a payload in Mooncake Store is damaged: {how}", reason="mooncake_store.header"
            )

        if len(data) < _FIXED.size + _DIGEST:
            raise damaged(f"it has {len(data)} bytes")
        magic, version, _, block_bytes, count, payload_id, generation = _FIXED.unpack_from(data)
        if magic != _MAGIC:
            raise damaged(f"it begins with {magic!r}, not {_MAGIC!r}")
        if version != _VERSION:
            raise Unsupported(
                f"a payload in Mooncake Store has version {version}, this build reads {_VERSION}: install the same "
                "version of Stagewire on all hosts",
                reason="handle.version",
            )
        body, found = data[:-_DIGEST], data[-_DIGEST:]
        if digest(body) != found:
            raise damaged(f"its digest is {found.hex()}, its bytes give {digest(body).hex()}")
        if block_bytes == 0 or count > (len(body) - _FIXED.size) // 8:
            raise damaged(f"it has {count} parts in blocks of {block_bytes} bytes")
        parts = struct.unpack_from(f"<{count}Q", body, _FIXED.size)
        layout = Layout(uuid.UUID(bytes=payload_id), uuid.UUID(bytes=generation), block_bytes, parts)
        expected = sum(-(-nbytes // block_bytes) for nbytes in parts)
        digests = body[_FIXED.size + 8 * count :]
        if len(digests) != expected * _DIGEST:
            raise damaged(f"it has {len(digests)} bytes of digests for {expected} blocks")
        return cls(layout, tuple(digests[at : at + _DIGEST] for at in range(0, len(digests), _DIGEST)))
