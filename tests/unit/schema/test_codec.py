"""The field codec: which values it refuses, with which message, and how old and foreign blobs are read."""

from __future__ import annotations

from enum import IntEnum

import msgspec
import pytest

from tao.model.errors import InvalidField, TooLarge
from tao.schema import codec
from tao.schema.registry import load_schema
from tao.schema.types import GraphType

SCHEMA = load_schema(
    """
format: 1
objects:
  empty: {number: 1}
  person:
    number: 3
    fields: {name: {number: 1, type: str, required: true}, age: {number: 2, type: int}}
  thing:
    number: 2
    fields:
      flag: {number: 1, type: bool}
      count: {number: 2, type: int, default: 7}
      size: {number: 3, type: uint}
      weight: {number: 4, type: float}
      name: {number: 5, type: str, default: "?"}
      raw: {number: 6, type: bytes}
      tags: {number: 7, type: "list[str]", default: [new]}
      marks: {number: 8, type: "list[int]"}
associations:
  tie: {number: 1, fields: {text: {number: 1, type: str}}}
  visit: {number: 2, fields: {place: {number: 1, type: str, required: true}}}
""",
    "codec.yaml",
)
THING = SCHEMA.otype("thing")
pack = msgspec.msgpack.encode


def test_fields_without_values_are_the_empty_blob() -> None:
    assert codec.encode_fields(THING, {}) == b""
    assert codec.encode_fields(THING, {"name": None}) == b""
    assert codec.decode_fields(SCHEMA.otype("empty"), b"") == {}


def test_the_blob_is_a_map_by_number_in_ascending_order() -> None:
    assert codec.encode_fields(THING, {"name": "a", "flag": True}) == b"\x82\x01\xc3\x05\xa1a"


def test_a_reader_gets_defaults_for_what_is_missing() -> None:
    assert codec.decode_fields(THING, b"") == {
        "flag": None,
        "count": 7,
        "size": None,
        "weight": None,
        "name": "?",
        "raw": None,
        "tags": ["new"],
        "marks": None,
    }


def test_a_reader_may_change_a_default_list_without_harm_to_the_next() -> None:
    first = codec.decode_fields(THING, b"")["tags"]
    assert isinstance(first, list)
    first.clear()
    assert codec.decode_fields(THING, b"")["tags"] == ["new"]


def test_whole_numbers_of_other_encoders_read_as_floats() -> None:
    data = pack({4: 3})
    codec.validate_data(THING, data)
    weight = codec.decode_fields(THING, data)["weight"]
    assert (weight, type(weight)) == (3.0, float)


def test_values_of_subclasses_are_stored_as_their_plain_type() -> None:
    class Level(IntEnum):
        HIGH = 3

    class Name(str):
        __slots__ = ()

    data = codec.encode_fields(THING, {"count": Level.HIGH, "name": Name("x"), "marks": (Level.HIGH,)})
    assert data == codec.encode_fields(THING, {"count": 3, "name": "x", "marks": [3]})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nam": "a"}, r"type 'thing' has no field 'nam'; did you mean 'name'\?"),
        ({"zzz": "a"}, "its fields are flag, count"),
        ({1: "a"}, "has no field 1"),
        ({"flag": 1}, r"field 'flag' of type 'thing': expected bool, got int 1"),
        ({"count": True}, r"expected int \(signed 64-bit\), got bool True"),
        ({"count": 2**63}, "expected int"),
        ({"count": -(2**63) - 1}, "expected int"),
        ({"count": 1.0}, "got float"),
        ({"size": -1}, r"expected uint \(unsigned 64-bit\), got int -1"),
        ({"size": 2**64}, "expected uint"),
        ({"weight": "1"}, "expected float, got str"),
        ({"weight": 2**53 + 1}, "expected float"),
        ({"weight": True}, "expected float"),
        ({"name": b"a"}, "expected str, got bytes"),
        ({"name": "\ud800"}, "lone surrogates"),
        ({"raw": "a"}, "expected bytes, got str"),
        ({"tags": "abc"}, r"expected list\[str\], got str"),
        ({"tags": ["a", 1]}, "expected str, got int 1"),
        ({"marks": [True]}, "expected int"),
        ({"name": 10**100}, "…$"),
    ],
)
def test_a_wrong_value_is_refused_with_field_expected_kind_and_actual_value(
    values: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidField, match=message):
        codec.encode_fields(THING, values)
    with pytest.raises(InvalidField, match=message):
        codec.encode_patch(THING, values)


def test_the_error_for_an_unknown_field_mentions_that_a_type_has_no_fields() -> None:
    with pytest.raises(InvalidField, match="it has no fields"):
        codec.encode_fields(SCHEMA.otype("empty"), {"a": 1})


@pytest.mark.parametrize(
    "data",
    [
        b"\x81",
        b"\x90",
        b"\xc0",
        b"\x01",
        b"\x81\xa11\x01",  # a key that is text
        b"\x81\x01\xc3\x00",  # trailing bytes after the map
        b"\x82\x01\xc3\x01\xc2",  # one number twice
        b"\xde\x00\x02\x09\xc3\x09\xc2",  # the same, unknown number, longer header
        b"\xdf\xff\xff\xff\xff",
        b"\x81\x01\xc1",
        b"\x81\x05\xa1\xff",  # not UTF-8
        b"\x81\x63\xa1\xff",  # not UTF-8 in a field that the schema does not know
        b"\x81\x63" + b"\x91" * 5000 + b"\x01",
        b"\x81\x63" + b"\x91" * 40 + b"\x01",
        b"\x81\x63\x81\x81\x01\x02\x03",  # a map as a key
        b"\x81\x01\x01",
        b"\x81\x01\xc0",
        b"\x81\x63\xc0",
        b"\x81\x00\x01",
        b"\x81\xff\x01",
        b"\x81\xce\x00\x01\x00\x00\x01",
        pack({2: 2**63}),
        pack({3: -1}),
        pack({7: ["a", 1]}),
    ],
)
def test_a_malformed_blob_is_refused_by_the_leader(data: bytes) -> None:
    with pytest.raises(InvalidField):
        codec.validate_data(THING, data)


def test_unknown_numbers_are_allowed_and_kept_byte_for_byte() -> None:
    strange = b"\xca\x3f\x80\x00\x00"  # a 32-bit float, which a decoder would widen
    old = b"\x82\x02\x01\x63" + strange
    codec.validate_data(THING, old)
    assert codec.decode_fields(THING, old)["count"] == 1
    merged = codec.merge_data(THING, old, codec.encode_patch(THING, {"count": 2, "name": "n"}))
    assert merged == b"\x83\x02\x02\x05\xa1n\x63" + strange


def test_a_patch_removes_what_it_sets_to_none() -> None:
    old = codec.encode_fields(THING, {"count": 1, "name": "n"})
    patch = codec.encode_patch(THING, {"count": None, "flag": None, "size": 3})
    codec.validate_patch(THING, patch)
    assert codec.merge_data(THING, old, patch) == codec.encode_fields(THING, {"name": "n", "size": 3})
    assert codec.merge_data(THING, old, codec.encode_patch(THING, {"count": None, "name": None})) == b""


def test_a_patch_of_a_wrong_kind_is_refused() -> None:
    with pytest.raises(InvalidField, match="field 'count'"):
        codec.validate_patch(THING, pack({2: "a"}))


@pytest.mark.parametrize("data", [b"\x90", b"\x81", b"\x81\xa11\x01", b"\x81\x05\xa1\xff"])
def test_decoding_a_row_corrupted_by_hand_raises_invalid_field(data: bytes) -> None:
    with pytest.raises(InvalidField, match="not a msgpack map by field number"):
        codec.decode_fields(THING, data)


def test_data_above_the_bound_of_its_type_is_too_large() -> None:
    tie = SCHEMA.atype("tie")
    fits = codec.encode_fields(tie, {"text": "a" * 251})
    assert len(fits) == 255
    codec.validate_data(tie, fits)
    with pytest.raises(TooLarge, match="256 bytes; at most 255"):
        codec.encode_fields(tie, {"text": "a" * 252})
    with pytest.raises(TooLarge):
        codec.validate_data(tie, fits + b"\x00")
    with pytest.raises(TooLarge):
        codec.merge_data(tie, fits, b"\x81\x02\x01")
    with pytest.raises(TooLarge):
        codec.encode_fields(THING, {"raw": bytes(1 << 20)})


@pytest.mark.parametrize(
    ("graph_type", "name", "values"),
    [
        (SCHEMA.otype("person"), "name", {}),
        (SCHEMA.otype("person"), "name", {"age": 3}),
        (SCHEMA.otype("person"), "name", {"name": None}),
        (SCHEMA.atype("visit"), "place", {}),
    ],
)
def test_a_new_blob_must_hold_the_required_fields(graph_type: GraphType, name: str, values: dict[str, object]) -> None:
    with pytest.raises(InvalidField, match=f"field {name!r} of type {graph_type.name!r} is required; give it a value"):
        codec.encode_fields(graph_type, values)
    data = pack({2: 3}) if "age" in values else b""
    with pytest.raises(InvalidField, match=f"field {name!r} of type {graph_type.name!r} is required; give it a value"):
        codec.validate_new(graph_type, data)


def test_a_patch_may_leave_out_a_required_field_and_may_not_remove_it() -> None:
    person = SCHEMA.otype("person")
    codec.validate_patch(person, codec.encode_patch(person, {"age": None}))
    with pytest.raises(InvalidField, match="field 'name' of type 'person' is required; an update may not remove it"):
        codec.encode_patch(person, {"name": None})
    with pytest.raises(InvalidField, match="field 'name' of type 'person' is required; an update may not remove it"):
        codec.validate_patch(person, pack({1: None}))


def test_a_stored_blob_without_a_required_field_is_read_and_merged() -> None:
    person = SCHEMA.otype("person")
    codec.validate_data(person, b"")
    assert codec.decode_fields(person, b"") == {"name": None, "age": None}
    assert codec.merge_data(person, b"", codec.encode_patch(person, {"age": 4})) == pack({2: 4})
