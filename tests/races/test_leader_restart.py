"""A leader is killed under traffic, and restarts as another incarnation.

    follower                      leader, generation 1           leader again, generation 2
    subscribed, caches list 1
                                  (killed)
    still serves list 1
                                  committed version 2: sent
                                  to nobody
                                                                 takes the shard, streams anew
    subscribes from where it was →
                                                                 "reset": drop the shard
    re-reads: version 2

These tests run in one process; those with real processes and signals are in `tests/e2e/test_server_restart.py`.
"""

from __future__ import annotations

import asyncio

import pytest

from tao.model.errors import OutcomeUnknown
from tao.model.writes import AssocAdd
from tests.rigs.leader_rig import COMMENT, LeaderRig, make_id
from tests.rigs.pacing import until
from tests.rigs.region_rig import RegionRig, subscribed

A, B = make_id(64), make_id(128)


def crash(region: RegionRig) -> None:
    for follower in (region.near, region.far):
        follower.links["leader-1"].break_off()


async def come_back(region: RegionRig) -> LeaderRig:
    leader = LeaderRig(region.store, region.store, others=region.others, topology=region.topology)
    await leader.take(0, 1, 2, 3)
    region.leaders["leader-1"] = leader
    for follower in (region.near, region.far):
        link = follower.links["leader-1"]
        link.handler, link.down = leader.service, False
    return leader


async def test_a_change_that_the_lost_leader_did_not_send_is_seen_after_its_restart(region: RegionRig) -> None:
    near, old = region.near, region.leader
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    crash(region)
    await old.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    await until(lambda: near.subscriptions.unsubscribed)
    assert await near.times(A, COMMENT) == [1], "availability before freshness, while no leader answers"
    resets = near.subscriptions.resets
    await come_back(region)
    await until(lambda: near.subscriptions.resets == resets + 3)
    assert await near.times(A, COMMENT) == [2, 1]
    await old.close()


async def test_the_incarnation_before_is_fenced_off(region: RegionRig) -> None:
    old = region.leader
    await come_back(region)
    with pytest.raises(Exception, match="owned by leader-1 under generation 2"):
        await old.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert region.store.edges(A, COMMENT) == []
    await old.close()


async def test_a_connection_that_breaks_and_comes_back_keeps_the_cache_warm(region: RegionRig) -> None:
    """The same leader continues from the position, and delivers what happened meanwhile."""
    near = region.near
    await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    resets = near.subscriptions.resets
    near.links["leader-1"].break_off()
    await until(lambda: near.subscriptions.unsubscribed)
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    near.links["leader-1"].down = False
    await subscribed(near)
    reads = len(region.store.reads)
    assert await near.times(A, COMMENT) == [2, 1]
    assert near.subscriptions.resets == resets
    assert len(region.store.reads) == reads


async def test_a_fill_from_the_lost_leader_that_arrives_after_the_reset_is_not_kept(region: RegionRig) -> None:
    near, link, old = region.near, region.near.links["leader-1"], region.leader
    link.hold_answers.add("read")
    reading = asyncio.ensure_future(near.times(A, COMMENT))
    await until(lambda: link.held)
    held, link.held = link.held, []
    link.hold_answers.clear()
    resets = near.subscriptions.resets
    crash(region)
    await until(lambda: near.subscriptions.unsubscribed)
    new = await come_back(region)
    await new.write(AssocAdd(A, COMMENT, B, 1, b""))
    await until(lambda: near.subscriptions.resets == resets + 3)
    for each in held:
        each()
    assert await reading == [], "it began before the write"
    assert await near.times(A, COMMENT) == [1]
    await old.close()


async def test_a_write_whose_answer_arrives_after_the_reset_adds_nothing_to_the_cache(region: RegionRig) -> None:
    """The changes after it were delivered before the reset or, as here, never: nothing would correct the cached
    write."""
    near, link, old = region.near, region.near.links["leader-1"], region.leader
    link.hold_answers.add("write")
    writing = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B, 1, b"")))
    await until(lambda: link.held)
    held, link.held = link.held, []
    link.hold_answers.clear()
    resets = near.subscriptions.resets
    crash(region)
    await until(lambda: near.subscriptions.unsubscribed)
    await old.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    await come_back(region)
    await until(lambda: near.subscriptions.resets == resets + 3)
    for each in held:
        each()
    await writing
    assert await near.times(A, COMMENT) == [2, 1]
    await old.close()


async def test_a_write_whose_answer_is_lost_with_the_leader_is_reported_as_unknown(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    link.faults["write"] = [OutcomeUnknown("the connection broke")]
    with pytest.raises(OutcomeUnknown):
        await near.write(AssocAdd(A, COMMENT, B, 1, b""))
    assert sum(sent.HasField("write") for sent in link.sent) == 1, "servers do not repeat such writes"
