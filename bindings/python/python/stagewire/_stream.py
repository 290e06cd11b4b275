"""A payload that is published chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Self, TypeVar

from . import errors
from ._handle import Published, StageHandle
from .errors import Invalid

if TYPE_CHECKING:
    from ._device import Staging
    from ._native import Publication

H = TypeVar("H", bound=Published)


class Stream(Generic[H]):
    """What streams have in common, whether they block or are awaited."""

    def __init__(self, publication: Publication, handle: H, staging: Staging) -> None:
        self._publication = publication
        self._staging = staging
        self.handle = handle

    def ready(self, index: int) -> None:
        """Shows chunk `index`; its bytes must not change any more. Consumers see chunks in order.

        Raises:
            Invalid: There is no such chunk.
            Conflict: The payload has ended.
        """
        if index < 0:
            raise Invalid(f"chunk {index} does not exist: chunks count from 0", reason="payload.chunks")
        if self._staging:
            self._staging.ready(self._publication, index)
        else:
            self._publication.ready(index)

    def fail(self, reason: str | BaseException) -> None:
        """Gives up: consumers get this reason instead of more chunks."""
        if isinstance(reason, errors.StagewireError):
            self._publication.fail(reason.error_class, reason.reason, reason.message)
        elif isinstance(reason, BaseException):
            self._publication.fail("internal", "stage.exception", f"{type(reason).__name__}: {reason}")
        else:
            self._publication.fail("internal", "payload.failed", reason)

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)
        if error is not None or not (self._publication.sealed or self._staging.is_complete):
            self._publication.close()


class StreamingPublish(Stream[StageHandle]):
    """A payload whose chunks become visible one by one, while later ones are still being computed.

    As a context manager: leaving it by an exception fails the payload, and the consumer gets that reason at once.

    Attributes:
        handle: For the consumer; it may be handed over at once.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave(error)
