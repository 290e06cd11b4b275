"""The mappings that configure a connector: where payloads are kept, how bytes move, and who may connect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import _arguments
from .errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

TRANSPORTS = ("shm", "cma", "tcp", "mooncake", "nixl")
STORES = ("host", "mooncake")
MOONCAKE_KEYS = {"master", "host", "segment_bytes", "block_bytes", "protocol", "devices", "start_deadline"}


def transports(te_config: Mapping[str, Any] | None) -> list[str] | None:
    """What carries the bytes, the preferred one first, from ``te_config``; None where it does not say.

    Raises:
        Invalid: A key or value is not known.
    """
    given = _checked("te_config", te_config, {"transports"}).get("transports")
    if given is None:
        return None
    if not isinstance(given, list | tuple) or not given:
        raise Invalid(
            f"te_config has the transports {given!r}; it must be a list of some of {', '.join(TRANSPORTS)}",
            reason="connector.config",
            details={"transports": str(given)},
        )
    return [_one_of("te_config", "transport", name, TRANSPORTS) for name in given]


def network(given: Mapping[str, Any] | None) -> tuple[str, str | None, str | None] | None:
    """Where a connector listens, what others are told, and the token, from ``network``.

    Raises:
        Invalid: A key is not known, or a value is not text.
    """
    found = _checked("network", given, {"bind", "advertise", "token"})
    for key, value in found.items():
        if value is not None and not isinstance(value, str):
            raise Invalid(
                f"network has a {key} of type {type(value).__name__}; it must be text",
                reason="connector.config",
                details={"key": key},
            )
        if value is not None:
            _arguments.text(f"{key} of network", value)
    return (found.get("bind") or "127.0.0.1", found.get("advertise"), found.get("token")) if found else None


def store(store_config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What a `stagewire.mooncake_store.MooncakeStore` is made with, from ``store_config``; None for the host store.

    Raises:
        Invalid: A key or value is not known.
    """
    known = {"backend"}
    if hasattr(store_config, "items") and dict(store_config or {}).get("backend") == "mooncake":
        known |= MOONCAKE_KEYS
    given = _checked("store_config", store_config, known)
    if _one_of("store_config", "backend", given.pop("backend", STORES[0]), STORES) == "host":
        return None
    if not isinstance(given.get("master"), str):
        raise Invalid(
            f"the master in store_config is {given.get('master')!r}; it must be text: 'host:port'",
            reason="connector.config",
        )
    return given


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
