"""Lists of a bounded length: which writes are refused, and that they leave nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tao.model.errors import ListFull, TooLarge
from tao.model.graph import ListKey
from tao.model.rows import ListRow
from tao.model.writes import AnnounceIntent, AssocAdd, AssocChangeType, AssocDelete, ForgetIntent, SettleEdge, Write
from tao.planning.coordination import claim_of
from tao.schema.registry import Schema
from tests.unit.planning.stored_rows import (
    FOLLOWS,
    FRIEND,
    HIGH,
    LIKED_BY,
    LIKES,
    LOW,
    NOTE,
    PAIR,
    SCHEMA,
    TAGGED_IN,
    TAGS,
    StoredRows,
    on_shard,
)

MOST = 3


def bounded(*atypes: int, keep: int | None = None) -> Schema:
    """The schema with bounds on the lists of these types."""
    return Schema(
        SCHEMA.objects,
        tuple(
            replace(each, max_edges=None if keep else MOST, keep=keep) if each.number in atypes else each
            for each in SCHEMA.assocs
        ),
        frozenset(),
        frozenset(),
    )


def others(number: int) -> list[int]:
    return [on_shard(3, sequence) for sequence in range(number)]


@pytest.fixture
def stored() -> StoredRows:
    return StoredRows()


def test_edge_ten_thousand_and_one_is_rejected_and_counts_stay(stored: StoredRows) -> None:
    """At a bound of three."""
    schema = bounded(FOLLOWS)
    for id2 in others(MOST):
        stored.put_edge(LOW, FOLLOWS, id2)
    before = stored.rows.lists[ListKey(LOW, FOLLOWS)]
    plan = stored.run(AssocAdd(LOW, FOLLOWS, HIGH, 9, b""), schema=schema)
    assert isinstance(plan.outcomes[0].error, ListFull)
    assert isinstance(plan.outcomes[0].error, TooLarge)
    assert not plan.rows
    assert stored.rows.lists[ListKey(LOW, FOLLOWS)] == before
    again = stored.run(AssocAdd(LOW, FOLLOWS, others(1)[0], 10, b""), schema=schema)
    assert again.outcomes[0].found, "an edge that is there may be written again"


def test_unfollowing_a_user_who_is_not_followed_decrements_no_count(stored: StoredRows) -> None:
    stored.put_edge(LOW, FOLLOWS, others(1)[0])
    before = stored.rows.lists[ListKey(LOW, FOLLOWS)]
    plan = stored.run(AssocDelete(LOW, FOLLOWS, HIGH), schema=bounded(FOLLOWS))
    assert not plan.outcomes[0].found
    assert stored.rows.lists[ListKey(LOW, FOLLOWS)] == before


def test_the_writes_of_one_transaction_fill_a_list_together(stored: StoredRows) -> None:
    ids = others(5)
    writes: list[Write] = [AssocAdd(LOW, FOLLOWS, id2, 1, b"") for id2 in ids]
    writes.insert(4, AssocDelete(LOW, FOLLOWS, ids[0]))
    plan = stored.run(*writes, schema=bounded(FOLLOWS))
    assert [type(outcome.error) for outcome in plan.outcomes] == [type(None)] * 3 + [ListFull] + [type(None)] * 2
    assert stored.rows.lists[ListKey(LOW, FOLLOWS)].count == MOST


@pytest.mark.parametrize("full", [LIKES, LIKED_BY])
@pytest.mark.parametrize(("id1", "atype", "id2"), [(LOW, LIKES, HIGH), (HIGH, LIKED_BY, LOW)])
def test_a_full_list_at_either_end_refuses_both_rows(
    stored: StoredRows, full: int, id1: int, atype: int, id2: int
) -> None:
    for other in others(MOST):
        stored.put_edge(LOW if full == LIKES else HIGH, full, other)
    plan = stored.run(AssocAdd(id1, atype, id2, 1, b""), schema=bounded(full))
    assert isinstance(plan.outcomes[0].error, ListFull)
    assert not plan.rows


@pytest.mark.parametrize("full", [LIKES, LIKED_BY, TAGS, TAGGED_IN])
def test_a_change_of_type_is_refused_by_a_full_list_of_the_new_type_only(stored: StoredRows, full: int) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 1, b""))
    for other in others(MOST):
        stored.put_edge(LOW if full in {LIKES, TAGS} else HIGH, full, other)
    plan = stored.run(AssocChangeType(LOW, LIKES, HIGH, TAGS), schema=bounded(full))
    assert isinstance(plan.outcomes[0].error, ListFull) is (full in {TAGS, TAGGED_IN})
    assert bool(plan.rows) is (full in {LIKES, LIKED_BY})


def test_only_the_side_that_is_written_here_is_counted_here(stored: StoredRows) -> None:
    for other in others(MOST):
        stored.put_edge(LOW, FRIEND, other)
    plan = stored.run(AssocAdd(LOW, FRIEND, HIGH, 1, b""), both_sides=False, schema=bounded(FRIEND))
    assert isinstance(plan.outcomes[0].error, ListFull)
    assert not plan.rows


def test_a_copy_is_counted_only_where_it_comes_before_the_edge(stored: StoredRows) -> None:
    for other in others(MOST):
        stored.put_edge(HIGH, LIKED_BY, other)
    claim = SettleEdge(HIGH, LIKED_BY, LOW, True, 5, b"", if_room=True)
    plan = stored.run(claim, schema=bounded(LIKED_BY))
    assert isinstance(plan.outcomes[0].error, ListFull)
    plan = stored.run(SettleEdge(HIGH, LIKED_BY, LOW, True, 5, b""), schema=bounded(LIKED_BY))
    assert plan.outcomes[0].error is None
    assert stored.rows.lists[ListKey(HIGH, LIKED_BY)].count == MOST + 1
    plan = stored.run(claim, schema=bounded(LIKED_BY))
    assert plan.outcomes[0].found, "an edge that is there needs no room"


@pytest.mark.parametrize(
    ("write", "bound", "claimed"),
    [
        (AssocAdd(LOW, LIKES, HIGH, 5, b"d"), LIKED_BY, SettleEdge(HIGH, LIKED_BY, LOW, True, 5, b"d", True)),
        (AssocAdd(HIGH, LIKED_BY, LOW, 5, b"d"), LIKED_BY, SettleEdge(HIGH, LIKED_BY, LOW, True, 5, b"d", True)),
        (AssocAdd(HIGH, LIKES, LOW, 5, b"d"), LIKES, SettleEdge(HIGH, LIKES, LOW, True, 5, b"d", True)),
        (AssocAdd(LOW, LIKES, HIGH, 5, b"d"), LIKES, None),
        (AssocAdd(LOW, FOLLOWS, HIGH, 5, b"d"), FOLLOWS, None),
        (AssocDelete(LOW, LIKES, HIGH), LIKED_BY, None),
        (AssocChangeType(LOW, TAGS, HIGH, LIKES), LIKED_BY, None),  # no edge is there
    ],
)
def test_the_far_side_is_claimed_where_its_list_is_bounded(
    write: Write, bound: int, claimed: SettleEdge | None
) -> None:
    assert claim_of(write, None, bounded(bound)) == claimed


def test_an_announced_intent_stands_until_it_is_settled(stored: StoredRows) -> None:
    plan = stored.run(AnnounceIntent(LOW, HIGH, (LIKES,), LIKES))
    (intent,) = plan.intents
    assert intent is not None
    assert stored.rows.intents[PAIR] == intent
    assert plan.settles == [(SettleEdge(HIGH, LIKED_BY, LOW, False),)], "as the coordinator's row is now"
    assert not plan.changes
    assert stored.run(ForgetIntent(LOW, HIGH, intent.token)).outcomes[0].found
    assert not stored.rows.intents


def test_an_announced_intent_keeps_the_types_of_an_older_one(stored: StoredRows) -> None:
    stored.put_intent(FRIEND, token=7)
    plan = stored.run(AnnounceIntent(LOW, HIGH, (LIKES,), LIKES))
    assert plan.intents[0] is not None
    assert (set(plan.intents[0].atypes), plan.intents[0].token) == ({FRIEND, LIKES}, 8)


def test_an_unbounded_type_takes_any_number(stored: StoredRows) -> None:
    plan = stored.run(*(AssocAdd(LOW, NOTE, id2, 1, b"") for id2 in others(9)), schema=bounded(FOLLOWS))
    assert [outcome.error for outcome in plan.outcomes] == [None] * 9
    assert stored.rows.lists[ListKey(LOW, NOTE)] == ListRow(9, stored.rows.lists[ListKey(LOW, NOTE)].version)
