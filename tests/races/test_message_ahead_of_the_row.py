"""A message arrives before its row is visible (measured: one transaction in ten reaches the binlog reader first).

database                     cache                        reader
commits version 2
(not visible to SELECT yet)
                             ← message "version 2"
                                                          misses
                             SELECT → version 1
                             must be read again, not be kept
"""

from __future__ import annotations

import pytest

from tao.model.changes import ListInvalidation
from tao.model.errors import StaleRead
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.queries import RangeQuery
from tao.model.rows import ListRow
from tests.rigs.asking import answer
from tests.rigs.leader_rig import COMMENT, make_id
from tests.rigs.region_rig import RegionRig
from tests.rigs.versions import make_version

A, B = make_id(64), make_id(128)


def store_version(region: RegionRig, counter: int) -> None:
    region.store.rows.lists[ListKey(A, COMMENT)] = ListRow(counter, make_version(1, counter))
    for time in range(1, counter + 1):
        region.store.rows.edges[EdgeKey(A, COMMENT, B + time)] = Edge(B + time, time)


async def test_the_leader_reads_until_the_row_is_as_new_as_the_message(region: RegionRig) -> None:
    store_version(region, 1)
    leader, store = region.leader, region.store
    leader.cache.apply(ListInvalidation(A, COMMENT, make_version(1, 2)), 1, leader.clock.monotonic())

    async def visible_at_the_fifth_read() -> None:
        if len(store.reads) == 5:
            store_version(region, 2)

    store.before_read = visible_at_the_fifth_read
    assert await region.near.times(A, COMMENT) == [2, 1]
    assert len(store.reads) == 5
    assert await region.near.times(A, COMMENT) == [2, 1]
    assert len(store.reads) == 5, "now it is kept, at both tiers"


async def test_the_follower_s_version_floor_travels_to_a_leader_that_may_not_know_it(region: RegionRig) -> None:
    """The follower knows version 2, from a write through it for example; the leader's cache holds version 1."""
    store_version(region, 1)
    near = region.near
    assert await near.times(A, COMMENT) == [1]
    near.cache.raise_list_floor(A, COMMENT, make_version(1, 2), 1e6)
    store_version(region, 2)
    assert await near.times(A, COMMENT) == [2, 1]
    assert near.single_flight.refetched == 0


async def test_a_row_that_does_not_appear_is_answered_as_it_is_and_not_kept(region: RegionRig) -> None:
    """A commit waits for the acknowledgement of a replica that is away: until that is back the row stays as it was."""
    store_version(region, 1)
    leader, near = region.leader, region.near
    for server in (leader, near):
        server.cache.apply(ListInvalidation(A, COMMENT, make_version(1, 2)), 1, leader.clock.monotonic())
    assert await near.times(A, COMMENT) == [1]
    assert leader.cache.peek_list(A, COMMENT) is None
    assert near.cache.peek_list(A, COMMENT) is None
    assert len(region.store.reads) < 40, "bounded at each tier"
    assert region.store.reads[-1][1], "it comes from the master"
    assert (near.reads.misses.read_past_floors, leader.reads.misses.read_past_floors) == (1, 0), (
        "asked for by the follower, and counted"
    )
    store_version(region, 2)
    assert await near.times(A, COMMENT) == [2, 1]
    assert near.cache.peek_list(A, COMMENT) is not None


async def test_a_version_that_only_the_leader_knows_is_a_floor_too(region: RegionRig) -> None:
    store_version(region, 1)
    leader, near = region.leader, region.near
    leader.cache.apply(ListInvalidation(A, COMMENT, make_version(1, 2)), 1, leader.clock.monotonic())
    assert await near.times(A, COMMENT) == [1]
    assert leader.cache.peek_list(A, COMMENT) is None
    assert near.cache.peek_list(A, COMMENT) is None


async def test_a_read_that_asks_for_the_version_that_does_not_appear_is_rejected(region: RegionRig) -> None:
    store_version(region, 1)
    query = RangeQuery(A, COMMENT, 0, 10)
    with pytest.raises(StaleRead):
        await answer(region.near.reads.misses, query, make_version(1, 2), critical=False)
