"""A follower, wired: the only place where its parts are put together (DESIGN.md §14)."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Coroutine
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final

from tao.cache import CacheSettings, GraphCache
from tao.follower.maintenance_path import Subscriptions
from tao.follower.miss_path import MissPath
from tao.follower.service import FollowerService
from tao.follower.settings import FollowerSettings
from tao.follower.unary_path import UnaryPath
from tao.model.errors import InvalidArgument, NotMine, TaoError, TopologyError
from tao.model.topology import CacheServer
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.observability.story import Story
from tao.peers.links import Links, LinkSettings
from tao.routing.retry_budget import RetryBudget
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.schema.registry import Schema
from tao.serving.amends import Amends
from tao.serving.applying import TopologyEpochs, WriteThrough
from tao.serving.cache_types import SchemaArenas, arena_budgets
from tao.serving.configuration import Configuration
from tao.serving.database_source import DatabaseSource
from tao.serving.databases import Databases
from tao.serving.faces import Faces
from tao.serving.figures import ServingFigures, register_databases, register_links, register_retries
from tao.serving.fill_source import FillSource
from tao.serving.fills import Fills
from tao.serving.forward_path import ForwardPath
from tao.serving.housekeeping import keep_house
from tao.serving.read_service import ReadService
from tao.serving.refills import PrefixRefills
from tao.serving.remote_source import RemoteSource
from tao.serving.schema_file import SchemaFile
from tao.serving.stall_guard import StallGuard
from tao.serving.traffic import Traffic
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools, PoolSettings
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.topology.file_store import TopologyFile
from tao.wire.identity import AcceptedTokens, Credentials
from tao.wire.settings import ServingSettings

MAX_TASKS: Final = 100_000
"""Tasks of one server at a time: writes, reads of a database, what goes another way than usual, each of which has
bounds of its own."""

DRAIN_SECONDS: Final = 6.0
"""Longest wait for requests under way when the server is told to stop: above a request's deadline of 5 s."""


class FollowerServer:
    """One follower process' parts. `start` serves; then the `tao.runtime.process.RunningServer` protocol."""

    def __init__(self, settings: FollowerSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log, limit=MAX_TASKS)
        self._topology_file: Final = TopologyFile(
            settings.topology_file, on_error=lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._schema_file: Final = SchemaFile(settings.schema_file)
        self._read_pools: Pools | None = None

    async def start(self) -> FollowerServer:
        """Subscribe, listen and serve. Raises `OperatorError` or `OSError` when that cannot be."""
        settings, name = self._settings, self._settings.name
        schema = await self._schema_file.load()
        configuration = self._configuration = Configuration(
            await self._topology_file.load(), schema, self._log, self._topology_file.load
        )
        place = configuration.routes.locate(name)
        if place.role != "follower":
            raise TopologyError(f"{name} is a {place.role} in {settings.topology_file}; run it with: tao {place.role}")
        clock = LoopClock()
        arenas = arena_budgets(settings.cache_mb, settings.arena_mb)
        story = Story(settings.story, clock.unix_ms)
        cache = self._cache = GraphCache(CacheSettings(arena_bytes=arenas), SchemaArenas(schema, arenas), story)
        tls, credentials = settings.tls.if_set, Credentials(name, "follower", settings.token)
        links = self._links = Links(LinkSettings(), credentials, tls, region=place.region)
        self._budget = RetryBudget(settings.retries, clock.monotonic())
        source = self._source = self._miss_path(place.region, configuration)
        self._types = SchemaArenas(schema, arenas)
        fills = Fills(cache, source, clock, self._list_limit, settings.fills, past_floors=True)
        PrefixRefills(cache, fills, self._list_limit, self._spawn("refill"), settings.refills)
        reads = ReadService(
            cache,
            fills,
            schema,
            self._admit,
            cache.version_epoch,
            staleness_ms=self._staleness_ms,
            traffic=Traffic(clock, settings.rates),
        )
        where = (place.region, place.tier)
        amends = Amends(links, self._spawn("amends"), settings.amends)
        changes = WriteThrough(cache, clock, settings.subscriptions.write_answer_seconds)
        writes = ForwardPath(
            name,
            configuration,
            lambda shard: configuration.routes.leaders(place.region).home(shard),
            lambda shard: configuration.routes.tier(place.region, place.tier).told(shard),
            changes.take_back,
            links,
            clock,
            self._admit,
            self._spawn("write"),
            settings.forwarding,
            self._budget,
            amends,
        )
        self._subscriptions = Subscriptions(
            name,
            where,
            cache,
            changes,
            configuration,
            links,
            clock,
            self._spawn("subscription"),
            settings.subscriptions,
            self._log,
        )
        service = FollowerService(
            cache, reads, writes, changes.take_back, configuration, place.region, links, clock, self._spawn("request")
        )

        guard = self._guard = StallGuard(
            service, frozenset({"read"}), self._look_after_pause, clock, settings.stalls, self._log
        )

        def use_schema(changed: Schema) -> None:
            self._types = SchemaArenas(changed, arenas)
            cache.set_types(self._types)
            reads.use_schema(changed)

        configuration.on_schema(use_schema)
        configuration.on_routes(TopologyEpochs(cache).follow_routes)
        configuration.on_routes(lambda routes: links.keep_only(routes.server_names()))
        metrics = Metrics(role="follower", server=name)
        figures = ServingFigures(metrics, cache, reads, fills, clock)
        self._register(metrics, writes, amends)
        server = configuration.routes.server(name)
        self._faces = Faces(
            server,
            guard,
            ServingSettings(accepted_tokens=AcceptedTokens.of(settings.token, settings.client_token)),
            lambda: configuration.routes.version,
            lambda: random.randrange(configuration.routes.shards),
            UnaryPath(
                guard,
                where,
                configuration,
                links,
                clock,
                self._spawn("unary"),
                settings.unary,
                lambda: self._subscriptions.hosted,
            ),
            tls,
        )
        subscriptions = self._subscriptions
        pages = AdminPages(
            metrics=metrics.render,
            stats=lambda: {
                "server": name,
                "role": "follower",
                "region": place.region,
                "tier": place.tier,
                "topology_version": configuration.routes.version,
                "schema_hash": configuration.schema.version_hash,
                **figures.summary(),
                "writes": {"forwarded": writes.acknowledged.total(), "failed": writes.failed.total()},
                "messages": subscriptions.messages,
                "resets": subscriptions.resets,
                "unsubscribed_shards": subscriptions.unsubscribed,
                "staleness_seconds": {
                    database: None if seconds == inf else seconds for database, seconds in self._staleness().items()
                },
                "direct_reads": self._direct_reads(),
                "links": links.figures(),
                "databases": {} if self._read_pools is None else self._read_pools.figures(),
                "retries": self._budget.figures(),
            },
            not_ready=lambda: (
                f"{subscriptions.unsubscribed} shards are not subscribed yet" if subscriptions.unsubscribed else ""
            ),
        )
        host, _, port = server.admin.rpartition(":")
        self._admin = AdminServer(AdminSettings(host=host or "127.0.0.1", port=int(port or 0)), pages, self._log)
        await self._faces.start()
        await self._admin.start()
        self._subscriptions.follow_routes(configuration.routes)
        self._stop_watching = self._topology_file.watch(configuration.use_topology)
        self._tasks.keep(guard.keep, "signs of life")
        self._tasks.keep(lambda: self._schema_file.watch(configuration.use_schema_text), "schema")
        self._tasks.keep(lambda: keep_house(cache, clock), "housekeeping")
        self._tasks.keep(subscriptions.keep_following, "following leaders")
        self._log.info("serving", grpc=server.grpc, frames=server.frames, shards=len(subscriptions.hosted))
        return self

    async def _look_after_pause(self, seconds: float) -> None:
        """What may have changed while this process did not run: who leads its shards, and what they contain."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds / 2):
                await self._configuration.refresh()
        await self._subscriptions.renew(seconds / 2)

    def _miss_path(self, region: str, configuration: Configuration) -> FillSource:
        """To the leaders, and past them where this follower has an account at the databases."""
        settings, links, budget = self._settings, self._links, self._budget
        spawn = self._spawn("miss that goes another way")

        def leader(shard: int) -> CacheServer:
            return configuration.routes.leaders(region).home(shard)

        def leader_is_down(shard: int) -> bool:
            return links.is_down(leader(shard))

        if not settings.reader_user:
            return RemoteSource(configuration, leader, links, spawn, settings.misses, budget)
        databases = Databases(region, configuration)
        pools = self._read_pools = Pools(
            databases.login(settings.reader_user, settings.reader_password),
            READ_SETUP,
            PoolSettings(max_connections=settings.direct_reads.max_connections),
        )
        tables = edge_tables_of(lambda: configuration.schema)
        store = MySqlReadStore(databases.local, databases.master, pools, tables)
        return MissPath(
            RemoteSource(configuration, leader, links, spawn, settings.misses, budget, leader_is_down),
            DatabaseSource(store, databases.database_of, self._spawn("database read"), settings.database),
            RemoteSource(
                configuration,
                lambda shard: configuration.routes.leaders(databases.other_region(shard) or region).home(shard),
                links,
                spawn,
                settings.misses,
                budget,
            ),
            databases,
            leader_is_down,
            self._is_told,
            spawn,
            settings.direct_reads,
        )

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        await self._faces.drain(DRAIN_SECONDS)

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        self._stop_watching()
        await self._faces.close()
        await self._admin.close()
        await self._tasks.close()
        await self._links.close()
        if self._read_pools is not None:
            await self._read_pools.close()

    async def reload(self) -> None:
        """See `tao.runtime.process.RunningServer`: look at both files now."""
        self._configuration.use_topology(await self._topology_file.load())
        await self._schema_file.look(self._configuration.use_schema_text)

    def _spawn(self, name: str) -> partial[object]:
        return partial(self._start_task, name)

    def _start_task(self, name: str, job: Coroutine[Any, Any, None]) -> object:
        return self._tasks.start(job, name)

    def _list_limit(self, atype: int) -> int:
        return self._types.list_limit(atype)

    def _admit(self, shard: int) -> TaoError | None:
        """Why this follower does not serve the shard, or None."""
        if shard in self._subscriptions.hosted:
            return None
        routes = self._configuration.routes
        if shard >= routes.shards:
            return InvalidArgument(
                f"there is no shard {shard}: ids of this graph lie on shards 0 … {routes.shards - 1}"
            )
        return NotMine(f"follower {self._settings.name} does not host shard {shard}", routes.version)

    def _is_told(self, shard: int) -> bool:
        return self._subscriptions.is_told(shard)

    def _direct_reads(self) -> int:
        return self._source.direct_reads if isinstance(self._source, MissPath) else 0

    def _staleness_ms(self, shard: int) -> float:
        return self._subscriptions.freshness.staleness_ms(shard)

    def _staleness(self) -> dict[str, float]:
        return self._subscriptions.freshness.by_database(self._subscriptions.hosted)

    def _register(self, metrics: Metrics, writes: ForwardPath, amends: Amends) -> None:
        subscriptions = self._subscriptions
        metrics.gauge_family(
            "staleness_seconds",
            "How far behind its master the stalest shard of a database is here at most; infinite while not known.",
            "database",
            self._staleness,
        )
        for outcome, counter in (("acknowledged", writes.acknowledged), ("failed", writes.failed)):
            metrics.gauge_family(
                "writes_total",
                "Writes forwarded to leaders, by operation and outcome.",
                "operation",
                counter.copy,
                outcome=outcome,
            )
        metrics.gauge_family(
            "maintenance_total",
            "What subscriptions brought: messages applied, shards reset, gaps found. Siblings: those that missed a "
            "change, shards that they dropped for it.",
            "event",
            lambda: {
                "message": subscriptions.messages,
                "reset": subscriptions.resets,
                "gap": subscriptions.gaps,
                "sibling_missed": writes.siblings_missed,
                "sibling_voided": amends.voided,
            },
        )
        metrics.gauge(
            "unsubscribed_shards",
            "Shards that no leader has confirmed: served from what is known.",
            lambda: subscriptions.unsubscribed,
        )
        metrics.gauge_family(
            "link_failures",
            "Failed attempts to reach a server since it answered last, by server.",
            "peer",
            self._links.failures,
        )
        metrics.gauge(
            "direct_read_queries", "Queries that went past a leader that could not serve.", self._direct_reads
        )
        register_links(metrics, self._links.standings)
        if self._read_pools is not None:
            register_databases(metrics, self._read_pools.standings, pool="read")
        register_retries(metrics, self._budget)
        self._guard.register(metrics)
        metrics.gauge("running_tasks", "Tasks under way.", lambda: len(self._tasks))


def run_follower(settings: FollowerSettings) -> int:
    """Run a follower in this process until it is told to stop; returns the exit status."""
    configure_logs("follower", settings.name, settings.log_level, settings.log_form, sys.stderr)
    log = logger("follower")
    return run_server(lambda: FollowerServer(settings, log).start(), log=log)
