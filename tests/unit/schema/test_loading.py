"""Schema files: their content, the faults reported, and the canonical document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tao.model.errors import SchemaError, UnknownType
from tao.schema.registry import Schema, load_schema

EXAMPLE = Path(__file__).parents[3] / "config" / "schema.yaml"


def example() -> Schema:
    return load_schema(EXAMPLE.read_text(encoding="utf-8"), "config/schema.yaml")


def fault(text: str) -> str:
    with pytest.raises(SchemaError) as caught:
        load_schema(text, "f.yaml")
    return caught.value.message


def test_the_example_schema_loads_with_its_inverse_pairs() -> None:
    schema = example()
    friend, likes, comment = schema.atype("friend"), schema.atype("likes"), schema.atype("comment")
    assert schema.inverse_of(friend) is friend
    assert schema.inverse_of(likes) is schema.atype("liked_by")
    assert schema.inverse_of(comment) is None
    assert schema.custom_tables() == {"assocs_note": 16384}
    assert schema.otype("user").max_data_bytes == 1 << 20
    assert (likes.limit, likes.max_data_bytes, likes.table) == (6000, 255, None)


def test_a_type_is_found_by_number_and_by_name() -> None:
    schema = example()
    assert schema.otype(1) is schema.otype("user")
    assert schema.atype(1) is schema.atype("friend")


def test_the_side_without_fields_takes_those_of_its_inverse() -> None:
    schema = example()
    assert schema.atype("followed_by").fields == schema.atype("follows").fields != ()


@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda s: s.otype("usr"), "did you mean 'user'?"),
        (lambda s: s.atype("liks"), "did you mean 'likes'"),
        (lambda s: s.otype("friend"), "it is an association type"),
        (lambda s: s.atype("user"), "it is an object type"),
        (lambda s: s.otype(999), "unknown object type 999"),
        (lambda s: s.atype(0), "unknown association type 0"),
    ],
)
def test_an_unknown_type_is_answered_with_a_hint(ask: object, hint: str) -> None:
    assert callable(ask)
    with pytest.raises(UnknownType, match=hint.replace("?", r"\?")):
        ask(example())


def test_the_canonical_document_round_trips_and_keeps_the_hash() -> None:
    schema = example()
    again = Schema.from_json(schema.to_json())
    assert again == schema
    assert again.version_hash == schema.version_hash
    assert again.to_json() == schema.to_json()
    assert hash(again) == hash(schema)
    assert again.objects == schema.objects
    assert again.assocs == schema.assocs


def test_the_hash_ignores_order_and_comments_and_sees_a_default() -> None:
    one = "format: 1\nobjects:\n  a: {number: 1}\n  b: {number: 2, fields: {x: {number: 1, type: int}}}\n"
    two = "# c\nformat: 1\nobjects:\n  b: {fields: {x: {type: int, number: 1}}, number: 2}\n  a: {number: 1}\n"
    three = one.replace("type: int", "type: int, default: 1")
    assert load_schema(one, "1").version_hash == load_schema(two, "2").version_hash
    assert load_schema(one, "1").version_hash != load_schema(three, "3").version_hash


def test_defaults_are_values_of_their_kind() -> None:
    text = (
        "format: 1\nobjects: {a: {number: 1, fields: {f: {number: 1, type: float, default: 2},"
        " b: {number: 2, type: bytes, default: AAE=}, l: {number: 3, type: 'list[int]', default: [1]}}}}"
    )
    schema = load_schema(text, "f.yaml")
    assert [field.default for field in schema.otype("a").fields] == [2.0, b"\x00\x01", [1]]
    assert Schema.from_json(schema.to_json()) == schema


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: the schema is empty"),
        ("- 1", "f.yaml:1: must be a mapping"),
        ("format: 2", "f.yaml:1: format: "),
        ("objects: {}", "f.yaml:1: format: is missing"),
        ("format: 1\nobjects: [", "f.yaml:2: not valid YAML"),
        ("format: 1\nobjects:\n  a: {number: 1}\n  a: {number: 2}", "f.yaml:4: the key 'a' appears twice"),
        ("format: 1\nobjects:\n  yes: {number: 1}", "f.yaml:3: the key True is not text; put it in quotes"),
        ("format: 1\nobjects: &x {a: {number: 1}}\nassociations: *x", "f.yaml:3: aliases (*x)"),
        ("format: 1\nx: " + "[" * 500 + "]" * 500, "f.yaml:2: nested deeper"),
        ("format: 1\nx: 2020-13-41", "f.yaml: not valid YAML"),
        ("format: 1\nx: \x00", "f.yaml: not valid YAML"),
        ("format: 1\nobject: {}", "f.yaml:2: object: unknown key; did you mean 'objects'?"),
        (
            "format: 1\nobjects:\n  a: {number: 1, exists_filter: true}",
            "f.yaml:3: objects.a.exists_filter: unknown key here",
        ),
        ("format: 1\nobjects:\n  A: {number: 1}", "f.yaml:3: objects.A: as a name: "),
        ("format: 1\nobjects:\n  a: {number: 0}", "f.yaml:3: objects.a.number: "),
        ("format: 1\nobjects:\n  a: {number: 65536}", "f.yaml:3: objects.a.number: "),
        ("format: 1\nobjects:\n  a: {number: '1'}", "f.yaml:3: objects.a.number: "),
        ("format: 1\nobjects:\n  a: {number: 1}\n  b: {number: 1}", "f.yaml:4: objects.b.number: 1 is already that of"),
        ("format: 1\nreserved: {objects: [1]}\nobjects:\n  a: {number: 1}", "f.yaml:4: objects.a.number: 1 is already"),
    ],
)
def test_a_fault_of_a_file_is_reported_with_line_and_path(text: str, message: str) -> None:
    assert fault(text).startswith(message)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("fields: {x: {number: 1, type: strr}}", ".fields.x.type: "),
        ("fields: {x: {type: int}}", ".fields.x.number: is missing"),
        (
            "fields: {x: {number: 1, type: int}, y: {number: 1, type: int}}",
            ".fields.y.number: 1 is already that of 'x'",
        ),
        ("reserved: [1], fields: {x: {number: 1, type: int}}", ".fields.x.number: 1 is already reserved"),
        ("fields: {x: {number: 1, type: int, default: a}}", ".fields.x.default: expected int"),
        ("fields: {x: {number: 1, type: bytes, default: '*'}}", ".fields.x.default: the default of a bytes field"),
        ("fields: {x: {number: 1, type: float, default: .nan}}", ".fields.x.default: a default must be a finite"),
        ("max_data_bytes: 256", ".max_data_bytes: the default table holds at most 255"),
        ("table: assocs_x, max_data_bytes: 65536", ".max_data_bytes: "),
        ("table: objects", ".table: "),
        ("table: 'assocs_x;'", ".table: "),
        ("limit: 0", ".limit: "),
        ("reverse_lookup: true", ".reverse_lookup: needs an 'inverse' type"),
        ("max_edges: 0", ".max_edges: "),
        ("max_edges: 6001", ".max_edges: 6001 is above the 'limit' of 6000"),
        ("limit: 10, max_edges: 11", ".max_edges: 11 is above the 'limit' of 10"),
        ("keep: 0", ".keep: "),
        ("keep: 6001", ".keep: 6001 is above the 'limit' of 6000"),
        ("keep: 5, inverse: a", ".keep: needs a type without an 'inverse'"),
        ("keep: 5, max_edges: 9", ".keep: excludes 'max_edges'"),
        ("keep: 5, states: {removed: 900}", ".keep: excludes 'states'"),
        ("max_edges: 5, inverse: a, states: {removed: 900}", ".max_edges: needs a type without an 'inverse'"),
        ("inverse: nobody", ".inverse: there is no association type 'nobody'"),
        ("inverse: other", ".inverse: 'other' must name 'a' as its inverse"),
    ],
)
def test_a_fault_of_an_association_type_is_reported_with_line_and_path(entry: str, message: str) -> None:
    text = f"format: 1\nassociations:\n  other: {{number: 2}}\n  a: {{number: 1, {entry}}}"
    assert fault(text).startswith(f"f.yaml:4: associations.a{message}")


def test_inverse_types_must_agree_on_fields_and_bounds() -> None:
    head = "format: 1\nassociations:\n"
    field = "fields: {x: {number: 1, type: int}}"
    differ = f"{head}  a: {{number: 1, inverse: b, {field}}}\n  b: {{number: 2, inverse: a, fields: {{}}}}"
    assert "associations.a.fields: differ" in fault(differ)
    sizes = f"{head}  a: {{number: 1, inverse: b, max_data_bytes: 9}}\n  b: {{number: 2, inverse: a}}"
    assert "associations.a.max_data_bytes: differs from the 255" in fault(sizes)
    reserved = f"{head}  a: {{number: 1, inverse: b, {field}}}\n  b: {{number: 2, inverse: a, reserved: [1]}}"
    assert "associations.b.reserved: 1 is in use as 'x'" in fault(reserved)


def test_all_faults_are_reported_at_once_up_to_a_bound() -> None:
    two = fault("format: 1\nobjects:\n  a: {number: 0}\n  b: {number: -1}")
    assert len(two.splitlines()) == 2
    many = fault("format: 1\nobjects:\n" + "".join(f"  a{i}: {{number: 0}}\n" for i in range(100)))
    assert many.splitlines()[-1] == "… and 80 more"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format":1,"objects":{"a":{"number":"1"}}}', "[" * 100_000])
def test_a_faulty_document_from_the_wire_is_a_schema_error(text: str) -> None:
    with pytest.raises(SchemaError, match="schema document"):
        Schema.from_json(text)


def test_the_former_key_of_reverse_lookup_is_accepted_with_a_warning() -> None:
    text = "format: 1\nassociations:\n  a: {number: 1, inverse: a, reverse_lookup: true}"
    with pytest.warns(FutureWarning, match="'turn_gets' is now called 'reverse_lookup'"):
        former = load_schema(text.replace("reverse_lookup", "turn_gets"), "f.yaml")
    assert former == load_schema(text, "f.yaml")
    assert former.atype("a").reverse_lookup


def test_the_canonical_document_names_reverse_lookup_by_its_former_key_and_only_where_it_is_set() -> None:
    """Older programs know the former key, and refuse a document with a key that they do not know."""
    document = json.loads(example().to_json())
    assert document["associations"]["liked_by"]["turn_gets"] is True
    assert [name for name, entry in document["associations"].items() if "turn_gets" in entry] == ["liked_by"]


def test_the_canonical_document_writes_every_default_out() -> None:
    document = json.loads(load_schema("format: 1\nassociations: {a: {number: 1}}", "f").to_json())
    assert document["associations"]["a"] == {
        "arena": "default",
        "fields": {},
        "inverse": None,
        "limit": 6000,
        "max_data_bytes": 255,
        "number": 1,
        "reserved": [],
        "table": None,
    }


def test_bounds_on_lengths_travel_and_schemas_without_them_keep_their_hash() -> None:
    text = "format: 1\nassociations:\n  a: {number: 1, max_edges: 9}\n  b: {number: 2, keep: 800}\n  c: {number: 3}"
    schema = load_schema(text, "f.yaml")
    again = Schema.from_json(schema.to_json())
    assert [(each.max_edges, each.keep) for each in again.assocs] == [(9, None), (None, 800), (None, None)]
    plain = load_schema("format: 1\nassociations:\n  c: {number: 3}", "f.yaml").to_json()
    assert "max_edges" not in plain
    assert "keep" not in plain


def test_filters_travel_for_normal_edges_only_and_schemas_without_them_keep_their_hash() -> None:
    text = "format: 1\nassociations:\n  a: {number: 1, exists_filter: true, states: {removed: 9}}\n  b: {number: 2}"
    again = Schema.from_json(load_schema(text, "f.yaml").to_json())
    assert [(each.number, each.exists_filter) for each in again.assocs] == [(1, True), (2, False), (9, False)]
    assert "exists_filter" not in load_schema("format: 1\nassociations:\n  b: {number: 2}", "f.yaml").to_json()
