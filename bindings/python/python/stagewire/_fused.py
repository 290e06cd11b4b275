"""Several stages as one, in one process: disaggregation off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Invalid
from .stages import Stage, stage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .context import Context, Input
    from .stages import Output


def fuse(name: str, stages: Sequence[Stage[Any]]) -> Stage[list[Any]]:
    """A stage that runs a chain of stages one after the other, each on the output of the one before.

    Their functions are called as they are: where a stage reads ``ctx.input`` or ``ctx.inputs["encode"]``, it gets what
    the one before returned, from memory. Nothing is published, moved or stored but what the last one returns.
    ``fetch()`` copies, as ever, so that a stage may write to what it was given; ``fetch(mapped=True)`` does not.

    Args:
        name: Name of the stage that they become.
        stages: First to last. Each one's `setup` is called when the fused stage is set up.

    Raises:
        Invalid: There is none, two have the same name, or the name is not allowed.
    """
    chain = tuple(stages)
    names = [part.name for part in chain]
    if not chain or len(set(names)) < len(names):
        what = "there is none" if not chain else f"they are {', '.join(names)}"
        raise Invalid(f"stage {name!r} is to fuse stages with names of their own, and {what}", reason="stage.fuse")

    def load() -> list[Any]:
        return [part.load() for part in chain]

    def run(ctx: Context, models: list[Any]) -> Output:
        # What reads tensors is needed by no process that only defines stages.
        from .local import LocalInput, as_payload

        output: Output = None
        inputs: dict[str, Input] = {}
        for part, model in zip(chain, models, strict=True):
            output = part.run(ctx.within(part.name, inputs), model)
            if part is not chain[-1]:
                inputs = {part.name: LocalInput(part.name, as_payload(part.name, output))}
        return output

    per_slot = any(part.setup_per_slot for part in chain)
    return stage(name, setup=load, setup_per_slot=per_slot)(run)
