"""The header that Mooncake writes before a tensor: 304 bytes, little-endian.

Layout and numbers are those of ``TensorMetadata`` in Mooncake's ``integration_utils.h``, version 1, as the wheel 0.3.13
writes them:

====== ======== =================================================================
offset type     what
====== ======== =================================================================
0      u32      magic, 0x4d4f4f4e
4      u16      version, 1
6      u16      bytes of the header, 304
8      i32      dtype, by `_DTYPES`
12     i32      number of dimensions, at most 8
16     8 bytes  0
24     u64      where the data begins, 304
32     u64      bytes of the data
40     8 i64    shape of the whole tensor, -1 where there is no dimension
104    8 i64    shape of this part, the same where it is not sharded
168    136      how it is sharded; 0 where it is not
====== ======== =================================================================
"""

from __future__ import annotations

import dataclasses
import math
import struct
from typing import TYPE_CHECKING

from .errors import Corrupt, Invalid, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

SIZE = 304
"""Bytes of a header."""

_MAGIC = 0x4D4F4F4E
_VERSION = 1
_MAX_DIMENSIONS = 8
_HEAD = struct.Struct("<IHHii8sQQ8q8q136s")
_PLAIN = bytes(136)
# Mooncake's numbers are the positions in this list.
_DTYPES = (
    ("float32", 4),
    ("float64", 8),
    ("int8", 1),
    ("uint8", 1),
    ("int16", 2),
    ("uint16", 2),
    ("int32", 4),
    ("uint32", 4),
    ("int64", 8),
    ("uint64", 8),
    ("bool", 1),
    ("float16", 2),
    ("bfloat16", 2),
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
)


@dataclasses.dataclass(frozen=True, slots=True)
class TensorHeader:
    """What Mooncake's header says of a tensor.

    Attributes:
        dtype: PyTorch's name, such as ``bfloat16``.
        shape: Its extents.
        offset: Where its bytes begin, counted from the header's first byte.
        nbytes: How many there are, in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def encode_header(dtype: str, shape: Sequence[int]) -> bytes:
    """The header for a tensor, for a peer's ``get_tensor``: it reads header and bytes as one object.

    A peer gets a tensor without dimensions as one of shape ``[1]``, as it does from Mooncake itself.

    Args:
        dtype: PyTorch's name, such as ``bfloat16``.
        shape: Extents, at most 8.

    Raises:
        Unsupported: Mooncake has no such dtype, or not so many dimensions.
        Invalid: An extent is negative.
    """
    names = [name for name, _ in _DTYPES]
    if dtype not in names:
        raise Unsupported(
            f"Mooncake's tensors have no {dtype}; they have {', '.join(names)}",
            reason="mooncake.header",
            details={"dtype": dtype},
        )
    if len(shape) > _MAX_DIMENSIONS:
        raise Unsupported(
            f"Mooncake's tensors have at most {_MAX_DIMENSIONS} dimensions, this one has {len(shape)}: {list(shape)}",
            reason="mooncake.header",
            details={"shape": str(list(shape))},
        )
    if any(extent < 0 for extent in shape):
        raise Invalid(f"{list(shape)} is no shape: extents count from 0", reason="mooncake.header")
    number = names.index(dtype)
    nbytes = math.prod(shape) * _DTYPES[number][1]
    extents = [*shape, *[-1] * (_MAX_DIMENSIONS - len(shape))]
    return _HEAD.pack(_MAGIC, _VERSION, SIZE, number, len(shape), bytes(8), SIZE, nbytes, *extents, *extents, _PLAIN)


def decode_header(data: bytes | bytearray | memoryview) -> TensorHeader:
    """Reads the header at the beginning of an object that a peer's ``put_tensor`` made.

    Args:
        data: The object, or its first 304 bytes. Where it is longer, it must hold all bytes of the tensor.

    Raises:
        Corrupt: It does not begin with such a header, or contradicts itself.
        Unsupported: It is of another version, or is one part of a sharded tensor.
    """
    view = memoryview(data).cast("B")
    if len(view) < SIZE:
        raise Corrupt(f"{len(view)} bytes are no Mooncake tensor: its header has {SIZE}", reason="mooncake.header")
    magic, version, size, number, rank, _, offset, nbytes, *rest = _HEAD.unpack_from(view)
    whole, part, sharding = rest[:_MAX_DIMENSIONS], rest[_MAX_DIMENSIONS : 2 * _MAX_DIMENSIONS], rest[-1]
    if magic != _MAGIC:
        raise Corrupt(f"it begins with {magic:#x}, a Mooncake tensor with {_MAGIC:#x}", reason="mooncake.header")
    if (version, size) != (_VERSION, SIZE):
        raise Unsupported(
            f"its header has version {version} and {size} bytes, this package reads version {_VERSION} of {SIZE} bytes",
            reason="mooncake.header",
            details={"version": str(version)},
        )
    if whole != part or sharding != _PLAIN:
        raise Unsupported(
            f"it is the part {part[: max(rank, 0)]} of a sharded tensor of {whole[: max(rank, 0)]}: "
            "read it with get_tensor_with_parallelism",
            reason="mooncake.header",
        )
    known = 0 <= number < len(_DTYPES) and 0 <= rank <= _MAX_DIMENSIONS
    if not known or any(extent < 0 for extent in whole[:rank]):
        raise Corrupt(
            f"its header says dtype {number} and {rank} dimensions of {whole}: there is no such tensor",
            reason="mooncake.header",
        )
    name, item = _DTYPES[number]
    expected = math.prod(whole[:rank]) * item
    if nbytes != expected or offset < SIZE or SIZE < len(view) < offset + nbytes:
        raise Corrupt(
            f"its header says {nbytes} bytes from byte {offset} on; {name} of {whole[:rank]} takes {expected} bytes, "
            f"and there are {len(view)} in all",
            reason="mooncake.header",
            details={"nbytes": str(nbytes), "expected": str(expected)},
        )
    return TensorHeader(name, tuple(whole[:rank]), offset, nbytes)
