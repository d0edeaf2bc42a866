"""Wiring of a worker process: the only place where its parts are put together."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from functools import partial
from typing import Final

from tao.client import ClientSettings, Graph
from tao.client.configuration import ClientConfiguration
from tao.model.errors import RetryableError
from tao.model.topology import Topology
from tao.observability.logs import Logger, configure_logs, logger
from tao.observability.metrics import Metrics
from tao.routing.routes import Routes
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.runtime.clock import LoopClock
from tao.runtime.process import run_server
from tao.runtime.tasks import BackgroundTasks
from tao.topology.stores import EtcdConnections, open_topology
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.worker.each import EachEdge, EachObject, load_functions, load_kinds
from tao.worker.kinds import JobKind, kinds_by_name
from tao.worker.leaders import JobLeaders, LinkedLeaders
from tao.worker.node_state import NodeStates
from tao.worker.routines import routines
from tao.worker.runner import JobRunner, RunnerSettings
from tao.worker.settings import WorkerSettings

RETRY_SECONDS: Final = 1.0
"""Pause before the graph is opened again when no follower has answered."""


def known_kinds(leaders: JobLeaders) -> dict[str, JobKind]:
    """Return the kinds of jobs that this worker knows: those of every worker, and those of installed packages. Raises
    `SettingsError` for a function or kind that cannot be loaded, and for two kinds of one name."""
    functions = load_functions()
    calling: list[JobKind] = [EachEdge(functions, leaders), EachObject(functions, leaders)]
    return kinds_by_name([*calling, *routines(leaders), NodeStates(), *load_kinds()])


def graph_settings(runner: RunnerSettings) -> ClientSettings:
    """Return the settings of the graph of a worker. A page may take half a lease, and so may each operation of it:
    nobody waits for the answer."""
    return ClientSettings(timeout_seconds=runner.lease_seconds / 2)


class WorkerServer:
    """The parts of one worker process. Call `start`; then this is a `tao.runtime.process.RunningServer`."""

    def __init__(self, settings: WorkerSettings, log: Logger) -> None:
        self._settings: Final = settings
        self._log: Final = log
        self._tasks: Final = BackgroundTasks(settings.name, log)
        self._etcd: Final = EtcdConnections(settings.etcd)
        self._graph: Graph | None = None
        self._topology_store: Final = open_topology(
            settings.topology_file, self._etcd, lambda error: log.error("topology_unusable", reason=error.message)
        )

    async def start(self) -> WorkerServer:
        """Begin to connect to the graph, and then to ask leaders for jobs.

        Raises `OperatorError` or `OSError` when a file or the admin port cannot be used."""
        settings = self._settings
        self._routes = Routes(await self._topology_store.load())
        credentials = Credentials(settings.name, "worker", settings.token, settings.token_file)
        self._links = Links(LinkSettings(), credentials, settings.tls.if_set, region=settings.region)
        self._links.keep_only(self._routes.topology.server_places)
        leaders = LinkedLeaders(self._links, lambda: self._routes, settings.region, settings.ask_seconds)
        kinds = known_kinds(leaders)
        self._runner = JobRunner(leaders, kinds, settings.runner, LoopClock(), self._log)
        await self._start_admin()
        self._stop_watching = self._topology_store.watch(self._use_topology)
        self._tasks.keep(partial(self._work, credentials), "jobs")
        self._log.info("worker_started", region=settings.region, kinds=sorted(kinds))
        return self

    async def _work(self, credentials: Credentials) -> None:
        """Do jobs until the runner is drained. Waits for a follower that answers."""
        while self._graph is None:
            try:
                self._graph = await self._open_graph(credentials)
            except RetryableError as error:
                self._log.warning("graph_not_open", reason=error.message)
                self._runner.trouble = error.message
                await asyncio.sleep(RETRY_SECONDS)
        await self._runner.run(self._graph)
        await asyncio.Event().wait()  # a loop that ends would be started again

    async def _open_graph(self, credentials: Credentials) -> Graph:
        """Open the graph, with links of its own: its operations may take as long as a page."""
        client = dataclasses.replace(graph_settings(self._settings.runner), tls=self._settings.tls.if_set)
        links = Links(client.links, credentials, client.tls, region=self._settings.region)
        try:
            configuration = await ClientConfiguration.fetch(self._routes.topology, self._settings.region, links, client)
            return Graph(links, configuration, client)
        except BaseException:
            await links.close()
            raise

    async def _start_admin(self) -> None:
        metrics = Metrics(role="worker", server=self._settings.name)
        self._runner.register(metrics)
        pages = AdminPages(metrics=metrics.render, stats=self._stats, not_ready=lambda: self._runner.trouble)
        host, _, port = self._settings.admin.rpartition(":")
        self._admin = AdminServer(AdminSettings(host=host or "127.0.0.1", port=int(port or 0)), pages, self._log)
        await self._admin.start()

    async def drain(self) -> None:
        """See `tao.runtime.process.RunningServer`. The pages under way are done and reported, but for those that
        take longer than a process waits."""
        await self._runner.drain()

    async def close(self) -> None:
        """See `tao.runtime.process.RunningServer`."""
        self._stop_watching()
        await self._runner.close()
        await self._tasks.close()
        await self._admin.close()
        if self._graph is not None:
            await self._graph.close()
        await self._links.close()
        await self._etcd.close()

    async def reload(self) -> None:
        """See `tao.runtime.process.RunningServer`. Reads the topology again."""
        self._use_topology(await self._topology_store.load())

    def _use_topology(self, topology: Topology) -> None:
        if topology.version > self._routes.version:
            self._routes = Routes(topology, self._routes)
            self._links.keep_only(topology.server_places)

    def _stats(self) -> dict[str, object]:
        return {
            "server": self._settings.name,
            "role": "worker",
            "region": self._settings.region,
            "topology_version": self._routes.version,
            **self._runner.summary(),
        }


def run_worker(settings: WorkerSettings) -> int:
    """Run a worker in this process until it is stopped. Returns the exit status."""
    configure_logs("worker", settings.name, settings.log_level, settings.log_form, sys.stderr)
    log = logger("worker")
    return run_server(lambda: WorkerServer(settings, log).start(), log=log)
