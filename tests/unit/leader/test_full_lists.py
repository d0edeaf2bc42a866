"""Bounded lists whose two ends are at two leaders: the far end is counted first, and nothing is left half-written."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tao.leader.inverse_path import InverseSettings
from tao.model.errors import DatabaseDown, ListFull, OutcomeUnknown, TaoError, Unavailable, UnknownType
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import IntentKey, IntentRow, ListRow
from tao.model.writes import AssocAdd, AssocChangeType, Write
from tao.schema.registry import Schema
from tests.rigs.leader_rig import COMMENT, LIKED_BY, LIKES, LeaderRig, OtherRigs, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.versions import make_version
from tests.unit.leader.test_inverse_path import HIGH, LOW, TwoLeaders
from tests.unit.planning.test_full_lists import MOST

ADDS = [AssocAdd(LOW, LIKES, HIGH, 7, b""), AssocAdd(HIGH, LIKED_BY, LOW, 7, b"")]


def fill(two: TwoLeaders, id1: int, atype: int, edges: int = MOST) -> None:
    """Give the list so many edges."""
    for number in range(edges):
        id2 = make_id(900 + number, 2)
        two.store.rows.edges[EdgeKey(id1, atype, id2)] = Edge(id2, 1)
    two.store.rows.lists[ListKey(id1, atype)] = ListRow(edges, make_version(1, edges))


@pytest.fixture
async def two() -> AsyncIterator[TwoLeaders]:
    store, others = MemoryStore(4), OtherRigs()
    # A copy without an answer keeps its pair held for this time.
    coordinator = LeaderRig(store, store, others=others, inverses=InverseSettings(0.5, 0.0))
    far = LeaderRig(store, store, name="leader-2", clock=coordinator.clock)
    others.rigs = {0: coordinator, 1: far}
    for rig in (coordinator, far):
        rig.configuration.schema = bounded_likes(rig)
    await coordinator.take(0)
    await far.take(1)
    yield TwoLeaders(store, coordinator, far, others)
    await coordinator.close()
    await far.close()
    assert coordinator.tasks.errors + far.tasks.errors == []


def bounded_likes(rig: LeaderRig) -> Schema:
    schema = rig.configuration.schema
    assocs = tuple(
        replace(each, max_edges=MOST) if each.number in {LIKES, LIKED_BY, COMMENT} else each for each in schema.assocs
    )
    return Schema(schema.objects, assocs, schema.reserved_otypes, schema.reserved_atypes)


def counts(two: TwoLeaders) -> tuple[int, int]:
    """Return the counts of both lists, after checking them against their edges."""
    found = []
    for id1, atype in ((LOW, LIKES), (HIGH, LIKED_BY)):
        row = two.store.rows.lists.get(ListKey(id1, atype), ListRow(0, 0))
        assert row.count == len(two.store.edges(id1, atype))
        found.append(row.count)
    return found[0], found[1]


@pytest.mark.parametrize("write", ADDS)
async def test_the_last_place_at_both_ends_is_taken(two: TwoLeaders, write: Write) -> None:
    fill(two, LOW, LIKES, MOST - 1)
    fill(two, HIGH, LIKED_BY, MOST - 1)
    written, pending = await two.coordinator.write(write)
    assert not pending
    assert two.times(LIKES, LIKED_BY) == ([7], [7])
    assert {messages.shard for messages in written.messages} == {0, 1}, "the writer's tier hears of both sides"
    await two.settled()
    assert counts(two) == (MOST, MOST)


@pytest.mark.parametrize("write", ADDS)
@pytest.mark.parametrize("near_is_full", [True, False])
async def test_a_full_list_at_either_end_refuses_the_edge_at_both(
    two: TwoLeaders, write: Write, near_is_full: bool
) -> None:
    if near_is_full:
        fill(two, LOW, LIKES)
    else:
        fill(two, HIGH, LIKED_BY)
    before = counts(two)
    with pytest.raises(ListFull):
        await two.coordinator.write(write)
    await two.settled()
    assert two.times(LIKES, LIKED_BY) == ([], [])
    assert counts(two) == before
    assert not two.store.rows.intents
    if near_is_full:
        assert ListKey(HIGH, LIKED_BY) not in two.store.rows.lists, "the far end has never had the edge"


async def test_a_refused_edge_leaves_older_pending_edges_of_its_pair_pending(two: TwoLeaders) -> None:
    """The leader has just taken the shard, and does not know of the intent yet."""
    older = next(
        each
        for each in two.coordinator.configuration.schema.assocs
        if each.inverse is not None and each.number not in (LIKES, LIKED_BY)
    )
    assert older.inverse is not None
    two.store.rows.edges[EdgeKey(LOW, older.number, HIGH)] = Edge(HIGH, 3)
    two.store.rows.lists[ListKey(LOW, older.number)] = ListRow(1, make_version(1, 1))
    two.store.rows.intents[IntentKey(LOW, HIGH)] = IntentRow(LOW, HIGH, (older.number,), 1000, 1000)
    fill(two, HIGH, LIKED_BY)
    with pytest.raises(ListFull):
        await two.coordinator.write(ADDS[0])
    await two.settled()
    assert [edge.time for edge in two.store.edges(HIGH, older.inverse)] == [3]
    assert not two.store.rows.intents


async def test_an_earlier_attempt_that_may_still_find_room_keeps_the_intent_of_a_refused_edge(two: TwoLeaders) -> None:
    fill(two, HIGH, LIKED_BY)
    two.others.faults = [OutcomeUnknown("silence")]
    with pytest.raises(ListFull):
        await two.coordinator.write(ADDS[1])
    assert two.store.rows.intents
    await two.coordinator.inverses.settle_pair(next(iter(two.store.rows.intents.values())), 5.0)
    assert two.times(LIKES, LIKED_BY) == ([], [])


async def test_a_far_leader_that_does_not_know_the_type_yet_refuses_the_edge_once(two: TwoLeaders) -> None:
    two.others.faults = [UnknownType("no such type here")]
    with pytest.raises(UnknownType):
        await two.coordinator.write(ADDS[0])
    assert (await two.coordinator.write(ADDS[0]))[0].outcome.found is False


@pytest.mark.parametrize("fault", [Unavailable("away"), DatabaseDown("down"), OutcomeUnknown("silence")])
@pytest.mark.parametrize("after_writing", [True, False])
async def test_a_far_end_that_cannot_be_counted_refuses_the_edge_and_is_made_equal_again(
    two: TwoLeaders, fault: TaoError, after_writing: bool
) -> None:
    two.others.faults, two.others.after_writing = [fault] * 400, after_writing
    with pytest.raises(Unavailable):
        await two.coordinator.write(ADDS[0])
    assert two.store.edges(LOW, LIKES) == []
    assert two.store.rows.intents, "a settlement removes what may be at the far end"
    two.others.faults.clear()
    await two.coordinator.inverses.settle_pair(next(iter(two.store.rows.intents.values())), 5.0)
    assert two.times(LIKES, LIKED_BY) == ([], [])
    assert counts(two) == (0, 0)


async def test_an_edge_that_changes_into_a_full_list_stays_as_it_was(two: TwoLeaders) -> None:
    await two.far.write(AssocAdd(HIGH, COMMENT, LOW, 7, b""))
    fill(two, HIGH, LIKED_BY)
    with pytest.raises(ListFull):
        await two.coordinator.write(AssocChangeType(HIGH, COMMENT, LOW, LIKED_BY))
    await two.settled()
    assert [edge.time for edge in two.store.edges(HIGH, COMMENT)] == [7]
    assert two.times(LIKES, LIKED_BY) == ([], [])
