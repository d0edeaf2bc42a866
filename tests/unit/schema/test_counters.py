"""Counters of object types: what a schema file may say, their association types, and which changes are safe."""

from __future__ import annotations

import pytest

from tao.model.errors import SchemaError, UnknownType
from tao.schema.compatibility import ChangeKind, compare
from tao.schema.registry import Schema, load_schema
from tao.schema.types import CounterOptions

TEXT = """
format: 1
objects:
  post:
    number: 9
    arena: hot
    counters: {views: {number: 401}, plays: {number: 402, flush_seconds: 5, publish_share: 0.001}}
  photo: {number: 10, counters: {views: {number: 403}}}
associations:
  likes: {number: 5, states: {removed: 6}}
reserved: {associations: [7]}
"""


def schema(*changes: tuple[str, str]) -> Schema:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return load_schema(text, "schema.yaml")


def test_a_counter_is_an_association_type_named_after_its_object_type() -> None:
    found = schema().atype("post.plays")
    assert (found.number, found.table, found.arena) == (402, "assocs_states", "hot")
    assert found.counter == CounterOptions(5, 0.001)
    assert found.counter.max_flush_seconds == 65
    assert schema().atype(401).counter == CounterOptions()
    assert schema().custom_tables() == {}


def test_counters_travel_with_their_object_type() -> None:
    found = schema()
    again = Schema.from_json(found.to_json())
    assert (again, again.assocs) == (found, found.assocs)
    plain = load_schema("format: 1\nobjects: {post: {number: 9}}\n", "schema.yaml")
    assert "counters" not in plain.to_json()


def test_a_counter_is_found_by_a_short_name_that_one_object_type_has() -> None:
    found = schema()
    assert found.counter("plays").number == found.counter("post.plays").number == 402
    with pytest.raises(UnknownType, match=r"'post\.views' or 'photo\.views'"):
        found.counter("views")
    for wrong in ("likes", "stars", 5, 999):
        with pytest.raises(UnknownType, match=r"the schema has post\.views, post\.plays, photo\.views"):
            found.counter(wrong)


def test_a_short_name_is_found_without_a_walk_over_the_types() -> None:
    found = schema()
    first, second = found.counter("plays"), found.counter("post.plays")
    object.__setattr__(found, "assocs", ())
    object.__setattr__(found, "counters", ())
    assert found.counter("plays") is found.counter(402) is first is second


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("number: 403", "number: 401", "objects.photo.counters.views.number: 401 is already that of counter"),
        ("number: 403", "number: 5", "5 is already that of association type 'likes'"),
        ("number: 403", "number: 6", "6 is already that of association type 'likes'"),
        ("number: 403", "number: 7", "7 is already reserved"),
        ("number: 403", "number: 403, exact: true", "exact counters are not available"),
        ("number: 403", "number: 403, flush: 1", "unknown key"),
        ("flush_seconds: 5", "flush_seconds: 0.1", "greater than or equal to 0.5"),
        ("flush_seconds: 5", "flush_seconds: 61", "less than or equal to 60"),
        ("flush_seconds: 5", "flush_seconds: .nan", "flush_seconds"),
        ("publish_share: 0.001", "publish_share: 0", "greater than 0"),
        ("publish_share: 0.001", "publish_share: 1.5", "less than or equal to 1"),
        ("{views: {number: 403}}", "{a.b: {number: 403}}", "as a name"),
    ],
)
def test_unknown_options_clashes_and_impossible_values_are_refused(old: str, new: str, expected: str) -> None:
    with pytest.raises(SchemaError, match=expected):
        schema((old, new))


def test_a_number_keeps_its_meaning_and_options_may_change() -> None:
    old = schema()
    changed = compare(old, schema(("flush_seconds: 5", "flush_seconds: 2")))
    assert [(each.kind, each.compatible) for each in changed] == [(ChangeKind.COUNTER_CHANGED, True)]
    (added,) = compare(schema((", counters: {views: {number: 403}}", "")), old)
    assert (added.kind, added.path, added.compatible) == (ChangeKind.ADDED, "associations.photo.views", True)
    gone = compare(old, schema((", counters: {views: {number: 403}}", "")))
    assert [(each.kind, each.compatible) for each in gone] == [(ChangeKind.REMOVED, False)]
    as_edges = schema((", counters: {views: {number: 403}}", ""), ("  likes:", "  seen: {number: 403}\n  likes:"))
    assert any(each.kind is ChangeKind.REUSED and not each.compatible for each in compare(old, as_edges))
