"""A follower routes by an outdated topology.

operator                      near-1, knows version 1             leader-1        leader-2
version 2: shard 0 is led
by leader-2                                                       gives it up     takes it
                              asks leader-1 for shard 0     →     NOT_MINE
                              (must not answer from entries whose changes no longer reach
                               it, must not lose the write)
                              learns version 2
                              asks leader-2                 →                     answers

version 2: shard 1 is served
by near-2, near-1 learns that late: it must drop what it cached, and answers NOT_MINE.
"""

from __future__ import annotations

import asyncio

import pytest

from tao.model.errors import DeadlineExceeded, NotMine
from tao.model.writes import AssocAdd
from tests.rigs.leader_rig import COMMENT, make_id, make_topology
from tests.rigs.pacing import until
from tests.rigs.region_rig import RegionRig, subscribed

A, B = make_id(64), make_id(128)


async def move_leader(region: RegionRig) -> None:
    """Move shard 0 to leader-2, and let both leaders know."""
    topology = make_topology(2, near={1: ("near-2",)}, leaders={0: ("leader-2",)})
    for name, leader in region.leaders.items():
        leader.configuration.use_topology(topology)
        await leader.take(*leader.configuration.routes.shards_of(name))


async def test_a_write_by_the_old_topology_is_done_once_by_the_new_leader(region: RegionRig) -> None:
    near = region.near
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    await move_leader(region)
    writing = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B + 1, 2, b"")))
    await until(lambda: any(sent.HasField("write") for sent in near.links["leader-1"].sent))
    near.configuration.use_topology(region.leader.configuration.routes.topology)
    await writing
    assert await near.times(A, COMMENT) == [2, 1]
    assert [edge.time for edge in region.store.edges(A, COMMENT)] == [2, 1]


async def test_a_read_by_the_old_topology_is_answered_by_the_new_leader(region: RegionRig) -> None:
    near = region.near
    await move_leader(region)
    await region.leaders["leader-2"].write(AssocAdd(A, COMMENT, B, 1, b""))
    reading = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: any(sent.HasField("read") for sent in near.links["leader-1"].sent))
    near.configuration.use_topology(region.leader.configuration.routes.topology)
    assert await reading == [1]


async def test_when_the_new_topology_does_not_come_the_error_says_what_to_refresh_to(region: RegionRig) -> None:
    await move_leader(region)
    with pytest.raises(NotMine) as refused:
        await region.near.times(A, COMMENT)
    assert refused.value.topology_version == 2
    with pytest.raises(DeadlineExceeded, match="leader-1 does not own shard 0"):
        await region.near.write(AssocAdd(A, COMMENT, B, 1, b""), within_ms=200)
    assert region.store.edges(A, COMMENT) == [], "and nothing is written"


async def test_after_the_move_the_follower_drops_what_the_new_leader_cannot_vouch_for(region: RegionRig) -> None:
    near = region.near
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert await near.times(A, COMMENT) == [1]
    await move_leader(region)
    await region.leaders["leader-2"].write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    near.configuration.use_topology(region.leader.configuration.routes.topology)
    await until(lambda: near.subscriptions.resets > 3)
    await subscribed(near)
    assert await near.times(A, COMMENT) == [2, 1]


async def test_a_shard_that_moved_to_another_follower_is_dropped_and_refused(region: RegionRig) -> None:
    near, far = region.near, region.far
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    moved = make_topology(2, near={0: ("near-2",), 1: ("near-2",)})
    far.configuration.use_topology(moved)
    await subscribed(far)
    await far.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    near.configuration.use_topology(moved)
    assert not near.cache.is_open(0)
    with pytest.raises(NotMine):
        await near.times(A, COMMENT)
    assert await far.times(A, COMMENT) == [2, 1]


async def test_a_follower_that_does_not_know_the_move_still_receives_changes(region: RegionRig) -> None:
    """Messages go to subscribers, not to the follower that the leader's topology gives the shard to."""
    near, far = region.near, region.far
    assert await near.times(A, COMMENT) == []
    far.configuration.use_topology(make_topology(2, near={0: ("near-2",), 1: ("near-2",)}))
    await subscribed(far)
    await far.write(AssocAdd(A, COMMENT, B, 1, b""))
    await until(lambda: near.cache.floor_of_list(A, COMMENT))
    assert await near.times(A, COMMENT) == [1]
