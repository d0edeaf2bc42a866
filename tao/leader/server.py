"""Put together the parts of a leader process."""

from __future__ import annotations

import dataclasses
from typing import Final

from tao.leader.consistency_checker import ConsistencyChecker
from tao.leader.delivery_path import open_publisher
from tao.leader.heartbeats import Heartbeats
from tao.leader.inverse_path import InversePath
from tao.leader.job_requests import JobRequests
from tao.leader.jobs import JobPath
from tao.leader.membership_filters import MembershipFilters
from tao.leader.miss_path import RegionSource
from tao.leader.node_pages import NodePages
from tao.leader.ownership import Ownership
from tao.leader.pair_scans import PairScans
from tao.leader.relay_path import RelayPath, TouchPath
from tao.leader.remote_inverses import InverseFence, RemoteLeaders
from tao.leader.replica_shards import ForwardedWrites, ReplicaShards
from tao.leader.service import LeaderService, WriteRequests
from tao.leader.settings import LeaderSettings
from tao.leader.write_path import WritePath
from tao.model.errors import TaoError
from tao.model.rows import ShardRow
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.routing.routes import Routes
from tao.routing.topology_changes import AffectedShards, affected_shards
from tao.schema.registry import Schema
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import WriteThrough
from tao.serving.metrics import register_databases, register_disk_space, register_held_rows
from tao.serving.misses import ReadPolicy
from tao.serving.server import CachingServer
from tao.serving.sources import Databases, DatabaseSource, RemoteSource
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore, ReadSettings
from tao.storage.scans import MySqlMemberScans, Scans
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.wire.identity import PeerIdentity

PAUSE_SENSITIVE: Final = frozenset({"read", "subscribe", "relay", "relay_by_reference"})
"""Requests that a leader answers from what it believes about its shards, so that a pause of the process matters. Writes
are fenced by their generation in any case."""

REPLICA_REREADS: Final = 3
"""Rereads of a replica that lacks a known version. It may be seconds behind, and the master region has the version."""


class LeaderServer(CachingServer[LeaderSettings]):
    """The parts of one leader process."""

    role = "leader"

    def __init__(self, settings: LeaderSettings, log: Logger) -> None:
        super().__init__(settings, log)
        self._followed: Routes | None = None
        self._led: frozenset[int] = frozenset()  # by the followed routes

    async def start(self) -> LeaderServer:
        """Listen, serve and begin to take the shards. Raises `OperatorError` or `OSError` when that fails."""
        context = self._context = await self._make_context()
        self._make_cache(context)
        self._make_stores(context)
        await self._make_publisher(context)
        self._make_shards(context)
        self._make_write_path(context)
        self._make_relay_path(context)
        self._make_read_path(context)
        self._make_background_checks(context)
        self._make_request_handlers(context)
        self._follow_configuration(context)
        await self._open_ports(context)
        self._follow_routes(context.configuration.routes)
        self._start_background_tasks(context)
        server = context.configuration.routes.server(context.name)
        self._log.info("serving", grpc=server.grpc, frames=server.frames)
        return self

    # ---- the steps of `start` --------------------------------------------------------------------------------------

    def _make_stores(self, context: ServerContext) -> None:
        settings, configuration = self._settings, context.configuration
        databases = self._databases = Databases(context.region, configuration)
        tables = edge_tables_of(lambda: configuration.schema)
        tls = settings.database_tls.if_set
        self._read_pools = Pools(databases.login(settings.reader_user, settings.reader_password, tls), READ_SETUP)
        self._write_pools = Pools(databases.login(settings.leader_user, settings.leader_password, tls), WRITE_SETUP)
        self._read_store = MySqlReadStore(
            databases.local,
            databases.master,
            self._read_pools,
            tables,
            ReadSettings(max_held_bytes=settings.fills.max_held_bytes),
            keeps_lease=databases.keeps_lease,
            is_elsewhere=databases.is_elsewhere,
        )
        self._write_store = MySqlWriteStore(databases.master, self._write_pools, tables)
        self._member_scans = MySqlMemberScans(databases.local, self._read_pools, tables)
        self._shard_scans = Scans(databases.master, self._read_pools)

    async def _make_publisher(self, context: ServerContext) -> None:
        configuration = context.configuration
        self._spooled_publisher = await open_publisher(
            self._settings, lambda shard: configuration.routes.database_of(shard).name, context.clock, self._log
        )
        self._publisher = self._spooled_publisher.publisher

    def _make_shards(self, context: ServerContext) -> None:
        """Make what owns the shards mastered in this region, and what serves those of other regions."""
        settings, store = self._settings, self._write_store
        self._inverse_fence = InverseFence(store, timeout_seconds=settings.inverses.settle_timeout_seconds)
        self._ownership = Ownership(
            context, settings.ownership, store, on_taken=self._open_shard, on_given_up=self._close_shard
        )
        replica = settings.replica_shards
        self._changes = WriteThrough(self._cache, context.clock, replica.write_answer_seconds)
        replicas = self._replica_shards = ReplicaShards(self._cache, self._changes, self._publisher, replica, self._log)
        self._forwarded = ForwardedWrites(
            context,
            settings.forwarding,
            self._publisher,
            hosts=lambda shard: shard in replicas.shards,
            apply=self._changes.apply_write,
        )

    def _make_write_path(self, context: ServerContext) -> None:
        settings, ownership = self._settings, self._ownership
        self._writes = WritePath(context, settings.writes, ownership, self._write_store, self._cache, self._publisher)
        remote_leaders = RemoteLeaders(context, ownership, self._forwarded.apply_remote_changes)
        self._inverses = InversePath(
            context,
            settings.inverses,
            self._writes,
            ownership,
            remote_leaders,
            self._read_store,
            self._write_store,
        )
        remote_leaders.local = self._inverses
        self._pages = NodePages(context, self._writes, ownership, remote_leaders)
        self._jobs = JobPath(context, settings.jobs, ownership, self._write_store, self._writes)

    def _make_relay_path(self, context: ServerContext) -> None:
        settings, writes, cache = self._settings.relays, self._writes, self._cache
        replica_shards = self._replica_shards
        touches = TouchPath(
            lambda write, deadline: writes.commit(write, deadline, both_sides=True),
            cache,
            settings.touched_keys_per_write,
        )
        self._relays = RelayPath(
            context,
            settings,
            cache,
            touches,
            self._publisher,
            hosts=lambda shard: shard in replica_shards.shards,
            apply=self._changes.apply,
        )

    def _make_read_path(self, context: ServerContext) -> None:
        settings, cache, clock = self._settings, self._cache, context.clock
        self._source = self._make_source(context)
        spawn = context.spawn_as("membership filter")
        self._filters = MembershipFilters(
            self._source, cache, self._member_scans, clock, spawn, settings.membership, self._log
        )
        self._make_reads(context, self._filters, settings.fills, ReadPolicy(self._admit, pass_on=self._pass_on))

    def _make_source(self, context: ServerContext) -> RegionSource:
        """Return the source of this leader's misses: databases of its region, and leaders of other regions."""
        settings, store, databases, forwarded = self._settings, self._read_store, self._databases, self._forwarded
        replica_settings = dataclasses.replace(settings.misses, max_rereads=REPLICA_REREADS)
        spawn_as = context.spawn_as
        self._database_sources = (
            DatabaseSource(
                store,
                databases.database_of,
                spawn_as("database read"),
                settings.misses,
                context.configuration.refresh,
            ),
            DatabaseSource(store, databases.database_of, spawn_as("replica read"), replica_settings),
        )
        return RegionSource(
            *self._database_sources,
            RemoteSource(context, forwarded.leader, settings.master_region, gives_up=forwarded.leader_is_down),
            forwarded.is_mastered_here,
            databases.local_is_down,
            spawn_as("read of another region"),
            settings.replica,
        )

    def _make_background_checks(self, context: ServerContext) -> None:
        settings, configuration = self._settings, context.configuration
        self._heartbeats = Heartbeats(
            context, self._write_store, lambda: self._ownership.owned, self._publisher, settings.heartbeats
        )
        self._relays.on_heartbeat = self._heartbeats.heard
        self._checker = ConsistencyChecker(
            self._read_store,
            lambda: configuration.routes,
            context.region,
            context.links,
            context.clock,
            settings.checker,
            self._log,
        )
        self._publisher.on_published = self._checker.note

    def _make_request_handlers(self, context: ServerContext) -> None:
        requests = WriteRequests(
            context,
            self._ownership,
            self._writes,
            self._inverses,
            self._inverse_fence,
            self._forwarded,
            self._pages,
        )
        spawn = context.spawn_as("scan of edges")
        scans = PairScans(self._member_scans, self._cache, self._admit, context.clock, spawn)
        jobs = JobRequests(context, self._settings.jobs, self._jobs, self._ownership, self._writes, self._shard_scans)
        others = {"scan_pairs": scans.handle, **jobs.handlers}
        service = LeaderService(context, self._cache, self._reads, requests, self._relays, self._publisher, others)
        self._make_listeners(context, service, PAUSE_SENSITIVE, lambda: min(self._ownership.owned, default=0))

    def _follow_configuration(self, context: ServerContext) -> None:
        context.configuration.on_routes(self._follow_routes)
        super()._follow_configuration(context)
        self._warn_of_missing_records(context.configuration.schema)
        context.configuration.on_schema(self._warn_of_missing_records)

    def _start_background_tasks(self, context: ServerContext) -> None:
        self._tasks.keep(self._ownership.take, "taking shards")
        self._tasks.keep(self._ownership.check, "ownership check")
        self._tasks.keep(self._inverses.repair, "repair")
        self._tasks.keep(self._inverses.search_taken, "intents of taken shards")
        self._tasks.keep(self._inverses.settle_pending, "pending inverses")
        self._tasks.keep(self._heartbeats.run, "heartbeats")
        self._tasks.keep(self._checker.run, "consistency checker")
        self._tasks.keep(self._jobs.care, "care for jobs")
        self._start_common_tasks(context)

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        await super().close()
        await self._spooled_publisher.close()
        await self._read_pools.close()
        await self._write_pools.close()

    # ---- callbacks of the parts ------------------------------------------------------------------------------------

    async def _look_after_pause(self, seconds: float) -> None:
        """Learn what may have changed while this process was paused: topology, owners, messages of replica shards."""
        if await self._refresh_configuration(seconds / 2):
            self._replica_shards.note_pause()  # the shards that a change affected have been reset
        else:
            self._replica_shards.reset()
        await self._ownership.confirm(seconds / 2)

    def _follow_routes(self, routes: Routes) -> None:
        # A server that is removed from the topology while it runs has no shards, and must give up its own.
        region, shards = self._context.region, self._context.own_shards(routes)
        former, self._followed = self._followed, routes
        affected = AffectedShards(shards, shards) if former is None else affected_shards(former, routes, region)
        # Forget proofs of freshness before the shards change: they say nothing about shards that are added.
        self._publisher.forget_proofs((affected.led | affected.database) & (shards | self._led))
        self._led = shards
        mastered_here = {shard for shard in shards if routes.master_region(shard) == region}
        self._replica_shards.serve(shards - mastered_here, affected.led)
        self._ownership.want(mastered_here)

    def _warn_of_missing_records(self, schema: Schema) -> None:
        if schema.has_audited and not self._context.audit.is_on:
            self._log.warning("audited_writes_not_recorded", reason="the settings name no audit.path")

    def _open_shard(self, row: ShardRow) -> None:
        """Start caching and publishing a shard that this leader has taken."""
        self._inverse_fence.note(row)
        self._cache.close_shard(row.shard)
        self._cache.open_shard(row.shard, row.version_epoch)
        self._publisher.open_shard(row.shard, row.generation, row.version_epoch)
        self._inverses.shard_taken()

    def _close_shard(self, shard: int) -> None:
        self._cache.close_shard(shard)
        self._publisher.close_shard(shard)

    def _admit(self, shard: int) -> TaoError | None:
        """Return why this leader does not serve the shard, or None."""
        if self._ownership.may_read(shard) or shard in self._replica_shards.shards:
            return None
        return self._context.configuration.routes.unknown_shard(shard) or self._ownership.not_owned(shard)

    def _pass_on(self, shard: int, peer: PeerIdentity) -> TaoError | None:
        """Return why a critical read of this peer does not go on to the shard's master region, or None."""
        if self._forwarded.is_mastered_here(shard) or self._forwarded.may_pass_on(peer):
            return None
        return self._ownership.not_owned(shard)

    def _not_ready(self) -> str:
        return "" if self._ownership.complete else "not every shard of this leader is taken yet"

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def _register_metrics(self, metrics: Metrics) -> None:
        read_seconds = metrics.histogram("database_read_seconds", "Reads of the database that answer misses, by batch.")
        for source in self._database_sources:
            source.read_seconds = read_seconds.observe
        metrics.gauge("owned_shards", "Shards that this leader owns.", lambda: len(self._ownership.owned))
        self._heartbeats.register(metrics)
        self._writes.register(metrics)
        self._inverses.register(metrics)
        self._relays.register(metrics)
        self._spooled_publisher.register(metrics)
        self._checker.register(metrics)
        self._jobs.register(metrics)
        self._filters.register(metrics)
        for pool, pools in (("read", self._read_pools), ("write", self._write_pools)):
            register_databases(metrics, pools.states, pool=pool)
        register_disk_space(metrics, self._write_pools.full)
        register_held_rows(metrics, lambda: self._read_store.held_bytes)

    def _stats(self) -> dict[str, object]:
        relays = self._relays
        return {
            "owned_shards": len(self._ownership.owned),
            "hosted_shards": len(self._replica_shards.shards),
            "relayed_messages": relays.messages,
            "invalidated_shards": relays.invalidated_shards,
            "voided_shards": relays.invalidated_shards,  # the former name
            "foreign_keys": {"dropped": relays.dropped, "touched": relays.touches.keys},
            **self._heartbeats.summary(),
            "reads_sent_to_master_region": self._source.sent_to_master_region,
            "held_row_bytes": self._read_store.held_bytes,
            "writes": {**self._writes.summary(), **self._inverses.summary()},
            "jobs": self._jobs.summary(),
            "consistency": self._checker.summary(),
            "membership_filters": self._filters.summary(),
            "delivery": self._spooled_publisher.figures(),
            "databases": {"read": self._read_pools.figures(), "write": self._write_pools.figures()},
        }
