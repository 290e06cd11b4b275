"""A process of its own that does what it is told, and can be stopped and killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection


class Remote:
    """Runs module-level functions, one at a time, in another process."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._mine, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What the function returns, or raises, there."""
        self.start(function, *arguments, **options)
        return self.answer()

    def start(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        self._mine.send((function, arguments, options))

    def answer(self) -> Any:
        assert self._mine.poll(60), "no answer within a minute"
        result, error = self._mine.recv()
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        """As ``kill -9``."""
        self.process.kill()
        self.process.join(10)

    @contextlib.contextmanager
    def stopped(self) -> Any:
        """Does nothing, and does not know it."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()


def _serve(pipe: Connection) -> None:
    while True:
        try:
            function, arguments, options = pipe.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, Exception | None] = (function(*arguments, **options), None)
        except Exception as error:
            answer = (None, error)
        pipe.send(answer)
