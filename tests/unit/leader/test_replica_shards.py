"""Replica shards: served at once, and cached after a delay, when no other leader gets their changes any more."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from tao.cache import CacheSettings, GraphCache
from tao.delivery.publisher import Publisher
from tao.delivery.settings import DeliverySettings
from tao.leader.replica_shards import ReplicaShards, ReplicaShardSettings
from tao.model.changes import ObjectChange, ShardMessages
from tao.model.delivery import Delivery, Position
from tao.observability.logs import logger
from tao.serving.forward_path import WriteThrough
from tao.serving.server import SchemaArenas
from tests.rigs.leader_rig import ARENAS, SCHEMA, USER, make_id
from tests.rigs.pacing import ManualClock, quiet, until

NEVER = ReplicaShardSettings(settle_seconds=math.inf)
SOON = ReplicaShardSettings(settle_seconds=0.0)


@dataclass
class Rig:
    settings: ReplicaShardSettings
    cache: GraphCache = field(
        default_factory=lambda: GraphCache(CacheSettings(arena_bytes=ARENAS), SchemaArenas(SCHEMA, ARENAS))
    )
    publisher: Publisher = field(default_factory=lambda: Publisher(DeliverySettings(), "leader-1/1", lambda _: "db"))
    clock: ManualClock = field(default_factory=ManualClock)
    deliveries: list[Delivery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.changes = WriteThrough(self.cache, self.clock, self.settings.write_answer_seconds)
        self.replica_shards = ReplicaShards(self.cache, self.changes, self.publisher, self.settings, logger("test"))

    def host(self, shards: list[int], *, affected: frozenset[int] = frozenset()) -> None:
        """Serve the shards by a newer topology. Changes since the former one affected some shards."""
        self.replica_shards.serve(shards, affected)

    def subscribe(self, *positions: Position) -> None:
        self.publisher.subscribe("near-1", positions, self.deliveries.append)


async def test_shards_are_served_at_once_and_cached_after_a_pause() -> None:
    rig = Rig(NEVER)
    rig.host([0, 2])
    assert rig.replica_shards.shards == {0, 2}
    assert rig.cache.open_shards() == []
    after = Rig(SOON)
    after.host([0, 2])
    assert not after.cache.open_shards()
    await until(lambda: after.replica_shards.open_count == 2)
    assert after.cache.open_shards() == [0, 2]
    after.subscribe(Position(0), Position(1))
    assert [part.position.shard for part in after.deliveries[0].shards] == [0]
    assert after.deliveries[0].refused == (1,)


async def test_a_shard_that_left_and_came_back_waits_its_own_time() -> None:
    rig = Rig(SOON)
    rig.host([0])
    rig.host([])
    rig.replica_shards._settings = NEVER  # type: ignore[misc]
    rig.host([0])
    await quiet()
    assert rig.cache.open_shards() == []


async def test_a_shard_that_left_again_during_the_pause_is_not_opened() -> None:
    rig = Rig(SOON)
    rig.host([0])
    rig.host([0, 1, 2])
    rig.host([0, 2])
    await until(lambda: rig.replica_shards.open_count == 2)
    assert rig.cache.open_shards() == [0, 2]


async def test_a_shard_that_left_is_dropped_and_its_subscribers_are_refused() -> None:
    rig = Rig(SOON)
    rig.host([0, 1])
    await until(lambda: rig.replica_shards.open_count == 2)
    rig.subscribe(Position(0), Position(1))
    rig.deliveries.clear()
    rig.host([1])
    assert rig.cache.open_shards() == [1]
    assert [delivery.refused for delivery in rig.deliveries] == [(0,)]


async def test_a_subscriber_of_an_earlier_opening_starts_over() -> None:
    rig = Rig(SOON)
    rig.host([0])
    await until(lambda: rig.replica_shards.open_count)
    rig.subscribe(Position(0))
    (part,) = rig.deliveries[-1].shards
    rig.host([])
    rig.host([0])
    await until(lambda: rig.replica_shards.open_count)
    rig.deliveries.clear()
    rig.subscribe(part.position)
    (again,) = rig.deliveries[-1].shards
    assert again.reset
    assert again.position.stream != part.position.stream


async def test_the_same_shards_again_change_nothing() -> None:
    rig = Rig(SOON)
    rig.host([0])
    await until(lambda: rig.replica_shards.open_count)
    rig.subscribe(Position(0))
    rig.deliveries.clear()
    rig.host([0])
    assert rig.replica_shards.open_count == 1
    await asyncio.sleep(0)
    assert rig.deliveries == []


async def test_a_reset_drops_everything_and_subscribers_start_over() -> None:
    rig = Rig(SOON)
    rig.host([0])
    await until(lambda: rig.replica_shards.open_count)
    rig.subscribe(Position(0))
    stream = rig.deliveries[-1].shards[0].position.stream
    rig.replica_shards.reset()
    assert rig.replica_shards.shards == {0}, "served all the while, from the replica"
    assert not rig.cache.open_shards()
    assert rig.deliveries[-1].refused == (0,)
    await until(lambda: rig.replica_shards.open_count)
    rig.subscribe(Position(0, stream, 0))
    assert rig.deliveries[-1].shards[0].reset


async def test_an_affected_shard_is_reset_and_the_others_keep_their_caches_and_subscribers() -> None:
    """Two changes within one poll: another leader had shard 0 in between. All shards were dropped before."""
    rig = Rig(SOON)
    rig.host([0, 1])
    await until(lambda: rig.replica_shards.open_count == 2)
    rig.subscribe(Position(0), Position(1))
    rig.deliveries.clear()
    rig.host([0, 1])
    assert rig.cache.open_shards() == [0, 1], "the next document says the same: nobody else had them"
    rig.host([0, 1], affected=frozenset({0, 7}))
    assert rig.cache.open_shards() == [1]
    assert rig.replica_shards.shards == {0, 1}, "served all the while, from the replica"
    assert [delivery.refused for delivery in rig.deliveries] == [(0,)]
    await until(lambda: rig.replica_shards.open_count == 2)


async def test_a_pause_in_which_nothing_was_affected_drops_nothing_and_ends_late_inserts() -> None:
    rig = Rig(SOON)
    rig.host([0])
    await until(lambda: rig.replica_shards.open_count)
    rig.clock.now += rig.settings.write_answer_seconds + 1
    written = ObjectChange(make_id(64), 0, 5, USER, b"data")
    rig.replica_shards.note_pause()
    assert rig.cache.is_open(0)
    rig.changes.apply_write(ShardMessages(0, 0, (written,)))
    assert rig.cache.peek_object(written.id) is None, "the answer may be older than the floors that the pause outlasted"
