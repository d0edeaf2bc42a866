"""Scenario `recovery`: the time from a crash until clients have again what the crashed server gave them.

One server after the other is killed, several times over, and a client asks for what only that server gave it: a read
through its home follower, a write of a shard that the leader led, a miss that the replica answered, a write whose
master is lost, a change that only the tailer would deliver. The figure is the time until the first success. The crashed
process is started again afterwards, as its supervisor would; but a tailer's restart is part of its figure, since no
other process stands in for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

from loadtest import options
from loadtest.faults.health import until_well
from loadtest.region_cluster import MASTER, REMOTE, SEMI_SYNC_RTT_MS, RegionCluster, lossless_settings, region_cluster
from loadtest.results import Conditions, ScenarioResult, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.admin.replication import masters, replicas
from tao.admin.server_stats import server_stats
from tao.client import Graph, TaoError
from tao.devcluster.layout import Role, Shape
from tao.model.errors import OperatorError
from tao.model.ids import SEQUENCE_PER_MS, SHARD_SHIFT, make_id

_SHAPE: Final = Shape(regions=2, tiers=2, followers=2, leaders=2, databases=1, shards=8, watchers=1)
_TOY_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
_TIMEOUT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.005
_PATIENT_SECONDS: Final = 60.0
_WELL_SECONDS: Final = 90.0
_OLD_UNIX_MS: Final = 1_640_000_000_000
_USERS: Final = 64


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(options.Options):
    """The options of `recovery`."""

    repetitions: int = options.REPETITIONS.default(5, toy=1)
    seed: int = options.SEED.default(1)


async def run(settings: BenchSettings, progress: Progress, wanted: RecoveryOptions) -> ScenarioResult:
    """Crash each kind of server in turn, and time the recovery. Raises `OperatorError` when there is none."""
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    cluster_settings = lossless_settings(settings.work_dir, shape, log_level="warning")
    seconds: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    async with region_cluster(cluster_settings, progress.step) as regions, AsyncExitStack() as stack:
        settings.versions.update(regions.versions)
        crashes = await _prepare(regions, stack, Random(wanted.seed))
        steps = [crashes.follower, crashes.leader, crashes.replica, crashes.tailer, crashes.master]
        for number in range(wanted.repetitions):
            for place, crash in enumerate(steps):
                role = crash.__name__
                progress.step(
                    f"{role}, {number + 1} of {wanted.repetitions}", (number + place / len(steps)) / wanted.repetitions
                )
                for what, value in (await crash()).items():
                    seconds[role][what].append(value)
                await until_well(regions, _WELL_SECONDS)
    measured = {
        role: {
            what: {"p50": round(median(each), 3), "max": round(max(each), 3), "count": len(each)}
            for what, each in found.items()
        }
        for role, found in seconds.items()
    }
    aims = [
        at_most(f"service again within {_PATIENT_SECONDS:g} s", each["max"], _PATIENT_SECONDS, f"{role}: {what}")
        for role, found in measured.items()
        for what, each in found.items()
    ]
    conditions: Conditions = {
        "rtt_ms": SEMI_SYNC_RTT_MS,
        "durability": "semi_sync",
        "repetitions": wanted.repetitions,
    }
    return result_of(conditions, measured, aims=aims)


SCENARIO: Final = Scenario(
    name="recovery",
    summary="from a crash to full service, as clients see it: follower, leader, replica, master, tailer",
    run=run,
    options=RecoveryOptions,
    help="""Measure the seconds from the crash of a follower, leader, replica, tailer or master until clients have again
    what they had before.""",
    has_plot=True,
    in_bench=False,
)


async def _prepare(regions: RegionCluster, stack: AsyncExitStack, chance: Random) -> _Crashes:
    """Connect clients of both regions, and add objects to read and write."""
    tier = regions.cluster.record.shape.tier_names[0]
    graphs = {
        region: await regions.graph(region, tier, stack, _TIMEOUT_SECONDS, attaches=False)
        for region in (MASTER, REMOTE)
    }
    users: list[int] = []
    for number in range(_USERS):
        users += await graphs[MASTER].reserve_ids(1, shard=number % regions.routes.shards)
        await graphs[MASTER].obj_add("user", {"name": "recovery", "home": "0"}, id=users[-1])
    return _Crashes(regions, graphs, users, chance)


@dataclass(slots=True)
class _Crashes:
    """Crashes servers; each method returns the seconds from the crash until each kind of service was back."""

    regions: RegionCluster
    graphs: dict[str, Graph]
    """A client of each region."""
    users: list[int]
    chance: Random
    written: int = 0
    absent: int = 0

    async def follower(self) -> dict[str, float]:
        """Crash the home follower of an object in the nearest tier."""
        user, graph = self.chance.choice(self.users), self.graphs[MASTER]
        home = self.regions.routes.follower_tiers(MASTER)[0].home(user >> SHARD_SHIFT).name
        await graph.obj_get(user)
        crashed = await self._kill(home)
        reads = await _until("reads", crashed, lambda: graph.obj_get(user))
        writes = await _until("writes", crashed, lambda: self._write(graph, user))
        return {"reads": reads, "writes": writes, "start": await self._start(home)}

    async def leader(self) -> dict[str, float]:
        """Crash the leader of a shard in its master region."""
        user, region = self.chance.choice(self.users), self._master_region
        leader, graph = self.regions.routes.leaders(region).home(user >> SHARD_SHIFT).name, self.graphs[region]
        crashed = await self._kill(leader)
        misses = await self._missed(graph, user, crashed)
        writes = await _until("writes", crashed, lambda: self._write(graph, user))
        critical = await _until("critical reads", crashed, lambda: graph.obj_get(user, critical=True))
        await self.regions.cluster.restart(leader)
        return {"misses": misses, "writes": writes, "critical reads": critical}

    async def replica(self) -> dict[str, float]:
        """Crash the replica in the other region. Commits wait for it, since it is the only one."""
        user, region = self.chance.choice(self.users), self._remote_region
        graph, name = self.graphs[region], replicas(self.regions.topology)[0].server.name
        misses = await self._missed(graph, user, await self._kill(name))
        starting, began = asyncio.create_task(self._start(name)), time.monotonic()
        writes = await _until("writes", began, lambda: self._write(graph, user))
        return {"misses": misses, "writes, since its start": writes, "start": await starting}

    async def tailer(self) -> dict[str, float]:
        """Crash the other region's tailer, through which alone the writes of the master region come."""
        user, region = self.chance.choice(self.users), self._remote_region
        far, near = self.graphs[self._master_region], self.graphs[region]
        await near.obj_get(user)
        tailer = next(name for name in self.regions.named(Role.TAILER) if region in name)
        crashed = await self._kill(tailer)
        await self._write(far, user)
        wanted = str(self.written)

        async def seen() -> None:
            found = await near.obj_get(user)
            if found is None or found.fields["home"] != wanted:
                raise OperatorError("the reader has an older value")

        starting = asyncio.create_task(self._start(tailer))
        return {"fresh again": await _until("fresh reads", crashed, seen), "start": await starting}

    async def master(self) -> dict[str, float]:
        """Crash a master, which a watcher finds lost and replaces."""
        user, region = self.chance.choice(self.users), self._master_region
        name, graph = masters(self.regions.topology)[0].name, self.graphs[region]
        crashed = await self._kill(name)
        misses = await self._missed(graph, user, crashed)
        writes = await _until("writes", crashed, lambda: self._write(graph, user))
        promotion = await last_promotion(self.regions)
        await self.regions.cluster.restart(name)
        return {
            "misses": misses,
            "writes": writes,
            "detection": promotion["detected_after_seconds"],
            "promotion": promotion["promoted_within_seconds"],
        }

    @property
    def _master_region(self) -> str:
        return self.regions.topology.databases[0].master_region

    @property
    def _remote_region(self) -> str:
        return next(region for region in self.graphs if region != self._master_region)

    async def _kill(self, name: str) -> float:
        """Returns when it was."""
        await self.regions.cluster.kill(name)
        return time.monotonic()

    async def _start(self, name: str) -> float:
        """Start a process again; returns the seconds until it is ready."""
        began = time.monotonic()
        await self.regions.cluster.restart(name)
        return time.monotonic() - began

    async def _write(self, graph: Graph, user: int) -> None:
        self.written += 1
        await graph.obj_update(user, {"home": str(self.written)}, "user")

    async def _missed(self, graph: Graph, user: int, since: float) -> float:
        """Ask for lists that nobody has read before, in the shard of the user."""

        async def ask() -> None:
            self.absent += 1
            at = _OLD_UNIX_MS + self.absent // SEQUENCE_PER_MS
            await graph.assoc_count(make_id(user >> SHARD_SHIFT, at, self.absent % SEQUENCE_PER_MS), "follows")

        return await _until("misses", since, ask)


async def last_promotion(regions: RegionCluster) -> dict[str, float]:
    """Return the times of the latest promotion, from the watcher that made it. Raises `OperatorError`."""
    for name in regions.named(Role.WATCHER):
        stats = await server_stats(regions.cluster.admin(name))
        if stats["active"] and stats["last_promotion"]:
            return dict(stats["last_promotion"])
    raise OperatorError("no watcher reports that it has replaced the master")


async def _until(what: str, since: float, ask: Callable[[], Awaitable[object]]) -> float:
    """Ask until it succeeds; returns the seconds since then. Raises `OperatorError` when it never does."""
    last = ""
    while time.monotonic() < since + _PATIENT_SECONDS:
        try:
            await ask()
        except TaoError as error:
            last = error.message
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return time.monotonic() - since
    raise OperatorError(f"{what}: no service again within {_PATIENT_SECONDS:g} s: {last}")
