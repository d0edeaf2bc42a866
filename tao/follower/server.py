"""The wiring of a follower: the only place where its parts are put together."""

from __future__ import annotations

import asyncio
import random
from math import inf

from tao.follower.counters import Counters
from tao.follower.miss_path import FollowerSources, MissPath
from tao.follower.pair_filters import PairFilters
from tao.follower.select_path import SelectPath
from tao.follower.service import FollowerService, UnaryPath
from tao.follower.settings import FollowerSettings
from tao.follower.subscriptions import Subscriptions
from tao.journal.journal import Journal
from tao.model.errors import NotMine, TaoError
from tao.model.topology import CacheServer
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import AppliesWrites, ForwardPath, SiblingInvalidation, WriteThrough
from tao.serving.metrics import register_databases, register_held_rows
from tao.serving.misses import ReadPolicy
from tao.serving.server import CachingServer
from tao.serving.sources import Databases, DatabaseSource, FetchSource, RemoteSource
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools, PoolSettings
from tao.storage.reads import READ_SETUP, MySqlReadStore, ReadSettings


class FollowerServer(CachingServer[FollowerSettings]):
    """The parts of one follower process."""

    role = "follower"

    def __init__(self, settings: FollowerSettings, log: Logger) -> None:
        super().__init__(settings, log)
        self._read_pools: Pools | None = None
        self._read_store: MySqlReadStore | None = None
        self._journal: Journal | None = None

    async def start(self) -> FollowerServer:
        """Subscribe, listen and serve. Raises `OperatorError` or `OSError` when the follower cannot start."""
        context = self._context = await self._make_context()
        self._make_cache(context)
        self._make_read_path(context)
        self._make_write_path(context)
        if self._journal is not None:
            await self._journal.open()
        self._make_request_handlers(context)
        self._follow_configuration(context)
        await self._open_ports(context)
        self._subscriptions.follow_routes(context.configuration.routes)
        self._start_common_tasks(context)
        self._tasks.keep(self._subscriptions.keep_following, "following leaders")
        self._tasks.keep(self._pair_filters.keep, "pair filters")
        self._tasks.keep(self._counters.keep, "counters")
        if self._journal is not None:
            self._tasks.keep(self._journal.clocks.keep, "clocks of leaders")
            self._tasks.keep(self._journal.keep_purging, "purge of the journal")
            self._tasks.keep(self._journal.held.watch, "copies of other followers")
            if self._settings.journal.copies > 1:
                self._tasks.keep(self._journal.copies.keep, "copies at another follower")
        server = context.configuration.routes.server(context.name)
        self._log.info("serving", grpc=server.grpc, frames=server.frames, shards=len(self._subscriptions.hosted))
        return self

    # ---- the steps of `start` --------------------------------------------------------------------------------------

    def _make_read_path(self, context: ServerContext) -> None:
        settings = self._settings
        self._source = self._make_source(context)
        policy = ReadPolicy(self._admit, self._staleness_ms, past_floors=True)
        self._make_reads(context, self._source, settings.fills, policy, settings.rates)

    def _make_source(self, context: ServerContext) -> FetchSource:
        """Return the source of this follower's misses: its leaders, and the database as well when the settings name an
        account that may read it."""
        settings, configuration, links, region = self._settings, context.configuration, context.links, context.region

        def leader(shard: int) -> CacheServer:
            return configuration.routes.leaders(region).home(shard)

        def leader_is_down(shard: int) -> bool:
            return links.is_down_at(configuration.routes.leaders(region).home(shard).name)

        if not settings.reader_user:
            return RemoteSource(context, leader, settings.misses)
        databases = Databases(region, configuration)
        pools = self._read_pools = Pools(
            databases.login(settings.reader_user, settings.reader_password, settings.database_tls.if_set),
            READ_SETUP,
            PoolSettings(max_connections=settings.direct_reads.max_connections),
        )
        tables = edge_tables_of(lambda: configuration.schema)
        store = self._read_store = MySqlReadStore(
            databases.local,
            databases.master,
            pools,
            tables,
            ReadSettings(max_held_bytes=settings.fills.max_held_bytes),
            keeps_lease=databases.keeps_lease,
            is_elsewhere=databases.is_elsewhere,
        )

        def leader_in_other_region(shard: int) -> CacheServer:
            return configuration.routes.leaders(databases.other_region(shard) or region).home(shard)

        sources = FollowerSources(
            leaders=RemoteSource(context, leader, settings.misses, gives_up=leader_is_down),
            database=DatabaseSource(
                store,
                databases.database_of,
                context.spawn_as("database read"),
                settings.database,
                configuration.refresh,
            ),
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
            changes=AppliesWrites(changes.decode_write, changes.apply_write),
            admit=self._admit,
            sibling_invalidation=self._sibling_invalidation,
        )
        self._subscriptions = Subscriptions(context, self._cache, changes, settings.subscriptions)
        self._pair_filters = PairFilters(context, self._cache, self._is_subscribed, settings.pair_filters)
        if settings.journal.folder is not None:
            self._journal = Journal(context, settings.journal.folder, settings.journal, self._writes, self._admit)
        self._counters = Counters(
            context, settings.counters, self._cache, self._reads, self._writes, self._admit, self._staleness_ms
        )
        self._service = FollowerService(
            context, self._cache, self._reads, self._writes, changes, self._counters, self._journal
        )

    def _make_request_handlers(self, context: ServerContext) -> None:
        self._make_listeners(
            context,
            self._service,
            frozenset({"read", "get_counters"}),
            lambda: random.randrange(context.configuration.routes.shards),
            lambda own: SelectPath(
                context,
                UnaryPath(
                    context,
                    own,
                    self._service.admit,
                    self._reads.shares,
                    lambda: self._subscriptions.hosted,
                    self._settings.unary,
                ),
            ),
        )

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`: also write what was counted, beside the wait for requests, since
        both have to end within the time of the whole."""
        await asyncio.gather(super().drain(), self._counters.drain())

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        if self._journal is not None:
            self._journal.stop()
        await super().close()
        if self._journal is not None:
            await self._journal.close()
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
        return routes.unknown_shard(shard) or NotMine(
            f"follower {self._settings.name} does not host shard {shard}", routes.version
        )

    def _not_ready(self) -> str:
        unsubscribed = self._subscriptions.unsubscribed
        return f"{unsubscribed} shards are not subscribed yet" if unsubscribed else ""

    def _is_subscribed(self, shard: int) -> bool:
        return self._subscriptions.is_subscribed(shard)

    def _direct_reads(self) -> int:
        return self._source.direct_reads if isinstance(self._source, MissPath) else 0

    def _staleness_ms(self, shard: int) -> float:
        return self._subscriptions.freshness.staleness_ms(shard)

    def _staleness(self) -> dict[str, float]:
        return self._subscriptions.freshness.by_database(self._subscriptions.hosted)

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def _stats(self) -> dict[str, object]:
        writes, subscriptions = self._writes, self._subscriptions
        return {
            "writes": {"forwarded": writes.acknowledged.total(), "failed": writes.failed.total()},
            **({} if self._journal is None else {"journal": self._journal.control.figures()}),
            "counters": self._counters.summary(),
            "messages": subscriptions.messages,
            "resets": subscriptions.resets,
            "unsubscribed_shards": subscriptions.unsubscribed,
            "pair_filters": self._pair_filters.summary(),
            "staleness_seconds": {
                database: None if seconds == inf else seconds for database, seconds in self._staleness().items()
            },
            "direct_reads": self._direct_reads(),
            "held_row_bytes": self._held_row_bytes(),
            "databases": {} if self._read_pools is None else self._read_pools.figures(),
        }

    def _held_row_bytes(self) -> int:
        return 0 if self._read_store is None else self._read_store.held_bytes

    def _register_metrics(self, metrics: Metrics) -> None:
        subscriptions, writes = self._subscriptions, self._writes
        if self._journal is not None:
            self._journal.control.register(metrics)
        register_held_rows(metrics, self._held_row_bytes)
        self._pair_filters.register(metrics)
        self._counters.register(metrics)
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
