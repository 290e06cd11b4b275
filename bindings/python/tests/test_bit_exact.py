"""Round trips of random payloads, bit for bit: every dtype, layout, cut, mode and transport of one host."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peers
import pytest
import torch
from mooncake_cluster import MIB, Child, Master
from processes import wait_for
from stagewire import Tensor, errors
from stagewire.diffusion import DiffusionConnector, HostStore, Lease, StageHandle, StagePayload
from test_dlpack import DTYPES, NOT_IN_NUMPY

if TYPE_CHECKING:
    from collections.abc import Iterator

hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed: run make setup")
st = pytest.importorskip("hypothesis.strategies")

HERE = [(mode, transport) for mode in ("p2p", "store") for transport in ("arena", "cma", "shm", "tcp", "mooncake")]
# What a producer names for its payloads to go this way, and the store to get them.
NAMED = {"shm": ["shm"], "tcp": ["tcp"], "mooncake": ["mooncake", "tcp"]}


class World:
    """A producer for each way, and a consumer for each kind of way; one for all examples."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.stack = contextlib.ExitStack()
        self.stores: list[HostStore] = []
        self.producers: dict[tuple[str, str], DiffusionConnector] = {}
        self._consumers: dict[tuple[str, str], DiffusionConnector] = {}

    def one(self, role: str, mode: str, transports: list[str], **options: Any) -> DiffusionConnector:
        te_config = {"transports": transports}
        conn = DiffusionConnector(role, mode, te_config=te_config, run_dir=self.run_dir, **options)  # type: ignore[arg-type]
        return self.stack.enter_context(conn)

    def add(self, way: tuple[str, str], consumer: DiffusionConnector, transports: list[str], **options: Any) -> None:
        self.producers[way] = self.one("p", way[0], transports, **options)
        self._consumers[way] = consumer

    def consumer(self, way: tuple[str, str]) -> DiffusionConnector:
        return self._consumers[way]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        made = World(Path(folder) / "run")
        with made.stack:
            made.stores.append(made.stack.enter_context(HostStore("64MiB", run_dir=made.run_dir)))
            consumer = made.one("consumer", "p2p", ["shm", "cma", "tcp", "mooncake"])
            for way in HERE:
                made.add(way, consumer, NAMED.get(way[1], ["shm", "cma", "tcp"]))
            yield made


@pytest.fixture(scope="module")
def remote() -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="sw-") as folder, pytest.MonkeyPatch.context() as patch:
        made = World(Path(folder) / "run")
        patch.setenv("NIXL_CAPI_LIB", peers.nixl())
        with made.stack:
            made.add(("p2p", "nixl"), made.one("consumer", "p2p", ["nixl"]), ["nixl"])
            master = made.stack.enter_context(Master())
            made.stack.enter_context(Child(master.address, segment_bytes=64 * MIB))
            config = {"backend": "mooncake", "master": master.address}
            consumer = made.one("consumer", "store", ["shm"], store_config=config)
            made.add(("store", "mooncake-store"), consumer, ["shm"], store_config=config)
            yield made


def some_tensor(draw: Any, dtype: str) -> tuple[torch.Tensor, bytes]:
    """A tensor of random bits in a random layout, and its bytes in row-major order."""
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    kind = getattr(torch, dtype)
    size = torch.empty((), dtype=kind).element_size()
    count = int(np.prod(shape, dtype=np.int64)) * size
    raw = np.frombuffer(draw(st.binary(min_size=count, max_size=count)), dtype=np.uint8).copy()
    if dtype == "bool":
        raw %= 2
    base = torch.from_numpy(raw).view(kind).reshape(shape) if count else torch.empty(shape, dtype=kind)
    expected = raw.tobytes()
    match draw(st.sampled_from(["contiguous", "transposed", "stepped", "offset", "expanded"])):
        case "transposed" if shape:
            order = draw(st.permutations(range(len(shape))))
            back = [order.index(dim) for dim in range(len(shape))]
            return base.permute(order).contiguous().permute(back), expected
        case "stepped" if shape and count:
            wide = torch.empty((*shape, 2), dtype=kind)
            wide[..., 0] = base
            return wide[..., 0], expected
        case "offset" if count:
            longer = torch.cat([base.reshape(-1)[:1], base.reshape(-1)])
            return longer[1:].reshape(shape), expected
        case "expanded" if shape and count:
            return base[:1].expand(shape), bits(base[:1].expand(shape))
    return base, expected


def bits(tensor: torch.Tensor) -> bytes:
    tensor = tensor.contiguous()
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def test_whatever_is_published_arrives_bit_for_bit(world: World) -> None:
    round_trips(world, 300)


def test_whatever_is_published_arrives_by_peers_bit_for_bit(remote: World) -> None:
    round_trips(remote, 150)


def round_trips(world: World, count: int) -> None:
    settings = hypothesis.settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
    )
    settings(hypothesis.given(st.data())(lambda data: round_trip(world, data.draw)))()
    for conn in [*world.stores, *world.producers.values()]:
        wait_for(lambda conn=conn: conn.live() == [], "every payload is gone")


def round_trip(world: World, draw: Any) -> None:
    way = draw(st.sampled_from(list(world.producers)))
    tensors: dict[str, Any] = {}
    expected: dict[str, Any] = {}
    for name in draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True)):
        dtypes = draw(st.lists(st.sampled_from(DTYPES), max_size=3))
        made = [some_tensor(draw, dtype) for dtype in dtypes]
        given = [lend(draw, world, way, tensor, dtype) for (tensor, _), dtype in zip(made, dtypes, strict=True)]
        wanted = [(dtype, tuple(t.shape), raw) for (t, raw), dtype in zip(made, dtypes, strict=True)]
        alone = len(made) == 1 and draw(st.booleans())
        tensors[name] = None if not made else given[0] if alone else given
        expected[name] = None if not made else wanted[0] if alone else wanted
    dim, chunks = cut(draw, [shape for value in expected.values() for _, shape, _ in as_list(value)])
    payload = StagePayload(
        request_id="r",
        kind=draw(st.sampled_from(["embedding", "latent", "checkpoint", "feature", "frames"])),
        tensors=tensors,
        metadata=draw(JSON),
        chunk_dim=dim,
        num_chunks=chunks,
        lease=draw(st.sampled_from([Lease.delete_on_consume, Lease.pinned, Lease.ttl(60)])),
    )
    at_once, into_dst, whole = (draw(st.booleans()) for _ in range(3))
    # From here on nothing is drawn, which might end the example.
    conn = world.producers[way]
    handle = conn.publish(payload)
    assert at_once or handle.wait(30)
    assert handle.metadata == payload.metadata
    assert read(world.consumer(way), StageHandle.from_bytes(handle.to_bytes()), into_dst, whole) == expected
    assert handle.wait(30)
    conn.release(handle)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner, max_size=3)
    ),
    max_leaves=10,
)


def as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def cut(draw: Any, shapes: list[tuple[int, ...]]) -> tuple[int, int]:
    """A dimension that every tensor has, and no more chunks than the shortest of them has there."""
    rank = min((len(shape) for shape in shapes), default=0)
    if rank == 0:
        return 0, 1
    dim = draw(st.integers(0, rank - 1))
    return dim, draw(st.integers(1, max(1, min(shape[dim] for shape in shapes))))


def lend(draw: Any, world: World, way: tuple[str, str], tensor: torch.Tensor, dtype: str) -> Any:
    """The tensor as an object of some library, or in the arena."""
    if way[1] == "arena":
        made = world.producers[way].allocate(tuple(tensor.shape), dtype, framework="torch")
        made.copy_(tensor)
        return made
    kinds = ["torch", "native"] + (["numpy"] if dtype not in NOT_IN_NUMPY else [])
    match draw(st.sampled_from(kinds)):
        case "numpy":
            return tensor.numpy()
        case "native":
            return Tensor.from_dlpack(tensor)
    return tensor


def read(consumer: DiffusionConnector, handle: StageHandle, into_dst: bool, whole: bool) -> dict[str, Any]:
    """Reads it in one of the ways, and returns what `expected` has."""

    def empty(one: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        return torch.empty(one[1], dtype=getattr(torch, one[0]))

    dst = {
        name: [empty(one) for one in value] if isinstance(value, list) else None if value is None else empty(value)
        for name, value in handle.spec.items()
    }
    given: dict[str, Any] = {"dst": dst} if into_dst else {"framework": "torch"}
    if whole:
        return {name: flat(value) for name, value in consumer.fetch(handle, **given).items()}
    parts = list(consumer.consume(handle, **given))
    assert len(parts) == handle.num_chunks
    return {name: joined([part[name] for part in parts], handle.chunk_dim or 0) for name in dst}


def joined(parts: list[Any], dim: int) -> Any:
    """What the chunks of one name are together."""
    if parts[0] is None:
        return None
    if isinstance(parts[0], list):
        return [joined(list(column), dim) for column in zip(*parts, strict=True)]
    if len(parts) == 1 or not any(part.numel() for part in parts):
        dtype, shape, raw = flat(parts[0])
        return (dtype, (*shape[:dim], sum(part.shape[dim] for part in parts), *shape[dim + 1 :]) if shape else (), raw)
    whole = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim)
    return flat(whole.view(parts[0].dtype))


def flat(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list):
        return [flat(item) for item in value]
    return (str(value.dtype).removeprefix("torch."), tuple(value.shape), bits(value))


@pytest.mark.parametrize(("mode", "transport"), [("p2p", "nixl"), ("store", "mooncake-store")])
def test_peers_are_used(remote: World, mode: str, transport: str) -> None:
    conn, consumer = remote.producers[mode, transport], remote.consumer((mode, transport))
    source = torch.arange(1000, dtype=torch.int64)
    handle = conn.publish(StagePayload(request_id="r", tensor=source, lease="pinned"))
    assert handle.wait(30)
    assert handle.mode == mode
    without = remote.one("x", "p2p", ["shm", "cma", "tcp"])
    with pytest.raises(errors.Unsupported):
        without.fetch(handle)
    assert torch.equal(consumer.fetch(handle, framework="torch"), source)
    conn.release(handle)


@pytest.mark.parametrize(("mode", "transport"), HERE)
def test_the_transport_is_the_one_that_was_asked_for(world: World, mode: str, transport: str) -> None:
    """Else the property above would say less than it seems to."""
    conn, consumer = world.producers[mode, transport], world.consumer((mode, transport))
    staged, copied = conn.stats()["staged_bytes"], consumer.stats()["copied_bytes"]
    source = torch.arange(1000, dtype=torch.int64)
    if transport == "arena":
        source = conn.allocate((1000,), "int64", framework="torch").copy_(source)
    handle = conn.publish(StagePayload(request_id="r", tensor=source, lease="pinned"))
    assert handle.wait(30)
    assert handle.mode == mode
    view = consumer.fetch(handle, framework="torch")
    assert torch.equal(view, source)
    assert conn.stats()["staged_bytes"] - staged == (8000 if transport == "shm" else 0)
    read = consumer.stats()["copied_bytes"] - copied
    # The store's memory is mapped, and so is shared memory of the producer.
    assert read == (0 if mode == "store" or transport in ("arena", "shm") else 8000)
    conn.release(handle)


def test_the_slices_of_uneven_cuts() -> None:
    """The oracle of this file: `torch.tensor_split` cuts as Stagewire does."""
    for extent, count in itertools.product(range(1, 40), range(1, 12)):
        if count <= extent:
            sizes = [len(part) for part in torch.arange(extent).tensor_split(count)]
            assert sizes == [extent // count + (index < extent % count) for index in range(count)]
