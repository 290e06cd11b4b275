"""A payload that is published chunk by chunk."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from . import _arguments, errors
from ._handle import Published, StageHandle
from ._payload import MAX_CHUNKS

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
        number = _arguments.whole("chunk", index, "chunks count from 0", MAX_CHUNKS, reason="payload.chunks")
        if self._staging:
            self._staging.ready(self._publication, number)
        else:
            self._publication.ready(number)

    def fail(self, reason: str | BaseException) -> None:
        """Gives up: consumers get this reason instead of more chunks. Nothing happens to a payload that has ended."""
        if isinstance(reason, errors.StagewireError):
            self._publication.fail(reason.error_class, reason.reason, _arguments.printable(reason))
        elif isinstance(reason, BaseException):
            said = f"{type(reason).__name__}: {_arguments.printable(reason)}"
            self._publication.fail("internal", "stage.exception", said)
        else:
            self._publication.fail("internal", "payload.failed", _arguments.text("reason", reason))

    def _leave(self, error: BaseException | None) -> None:
        if error is not None:
            self.fail(error)
        elif not (self._publication.sealed or self._staging.is_complete):
            self._publication.abandon()

    def __del__(self) -> None:
        # Nobody is left who could show the chunks that are missing; its handle may live on.
        with contextlib.suppress(AttributeError, errors.StagewireError):
            self._leave(None)


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
