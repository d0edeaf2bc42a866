"""Faults: each is a context that takes its victim down, yields its name, and brings it back when the context is left.

Whether the cluster is healthy again is checked afterwards (`loadtest.faults.health`).
"""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from loadtest.conditions import within
from loadtest.region_cluster import MASTER, REMOTE, RegionCluster
from tao.admin.replication import replicas
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import Role
from tao.devcluster.line_control import AskStatus, Cut, Heal, SetRoundTrip, ask_line
from tao.devcluster.processes import ProcessIdentity, read_record
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import OperatorError
from tao.model.topology import Database

_BETWEEN: Final = (MASTER, REMOTE)
_SLOW_RTT_MS: Final = 400.0
"""The round trip of a slow line, twenty times the usual one."""
_FALTERS_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.1
_PROMOTION_SECONDS: Final = 60.0
"""Time in which a lost master has to be replaced: eight seconds, and much patience with a busy machine."""
MASTER_LOST: Final = frozenset({"master_kill", "master_stop"})
"""Kinds of faults that take a database's master away."""
LEADER_KILL: Final = "leader_kill"
DISK_FULL: Final = frozenset({"tailer_disk_full", "leader_disk_full"})
"""Kinds of faults that fill a disk of a cache server."""
LINE_CUT: Final = frozenset({"link_cut", "link_silent"})
"""Kinds of faults that cut the regions off from each other."""


@dataclass(frozen=True, slots=True)
class Injector:
    """The cluster that faults are injected into, and the choice of their victims."""

    regions: RegionCluster
    chance: Random

    @property
    def cluster(self) -> DevCluster:
        """The cluster's processes."""
        return self.regions.cluster

    def one_of(self, role: Role) -> str:
        """Choose a process of this role."""
        return self.chance.choice(self.regions.named(role))

    def replica(self) -> str:
        """Choose a database server that is a replica."""
        return self.chance.choice(replicas(self.regions.topology)).server.name

    def master(self) -> tuple[Database, str]:
        """Choose a database, and return it with the name of its master."""
        found = self.chance.choice(self.regions.topology.databases)
        return found, found.servers[found.master_region].name

    def database_of(self, server: str) -> str:
        """Return the name of the database that has this server."""
        return next(
            each.name
            for each in self.regions.topology.databases
            if server in (one.name for one in each.servers.values())
        )

    def led_by(self, leader: str) -> set[int]:
        """Return the shards whose writes this leader accepts while all servers are up."""
        routes = self.regions.routes
        region = routes.locate(leader).region
        home = routes.leaders(region).map.servers
        return {
            shard
            for shard in range(routes.shards)
            if home(shard)[0] == leader and routes.master_region(shard) == region
        }

    def identity(self, name: str) -> ProcessIdentity:
        """Return the identity of a running process. Raises `OperatorError` when it does not run."""
        folder = StateFolder(self.cluster.topology_path.parent)
        found = read_record(folder.process_record(name, self.cluster.processes[name]))
        if found is None:
            raise OperatorError(f"{name} does not run")
        return found

    async def stop_process(self, name: str, *, pause: bool) -> Callable[[], Awaitable[None]]:
        """Kill a process, or with ``pause`` stop it by SIGSTOP; returns the function that brings it back."""
        if not pause:
            await self.cluster.kill(name)
            return lambda: self.cluster.restart(name)
        identity = self.identity(name)
        identity.signal(signal.SIGSTOP)

        async def resume() -> None:
            identity.signal(signal.SIGCONT)

        return resume


@asynccontextmanager
async def stopped(injector: Injector, victim: Callable[[Injector], str], *, pause: bool = False) -> AsyncIterator[str]:
    """Kill a process and start it again; with ``pause`` stop it by SIGSTOP, so that its connections stay."""
    name = victim(injector)
    bring_back = await injector.stop_process(name, pause=pause)
    try:
        yield name
    finally:
        await bring_back()


@asynccontextmanager
async def _slowed(injector: Injector, victim: Callable[[Injector], str]) -> AsyncIterator[str]:
    """Let a process run a third of the time, in turns long enough to be noticed and short enough to count as alive: the
    effect of a disk that retries, or of a neighbour that takes the machine."""
    name = victim(injector)
    identity = injector.identity(name)

    async def falter() -> None:
        try:
            while True:
                identity.signal(signal.SIGSTOP)
                await asyncio.sleep(_FALTERS_SECONDS)
                identity.signal(signal.SIGCONT)
                await asyncio.sleep(_FALTERS_SECONDS / 2)
        finally:
            identity.signal(signal.SIGCONT)

    faltering = asyncio.create_task(falter())
    try:
        yield name
    finally:
        faltering.cancel()
        await asyncio.gather(faltering, return_exceptions=True)


@asynccontextmanager
async def _master_lost(injector: Injector, *, pause: bool) -> AsyncIterator[str]:
    """Stop a master, which the watcher has to replace before it is brought back."""
    database, name = injector.master()

    async def replaced() -> bool:
        with suppress(OSError, OperatorError):  # the document is being replaced
            databases = injector.regions.topology.databases
            now = next(each.master_region for each in databases if each.name == database.name)
            return now != database.master_region
        return False

    bring_back = await injector.stop_process(name, pause=pause)
    try:
        yield name
        await within(_PROMOTION_SECONDS, replaced, _LOOK_SECONDS, f"no server took the place of {name}")
    finally:
        await bring_back()


@asynccontextmanager
async def line_cut(injector: Injector, *, silent: bool) -> AsyncIterator[str]:
    """Cut the line between the regions: it refuses connections, or with ``silent`` swallows what is sent."""
    try:
        await ask_line(injector.cluster.line_control, Cut(_BETWEEN, silent))
        yield "line"
    finally:
        await ask_line(injector.cluster.line_control, Heal(_BETWEEN))


@asynccontextmanager
async def _slow_line(injector: Injector) -> AsyncIterator[str]:
    before = (await ask_line(injector.cluster.line_control, AskStatus())).rtt_ms
    try:
        await ask_line(injector.cluster.line_control, SetRoundTrip(_SLOW_RTT_MS))
        yield "line"
    finally:
        await ask_line(injector.cluster.line_control, SetRoundTrip(before))


@asynccontextmanager
async def _topology_gone(injector: Injector) -> AsyncIterator[str]:
    """Hide the topology document. One that was written meanwhile is left alone."""
    path = injector.cluster.topology_path
    aside = path.with_name("topology.aside.json")
    path.rename(aside)
    try:
        yield path.name
    finally:
        if path.exists():
            aside.unlink()
        else:
            aside.rename(path)


@asynccontextmanager
async def _disk_full(injector: Injector, role: Role) -> AsyncIterator[str]:
    """Let no file of a process grow: the effect of a full disk on what writes spools, positions and logs."""
    name = injector.one_of(role)
    pid = injector.identity(name).pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        yield name
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


_STOPPED: Final[dict[str, Callable[[Injector], str]]] = {
    **{
        str(role): partial(Injector.one_of, role=role)
        for role in (Role.FOLLOWER, Role.LEADER, Role.TAILER, Role.WATCHER, Role.WORKER)
    },
    "replica": Injector.replica,
}
FAULTS: Final[dict[str, Callable[[Injector], AbstractAsyncContextManager[str]]]] = {
    **{f"{who}_kill": partial(stopped, victim=victim) for who, victim in _STOPPED.items()},
    **{f"{who}_stop": partial(stopped, victim=victim, pause=True) for who, victim in _STOPPED.items()},
    "tailer_disk_full": partial(_disk_full, role=Role.TAILER),
    "leader_disk_full": partial(_disk_full, role=Role.LEADER),
    "replica_slow": partial(_slowed, victim=Injector.replica),
    "master_slow": partial(_slowed, victim=lambda injector: injector.master()[1]),
    "master_kill": partial(_master_lost, pause=False),
    "master_stop": partial(_master_lost, pause=True),
    "link_cut": partial(line_cut, silent=False),
    "link_silent": partial(line_cut, silent=True),
    "link_slow": _slow_line,
    "topology_gone": _topology_gone,
}
"""Faults by kind; which failed reads a kind explains is decided by these names (`loadtest.faults.record`)."""
BETWEEN_REGIONS: Final = MASTER_LOST | {kind for kind in FAULTS if kind.startswith(("replica_", "link_"))}
"""Kinds of faults that only a cluster of two regions can have."""
