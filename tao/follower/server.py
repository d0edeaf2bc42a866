"""The wiring of a follower: the only place where its parts are put together."""

from __future__ import annotations

import random
from math import inf

from tao.follower.miss_path import FollowerSources, MissPath
from tao.follower.service import FollowerService, UnaryPath
from tao.follower.settings import FollowerSettings
from tao.follower.subscriptions import Subscriptions
from tao.model.errors import InvalidArgument, NotMine, TaoError
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import ForwardPath, SiblingInvalidation, WriteThrough
from tao.serving.metrics import ReadMetrics, register_databases
from tao.serving.misses import ReadPolicy
from tao.serving.prefix_refills import PrefixRefills
from tao.serving.read_service import ReadService
from tao.serving.requests import Listeners, PauseDetector
from tao.serving.server import CachingServer
from tao.serving.single_flight import SingleFlight
from tao.serving.sources import Databases, DatabaseSource, FetchSource, RemoteSource
from tao.serving.traffic import Traffic
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools, PoolSettings
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.wire.identity import AcceptedTokens
from tao.wire.settings import ServingSettings


class FollowerServer(CachingServer[FollowerSettings]):
    """The parts of one follower process."""

    role = "follower"

    def __init__(self, settings: FollowerSettings, log: Logger) -> None:
        super().__init__(settings, log)
        self._read_pools: Pools | None = None

    async def start(self) -> FollowerServer:
        """Subscribe, listen and serve. Raises `OperatorError` or `OSError` when the follower cannot start."""
        context = self._context = await self._make_context()
        self._make_cache(context)
        self._make_read_path(context)
        self._make_write_path(context)
        self._make_request_handlers(context)
        self._follow_configuration(context)
        await self._open_admin_port(context)
        self._subscriptions.follow_routes(context.configuration.routes)
        self._start_common_tasks(context)
        self._tasks.keep(self._subscriptions.keep_following, "following leaders")
        server = context.configuration.routes.server(context.name)
        self._log.info("serving", grpc=server.grpc, frames=server.frames, shards=len(self._subscriptions.hosted))
        return self

    # ---- the steps of `start` --------------------------------------------------------------------------------------

    def _make_read_path(self, context: ServerContext) -> None:
        settings, cache = self._settings, self._cache
        self._source = self._make_source(context)
        single_flight = SingleFlight(cache, self._source, context.clock, self._list_limit, settings.fills)
        self._refills = PrefixRefills(single_flight, context.spawn_as("refill"), settings.refills)
        self._reads = ReadService(
            cache,
            single_flight,
            context.configuration.schema,
            ReadPolicy(self._admit, self._staleness_ms, past_floors=True),
            traffic=Traffic(context.clock, settings.rates),
        )

    def _make_source(self, context: ServerContext) -> FetchSource:
        """Return the source of this follower's misses: its leaders, and the database as well when the settings name an
        account that may read it."""
        settings, configuration, links, region = self._settings, context.configuration, context.links, context.region

        def leader(shard: int) -> CacheServer:
            return configuration.routes.leaders(region).home(shard)

        def leader_is_down(shard: int) -> bool:
            return links.is_down(leader(shard))

        if not settings.reader_user:
            return RemoteSource(context, leader, settings.misses)
        databases = Databases(region, configuration)
        pools = self._read_pools = Pools(
            databases.login(settings.reader_user, settings.reader_password),
            READ_SETUP,
            PoolSettings(max_connections=settings.direct_reads.max_connections),
        )
        tables = edge_tables_of(lambda: configuration.schema)
        store = MySqlReadStore(databases.local, databases.master, pools, tables)

        def leader_in_other_region(shard: int) -> CacheServer:
            return configuration.routes.leaders(databases.other_region(shard) or region).home(shard)

        sources = FollowerSources(
            leaders=RemoteSource(context, leader, settings.misses, gives_up=leader_is_down),
            database=DatabaseSource(store, databases.database_of, context.spawn_as("database read"), settings.database),
            other_region=RemoteSource(context, leader_in_other_region, settings.misses),
        )
        spawn = context.spawn_as("fetch past the leader")
        return MissPath(sources, databases, leader_is_down, self._is_subscribed, spawn, settings.direct_reads)

    def _make_write_path(self, context: ServerContext) -> None:
        settings, configuration = self._settings, context.configuration
        region, tier = context.region, context.tier
        changes = WriteThrough(self._cache, context.clock, settings.subscriptions.write_answer_seconds)
        self._sibling_invalidation = SiblingInvalidation(context, settings.sibling_invalidation)
        self._writes = ForwardPath(
            context,
            settings.forwarding,
            next_hop=lambda shard: configuration.routes.leaders(region).home(shard),
            hosts=lambda shard: configuration.routes.tier(region, tier).receivers(shard),
            apply=changes.apply_write,
            admit=self._admit,
            sibling_invalidation=self._sibling_invalidation,
        )
        self._subscriptions = Subscriptions(context, self._cache, changes, settings.subscriptions)
        self._service = FollowerService(context, self._cache, self._reads, self._writes, changes.apply_write)

    def _make_request_handlers(self, context: ServerContext) -> None:
        settings, configuration = self._settings, context.configuration
        self._pause_detector = PauseDetector(
            self._service,
            frozenset({"read"}),
            self._look_after_pause,
            context.clock,
            settings.pause_detection,
            self._log,
        )
        self._listeners = Listeners(
            configuration.routes.server(context.name),
            self._pause_detector,
            ServingSettings(accepted_tokens=AcceptedTokens.of(settings.token, settings.client_token)),
            lambda: configuration.routes.version,
            lambda: random.randrange(configuration.routes.shards),
            UnaryPath(context, self._pause_detector, lambda: self._subscriptions.hosted, settings.unary),
            settings.tls.if_set,
        )

    async def _open_admin_port(self, context: ServerContext) -> None:
        metrics = Metrics(role=self.role, server=context.name)
        read_metrics = ReadMetrics(metrics, self._cache, self._reads, self._refills, context.clock)
        self._register_metrics(metrics, context)
        subscriptions = self._subscriptions
        await self._open_ports(
            context,
            metrics,
            stats=lambda: self._stats(context, read_metrics),
            not_ready=lambda: (
                f"{subscriptions.unsubscribed} shards are not subscribed yet" if subscriptions.unsubscribed else ""
            ),
        )

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        await super().close()
        if self._read_pools is not None:
            await self._read_pools.close()

    # ---- what the parts ask of each other --------------------------------------------------------------------------

    async def _look_after_pause(self, seconds: float) -> None:
        """Learn what may have changed while this process did not run: the leaders of its shards, and the contents."""
        await self._refresh_configuration(seconds / 2)
        await self._subscriptions.renew(seconds / 2)

    def _admit(self, shard: int) -> TaoError | None:
        """Return why this follower does not serve the shard, or None."""
        if shard in self._subscriptions.hosted:
            return None
        routes = self._context.configuration.routes
        if shard >= routes.shards:
            return InvalidArgument(
                f"there is no shard {shard}: ids of this graph lie on shards 0 … {routes.shards - 1}"
            )
        return NotMine(f"follower {self._settings.name} does not host shard {shard}", routes.version)

    def _is_subscribed(self, shard: int) -> bool:
        return self._subscriptions.is_subscribed(shard)

    def _direct_reads(self) -> int:
        return self._source.direct_reads if isinstance(self._source, MissPath) else 0

    def _staleness_ms(self, shard: int) -> float:
        return self._subscriptions.freshness.staleness_ms(shard)

    def _staleness(self) -> dict[str, float]:
        return self._subscriptions.freshness.by_database(self._subscriptions.hosted)

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def _stats(self, context: ServerContext, read_metrics: ReadMetrics) -> dict[str, object]:
        writes, subscriptions = self._writes, self._subscriptions
        return {
            **self._common_stats(context),
            **read_metrics.summary(),
            "writes": {"forwarded": writes.acknowledged.total(), "failed": writes.failed.total()},
            "messages": subscriptions.messages,
            "resets": subscriptions.resets,
            "unsubscribed_shards": subscriptions.unsubscribed,
            "staleness_seconds": {
                database: None if seconds == inf else seconds for database, seconds in self._staleness().items()
            },
            "direct_reads": self._direct_reads(),
            "databases": {} if self._read_pools is None else self._read_pools.figures(),
        }

    def _register_metrics(self, metrics: Metrics, context: ServerContext) -> None:
        subscriptions, writes = self._subscriptions, self._writes
        metrics.gauge_family(
            "staleness_seconds",
            "Upper bound on how far the stalest shard of a database is behind its master; infinite while unknown.",
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
            "Events of subscriptions: messages applied, shards reset, gaps found; changes that siblings missed, and "
            "shards that siblings dropped for that.",
            "event",
            lambda: {
                "message": subscriptions.messages,
                "reset": subscriptions.resets,
                "gap": subscriptions.gaps,
                "sibling_missed": writes.siblings_missed,
                "sibling_voided": self._sibling_invalidation.dropped,
            },
        )
        metrics.gauge(
            "unsubscribed_shards",
            "Shards that no leader confirms: served from what is cached.",
            lambda: subscriptions.unsubscribed,
        )
        metrics.gauge(
            "direct_read_queries", "Queries sent past a leader that could not serve them.", self._direct_reads
        )
        if self._read_pools is not None:
            register_databases(metrics, self._read_pools.states, pool="read")
        self._register_common_metrics(metrics, context)
