"""A node whose edges end at another leader: its state reaches new edges at once, and the others page by page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.leader.node_pages import NodePages
from tao.model.edge_states import State
from tao.model.errors import Unavailable
from tao.model.graph import EdgeKey
from tao.model.writes import AssocAdd, NodeSetState, PlacedPage, PlaceEdges, ReadState
from tests.rigs.leader_rig import make_id
from tests.rigs.pacing import Gate
from tests.unit.leader.test_edge_states import HIGH, LOW, SUBSCRIBERS, SUBSCRIBES, TwoLeaders

NORMAL, _, ARCHIVED, REMOVED = State
PAGES = [make_id(70 + number, 1) for number in range(5)]


@pytest.fixture
async def two() -> AsyncIterator[TwoLeaders]:
    leaders = TwoLeaders()
    leaders.far.others = leaders.others
    leaders.far.pages = NodePages(leaders.far.context, leaders.far.writes, leaders.far.ownership, leaders.others)
    await leaders.coordinator.take(0)
    await leaders.far.take(1)
    yield leaders
    await leaders.coordinator.close()
    await leaders.far.close()
    assert leaders.coordinator.tasks.errors + leaders.far.tasks.errors == []


def places(two: TwoLeaders) -> dict[tuple[int, int], int]:
    return {(key.id1, key.id2): key.atype for key in two.store.rows.edges}


async def set_state(two: TwoLeaders, node: int, state: State) -> None:
    rig = two.coordinator if node < HIGH else two.far
    job_id = make_id(1000 + len(two.store.rows.jobs), node >> 48)
    await rig.write(NodeSetState(node, (SUBSCRIBES, SUBSCRIBERS), state, 0, job_id))


async def place(
    two: TwoLeaders,
    node: int,
    atype: int,
    after: int = 0,
    limit: int = 500,
    *,
    asks_nobody: bool = False,
    groups: tuple[int, ...] = (),
) -> PlacedPage:
    rig = two.coordinator if node < HIGH else two.far
    write = PlaceEdges(node, atype, after, limit, asks_nobody, groups)
    written = await rig.pages.place(write, rig.clock.monotonic() + 5)
    assert written.outcome.page is not None
    return written.outcome.page


@pytest.mark.parametrize("node", [LOW, HIGH])
@pytest.mark.parametrize("named_from", [LOW, HIGH])
async def test_edge_to_an_archived_node_is_archived_at_both_ends(two: TwoLeaders, node: int, named_from: int) -> None:
    await set_state(two, node, ARCHIVED)
    ends = (LOW, SUBSCRIBES, HIGH) if named_from == LOW else (HIGH, SUBSCRIBERS, LOW)
    written, pending = await two.coordinator.write(AssocAdd(*ends, 7, b""))
    assert not pending
    assert not written.outcome.superseded
    assert written.outcome.registers is not None
    assert written.outcome.registers.effective_state(written.outcome.node.state) is ARCHIVED
    assert places(two) == {(LOW, HIGH): 152, (HIGH, LOW): 162}
    await two.settled()


async def test_the_intent_stays_until_both_sides_agree(two: TwoLeaders) -> None:
    await set_state(two, HIGH, ARCHIVED)
    two.others.faults.append(Unavailable("away"))
    _, pending = await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 7, b""))
    assert pending
    assert places(two) == {(LOW, HIGH): 15}
    (intent,) = two.store.rows.intents.values()
    await two.coordinator.inverses.settle_pair(intent, 5.0)
    assert places(two) == {(LOW, HIGH): 152, (HIGH, LOW): 162}
    await two.settled()


async def test_a_node_is_archived_and_restored_with_its_edges_at_another_leader(two: TwoLeaders) -> None:
    for page in PAGES:
        await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, page, 7, b""))
    await two.settled()
    before = places(two)
    await set_state(two, LOW, ARCHIVED)
    first = await place(two, LOW, SUBSCRIBES, limit=3)
    assert (first.edges, first.next_after) == (3, PAGES[2])
    last = await place(two, LOW, SUBSCRIBES, first.next_after, limit=3)
    assert (last.edges, last.next_after) == (2, 0)
    assert set(places(two).values()) == {152, 162}
    await set_state(two, LOW, NORMAL)
    await place(two, LOW, SUBSCRIBES)
    assert places(two) == before


async def test_a_far_end_that_is_away_is_owed_and_a_later_page_moves_it_alone(two: TwoLeaders) -> None:
    for page in PAGES:
        await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, page, 7, b""))
    await two.settled()
    await set_state(two, LOW, REMOVED)
    two.others.faults.append(Unavailable("away"))
    placed = await place(two, LOW, SUBSCRIBES)
    assert (placed.edges, placed.next_after, placed.owed_groups) == (5, 0, (1,))
    assert set(places(two).values()) == {153, 16}
    others = await place(two, LOW, SUBSCRIBES, groups=(0, 2))
    assert (others.edges, others.owed_groups) == (5, ())
    assert set(places(two).values()) == {153, 16}
    assert (await place(two, LOW, SUBSCRIBES, groups=(1,))).owed_groups == ()
    assert set(places(two).values()) == {153, 163}
    commits = two.store.commits
    await place(two, LOW, SUBSCRIBES)
    assert two.store.commits == commits, "what is right is not written again"


async def test_near_ends_are_moved_without_asking_a_far_leader(two: TwoLeaders) -> None:
    for page in PAGES:
        await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, page, 7, b""))
    await two.settled()
    await set_state(two, LOW, REMOVED)
    two.others.settled.clear()
    placed = await place(two, LOW, SUBSCRIBES, asks_nobody=True)
    assert (placed.edges, placed.owed_groups, two.others.settled) == (5, (1,), [])
    assert set(places(two).values()) == {153, 16}


async def test_far_nodes_with_a_state_are_joined_together_and_only_while_the_near_end_does_not_know_it(
    two: TwoLeaders,
) -> None:
    for page in PAGES:
        await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, page, 7, b""))
    await two.settled()
    for page in PAGES:
        await set_state(two, page, ARCHIVED)
    commits = two.coordinator.writes.committed_transactions
    await place(two, LOW, SUBSCRIBES)
    # The page itself, and its joins in as few as the lanes make of writes that arrive together.
    assert two.coordinator.writes.committed_transactions - commits == 2
    assert {place for (node, _), place in places(two).items() if node == LOW} == {152}
    commits = two.coordinator.writes.committed_transactions
    await place(two, LOW, SUBSCRIBES)
    assert two.coordinator.writes.committed_transactions - commits == 1, "the page alone: nothing is joined again"


async def test_add_while_its_node_is_being_archived(two: TwoLeaders) -> None:
    """The add has committed its near side, and its copy waits; the node is archived and its only edge moved then."""
    gate = two.others.gate = Gate()
    adding = asyncio.create_task(two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 7, b"")))
    await gate.arrived.wait()
    await set_state(two, HIGH, ARCHIVED)
    assert (await place(two, HIGH, SUBSCRIBERS)).edges == 0
    gate.open()
    await adding
    assert places(two) == {(LOW, HIGH): 152, (HIGH, LOW): 162}
    await two.settled()


async def test_add_whose_coordinator_is_killed_while_its_near_node_is_archived(two: TwoLeaders) -> None:
    two.others.faults.append(Unavailable("away"))
    await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 7, b""))
    await set_state(two, LOW, ARCHIVED)
    # The page moves what the dead coordinator has left half done, and its successor settles the intent afterwards.
    await place(two, LOW, SUBSCRIBES)
    assert places(two) == {(LOW, HIGH): 152, (HIGH, LOW): 162}
    (intent,) = two.store.rows.intents.values()
    await two.coordinator.inverses.settle_pair(intent, 5.0)
    assert places(two) == {(LOW, HIGH): 152, (HIGH, LOW): 162}
    await two.settled()


async def test_edges_between_nodes_of_two_leaders_follow_the_higher_of_both(two: TwoLeaders) -> None:
    await two.coordinator.write(AssocAdd(LOW, SUBSCRIBES, HIGH, 7, b""))
    await two.settled()
    await set_state(two, LOW, ARCHIVED)
    await place(two, LOW, SUBSCRIBES)
    await set_state(two, HIGH, REMOVED)
    await place(two, HIGH, SUBSCRIBERS)
    assert places(two) == {(LOW, HIGH): 153, (HIGH, LOW): 163}
    await set_state(two, HIGH, NORMAL)
    await place(two, HIGH, SUBSCRIBERS)
    assert places(two) == {(LOW, HIGH): 152, (HIGH, LOW): 162}
    read, _ = await two.far.write(ReadState(HIGH, SUBSCRIBERS, LOW))
    assert read.outcome.registers == two.store.rows.registers[EdgeKey(HIGH, 162, LOW)]
    assert read.outcome.registers is not None
    assert read.outcome.registers.effective_state(read.outcome.node.state) is ARCHIVED
