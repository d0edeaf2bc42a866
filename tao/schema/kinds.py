"""The kinds of value a field may hold, and the one check that every value passes on its way in.

A small closed set on purpose: each kind has one msgpack form, so that a blob written by any language reads the same in
every other. A kind never changes for a field's life (see `compatibility`), because stored blobs carry no kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

INT64_MIN: Final = -(2**63)
INT64_MAX: Final = 2**63 - 1
UINT64_MAX: Final = 2**64 - 1
_SHOWN_CHARACTERS: Final = 40  # of a wrong value in a message: enough to recognise it, too short to flood a log

FieldValue = bool | int | float | str | bytes | list[str] | list[int]


class FieldKind(StrEnum):
    """What a field holds; the value is the word used in schema files."""

    BOOL = "bool"
    INT = "int"
    UINT = "uint"
    FLOAT = "float"
    STR = "str"
    BYTES = "bytes"
    LIST_STR = "list[str]"
    LIST_INT = "list[int]"


class WrongValue(ValueError):
    """A value does not fit its kind. Internal to the package: callers see `InvalidField` or `SchemaError` instead,
    which also name the type and the field."""


def _wrong(expected: str, value: object) -> WrongValue:
    shown = repr(value)
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    return WrongValue(f"expected {expected}, got {type(value).__name__} {shown}")


def _bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise _wrong("bool", value)


def _whole(value: object, low: int, high: int, expected: str) -> int:
    # bool is an int to Python but not to msgpack: stored as one, it would come back as another kind.
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return int(value)
    raise _wrong(expected, value)


def _int(value: object) -> int:
    return _whole(value, INT64_MIN, INT64_MAX, "int (signed 64-bit)")


def _uint(value: object) -> int:
    return _whole(value, 0, UINT64_MAX, "uint (unsigned 64-bit)")


def _float(value: object) -> float:
    if isinstance(value, float):
        return float(value)
    # Whole numbers are accepted because many msgpack encoders write 1.0 as the integer 1, and because people write
    # `lat: 47`. One that a double cannot hold would be changed silently, so it is refused.
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53:
        return float(value)
    raise _wrong("float", value)


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise _wrong("str", value)
    text = value if type(value) is str else str.__str__(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _wrong("str of valid Unicode (without lone surrogates)", value) from None
    return text


def _bytes(value: object) -> bytes:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise _wrong("bytes", value)


def _items(value: object, kind: FieldKind) -> list[object]:
    if isinstance(value, (list, tuple)):
        return list(value)
    raise _wrong(kind.value, value)


def _list_str(value: object) -> list[str]:
    return [_str(item) for item in _items(value, FieldKind.LIST_STR)]


def _list_int(value: object) -> list[int]:
    return [_int(item) for item in _items(value, FieldKind.LIST_INT)]


_CHECKS: Final[Mapping[FieldKind, Callable[[object], FieldValue]]] = {
    FieldKind.BOOL: _bool,
    FieldKind.INT: _int,
    FieldKind.UINT: _uint,
    FieldKind.FLOAT: _float,
    FieldKind.STR: _str,
    FieldKind.BYTES: _bytes,
    FieldKind.LIST_STR: _list_str,
    FieldKind.LIST_INT: _list_int,
}


def check_of(kind: FieldKind) -> Callable[[object], FieldValue]:
    """The check of a kind: returns the value in its plain built-in type (a subclass of str becomes str, a tuple a
    list, a whole number in a float field a float), or raises `WrongValue` with what was expected and what came."""
    return _CHECKS[kind]
