"""The refusal of the handshake."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import Unsupported

if TYPE_CHECKING:
    from ..errors import StagewireError


class Incompatible(Unsupported):
    """Two engines cannot hand over to each other, whatever the room. Nothing has moved; other pairs go on.

    ``details`` has both sides' values as ``prefill`` and ``decode``.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_made, (self.message, self.reason, self.details))


def _made(message: str, reason: str, details: dict[str, str]) -> Incompatible:
    return Incompatible(message, reason=reason, details=details)


def as_incompatible(error: StagewireError) -> StagewireError:
    """The same error as `Incompatible`, where it is a handshake's."""
    if isinstance(error, Unsupported) and {"prefill", "decode"} <= error.details.keys():
        return Incompatible(error.message, reason=error.reason, details=error.details)
    return error
