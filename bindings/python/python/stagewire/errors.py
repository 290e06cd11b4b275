"""The exceptions of Stagewire: one class for each class of error.

Every exception carries ``reason``, a key such as ``peer.lost`` that programs compare, and ``details``, the values
that the message shows, by name. Where Python has a built-in exception of the same meaning, the class derives from it
too: ``except TimeoutError`` catches `Deadline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .stages import Payload

__all__ = [
    "BY_CLASS",
    "Cancelled",
    "Conflict",
    "Corrupt",
    "Deadline",
    "Denied",
    "Exhausted",
    "Fenced",
    "Internal",
    "Invalid",
    "NotFound",
    "RateLimited",
    "StagewireError",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "Yielded",
    "from_failure",
]


class StagewireError(Exception):
    """Base of every exception that this package raises on its own behalf.

    Attributes:
        error_class: Name of the class as it stands in JSON, such as ``not_found``.
        message: What happened, to what, and what to do.
        reason: Key of the reason, such as ``peer.lost``.
        details: Values by name.
    """

    error_class: ClassVar[str] = "internal"

    def __init__(self, message: str, *, reason: str = "", details: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.error_class
        self.details: dict[str, str] = dict(details or {})

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (from_failure, (self.error_class, self.reason, self.message, self.details))


class Invalid(StagewireError, ValueError):
    """The input is wrong; the same call will fail again."""

    error_class = "invalid"


class NotFound(StagewireError, LookupError):
    """What the call names does not exist."""

    error_class = "not_found"


class Conflict(StagewireError):
    """It contradicts something that exists."""

    error_class = "conflict"


class Fenced(StagewireError):
    """The caller acts for an attempt that was superseded."""

    error_class = "fenced"


class Exhausted(StagewireError):
    """A bounded resource is used up."""

    error_class = "exhausted"


class RateLimited(StagewireError):
    """The caller asks too often."""

    error_class = "rate_limited"


class Unavailable(StagewireError, ConnectionError):
    """A peer or the server cannot be reached, or died."""

    error_class = "unavailable"


class Deadline(StagewireError, TimeoutError):
    """Time ran out."""

    error_class = "deadline"


class Cancelled(StagewireError):
    """Somebody asked to stop. A stage function lets it pass: the worker knows what to do."""

    error_class = "cancelled"


class Unauthenticated(StagewireError, PermissionError):
    """The caller did not say who it is."""

    error_class = "unauthenticated"


class Denied(StagewireError, PermissionError):
    """The caller may not do this."""

    error_class = "denied"


class Unsupported(StagewireError, NotImplementedError):
    """This build, host or backend cannot do it."""

    error_class = "unsupported"


class Corrupt(StagewireError):
    """Bytes are not what they were."""

    error_class = "corrupt"


class Internal(StagewireError, RuntimeError):
    """A defect of Stagewire, or an exception in a stage's own code."""

    error_class = "internal"


class Yielded(BaseException):
    """The attempt has handed over its state and ended: another one goes on from there. Raised by `Context.yield_`.

    A stage function lets it pass, as a generator does with `GeneratorExit`; it is no `Exception`, so that
    ``except Exception`` lets it pass too. Whoever swallows it changes nothing: what the function returns is dropped.

    Attributes:
        checkpoint: What was handed over, a `stagewire.Payload`; None where the next attempt goes on from the last
            checkpoint, or from the beginning.
        done: Units done.
        total: Units in all; 0 where that is not known.
        unit: What is counted.
    """

    def __init__(self, checkpoint: Payload | None, done: int, total: int, unit: str) -> None:
        of = f" of {total}" if total else ""
        super().__init__(f"yielded after {done}{of} {unit}s")
        self.checkpoint = checkpoint
        self.done = done
        self.total = total
        self.unit = unit


BY_CLASS: dict[str, type[StagewireError]] = {
    kind.error_class: kind
    for kind in (
        Invalid,
        NotFound,
        Conflict,
        Fenced,
        Exhausted,
        RateLimited,
        Unavailable,
        Deadline,
        Cancelled,
        Unauthenticated,
        Denied,
        Unsupported,
        Corrupt,
        Internal,
    )
}
"""The exception class of each error class, by its name in JSON."""


def from_failure(
    error_class: str, reason: str, message: str, details: Mapping[str, str] | None = None
) -> StagewireError:
    """The exception for a failure that came from another process.

    A class that this version does not know becomes `Internal`, so that a newer server can still be understood.
    """
    kind = BY_CLASS.get(error_class, Internal)
    return kind(message, reason=reason, details=details)
