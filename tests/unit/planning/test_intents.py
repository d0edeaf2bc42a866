"""Pairs whose two sides are not written in one transaction: intents, and how they are settled."""

import pytest

from tao.model.errors import InvalidArgument
from tao.model.graph import Edge, EdgeKey
from tao.model.rows import IntentRow
from tao.model.writes import AnnounceIntent, AssocAdd, AssocChangeType, AssocDelete, ForgetIntent, SettleEdge
from tao.planning.draft import SchemaBehind, coordinator_edges_of, settle_writes
from tao.schema.registry import Schema
from tests.unit.planning.stored_rows import (
    FOLLOWS,
    FRIEND,
    HIGH,
    LIKED_BY,
    LIKES,
    LOW,
    NOW,
    PAIR,
    SCHEMA,
    TAGGED_IN,
    TAGS,
    StoredRows,
)


@pytest.fixture
def stored() -> StoredRows:
    return StoredRows()


@pytest.mark.parametrize(("id1", "atype", "id2"), [(LOW, LIKES, HIGH), (HIGH, LIKED_BY, LOW)])
def test_the_coordinators_row_is_written_with_an_intent_whichever_way_the_edge_is_named(
    stored: StoredRows, id1: int, atype: int, id2: int
) -> None:
    plan = stored.run(AssocAdd(id1, atype, id2, 5, b""), both_sides=False)
    intent = IntentRow(LOW, HIGH, (LIKES,), NOW, NOW)
    assert stored.rows.edges == {EdgeKey(LOW, LIKES, HIGH): Edge(HIGH, 5)}
    assert stored.rows.intents == {PAIR: intent}
    assert plan.intents == [intent]
    assert plan.settles == [(SettleEdge(HIGH, LIKED_BY, LOW, True, 5, b""),)]


def test_a_second_write_keeps_the_age_joins_the_types_and_raises_the_token(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), both_sides=False)
    plan = stored.run(AssocAdd(LOW, FRIEND, HIGH, 6, b""), both_sides=False, now=NOW + 50)
    assert plan.intents == [IntentRow(LOW, HIGH, (FRIEND, LIKES), NOW + 1, NOW)]
    assert plan.settles == [None]


def test_several_writes_of_a_pair_in_one_batch_leave_one_intent(stored: StoredRows) -> None:
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), AssocAdd(HIGH, TAGS, LOW, 6, b""), both_sides=False)
    intent = IntentRow(LOW, HIGH, (LIKES, TAGGED_IN), NOW, NOW)
    assert plan.rows.put_intents == [intent]
    assert plan.intents == [intent, intent]


def test_a_deletion_leaves_an_intent_too(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""))
    plan = stored.run(AssocDelete(HIGH, LIKED_BY, LOW), both_sides=False)
    assert plan.outcomes[0].found
    assert plan.settles == [(SettleEdge(HIGH, LIKED_BY, LOW, False),)]
    assert set(stored.rows.edges) == {EdgeKey(HIGH, LIKED_BY, LOW)}


def test_a_write_that_changes_nothing_leaves_no_intent(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""))
    plan = stored.run(
        AssocAdd(LOW, LIKES, HIGH, 5, b""),
        AssocAdd(LOW, TAGS, HIGH, 5, b""),
        AssocDelete(LOW, TAGS, HIGH),
        both_sides=False,
    )
    assert not plan.rows
    assert plan.intents == [None, None, None]


def test_a_write_that_changes_nothing_still_returns_an_older_intent(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), both_sides=False)
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), both_sides=False)
    assert not plan.rows
    assert plan.intents == [stored.rows.intents[PAIR]]


def test_changing_the_type_moves_the_coordinators_row_and_leaves_an_intent_for_both_types(stored: StoredRows) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""))
    plan = stored.run(AssocChangeType(HIGH, LIKED_BY, LOW, TAGGED_IN), both_sides=False)
    assert plan.settles == [(SettleEdge(HIGH, LIKED_BY, LOW, False), SettleEdge(HIGH, TAGGED_IN, LOW, True, 5, b""))]
    assert stored.edge(LOW, TAGS, HIGH) == Edge(HIGH, 5)
    assert stored.edge(HIGH, TAGGED_IN, LOW) is None


@pytest.mark.parametrize(("old", "new"), [(LIKES, FOLLOWS), (FOLLOWS, LIKES)])
def test_an_inverse_gained_or_lost_leaves_an_intent_for_its_type_alone(stored: StoredRows, old: int, new: int) -> None:
    stored.run(AssocAdd(LOW, old, HIGH, 5, b""))
    plan = stored.run(AssocChangeType(LOW, old, HIGH, new), both_sides=False)
    assert stored.edge(LOW, new, HIGH) == Edge(HIGH, 5)
    assert [intent and intent.atypes for intent in plan.intents] == [(LIKES,)]


@pytest.mark.parametrize(("old", "new"), [(LIKES, FOLLOWS), (FOLLOWS, LIKES)])
def test_an_inverse_gained_or_lost_at_the_larger_id_on_another_server_is_refused(
    stored: StoredRows, old: int, new: int
) -> None:
    stored.run(AssocAdd(HIGH, old, LOW, 5, b""))
    plan = stored.run(AssocChangeType(HIGH, old, LOW, new), both_sides=False)
    assert isinstance(plan.outcomes[0].error, InvalidArgument)
    assert not plan.rows


@pytest.mark.parametrize("present", [True, False])
def test_a_write_of_both_sides_leaves_an_older_intent_of_its_pair_to_be_settled(
    stored: StoredRows, present: bool
) -> None:
    stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), both_sides=False)
    stored.run(AssocAdd(LOW, TAGS, HIGH, 5, b""), both_sides=False)
    older = stored.rows.intents[PAIR]
    # Also of an edge that the intent is for, and a write that changes nothing at the coordinator's side.
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b"") if present else AssocDelete(HIGH, LIKED_BY, LOW))
    assert (plan.intents, plan.settles) == ([None], [None])
    assert stored.rows.intents == {PAIR: older}
    assert stored.edge(HIGH, LIKED_BY, LOW) == (Edge(LOW, 5) if present else None)
    stored.settle(settle_writes(older, stored.rows.edges, SCHEMA))
    assert stored.edge(HIGH, LIKED_BY, LOW) == (Edge(LOW, 5) if present else None), "by the rows as they are now"
    assert stored.edge(HIGH, TAGGED_IN, LOW) == Edge(LOW, 5)


def test_an_intent_is_forgotten_only_under_its_token(stored: StoredRows) -> None:
    stored.put_intent(LIKES, token=7)
    assert not stored.run(ForgetIntent(LOW, HIGH, 6)).outcomes[0].found
    assert stored.run(ForgetIntent(LOW, HIGH, 7)).outcomes[0].found
    assert stored.rows.intents == {}
    assert not stored.run(ForgetIntent(LOW, HIGH, 7)).outcomes[0].found


def test_an_intent_is_not_forgotten_after_a_write_of_its_pair_in_the_same_batch(stored: StoredRows) -> None:
    stored.put_intent(LIKES, token=7)
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), ForgetIntent(LOW, HIGH, 7), both_sides=False)
    assert not plan.outcomes[1].found
    assert stored.rows.intents[PAIR].token == 8


def test_an_intent_made_after_another_was_forgotten_in_the_batch_has_a_new_token(stored: StoredRows) -> None:
    stored.put_intent(TAGS, token=7)
    plan = stored.run(ForgetIntent(LOW, HIGH, 7), AssocAdd(LOW, LIKES, HIGH, 5, b""), both_sides=False)
    assert plan.rows.put_intents == [IntentRow(LOW, HIGH, (LIKES,), 8, NOW)]
    assert plan.rows.delete_intents == []


def test_a_later_intent_of_the_pair_does_not_take_a_token_that_was_used(stored: StoredRows) -> None:
    first = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), both_sides=False).intents[0]
    assert first is not None
    stored.run(ForgetIntent(LOW, HIGH, first.token))
    stored.run(AssocDelete(LOW, LIKES, HIGH), both_sides=False, now=NOW + 1)
    assert not stored.run(ForgetIntent(LOW, HIGH, first.token)).outcomes[0].found


def test_settling_copies_the_current_rows_of_every_type_of_the_intent() -> None:
    intent = IntentRow(LOW, HIGH, (FRIEND, LIKED_BY), 1, NOW)
    assert coordinator_edges_of(intent) == [EdgeKey(LOW, FRIEND, HIGH), EdgeKey(LOW, LIKED_BY, HIGH)]
    assert settle_writes(intent, {EdgeKey(LOW, LIKED_BY, HIGH): Edge(HIGH, 3, b"")}, SCHEMA) == [
        SettleEdge(HIGH, FRIEND, LOW, False),
        SettleEdge(HIGH, LIKES, LOW, True, 3, b""),
    ]


def test_a_type_that_left_the_schema_does_not_block_the_other_types_of_an_intent() -> None:
    shrunk = Schema(SCHEMA.objects, SCHEMA.assocs[:-2], frozenset(), frozenset({TAGS, TAGGED_IN}))
    assert settle_writes(IntentRow(LOW, HIGH, (FRIEND, TAGS), 1, NOW), {}, shrunk) == [
        SettleEdge(HIGH, FRIEND, LOW, False)
    ]


UNKNOWN = 60_000


def test_an_intent_of_a_type_that_the_schema_lacks_so_far_is_not_settled_in_part() -> None:
    with pytest.raises(SchemaBehind, match="lacks the association types \\[60000\\]"):
        settle_writes(IntentRow(LOW, HIGH, (FRIEND, UNKNOWN), 1, NOW), {}, SCHEMA)


def test_a_write_leaves_an_intent_of_a_type_that_the_schema_lacks_and_fails_no_other(stored: StoredRows) -> None:
    stored.put_intent(UNKNOWN, token=7)
    plan = stored.run(AssocAdd(LOW, LIKES, HIGH, 5, b""), AssocAdd(LOW, LIKES, LOW, 6, b""), both_sides=False)
    assert [each.error for each in plan.outcomes] == [None, None]
    assert stored.rows.intents[PAIR].atypes == (LIKES, UNKNOWN)
    assert plan.settles == [None, None], "nothing is known of the pair as a whole"
    assert stored.edge(LOW, LIKES, HIGH) == Edge(HIGH, 5, b"")


def test_an_announcement_of_a_type_that_the_schema_lacks_fails_no_batch(stored: StoredRows) -> None:
    plan = stored.run(AnnounceIntent(LOW, HIGH, (UNKNOWN,), LIKES), AssocAdd(LOW, LIKES, LOW, 6, b""))
    assert [each.error for each in plan.outcomes] == [None, None]
    assert plan.settles[0] is None
