"""What the processes of followers and leaders have in common: start, configuration, cache upkeep, admin port, stop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeVar

from tao.access.document import AccessDocument
from tao.cache import CacheSettings, GraphCache
from tao.cache.settings import DEFAULT_ARENA
from tao.model.errors import AccessError, TopologyError, UnknownShard
from tao.model.ports import Clock
from tao.model.topology import CacheServer
from tao.model.versions import FIRST_EPOCH
from tao.observability.key_history import KeyHistoryRecorder
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.routing.budgets import RetryBudget
from tao.routing.failure_detector import DetectorSettings
from tao.routing.read_rates import RateSettings
from tao.routing.routes import Routes
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.credentials import AcceptedCredentialFiles, CredentialSources, check_own_credentials
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.schema.registry import Schema
from tao.schema.types import DEFAULT_LIST_LIMIT
from tao.serving.access import AccessControl
from tao.serving.audit import AuditTrail
from tao.serving.configuration import Configuration, ServerContext, open_schema
from tao.serving.metrics import ReadMetrics, register_audit, register_doorstep, register_links, register_retries
from tao.serving.misses import ReadPolicy
from tao.serving.prefix_refills import PrefixRefills
from tao.serving.read_service import ReadService
from tao.serving.registration import RegistrationKeeper
from tao.serving.requests import Listeners, PauseDetector, check_exposure
from tao.serving.settings import CacheServerSettings
from tao.serving.shares import WorkShares
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import FetchSource
from tao.serving.traffic import Traffic
from tao.topology.stores import EtcdConnections, open_access, open_topology
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.session import RequestHandler
from tao.wire.settings import ServingSettings

_MIB: Final = 1 << 20


def arena_budgets(cache_mb: float, arena_mb: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each arena: the default one and the further ones, whose budgets the settings give in MiB."""
    return {DEFAULT_ARENA: int(cache_mb * _MIB), **{name: mb * _MIB for name, mb in arena_mb.items()}}


class SchemaArenas:
    """The arenas and list limits of the schema's types, a `tao.cache.ArenaChoice`. A type whose arena has no budget on
    this server shares the default arena."""

    def __init__(self, schema: Schema, arenas: Mapping[str, int]) -> None:
        def known(arena: str) -> str:
            return arena if arena in arenas else DEFAULT_ARENA

        self._objects: Final = {otype.number: known(otype.arena) for otype in schema.objects}
        self._lists: Final = {atype.number: known(atype.arena) for atype in schema.assocs}
        self._limits: Final = {atype.number: atype.limit for atype in schema.assocs}

    def object_arena(self, otype: int) -> str:
        return self._objects.get(otype, DEFAULT_ARENA)

    def list_arena(self, atype: int) -> str:
        return self._lists.get(atype, DEFAULT_ARENA)

    def list_limit(self, atype: int) -> int:
        return self._limits.get(atype, DEFAULT_LIST_LIMIT)


class TopologyEpochs:
    """Passes the version epochs in the topology on to a cache. A promotion raises the epoch of a database, and every
    cache that learns the new topology drops the shards of that database, whatever the lost master had sent."""

    def __init__(self, cache: GraphCache) -> None:
        self._cache: Final = cache
        self._known: Final[dict[str, int]] = {}

    def follow_routes(self, routes: Routes) -> None:
        """Apply the epochs of a newer topology. Call this with every newer topology's routes."""
        for database in routes.topology.databases:
            if database.version_epoch > self._known.get(database.name, FIRST_EPOCH):
                self._known[database.name] = database.version_epoch
                for first, last in database.shards:
                    for shard in range(first, last + 1):
                        if self._cache.is_open(shard):
                            self._cache.open_shard(shard, database.version_epoch)


_CHECK_SECONDS: Final = 0.1
"""Interval between two checks for dropped tables: their memory is freed no later than this."""

_STEP_SECONDS: Final = 0.002
"""Pause between two steps of freeing, in which the loop serves requests."""

_FLOOR_CHECKS: Final = 300
"""Checks between two rounds of dropping old version floors: every 30 s, half of the time that floors are kept."""


async def maintain_cache(cache: GraphCache, clock: Clock) -> None:
    """Free dropped tables in steps, and drop old version floors, until cancelled."""
    checks = 0
    while True:
        await asyncio.sleep(_CHECK_SECONDS)
        more = cache.reclaim_step()
        while more:
            await asyncio.sleep(_STEP_SECONDS)
            more = cache.reclaim_step()
        checks += 1
        if checks % _FLOOR_CHECKS == 0:
            cache.forget_old_floors(clock.monotonic())


MAX_TASKS: Final = 100_000
"""Tasks of one server at a time: writes, reads of a database and fetches past a leader, each of which has bounds of its
own."""

SERVER_PROBES: Final = DetectorSettings(max_probe_seconds=0.5, probe_timeout_seconds=1.0)
"""Links between servers are probed four times as often as those of clients, of which there are far more: what waits for
the end of a cut, such as a pending inverse, waits for the next probe."""

DRAIN_SECONDS: Final = 6.0
"""Longest wait for requests in progress when the server stops. It exceeds a request's deadline of 5 s."""


SettingsType = TypeVar("SettingsType", bound=CacheServerSettings)


class CachingServer(Generic[SettingsType]):
    """The common parts of one follower or leader process. A role adds its own, and `start`, which makes all of them.

    After `start` it is a `tao.runtime.process.RunningServer`."""

    role: ClassVar[Literal["follower", "leader"]]

    _context: ServerContext

    def __init__(self, settings: SettingsType, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log, limit=MAX_TASKS)
        self._etcd: Final = EtcdConnections(settings.etcd)
        self._topology_store: Final = open_topology(
            settings.topology_file, self._etcd, lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._schema_source: Final = open_schema(settings.schema_file, self._etcd)
        sources = CredentialSources(
            accepted_tokens_file=settings.accepted_tokens_file,
            token=settings.token,
            token_file=settings.token_file,
            cluster=settings.tls.spiffe_cluster,
            jwt=settings.jwt,
        )
        self._accepted: Final = AcceptedCredentialFiles(sources, log)
        self._registration: RegistrationKeeper | None = None
        self._access_store: Final = open_access(
            settings.access_file, settings.topology_file, self._etcd, self._note_access_error
        )

    @classmethod
    def run(cls, settings: SettingsType) -> int:
        """Run a server of this role in this process until it is stopped. Returns the exit status."""
        configure_logs(cls.role, settings.name, settings.log_level, settings.log_form, sys.stderr)
        log = logger(cls.role)
        return run_server(lambda: cls(settings, log).start(), log=log)

    # ---- what a role adds ------------------------------------------------------------------------------------------

    async def start(self) -> Self:
        """Make the parts, listen and serve. Raises `OperatorError` or `OSError` when that fails."""
        raise NotImplementedError

    async def _look_after_pause(self, seconds: float) -> None:
        """Learn what may have changed while this process was paused."""
        raise NotImplementedError

    def _not_ready(self) -> str:
        """Return why the role is not ready, or ""."""
        raise NotImplementedError

    def _stats(self) -> dict[str, object]:
        """Return the role's own numbers for `/stats`."""
        raise NotImplementedError

    def _register_metrics(self, metrics: Metrics) -> None:
        """Register the role's own metrics."""
        raise NotImplementedError

    # ---- steps of `start` ------------------------------------------------------------------------------------------

    async def _make_context(self) -> ServerContext:
        settings, name = self._settings, self._settings.name
        schema = await self._schema_source.load()
        configuration = Configuration(await self._topology_store.load(), schema, self._log, self._topology_store.load)
        await self._accepted.load(configuration.lists)
        document = await self._access_store.load_if_there()
        if document is not None:
            self._use_access_document(configuration.access, document)
        clock, credentials = LoopClock(), Credentials(name, self.role, settings.token, settings.token_file)
        if settings.registration.join:
            await self._register(configuration, credentials, clock)
        place = configuration.routes.locate(name)
        if place.role != self.role:
            raise TopologyError(f"{name} is a {place.role} in {settings.topology_file}; run it with: tao {place.role}")
        if self._accepted.authenticator.accepted.are_in_use:
            configuration.access.warn_if_open()
        self._check_exposure(configuration.routes.server(name))
        return ServerContext(
            name=name,
            region=place.region,
            tier=place.tier,
            configuration=configuration,
            links=Links(LinkSettings(detector=SERVER_PROBES), credentials, settings.tls.if_set, region=place.region),
            clock=clock,
            spawn_as=lambda task_name: partial(self._start_task, task_name),
            budget=RetryBudget(settings.retries, clock.monotonic()),
            log=self._log,
            audit=await self._open_audit(configuration, clock),
            registered_grpc=settings.registration.grpc if settings.registration.join else "",
        )

    async def _register(self, configuration: Configuration, credentials: Credentials, clock: Clock) -> None:
        """Have the topology list this server. Raises `SettingsError` when others would not believe that it is who it
        says it is, or could reach it unprotected; and as `RegistrationKeeper.register`."""
        settings = self._settings
        keeper = self._registration = RegistrationKeeper(
            settings.name, self.role, settings.registration, configuration, self._topology_store, clock, self._log
        )
        accepted = self._accepted.authenticator.accepted
        check_own_credentials(credentials, settings.tls, accepted, keeper.wanted.region, clock.unix_ms() / 1000)
        self._check_exposure(keeper.wanted.server)
        await keeper.register()

    def _check_exposure(self, server: CacheServer) -> None:
        if not self._settings.insecure:
            has_credentials = self._accepted.authenticator.accepted.are_in_use
            check_exposure(server, self._settings.tls, has_credentials=has_credentials)

    def _use_access_document(self, access: AccessControl, document: AccessDocument) -> None:
        """Use a newer access document, and say so when it has nothing to go by."""
        access.use_document(document)
        if not self._accepted.authenticator.accepted.are_in_use:
            self._log.warning(
                "access_without_credentials",
                reason="peers are believed what they say of themselves, and every application is anonymous",
                instead="set accepted_tokens_file, or tls.cluster for certificates with ids",
            )

    def _note_access_error(self, error: AccessError) -> None:
        self._context.configuration.access.note_error(error)

    async def _open_audit(self, configuration: Configuration, clock: Clock) -> AuditTrail:
        """Return what makes records, with its log open if the settings name one. Raises `OperatorError` or
        `OSError`."""
        settings = self._settings
        audit = await AuditTrail.open(settings.audit, settings.name, clock.unix_ms, self._log)
        document = configuration.access.document
        audit.started(configuration.routes.topology, configuration.schema, document, self._accepted)
        configuration.on_routes(lambda routes: audit.use_topology(routes.topology))
        configuration.on_schema(audit.use_schema)
        configuration.access.on_document = audit.use_access_document
        if audit.is_on:
            configuration.access.on_denied = audit.denied
        return audit

    def _start_task(self, name: str, job: Coroutine[Any, Any, None]) -> object:
        return self._tasks.start(job, name)

    def _make_cache(self, context: ServerContext) -> None:
        settings = self._settings
        self._arenas = arena_budgets(settings.cache_mb, settings.arena_mb)
        self._types = SchemaArenas(context.configuration.schema, self._arenas)
        recorder = KeyHistoryRecorder(settings.key_history, context.clock)
        self._cache = GraphCache(CacheSettings(arena_bytes=self._arenas), self._types, recorder)

    def _list_limit(self, atype: int) -> int:
        return self._types.list_limit(atype)

    def _make_reads(
        self,
        context: ServerContext,
        source: FetchSource,
        fills: FillSettings,
        policy: ReadPolicy,
        rates: RateSettings | None = None,
    ) -> None:
        """Make what answers reads, from the cache or by fetching from ``source``."""
        clock = context.clock
        single_flight = SingleFlight(self._cache, source, clock, self._list_limit, fills)
        self._refills = PrefixRefills(single_flight, context.spawn_as("refill"), self._settings.refills)
        configuration, schema = context.configuration, context.configuration.schema

        def is_mastered_here(shard: int) -> bool:
            try:
                return configuration.routes.master_region(shard) == context.region
            except UnknownShard:  # nobody has checked the shards of a batch yet
                return True

        policy = policy._replace(access=configuration.access, is_mastered_here=is_mastered_here)
        # A leader's callers are held to their budgets by the followers that they ask.
        budgets = configuration.access if self.role == "follower" else None
        traffic, shares = Traffic(clock, rates), WorkShares(self._settings.shares, budgets, clock.monotonic)
        self._reads = ReadService(self._cache, single_flight, schema, policy, traffic=traffic, shares=shares)

    def _follow_configuration(self, context: ServerContext) -> None:
        configuration, cache = context.configuration, self._cache

        def use_schema(changed: Schema) -> None:
            self._types = SchemaArenas(changed, self._arenas)
            cache.set_types(self._types)
            self._reads.use_schema(changed)

        configuration.on_schema(use_schema)
        configuration.on_routes(TopologyEpochs(cache).follow_routes)
        configuration.on_routes(lambda _: self._accepted.authenticator.listing_changed())
        configuration.on_routes(lambda routes: context.links.keep_only(routes.topology.server_places))
        context.links.keep_only(configuration.routes.topology.server_places)

    def _make_listeners(
        self,
        context: ServerContext,
        handler: RequestHandler,
        pause_sensitive: frozenset[str],
        choose_shard: Callable[[], int],
        unary_path: Callable[[RequestHandler], RequestHandler] | None = None,
    ) -> None:
        """Make what requests pass on their way to ``handler``. ``pause_sensitive`` are the kinds of requests that are
        held after a pause. ``choose_shard`` returns the shard of a new object whose caller names no neighbour.
        ``unary_path`` returns the handler of unary calls, in front of the given one."""
        settings, configuration = self._settings, context.configuration
        detector = self._pause_detector = PauseDetector(
            handler, pause_sensitive, self._look_after_pause, context.clock, settings.pause_detection, self._log
        )
        self._listeners = Listeners(
            configuration.routes.server(context.name),
            detector,
            ServingSettings(
                authenticator=self._accepted.authenticator,
                doorstep=settings.doorstep,
                on_refused=context.audit.connection_refused,
            ),
            lambda: configuration.routes.version,
            choose_shard,
            None if unary_path is None else unary_path(detector),
            settings.tls.if_set,
        )

    async def _open_ports(self, context: ServerContext) -> None:
        """Listen for requests, and at the admin port."""
        metrics = Metrics(role=self.role, server=context.name)
        reads = ReadMetrics(metrics, self._cache, self._reads, self._refills, context.clock)
        self._register_metrics(metrics)
        self._register_common_metrics(metrics, context)
        pages = AdminPages(
            metrics=metrics.render,
            stats=lambda: {**self._common_stats(context), **reads.summary(), **self._stats()},
            not_ready=self.why_not_ready,
        )
        server = context.configuration.routes.server(context.name)
        host, _, port = server.admin.rpartition(":")
        admin = AdminSettings(host=host or "127.0.0.1", port=int(port or 0), doorstep=self._settings.doorstep)
        self._admin = AdminServer(admin, pages, self._log, server.grpc)
        for doorstep in (*self._listeners.doorsteps, self._admin.doorstep):
            register_doorstep(metrics, doorstep)
        await self._listeners.start()
        await self._admin.start()

    def why_not_ready(self) -> str:
        """Return why the server is not ready, or ""."""
        return (self._registration.trouble if self._registration is not None else "") or self._not_ready()

    def _start_common_tasks(self, context: ServerContext) -> None:
        configuration, registration = context.configuration, self._registration
        self._stop_watching = (
            self._topology_store.watch(configuration.use_topology),
            self._access_store.watch(partial(self._use_access_document, configuration.access)),
        )
        if registration is not None:
            self._tasks.keep(lambda: registration.keep(lambda: not self._not_ready()), "registration")
        self._tasks.keep(self._pause_detector.keep, "signs of life")
        self._tasks.keep(lambda: self._schema_source.watch(configuration.use_schema_text), "schema")
        self._tasks.start(self._accepted.watch(), "accepted credentials")
        self._tasks.keep(lambda: maintain_cache(self._cache, context.clock), "cache maintenance")
        if context.audit.log is not None:
            self._tasks.keep(context.audit.log.keep_publishing, "publication of the audit log's hash")

    # ---- the protocol of a running server --------------------------------------------------------------------------

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        await self._listeners.drain(DRAIN_SECONDS)

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        for stop in self._stop_watching:
            stop()
        await self._listeners.close()
        await self._admin.close()
        await self._tasks.close()
        await self._context.links.close()
        await self._context.audit.close()
        await self._etcd.close()

    async def reload(self) -> None:
        """Read the topology, the schema and the access document now. See `tao.runtime.process.RunningServer`."""
        configuration = self._context.configuration
        configuration.use_topology(await self._topology_store.load())
        await self._schema_source.look(configuration.use_schema_text)
        document = await self._access_store.load_if_there()
        if document is not None:
            self._use_access_document(configuration.access, document)

    async def _refresh_configuration(self, seconds: float) -> bool:
        """Read the topology that may have changed while this process was paused. Return whether that succeeded in this
        time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self._context.configuration.refresh_after_pause()
        return False

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def _common_stats(self, context: ServerContext) -> dict[str, object]:
        return {
            "server": context.name,
            "role": self.role,
            "region": context.region,
            "tier": context.tier,
            "topology_version": context.configuration.routes.version,
            "schema_hash": context.configuration.schema.version_hash,
            "access": context.configuration.access.summary(),
            "links": context.links.figures(),
            "retries": context.budget.figures(),
            **({} if context.audit.log is None else {"audit": context.audit.log.summary()}),
            **({} if self._registration is None else {"registration": self._registration.figures()}),
        }

    def _register_common_metrics(self, metrics: Metrics, context: ServerContext) -> None:
        metrics.gauge_family(
            "link_failures",
            "Failed attempts to reach a server since its last answer, by server.",
            "peer",
            context.links.failures,
        )
        register_links(metrics, context.links.states)
        register_retries(metrics, context.budget)
        if context.audit.log is not None:
            register_audit(metrics, context.audit.log)
        self._pause_detector.register(metrics)
        context.configuration.access.register(metrics)
        self._reads.shares.register(metrics)
        metrics.gauge("running_tasks", "Tasks in progress.", lambda: len(self._tasks))
