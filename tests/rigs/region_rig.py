"""A region in one process: followers and leaders made of the real parts over one store, wired as the servers wire
them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tao.cache import CacheSettings, GraphCache
from tao.follower.counters import Counters, CounterSettings
from tao.follower.service import FollowerService
from tao.follower.subscriptions import Subscriptions, SubscriptionSettings
from tao.model.edge_block import decode_block
from tao.model.errors import NotMine, TaoError
from tao.model.graph import decode_count
from tao.model.topology import CacheServer, Topology
from tao.model.writes import Write
from tao.observability.logs import logger
from tao.routing.budgets import RetryBudget, RetrySettings
from tao.routing.fair_shares import ShareSettings
from tao.runtime.clock import LoopClock
from tao.serving.audit import AuditTrail
from tao.serving.configuration import Configuration
from tao.serving.forward_path import (
    AppliesWrites,
    ForwardPath,
    ForwardSettings,
    SiblingInvalidation,
    SiblingInvalidationSettings,
    WriteThrough,
)
from tao.serving.misses import ReadPolicy
from tao.serving.prefix_refills import PrefixRefills, RefillSettings
from tao.serving.read_service import ReadService
from tao.serving.server import SchemaArenas
from tao.serving.shares import WorkShares
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import RemoteSettings, RemoteSource
from tao.serving.traffic import Traffic
from tao.wire.client_session import Waiter
from tao.wire.convert import error_from_pb, write_to_pb
from tao.wire.session import failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import ARENAS, SCHEMA, LeaderRig, OtherRigs, make_topology
from tests.rigs.links_rig import MemoryLinks, MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import Tasks, until
from tests.rigs.server_context import make_context


class FollowerRig:
    """A follower. ``get_…`` and ``write`` send it requests as a client does."""

    def __init__(
        self,
        name: str,
        topology: Topology,
        *,
        forwarding: ForwardSettings | None = None,
        audit: AuditTrail | None = None,
        load: Callable[[], Awaitable[Topology]] | None = None,
        shares: ShareSettings | None = None,
    ) -> None:
        """``load`` reads the topology document."""
        self.name = name
        self.links = MemoryLinks(name)
        self.tasks = Tasks()
        clock = LoopClock()
        links = self.links.as_links()
        self.configuration = Configuration(topology, SCHEMA, logger("test"), load)
        arenas = SchemaArenas(SCHEMA, ARENAS)
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), arenas)
        budget = self.budget = RetryBudget(RetrySettings(), 0.0)
        context = self.context = make_context(
            self.configuration, links, self.tasks, name=name, clock=clock, budget=budget, audit=audit
        )
        self.source = RemoteSource(context, self._leader, RemoteSettings(first_pause_seconds=0.001))
        self.single_flight = SingleFlight(self.cache, self.source, clock, arenas.list_limit, FillSettings())
        self.refills = PrefixRefills(self.single_flight, self.tasks, RefillSettings(pause_seconds=0.001))
        self.reads = ReadService(
            self.cache,
            self.single_flight,
            SCHEMA,
            ReadPolicy(self._admit, self._staleness_ms, past_floors=True, access=self.configuration.access),
            traffic=Traffic(clock),
            shares=WorkShares(shares, self.configuration.access),
        )
        self.sibling_invalidation = SiblingInvalidation(context, SiblingInvalidationSettings(first_pause_seconds=0.001))
        settings_of_subscriptions = SubscriptionSettings(retry_seconds=0.001)
        changes = WriteThrough(self.cache, clock, settings_of_subscriptions.write_answer_seconds)
        self.writes = ForwardPath(
            context,
            forwarding or ForwardSettings(first_pause_seconds=0.001),
            next_hop=self._leader,
            hosts=lambda shard: self.configuration.routes.tier("east", "near").receivers(shard),
            changes=AppliesWrites(changes.decode_write, changes.apply_write),
            admit=self._admit,
            sibling_invalidation=self.sibling_invalidation,
        )
        self.subscriptions = Subscriptions(
            context,
            self.cache,
            changes,
            settings_of_subscriptions,
        )
        self.counters = Counters(
            context,
            CounterSettings(
                max_counters=8,
                max_batch_flushes=2,
                max_batches=2,
                tick_seconds=0.001,
                attempt_seconds=0.3,
                retry_seconds=0.001,
            ),
            self.cache,
            self.reads,
            self.writes,
            self._admit,
            self._staleness_ms,
        )
        self.service = FollowerService(context, self.cache, self.reads, self.writes, changes, self.counters)

    def _leader(self, shard: int) -> CacheServer:
        return self.configuration.routes.leaders("east").home(shard)

    async def ask(self, request: pb.Request) -> pb.Answer:
        """Return the whole answer as a client gets it. Raises the error of the whole request."""
        request.deadline_ms = request.deadline_ms or 60_000  # no test waits for it; a busy machine must not fail one
        waiter = Waiter(asyncio.get_running_loop())
        try:
            self.service.handle(request, MemoryReply(waiter.take))
        except TaoError as error:
            waiter.take(failure(error))
        return await waiter.answer()

    async def read(self, **columns: Any) -> bytes:
        """Return the value of one query. Raises its error."""
        answer = (await self.ask(pb.Request(read=pb.ReadBatch(**columns)))).read
        for error in answer.errors:
            raise error_from_pb(error)
        return answer.values[0]

    async def times(self, id1: int, atype: int, *, critical: bool = False) -> list[int]:
        """Return the times of a list's edges as this follower answers."""
        block = await self.read(
            range_id1s=[id1], range_atypes=[atype], range_positions=[0], range_limits=[100], critical=critical
        )
        return [edge.time for edge in decode_block(block)]

    async def count(self, id1: int, atype: int) -> int:
        return decode_count(await self.read(count_id1s=[id1], count_atypes=[atype]))[1]

    async def write(self, *writes: Write, within_ms: int = 0) -> list[pb.WriteResult]:
        """Return results in the order of the writes. Raises the first error among them. ``within_ms``: the deadline, or
        0 for the usual one."""
        batch = pb.WriteBatch(writes=[write_to_pb(write) for write in writes])
        answer = (await self.ask(pb.Request(write=batch, deadline_ms=within_ms))).write
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
        routes = self.configuration.routes
        return routes.unknown_shard(shard) or NotMine(f"{self.name} does not host shard {shard}", routes.version)


class RegionRig:
    """A region with followers ``near-1`` and ``near-2`` (shard 1), and leaders ``leader-1`` and ``leader-2`` (shard 1).

    Build it with `running`. Followers read ``document`` when they are made to; nothing watches it.
    """

    def __init__(self, *, split_leaders: bool = False) -> None:
        self.topology = make_topology(near={1: ("near-2",)}, leaders={1: ("leader-2",)} if split_leaders else None)
        self.document = self.topology
        self.store = MemoryStore(4)
        self.others = OtherRigs()
        self.leaders = {
            name: LeaderRig(self.store, self.store, name=name, others=self.others, topology=self.topology)
            for name in ("leader-1", "leader-2")
        }
        self.near, self.far = (FollowerRig(name, self.topology, load=self._load) for name in ("near-1", "near-2"))
        for follower in (self.near, self.far):
            for name, leader in self.leaders.items():
                follower.links[name].handler = leader.service
            follower.links["near-1"].handler = self.near.service
            follower.links["near-2"].handler = self.far.service

    @property
    def leader(self) -> LeaderRig:
        return self.leaders["leader-1"]

    async def _load(self) -> Topology:
        return self.document

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
        """Stop everything, and return the exceptions of tasks."""
        errors: list[BaseException] = []
        for tasks in [each.tasks for each in (self.near, self.far)] + [each.tasks for each in self.leaders.values()]:
            await tasks.close()
            errors += tasks.errors
        return errors


async def subscribed(follower: FollowerRig) -> None:
    """Return whether a leader has confirmed every shard of the follower."""
    await until(lambda: follower.subscriptions.hosted and not follower.subscriptions.unsubscribed)
