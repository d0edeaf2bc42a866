"""Flushes and folds of counters: what they write, in which order, and what a leader refuses."""

from __future__ import annotations

import pytest

from tao.model.changes import ListChange
from tao.model.counters import (
    FOLDED_SLOT,
    LIFE_HORIZON_SECONDS,
    LIFE_MARGIN_SECONDS,
    MAX_COUNTED,
    NOTHING,
    SlotTotals,
    clamped,
    decode_totals,
    encode_totals,
    slot_of_life,
)
from tao.model.errors import InvalidArgument, OperationTooOld, UnknownType
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.writes import AssocAdd, FlushCounter, FoldCounter, Write, WriteOutcome
from tao.planning.row_events import translate
from tao.planning.write_plan import WritePlan, validate
from tao.schema.registry import Schema, load_schema
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import LOW, NOW, StoredRows

VIEWS, LIKES = 401, 4
SCHEMA: Schema = load_schema(
    """
format: 1
objects: {post: {number: 9, counters: {views: {number: 401}}}}
associations: {likes: {number: 4}}
""",
    "schema.yaml",
)
SLOT, OTHER = slot_of_life(NOW // 1000, 1), slot_of_life(NOW // 1000, 2)
GONE_MS = NOW + (LIFE_HORIZON_SECONDS + LIFE_MARGIN_SECONDS + 1) * 1000


def stored_rows() -> StoredRows:
    return StoredRows(full_schema=SCHEMA)


def run(stored: StoredRows, *writes: Write, now: int = NOW) -> WritePlan:
    """Run the writes, and check that the tailer reports what the leader does."""
    for write in writes:
        validate(write, SCHEMA)
    planned = stored.plan(*writes, schema=SCHEMA, now=now)
    translated = translate(row_events_of(stored.rows, planned.rows, SCHEMA), SCHEMA)
    assert tuple(each for part in translated.messages for each in part.messages) == planned.changes
    assert (translated.touches, translated.passed_over, translated.unknown_columns) == ((), 0, 0)
    stored.apply(planned)
    for outcome in planned.outcomes:
        if outcome.error is not None:
            raise outcome.error
    return planned


def flush(slot: int, number: int, plus: int, minus: int = 0) -> FlushCounter:
    return FlushCounter(LOW, VIEWS, slot, number, plus, minus)


def fold(*slots: int) -> FoldCounter:
    return FoldCounter(LOW, VIEWS, slots)


def slots(stored: StoredRows) -> dict[int, SlotTotals]:
    count = stored.rows.lists.get(ListKey(LOW, VIEWS))
    assert (0 if count is None else count.count) == len(stored.rows.edges)
    for key, edge in stored.rows.edges.items():
        assert stored.rows.registers[key].data == edge.data
    return {key.id2: decode_totals(edge.data) for key, edge in stored.rows.edges.items()}


def value(stored: StoredRows) -> int:
    return sum(each.value for each in slots(stored).values())


def outcome(plan: WritePlan) -> WriteOutcome:
    (found,) = plan.outcomes
    return found


def test_a_flush_sets_totals_and_the_higher_number_wins() -> None:
    stored = stored_rows()
    assert not outcome(run(stored, flush(SLOT, 1, 5))).found
    assert outcome(run(stored, flush(SLOT, 3, 9, 2))).found
    assert outcome(run(stored, flush(SLOT, 2, 7))).superseded
    assert slots(stored) == {SLOT: SlotTotals(9, 2)}
    assert value(stored) == 7


def test_flush_of_unknown_outcome_counts_once() -> None:
    stored = stored_rows()
    run(stored, flush(SLOT, 1, 5))
    again = run(stored, flush(SLOT, 1, 5))
    assert (outcome(again).superseded, again.changes, bool(again.rows)) == (False, (), False)
    same = run(stored, flush(SLOT, 2, 5))
    assert (same.changes, list(same.rows.put_registers)) == ((), [EdgeKey(LOW, VIEWS, SLOT)])
    assert value(stored) == 5


def test_a_flush_is_an_ordinary_change_of_a_list() -> None:
    stored = stored_rows()
    (change,) = run(stored, flush(SLOT, 1, 5)).changes
    assert isinstance(change, ListChange)
    assert (change.id1, change.atype, change.count) == (LOW, VIEWS, 1)
    assert change.put == (Edge(SLOT, 0, encode_totals(SlotTotals(5))),)


def test_a_fold_moves_what_slots_count_into_slot_zero_and_leaves_tombstones() -> None:
    stored = stored_rows()
    run(stored, flush(SLOT, 1, 5), flush(OTHER, 1, 0, 2))
    run(stored, fold(SLOT, OTHER))
    assert slots(stored) == {FOLDED_SLOT: SlotTotals(3), SLOT: SlotTotals(5, 0, 5), OTHER: SlotTotals(0, 2, -2)}
    assert value(stored) == 3
    assert run(stored, fold(SLOT, OTHER)).changes == ()


def test_folding_while_a_late_flush_arrives_loses_nothing() -> None:
    for order in ((2, "fold"), ("fold", 2)):
        stored = stored_rows()
        run(stored, flush(SLOT, 1, 5))
        for step in order:
            run(stored, fold(SLOT) if step == "fold" else flush(SLOT, 2, 9))
        assert value(stored) == 9
        run(stored, fold(SLOT))
        run(stored, flush(SLOT, 1, 5))
        assert slots(stored) == {FOLDED_SLOT: SlotTotals(9), SLOT: SlotTotals(9, 0, 9)}


def test_a_counter_at_rest_is_one_row_and_one_that_is_zero_is_none() -> None:
    stored = stored_rows()
    run(stored, flush(SLOT, 1, 5), flush(OTHER, 1, 0, 2))
    run(stored, fold(SLOT, OTHER), now=GONE_MS)
    assert slots(stored) == {FOLDED_SLOT: SlotTotals(3)}
    late = slot_of_life(GONE_MS // 1000, 3)
    run(stored, flush(late, 1, 0, 3), now=GONE_MS)
    run(stored, fold(late), now=2 * GONE_MS - NOW)
    assert slots(stored) == {}
    assert stored.rows.lists[ListKey(LOW, VIEWS)].count == 0


def test_a_life_that_began_too_long_ago_writes_no_first_flush() -> None:
    stored = stored_rows()
    run(stored, flush(SLOT, 1, 5))
    last_ms = NOW + LIFE_HORIZON_SECONDS * 1000
    run(stored, flush(SLOT, 2, 6), now=GONE_MS)
    run(stored, flush(OTHER, 1, 1), now=last_ms)
    run(stored, fold(SLOT, OTHER), now=GONE_MS)
    for slot in (SLOT, OTHER):
        with pytest.raises(OperationTooOld, match="begin a new life"):
            run(stored, flush(slot, 3, 6), now=GONE_MS)
    assert value(stored) == 7


def test_a_sum_without_room_in_63_bits_is_left_in_its_slots() -> None:
    stored = stored_rows()
    run(stored, flush(SLOT, 1, MAX_COUNTED), flush(OTHER, 1, 1))
    assert not outcome(run(stored, fold(SLOT, OTHER))).found
    assert outcome(run(stored, fold(SLOT))).found
    assert not outcome(run(stored, fold(OTHER))).found
    assert (value(stored), clamped(value(stored))) == (MAX_COUNTED + 1, MAX_COUNTED)
    run(stored, flush(OTHER, 2, 1, 1))
    assert outcome(run(stored, fold(OTHER))).found
    assert clamped(-MAX_COUNTED - 1) == -MAX_COUNTED


def test_a_row_of_a_foreign_writer_counts_for_nothing_until_a_flush_replaces_it() -> None:
    stored = stored_rows()
    stored.put_edge(LOW, VIEWS, SLOT, data=b"\xc1")
    assert decode_totals(b"\xc1") == NOTHING
    run(stored, flush(SLOT, 1, 5))
    assert slots(stored) == {SLOT: SlotTotals(5)}


@pytest.mark.parametrize(
    ("write", "error", "match"),
    [
        (FlushCounter(LOW, LIKES, SLOT, 1, 1, 0), UnknownType, "unknown counter"),
        (flush(FOLDED_SLOT, 1, 1), InvalidArgument, "slot is 0"),
        (flush(SLOT, 0, 1), InvalidArgument, "number is 0"),
        (flush(SLOT, 1, MAX_COUNTED + 1), InvalidArgument, "plus is"),
        (flush(SLOT, 1, 0, -1), InvalidArgument, "minus is"),
        (fold(), InvalidArgument, "the number of slots is 0"),
        (fold(FOLDED_SLOT), InvalidArgument, "slot is 0"),
        (AssocAdd(LOW, VIEWS, SLOT, 1, b""), InvalidArgument, "use counter_add"),
    ],
)
def test_wrong_writes_of_counters_are_refused(write: Write, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        validate(write, SCHEMA)
