"""What fails in a run, and how it is mended again: each fault is a context that names its victim, and is over when the
context is left. Whether all is well again is asked afterwards (`loadtest.chaos.health`)."""

from __future__ import annotations

import asyncio
import resource
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Final

from loadtest.two_regions import MASTER, REMOTE
from loadtest.waiting import within
from tao.devcluster.cluster import DevCluster
from tao.devcluster.identity import ProcessIdentity, read_record
from tao.devcluster.layout import Role
from tao.devcluster.line_control import AskStatus, Cut, Heal, SetRoundTrip, ask_line
from tao.devcluster.state_folder import StateFolder
from tao.model.errors import OperatorError
from tao.model.topology import Database, Topology
from tao.topology.document import parse_topology

_BETWEEN: Final = (MASTER, REMOTE)
_SLOW_RTT_MS: Final = 400.0
"""Of a line that is sick: seven times around what it was."""
_FALTERS_SECONDS: Final = 0.2
_LOOK_SECONDS: Final = 0.1
_PROMOTION_SECONDS: Final = 60.0
"""For a lost master to be replaced: eight seconds, and much patience with a busy machine."""


@dataclass(frozen=True, slots=True)
class Harm:
    """Who is to suffer: a running cluster; and chance."""

    cluster: DevCluster
    chance: Random
    away_seconds: float
    """How long a fault lasts at most."""

    @property
    def folder(self) -> StateFolder:
        """Of the cluster."""
        return StateFolder(self.cluster.topology_path.parent)

    def topology(self) -> Topology:
        """As it is now: masters change in a run."""
        return parse_topology(self.cluster.topology_path.read_bytes(), "topology")

    def one_of(self, role: Role) -> str:
        """A victim."""
        return self.chance.choice([name for name, each in self.cluster.processes.items() if each is role])

    def replica(self) -> str:
        """A database server that follows."""
        found = self.chance.choice(self.topology().databases)
        return self.chance.choice(
            [each.name for region, each in found.servers.items() if region != found.master_region]
        )

    def master(self) -> tuple[Database, str]:
        """A database and its master."""
        found = self.chance.choice(self.topology().databases)
        return found, found.servers[found.master_region].name

    def database_of(self, server: str) -> str:
        """The name of the database that it is a server of."""
        return next(
            each.name for each in self.topology().databases if server in (one.name for one in each.servers.values())
        )

    def identity(self, name: str) -> ProcessIdentity:
        """Of a process that runs. Raises `OperatorError`."""
        found = read_record(self.folder.process_record(name, self.cluster.processes[name]))
        if found is None:
            raise OperatorError(f"{name} does not run")
        return found

    async def last(self) -> None:
        """A while, of a length by chance."""
        await asyncio.sleep(self.chance.uniform(0.3, 1.0) * self.away_seconds)


Fault = Callable[[Harm], AbstractAsyncContextManager[str]]


@asynccontextmanager
async def _killed(harm: Harm, victim: Callable[[Harm], str]) -> AsyncIterator[str]:
    """SIGKILL, and started again."""
    name = victim(harm)
    await harm.cluster.kill(name)
    try:
        yield name
    finally:
        await harm.cluster.restart(name)


@asynccontextmanager
async def _stopped(harm: Harm, victim: Callable[[Harm], str]) -> AsyncIterator[str]:
    """SIGSTOP and SIGCONT: it stands still, and its connections stay."""
    name = victim(harm)
    identity = harm.identity(name)
    identity.signal(signal.SIGSTOP)
    try:
        yield name
    finally:
        identity.signal(signal.SIGCONT)


@asynccontextmanager
async def _slowed(harm: Harm, victim: Callable[[Harm], str]) -> AsyncIterator[str]:
    """It runs a third of the time, in turns long enough to be felt by whoever waits and short enough to be alive: what
    a disk that retries, or a neighbour that takes the machine, makes of a server."""
    name = victim(harm)
    identity = harm.identity(name)

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
async def _master_lost(harm: Harm, *, stopped: bool) -> AsyncIterator[str]:
    """The watcher has to replace it."""
    database, name = harm.master()
    region, identity = database.master_region, harm.identity(name)

    async def replaced() -> bool:
        with suppress(OperatorError):  # the document is being replaced
            return next(d for d in harm.topology().databases if d.name == database.name).master_region != region
        return False

    if stopped:
        identity.signal(signal.SIGSTOP)
    else:
        await harm.cluster.kill(name)
    try:
        yield name
        await within(_PROMOTION_SECONDS, replaced, _LOOK_SECONDS, f"nobody took the place of {name}")
    finally:
        if stopped:
            identity.signal(signal.SIGCONT)
        else:
            await harm.cluster.restart(name)


@asynccontextmanager
async def _line(harm: Harm, *, silent: bool) -> AsyncIterator[str]:
    """Both regions are whole, and hear nothing of each other."""
    try:
        await ask_line(harm.cluster.line_control, Cut(_BETWEEN, silent))
        yield "line"
    finally:
        await ask_line(harm.cluster.line_control, Heal(_BETWEEN))


@asynccontextmanager
async def _slow_line(harm: Harm) -> AsyncIterator[str]:
    before = (await ask_line(harm.cluster.line_control, AskStatus())).rtt_ms
    try:
        await ask_line(harm.cluster.line_control, SetRoundTrip(_SLOW_RTT_MS))
        yield "line"
    finally:
        await ask_line(harm.cluster.line_control, SetRoundTrip(before))


@asynccontextmanager
async def _topology_gone(harm: Harm) -> AsyncIterator[str]:
    """Nobody can look anything up, or change it. A file that came meanwhile is left alone."""
    path = harm.cluster.topology_path
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
async def _disk_full(harm: Harm, role: Role) -> AsyncIterator[str]:
    """No file of the process may grow: what a full disk is to whoever writes spools, positions and logs."""
    name = harm.one_of(role)
    pid = harm.identity(name).pid
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        yield name
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def all_faults() -> dict[str, Fault]:
    """By kind; what each excuses goes by these names (`loadtest.chaos.excuses`)."""

    def of(role: Role) -> Callable[[Harm], str]:
        return lambda harm: harm.one_of(role)

    return {
        "follower_kill": partial(_killed, victim=of(Role.FOLLOWER)),
        "follower_stop": partial(_stopped, victim=of(Role.FOLLOWER)),
        "leader_kill": partial(_killed, victim=of(Role.LEADER)),
        "leader_stop": partial(_stopped, victim=of(Role.LEADER)),
        "tailer_kill": partial(_killed, victim=of(Role.TAILER)),
        "tailer_stop": partial(_stopped, victim=of(Role.TAILER)),
        "tailer_disk_full": partial(_disk_full, role=Role.TAILER),
        "leader_disk_full": partial(_disk_full, role=Role.LEADER),
        "watcher_kill": partial(_killed, victim=of(Role.WATCHER)),
        "watcher_stop": partial(_stopped, victim=of(Role.WATCHER)),
        "replica_kill": partial(_killed, victim=Harm.replica),
        "replica_stop": partial(_stopped, victim=Harm.replica),
        "replica_slow": partial(_slowed, victim=Harm.replica),
        "master_slow": partial(_slowed, victim=lambda harm: harm.master()[1]),
        "master_kill": partial(_master_lost, stopped=False),
        "master_stop": partial(_master_lost, stopped=True),
        "link_cut": partial(_line, silent=False),
        "link_silent": partial(_line, silent=True),
        "link_slow": _slow_line,
        "topology_gone": _topology_gone,
    }
