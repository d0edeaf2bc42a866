"""Planning of object writes."""

import pytest

from tao.model.changes import ObjectChange, ObjectInvalidation
from tao.model.errors import InvalidArgument, InvalidField, TooLarge, WrongType
from tao.model.graph import deleted_data
from tao.model.writes import ObjAdd, ObjDelete, ObjUpdate
from tao.planning.draft import IdTaken
from tao.schema.codec import encode_fields, encode_patch
from tests.unit.planning.stored_rows import LOW, PAGE, SCHEMA, USER, StoredRows, version

USER_TYPE = SCHEMA.otype(USER)
ANN = encode_fields(USER_TYPE, {"name": "Ann", "age": 30})


@pytest.fixture
def stored() -> StoredRows:
    return StoredRows()


@pytest.fixture
def ann(stored: StoredRows) -> StoredRows:
    stored.run(ObjAdd(LOW, USER, ANN, False))
    return stored


def test_adding_an_object_writes_its_row_at_the_first_version(stored: StoredRows) -> None:
    plan = stored.run(ObjAdd(LOW, USER, ANN, True))
    assert plan.outcomes[0].id == LOW
    assert plan.outcomes[0].error is None
    assert plan.changes == (ObjectChange(LOW, 0, version(1), USER, ANN),)
    assert plan.changes_of == [(0,)]


def test_an_allocated_id_that_is_in_use_raises_id_taken(ann: StoredRows) -> None:
    plan = ann.run(ObjAdd(LOW, USER, ANN, True))
    assert isinstance(plan.outcomes[0].error, IdTaken)
    assert not plan.rows


def test_two_allocations_of_one_id_in_a_batch_give_it_to_the_first(stored: StoredRows) -> None:
    plan = stored.run(ObjAdd(LOW, USER, ANN, True), ObjAdd(LOW, PAGE, b"", True))
    assert [type(outcome.error) for outcome in plan.outcomes] == [type(None), IdTaken]
    assert stored.rows.objects[LOW].otype == USER


def test_adding_a_reserved_object_again_succeeds_without_effect(ann: StoredRows) -> None:
    plan = ann.run(ObjAdd(LOW, USER, ANN, False))
    assert plan.outcomes[0].found
    assert not plan.rows
    assert plan.unchanged_of == [(ObjectInvalidation(LOW, version(1)),)]


@pytest.mark.parametrize(("otype", "data"), [(USER, b""), (PAGE, ANN)])
def test_a_reserved_id_with_other_content_is_refused(ann: StoredRows, otype: int, data: bytes) -> None:
    plan = ann.run(ObjAdd(LOW, otype, data, False))
    assert isinstance(plan.outcomes[0].error, InvalidArgument)
    assert not plan.rows


def test_the_id_of_a_deleted_object_is_not_used_again(ann: StoredRows) -> None:
    ann.run(ObjDelete(LOW))
    assert isinstance(ann.run(ObjAdd(LOW, USER, ANN, False)).outcomes[0].error, InvalidArgument)
    assert isinstance(ann.run(ObjAdd(LOW, USER, ANN, True)).outcomes[0].error, IdTaken)


@pytest.mark.parametrize("otype", [0, USER])
def test_an_update_merges_fields_and_removes_those_that_are_nil(ann: StoredRows, otype: int) -> None:
    plan = ann.run(ObjUpdate(LOW, otype, encode_patch(USER_TYPE, {"age": None, "name": "Bo"})))
    assert plan.outcomes[0].found
    assert plan.changes == (ObjectChange(LOW, version(1), version(2), USER, encode_fields(USER_TYPE, {"name": "Bo"})),)


def test_an_update_that_changes_nothing_raises_no_version(ann: StoredRows) -> None:
    plan = ann.run(ObjUpdate(LOW, USER, encode_patch(USER_TYPE, {"age": 30})))
    assert plan.outcomes[0].found
    assert not plan.rows
    assert plan.changes == ()


def test_updates_of_a_batch_build_on_each_other_and_raise_the_version_once(ann: StoredRows) -> None:
    plan = ann.run(
        ObjUpdate(LOW, USER, encode_patch(USER_TYPE, {"age": 31})),
        ObjUpdate(LOW, USER, encode_patch(USER_TYPE, {"name": "Bo"})),
    )
    expected = encode_fields(USER_TYPE, {"name": "Bo", "age": 31})
    assert plan.changes == (ObjectChange(LOW, version(1), version(2), USER, expected),)
    assert plan.changes_of == [(0,), (0,)]


def test_updating_as_another_type_is_refused(ann: StoredRows) -> None:
    plan = ann.run(ObjUpdate(LOW, PAGE, b""))
    assert isinstance(plan.outcomes[0].error, WrongType)
    assert "'user', not 'page'" in plan.outcomes[0].error.message


def test_an_update_without_type_is_checked_against_the_stored_one(ann: StoredRows) -> None:
    plan = ann.run(ObjUpdate(LOW, 0, encode_patch(SCHEMA.otype(PAGE), {"views": 3})))
    assert isinstance(plan.outcomes[0].error, InvalidField)
    assert not plan.rows


def test_an_update_that_makes_the_object_too_large_is_refused(stored: StoredRows) -> None:
    stored.run(ObjAdd(LOW, USER, encode_fields(USER_TYPE, {"name": "x" * (2**20 - 20)}), False))
    # Field 9 is unknown here and therefore kept. Each blob fits alone, but not both together.
    plan = stored.run(ObjUpdate(LOW, USER, b"\x81\x09\xb9" + b"y" * 25))
    assert isinstance(plan.outcomes[0].error, TooLarge)
    assert not plan.rows


def test_updating_or_deleting_a_missing_object_succeeds_and_reports_it(stored: StoredRows) -> None:
    plan = stored.run(ObjUpdate(LOW, USER, b""), ObjDelete(LOW))
    assert [(outcome.found, outcome.error) for outcome in plan.outcomes] == [(False, None), (False, None)]
    assert not plan.rows
    assert plan.unchanged_of == [(), ()]


def test_a_delete_that_names_another_type_is_refused_and_one_that_names_the_type_is_done(ann: StoredRows) -> None:
    plan = ann.run(ObjDelete(LOW, PAGE))
    assert isinstance(plan.outcomes[0].error, WrongType)
    assert "'user', not 'page'" in plan.outcomes[0].error.message
    assert not plan.rows
    assert ann.run(ObjDelete(LOW, USER)).outcomes[0].found
    assert not ann.run(ObjDelete(LOW, PAGE)).outcomes[0].found


def test_deleting_leaves_a_tombstone_with_the_next_version(ann: StoredRows) -> None:
    plan = ann.run(ObjDelete(LOW))
    assert plan.outcomes[0].found
    assert plan.changes == (ObjectChange(LOW, version(1), version(2), 0, deleted_data(USER)),)
    assert ann.rows.objects[LOW].deleted
    assert ann.rows.objects[LOW].data == b""
    again = ann.run(ObjDelete(LOW), ObjUpdate(LOW, USER, b""))
    assert [outcome.found for outcome in again.outcomes] == [False, False]
    assert not again.rows


def test_an_object_added_and_deleted_in_one_batch_leaves_a_tombstone(stored: StoredRows) -> None:
    plan = stored.run(ObjAdd(LOW, USER, ANN, False), ObjDelete(LOW))
    assert plan.changes == (ObjectChange(LOW, 0, version(1), 0, deleted_data(USER)),)
    assert stored.rows.objects[LOW].deleted


def test_versions_continue_under_a_higher_epoch(ann: StoredRows) -> None:
    ann.epoch = 4
    (change,) = ann.run(ObjDelete(LOW)).changes
    assert isinstance(change, ObjectChange)
    assert change.after == version(2, epoch=4)
