"""Lists that keep their newest edges: when they are trimmed, and what is not restored."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.changes import ListChange
from tao.model.graph import Edge, ListKey
from tao.model.ids import make_id
from tao.model.rows import ListRow
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, Write
from tao.planning.retention import TRIMMED_AT_ONCE
from tao.planning.row_events import translate
from tao.schema.types import KEEP_SLACK
from tests.rigs.effort import examples
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import FOLLOWS, HIGH, LOW, NOTE, NOW, StoredRows
from tests.unit.planning.test_full_lists import bounded

KEEP = 4
MOST = KEEP + KEEP_SLACK
SCHEMA = bounded(FOLLOWS, keep=KEEP)
INBOX = ListKey(LOW, FOLLOWS)


def post(number: int) -> int:
    return make_id(3, NOW + number, 0)


def push(time: int) -> AssocAdd:
    return AssocAdd(LOW, FOLLOWS, post(time), time, b"")


def times(stored: StoredRows) -> list[int]:
    return sorted(edge.time for key, edge in stored.rows.edges.items() if ListKey(key.id1, key.atype) == INBOX)


@pytest.fixture
def stored() -> StoredRows:
    filled = StoredRows()
    for time in range(100, 100 + MOST):
        filled.put_edge(LOW, FOLLOWS, post(time), time)
    return filled


def test_the_add_beyond_the_slack_trims_the_oldest_edges_in_its_transaction(stored: StoredRows) -> None:
    plan = stored.run(push(900), schema=SCHEMA)
    assert times(stored) == [100 + MOST - 3, 100 + MOST - 2, 100 + MOST - 1, 900]
    assert stored.rows.lists[INBOX].count == KEEP
    (change,) = plan.changes
    assert isinstance(change, ListChange)
    assert (change.count, len(change.gone), change.put) == (KEEP, KEEP_SLACK + 1, (Edge(post(900), 900),))
    assert not plan.outcomes[0].found


def test_list_that_keeps_eight_hundred_never_shows_more_than_nine_hundred_twenty_eight() -> None:
    """At four."""
    stored = StoredRows()
    trims = 0
    for time in range(1, 3 * MOST):
        before = len(times(stored))
        stored.run(push(time), schema=SCHEMA)
        trims += len(times(stored)) < before
        assert KEEP <= len(times(stored)) <= MOST or time < KEEP
        assert times(stored) == list(range(time + 1 - len(times(stored)), time + 1)), "the newest ones"
    assert trims == 3


def test_an_add_that_is_older_than_a_list_of_as_many_as_it_keeps_changes_nothing(stored: StoredRows) -> None:
    before = deepcopy(stored.rows)
    plan = stored.run(push(99), schema=SCHEMA)
    assert plan.outcomes[0].error is None
    assert not plan.rows
    assert stored.rows == before
    stored.run(push(900), schema=SCHEMA)
    stored.run(push(101), schema=SCHEMA)
    assert 101 not in times(stored), "repeating an add that was trimmed does not restore it"
    stored.run(AssocDelete(LOW, FOLLOWS, post(900)), push(102), schema=SCHEMA)
    assert times(stored)[0] == 102, "a list with fewer takes it"


def test_a_transaction_of_many_adds_trims_once(stored: StoredRows) -> None:
    plan = stored.run(*map(push, range(1_000, 1_000 + 2 * MOST)), push(98), schema=SCHEMA)
    assert len(plan.changes) == 1
    assert times(stored) == list(range(1_000 + 2 * MOST - KEEP, 1_000 + 2 * MOST))
    assert stored.rows.lists[INBOX].count == KEEP


def test_an_edge_that_changes_into_the_type_counts_as_an_add(stored: StoredRows) -> None:
    stored.put_edge(LOW, NOTE, post(950), 950)
    stored.run(AssocChangeType(LOW, NOTE, post(950), FOLLOWS), schema=SCHEMA)
    assert times(stored)[-1] == 950
    assert len(times(stored)) == KEEP


def test_a_count_that_was_changed_by_hand_costs_no_edge_that_is_to_be_kept(stored: StoredRows) -> None:
    for key in [key for key, edge in stored.rows.edges.items() if edge.time < 100 + MOST - 6]:
        del stored.rows.edges[key]
    assert stored.rows.lists[INBOX].count == MOST, "and six edges"
    stored.run(push(900), schema=SCHEMA)
    assert len(times(stored)) == KEEP


def test_a_list_of_many_more_edges_is_trimmed_by_several_adds_that_each_read_few() -> None:
    stored = StoredRows()
    longest = 2 * TRIMMED_AT_ONCE + 500
    for time in range(1, 1 + longest):
        stored.put_edge(LOW, FOLLOWS, post(time), time)
    lengths = []
    for time in range(5_000, 5_003):
        before = times(stored)
        plan = stored.run(push(time), schema=SCHEMA)
        assert len(plan.rows.delete_edges) <= TRIMMED_AT_ONCE + 2
        assert times(stored) == [*before, time][-len(times(stored)) :], "the oldest ones have gone"
        lengths.append(len(times(stored)))
    assert lengths == [longest - 1_001, longest - 2_002, KEEP]


def test_only_edges_that_were_read_are_deleted_of_a_list_that_is_too_long() -> None:
    """Added edges that are newer than edges which were not read are not deleted in their place."""
    stored = StoredRows()
    for time in range(1, 3 * TRIMMED_AT_ONCE):
        stored.put_edge(LOW, FOLLOWS, post(time), time)
    added = [push(5_000 + time) for time in range(30)]
    stored.run(*added, *(AssocDelete(LOW, FOLLOWS, post(time)) for time in range(1, 21)), schema=SCHEMA)
    assert {5_000 + time for time in range(30)} <= set(times(stored))
    assert times(stored)[0] == 1 + 1 + 30 + 20 + TRIMMED_AT_ONCE


def test_many_lists_that_are_too_long_share_what_a_transaction_trims() -> None:
    stored = StoredRows()
    owners = [make_id(1, NOW, number) for number in range(64)]
    for owner in owners:
        for time in range(1, 101 + MOST):
            stored.put_edge(owner, FOLLOWS, post(time), time)
    plan = stored.run(*(AssocAdd(owner, FOLLOWS, post(900), 900, b"") for owner in owners), schema=SCHEMA)
    assert TRIMMED_AT_ONCE < len(plan.rows.delete_edges) <= TRIMMED_AT_ONCE + 2 * len(owners)
    longest = 100 + MOST
    assert all(stored.rows.lists[ListKey(owner, FOLLOWS)].count < longest for owner in owners), (
        "each has become shorter"
    )


def test_lists_of_other_types_are_not_trimmed(stored: StoredRows) -> None:
    stored.rows.lists[ListKey(LOW, NOTE)] = ListRow(10_000, stored.rows.lists[INBOX].version)
    plan = stored.run(AssocAdd(LOW, NOTE, HIGH, 1, b""), schema=SCHEMA)
    assert plan.rows.delete_edges == []


@settings(max_examples=examples(50), deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_leader_and_tailer_report_a_trim_alike(chance: random.Random, batches: int) -> None:
    """And the list is always the newest edges of all that were added and not deleted, as far as it must keep them."""
    stored = StoredRows()
    for _ in range(batches):
        writes: list[Write] = []
        for _ in range(chance.randrange(1, 40)):
            time = chance.randrange(1, 500)
            writes.append(AssocDelete(LOW, FOLLOWS, post(time)) if chance.random() < 0.1 else push(time))
        plan = stored.plan(*writes, schema=SCHEMA)
        events = row_events_of(stored.rows, plan.rows, SCHEMA)
        chance.shuffle(events)
        translated = translate(events, SCHEMA)
        assert tuple(message for each in translated.messages for message in each.messages) == plan.changes
        assert not translated.touches
        stored.apply(plan)
        assert stored.rows.lists.get(INBOX, ListRow(0, 0)).count == len(times(stored)) <= MOST
