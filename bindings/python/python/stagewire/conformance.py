"""The conformance suite of Stagewire's transports, for transports of this package.

```python
from stagewire.conformance import run
from stagewire.mooncake import EngineTransport

for outcome in run(EngineTransport):
    print(outcome.check, outcome.problem or outcome.skipped or "ok")
```

Each check moves bytes between two sides in one process and compares every one of them. What needs real processes, such
as the death of a peer, is for the transport's own tests. Transports written in Rust run the same suite:
``stagewire_transfer::conformance``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import _native

if TYPE_CHECKING:
    from collections.abc import Callable

    from .mooncake import EngineTransport

__all__ = ["Outcome", "run"]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check.

    Attributes:
        check: Its name.
        problem: What is wrong, or None.
        skipped: Why it was not run, where it does not apply to the transport, or None.
    """

    check: str
    problem: str | None
    skipped: str | None


def run(make: Callable[[], EngineTransport]) -> list[Outcome]:
    """Runs all checks, each with two transports that ``make`` makes. Takes some seconds."""

    def side() -> _native.EngineTransport:
        return make()._native

    return [Outcome(*found) for found in _native.run_conformance(side)]
