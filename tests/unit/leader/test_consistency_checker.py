"""The consistency checker: delays are counted apart from inconsistencies, and unavailable servers are not judged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.leader.consistency_checker import CheckerSettings, ConsistencyChecker
from tao.model.changes import ListChange, Message, ObjectChange, ObjectInvalidation, ShardInvalidation, ShardMessages
from tao.model.edge_block import COMPLETE, PREFIX, encode_block
from tao.model.errors import SettingsError, TaoError, Unavailable
from tao.model.graph import Edge, encode_object
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import CountQuery, FillRead, ObjectQuery, Query
from tao.model.topology import CacheServer
from tao.observability.consistency import MeasuredConsistency
from tao.observability.logs import logger
from tao.observability.metrics import Metrics
from tao.routing.routes import Routes
from tao.serving.inspection import inspect
from tao.serving.server import SchemaArenas
from tao.serving.traffic import Traffic
from tao.topology import edits
from tao.wire.links import Links
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, COMMENT, SCHEMA, USER, make_id, make_topology
from tests.rigs.pacing import ManualClock
from tests.rigs.versions import make_version

A, B = make_id(64), make_id(128)
V1, V2, V3 = (make_version(1, counter) for counter in (1, 2, 3))


class Cache:
    """A cache that can be inspected, unless it is unavailable."""

    def __init__(self) -> None:
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), SchemaArenas(SCHEMA, ARENAS))
        self.cache.open_shard(0, 1)
        self.away = False
        self.asked = 0

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        self.asked += 1
        if self.away:
            raise Unavailable("away")
        return pb.Answer(inspection=inspect(self.cache, Traffic(ManualClock()), request.inspect))

    def hold(self, version: int, data: bytes = b"", key: int = A) -> None:
        self.cache.store_object(self.cache.object_ticket(key, 0.0), encode_object(version, USER, data), 1, 0.0)


class Store(ReadStore):
    """The contents of the master database."""

    def __init__(self) -> None:
        self.objects: dict[int, bytes] = {}
        self.lists: dict[int, bytes] = {}
        self.fault: TaoError | None = None

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        assert critical
        for place, query in enumerate(queries):
            if isinstance(query, ObjectQuery):
                value = self.objects.get(query.id, encode_object(0, 0, b""))
            else:
                value = self.lists[query.id1][:16] if isinstance(query, CountQuery) else self.lists[query.id1]
            on_read([place], self.fault or FillRead([value], {0: 1}))


class Rig:
    """A leader's checker with two tiers of one follower each, and the leader itself."""

    def __init__(self, settings: CheckerSettings | None = None) -> None:
        self.topology = topology = make_topology(1)
        self.routes = Routes(topology)
        region = topology.regions[0].name
        followers = [server.name for tier in self.routes.follower_tiers(region) for server in tier.hosts(0)]
        self.leader = self.routes.leaders(region).home(0).name
        self.servers = {name: Cache() for name in (*followers, self.leader)}
        self.near = self.servers[followers[0]]
        self.store = Store()
        self.clock = ManualClock()
        self.checker = ConsistencyChecker(
            self.store,
            lambda: self.routes,
            region,
            cast(Links, self),
            self.clock,
            settings or CheckerSettings(),
            logger("test"),
        )
        self.figures = self.checker.counts

    def to(self, server: CacheServer) -> Cache:
        return self.servers[server.name]

    def publish(self, *messages: Message) -> None:
        self.checker.note(ShardMessages(0, 1, messages))

    def store_object(self, version: int, data: bytes = b"", key: int = A) -> None:
        self.store.objects[key] = encode_object(version, USER, data)

    def fall_behind(self) -> None:
        """The near follower lacks the version that the database has and that a message names."""
        self.near.hold(V1)
        self.store_object(V2)
        self.publish(ObjectChange(A, V1, V2, USER, b""))

    async def look(self, look: int, seconds: float = 100.0) -> None:
        self.clock.now += seconds
        await self.checker.look(look)


async def test_an_entry_with_the_version_or_none_at_all_is_correct_at_the_first_look() -> None:
    rig = Rig()
    rig.near.hold(V2)
    rig.store_object(V2)
    rig.publish(ObjectChange(A, V1, V2, USER, b""), ObjectInvalidation(B, V3))
    await rig.look(0)
    await rig.look(1)
    assert (rig.figures.samples, rig.figures.looks) == (2, 2 * len(rig.servers))
    assert rig.figures.stale == [0, 0, 0]
    assert rig.figures.consistency.wrong == 0


async def test_an_entry_whose_message_is_in_flight_is_stale_once_and_no_inconsistency() -> None:
    rig = Rig()
    rig.fall_behind()
    await rig.look(0)
    rig.near.hold(V2)
    await rig.look(1)
    await rig.look(2)
    assert rig.figures.stale == [1, 0, 0]


async def test_an_entry_that_is_stale_at_the_last_look_is_an_inconsistency() -> None:
    rig = Rig()
    rig.fall_behind()
    for look in range(3):
        await rig.look(look)
    assert rig.figures.stale == [1, 1, 1]
    assert rig.figures.consistency == MeasuredConsistency(len(rig.servers), 1)
    assert rig.checker.summary()["inconsistencies"] == 1


async def test_only_stale_servers_are_inspected_again() -> None:
    rig = Rig()
    rig.fall_behind()
    for look in range(3):
        await rig.look(look)
    assert [cache.asked for cache in rig.servers.values()] == [3, *[1] * (len(rig.servers) - 1)]


async def test_other_content_under_the_same_version_is_stale() -> None:
    rig = Rig()
    rig.near.hold(V2, b"cached")
    rig.store_object(V2, b"stored")
    rig.publish(ObjectChange(A, V1, V2, USER, b"cached"))
    await rig.look(0)
    assert rig.figures.stale == [1, 0, 0]


async def test_a_list_is_compared_edge_by_edge() -> None:
    rig = Rig()
    block = encode_block(V2, 1, [Edge(B, 7, b"")], PREFIX | COMPLETE)
    rig.store.lists[A] = block
    rig.near.cache.store_list(rig.near.cache.list_ticket(A, COMMENT, 0.0), block, 1, 0.0)
    change = ListChange(A, COMMENT, V1, V2, 1, (), (Edge(B, 7, b""),))
    rig.publish(change)
    await rig.look(0)
    rig.store.lists[A] = encode_block(V2, 1, [Edge(B, 8, b"")], PREFIX | COMPLETE)
    rig.publish(change)
    await rig.look(0)
    assert rig.figures.stale == [1, 0, 0]


async def test_a_long_list_is_compared_by_version_and_count() -> None:
    rig = Rig()
    edges = [Edge(B + place, 7, b"") for place in range(600)]
    rig.near.cache.store_list(
        rig.near.cache.list_ticket(A, COMMENT, 0.0), encode_block(V2, 600, edges, PREFIX | COMPLETE), 1, 0.0
    )
    change = ListChange(A, COMMENT, V1, V2, 600, (), (edges[0],))
    rig.store.lists[A] = encode_block(V2, 600, [], 0)  # its edges would differ if they were compared
    rig.publish(change)
    await rig.look(0)
    assert rig.figures.stale == [0, 0, 0]
    rig.store.lists[A] = encode_block(V2, 601, [], 0)
    rig.publish(change)
    await rig.look(0)
    assert rig.figures.stale == [1, 0, 0]


async def test_a_message_of_a_write_that_was_lost_with_its_master_is_no_inconsistency() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.store_object(V1)
    rig.publish(ObjectChange(A, V1, V2, USER, b"lost"))
    await rig.look(0)
    assert rig.figures.stale == [0, 0, 0]


async def test_without_the_database_versions_decide() -> None:
    rig = Rig()
    rig.near.hold(V1)
    rig.near.hold(V2, key=B)
    rig.store.fault = Unavailable("away")
    rig.publish(ObjectInvalidation(A, V2), ObjectInvalidation(B, V2))
    await rig.look(0)
    assert rig.figures.stale == [1, 0, 0]


async def test_a_server_that_does_not_answer_is_not_judged() -> None:
    rig = Rig()
    for cache in rig.servers.values():
        cache.hold(V1)
    rig.near.away = True
    rig.store_object(V2)
    rig.publish(ObjectInvalidation(A, V2))
    await rig.look(0)
    assert rig.figures.unanswered == 1
    assert rig.figures.looks == rig.figures.stale[0] == len(rig.servers) - 1


async def test_a_stale_server_that_stops_answering_is_unresolved() -> None:
    rig = Rig()
    rig.fall_behind()
    await rig.look(0)
    rig.near.away = True
    await rig.look(1)
    await rig.look(2)
    assert (rig.figures.stale, rig.figures.unresolved) == ([1, 0, 0], 1)
    assert rig.figures.consistency == MeasuredConsistency(len(rig.servers) - 1, 0)


async def test_a_stale_server_that_misses_one_look_is_judged_at_the_last() -> None:
    rig = Rig()
    rig.fall_behind()
    await rig.look(0)
    rig.near.away = True
    await rig.look(1)
    rig.near.away = False
    await rig.look(2)
    assert (rig.figures.stale, rig.figures.unresolved) == ([1, 0, 1], 0)


async def test_a_stale_server_that_is_marked_down_does_not_count_as_repaired() -> None:
    rig = Rig()
    rig.fall_behind()
    await rig.look(0)
    near = next(name for name, cache in rig.servers.items() if cache is rig.near)
    rig.routes = Routes(edits.mark_server(rig.topology, near, True))
    await rig.look(1)
    await rig.look(2)
    assert (rig.figures.stale, rig.figures.unresolved) == ([1, 0, 0], 1)


async def test_the_leader_itself_is_inspected() -> None:
    rig = Rig()
    rig.servers[rig.leader].hold(V1)
    rig.store_object(V2)
    rig.publish(ObjectInvalidation(A, V2))
    await rig.look(0)
    assert rig.figures.stale == [1, 0, 0]


async def test_a_look_waits_for_its_time() -> None:
    rig = Rig()
    rig.publish(ObjectInvalidation(A, V2))
    await rig.look(0, 0.5)
    assert rig.figures.looks == 0
    await rig.look(0, 0.6)
    assert rig.figures.looks == len(rig.servers)


async def test_all_messages_are_checked_up_to_the_bound_per_second() -> None:
    rig = Rig(CheckerSettings(max_samples_per_second=50))
    for size in (1, 4, 7, 25, 3):
        rig.publish(*(ObjectInvalidation(make_id(64 + place), V2) for place in range(size)))
        await rig.look(0)
    assert rig.figures.samples == rig.figures.published == 40
    assert rig.checker.summary()["followed_ratio"] == 1.0


async def test_above_the_bound_messages_are_sampled_uniformly_and_the_share_is_reported() -> None:
    random.seed(1)
    rig = Rig(CheckerSettings(max_samples_per_second=3))
    for cache in rig.servers.values():
        cache.away = True
    taken = Counter[int]()
    for _ in range(1_000):
        for first in range(0, 30, 6):  # in the batches of several commits
            rig.publish(*(ObjectInvalidation(make_id(64 + first + place), V2) for place in range(6)))
        rig.clock.now += 100.0
        rig.checker._end_window(rig.clock.now)
        taken.update(sample.key for sample in rig.checker._waiting[0])
        rig.checker._waiting[0].clear()
    assert sum(taken.values()) == 3_000
    # About a hundred of each are expected, within four standard deviations.
    assert (len(taken), min(taken.values()) > 60, max(taken.values()) < 140) == (30, True, True)
    assert rig.checker.summary()["followed_ratio"] == 0.1


async def test_messages_of_one_key_in_a_second_are_one_sample_of_the_newest_version() -> None:
    rig = Rig()
    rig.near.hold(V2)
    rig.store_object(V3)
    rig.publish(
        ObjectChange(A, V1, V2, USER, b""), ObjectChange(A, V2, V3, USER, b""), ObjectChange(A, V1, V2, USER, b"")
    )
    await rig.look(0)
    assert (rig.figures.followed, rig.figures.samples, rig.figures.stale) == (3, 1, [1, 0, 0])


async def test_bulk_invalidations_and_drops_without_a_version_are_not_inspected() -> None:
    rig = Rig()
    rig.publish(ShardInvalidation(0), ObjectInvalidation(A, 0))
    await rig.look(0)
    assert (rig.figures.followed, rig.figures.samples) == (2, 0)


async def test_looks_that_are_never_taken_are_bounded() -> None:
    settings = CheckerSettings(max_samples_per_second=3)
    rig = Rig(settings)
    for second in range(200):
        rig.clock.now += 2.0
        rig.publish(*(ObjectInvalidation(make_id(64 + second % 50 + 50 * place), V2) for place in range(3)))
    assert rig.figures.samples <= settings.max_waiting < rig.figures.published


async def test_the_checker_can_be_switched_off_and_reports_its_counts() -> None:
    rig = Rig(CheckerSettings(max_samples_per_second=0))
    rig.publish(ObjectInvalidation(A, V2))
    assert rig.figures.samples == 0
    metrics = Metrics(role="leader", server="leader-1", process=False)
    rig.checker.register(metrics)
    assert 'tao_consistency_total{event="inconsistency"' in metrics.render().decode()
    assert rig.checker.summary()["nines"] == 0


def test_the_times_of_the_looks_must_ascend() -> None:
    with pytest.raises(SettingsError, match="ascend"):
        CheckerSettings(first_look_seconds=10.0)
