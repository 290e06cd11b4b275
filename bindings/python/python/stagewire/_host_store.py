"""A store of this process, for connectors of the same run directory."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

from . import _arguments, _config, _native, _rundir

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class HostStore:
    """Keeps payloads in the shared memory of this process, apart from the processes that made them.

    Connectors with ``transfer_mode="store"`` find it through the run directory. What is in it is lost when it is
    closed; and when its process ends otherwise, unless it has a ``data_dir``. ``stagewire store`` is the same as a
    program.

    Args:
        capacity: Most bytes of payloads, as a number or as ``"512MiB"``. Who finds it full waits for room, and is
            refused with `Exhausted` at the deadline.
        network: As for `DiffusionConnector`, where connectors on other hosts read from this store.
        run_dir: As for `DiffusionConnector`. One store per run directory; a later one takes over from an earlier one.
        spill_dir: A directory on a disk, of this store alone: what finds no room in memory goes there, and is read from
            there.
        spill_bytes: Most bytes of files in it.
        data_dir: A directory of this store alone, where the next one finds what this one had when its process was
            killed, for ten minutes: a small process keeps the memory meanwhile. Files of ``spill_dir`` are found after
            a reboot, too.

    Raises:
        Invalid: The size is not allowed.
        Unavailable: The run directory, or that for files, cannot be used.
        Conflict: Another store uses that directory.

    Attributes:
        recovered: Payloads that came over from the store before, and those that are lost because the process that kept
            its memory had ended, too.
    """

    def __init__(
        self,
        capacity: int | str = "1GiB",
        *,
        network: Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        spill_dir: str | os.PathLike[str] | None = None,
        spill_bytes: int | str = "16GiB",
        data_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        size, files = _arguments.nbytes("capacity", capacity), _arguments.nbytes("spill_bytes", spill_bytes)
        spill = None if spill_dir is None else (_arguments.path("spill_dir", spill_dir), files)
        keeper = [sys.executable, "-P", "-c", "from stagewire._native import run_keeper; run_keeper()"]
        durable = None if data_dir is None else (_arguments.path("data_dir", data_dir).absolute(), keeper)
        reached = _config.network(network)
        self._native = _native.HostStore(_rundir.find(run_dir), size, spill, durable, network=reached)
        self.recovered = self._native.recovered

    def usage(self) -> tuple[int, int]:
        """Bytes in use, and most bytes."""
        return self._native.usage()

    def live(self) -> list[str]:
        """Ids of the payloads in the store."""
        return self._native.live()

    def stats(self) -> dict[str, int]:
        """Numbers, as those of `DiffusionConnector.stats`."""
        return self._native.stats()

    def close(self) -> None:
        """Drops every payload, also of a store with a ``data_dir``. Calling it again does nothing."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
