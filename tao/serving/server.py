"""What the processes of followers and leaders have in common: start, configuration, admin port and stop."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Final, Generic, Literal, Self, TypeVar

from tao.cache import CacheSettings, GraphCache
from tao.model.errors import TopologyError
from tao.observability.key_history import KeyHistoryRecorder
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.routing.budgets import RetryBudget
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.schema.registry import Schema
from tao.serving.cache_configuration import SchemaArenas, TopologyEpochs, arena_budgets, maintain_cache
from tao.serving.configuration import Configuration, SchemaFile
from tao.serving.context import ServerContext
from tao.serving.listeners import Listeners
from tao.serving.metrics import register_links, register_retries
from tao.serving.pause_detection import PauseDetector
from tao.serving.read_service import ReadService
from tao.serving.settings import CacheServerSettings
from tao.topology.file_store import TopologyFile
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings

MAX_TASKS: Final = 100_000
"""Tasks of one server at a time: writes, reads of a database and fetches past a leader, each of which has bounds of its
own."""

DRAIN_SECONDS: Final = 6.0
"""Longest wait for requests in progress when the server stops. It exceeds a request's deadline of 5 s."""


SettingsType = TypeVar("SettingsType", bound=CacheServerSettings)


class CachingServer(Generic[SettingsType]):
    """The common parts of one follower or leader process. A role adds its own, and `start`, which makes all of them.

    After `start` it is a `tao.runtime.process.RunningServer`."""

    role: ClassVar[Literal["follower", "leader"]]

    _context: ServerContext
    _cache: GraphCache
    _reads: ReadService
    _pause_detector: PauseDetector
    _listeners: Listeners

    def __init__(self, settings: SettingsType, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log, limit=MAX_TASKS)
        self._topology_file: Final = TopologyFile(
            settings.topology_file, on_error=lambda error: log.error("topology_unusable", reason=error.message)
        )
        self._schema_file: Final = SchemaFile(settings.schema_file)

    @classmethod
    def run(cls, settings: SettingsType) -> int:
        """Run a server of this role in this process until it is stopped. Returns the exit status."""
        configure_logs(cls.role, settings.name, settings.log_level, settings.log_form, sys.stderr)
        log = logger(cls.role)
        return run_server(lambda: cls(settings, log).start(), log=log)

    async def start(self) -> Self:
        """Make the parts, listen and serve. Raises `OperatorError` or `OSError` when that fails."""
        raise NotImplementedError

    # ---- steps of `start` ------------------------------------------------------------------------------------------

    async def _make_context(self) -> ServerContext:
        settings, name = self._settings, self._settings.name
        schema = await self._schema_file.load()
        configuration = Configuration(await self._topology_file.load(), schema, self._log, self._topology_file.load)
        place = configuration.routes.locate(name)
        if place.role != self.role:
            raise TopologyError(f"{name} is a {place.role} in {settings.topology_file}; run it with: tao {place.role}")
        clock, credentials = LoopClock(), Credentials(name, self.role, settings.token)
        return ServerContext(
            name=name,
            region=place.region,
            tier=place.tier,
            configuration=configuration,
            links=Links(LinkSettings(), credentials, settings.tls.if_set, region=place.region),
            clock=clock,
            spawn_as=lambda task_name: partial(self._start_task, task_name),
            budget=RetryBudget(settings.retries, clock.monotonic()),
            log=self._log,
        )

    def _start_task(self, name: str, job: Coroutine[Any, Any, None]) -> object:
        return self._tasks.start(job, name)

    def _make_cache(self, context: ServerContext) -> None:
        settings = self._settings
        self._arenas = arena_budgets(settings.cache_mb, settings.arena_mb)
        self._types = SchemaArenas(context.configuration.schema, self._arenas)
        recorder = KeyHistoryRecorder(settings.key_history, context.clock.unix_ms)
        self._cache = GraphCache(CacheSettings(arena_bytes=self._arenas), self._types, recorder)

    def _list_limit(self, atype: int) -> int:
        return self._types.list_limit(atype)

    def _follow_configuration(self, context: ServerContext) -> None:
        configuration, cache = context.configuration, self._cache

        def use_schema(changed: Schema) -> None:
            self._types = SchemaArenas(changed, self._arenas)
            cache.set_types(self._types)
            self._reads.use_schema(changed)

        configuration.on_schema(use_schema)
        configuration.on_routes(TopologyEpochs(cache).follow_routes)
        configuration.on_routes(lambda routes: context.links.keep_only(routes.server_names()))

    async def _open_ports(
        self,
        context: ServerContext,
        metrics: Metrics,
        stats: Callable[[], dict[str, object]],
        not_ready: Callable[[], str],
    ) -> None:
        """Listen for requests, and at the admin port. ``not_ready`` returns why the server is not ready, or ""."""
        pages = AdminPages(metrics=metrics.render, stats=stats, not_ready=not_ready)
        server = context.configuration.routes.server(context.name)
        host, _, port = server.admin.rpartition(":")
        admin = AdminSettings(host=host or "127.0.0.1", port=int(port or 0))
        self._admin = AdminServer(admin, pages, self._log, server.grpc)
        await self._listeners.start()
        await self._admin.start()

    def _start_common_tasks(self, context: ServerContext) -> None:
        configuration = context.configuration
        self._stop_watching = self._topology_file.watch(configuration.use_topology)
        self._tasks.keep(self._pause_detector.keep, "signs of life")
        self._tasks.keep(lambda: self._schema_file.watch(configuration.use_schema_text), "schema")
        self._tasks.keep(lambda: maintain_cache(self._cache, context.clock), "cache maintenance")

    # ---- the protocol of a running server --------------------------------------------------------------------------

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        await self._listeners.drain(DRAIN_SECONDS)

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        self._stop_watching()
        await self._listeners.close()
        await self._admin.close()
        await self._tasks.close()
        await self._context.links.close()

    async def reload(self) -> None:
        """Read the topology and schema files now. See `tao.runtime.process.RunningServer`."""
        configuration = self._context.configuration
        configuration.use_topology(await self._topology_file.load())
        await self._schema_file.look(configuration.use_schema_text)

    async def _refresh_configuration(self, seconds: float) -> None:
        """Read the topology that may have changed while this process was paused, if that succeeds in this time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._context.configuration.refresh()

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def _common_stats(self, context: ServerContext) -> dict[str, object]:
        return {
            "server": context.name,
            "role": self.role,
            "region": context.region,
            "tier": context.tier,
            "topology_version": context.configuration.routes.version,
            "schema_hash": context.configuration.schema.version_hash,
            "links": context.links.figures(),
            "retries": context.budget.figures(),
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
        self._pause_detector.register(metrics)
        metrics.gauge("running_tasks", "Tasks in progress.", lambda: len(self._tasks))
