"""What the children of tests with Mooncake Store have in common: told on stdin what to do, answering on stdout."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

from stagewire.errors import StagewireError

if TYPE_CHECKING:
    from collections.abc import Callable


def say(answer: Any) -> None:
    """Answers; lines of Mooncake's own go between."""
    print(f"@@{json.dumps(answer)}", flush=True)  # noqa: T201


def serve(make: Callable[..., Any]) -> None:
    """Does what it is told, by the methods of what `make` makes of the arguments; ends the process."""
    peer = make(**json.loads(sys.argv[1]))
    say("ready")
    for line in sys.stdin:
        command, arguments = json.loads(line)
        try:
            answer = getattr(peer, command)(*arguments)
        except StagewireError as error:
            answer = {"reason": error.reason, "message": error.message}
        say(answer)
    # The wheel's threads may hang in the interpreter's end.
    os._exit(0)
