"""Converts field values to text and back, as a person types them or a CSV cell holds them.

An empty text means that the field is not set; a value that is an empty string has the same text. bool: true/false,
yes/no, 1/0; bytes: base64; lists: JSON.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable

from tao.model.errors import InvalidField
from tao.schema.types import Field, FieldKind, FieldValue, GraphType

_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def value_of(field: Field, text: str) -> FieldValue | None:
    """Return the value of a text, None for an empty one. Raises `InvalidField` for a text of another kind."""
    if not text:
        return None
    try:
        return _parse(field.kind, text)
    except (ValueError, KeyError):
        raise InvalidField(f"field {field.name!r}: {text[:40]!r} is not of type {field.kind}") from None


def text_of_value(field: Field, value: FieldValue | None) -> str:
    """Return the text of a value, as `value_of` reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return repr(value) if field.kind is FieldKind.FLOAT else str(value)


def fields_of(graph_type: GraphType, assignments: Iterable[str]) -> dict[str, object]:
    """Return the values of ``name=text`` assignments. Raises `InvalidField` for a wrong text.

    Names that the type does not have are returned as they are: the SDK refuses them and suggests similar names."""
    known = {field.name: field for field in graph_type.fields}
    values: dict[str, object] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise InvalidField(f"{assignment!r} does not have the form field=value")
        field = known.get(name)
        values[name] = text if field is None else value_of(field, text)
    return values


def _parse(kind: FieldKind, text: str) -> FieldValue:
    match kind:
        case FieldKind.STR:
            return text
        case FieldKind.BOOL:
            return _BOOLS[text.lower()]
        case FieldKind.INT | FieldKind.UINT:
            return int(text)
        case FieldKind.FLOAT:
            return float(text)
        case FieldKind.BYTES:
            return base64.b64decode(text, validate=True)
        case FieldKind.LIST_STR | FieldKind.LIST_INT:
            items = json.loads(text)
            if isinstance(items, list):
                return items
            raise ValueError("not a list")
