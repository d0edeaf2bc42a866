"""The rounds of a node's job: near ends first, with the far ends beside them, then those of other servers, then those
of the shards that did not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from tao.client import Graph
from tao.model.errors import Unavailable
from tao.model.jobs import NodeStateBody
from tao.model.writes import PlaceEdges, group_of
from tao.wire.v1 import session_pb2 as pb
from tao.worker.kinds import Page, PageWaits
from tao.worker.node_state import NodeStates
from tests.unit.planning.test_edge_states import FOLLOWED_BY, FOLLOWS, SCHEMA

NODE = 5
PAGES = 3


class FarShards:
    """The leader of a node with three pages of edges of each type, whose far ends are at the shards 0 to 3. Of these it
    owns the first one."""

    def __init__(self) -> None:
        self.shards: tuple[int, ...] = (0, 1, 2, 3)
        self.away: set[int] = set()
        self.state_us = 7
        self.asked: list[PlaceEdges] = []
        self.near: list[tuple[int, int]] = []
        self.moved: set[tuple[int, int, int]] = set()
        self.graph = cast(Graph, SimpleNamespace(schema=SCHEMA, _place_edges=self.place))

    async def place(self, write: PlaceEdges) -> tuple[pb.PlacedPage, int]:
        self.asked.append(write)
        owed = []
        if write.asks_nobody:
            self.near.append((write.atype, write.after))
        for shard in self.shards:
            if write.far_groups and group_of(shard) not in write.far_groups:
                continue
            if shard in self.away or (shard and write.asks_nobody):
                owed.append(group_of(shard))
            else:
                self.moved.add((write.atype, write.after, shard))
        after = write.after + 1 if write.after + 1 < PAGES else 0
        return pb.PlacedPage(edges=10, next_after=after, owed_groups=owed), self.state_us

    async def page(self, cursor: bytes, *atypes: int, state_us: int = 7) -> Page:
        body = msgspec.msgpack.encode(NodeStateBody(NODE, atypes or (FOLLOWS, FOLLOWED_BY), state_us))
        return await NodeStates().page(self.graph, body, cursor, 500)

    async def walk(self, cursor: bytes = b"", *atypes: int, state_us: int = 7) -> int:
        """Do the pages that are left. Returns the number of edges."""
        edges = 0
        while True:
            page = await self.page(cursor, *atypes, state_us=state_us)
            cursor, edges = page.cursor, edges + page.edges
            if page.done:
                return edges


EVERY_PAGE = [(atype, after) for atype in (FOLLOWS, FOLLOWED_BY) for after in range(PAGES)]
EVERYTHING = {(*page, shard) for page in EVERY_PAGE for shard in (0, 1, 2, 3)}


async def test_all_near_ends_are_moved_before_any_far_end_and_edges_count_once() -> None:
    leader = FarShards()
    assert await leader.walk() == 60
    assert [write.asks_nobody for write in leader.asked] == [True] * 6 + [False] * 6
    assert {write.far_groups for write in leader.asked[6:]} == {(1, 2, 3)}
    assert (leader.near, leader.moved) == (EVERY_PAGE, EVERYTHING)


async def test_a_node_whose_far_ends_are_all_beside_it_takes_one_round() -> None:
    leader = FarShards()
    leader.shards = (0,)
    assert await leader.walk() == 60
    assert len(leader.asked) == 6


async def test_a_far_end_beside_the_node_that_cannot_be_moved_is_owed() -> None:
    leader = FarShards()
    leader.away = {0}
    page = await leader.page(b"")
    leader.away.clear()
    await leader.walk(page.cursor)
    assert leader.moved == EVERYTHING


async def test_a_shard_that_is_away_stops_neither_the_near_ends_nor_other_shards() -> None:
    leader = FarShards()
    leader.away = {2}
    with pytest.raises(PageWaits) as waits:
        await leader.walk()
    assert (leader.near, leader.moved) == (EVERY_PAGE, {each for each in EVERYTHING if each[2] != 2})
    with pytest.raises(PageWaits):
        await leader.page(waits.value.cursor)
    # The first page of each round asks it, and the others leave it out.
    assert sum(not write.far_groups or 2 in write.far_groups for write in leader.asked if not write.asks_nobody) == 3
    leader.away.clear()
    leader.asked.clear()
    assert await leader.walk(waits.value.cursor) == 0
    assert leader.moved == EVERYTHING
    assert {write.far_groups for write in leader.asked} == {(2,)}


async def test_a_round_that_reaches_some_of_the_owed_shards_is_followed_by_one_for_the_rest() -> None:
    leader = FarShards()
    leader.away = {1, 2, 3}
    with pytest.raises(PageWaits) as waits:
        await leader.walk()
    leader.away = {2}
    with pytest.raises(PageWaits) as rest:
        await leader.walk(waits.value.cursor)
    assert leader.moved == {each for each in EVERYTHING if each[2] != 2}
    leader.away.clear()
    await leader.walk(rest.value.cursor)
    assert leader.moved == EVERYTHING


async def test_the_job_of_an_operation_that_a_newer_one_has_overtaken_ends_at_its_next_page() -> None:
    leader = FarShards()
    page = await leader.page(b"", FOLLOWS)
    leader.state_us = 8
    leader.asked.clear()
    await leader.walk(page.cursor, FOLLOWS)
    assert [(write.asks_nobody, write.after) for write in leader.asked] == [(True, 1), (False, 0)]
    # A body without a time is of a leader of a former version: its job moves everything.
    leader.asked.clear()
    await leader.walk(b"", FOLLOWS, state_us=0)
    assert len(leader.asked) == 2 * PAGES


async def test_a_type_that_this_schema_does_not_know_yet_fails_the_page_and_a_former_one_is_skipped() -> None:
    leader = FarShards()
    with pytest.raises(Unavailable, match="does not know the type 77"):
        await leader.page(b"", 77)
    leader.graph = cast(Graph, SimpleNamespace(schema=_former_type(77)))
    assert await leader.walk(b"", 77) == 0


def _former_type(number: int) -> SimpleNamespace:
    return SimpleNamespace(knows_atype=lambda _: False, reserved_atypes=frozenset({number}))
