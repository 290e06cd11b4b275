"""Between the tensors of torch and NumPy and the native ones. Neither library is imported before it is needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from . import _arguments
from ._native import Tensor
from .errors import Exhausted, Invalid, StagewireError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Framework: TypeAlias = Literal["torch", "numpy", "native"]
Entry: TypeAlias = "tuple[str, Tensor | list[Tensor] | None]"

_FRAMEWORKS = ("torch", "numpy", "native")
_NOT_IN_NUMPY = {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


class Imported:
    """A bundle as native tensors over the callers' own memory, and how many copies that took.

    A tensor that is not in host memory gets the memory that `place` gives for it, and for its number among the tensors.

    Attributes:
        entries: Names in order, and what stands under them.
        copies: Tensors that were not contiguous and were copied once.
        copied_bytes: Bytes of those copies.
    """

    __slots__ = ("_count", "_place", "copied_bytes", "copies", "entries")

    def __init__(
        self, bundle: Mapping[str, Any], *, strict: bool = False, place: Callable[[int, Any], Any] | None = None
    ) -> None:
        if not hasattr(bundle, "items"):
            raise _no_bundle(bundle)
        self.entries: list[Entry] = []
        self.copies = 0
        self.copied_bytes = 0
        self._count = 0
        self._place = place
        for name, value in bundle.items():
            if not isinstance(name, str):
                raise Invalid(f"names of a bundle are text, not {name!r}", reason="payload.bundle")
            _arguments.text("a name in a bundle", name)
            if value is None:
                self.entries.append((name, None))
            elif isinstance(value, list | tuple):
                items = [self._one(f"{name}[{i}]", item, strict) for i, item in enumerate(value)]
                self.entries.append((name, items))
            else:
                self.entries.append((name, self._one(name, value, strict)))

    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return list(each(dict(self.entries)))

    def _one(self, name: str, value: Any, strict: bool) -> Tensor:
        self._count += 1
        if self._place is not None and getattr(value, "is_cuda", False):
            value = self._place(self._count - 1, value)
        tensor = wrap(name, value)
        if tensor.contiguous:
            return tensor
        if strict:
            raise Invalid(
                f"tensor {name!r} of shape {list(tensor.shape)} is not contiguous (strides {list(tensor.strides)} in "
                "elements) and strict=True forbids the copy: make it .contiguous() first",
                reason="tensor.not_contiguous",
                details={"tensor": name, "shape": str(list(tensor.shape)), "strides": str(list(tensor.strides))},
            )
        # torch copies with all its threads.
        contiguous = getattr(value, "contiguous", None)
        try:
            copy = wrap(name, contiguous()) if callable(contiguous) else tensor.copy()
        except StagewireError:
            raise
        except (MemoryError, RuntimeError) as error:
            raise Exhausted(
                f"tensor {name!r} of shape {list(tensor.shape)} is not contiguous, and there is no memory for a copy "
                f"of {tensor.nbytes} bytes: {_arguments.printable(error)}",
                reason="tensor.memory",
                details={"tensor": name, "wanted_bytes": str(tensor.nbytes)},
            ) from None
        self.copies += 1
        self.copied_bytes += tensor.nbytes
        return copy


def snapshot(bundle: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of a bundle's tensors in host memory, which nobody else writes to.

    Raises:
        Invalid: It is no bundle.
    """

    def copy(name: str, value: Any) -> Tensor:
        # Off a device, that is a copy already.
        return wrap(name, value.cpu()) if getattr(value, "is_cuda", False) else wrap(name, value).copy()

    if not hasattr(bundle, "items"):
        raise _no_bundle(bundle)
    return {
        name: None
        if value is None
        else [copy(f"{name}[{i}]", item) for i, item in enumerate(value)]
        if isinstance(value, list | tuple)
        else copy(str(name), value)
        for name, value in bundle.items()
    }


def _no_bundle(value: object) -> Invalid:
    return Invalid(
        f"a bundle is a mapping {{name: tensor | None | [tensor, ...]}}, not a {type(value).__name__}",
        reason="payload.bundle",
    )


def each(bundle: Mapping[str, Any]) -> Iterator[Any]:
    """What stands under the names, one by one."""
    for value in bundle.values():
        if isinstance(value, list | tuple):
            yield from value
        elif value is not None:
            yield value


def wrap(name: str, value: Any) -> Tensor:
    """The native view of a tensor's memory, without a copy.

    Raises:
        Invalid: It is no tensor, or one whose memory is not simply there (it requires grad, is sparse, ...).
        Unsupported: It is not in host memory, or of an unknown dtype.
    """
    if isinstance(value, Tensor):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return Tensor.from_dlpack(value)
        return Tensor.from_buffer(value)
    except TypeError:
        # It is neither.
        pass
    except BufferError as error:
        hint = ": detach() it first" if getattr(value, "requires_grad", False) else ""
        raise Invalid(
            f"tensor {name!r} cannot be shared: {error}{hint}", reason="tensor.not_shareable", details={"tensor": name}
        ) from error
    except (Invalid, Unsupported) as error:
        raise type(error)(
            f"tensor {name!r}: {error.message}", reason=error.reason, details={**error.details, "tensor": name}
        ) from None
    except Exception as error:
        # The exporter's own, such as ValueError for a tensor of torch without memory, on the device "meta".
        raise Invalid(
            f"tensor {name!r} cannot be shared: {type(error).__name__}: {_arguments.printable(error)}",
            reason="tensor.not_shareable",
            details={"tensor": name},
        ) from error
    raise Invalid(
        f"{name!r} is a {type(value).__name__}, not a tensor: it needs __dlpack__ (torch, NumPy, ...) or the buffer "
        "protocol (bytes, array.array, ...); text and numbers belong in the metadata",
        reason="tensor.type",
        details={"tensor": name, "type": type(value).__name__},
    )


def dtype_name(dtype: Any) -> str:
    """PyTorch's name of a dtype of torch or NumPy, or of one given by name.

    Raises:
        Invalid: It is none.
    """
    if isinstance(dtype, str):
        return _arguments.text("dtype", dtype).removeprefix("torch.")
    match framework_of(dtype):
        case "torch":
            return str(dtype).removeprefix("torch.")
        case "numpy":
            return str(load("numpy").dtype(dtype).name)
    raise Invalid(
        f"{dtype!r} is no dtype of torch or NumPy, nor PyTorch's name of one, such as 'bfloat16'",
        reason="tensor.dtype",
        details={"dtype": repr(dtype)},
    )


def framework_of(dtype: Any) -> Framework | None:
    """Whose dtype it is."""
    kind = dtype if isinstance(dtype, type) else type(dtype)
    match kind.__module__.partition(".")[0]:
        case "torch":
            return "torch"
        case "numpy":
            return "numpy"
    return None


def exporter(framework: Framework | None, dtypes: Iterable[str]) -> Callable[[Tensor], Any]:
    """The function that turns native tensors into those of a framework, over the same memory.

    Without a `framework`: torch where it is imported or a dtype needs it, else NumPy, else native.
    """
    chosen = choose(dtypes) if framework is None else framework
    if chosen not in _FRAMEWORKS:
        raise Invalid(f"unknown framework {chosen!r}; it is torch, numpy or native", reason="tensor.framework")
    if chosen == "native":
        return lambda tensor: tensor
    library = load(chosen)
    if chosen == "numpy":
        return lambda tensor: _to_numpy(library, tensor)
    convert: Callable[[Tensor], Any] = library.from_dlpack
    return convert


def choose(dtypes: Iterable[str]) -> Framework:
    """The framework for tensors of these dtypes where the caller names none."""
    if "torch" in sys.modules:
        return "torch"
    if not _NOT_IN_NUMPY.isdisjoint(dtypes):
        return "torch" if importlib.util.find_spec("torch") else "native"
    if importlib.util.find_spec("numpy"):
        return "numpy"
    return "torch" if importlib.util.find_spec("torch") else "native"


def load(library: str) -> Any:
    """Imports torch or NumPy.

    Raises:
        Unsupported: This Python does not have it.
    """
    try:
        return importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"framework={library!r} needs {library}, which this Python ({sys.executable}) does not have: "
            "install it there",
            reason="python.missing_module",
            details={"module": library},
        ) from error


def _to_numpy(numpy: Any, tensor: Tensor) -> Any:
    if tensor.dtype in _NOT_IN_NUMPY:
        raise Unsupported(
            f"NumPy has no {tensor.dtype}: fetch it with framework='torch' or 'native'",
            reason="tensor.dtype",
            details={"dtype": tensor.dtype},
        )
    return numpy.from_dlpack(tensor)


def cut(tensor: Any, dim: int, start: int, length: int) -> Any:
    """The view of a torch tensor or NumPy array from `start` along `dim`."""
    if hasattr(tensor, "narrow"):
        return tensor.narrow(dim, start, length)
    return tensor[(slice(None),) * dim + (slice(start, start + length),)]
