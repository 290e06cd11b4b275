"""What a diffusers scheduler carries from step to step, as tensors and JSON.

A scheduler's step counts where it is, and multistep solvers keep the last outputs of the model: all of that is in the
scheduler's attributes, together with the schedule and constants, which are small. So all attributes are saved but the
configuration, and what cannot be saved is refused: nothing is forgotten in silence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Invalid, Unsupported

if TYPE_CHECKING:
    from collections.abc import Sequence

_SCHEDULE = ("timesteps", "sigmas")
"""Equal in both schedulers, or one cannot go on from the other."""


def save(scheduler: Any) -> tuple[list[Any], dict[str, Any]]:
    """The scheduler's state: tensors, and a JSON-like value that refers to them.

    Raises:
        Unsupported: It has an attribute that is neither tensor, number, text nor a list of those.
    """
    tensors: list[Any] = []
    attributes = {name: _packed(name, value, tensors) for name, value in _attributes(scheduler).items()}
    return tensors, {"class": type(scheduler).__name__, "attributes": attributes}


def restore(scheduler: Any, tensors: Sequence[Any], saved: dict[str, Any], device: Any) -> None:
    """Gives the scheduler, whose timesteps are set, a saved state. Tensors that were not on the CPU go to `device`.

    Raises:
        Invalid: It is of another class, or has another schedule.
    """
    if type(scheduler).__name__ != saved["class"]:
        raise _another(f"is of a {saved['class']}, and this scheduler is a {type(scheduler).__name__}")
    state = {name: _unpacked(packed, tensors, device) for name, packed in saved["attributes"].items()}
    have = _attributes(scheduler)
    for name in _SCHEDULE:
        if name in state and not _equal(state[name], have.get(name)):
            raise _another(f"has other {name} than this scheduler: has the job, or the pipeline, changed?")
    for name, value in state.items():
        setattr(scheduler, name, value)


def _attributes(scheduler: Any) -> dict[str, Any]:
    # What stands in the place of a method is a hook, such as those that this package puts there. Other things that can
    # be called have a state: the noise sampler of a solver that draws its own.
    return {
        name: value
        for name, value in vars(scheduler).items()
        if name != "_internal_dict" and not callable(getattr(type(scheduler), name, None))
    }


def _packed(name: str, value: Any, tensors: list[Any]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return {"value": value}
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_packed(f"{name}[{i}]", item, tensors) for i, item in enumerate(value)]}
    library = type(value).__module__.partition(".")[0]
    if library == "torch" and hasattr(value, "detach"):
        tensors.append(value.detach())
        return {"tensor": len(tensors) - 1, "cpu": value.device.type == "cpu"}
    if library == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "bif":
        import numpy as np

        tensors.append(np.array(value))
        return {"array": len(tensors) - 1, "dtype": value.dtype.str, "scalar": not hasattr(value, "__len__")}
    raise Unsupported(
        f"the scheduler keeps a {type(value).__name__} in {name!r}, which cannot be saved: such a loop cannot be "
        "interrupted",
        reason="checkpointing.scheduler",
        details={"attribute": name, "type": type(value).__name__},
    )


def _unpacked(packed: dict[str, Any], tensors: Sequence[Any], device: Any) -> Any:
    match packed:
        case {"value": value}:
            return value
        case {"float": text}:
            return float.fromhex(text)
        case {"list": items}:
            return [_unpacked(item, tensors, device) for item in items]
        case {"tuple": items}:
            return tuple(_unpacked(item, tensors, device) for item in items)
        case {"tensor": index, "cpu": on_cpu}:
            return tensors[index] if on_cpu else tensors[index].to(device)
        case {"array": index, "dtype": dtype, "scalar": scalar}:
            array = tensors[index].numpy().astype(dtype)
            return array[()] if scalar else array
    raise _another("is of another version of Stagewire")


def _equal(one: Any, other: Any) -> bool:
    if hasattr(one, "detach") and hasattr(other, "detach"):
        return bool(one.shape == other.shape and (one == other.to(one.device)).all())
    same = one == other
    return bool(same.all()) if hasattr(same, "all") else bool(same)


def _another(what: str) -> Invalid:
    return Invalid(f"the checkpoint {what}", reason="checkpointing.state")
