"""The field codec against a plain dictionary: round trips, merges, unknown fields, hostile bytes."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tao.model.errors import InvalidField
from tao.schema import codec
from tao.schema.registry import Schema, load_schema

TEXT = """
format: 1
objects:
  thing:
    number: 1
    fields:
      flag: {number: 1, type: bool}
      count: {number: 2, type: int}
      size: {number: 3, type: uint}
      weight: {number: 40, type: float}
      name: {number: 5, type: str}
      raw: {number: 600, type: bytes}
      tags: {number: 7000, type: "list[str]"}
      marks: {number: 8, type: "list[int]"}
"""
NEW = load_schema(TEXT, "new.yaml")
# The schema of a server that has not reloaded yet.
OLD = load_schema(
    "\n".join(line for line in TEXT.splitlines() if not any(w in line for w in ("raw", "tags", "name"))), "old"
)
THING, OLD_THING = NEW.otype("thing"), OLD.otype("thing")

INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "flag": st.booleans(),
    "count": INT64,
    "size": st.integers(0, 2**64 - 1),
    "weight": st.floats(allow_nan=False),
    "name": st.text(),
    "raw": st.binary(max_size=40),
    "tags": st.lists(st.text(max_size=5), max_size=20),
    "marks": st.lists(INT64, max_size=20),
}
FIELDS = st.fixed_dictionaries({}, optional=VALUES)
PATCHES = st.fixed_dictionaries({}, optional={name: st.none() | values for name, values in VALUES.items()})


def merged(old: dict[str, object], patch: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in {**old, **patch}.items() if value is not None}


def present(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


@given(FIELDS)
def test_encoded_fields_are_read_back(values: dict[str, object]) -> None:
    data = codec.encode_fields(THING, values)
    codec.validate_data(THING, data)
    decoded = codec.decode_fields(THING, data)
    assert set(decoded) == set(VALUES)
    assert present(dict(decoded)) == values


@given(FIELDS, st.randoms())
def test_equal_fields_give_equal_bytes_whatever_their_order(values: dict[str, object], random: object) -> None:
    shuffled = list(values.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert codec.encode_fields(THING, dict(shuffled)) == codec.encode_fields(THING, values)


@given(FIELDS, st.lists(PATCHES, max_size=4))
def test_merging_is_merging_dictionaries(values: dict[str, object], patches: list[dict[str, object]]) -> None:
    merged_data = codec.encode_fields(THING, values)
    model = values
    for patch in patches:
        model = merged(model, patch)
        blob = codec.encode_patch(THING, patch)
        codec.validate_patch(THING, blob)
        merged_data = codec.merge_data(THING, merged_data, blob)
    assert merged_data == codec.encode_fields(THING, model)


@given(FIELDS, PATCHES)
def test_a_server_with_the_old_schema_keeps_fields_of_the_new_one(
    values: dict[str, object], patch: dict[str, object]
) -> None:
    data = codec.encode_fields(THING, values)
    codec.validate_data(OLD_THING, data)
    known = {name: value for name, value in patch.items() if name in OLD_THING.layout.checks}
    assert codec.merge_data(OLD_THING, data, codec.encode_patch(OLD_THING, known)) == codec.encode_fields(
        THING, merged(values, known)
    )
    assert codec.merge_data(OLD_THING, data, codec.encode_patch(THING, patch)) == codec.encode_fields(
        THING, merged(values, patch)
    )


@given(
    st.binary(max_size=60)
    | st.dictionaries(st.integers(-1, 9), st.none() | st.text() | INT64).map(msgspec.msgpack.encode)
)
def test_whatever_the_leader_accepts_every_reader_can_read(data: bytes) -> None:
    try:
        codec.validate_data(THING, data)
    except InvalidField:
        return
    decoded = present(dict(codec.decode_fields(THING, data)))
    again = present(dict(codec.decode_fields(THING, codec.merge_data(THING, data, b""))))
    assert repr(again) == repr(decoded)  # by repr, for which NaN equals NaN
    codec.encode_fields(THING, decoded)


def test_floats_keep_nan_and_infinities() -> None:
    for value in (math.nan, math.inf, -math.inf, -0.0):
        read = codec.decode_fields(THING, codec.encode_fields(THING, {"weight": value}))["weight"]
        assert repr(read) == repr(value)


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_no_document_from_the_wire_raises_anything_but_a_schema_error(data: bytes) -> None:
    with pytest.raises(Exception, match="schema document") as caught:
        Schema.from_json(data)
    assert type(caught.value).__name__ == "SchemaError"
