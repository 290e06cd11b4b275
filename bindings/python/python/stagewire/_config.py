"""The two mappings that configure a connector: where payloads are kept, and how bytes move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

TRANSPORTS = ("auto", "shm", "tcp")
STORES = ("host",)


def transport(te_config: Mapping[str, Any] | None) -> str:
    """How memory outside the arena is offered, from ``te_config``.

    Raises:
        Invalid: A key or value is not known.
    """
    given = _checked("te_config", te_config, {"transport"})
    return _one_of("te_config", "transport", given.get("transport", TRANSPORTS[0]), TRANSPORTS)


def store(store_config: Mapping[str, Any] | None) -> str:
    """Which store keeps payloads, from ``store_config``.

    Raises:
        Invalid: A key or value is not known.
    """
    given = _checked("store_config", store_config, {"backend"})
    return _one_of("store_config", "backend", given.get("backend", STORES[0]), STORES)


def _checked(name: str, given: Mapping[str, Any] | None, known: set[str]) -> dict[str, Any]:
    if given is None:
        return {}
    if not hasattr(given, "items"):
        raise Invalid(f"{name} is a {type(given).__name__}; it must be a mapping", reason="connector.config")
    found = dict(given)
    if unknown := [key for key in found if key not in known]:
        raise Invalid(
            f"{name} has the unknown key {unknown[0]!r}; it may have {', '.join(sorted(known))}",
            reason="connector.config",
            details={"key": str(unknown[0])},
        )
    return found


def _one_of(name: str, key: str, found: Any, known: tuple[str, ...]) -> str:
    if found not in known:
        raise Invalid(
            f"unknown {key} {found!r} in {name}; it is {' or '.join(known)}",
            reason="connector.config",
            details={key: str(found)},
        )
    return str(found)
