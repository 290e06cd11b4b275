"""The conformance suites of Stagewire's transports and stores, for those of this package.

```python
from stagewire.conformance import run
from stagewire.mooncake import EngineTransport

for outcome in run(EngineTransport):
    print(outcome.check, outcome.problem or outcome.skipped or "ok")
```

`run_store` does the same with a store, such as `stagewire.mooncake_store.MooncakeStore`. What that cannot promise is
declared, and the checks of it say so.

Each check moves bytes between two sides in one process and compares every one of them. What needs real processes, such
as the death of a peer, is for the transport's own tests. Those written in Rust run the same suites:
``stagewire_transfer::conformance`` and ``stagewire_store::conformance``.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from . import _native

if TYPE_CHECKING:
    from collections.abc import Callable

    from .mooncake import EngineTransport
    from .mooncake_store import MooncakeStore

__all__ = ["Outcome", "run", "run_store"]


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one check.

    Attributes:
        check: Its name.
        problem: What is wrong, or None.
        skipped: Why it was not run, where it does not apply, or None.
    """

    check: str
    problem: str | None
    skipped: str | None


def run(make: Callable[[], EngineTransport]) -> list[Outcome]:
    """Runs all checks, each with two transports that ``make`` makes. Takes some seconds."""

    def side() -> _native.EngineTransport:
        return make()._native

    return [Outcome(*found) for found in _native.run_conformance(side)]


def run_store(store: MooncakeStore) -> list[Outcome]:
    """Runs all checks with a store that has room for some MiB. What they write is removed only in part."""
    return [Outcome(*found) for found in _native.run_store_conformance(store)]
