"""Planning of edge writes whose two sides are written in one transaction."""

import pytest

from tao.model.changes import GoneEdge, ListChange, ListInvalidation
from tao.model.errors import InvalidField, TooLarge, UnknownType
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ListRow
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, ObjAdd, SettleEdge, Write
from tao.schema.codec import encode_fields
from tao.schema.registry import Schema
from tests.unit.planning.stored_rows import (
    FOLLOWS,
    FRIEND,
    HIGH,
    LIKED_BY,
    LIKES,
    LOW,
    NOTE,
    SCHEMA,
    TAGGED_IN,
    TAGS,
    USER,
    WIDE,
    StoredRows,
    on_shard,
    version,
)

HEAVY = encode_fields(SCHEMA.atype(LIKES), {"weight": 9})


@pytest.fixture
def stored() -> StoredRows:
    return StoredRows()


def test_an_edge_without_inverse_is_one_row(stored: StoredRows) -> None:
    plan = stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 5, HEAVY))
    assert plan.changes == (ListChange(LOW, FOLLOWS, 0, version(1), 1, (), (Edge(HIGH, 5, HEAVY),)),)
    assert set(plan.rows.put_edges) == {EdgeKey(LOW, FOLLOWS, HIGH)}


@pytest.mark.parametrize(("id1", "id2"), [(LOW, HIGH), (HIGH, LOW)])
@pytest.mark.parametrize(("atype", "inverse"), [(FRIEND, FRIEND), (LIKES, LIKED_BY)])
def test_an_edge_with_inverse_is_two_rows_of_one_time_and_data(
    stored: StoredRows, id1: int, id2: int, atype: int, inverse: int
) -> None:
    plan = stored.run(AssocAdd(id1, atype, id2, 5, HEAVY))
    assert stored.edge(id1, atype, id2) == Edge(id2, 5, HEAVY)
    assert stored.edge(id2, inverse, id1) == Edge(id1, 5, HEAVY)
    assert not plan.outcomes[0].found
    assert plan.intents == [None]
    assert len(plan.changes) == 2
    assert sorted(plan.changes_of[0]) == [0, 1]


def test_adding_again_replaces_time_and_data(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 5, b""))
    plan = stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 6, HEAVY))
    assert plan.outcomes[0].found
    assert plan.changes == (
        ListChange(LOW, FOLLOWS, version(1), version(2), 1, (GoneEdge(HIGH, 5),), (Edge(HIGH, 6, HEAVY),)),
    )


def test_a_change_of_data_alone_does_not_move_the_edge(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 5, b""))
    (change,) = stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 5, HEAVY)).changes
    assert isinstance(change, ListChange)
    assert (change.gone, change.put) == ((), (Edge(HIGH, 5, HEAVY),))


def test_adding_an_existing_edge_changes_nothing_and_invalidates_at_the_current_version(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, HEAVY))
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, HEAVY))
    assert plan.outcomes[0].found
    assert not plan.rows
    assert plan.changes_of == [()]
    assert plan.unchanged_of == [
        (ListInvalidation(LOW, LIKES, version(1)), ListInvalidation(HIGH, LIKED_BY, version(1)))
    ]


@pytest.mark.parametrize(("id1", "atype", "id2"), [(LOW, LIKES, HIGH), (HIGH, LIKED_BY, LOW)])
def test_deleting_from_either_end_removes_both_rows_and_keeps_the_lists(
    stored: StoredRows, id1: int, atype: int, id2: int
) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""))
    plan = stored.run(AssocDelete(id1, atype, id2))
    assert plan.outcomes[0].found
    assert stored.rows.edges == {}
    assert stored.rows.lists == {
        ListKey(LOW, LIKES): ListRow(0, version(2)),
        ListKey(HIGH, LIKED_BY): ListRow(0, version(2)),
    }


def test_deleting_a_missing_edge_succeeds_and_reports_it(stored: StoredRows) -> None:
    plan = stored.run(AssocDelete(LOW, LIKES, HIGH))
    assert (plan.outcomes[0].found, plan.outcomes[0].error) == (False, None)
    assert not plan.rows


def test_found_reports_the_coordinators_row_and_a_missing_mirror_is_restored(stored: StoredRows) -> None:
    stored.put_edge(LOW, LIKES, HIGH, time=5)
    plan = stored.run(AssocAdd(HIGH, LIKED_BY, LOW, 5, b""))
    assert plan.outcomes[0].found
    assert stored.edge(HIGH, LIKED_BY, LOW) == Edge(LOW, 5)
    assert [change.shard for change in plan.changes] == [2]


def test_an_add_and_a_delete_in_one_batch_leave_no_trace(stored: StoredRows) -> None:
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), AssocDelete(HIGH, LIKED_BY, LOW))
    assert [outcome.found for outcome in plan.outcomes] == [False, True]
    assert not plan.rows
    assert plan.changes == ()


def test_a_batch_raises_a_list_once_and_puts_the_newest_first(stored: StoredRows) -> None:
    ids = [on_shard(3, each) for each in range(3)]
    plan = stored.run(*(AssocAdd(LOW, FOLLOWS, each, time, b"") for each, time in zip(ids, (5, 7, 5), strict=True)))
    put = (Edge(ids[1], 7), Edge(ids[2], 5), Edge(ids[0], 5))
    assert plan.changes == (ListChange(LOW, FOLLOWS, 0, version(1), 3, (), put),)
    assert plan.changes_of == [(0,), (0,), (0,)]
    plan = stored.run(*(AssocDelete(LOW, FOLLOWS, each) for each in ids))
    gone = (GoneEdge(ids[1], 7), GoneEdge(ids[2], 5), GoneEdge(ids[0], 5))
    assert plan.changes == (ListChange(LOW, FOLLOWS, version(1), version(2), 0, gone, ()),)


def test_the_order_of_changes_does_not_depend_on_the_order_of_the_writes(stored: StoredRows) -> None:
    writes: list[Write] = [
        AssocAdd(HIGH, FOLLOWS, LOW, 1, b""),
        AssocAdd(LOW, LIKES, HIGH, 1, b""),
        ObjAdd(HIGH, USER, b"", False),
        ObjAdd(LOW, USER, b"", False),
    ]
    plan = stored.plan(*writes)
    assert plan.changes == stored.plan(*reversed(writes)).changes
    assert [type(change).__name__ for change in plan.changes] == ["ObjectChange"] * 2 + ["ListChange"] * 3


def test_a_symmetric_edge_to_itself_is_one_row(stored: StoredRows) -> None:
    plan = stored.run(AssocAdd(LOW, FRIEND, LOW, 5, b""), both_sides=False)
    assert set(stored.rows.edges) == {EdgeKey(LOW, FRIEND, LOW)}
    assert plan.intents == [None]
    assert stored.run(AssocDelete(LOW, FRIEND, LOW)).outcomes[0].found
    assert stored.rows.edges == {}


def test_an_asymmetric_edge_to_itself_is_two_rows(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, LOW, 5, b""), both_sides=False)
    assert set(stored.rows.edges) == {EdgeKey(LOW, LIKES, LOW), EdgeKey(LOW, LIKED_BY, LOW)}
    assert stored.run(AssocDelete(LOW, LIKED_BY, LOW)).outcomes[0].found
    assert stored.rows.edges == {}


@pytest.mark.parametrize(
    ("start", "write", "end"),
    [
        pytest.param((LOW, FOLLOWS), (LOW, FOLLOWS, HIGH, LIKES), {(LOW, LIKES), (HIGH, LIKED_BY)}, id="gains inverse"),
        pytest.param((HIGH, FOLLOWS), (HIGH, FOLLOWS, LOW, LIKES), {(HIGH, LIKES), (LOW, LIKED_BY)}, id="gains, high"),
        pytest.param((LOW, LIKES), (LOW, LIKES, HIGH, FOLLOWS), {(LOW, FOLLOWS)}, id="loses inverse"),
        pytest.param((HIGH, LIKES), (HIGH, LIKES, LOW, FOLLOWS), {(HIGH, FOLLOWS)}, id="loses inverse, high"),
        pytest.param((LOW, LIKES), (LOW, LIKES, HIGH, TAGS), {(LOW, TAGS), (HIGH, TAGGED_IN)}, id="both"),
        pytest.param((LOW, LIKES), (HIGH, LIKED_BY, LOW, FRIEND), {(LOW, FRIEND), (HIGH, FRIEND)}, id="from other end"),
        pytest.param((LOW, LIKES), (LOW, LIKES, HIGH, LIKED_BY), {(LOW, LIKED_BY), (HIGH, LIKES)}, id="turned round"),
    ],
)
def test_changing_the_type_moves_the_edge_and_its_inverse_with_time_and_data(
    stored: StoredRows, start: tuple[int, int], write: tuple[int, int, int, int], end: set[tuple[int, int]]
) -> None:
    other = {LOW: HIGH, HIGH: LOW}
    stored.run(AssocAdd(start[0], start[1], other[start[0]], 5, HEAVY))
    plan = stored.run(AssocChangeType(*write))
    assert (plan.outcomes[0].found, plan.outcomes[0].error) == (True, None)
    assert stored.rows.edges == {EdgeKey(id1, atype, other[id1]): Edge(other[id1], 5, HEAVY) for id1, atype in end}


def test_changing_the_type_onto_an_existing_edge_overwrites_it(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, HEAVY), AssocAdd(LOW, TAGS, HIGH, 9, b""))
    stored.run(AssocChangeType(LOW, LIKES, HIGH, TAGS))
    assert stored.rows.edges == {
        EdgeKey(LOW, TAGS, HIGH): Edge(HIGH, 5, HEAVY),
        EdgeKey(HIGH, TAGGED_IN, LOW): Edge(LOW, 5, HEAVY),
    }
    assert stored.rows.lists[ListKey(LOW, TAGS)].count == 1


def test_changing_the_type_of_a_missing_edge_reports_it(stored: StoredRows) -> None:
    plan = stored.run(AssocChangeType(LOW, LIKES, HIGH, TAGS))
    assert (plan.outcomes[0].found, plan.outcomes[0].error) == (False, None)
    assert not plan.rows


def test_changing_to_the_same_type_changes_nothing(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, HEAVY))
    plan = stored.run(AssocChangeType(LOW, LIKES, HIGH, LIKES))
    assert plan.outcomes[0].found
    assert not plan.rows


def test_data_that_the_new_type_cannot_hold_is_refused_with_nothing_written(stored: StoredRows) -> None:
    long = encode_fields(SCHEMA.atype(WIDE), {"text": "x" * 300})
    stored.run(AssocAdd(LOW, WIDE, HIGH, 5, long), AssocAdd(LOW, LIKES, HIGH, 5, HEAVY))
    plan = stored.run(
        AssocChangeType(LOW, WIDE, HIGH, NOTE),
        AssocChangeType(LOW, LIKES, HIGH, NOTE),
        AssocAdd(LOW, FOLLOWS, HIGH, 1, b""),
    )
    assert [type(outcome.error) for outcome in plan.outcomes] == [TooLarge, InvalidField, type(None)]
    assert set(plan.rows.put_edges) == {EdgeKey(LOW, FOLLOWS, HIGH)}
    assert plan.rows.delete_edges == []
    assert plan.changes_of == [(), (), (0,)]


def test_a_type_that_left_the_schema_meanwhile_fails_its_write_alone(stored: StoredRows) -> None:
    shrunk = Schema(SCHEMA.objects, SCHEMA.assocs[:-2], frozenset(), frozenset({TAGS, TAGGED_IN}))
    plan = stored.run(AssocAdd(LOW, TAGGED_IN, LOW, 1, b""), AssocAdd(LOW, FOLLOWS, HIGH, 1, b""), schema=shrunk)
    assert [type(outcome.error) for outcome in plan.outcomes] == [UnknownType, type(None)]


def test_settling_an_edge_sets_that_row_alone_and_may_be_repeated(stored: StoredRows) -> None:
    settle = SettleEdge(HIGH, LIKED_BY, LOW, True, 5, HEAVY)
    assert set(stored.run(settle).rows.put_edges) == {EdgeKey(HIGH, LIKED_BY, LOW)}
    assert not stored.run(settle).rows
    gone = stored.run(SettleEdge(HIGH, LIKED_BY, LOW, False))
    assert gone.outcomes[0].found
    assert stored.rows.edges == {}


def test_a_count_corrupted_by_hand_does_not_fail_the_transaction(stored: StoredRows) -> None:
    stored.put_edge(LOW, FOLLOWS, HIGH)
    stored.rows.lists[ListKey(LOW, FOLLOWS)] = ListRow(0, version(3))
    stored.run(AssocDelete(LOW, FOLLOWS, HIGH))
    assert stored.rows.lists[ListKey(LOW, FOLLOWS)] == ListRow(0, version(4))
