"""Chunks of a payload as bundles of tensors: views of the caller's destinations, or of mapped memory."""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING, Any

from ._bundle import cut, exporter, wrap
from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ._bundle import Framework
    from ._mooncake_backend import Reading
    from ._mooncake_either import Either
    from ._native import Consumer, Handle, Tensor

Spec = tuple[str, tuple[int, ...]]


class Destinations:
    """Where a payload is to be written: the caller's tensors, checked against what will arrive.

    Attributes:
        bundle: The caller's tensors by name.
        tensors: Their native views, in the order of the payload's tensors.
    """

    def __init__(self, handle: Handle, bundle: Mapping[str, Any]) -> None:
        self.bundle: dict[str, Any] = {}
        self.tensors: list[Tensor] = []
        self._names: list[str] = []
        if not hasattr(bundle, "items"):
            have = ", ".join(name for name, _ in handle.entries)
            raise Invalid(
                f"dst is a {type(bundle).__name__}, the payload a bundle of {have}: give a mapping of the same names",
                reason="consume.destination",
            )
        given, expected = dict(bundle), dict(handle.entries)
        if set(given) != set(expected):
            raise Invalid(
                f"dst has the names {sorted(map(str, given))}, the payload has {sorted(expected)}",
                reason="consume.destination",
                details={"dst": str(sorted(map(str, given))), "payload": str(sorted(expected))},
            )
        for name, spec in handle.entries:
            value = given[name]
            if spec is None:
                if value is not None:
                    raise Invalid(
                        f"dst {name!r} is a {type(value).__name__}, the payload has None",
                        reason="consume.destination",
                        details={"tensor": name, "found": type(value).__name__, "expected": "None"},
                    )
                self.bundle[name] = None
            elif isinstance(spec, list):
                items = list(value) if isinstance(value, list | tuple) else None
                if items is None or len(items) != len(spec):
                    found = type(value).__name__ if items is None else f"list of {len(items)}"
                    raise Invalid(
                        f"dst {name!r} is a {found}, the payload has a list of {len(spec)}",
                        reason="consume.destination",
                    )
                for index, (item, one) in enumerate(zip(items, spec, strict=True)):
                    self._add(f"{name}[{index}]", item, one)
                self.bundle[name] = items
            else:
                self._add(name, value, spec)
                self.bundle[name] = value
        self._check_apart()

    def _add(self, name: str, value: Any, spec: Spec) -> None:
        self.tensors.append(_checked(name, value, spec))
        self._names.append(name)

    def _check_apart(self) -> None:
        """Refuses tensors that share memory: the bytes of one would be those of another."""
        places = sorted(
            (tensor.data_ptr, tensor.nbytes, name)
            for tensor, name in zip(self.tensors, self._names, strict=True)
            if tensor.nbytes
        )
        for (start, nbytes, one), (next_start, _, other) in itertools.pairwise(places):
            if start + nbytes > next_start:
                raise Invalid(
                    f"dst {one!r} and dst {other!r} share memory: each needs its own",
                    reason="consume.destination",
                    details={"tensor": one, "other": other},
                )


def _checked(name: str, value: Any, spec: Spec) -> Tensor:
    tensor = wrap(name, value)
    dtype, shape = spec
    for what, found, expected in (
        ("dtype", tensor.dtype, dtype),
        ("shape", list(tensor.shape), list(shape)),
    ):
        if found != expected:
            raise Invalid(
                f"dst {name!r} has {what} {found}, the payload has {expected}",
                reason="consume.destination",
                details={"tensor": name, "found": str(found), "expected": str(expected)},
            )
    if tensor.read_only:
        raise Invalid(f"dst {name!r} is read-only", reason="consume.destination", details={"tensor": name})
    if not tensor.contiguous:
        raise Invalid(
            f"dst {name!r} is not contiguous: its strides are {list(tensor.strides)} elements",
            reason="consume.destination",
            details={"tensor": name, "strides": str(list(tensor.strides))},
        )
    return tensor


class Reader:
    """Reads one payload through one consumer, once.

    Attributes:
        consumer: Who gets the bytes.
    """

    def __init__(
        self,
        handle: Handle,
        consumer: Consumer | Reading | Either,
        destinations: Destinations | None,
        framework: Framework | None,
        *,
        single: str | None = None,
    ) -> None:
        self._handle = handle
        self.consumer = consumer
        self._destinations = destinations
        self._single = single
        dtypes = {dtype for _, value in handle.entries for dtype, _ in _specs(value)}
        # Tensors that have a destination are the caller's own; nothing is exported then.
        self._export = exporter("native" if destinations is not None else framework, dtypes)

    def read_into(self, destinations: Destinations) -> None:
        """What comes from now on is written there, though the caller has named no destination."""
        self._destinations = destinations

    def chunks(self, on_chunk: Callable[[int, Any], object] | None = None) -> Iterator[Any]:
        """Chunk after chunk; the payload is finished when the iterator has ended."""
        telling = None if on_chunk is None else Telling(self, on_chunk)
        try:
            index = 0
            # The call after the last chunk says that everything was read, which is what ends the payload's life.
            while (tensors := self.consumer.next()) is not None:
                if telling is not None:
                    telling.wait(index)
                yield self.chunk(index, tensors)
                index += 1
        finally:
            if telling is not None:
                telling.end()
            self.consumer.close()

    def whole(self) -> Any:
        """All of it."""
        try:
            return self.all(self.consumer.fetch())
        finally:
            self.consumer.close()

    def chunk(self, index: int, tensors: list[Tensor]) -> Any:
        """What the caller gets of chunk `index`."""
        return self._give(self._chunk(index, tensors))

    def all(self, tensors: list[Tensor]) -> Any:
        """What the caller gets of all tensors."""
        return self._give(self._bundle(tensors))

    def _chunk(self, index: int, tensors: list[Tensor]) -> dict[str, Any]:
        dim = self._handle.chunk_dim
        if self._destinations is None or dim is None:
            return self._bundle(tensors)
        slices = iter(self._handle.chunk_slices(index))
        return _map(self._destinations.bundle, lambda tensor: cut(tensor, dim, *next(slices)))

    def _bundle(self, tensors: list[Tensor]) -> dict[str, Any]:
        if self._destinations is not None:
            return dict(self._destinations.bundle)
        given = iter(tensors)
        export = self._export
        return {
            name: None
            if value is None
            else [export(next(given)) for _ in value]
            if isinstance(value, list)
            else export(next(given))
            for name, value in self._handle.entries
        }

    def _give(self, bundle: dict[str, Any]) -> Any:
        return bundle if self._single is None else bundle[self._single]


class Telling:
    """Calls a function with each chunk as it comes, on a thread of its own."""

    def __init__(self, reader: Reader, on_chunk: Callable[[int, Any], object]) -> None:
        self._reader = reader
        self._on_chunk = on_chunk
        self._changed = threading.Condition()
        self._told: set[int] = set()
        self._error: BaseException | None = None
        self._ended = False
        threading.Thread(target=self._run, name="stagewire-on-chunk", daemon=True).start()

    def wait(self, index: int) -> None:
        """Returns once chunk `index`, which has come, was told.

        Raises:
            Exception: What the function has raised, of whatever chunk.
        """
        with self._changed:
            self._changed.wait_for(lambda: index in self._told or self._error is not None)
            if self._error is not None:
                raise self._error

    def end(self) -> None:
        """Has no further call begin."""
        with self._changed:
            self._ended = True

    def _run(self) -> None:
        try:
            while (arrived := self._reader.consumer.arrived()) is not None:
                index, tensors = arrived
                if self._ended:
                    return
                self._on_chunk(index, self._reader.chunk(index, tensors))
                with self._changed:
                    self._told.add(index)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()


def _specs(value: Spec | list[Spec] | None) -> list[Spec]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _map(bundle: dict[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    return {
        name: None
        if value is None
        else [function(item) for item in value]
        if isinstance(value, list)
        else function(value)
        for name, value in bundle.items()
    }
