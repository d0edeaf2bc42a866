"""Encode and decode the fields of an object or association in its ``data`` blob.

A blob is one msgpack map from field number to value, ascending by number, or empty when no field is set. Equal fields
give equal bytes, so caches and databases can be compared byte by byte. Every rewrite keeps numbers that this schema
does not know, because another process may already run the next schema.

A *patch* is a blob in which nil means "remove this field"; a stored blob holds no nil. The SDK encodes and decodes
by name. The leader, which any program in any language may call, validates and merges blobs. All servers between them
pass the bytes on. `decode_fields` can read everything that `validate_data` accepts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

import msgspec

from tao.model.errors import InvalidField, TooLarge
from tao.schema.types import MAX_FIELD_NUMBER, FieldValue, GraphType, WrongValue, check_of

_NIL: Final = b"\xc0"
_MAP_16: Final = 0xDE
_MAP_32: Final = 0xDF
# A value of an unknown field may nest, and readers decode it recursively. This bound is a depth that every reader can
# take, far below any interpreter's limit.
_MAX_UNKNOWN_DEPTH: Final = 16

_encode: Final = msgspec.msgpack.Encoder().encode
# Merging copies encoded values as they are, so a number that this schema does not know keeps its exact bytes.
_decode_raw: Final = msgspec.msgpack.Decoder(dict[int, msgspec.Raw]).decode


def encode_fields(graph_type: GraphType, values: Mapping[str, object]) -> bytes:
    """Return the blob of ``values`` (by field name). A field that is None is left out; no field at all gives ``b""``.

    Raises `InvalidField` for an unknown name, a value of the wrong kind or a required field without a value, `TooLarge`
    above the type's bound."""
    numbered = {number: value for number, value in _numbered(graph_type, values).items() if value is not None}
    _check_required(graph_type, numbered)
    return _blob(graph_type, numbered)


def encode_patch(graph_type: GraphType, values: Mapping[str, object]) -> bytes:
    """Return the patch that sets ``values`` (by field name) and removes those that are None. Raises as
    `encode_fields`, and `InvalidField` for a required field that is None."""
    numbered = _numbered(graph_type, values)
    _check_kept(graph_type, numbered)
    return _blob(graph_type, numbered)


def decode_fields(graph_type: GraphType, data: bytes) -> dict[str, FieldValue | None]:
    """Return every field of the type by name: its value, else its default, else None. Unknown numbers are skipped.

    Kinds were checked when the blob was written and are not checked again. Raises `InvalidField` for a blob that is
    not a map by number, which only a row changed by hand can hold."""
    layout = graph_type.layout
    values = layout.fallbacks.copy()
    if data:
        names = layout.names
        for number, value in _decoded(graph_type, data).items():
            name = names.get(number)
            if name is not None:
                values[name] = value  # type: ignore[assignment]  # validated on the way in
        for name in layout.floats:
            if type(values[name]) is int:
                values[name] = float(values[name])  # type: ignore[arg-type]  # an int, as the line above has found
    for name in layout.fresh_lists:
        if values[name] is layout.fallbacks[name]:
            values[name] = list(values[name])  # type: ignore[arg-type, assignment]  # the default is a list
    return values


def merge_data(graph_type: GraphType, old: bytes, patch: bytes) -> bytes:
    """Return ``old`` with a validated ``patch`` applied. Unknown numbers of both are kept, byte for byte.

    Raises `InvalidField` when either is not a map by number, `TooLarge` when the result is above the type's bound."""
    return _merged(graph_type, old, _raw(graph_type, patch))


def validate_data(graph_type: GraphType, data: bytes) -> None:
    """Check a client's blob: one well-formed map, each number once, known fields of their kinds, no nil.

    Raises `InvalidField` naming type and field, `TooLarge` above the type's bound."""
    for number, value in _checked_map(graph_type, data).items():
        _check_stored(graph_type, number, value)


def validate_new(graph_type: GraphType, data: bytes) -> None:
    """Check the blob of a new object or edge as `validate_data` does, and that every required field is set."""
    if not data and not graph_type.layout.required:  # as most edges
        return
    checked = _checked_map(graph_type, data)
    for number, value in checked.items():
        _check_stored(graph_type, number, value)
    _check_required(graph_type, checked)


def validate_patch(graph_type: GraphType, patch: bytes) -> None:
    """Check a patch as `validate_data` does, except that nil is allowed: it removes a field that is not required."""
    checked = _checked_map(graph_type, patch)
    _check_kept(graph_type, checked)
    for number, value in checked.items():
        if value is not None:
            _check_stored(graph_type, number, value)


def _numbered(graph_type: GraphType, values: Mapping[str, object]) -> dict[int, FieldValue | None]:
    checks = graph_type.layout.checks
    numbered: dict[int, FieldValue | None] = {}
    for name, value in values.items():
        known = checks.get(name)
        if known is None:
            raise _unknown_field(graph_type, name)
        number, check = known
        try:
            numbered[number] = None if value is None else check(value)
        except WrongValue as wrong:
            raise InvalidField(f"field {name!r} of type {graph_type.name!r}: {wrong}") from None
    return numbered


def _check_required(graph_type: GraphType, numbered: Mapping[int, object]) -> None:
    for number, name in graph_type.layout.required.items():
        if number not in numbered:
            raise InvalidField(f"field {name!r} of type {graph_type.name!r} is required; give it a value")


def _check_kept(graph_type: GraphType, patch: Mapping[int, object]) -> None:
    for number, name in graph_type.layout.required.items():
        if number in patch and patch[number] is None:
            raise InvalidField(f"field {name!r} of type {graph_type.name!r} is required; an update may not remove it")


def _unknown_field(graph_type: GraphType, name: object) -> InvalidField:
    known = list(graph_type.layout.checks)
    near = difflib.get_close_matches(str(name), known, n=3)
    if near:
        hint = "did you mean " + " or ".join(repr(each) for each in near) + "?"
    elif known:
        hint = "its fields are " + ", ".join(known)
    else:
        hint = "it has no fields"
    return InvalidField(f"type {graph_type.name!r} has no field {name!r}; {hint}")


def _bounded(graph_type: GraphType, data: bytes) -> bytes:
    if len(data) > graph_type.max_data_bytes:
        raise TooLarge(
            f"data of type {graph_type.name!r} is {len(data)} bytes; at most {graph_type.max_data_bytes} are allowed"
        )
    return data


def _blob(graph_type: GraphType, numbered: Mapping[int, object]) -> bytes:
    if not numbered:
        return b""
    return _bounded(graph_type, _encode(dict(sorted(numbered.items()))))


def _malformed(graph_type: GraphType, why: Exception) -> InvalidField:
    return InvalidField(f"data of type {graph_type.name!r} is not a msgpack map by field number: {why}")


def _decoded(graph_type: GraphType, data: bytes) -> dict[int, object]:
    try:
        return graph_type.layout.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as why:
        raise _malformed(graph_type, why) from None


def _raw(graph_type: GraphType, data: bytes) -> dict[int, msgspec.Raw]:
    if not data:
        return {}
    try:
        return _decode_raw(data)
    except (msgspec.MsgspecError, RecursionError) as why:
        raise _malformed(graph_type, why) from None


def _merged(graph_type: GraphType, old: bytes, patch: Mapping[int, msgspec.Raw]) -> bytes:
    merged = _raw(graph_type, old)
    for number, value in patch.items():
        if bytes(value) == _NIL:
            merged.pop(number, None)
        else:
            merged[number] = value
    return _blob(graph_type, merged)


def _checked_map(graph_type: GraphType, data: bytes) -> dict[int, object]:
    if not data:
        return {}
    decoded = _decoded(graph_type, _bounded(graph_type, data))
    # Readers would disagree about which of two values of one number is valid. The map's header says how many were
    # written.
    if _announced_entries(data) != len(decoded):
        raise InvalidField(f"data of type {graph_type.name!r} holds a field number twice")
    return decoded


def _announced_entries(data: bytes) -> int:
    first = data[0]
    if first == _MAP_16:
        return int.from_bytes(data[1:3])
    if first == _MAP_32:
        return int.from_bytes(data[1:5])
    return first & 0x0F


def _check_stored(graph_type: GraphType, number: int, value: object) -> None:
    known = graph_type.layout.by_number.get(number)
    if value is None:
        name = number if known is None else repr(known.name)
        raise InvalidField(f"field {name} of type {graph_type.name!r} is nil; leave out a field that is not set")
    if known is not None:
        try:
            check_of(known.kind)(value)
        except WrongValue as wrong:
            raise InvalidField(f"field {known.name!r} ({number}) of type {graph_type.name!r}: {wrong}") from None
        return
    if not 1 <= number <= MAX_FIELD_NUMBER:
        raise InvalidField(
            f"data of type {graph_type.name!r} holds field number {number}; numbers are 1 to {MAX_FIELD_NUMBER}"
        )
    _check_depth(graph_type, number, value)


def _check_depth(graph_type: GraphType, number: int, value: object) -> None:
    level = [value]
    for _ in range(_MAX_UNKNOWN_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return
    raise InvalidField(f"field {number} of type {graph_type.name!r} nests deeper than {_MAX_UNKNOWN_DEPTH} levels")


def _children(value: object) -> list[object]:
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    return []
