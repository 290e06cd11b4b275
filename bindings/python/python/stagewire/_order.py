"""A payload that is to be published, checked and taken down at the call."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

from . import _arguments, _device
from ._bundle import Imported
from ._handle import naming
from ._payload import StagePayload, to_json
from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ._device import Events


@dataclasses.dataclass(frozen=True, slots=True)
class Order:
    """What does not change any more, whatever the caller does with mappings, lists and streams.

    Attributes:
        request_id: The request that it belongs to.
        kind: Its kind, as it was given.
        bundle: The tensors by name.
        metadata: As JSON.
        chunking: Dimension and count, where it is cut.
        chunk_dim: The dimension that every tensor must have, where it is not the first one.
        lease: Its lease, as text.
        consumer: Address of the consumer, where it is known.
        expires: Seconds after which it is deleted unread.
        strict: Whether copies are refused.
        events: What the caller had queued on the devices of the tensors.
    """

    request_id: str
    kind: str
    bundle: Mapping[str, Any]
    metadata: str
    chunking: tuple[int, int] | None
    chunk_dim: int
    lease: str
    consumer: bytes | None
    expires: float | None
    strict: bool
    events: Events

    @classmethod
    def take(cls, stage: str, payload: Any, consumer: Any, expires: Any, *, strict: bool) -> Self:
        """Takes it down.

        Raises:
            Invalid: Something of it is not what it must be.
        """
        if not isinstance(payload, StagePayload):
            raise Invalid(
                f"the payload is a {type(payload).__name__}; it must be a StagePayload",
                reason="argument.type",
                details={"argument": "payload", "found": type(payload).__name__, "expected": "StagePayload"},
            )
        request = _arguments.text("request_id", payload.request_id)
        with naming(request, stage):
            bundle = payload.bundle()
            return cls(
                request_id=request,
                kind=_arguments.text("kind", payload.kind),
                bundle=bundle,
                metadata=to_json(payload.metadata),
                chunking=payload.chunking(),
                chunk_dim=payload.chunk_dim or 0,
                lease=payload.lease_text(),
                consumer=None if consumer is None else _arguments.data("consumer", consumer),
                expires=None if expires is None else _arguments.seconds("expires", expires),
                strict=strict,
                # What is strict takes nothing from a device, or takes it later.
                events={} if strict else _device.moments(_device.on_devices(bundle)),
            )

    def imported(self, place: Callable[[int, Any], Any] | None) -> Imported:
        """The tensors as native ones. May copy.

        Raises:
            Invalid: They are none, or cannot be cut like that.
        """
        imported = Imported(self.bundle, strict=self.strict, place=place)
        for tensor in imported.tensors():
            # The first dimension is the default: what is not cut need not have it.
            if self.chunk_dim >= max(1, len(tensor.shape)):
                raise Invalid(
                    f"chunk_dim {self.chunk_dim} is out of range: the tensor has {len(tensor.shape)} dimensions (shape "
                    f"{list(tensor.shape)})",
                    reason="payload.chunks",
                    details={"chunk_dim": str(self.chunk_dim), "shape": str(list(tensor.shape))},
                )
        return imported
