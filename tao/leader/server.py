"""A leader, wired: the only place where its parts are put together (DESIGN.md §14)."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from tao.cache import CacheSettings, GraphCache
from tao.leader.consistency_checker import ConsistencyChecker
from tao.leader.elsewhere import Elsewhere
from tao.leader.figures import register_figures, summary_of_writes
from tao.leader.freshness_figures import FreshnessFigures
from tao.leader.heartbeats import Heartbeats
from tao.leader.hosting import Hosting
from tao.leader.inverse_path import InversePath
from tao.leader.membership_path import MembershipFilters
from tao.leader.miss_path import RegionSource
from tao.leader.ownership import Ownership
from tao.leader.publishing import open_publishing
from tao.leader.relay_path import RelayPath
from tao.leader.service import LeaderService
from tao.leader.settings import LeaderSettings
from tao.leader.settling import CopyFence, SettlingLeaders
from tao.leader.touch_path import TouchPath, touched_floor
from tao.leader.write_path import WritePath
from tao.model.errors import InvalidArgument, TaoError, TopologyError
from tao.model.rows import ShardRow
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.observability.story import Story
from tao.peers.links import Links, LinkSettings
from tao.routing.retry_budget import RetryBudget
from tao.routing.routes import Routes
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.schema.registry import Schema
from tao.serving.applying import TopologyEpochs, WriteThrough
from tao.serving.cache_types import SchemaArenas, arena_budgets
from tao.serving.configuration import Configuration
from tao.serving.database_source import DatabaseSource
from tao.serving.databases import Databases
from tao.serving.faces import Faces
from tao.serving.figures import ServingFigures, register_databases, register_links, register_retries
from tao.serving.fills import Fills
from tao.serving.forward_path import ForwardPath
from tao.serving.housekeeping import keep_house
from tao.serving.read_service import ReadService
from tao.serving.refills import PrefixRefills
from tao.serving.remote_source import RemoteSource
from tao.serving.schema_file import SchemaFile
from tao.serving.stall_guard import StallGuard
from tao.serving.traffic import Traffic
from tao.storage.member_scans import MySqlMemberScans
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.topology.file_store import TopologyFile
from tao.wire.identity import AcceptedTokens, Credentials
from tao.wire.settings import ServingSettings

MAX_TASKS: Final = 100_000
"""Tasks of one server at a time: writes and reads of a database, each of which has bounds of its own."""

DRAIN_SECONDS: Final = 6.0
"""Longest wait for requests under way when the server is told to stop: above a request's deadline of 5 s."""

BELIEVED: Final = frozenset({"read", "subscribe", "relay"})
"""What a leader answers by what it believes of its shards. Its writes are fenced by their generation in any case."""


class LeaderServer:
    """One leader process' parts. `start` serves; then the `tao.runtime.process.RunningServer` protocol."""

    def __init__(self, settings: LeaderSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log, limit=MAX_TASKS)
        self._topology_file: Final = TopologyFile(
            settings.topology_file, on_error=lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._schema_file: Final = SchemaFile(settings.schema_file)

    async def start(self) -> LeaderServer:
        """Take the shards, listen and serve. Raises `OperatorError` or `OSError` when that cannot be."""
        settings, name = self._settings, self._settings.name
        schema = await self._schema_file.load()
        configuration = self._configuration = Configuration(
            await self._topology_file.load(), schema, self._log, self._topology_file.load
        )
        place = configuration.routes.locate(name)
        if place.role != "leader":
            raise TopologyError(f"{name} is a {place.role} in {settings.topology_file}; run it with: tao {place.role}")
        self._region, self._tier = place.region, place.tier
        clock = self._clock = LoopClock()
        arenas = arena_budgets(settings.cache_mb, settings.arena_mb)
        self._types = SchemaArenas(schema, arenas)
        story = Story(settings.story, clock.unix_ms)
        cache = self._cache = GraphCache(CacheSettings(arena_bytes=arenas), self._types, story)
        tls, credentials = settings.tls.if_set, Credentials(name, "leader", settings.token)
        self._links = Links(LinkSettings(), credentials, tls, region=place.region)
        tables = edge_tables_of(lambda: configuration.schema)
        databases = Databases(place.region, configuration)
        self._read_pools = Pools(databases.login(settings.reader_user, settings.reader_password), READ_SETUP)
        self._write_pools = Pools(databases.login(settings.leader_user, settings.leader_password), WRITE_SETUP)
        read_store = MySqlReadStore(databases.local, databases.master, self._read_pools, tables)
        write_store = MySqlWriteStore(databases.master, self._write_pools, tables)
        self._copy_fence = CopyFence(write_store, timeout_seconds=settings.inverses.settle_timeout_seconds)
        self._publishing = await open_publishing(
            settings, lambda shard: configuration.routes.database_of(shard).name, clock, self._log
        )
        self._publisher = self._publishing.publisher
        ownership = self._ownership = Ownership(
            name,
            write_store,
            settings.ownership,
            self._log,
            opened=self._open_shard,
            closed=self._close_shard,
            topology_version=lambda: configuration.routes.version,
            spawn=self._spawn("takeover"),
        )
        writes = self._writes = WritePath(
            ownership,
            write_store,
            cache,
            self._publisher,
            lambda: configuration.schema,
            clock,
            self._spawn("transaction"),
            settings.writes,
            self._log,
        )
        budget = RetryBudget(settings.retries, clock.monotonic())
        others = SettlingLeaders(configuration, self._links, ownership, clock, budget)
        heartbeats = Heartbeats(
            name,
            write_store,
            lambda: ownership.owned,
            self._publisher.database_of,
            clock,
            settings.heartbeats,
            self._log,
        )
        inverses = self._inverses = InversePath(
            writes,
            ownership,
            others,
            read_store,
            write_store,
            lambda: configuration.schema,
            clock,
            self._spawn("inverse"),
            settings.inverses,
            self._log,
        )
        others.here = inverses
        changes = WriteThrough(cache, clock, settings.hosting.write_answer_seconds)
        hosting = self._hosting = Hosting(cache, changes, self._publisher, settings.hosting, self._log)
        elsewhere = self._elsewhere = Elsewhere(
            place.region,
            configuration,
            lambda shard: shard in hosting.hosted and cache.is_open(shard),
            changes.take_back,
            self._publisher,
            self._links,
            self._spawn("reserve"),
        )
        elsewhere.path = ForwardPath(
            name,
            configuration,
            elsewhere.leader,
            lambda shard: configuration.routes.leaders(place.region).hosts(shard),
            elsewhere.apply_and_tell,
            self._links,
            clock,
            lambda _: None,
            self._spawn("forward"),
            settings.forwarding,
            budget,
        )
        others.elsewhere = elsewhere
        self._touches = TouchPath(
            lambda write, deadline: writes.commit(write, deadline, both_sides=True),
            lambda touch: touched_floor(cache, touch),
            settings.relays.touched_keys_per_write,
        )
        relays = self._relays = RelayPath(
            cache.is_open,
            lambda shard: shard in hosting.hosted,
            changes.hear,
            cache.witness.because,
            self._touches,
            self._publisher,
            cache.version_epoch,
            lambda: configuration.routes.version,
            clock,
            self._spawn("touch"),
            settings.relays,
        )
        impatient = dataclasses.replace(settings.misses, max_rereads=3)
        source = DatabaseSource(read_store, databases.database_of, self._spawn("database read"), settings.misses)
        replica = DatabaseSource(read_store, databases.database_of, self._spawn("replica read"), impatient)
        leader, gone, spawn = elsewhere.leader, elsewhere.leader_is_down, self._spawn("miss that goes elsewhere")
        master_region = RemoteSource(configuration, leader, self._links, spawn, settings.master_region, budget, gone)
        is_here, is_down = elsewhere.is_mastered_here, databases.local_is_down
        self._source = RegionSource(source, replica, master_region, is_here, is_down, spawn, settings.replica)
        scans = MySqlMemberScans(databases.local, self._read_pools, tables)
        filters = MembershipFilters(
            self._source, cache, scans, clock, self._spawn("membership filter"), settings.membership, self._log
        )
        fills = Fills(cache, filters, clock, self._list_limit, settings.fills)
        PrefixRefills(cache, fills, self._list_limit, self._spawn("refill"), settings.refills)
        reads = ReadService(cache, fills, schema, self._admit, cache.version_epoch, traffic=Traffic(clock))
        service = LeaderService(
            cache,
            reads,
            writes,
            inverses,
            self._copy_fence,
            ownership,
            elsewhere,
            relays,
            self._publisher,
            configuration,
            clock,
            self._spawn("write"),
            self._log,
        )
        checker = ConsistencyChecker(
            read_store, lambda: configuration.routes, place.region, self._links, clock, settings.checker, self._log
        )
        self._publisher.on_published = checker.note

        def use_schema(changed: Schema) -> None:
            self._types = SchemaArenas(changed, arenas)
            cache.set_types(self._types)
            reads.use_schema(changed)

        guard = StallGuard(service, BELIEVED, self._look_after_pause, clock, settings.stalls, self._log)
        configuration.on_schema(use_schema)
        configuration.on_routes(lambda _: self._publisher.forget_proofs())  # before there are other shards
        configuration.on_routes(self._follow_routes)
        configuration.on_routes(TopologyEpochs(cache).follow_routes)
        configuration.on_routes(lambda routes: self._links.keep_only(routes.server_names()))
        metrics = Metrics(role="leader", server=name)
        source.read_seconds = replica.read_seconds = metrics.histogram(
            "database_read_seconds", "Reads of the database for fills, by batch."
        ).observe
        writes.transaction_seconds = metrics.histogram(
            "database_transaction_seconds", "Write transactions, from the first lock to the commit."
        ).observe
        figures = ServingFigures(metrics, cache, reads, fills, clock)
        freshness = FreshnessFigures(
            metrics,
            self._publisher,
            heartbeats,
            lambda: [database.name for database in configuration.routes.topology.databases],
            clock,
        )
        register_figures(
            metrics, ownership, writes, inverses, relays, self._touches, self._publishing, self._links, self._tasks
        )
        checker.register(metrics)
        filters.register(metrics)
        register_links(metrics, self._links.standings)
        for pool, pools in (("read", self._read_pools), ("write", self._write_pools)):
            register_databases(metrics, pools.standings, pool=pool)
        register_retries(metrics, budget)
        guard.register(metrics)
        server = configuration.routes.server(name)
        self._faces = Faces(
            server,
            guard,
            ServingSettings(accepted_tokens=AcceptedTokens.of(settings.token, settings.client_token)),
            lambda: configuration.routes.version,
            lambda: min(ownership.owned, default=0),
            tls=tls,
        )
        pages = AdminPages(
            metrics=metrics.render,
            stats=lambda: {
                "server": name,
                "role": "leader",
                "region": place.region,
                "tier": place.tier,
                "topology_version": configuration.routes.version,
                "schema_hash": configuration.schema.version_hash,
                **figures.summary(),
                "owned_shards": len(ownership.owned),
                "hosted_shards": len(hosting.hosted),
                "relayed_messages": relays.messages,
                "voided_shards": relays.voided,
                "foreign_keys": {"dropped": relays.dropped, "touched": self._touches.keys},
                **freshness.summary(),
                "reads_sent_to_master_region": self._source.sent_away,
                "writes": summary_of_writes(writes, inverses),
                "consistency": checker.summary(),
                "membership_filters": filters.summary(),
                "delivery": self._publishing.figures(),
                "links": self._links.figures(),
                "databases": {"read": self._read_pools.figures(), "write": self._write_pools.figures()},
                "retries": budget.figures(),
            },
            not_ready=lambda: "" if ownership.complete else "not every shard of this leader is taken yet",
        )
        host, _, port = server.admin.rpartition(":")
        self._admin = AdminServer(AdminSettings(host=host or "127.0.0.1", port=int(port or 0)), pages, self._log)
        await self._faces.start()
        await self._admin.start()
        self._follow_routes(configuration.routes)
        self._tasks.keep(guard.keep, "signs of life")
        self._tasks.keep(ownership.take, "taking shards")
        self._tasks.keep(ownership.check, "ownership check")
        self._tasks.keep(inverses.repair, "repair")
        self._tasks.keep(heartbeats.run, "heartbeats")
        self._tasks.keep(checker.run, "consistency checker")
        self._tasks.keep(lambda: self._schema_file.watch(configuration.use_schema_text), "schema")
        self._tasks.keep(lambda: keep_house(cache, clock), "housekeeping")
        self._stop_watching = self._topology_file.watch(configuration.use_topology)
        self._log.info("serving", grpc=server.grpc, frames=server.frames)
        return self

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        await self._faces.drain(DRAIN_SECONDS)

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        self._stop_watching()
        await self._faces.close()
        await self._admin.close()
        await self._tasks.close()
        await self._publishing.close()
        await self._links.close()
        await self._read_pools.close()
        await self._write_pools.close()

    async def reload(self) -> None:
        """See `tao.runtime.process.RunningServer`: look at both files now."""
        self._configuration.use_topology(await self._topology_file.load())
        await self._schema_file.look(self._configuration.use_schema_text)

    async def _look_after_pause(self, seconds: float) -> None:
        """What may have changed while this process did not run: the topology, owners, what is told of hosted shards."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds / 2):
                await self._configuration.refresh()
        self._hosting.begin_anew()
        await self._ownership.confirm(seconds / 2)

    def _follow_routes(self, routes: Routes) -> None:
        # By tier: a server that was taken out of the document while it runs has no shards, and must let go of its own.
        shards = routes.tier(self._region, self._tier).shards_of(self._settings.name)
        mastered_here = {shard for shard in shards if routes.master_region(shard) == self._region}
        self._hosting.host((shard for shard in shards if shard not in mastered_here), routes.version)
        self._ownership.want(mastered_here)

    def _open_shard(self, row: ShardRow) -> None:
        """Ownership was taken: from here on this leader's cache and stream of the shard are the truth."""
        self._copy_fence.note(row)
        self._cache.close_shard(row.shard)
        self._cache.open_shard(row.shard, row.version_epoch)
        self._publisher.open_shard(row.shard, row.generation, row.version_epoch)

    def _close_shard(self, shard: int) -> None:
        self._cache.close_shard(shard)
        self._publisher.close_shard(shard)

    def _admit(self, shard: int) -> TaoError | None:
        """Why this leader does not serve the shard, or None."""
        if self._ownership.may_read(shard) or shard in self._hosting.hosted:
            return None
        shards = self._configuration.routes.shards
        if shard >= shards:
            return InvalidArgument(f"there is no shard {shard}: ids of this graph lie on shards 0 … {shards - 1}")
        return self._ownership.refusal(shard)

    def _list_limit(self, atype: int) -> int:
        return self._types.list_limit(atype)

    def _spawn(self, name: str) -> partial[object]:
        return partial(self._start_task, name)

    def _start_task(self, name: str, job: Coroutine[Any, Any, None]) -> object:
        return self._tasks.start(job, name)


def run_leader(settings: LeaderSettings) -> int:
    """Run a leader in this process until it is told to stop; returns the exit status."""
    configure_logs("leader", settings.name, settings.log_level, settings.log_form, sys.stderr)
    log = logger("leader")
    return run_server(lambda: LeaderServer(settings, log).start(), log=log)
