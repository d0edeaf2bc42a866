"""Changes of a schema that may be made while serving, and changes that may not."""

from __future__ import annotations

import pytest

from tao.schema.compatibility import Change, ChangeKind, compare
from tao.schema.registry import Schema, load_schema

OLD = """
format: 1
reserved: {objects: [9]}
objects:
  user: {number: 1, reserved: [8], fields: {name: {number: 1, type: str}, home: {number: 2, type: str}}}
  page: {number: 2}
associations:
  friend: {number: 1, inverse: friend}
  likes: {number: 2, inverse: liked_by}
  liked_by: {number: 3, inverse: likes}
  note: {number: 4, table: assocs_note, max_data_bytes: 1000}
"""


def changes(*replacements: tuple[str, str]) -> list[Change]:
    new = OLD
    for before, after in replacements:
        assert before in new
        new = new.replace(before, after)
    return compare(load_schema(OLD, "old"), load_schema(new, "new"))


def test_a_schema_is_compatible_with_itself() -> None:
    assert changes() == []


HOME = ", home: {number: 2, type: str}"


@pytest.mark.parametrize(
    ("before", "after", "kind", "path", "warns"),
    [
        (HOME, HOME + ", born: {number: 3, type: int}", ChangeKind.ADDED, "objects.user.fields.born", False),
        ("page: {number: 2}", "page: {number: 2}\n  shop: {number: 3}", ChangeKind.ADDED, "objects.shop", False),
        ("home:", "town:", ChangeKind.RENAMED, "objects.user.fields.home", True),
        ("page:", "site:", ChangeKind.RENAMED, "objects.page", True),
        ("home: {number: 2", "home: {default: x, number: 2", ChangeKind.DEFAULT_CHANGED,
         "objects.user.fields.home", True),
        ("number: 1, inverse: friend", "number: 1, inverse: friend, limit: 9", ChangeKind.LIMIT_CHANGED,
         "associations.friend", False),
        ("number: 1, inverse: friend", "number: 1, inverse: friend, reverse_lookup: true",
         ChangeKind.REVERSE_LOOKUP_CHANGED,
         "associations.friend", True),
        ("number: 1, inverse: friend", "number: 1, inverse: friend, max_edges: 9", ChangeKind.MAX_EDGES_CHANGED,
         "associations.friend", True),
        ("note: {number: 4,", "note: {number: 4, keep: 800,", ChangeKind.KEEP_CHANGED, "associations.note", True),
        ("note: {number: 4,", "note: {number: 4, exists_filter: true,", ChangeKind.EXISTS_FILTER_CHANGED,
         "associations.note", False),
        ("page: {number: 2", "page: {number: 2, arena: pages", ChangeKind.ARENA_CHANGED, "objects.page", False),
        ("max_data_bytes: 1000", "max_data_bytes: 2000", ChangeKind.DATA_BOUND_CHANGED, "associations.note", False),
        ("page: {number: 2", "page: {number: 2, audit: true", ChangeKind.AUDIT_CHANGED, "objects.page", False),
        ("number: 2, inverse: liked_by", "number: 2, inverse: liked_by, audit: true", ChangeKind.AUDIT_CHANGED,
         "associations.likes", False),
    ],
)  # fmt: skip
def test_a_change_that_keeps_the_meaning_of_stored_data_is_compatible(
    before: str, after: str, kind: ChangeKind, path: str, warns: bool
) -> None:
    (change,) = changes((before, after))
    assert (change.kind, change.path, change.compatible, change.warns) == (kind, path, True, warns)


@pytest.mark.parametrize(
    ("before", "after", "kind", "path"),
    [
        (HOME, "", ChangeKind.REMOVED, "objects.user.fields.home"),
        ("  page: {number: 2}\n", "", ChangeKind.REMOVED, "objects.page"),
        ("home: {number: 2", "home: {number: 3", ChangeKind.RENUMBERED, "objects.user.fields.home"),
        ("page: {number: 2", "page: {number: 3", ChangeKind.RENUMBERED, "objects.page"),
        ("home: {number: 2, type: str", "home: {number: 2, type: int", ChangeKind.TYPE_CHANGED,
         "objects.user.fields.home"),
        ("reserved: [8]", "reserved: []", ChangeKind.UNRESERVED, "objects.user.fields.8"),
        ("{objects: [9]}", "{objects: []}", ChangeKind.UNRESERVED, "objects.9"),
        ("number: 1, inverse: friend", "number: 1", ChangeKind.INVERSE_CHANGED, "associations.friend"),
        ("table: assocs_note", "table: assocs_other", ChangeKind.TABLE_CHANGED, "associations.note"),
        ("max_data_bytes: 1000", "max_data_bytes: 500", ChangeKind.DATA_BOUND_CHANGED, "associations.note"),
    ],
)  # fmt: skip
def test_a_change_of_the_meaning_of_stored_data_is_incompatible(
    before: str, after: str, kind: ChangeKind, path: str
) -> None:
    (change,) = changes((before, after))
    assert (change.kind, change.path, change.compatible) == (kind, path, False)
    assert not change.compatible


def test_an_audit_that_ends_is_worth_a_note() -> None:
    audited = OLD.replace("page: {number: 2", "page: {number: 2, audit: true")
    (change,) = compare(load_schema(audited, "old"), load_schema(OLD, "new"))
    assert (change.kind, change.compatible, change.warns) == (ChangeKind.AUDIT_CHANGED, True, True)


def test_a_field_may_retire_into_reserved() -> None:
    (change,) = changes((HOME, ""), ("reserved: [8]", "reserved: [2, 8]"))
    assert (change.kind, change.compatible, change.warns) == (ChangeKind.REMOVED, True, True)


def test_a_type_may_retire_into_reserved() -> None:
    (change,) = changes(("  page: {number: 2}\n", ""), ("{objects: [9]}", "{objects: [2, 9]}"))
    assert (change.kind, change.compatible) == (ChangeKind.REMOVED, True)


def test_a_reserved_number_may_not_be_used_again() -> None:
    (change,) = changes(("reserved: [8]", "reserved: []"), (HOME, HOME + ", born: {number: 8, type: int}"))
    assert (change.kind, change.path, change.compatible) == (ChangeKind.REUSED, "objects.user.fields.born", False)


def test_two_fields_that_swap_numbers_are_incompatible() -> None:
    swapped = changes(
        ("name: {number: 1", "name: {number: 22"),
        ("home: {number: 2,", "home: {number: 1,"),
        ("number: 22", "number: 2"),
    )
    assert not all(change.compatible for change in swapped)
    assert {change.kind for change in swapped} == {ChangeKind.RENUMBERED, ChangeKind.REUSED}


def test_a_field_may_become_required_with_a_note_and_optional_without_one() -> None:
    home = "home: {number: 2, type: str"
    (change,) = changes((home, home + ", required: true"))
    assert (change.kind, change.path) == (ChangeKind.REQUIRED_CHANGED, "objects.user.fields.home")
    assert change.compatible
    assert change.warns
    required = load_schema(OLD.replace(home, home + ", required: true"), "required")
    (back,) = compare(required, load_schema(OLD, "old"))
    assert back.compatible
    assert not back.warns


def test_a_new_field_that_is_required_is_noted() -> None:
    found = changes((HOME, HOME + ", mail: {number: 3, type: str, required: true}"))
    assert [(each.kind, each.warns) for each in found] == [
        (ChangeKind.ADDED, False),
        (ChangeKind.REQUIRED_CHANGED, True),
    ]


def test_required_travels_in_the_document_only_where_it_is_set() -> None:
    required = load_schema(OLD.replace(HOME, HOME.replace("str}", "str, required: true}")), "required")
    assert Schema.from_json(required.to_json()) == required
    assert required.otype("user").layout.required == {2: "home"}
    assert "required" not in load_schema(OLD, "old").to_json()


@pytest.mark.parametrize("bound", ["max_edges", "keep"])
def test_a_bound_that_grows_or_goes_is_not_worth_a_warning(bound: str) -> None:
    def bounded(value: str) -> Schema:
        return load_schema(OLD.replace("note: {", f"note: {{{value}"), "f.yaml")

    for old, new, warns in ((f"{bound}: 9, ", f"{bound}: 10, ", False), (f"{bound}: 9, ", "", False),
                            (f"{bound}: 9, ", f"{bound}: 8, ", True)):  # fmt: skip
        (change,) = compare(bounded(old), bounded(new))
        assert (change.compatible, change.warns) == (True, warns)
