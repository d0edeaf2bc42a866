"""Writes of edges of types with states: joins, moves between state types, and what raises a version."""

from __future__ import annotations

import pytest

from tao.model.changes import ListChange
from tao.model.edge_states import EdgeRegisters, State
from tao.model.errors import InvalidArgument, OperationAhead, OperationTooOld
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ListRow
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    PurgeEdge,
    ReadState,
    SettleEdge,
    Write,
)
from tao.planning.coordination import PlannedWrite, keys_of
from tao.planning.edge_states import purge_before_unix_s
from tao.planning.row_events import translate
from tao.planning.write_plan import WritePlan, draft_writes, validate
from tao.schema.registry import Schema, load_schema
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import HIGH, LOW, NOW, PAIR, StoredRows, version

NOW_US = NOW * 1000
DAY_US = 24 * 3600 * 1_000_000
FOLLOWS, FOLLOWED_BY, BLOCKS = 11, 12, 31
NORMAL, NEGATIVE, ARCHIVED, REMOVED = State
SIBLINGS = {FOLLOWS: (11, 213, 211, 212), FOLLOWED_BY: (12, 223, 221, 222), BLOCKS: (31, 0, 0, 312)}
SCHEMA: Schema = load_schema(
    """
format: 1
associations:
  likes: {number: 4}
  follows:
    number: 11
    inverse: followed_by
    fields: {note: {number: 1, type: str}}
    states: {archived: 211, removed: 212, negative: 213}
  followed_by: {number: 12, inverse: follows, states: {archived: 221, removed: 222, negative: 223}}
  blocks: {number: 31, states: {removed: 312}}
""",
    "schema.yaml",
)


def stored_rows() -> StoredRows:
    return StoredRows(full_schema=SCHEMA)


def run(stored: StoredRows, *writes: Write, both_sides: bool = True, now: int = NOW) -> WritePlan:
    for write in writes:
        validate(write, SCHEMA)
    plan = stored.run(*writes, both_sides=both_sides, now=now, schema=SCHEMA)
    for outcome in plan.outcomes:
        if outcome.error is not None:
            raise outcome.error
    return plan


def merge(state: State, at: int, time: int | None = None, *, atype: int = FOLLOWS) -> AssocMerge:
    return AssocMerge(LOW, atype, HIGH, state, NOW_US + at, time is not None, NOW_US + at if time else 0, time or 0)


def places(stored: StoredRows) -> dict[tuple[int, int], EdgeRegisters]:
    """Return the registers of every row by its id1 and its type's number."""
    return {(key.id1, key.atype): stored.rows.registers[key] for key in stored.rows.edges}


def counts(stored: StoredRows) -> dict[tuple[int, int], int]:
    return {(key.id1, key.atype): row.count for key, row in stored.rows.lists.items() if row.count}


def test_a_write_reads_the_lists_that_it_is_expected_to_change_and_names_the_others_it_does() -> None:
    stored = stored_rows()
    near, far = ((LOW, SIBLINGS[FOLLOWS]), (HIGH, SIBLINGS[FOLLOWED_BY]))

    def lists(*states: State) -> set[ListKey]:
        return {ListKey(id1, numbers[state]) for id1, numbers in (near, far) for state in states}

    add = AssocAdd(LOW, FOLLOWS, HIGH, 7, b"")
    for write, states in (
        (add, (NORMAL,)),
        (AssocDelete(LOW, FOLLOWS, HIGH), (NORMAL, REMOVED)),
        (merge(ARCHIVED, 2, 7), (NORMAL, ARCHIVED)),
        (merge(ARCHIVED, 2), (NORMAL, ARCHIVED, REMOVED)),
        (SettleEdge(LOW, FOLLOWS, HIGH, True, registers=EdgeRegisters()), ()),
    ):
        keys = keys_of([PlannedWrite(write, True)], SCHEMA)
        assert keys.lists == lists(*states) if states else {ListKey(LOW, each) for each in SIBLINGS[FOLLOWS]}
    run(stored, add, now=NOW - 1)
    run(stored, merge(ARCHIVED, 1))
    planned = [PlannedWrite(add, True)]
    drafted = draft_writes(stored.rows, planned, SCHEMA, NOW)
    assert drafted.unread_lists(keys_of(planned, SCHEMA)) == lists(ARCHIVED)


def test_an_add_stands_in_the_normal_list_of_both_ends() -> None:
    stored = stored_rows()
    plan = run(stored, AssocAdd(LOW, FOLLOWS, HIGH, 7, b""))
    registers = EdgeRegisters(NORMAL, NOW_US, NOW_US, 7, b"")
    assert places(stored) == {(LOW, 11): registers, (HIGH, 12): registers}
    assert counts(stored) == {(LOW, 11): 1, (HIGH, 12): 1}
    assert (plan.outcomes[0].found, plan.outcomes[0].superseded) == (False, False)
    assert plan.rows.changed_unix_s == NOW // 1000


def test_archiving_moves_the_edge_with_time_and_data_and_restoring_brings_it_to_its_place() -> None:
    stored = stored_rows()
    run(stored, AssocAdd(LOW, FOLLOWS, HIGH, 7, b"\x81\x01\xa1x"))
    plan = run(stored, merge(ARCHIVED, 5))
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}
    assert stored.edge(LOW, 211, HIGH) == Edge(HIGH, 7, b"\x81\x01\xa1x")
    assert plan.outcomes[0].found
    changed = {(change.id1, change.atype): change for change in plan.changes if isinstance(change, ListChange)}
    assert [each.id2 for each in changed[LOW, 11].gone] == [HIGH]
    assert changed[LOW, 211].put == (Edge(HIGH, 7, b"\x81\x01\xa1x"),)
    run(stored, merge(NORMAL, 6))
    assert stored.edge(LOW, 11, HIGH) == Edge(HIGH, 7, b"\x81\x01\xa1x")
    assert counts(stored) == {(LOW, 11): 1, (HIGH, 12): 1}


def test_archive_before_add_ends_like_add_before_archive() -> None:
    operations = [merge(NORMAL, 1, 7), merge(ARCHIVED, 2)]
    results = []
    for order in (operations, operations[::-1]):
        stored = stored_rows()
        for operation in order:
            run(stored, operation)
        results.append((stored.rows.edges, stored.rows.registers, counts(stored)))
    assert results[0] == results[1]
    assert results[0][2] == {(LOW, 211): 1, (HIGH, 221): 1}


def test_an_edge_that_was_never_added_is_in_no_list_but_that_of_removed_edges() -> None:
    stored = stored_rows()
    run(stored, merge(ARCHIVED, 1))
    assert counts(stored) == {(LOW, 212): 1, (HIGH, 222): 1}
    assert not run(stored, merge(NORMAL, 2)).outcomes[0].found
    assert counts(stored) == {(LOW, 212): 1, (HIGH, 222): 1}


def test_an_older_operation_is_superseded_and_changes_nothing() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    plan = run(stored, merge(REMOVED, 4))
    assert plan.outcomes[0].superseded
    assert not plan.rows
    assert plan.outcomes[0].registers is not None
    assert plan.outcomes[0].registers.effective_state(NORMAL) is NORMAL


def test_at_an_equal_microsecond_the_higher_state_wins_and_then_the_larger_payload() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7), merge(REMOVED, 5), merge(NORMAL, 5, 6))
    assert counts(stored) == {(LOW, 212): 1, (HIGH, 222): 1}
    assert stored.edge(LOW, 212, HIGH) == Edge(HIGH, 7)


def test_a_repeated_operation_raises_no_version_and_is_not_superseded() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    plan = run(stored, merge(NORMAL, 5, 7))
    assert not plan.rows
    assert plan.changes == ()
    assert not plan.outcomes[0].superseded


def test_an_operation_that_changes_only_a_register_raises_no_version() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    before = dict(stored.rows.lists)
    plan = run(stored, merge(NORMAL, 6))
    assert plan.changes == ()
    assert not plan.rows.put_lists
    assert not plan.rows.put_edges
    assert stored.rows.lists == before
    assert stored.rows.registers[EdgeKey(HIGH, 12, LOW)].state_us == NOW_US + 6


def test_the_leader_stamps_operations_above_the_row() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 30_000_000, 7))
    plan = run(stored, AssocDelete(LOW, FOLLOWS, HIGH))
    assert not plan.outcomes[0].superseded
    assert stored.rows.registers[EdgeKey(LOW, 212, HIGH)].state_us == NOW_US + 30_000_001


def test_the_leaders_stamp_is_above_the_row_even_where_that_is_from_the_future() -> None:
    """Otherwise a register that was set by hand, or under a clock that was ahead, would refuse every later write."""
    stored = stored_rows()
    run(stored, merge(NORMAL, 0, 7))
    key = EdgeKey(LOW, 11, HIGH)
    ahead = NOW_US + 3_600_000_000
    stored.rows.registers[key] = EdgeRegisters(NORMAL, ahead, NOW_US, 7)
    run(stored, AssocDelete(LOW, FOLLOWS, HIGH))
    assert stored.rows.registers[EdgeKey(LOW, 212, HIGH)].state_us == ahead + 1


def test_timestamp_from_the_future_is_rejected() -> None:
    run(stored_rows(), merge(NORMAL, 60_000_000, 7))
    with pytest.raises(OperationAhead, match="61 s ahead"):
        run(stored_rows(), merge(NORMAL, 61_000_000, 7))


def test_an_operation_older_than_the_removed_edges_that_are_kept_is_rejected() -> None:
    run(stored_rows(), merge(NORMAL, -30 * DAY_US, 7))
    with pytest.raises(OperationTooOld, match="more than 30 days"):
        run(stored_rows(), merge(NORMAL, -30 * DAY_US - 1, 7))
    old_payload = AssocMerge(LOW, FOLLOWS, HIGH, NORMAL, NOW_US, True, NOW_US - 31 * DAY_US, 7)
    with pytest.raises(OperationTooOld):
        run(stored_rows(), old_payload)


def test_a_type_without_inverse_has_one_row() -> None:
    stored = stored_rows()
    run(stored, AssocAdd(LOW, BLOCKS, HIGH, 7, b""))
    run(stored, AssocDelete(LOW, BLOCKS, HIGH))
    assert counts(stored) == {(LOW, 312): 1}


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (AssocAdd(LOW, 211, HIGH, 1, b""), "type 211 holds the archived edges of 'follows'"),
        (AssocDelete(LOW, 212, HIGH), "type 212 holds the removed edges of 'follows'"),
        (AssocChangeType(LOW, FOLLOWS, HIGH, 4), "'follows' has states"),
        (AssocChangeType(LOW, 4, HIGH, FOLLOWS), "'follows' has states"),
        (AssocMerge(LOW, 4, HIGH, REMOVED), "'likes' has no states"),
        (AssocMerge(LOW, BLOCKS, HIGH, ARCHIVED), "no state 'archived'; it has normal, removed"),
        (AssocMerge(LOW, FOLLOWS, HIGH, 4), "4 is no state"),
        (AssocMerge(LOW, FOLLOWS, HIGH, NORMAL, 2**63), "state_us"),
        (AssocMerge(LOW, FOLLOWS, HIGH, NORMAL, NOW_US, time=3), "has_payload"),
        (AssocMerge(LOW, FOLLOWS, HIGH, NORMAL, 0, True, NOW_US), "without state_us"),
        (ReadState(LOW, 4, HIGH), "has no states"),
        (SettleEdge(LOW, FOLLOWS, HIGH, True), "joined only if"),
    ],
)
def test_a_wrong_operation_is_refused(write: Write, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        validate(write, SCHEMA)


def test_one_side_is_written_with_an_intent_and_its_copy_carries_the_registers() -> None:
    stored = stored_rows()
    plan = run(stored, AssocAdd(HIGH, FOLLOWED_BY, LOW, 7, b""), both_sides=False)
    intent = plan.intents[0]
    assert intent is not None
    assert intent.atypes == (FOLLOWS,)
    registers = EdgeRegisters(NORMAL, NOW_US, NOW_US, 7)
    assert plan.settles[0] == (SettleEdge(HIGH, FOLLOWED_BY, LOW, True, 7, b"", registers=registers),)
    run(stored, *plan.settles[0])
    assert places(stored) == {(LOW, 11): registers, (HIGH, 12): registers}


def test_a_change_of_a_register_alone_leaves_an_intent_too() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    plan = run(stored, merge(NORMAL, 6), both_sides=False)
    assert plan.intents[0] is not None
    assert plan.settles[0] is not None
    run(stored, *plan.settles[0])
    assert stored.rows.registers[EdgeKey(HIGH, 12, LOW)].state_us == NOW_US + 6


def test_a_superseded_operation_at_one_side_leaves_no_intent() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    assert run(stored, merge(REMOVED, 4), both_sides=False).intents == [None]


def test_the_far_side_joins_a_copy_and_answers_with_what_it_knows() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    far = EdgeKey(HIGH, 12, LOW)
    stored.rows.registers[far] = EdgeRegisters(NORMAL, NOW_US + 9, NOW_US + 5, 7)
    copy = SettleEdge(
        HIGH, FOLLOWED_BY, LOW, True, 7, b"", registers=EdgeRegisters(ARCHIVED, NOW_US + 8, NOW_US + 5, 7)
    )
    plan = run(stored, copy)
    assert plan.outcomes[0].registers == EdgeRegisters(NORMAL, NOW_US + 9, NOW_US + 5, 7)
    assert not plan.rows


def test_a_write_of_both_ends_joins_them_and_leaves_an_older_intent_to_be_settled() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7), both_sides=False)
    stored.put_edge(HIGH, 221, LOW, 7)
    stored.rows.registers[EdgeKey(HIGH, 221, LOW)] = EdgeRegisters(ARCHIVED, NOW_US + 6, NOW_US + 5, 7)
    run(stored, merge(NORMAL, 4, 3))
    assert PAIR in stored.rows.intents
    registers = EdgeRegisters(ARCHIVED, NOW_US + 6, NOW_US + 5, 7)
    assert places(stored) == {(LOW, 211): registers, (HIGH, 221): registers}
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}


def test_a_foreign_row_loses_against_every_operation_and_keeps_its_payload() -> None:
    stored = stored_rows()
    stored.put_edge(LOW, 211, HIGH, 9)  # a script has inserted an archived edge at one end
    run(stored, merge(NORMAL, -DAY_US))
    assert counts(stored) == {(LOW, 11): 1, (HIGH, 12): 1}
    assert stored.edge(HIGH, 12, LOW) == Edge(LOW, 9)


def test_rows_of_one_edge_in_several_lists_become_one() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    stored.put_edge(LOW, 213, HIGH, 3)
    run(stored, merge(ARCHIVED, 6))
    assert counts(stored) == {(LOW, 211): 1, (HIGH, 221): 1}
    assert stored.edge(LOW, 211, HIGH) == Edge(HIGH, 7)


def test_reading_a_state_changes_nothing_and_returns_the_registers() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    plan = run(stored, ReadState(HIGH, FOLLOWED_BY, LOW))
    assert not plan.rows
    assert plan.outcomes[0].registers == EdgeRegisters(NORMAL, NOW_US + 5, NOW_US + 5, 7)
    assert plan.outcomes[0].found
    assert run(stored, ReadState(LOW, BLOCKS, HIGH)).outcomes[0].registers == EdgeRegisters()


def test_the_writer_learns_the_version_of_the_list_although_nothing_changes() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 5, 7))
    plan = run(stored, merge(NORMAL, 4, 7))
    assert (LOW, 11) in {(each.id1, each.atype) for each in plan.unchanged_of[0]}  # type: ignore[union-attr]


def test_leader_and_tailer_report_the_same_changeset_for_a_state_change() -> None:
    stored = stored_rows()
    run(stored, AssocAdd(LOW, FOLLOWS, HIGH, 7, b""))
    for write in (merge(ARCHIVED, 5), merge(ARCHIVED, 6), merge(REMOVED, 7), merge(NORMAL, 8, 9)):
        planned = stored.plan(write, schema=SCHEMA)
        translated = translate(row_events_of(stored.rows, planned.rows, SCHEMA), SCHEMA)
        assert tuple(each for part in translated.messages for each in part.messages) == planned.changes
        assert (translated.touches, translated.passed_over, translated.unknown_columns) == ((), 0, 0)
        stored.apply(planned)


def test_a_foreign_row_is_touched() -> None:
    events = row_events_of(
        stored_rows().rows, stored_rows().plan(AssocAdd(LOW, FOLLOWS, HIGH, 7, b""), schema=SCHEMA).rows, SCHEMA
    )
    foreign = [event for event in events if event.table != "assoc_lists"]
    touched = {(touch.id, touch.atype) for touch in translate(foreign, SCHEMA).touches}
    assert touched == {(LOW, 11), (HIGH, 12)}


def test_an_older_list_row_is_raised_by_one() -> None:
    stored = stored_rows()
    stored.rows.lists[ListKey(LOW, 11)] = ListRow(0, version(4))
    run(stored, AssocAdd(LOW, FOLLOWS, HIGH, 7, b""))
    assert stored.rows.lists[ListKey(LOW, 11)] == ListRow(1, version(5))
    assert PAIR not in stored.rows.intents


def purge(
    stored: StoredRows, registers: EdgeRegisters, *, id1: int = LOW, atype: int = FOLLOWS, id2: int = HIGH
) -> bool:
    return run(stored, PurgeEdge(id1, atype, id2, registers)).outcomes[0].found


def test_purged_remove_does_not_admit_an_older_add() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 0, 7), merge(REMOVED, 60_000_000))  # as far ahead as an operation may be
    registers = stored.rows.registers[EdgeKey(LOW, 212, HIGH)]
    atype = SCHEMA.atype(FOLLOWS)
    now = NOW
    while purge_before_unix_s(atype, now) < NOW // 1000:  # the row changed at NOW
        now += 60_000
    assert purge(stored, registers)
    assert purge(stored, registers, id1=HIGH, atype=FOLLOWED_BY, id2=LOW)
    assert (stored.rows.edges, counts(stored)) == ({}, {})
    # Every operation that the removal beats is refused now, also by a leader whose clock is half an hour behind.
    for at in (0, 59_999_999, 60_000_000):
        with pytest.raises(OperationTooOld):
            run(stored, merge(NORMAL, at, 7), now=now - 1_800_000)


def test_a_removed_edge_is_purged_with_a_version_and_its_count() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 1, 7), merge(REMOVED, 2))
    before = stored.rows.lists[ListKey(LOW, 212)]
    plan = run(stored, PurgeEdge(LOW, FOLLOWS, HIGH, stored.rows.registers[EdgeKey(LOW, 212, HIGH)]))
    after = stored.rows.lists[ListKey(LOW, 212)]
    assert (before.count, after.count, after.version) == (1, 0, before.version + 1)
    (change,) = plan.changes
    assert isinstance(change, ListChange)
    assert places(stored).keys() == {(HIGH, 222)}


def test_an_edge_that_changed_since_it_was_read_is_not_purged() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 1, 7), merge(REMOVED, 2))
    read = stored.rows.registers[EdgeKey(LOW, 212, HIGH)]
    run(stored, merge(REMOVED, 3))
    assert not purge(stored, read)
    run(stored, merge(NORMAL, 4))
    assert not purge(stored, stored.rows.registers[EdgeKey(LOW, 11, HIGH)])
    assert len(stored.rows.edges) == 2


def test_an_edge_whose_other_end_is_owed_is_not_purged() -> None:
    stored = stored_rows()
    run(stored, merge(NORMAL, 1, 7), merge(REMOVED, 2), both_sides=False)
    read = stored.rows.registers[EdgeKey(LOW, 212, HIGH)]
    assert PAIR in stored.rows.intents
    assert not purge(stored, read)
    del stored.rows.intents[PAIR]
    assert purge(stored, read)
