"""Tensors in and out: every dtype, shapes, layouts; never a copy, never another bit."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from stagewire import Tensor
from stagewire._bundle import Imported, cut, exporter
from stagewire.errors import Invalid, Unsupported

DTYPES = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "float8_e5m2",
    "complex64",
]
NOT_IN_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3, 4), (1, 2, 5, 3, 2), (1, 1, 1)]


def random_bits(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bit patterns: NaNs with payloads, negative zeros, subnormals and all."""
    kind = getattr(torch, dtype)
    size = torch.empty((), dtype=kind).element_size()
    count = int(np.prod(shape, dtype=np.int64))
    raw = torch.from_numpy(np.random.default_rng(7).integers(0, 256, count * size, dtype=np.uint8))
    if dtype == "bool":
        raw = raw % 2
    return raw.view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in row-major order."""
    tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_in_and_out(dtype: str, shape: tuple[int, ...]) -> None:
    source = random_bits(dtype, shape)
    tensor = Tensor.from_dlpack(source)
    assert (tensor.dtype, tensor.shape, tensor.nbytes) == (dtype, shape, source.numel() * source.element_size())
    assert tensor.contiguous
    assert not tensor.read_only
    assert tensor.tobytes() == bits(source)
    back = torch.from_dlpack(tensor)
    assert (back.dtype, tuple(back.shape), back.stride()) == (source.dtype, shape, source.stride())
    assert bits(back) == bits(source)
    if source.numel():
        assert tensor.data_ptr == source.data_ptr() == back.data_ptr(), "it was copied"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in NOT_IN_NUMPY])
def test_numpy_in_and_out(dtype: str, shape: tuple[int, ...]) -> None:
    source = random_bits(dtype, shape).numpy()
    tensor = Tensor.from_dlpack(source)
    back = exporter("numpy", [dtype])(tensor)
    assert (back.dtype, back.shape) == (source.dtype, shape)
    assert back.tobytes() == source.tobytes()
    if source.size:
        assert back.ctypes.data == source.ctypes.data, "it was copied"


@pytest.mark.parametrize("dtype", sorted(NOT_IN_NUMPY))
def test_numpy_says_what_it_lacks(dtype: str) -> None:
    tensor = Tensor.from_dlpack(random_bits(dtype, (3,)))
    with pytest.raises(Unsupported, match=f"NumPy has no {dtype}") as caught:
        exporter("numpy", [dtype])(tensor)
    assert caught.value.reason == "tensor.dtype"


@pytest.mark.parametrize(
    ("make", "contiguous"),
    [
        (lambda t: t.transpose(0, 2), False),
        (lambda t: t[:, ::2], False),
        (lambda t: t[1:2], True),
        (lambda t: t[:, :1].transpose(0, 1), False),
        (lambda t: t[:1, :1].transpose(0, 1), True),
        (lambda t: t.expand(2, *t.shape), False),
        (lambda t: t[:0], True),
    ],
    ids=["transposed", "stepped", "sliced", "sliced-transposed", "ones-transposed", "expanded", "emptied"],
)
def test_layouts(make: Any, contiguous: bool) -> None:
    view = make(random_bits("float32", (4, 6, 5)))
    tensor = Tensor.from_dlpack(view)
    assert tensor.contiguous is contiguous
    assert bits(torch.from_dlpack(tensor)) == bits(view)
    imported = Imported({"x": view})
    assert (imported.copies, imported.copied_bytes) == ((0, 0) if contiguous else (1, view.numel() * 4))
    (entry,) = imported.entries
    assert isinstance(entry[1], Tensor)
    assert entry[1].tobytes() == bits(view)
    if not contiguous:
        with pytest.raises(Invalid, match="strict=True forbids the copy") as caught:
            Imported({"x": view}, strict=True)
        assert caught.value.details["tensor"] == "x"


def test_numpy_layouts_are_copied_once() -> None:
    array: Any = np.arange(24, dtype=np.int32).reshape(4, 6)
    imported = Imported({"x": array.T, "scalar": np.array(3.5)})
    assert imported.copies == 1
    found = [value.tobytes() for _, value in imported.entries if isinstance(value, Tensor)]
    assert found == [array.T.tobytes(), np.array(3.5).tobytes()]


def test_read_only_arrays_stay_read_only() -> None:
    array: Any = np.arange(4)
    array.flags.writeable = False
    tensor = Tensor.from_dlpack(array)
    assert tensor.read_only
    back = np.from_dlpack(tensor)
    assert not back.flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        tensor.__dlpack__()


@pytest.mark.parametrize("memory", [b"", b"abc", bytearray(b"xyz")], ids=repr)
def test_bytes_are_uint8(memory: Any) -> None:
    tensor = Tensor.from_buffer(memory)
    assert (tensor.dtype, tensor.shape) == ("uint8", (memoryview(memory).nbytes,))
    assert tensor.read_only is memoryview(memory).readonly
    assert tensor.tobytes() == bytes(memory)


FORMATS = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float32": "f",
    "float64": "d",
}


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_buffers_keep_their_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    source = random_bits(dtype, shape)
    memory = bytearray(bits(source))
    tensor = Tensor.from_buffer(memoryview(memory).cast(FORMATS[dtype], shape))  # type: ignore[call-overload]
    assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (dtype, shape, bits(source))
    assert tensor.contiguous
    assert not tensor.read_only


@pytest.mark.parametrize("dtype", ["float16", "complex64"])
def test_buffers_of_numpys_own_types(dtype: str) -> None:
    source: Any = random_bits(dtype, (2, 3)).numpy()
    tensor = Tensor.from_buffer(source)
    assert (tensor.dtype, tensor.shape, tensor.tobytes()) == (dtype, (2, 3), source.tobytes())


def test_objects_with_the_buffer_protocol() -> None:
    import array
    import ctypes

    doubles = array.array("d", [1.5, -2.5])
    pairs = (ctypes.c_int16 * 2 * 3)()
    pairs[2][1] = 7
    imported = Imported({"array": doubles, "ctypes": pairs, "scalar": ctypes.c_uint32(9), "numpy": np.float32(3)})
    found = {name: value for name, value in imported.entries if isinstance(value, Tensor)}
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        "array": ("float64", (2,)),
        "ctypes": ("int16", (3, 2)),
        "scalar": ("uint32", ()),
        "numpy": ("float32", ()),
    }
    assert torch.from_dlpack(found["ctypes"]).tolist() == [[0, 0], [0, 0], [0, 7]]
    assert found["scalar"].tobytes() == (9).to_bytes(4, "little")
    assert imported.copies == 0


def memory_of(array: Any) -> memoryview:
    return memoryview(array)


def test_strided_buffers_are_copied_once() -> None:
    for view, expected in [
        (memoryview(bytearray(range(12)))[::3], bytes([0, 3, 6, 9])),
        (memory_of(np.arange(6, dtype=np.uint8).reshape(2, 3).T), bytes([0, 3, 1, 4, 2, 5])),
        (memory_of(np.arange(4, dtype=np.uint8)[::-1]), bytes([3, 2, 1, 0])),
    ]:
        imported = Imported({"x": view})
        assert (imported.copies, imported.copied_bytes) == (1, len(expected))
        ((_, tensor),) = imported.entries
        assert isinstance(tensor, Tensor)
        assert (tensor.tobytes(), tensor.shape) == (expected, view.shape)
        with pytest.raises(Invalid, match="strict=True forbids the copy"):
            Imported({"x": view}, strict=True)


def test_buffers_that_are_no_tensors() -> None:
    for memory, message in [
        (memory_of(np.arange(3, dtype=">i4")), 'format ">i" .4 bytes. has no Stagewire dtype'),
        (memory_of(np.zeros(2, dtype=[("a", "i4"), ("b", "f4")])), "has no Stagewire dtype"),
        (memory_of(np.zeros(2, dtype=np.longdouble)), "has no Stagewire dtype"),
    ]:
        with pytest.raises(Unsupported, match="tensor 'x': .*" + message) as caught:
            Imported({"x": memory})
        assert caught.value.reason == "tensor.dtype"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [lambda t: t.transpose(0, 2), lambda t: t[:, ::2], lambda t: t.expand(2, 4, 6, 5)])
def test_copies_are_in_order(dtype: str, make: Any) -> None:
    view = make(random_bits(dtype, (4, 6, 5)))
    tensor = Tensor.from_dlpack(view)
    copy = tensor.copy()
    assert (copy.dtype, copy.shape, copy.contiguous, copy.tobytes()) == (dtype, tuple(view.shape), True, bits(view))
    assert Tensor.from_dlpack(view[:0]).copy().tobytes() == b""


def test_other_views_of_the_same_bytes() -> None:
    memory = bytearray(8)
    tensor = Tensor.from_buffer(memory).view("float32", (1, 2))
    torch.from_dlpack(tensor)[0, 1] = 1.0
    assert memory == bytes(6) + b"\x80\x3f"
    with pytest.raises(Invalid, match=r"8 B of shape \[8\] are not the 16 B"):
        Tensor.from_buffer(memory).view("float64", (2,))
    with pytest.raises(Invalid, match="float99"):
        Tensor.from_buffer(memory).view("float99", (2,))


def test_the_old_protocol_works() -> None:
    class Old:
        """An exporter from before DLPack 1.0."""

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

        def __dlpack__(self, stream: Any = None) -> Any:
            return torch.utils.dlpack.to_dlpack(self.tensor)

    source = torch.arange(5)
    assert Tensor.from_dlpack(Old(source)).data_ptr == source.data_ptr()
    again = torch.utils.dlpack.from_dlpack(Tensor.from_dlpack(source).__dlpack__())
    assert again.data_ptr() == source.data_ptr()


def test_memory_lives_as_long_as_somebody_uses_it() -> None:
    source = torch.arange(6, dtype=torch.int16)
    tensor = Tensor.from_dlpack(source)
    back = torch.from_dlpack(tensor)
    del source, tensor
    gc.collect()
    torch.empty(6, dtype=torch.int16).fill_(-1)  # would land on memory that was given back
    assert back.tolist() == [0, 1, 2, 3, 4, 5]


def test_memory_goes_when_nobody_uses_it() -> None:
    class Owner(np.ndarray):
        pass

    array: Any = np.zeros(8).view(Owner)
    alive = weakref.ref(array)
    tensor = Tensor.from_dlpack(array)
    capsule = tensor.__dlpack__(max_version=(1, 1))
    del array
    assert alive() is not None
    del tensor
    assert alive() is not None, "the capsule keeps it"
    del capsule
    # A thread of its own gives it back: it needs the GIL, which this loop lets go of.
    import time

    deadline = time.monotonic() + 10
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None


def test_what_cannot_be_shared_says_why() -> None:
    grads = torch.zeros(2, requires_grad=True)
    with pytest.raises(Invalid, match=r"'w' cannot be shared: .*detach\(\) it first") as caught:
        Imported({"w": grads})
    assert isinstance(caught.value.__cause__, BufferError)
    assert caught.value.reason == "tensor.not_shareable"
    with pytest.raises(Invalid, match="conjugate"):
        Imported({"c": torch.zeros(2, dtype=torch.complex64).conj()})
    with pytest.raises(Unsupported, match=r"tensor 'c': DLPack type \(code 5, 128 bits"):
        Imported({"c": torch.zeros(2, dtype=torch.complex128)})
    with pytest.raises(Invalid, match="'n' is a int, not a tensor"):
        Imported({"n": 3})
    with pytest.raises(Invalid, match="'s' is a str, not a tensor"):
        Imported({"s": "text"})
    with pytest.raises(Invalid, match="names of a bundle are text"):
        Imported({1: torch.zeros(1)})  # type: ignore[dict-item]
    with pytest.raises(Invalid, match="not a list"):
        Imported([torch.zeros(1)])  # type: ignore[arg-type]


def test_device_memory_is_refused() -> None:
    class OnGpu:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (2, 1)

        def __dlpack__(self, **options: Any) -> Any:
            raise AssertionError("must not be asked")

    with pytest.raises(Unsupported, match=r"device 1 of DLPack type 2; copy it to the host first: \.cpu\(\)"):
        Imported({"x": OnGpu()})


def test_a_capsule_is_used_once() -> None:
    class Twice:
        def __init__(self) -> None:
            self.capsule = torch.arange(3).__dlpack__(max_version=(1, 1))

        def __dlpack_device__(self) -> tuple[int, int]:
            return (1, 0)

        def __dlpack__(self, **options: Any) -> Any:
            return self.capsule

    twice = Twice()
    Tensor.from_dlpack(twice)
    with pytest.raises(BufferError, match="used already"):
        Tensor.from_dlpack(twice)


def test_bundles_keep_names_lists_and_none() -> None:
    a, b = torch.zeros(2), torch.ones(3)
    imported = Imported({"one": a, "none": None, "many": [a, b], "empty": []})
    assert [name for name, _ in imported.entries] == ["one", "none", "many", "empty"]
    shapes = [v if v is None else [t.shape for t in v] if isinstance(v, list) else v.shape for _, v in imported.entries]
    assert shapes == [(2,), None, [(2,), (3,)], []]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_cut_is_a_view(dim: int) -> None:
    tensor = torch.arange(60).reshape(3, 4, 5)
    view = cut(tensor, dim, 1, 2)
    assert torch.equal(view, tensor.narrow(dim, 1, 2))
    assert np.array_equal(cut(tensor.numpy(), dim, 1, 2), view.numpy())
