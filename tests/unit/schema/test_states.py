"""Types with states: what a schema file may say, their state types, and which changes are safe."""

from __future__ import annotations

import pytest

from tao.model.edge_states import State
from tao.model.errors import InvalidArgument, SchemaError, UnknownType
from tao.schema.compatibility import ChangeKind, compare
from tao.schema.registry import Schema, load_schema

TEXT = """
format: 1
associations:
  follows:
    number: 11
    inverse: followed_by
    states: {archived: 211, removed: 212, negative: 213}
    keep_removed_days: 7
  followed_by: {number: 12, inverse: follows, states: {archived: 221, removed: 222, negative: 223}}
  likes: {number: 5}
"""


def schema(*changes: tuple[str, str]) -> Schema:
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return load_schema(text, "schema.yaml")


def test_each_state_has_a_type_whose_inverse_is_the_state_type_of_the_inverse() -> None:
    found = schema()
    follows = found.atype("follows")
    assert (follows.number, follows.state_numbers, follows.table) == (11, (11, 213, 211, 212), "assocs_states")
    for state, number, inverse in ((State.ARCHIVED, 211, 221), (State.REMOVED, 212, 222)):
        state_type = found.state_type(follows, state)
        assert state_type is found.atype(number)
        assert (state_type.name, state_type.state, state_type.inverse) == ("follows", state, inverse)
        assert state_type.label == f"follows ({state.label})"
    assert found.state_type(follows, State.NORMAL) is follows
    assert found.atype("followed_by").keep_removed_days == 7


def test_types_with_states_need_no_custom_table_and_travel_as_one_type() -> None:
    found = schema()
    assert found.custom_tables() == {}
    again = Schema.from_json(found.to_json())
    assert again == found
    assert again.assocs == found.assocs
    assert "211" in found.to_json()


def test_a_schema_without_states_keeps_its_hash() -> None:
    plain = load_schema("format: 1\nassociations: {likes: {number: 5}}\n", "schema.yaml")
    assert "states" not in plain.to_json()
    assert "keep_removed_days" not in plain.to_json()


def test_a_state_that_the_type_lacks_is_refused_by_name() -> None:
    found = schema((", negative: 213", ""), (", negative: 223", ""))
    with pytest.raises(InvalidArgument, match="no state 'negative'; it has normal, archived, removed"):
        found.state_type(found.atype("follows"), State.NEGATIVE)
    with pytest.raises(InvalidArgument, match="has no states"):
        found.state_type(found.atype("likes"), State.ARCHIVED)
    with pytest.raises(UnknownType):
        found.atype(213)


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("archived: 221", "archived: 211", r"schema.yaml:9: associations.followed_by.states.archived: 211 is already"),
        ("archived: 221", "archived: 5", r"states.archived: 5 is already that of 'likes'"),
        (", negative: 223", "", r"states: differ from those of the inverse 'followed_by', which has archived, removed"),
        ("removed: 222, ", "", r"states.removed: is missing"),
        ("{number: 5}", "{number: 5, states: {removed: 6, gone: 7}}", r"states.gone: unknown key"),
        ("{number: 5}", "{number: 5, keep_removed_days: 3}", r"keep_removed_days: needs 'states'"),
        ("{number: 5}", "{number: 5, table: assocs_states}", r"table: 'assocs_states' is the table of types with"),
        ("{number: 5}", "{number: 5, table: assocs_x, states: {removed: 6}}", r"leave 'table' out"),
        ("keep_removed_days: 7", "keep_removed_days: 0", r"keep_removed_days"),
        ("223}}", "223}, keep_removed_days: 8}", r"keep_removed_days: differs from that of the inverse"),
    ],
)
def test_a_wrong_declaration_is_reported_with_its_path(old: str, new: str, fault: str) -> None:
    with pytest.raises(SchemaError, match=fault):
        schema((old, new))


def changes_of(old: Schema, new: Schema) -> dict[str, tuple[ChangeKind, bool]]:
    return {change.path: (change.kind, change.compatible) for change in compare(old, new)}


def test_states_cannot_be_added_to_a_type_nor_taken_from_it() -> None:
    with_states = schema(("{number: 5}", "{number: 5, states: {removed: 6}}"))
    assert changes_of(schema(), with_states)["associations.likes"] == (ChangeKind.STATES_CHANGED, False)
    assert changes_of(with_states, schema())["associations.likes"] == (ChangeKind.STATES_CHANGED, False)


def test_a_state_cannot_be_retired_while_its_type_is_in_use() -> None:
    fewer = schema((", negative: 213", ""), (", negative: 223", ""), ("5}", "5}\nreserved: {associations: [213, 223]}"))
    assert changes_of(schema(), fewer) == {
        "associations.follows.states.negative": (ChangeKind.STATES_CHANGED, False),
        "associations.followed_by.states.negative": (ChangeKind.STATES_CHANGED, False),
    }
    assert "would lose their history" in compare(schema(), fewer)[0].why


def test_a_type_is_retired_with_all_its_states() -> None:
    numbers = [11, 12, 211, 212, 213, 221, 222, 223]
    text = f"format: 1\nassociations:\n  likes: {{number: 5}}\nreserved: {{associations: {numbers}}}\n"
    found = changes_of(schema(), load_schema(text, "schema.yaml"))
    assert set(found.values()) == {(ChangeKind.REMOVED, True)}
    assert len(found) == len(numbers)


def test_a_state_can_be_added_and_its_number_is_for_ever() -> None:
    fewer = schema((", negative: 213", ""), (", negative: 223", ""))
    added = changes_of(fewer, schema())
    assert added["associations.follows.states.negative"] == (ChangeKind.ADDED, True)
    removed = changes_of(schema(), fewer)
    assert removed["associations.follows.states.negative"] == (ChangeKind.STATES_CHANGED, False)
    moved = changes_of(schema(), schema(("archived: 221", "archived: 224")))
    assert moved["associations.followed_by.states.archived"] == (ChangeKind.RENUMBERED, False)


def test_the_number_of_a_state_cannot_become_that_of_a_type_nor_the_other_way() -> None:
    fewer = schema((", negative: 213", ""), (", negative: 223", ""), ("{number: 5}", "{number: 5}\n  x: {number: 213}"))
    assert (ChangeKind.REUSED, "associations.x", False) in kinds_of(schema(), fewer)
    more = schema(("  likes: {number: 5}\n", ""), ("archived: 211", "archived: 5"))
    assert (ChangeKind.REUSED, "associations.follows.states.archived", False) in kinds_of(schema(), more)


def kinds_of(old: Schema, new: Schema) -> set[tuple[ChangeKind, str, bool]]:
    return {(change.kind, change.path, change.compatible) for change in compare(old, new)}


def test_the_days_for_which_removed_edges_are_kept_can_change() -> None:
    found = changes_of(schema(), schema(("keep_removed_days: 7", "keep_removed_days: 8")))
    assert found["associations.follows.keep_removed_days"] == (ChangeKind.STATES_CHANGED, True)
