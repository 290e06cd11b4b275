"""What callers give, checked at the call: the wrong type, or what cannot be said in another process, is `Invalid`."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

from ._native import parse_bytes
from .errors import Invalid

LONGEST = 1e9
"""Most seconds of a deadline: some thirty years."""


def text(what: str, value: Any) -> str:
    """Text that can be told to others: lone surrogates, which have no bytes, cannot.

    Raises:
        Invalid: It is something else.
    """
    if not isinstance(value, str):
        raise _type(what, value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Invalid(
            f"{what} is {value[:64]!r}, which has no bytes in UTF-8: {error.reason}",
            reason="argument.text",
            details={"argument": what},
        ) from None
    return value


def printable(value: object) -> str:
    """The text of an exception, or of anything else, as others can be told it: what has no bytes is escaped."""
    try:
        said = str(value)
    except Exception:
        return "(its text cannot be had)"
    return said.encode(errors="backslashreplace").decode()


def shown(value: object) -> str:
    """What a message says of a value, 80 characters at most: also of one without `repr`, as a number of 5000 digits."""
    try:
        said = repr(value)
    except Exception:
        said = f"a {type(value).__name__} that cannot be shown"
    return said[:80]


def data(what: str, value: Any) -> bytes:
    """Bytes, from what has some.

    Raises:
        Invalid: It is something else.
    """
    if not isinstance(value, bytes | bytearray | memoryview):
        raise _type(what, value, "bytes")
    return bytes(value)


def whole(what: str, value: Any, rule: str, most: int, *, reason: str, of: str | None = None) -> int:
    """A whole number from 0 to `most`, also one of NumPy; `of` is the component that it belongs to.

    Raises:
        Invalid: It is something else; the message ends with `rule`.
    """
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= most:
        details = {what: printable(value)[:80]}
        where = what
        if of is not None:
            details["component"] = of
            where = f"{what}[{of!r}]"
        raise Invalid(f"{where} is {shown(value)}; {rule}", reason=reason, details=details)
    return number


def seconds(what: str, value: Any) -> float:
    """A number of seconds, 0 or more.

    Raises:
        Invalid: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _type(what, value, "a number of seconds")
    if not 0 <= value <= LONGEST:
        raise Invalid(
            f"{what} is {value:g} s; it must be 0 to {LONGEST:g}",
            reason="argument.seconds",
            details={"argument": what, "seconds": repr(value)},
        )
    return float(value)


def path(what: str, value: Any) -> Path:
    """A path in the file system.

    Raises:
        Invalid: It is none.
    """
    try:
        return Path(value)
    except TypeError:
        raise _type(what, value, "a path") from None


def nbytes(what: str, value: Any) -> int:
    """A number of bytes, or text such as ``"512MiB"``.

    Raises:
        Invalid: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _type(what, value, 'a number of bytes, or text such as "512MiB"')
    return parse_bytes(text(what, str(value)))


def flag(what: str, value: Any) -> bool:
    """True or False; nothing else, as a text such as ``"no"`` would be True.

    Raises:
        Invalid: It is something else.
    """
    if not isinstance(value, bool):
        raise _type(what, value, "True or False")
    return value


def function(what: str, value: Any) -> None:
    """Checks that it can be called.

    Raises:
        Invalid: It cannot.
    """
    if value is not None and not callable(value):
        raise _type(what, value, "a function")


def _type(what: str, value: Any, expected: str) -> Invalid:
    return Invalid(
        f"{what} is {type(value).__name__}; it must be {expected}",
        reason="argument.type",
        details={"argument": what, "found": type(value).__name__, "expected": expected},
    )
