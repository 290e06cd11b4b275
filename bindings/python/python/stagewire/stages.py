"""What a pipeline module is written in: the `stage` decorator and the values that stage functions return.

```python
import stagewire

@stagewire.stage("encode", setup=load_text_encoder)
def encode(ctx, model):
    return {"prompt_embeds": model(ctx.params["prompt"])}

@stagewire.stage("decode", setup=load_vae)
def decode(ctx, vae):
    frames = [vae.decode(chunk["latents"]) for chunk in ctx.input.chunks()]
    return stagewire.Result({"video.mp4": stagewire.Artefact(to_mp4(frames))})
```
"""

from __future__ import annotations

import dataclasses
import inspect
import mimetypes
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, overload

from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from .context import Context

__all__ = ["Artefact", "Bundle", "Kind", "Output", "Payload", "Result", "Stage", "stage"]

M = TypeVar("M")

Bundle: TypeAlias = "Mapping[str, Any]"
"""``{name: tensor | None | [tensor, ...]}``. A tensor is a torch tensor, a NumPy array, anything with ``__dlpack__``,
or bytes-like memory (then uint8 of shape ``[n]``), in host memory."""

Kind: TypeAlias = str
"""``embedding``, ``latent``, ``checkpoint``, ``feature`` or ``frames``."""

Output: TypeAlias = "Bundle | Payload | Result | None"
"""What a stage function may return; ``None`` is an empty bundle."""

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclasses.dataclass(frozen=True, slots=True)
class Payload:
    """A bundle with more to say than its tensors.

    Attributes:
        tensors: ``{name: tensor | None | [tensor, ...]}``; any shape, also 0-dim and empty; dtypes bool, int8 to int64,
            uint8 to uint64, float16, bfloat16, float32, float64, float8_e4m3fn, float8_e5m2 and complex64, bit exact.
        metadata: Any JSON-like value: None, bool, int, float, str, list, dict with str keys; at most 16 MiB as JSON.
        kind: What the payload is for: ``embedding``, ``latent``, ``checkpoint``, ``feature`` or ``frames``.
    """

    tensors: Bundle
    metadata: Any = None
    kind: Kind = "feature"


@dataclasses.dataclass(frozen=True, slots=True)
class Artefact:
    """One finished file.

    Attributes:
        data: The bytes of the file: bytes-like, or the path of a file to read.
        media_type: For example ``video/mp4``; guessed from the artefact's name where it is empty.
    """

    data: bytes | bytearray | memoryview | os.PathLike[str]
    media_type: str = ""

    def content(self) -> bytes | bytearray | memoryview:
        """The bytes of the file, read from disk where `data` is a path."""
        if isinstance(self.data, os.PathLike):
            return Path(self.data).read_bytes()
        return self.data


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """What a last stage returns: the finished files of the job.

    Attributes:
        artefacts: File name to `Artefact`. Names are shown to people; the server stores the files under ids of its own.
        info: Any JSON-like value about the result, such as frames per second.
    """

    artefacts: Mapping[str, Artefact]
    info: Any = None

    def to_payload(self) -> Payload:
        """The payload that carries this result to the server: one uint8 tensor ``[nbytes]`` per file.

        Raises:
            Invalid: A name is empty or holds a path, or a value is not an `Artefact`.
        """
        listed = []
        tensors: dict[str, Any] = {}
        for name, artefact in self.artefacts.items():
            if not isinstance(artefact, Artefact):
                raise Invalid(
                    f"artefact {name!r} is a {type(artefact).__name__}: wrap its bytes in stagewire.Artefact(data)",
                    reason="result.artefact",
                )
            if not name or "/" in name or "\0" in name or name in {".", ".."}:
                raise Invalid(f"{name!r} is not a file name: leave out folders", reason="result.artefact")
            media_type = artefact.media_type or mimetypes.guess_type(name)[0] or "application/octet-stream"
            listed.append({"name": name, "media_type": media_type})
            tensors[name] = artefact.content()
        return Payload(tensors, metadata={"artefacts": listed, "info": self.info}, kind="frames")


@dataclasses.dataclass(frozen=True, slots=True)
class Stage(Generic[M]):
    """A stage of a pipeline: a function, and how to load what it needs. Made by `stage`; calling it calls the function.

    Attributes:
        name: Name of the stage, as the pipeline's TOML has it.
        function: ``function(ctx, model)``, or ``function(ctx)`` where there is no `setup`.
        setup: Loads the model. Runs before the worker is ready.
        setup_per_slot: With ``slots`` above 1: whether each slot loads a model of its own. Without it all slots share
            one model, whose code must then bear being called by several threads at once.
        batch: Whether the function takes a list of contexts and returns a list of outputs.
    """

    name: str
    function: Callable[..., Any]
    setup: Callable[[], M] | None = None
    setup_per_slot: bool = False
    batch: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        return self.function(*args, **kwargs)

    def load(self) -> M | None:
        """Runs `setup`; None where there is none."""
        return None if self.setup is None else self.setup()

    def run(self, ctx: Context, model: M | None) -> Output:
        """Calls the function as a worker does, for one job."""
        if not self.batch:
            single: Output = self._call(ctx, model)
            return single
        (output,) = self.run_batch([ctx], model)
        if isinstance(output, BaseException):
            raise output
        return output

    def run_batch(self, batch: Sequence[Context], model: M | None) -> list[Output | BaseException]:
        """Calls the function as a worker does, for several jobs: one output for each, or why there is none.

        Raises:
            Invalid: It returned something else.
        """
        if not self.batch:
            return [self._call(ctx, model) for ctx in batch]
        outputs = self._call(list(batch), model)
        if isinstance(outputs, list | tuple) and len(outputs) == len(batch):
            return list(outputs)
        what = f"{len(outputs)} outputs" if isinstance(outputs, list | tuple) else f"a {type(outputs).__name__}"
        raise Invalid(
            f"stage {self.name!r} was given a batch of {len(batch)} and returned {what}: return a list with one output "
            "for each context, in their order",
            reason="stage.output",
            details={"stage": self.name, "batch": str(len(batch))},
        )

    def _call(self, given: Any, model: M | None) -> Any:
        return self.function(given) if self.setup is None else self.function(given, model)


@overload
def stage(
    name: str, *, setup: Callable[[], M], setup_per_slot: bool = False, batch: Literal[False] = False
) -> Callable[[Callable[[Context, M], Output]], Stage[M]]: ...
@overload
def stage(
    name: str, *, setup: None = None, setup_per_slot: bool = False, batch: Literal[False] = False
) -> Callable[[Callable[[Context], Output]], Stage[None]]: ...
@overload
def stage(
    name: str, *, setup: Callable[[], M], setup_per_slot: bool = False, batch: Literal[True]
) -> Callable[[Callable[[list[Context], M], Sequence[Output | BaseException]]], Stage[M]]: ...
@overload
def stage(
    name: str, *, setup: None = None, setup_per_slot: bool = False, batch: Literal[True]
) -> Callable[[Callable[[list[Context]], Sequence[Output | BaseException]]], Stage[None]]: ...
def stage(
    name: str, *, setup: Callable[[], Any] | None = None, setup_per_slot: bool = False, batch: bool = False
) -> Callable[[Callable[..., Any]], Stage[Any]]:
    """Makes a function a stage of a pipeline.

    The function gets a `Context` and, where there is a `setup`, what that returned. It returns a bundle of tensors
    ``{name: tensor | None | [tensor, ...]}`` or a `Payload`; the last stage returns a `Result`. An exception that it
    raises fails the job with the exception's text; the worker lives on.

    Args:
        name: 1 to 64 of a-z, 0-9, ``-`` and ``_``, starting with a letter.
        setup: Called once without arguments before the worker is ready.
        setup_per_slot: Call `setup` once for each slot of the worker instead.
        batch: The function gets a list of contexts, of jobs of one shape that wait at the same time, and returns one
            output for each, in order; an exception in place of an output fails that job alone. Where it raises for
            several, it is called again for each alone, and fails those for which it raises then. A worker with
            ``max-batch`` gives it more than one.

    Raises:
        Invalid: The name is not allowed, or the function does not take what it will be given.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} is not a stage name: use 1 to 64 of a-z, 0-9, '-' and '_', starting with a letter",
            reason="stage.name",
        )

    def decorate(function: Callable[..., Any]) -> Stage[Any]:
        first = "batch" if batch else "ctx"
        given = (first,) if setup is None else (first, "model")
        try:
            inspect.signature(function).bind(*given)
        except TypeError:
            shown = getattr(function, "__name__", repr(function))
            raise Invalid(
                f"stage {name!r} will be called as {shown}({', '.join(given)}), "
                f"but it is defined as {shown}{inspect.signature(function)}",
                reason="stage.signature",
            ) from None
        return Stage(name=name, function=function, setup=setup, setup_per_slot=setup_per_slot, batch=batch)

    return decorate
