"""Field values as text, in both directions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.admin.field_text import fields_of, text_of_value, value_of
from tao.model.errors import InvalidField
from tao.schema.types import Field, FieldKind, FieldValue, ObjectType

VALUES: dict[FieldKind, st.SearchStrategy[FieldValue]] = {
    FieldKind.BOOL: st.booleans(),
    FieldKind.INT: st.integers(-(2**63), 2**63 - 1),
    FieldKind.UINT: st.integers(0, 2**64 - 1),
    FieldKind.FLOAT: st.floats(allow_nan=False),
    FieldKind.STR: st.text(min_size=1),
    FieldKind.BYTES: st.binary(min_size=1),
    FieldKind.LIST_STR: st.lists(st.text()),
    FieldKind.LIST_INT: st.lists(st.integers(-(2**63), 2**63 - 1)),
}


@given(st.sampled_from(list(FieldKind)).flatmap(lambda kind: st.tuples(st.just(kind), VALUES[kind])))
def test_a_value_written_as_text_is_read_as_itself(case: tuple[FieldKind, FieldValue]) -> None:
    kind, value = case
    field = Field(1, "f", kind)
    assert value_of(field, text_of_value(field, value)) == value


def test_an_empty_text_is_no_value() -> None:
    for kind in FieldKind:
        assert value_of(Field(1, "f", kind), "") is None
        assert text_of_value(Field(1, "f", kind), None) == ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (FieldKind.INT, "1.5"),
        (FieldKind.UINT, "x"),
        (FieldKind.BOOL, "maybe"),
        (FieldKind.FLOAT, "1,5"),
        (FieldKind.BYTES, "no base64!"),
        (FieldKind.LIST_STR, '{"a": 1}'),
        (FieldKind.LIST_INT, "[1"),
    ],
)
def test_text_of_another_kind_is_refused_with_the_name_of_the_field(kind: FieldKind, text: str) -> None:
    with pytest.raises(InvalidField, match="'age'"):
        value_of(Field(1, "age", kind), text)


def test_assignments_are_typed_by_the_schema_and_unknown_names_are_left_to_the_sdk() -> None:
    user = ObjectType(1, "user", (Field(1, "name", FieldKind.STR), Field(2, "age", FieldKind.UINT)))
    assert fields_of(user, ["name=A=B", "age=7", "nmae=x"]) == {"name": "A=B", "age": 7, "nmae": "x"}
    with pytest.raises(InvalidField, match="field=value"):
        fields_of(user, ["name"])
