"""A write's answer arrives after its shard was reset: later changes were sent before the reset, or to another server.

slave leader of the shard         master region's leader          another client
forwards write 1            →     commits 1
loses the shard, and gets it                                      commits 2: sent to the shard's leader of then
resets it: empty
                            ←     the answer of write 1
must not cache version 1: nobody will send 2 again

The same holds for a server that has just started, and for a follower that is given a shard and handed a change by the
follower that had it. The race of a follower's own write is in `tests/races/test_leader_restart.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from math import inf

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.replica_shards import ForwardedWrites, ReplicaShards, ReplicaShardSettings
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.graph import encode_object
from tao.model.writes import AssocAdd
from tao.observability.logs import logger
from tao.serving.configuration import Configuration
from tao.serving.forward_path import ForwardSettings, WriteThrough
from tao.serving.server import SchemaArenas
from tests.rigs.leader_rig import ARENAS, COMMENT, SCHEMA, USER, make_id, make_topology
from tests.rigs.links_rig import MemoryLinks
from tests.rigs.pacing import ManualClock, Tasks, until
from tests.rigs.region_rig import FollowerRig, RegionRig, subscribed
from tests.rigs.server_context import make_context
from tests.rigs.versions import make_version

A, B = make_id(64), make_id(128)
V1 = make_version(1, 1)
SETTINGS = ReplicaShardSettings(settle_seconds=0.0)


class SlaveLeader:
    """A leader that serves shard 0 from a replica; ``answered`` applies the answer to a forwarded write."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS), SchemaArenas(SCHEMA, ARENAS))
        publisher = Publisher(DeliverySettings(), "leader-1/1", lambda _: "db")
        changes = WriteThrough(self.cache, self.clock, SETTINGS.write_answer_seconds)
        self.replica_shards = ReplicaShards(self.cache, changes, publisher, SETTINGS, logger("test"))
        configuration = Configuration(make_topology(), SCHEMA, logger("test"))
        links = MemoryLinks("leader-1").as_links()
        hosts = lambda shard: shard in self.replica_shards.shards and self.cache.is_open(shard)  # noqa: E731
        context = make_context(configuration, links, Tasks(), name="leader-1", region="west", clock=self.clock)
        self.forwarded = ForwardedWrites(context, ForwardSettings(), publisher, hosts=hosts, apply=changes.apply_write)

    async def host(self, *affected: int) -> None:
        """Serve the shard by a newer topology, of which skipped changes have affected some shards."""
        self.replica_shards.serve([0], frozenset(affected))
        await until(lambda: self.replica_shards.open_count)

    def answered(self, sent_at: float = -inf) -> None:
        self.forwarded.apply_and_publish(ShardMessages(0, 1, (ObjectChange(A, 0, V1, USER, b"1"),)), sent_at)


async def _started(_: SlaveLeader) -> None:
    """The start is the beginning."""


async def _paused(leader: SlaveLeader) -> None:
    leader.replica_shards.reset()
    await until(lambda: leader.replica_shards.open_count)


async def _paused_and_read_the_topology(leader: SlaveLeader) -> None:
    leader.replica_shards.note_pause()


async def _moved_away_and_back(leader: SlaveLeader) -> None:
    leader.replica_shards.serve([], frozenset())
    await leader.host()


async def _moved_by_a_skipped_change(leader: SlaveLeader) -> None:
    await leader.host(0)


@pytest.mark.parametrize(
    "begins_anew",
    [_started, _paused, _paused_and_read_the_topology, _moved_away_and_back, _moved_by_a_skipped_change],
)
async def test_a_slave_leader_that_begins_with_the_shard_adds_nothing(
    begins_anew: Callable[[SlaveLeader], Awaitable[None]],
) -> None:
    leader = SlaveLeader()
    await leader.host()
    await begins_anew(leader)
    leader.answered()
    leader.answered(sent_at=leader.clock.now - 1)
    assert leader.cache.object(A) is None
    leader.clock.now += SETTINGS.write_answer_seconds + 1
    leader.answered()
    assert leader.cache.object(A) == encode_object(V1, USER, b"1")


async def test_a_slave_leader_that_is_given_the_shard_while_it_runs_adds_nothing() -> None:
    leader = SlaveLeader()
    leader.replica_shards.serve([1], frozenset())
    leader.replica_shards.serve([0, 1], frozenset())
    await until(lambda: leader.replica_shards.open_count == 2)
    leader.answered()
    assert leader.cache.object(A) is None


async def test_a_slave_leader_adds_what_it_has_sent_since_it_began_with_the_shard() -> None:
    leader = SlaveLeader()
    await leader.host()
    leader.answered(sent_at=leader.clock.now + 1)
    assert leader.cache.object(A) == encode_object(V1, USER, b"1")


async def test_a_follower_that_has_just_started_adds_nothing_of_a_write_from_before(region: RegionRig) -> None:
    near = FollowerRig("near-1", region.topology)
    link = near.links["leader-1"]
    link.handler = region.leader.service
    link.hold_requests.add("subscribe")
    link.hold_answers.add("write")
    near.subscriptions.follow_routes(near.configuration.routes)
    await until(lambda: link.held)
    subscribing = list(link.held)
    link.held.clear()
    writing = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B, 1, b"")))
    await until(lambda: link.held)
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    for send in subscribing:
        send()
    await subscribed(near)
    link.let_go()
    await writing
    assert await near.times(A, COMMENT) == [2, 1]
    await near.tasks.close()


async def test_a_follower_that_is_given_a_shard_adds_nothing_of_a_write_from_before(region: RegionRig) -> None:
    """The follower that had the shard hands the change on, as the new document says."""
    near, far, link = region.near, region.far, region.near.links["leader-1"]
    link.hold_answers.add("write")
    writing = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B, 1, b"")))
    await until(lambda: link.held)
    await region.leader.write(AssocAdd(A, COMMENT, B + 1, 2, b""))
    moved = make_topology(2, near={0: ("near-2",), 1: ("near-2",)})
    for follower in (far, near):
        follower.configuration.use_topology(moved)
    await until(lambda: far.cache.is_open(0))
    link.let_go()
    await writing
    assert await far.times(A, COMMENT) == [2, 1]


async def test_a_follower_adds_nothing_of_a_write_from_before_a_bulk_invalidation(region: RegionRig) -> None:
    """The bulk invalidation stands for messages that can no longer be delivered, as when a binlog is lost."""
    near, link = region.near, region.near.links["leader-1"]
    link.hold_answers.add("write")
    writing = asyncio.ensure_future(near.write(AssocAdd(A, COMMENT, B, 1, b"")))
    await until(lambda: link.held)
    received = near.subscriptions.messages
    region.leader.relays.invalidate([0], "a lost binlog")
    await until(lambda: near.subscriptions.messages > received)
    link.let_go()
    await writing
    assert near.cache.count(A, COMMENT) is None
