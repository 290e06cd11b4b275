"""What a process moves caches with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from .. import _arguments, _config, _rundir
from .._allocate import allocate
from .._native import Connector as Native

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from .._bundle import Framework


class Connector:
    """What the senders and receivers of a process have in common: one is enough for all of them.

    Args:
        role: Name of this process in messages: 1 to 64 of a-z, 0-9, ``-`` and ``_``.
        transports: What moves the bytes, the preferred one first: some of ``shm``, ``cma``, ``tcp``, ``mooncake`` and
            ``nixl``; the default is the first three. A sender's buffers are offered by the first that takes them where
            they are: ``shm`` takes those of `allocate`, ``cma`` any, for receivers on this host, the others any, for
            receivers on any host.
        network: How other hosts reach this one: ``{"bind": "10.0.0.5", "token": "..."}``, as for
            `stagewire.diffusion.DiffusionConnector`. Without it, only processes of this host are let in.
        run_dir: Folder through which processes of a host find each other; default ``STAGEWIRE_RUN_DIR``, else the usual
            place.
        arena_bytes: Most bytes of shared memory, as a number or as ``"512MiB"``.

    Raises:
        Invalid: A value is not allowed.
        Unavailable: The run directory cannot be used.
    """

    def __init__(
        self,
        role: str,
        *,
        transports: Sequence[str] | None = None,
        network: Mapping[str, Any] | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        arena_bytes: int | str = "1GiB",
    ) -> None:
        self.role = _arguments.text("role", role)
        self._native = Native(
            _rundir.find(run_dir),
            self.role,
            arena_bytes=_arguments.nbytes("arena_bytes", arena_bytes),
            transports=_config.transports(None if transports is None else {"transports": transports}),
            network=_config.network(network),
        )

    def allocate(self, shape: Sequence[int], dtype: Any = "float32", *, framework: Framework | None = None) -> Any:
        """A tensor in shared memory, for buffers that receivers on this host copy straight out of.

        Args:
            shape: Extents of its dimensions.
            dtype: Of torch or NumPy, or PyTorch's name of one: ``"bfloat16"``.
            framework: ``torch``, ``numpy`` or ``native``; by default that of `dtype`.

        Raises:
            Invalid: There is no such dtype or shape.
            Exhausted: The shared memory is full.
        """
        return allocate(self._native, shape, dtype, framework)

    def stats(self) -> dict[str, int]:
        """Numbers: regions, connections, bytes."""
        return self._native.stats()

    def close(self) -> None:
        """Ends it. Close its senders and receivers before."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
