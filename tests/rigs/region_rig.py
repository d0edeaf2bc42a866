"""A region in one process: followers and leaders of real parts over one store, wired as the servers wire them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tao.cache import CacheSettings, GraphCache
from tao.follower.maintenance_path import Subscriptions, SubscriptionSettings
from tao.follower.service import FollowerService
from tao.model.edge_block import decode_block
from tao.model.errors import NotMine, TaoError
from tao.model.graph import decode_count
from tao.model.topology import CacheServer, Topology
from tao.model.writes import Write
from tao.observability.logs import logger
from tao.routing.retry_budget import RetryBudget, RetrySettings
from tao.runtime.clock import LoopClock
from tao.serving.amends import Amends, AmendsSettings
from tao.serving.applying import WriteThrough
from tao.serving.cache_types import SchemaArenas
from tao.serving.configuration import Configuration
from tao.serving.fills import Fills
from tao.serving.flights import FillSettings
from tao.serving.forward_path import ForwardPath, ForwardSettings
from tao.serving.read_service import ReadService
from tao.serving.refills import PrefixRefills, RefillSettings
from tao.serving.remote_source import RemoteSettings, RemoteSource
from tao.serving.traffic import Traffic
from tao.wire.client_session import Waiter
from tao.wire.convert import error_from_pb, write_to_pb
from tao.wire.session import failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, SCHEMA, LeaderRig, OtherRigs, make_topology
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Tasks, until


class FollowerRig:
    """A follower; ``get_…`` and ``write`` ask it as a client does."""

    def __init__(self, name: str, topology: Topology, *, forwarding: ForwardSettings | None = None) -> None:
        self.name = name
        self.links = MemoryLinks(name)
        self.tasks = Tasks()
        clock = LoopClock()
        links = self.links.as_links()
        self.configuration = Configuration(topology, SCHEMA, logger("test"))
        arenas = SchemaArenas(SCHEMA, ARENAS)
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), arenas)
        budget = self.budget = RetryBudget(RetrySettings(), 0.0)
        settings = RemoteSettings(first_pause_seconds=0.001)
        self.source = RemoteSource(self.configuration, self._leader, links, self.tasks, settings, budget)
        self.fills = Fills(self.cache, self.source, clock, arenas.list_limit, FillSettings(), past_floors=True)
        PrefixRefills(self.cache, self.fills, arenas.list_limit, self.tasks, RefillSettings(pause_seconds=0.001))
        self.reads = ReadService(
            self.cache,
            self.fills,
            SCHEMA,
            self._admit,
            self.cache.version_epoch,
            staleness_ms=self._staleness_ms,
            traffic=Traffic(clock),
        )
        place = ("east", "near")
        self.amends = Amends(links, self.tasks, AmendsSettings(first_pause_seconds=0.001))
        settings_of_subscriptions = SubscriptionSettings(retry_seconds=0.001)
        changes = WriteThrough(self.cache, clock, settings_of_subscriptions.write_answer_seconds)
        self.writes = ForwardPath(
            name,
            self.configuration,
            self._leader,
            lambda shard: self.configuration.routes.tier(*place).told(shard),
            changes.take_back,
            links,
            clock,
            self._admit,
            self.tasks,
            forwarding or ForwardSettings(first_pause_seconds=0.001),
            budget,
            self.amends,
        )
        self.subscriptions = Subscriptions(
            name,
            place,
            self.cache,
            changes,
            self.configuration,
            links,
            clock,
            self.tasks,
            settings_of_subscriptions,
            logger("test"),
        )
        self.service = FollowerService(
            self.cache, self.reads, self.writes, changes.take_back, self.configuration, "east", links, clock, self.tasks
        )

    def _leader(self, shard: int) -> CacheServer:
        return self.configuration.routes.leaders("east").home(shard)

    async def ask(self, request: pb.Request) -> pb.Answer:
        """The whole answer, as a client gets it. Raises what it carries as a whole."""
        request.deadline_ms = request.deadline_ms or 5_000
        waiter = Waiter(asyncio.get_running_loop())
        try:
            self.service.handle(request, MemoryReply(waiter.take))
        except TaoError as error:
            waiter.take(failure(error))
        return await waiter.answer()

    async def read(self, **columns: Any) -> bytes:
        """One query's value. Raises its error."""
        answer = (await self.ask(pb.Request(read=pb.ReadBatch(**columns)))).read
        for error in answer.errors:
            raise error_from_pb(error)
        return answer.values[0]

    async def times(self, id1: int, atype: int, *, critical: bool = False) -> list[int]:
        """The times of a list's edges, as this follower answers."""
        block = await self.read(
            range_id1s=[id1], range_atypes=[atype], range_positions=[0], range_limits=[100], critical=critical
        )
        return [edge.time for edge in decode_block(block)]

    async def count(self, id1: int, atype: int) -> int:
        return decode_count(await self.read(count_id1s=[id1], count_atypes=[atype]))[1]

    async def write(self, *writes: Write) -> list[pb.WriteResult]:
        """Results in the order of the writes. Raises the first error among them."""
        batch = pb.WriteBatch(writes=[write_to_pb(write) for write in writes])
        answer = (await self.ask(pb.Request(write=batch))).write
        for result in answer.results:
            if result.HasField("error"):
                raise error_from_pb(result.error)
        slots = answer.slots or range(len(writes))
        return [result for _, result in sorted(zip(slots, answer.results, strict=True), key=lambda each: each[0])]

    def _staleness_ms(self, shard: int) -> float:
        return self.subscriptions.freshness.staleness_ms(shard)

    def _admit(self, shard: int) -> TaoError | None:
        if shard in self.subscriptions.hosted:
            return None
        return NotMine(f"{self.name} does not host shard {shard}", self.configuration.routes.version)


class RegionRig:
    """Followers ``near-1`` and ``near-2`` (shard 1), leaders ``leader-1`` and ``leader-2`` (shard 1). Build it with
    `running`."""

    def __init__(self, *, split_leaders: bool = False) -> None:
        self.topology = make_topology(near={1: ("near-2",)}, leaders={1: ("leader-2",)} if split_leaders else None)
        self.store = MemoryStore(4)
        self.others = OtherRigs()
        self.leaders = {
            name: LeaderRig(self.store, self.store, name=name, others=self.others, topology=self.topology)
            for name in ("leader-1", "leader-2")
        }
        self.near, self.far = (FollowerRig(name, self.topology) for name in ("near-1", "near-2"))
        for follower in (self.near, self.far):
            for name, leader in self.leaders.items():
                follower.links[name].handler = leader.service
            follower.links["near-1"].handler = self.near.service
            follower.links["near-2"].handler = self.far.service

    @property
    def leader(self) -> LeaderRig:
        return self.leaders["leader-1"]

    async def start(self) -> None:
        routes = self.near.configuration.routes
        for name, leader in self.leaders.items():
            shards = routes.shards_of(name)
            await leader.take(*shards)
            self.others.rigs |= dict.fromkeys(shards, leader)
        for follower in (self.near, self.far):
            follower.subscriptions.follow_routes(routes)
            await subscribed(follower)

    async def close(self) -> Sequence[BaseException]:
        """Returns what went wrong in tasks."""
        errors: list[BaseException] = []
        for tasks in [each.tasks for each in (self.near, self.far)] + [each.tasks for each in self.leaders.values()]:
            await tasks.close()
            errors += tasks.errors
        return errors


async def subscribed(follower: FollowerRig) -> None:
    """Every shard of the follower is confirmed by a leader."""
    await until(lambda: follower.subscriptions.hosted and not follower.subscriptions.unsubscribed)
