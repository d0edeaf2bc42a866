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
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any, Final

from loadtest.faults.health import until_well
from loadtest.options import REPETITIONS, SEED, Options
from loadtest.results import Listing, ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.two_regions import MASTER, REMOTE, SEMI_SYNC_RTT_MS, TwoRegions, semi_sync_settings, two_regions
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, TaoError, connect
from tao.devcluster.layout import Role, Shape
from tao.model.errors import OperatorError
from tao.model.ids import SEQUENCE_PER_MS, SHARD_SHIFT, make_id
from tao.model.topology import Topology
from tao.routing.routes import Routes
from tao.topology.document import parse_topology

_SHAPE: Final = Shape(regions=2, tiers=2, followers=2, leaders=2, databases=1, shards=8, watchers=1)
_TOY_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
_TIMEOUT_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.005
_PATIENT_SECONDS: Final = 60.0
_WELL_SECONDS: Final = 90.0
_OLD_UNIX_MS: Final = 1_640_000_000_000
_USERS: Final = 64


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions(Options):
    """The options of `recovery`."""

    repetitions: int = REPETITIONS.default(5)
    seed: int = SEED.default(1)


async def run(settings: BenchSettings, progress: Progress, wanted: RecoveryOptions) -> ScenarioResult:
    """Crash each kind of server in turn, and time the recovery. Raises `OperatorError` when there is none."""
    repetitions = 1 if settings.toy else wanted.repetitions
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    cluster_settings = semi_sync_settings(settings.work_dir, shape, log_level="warning")
    seconds: dict[str, dict[str, list[float]]] = {}
    async with two_regions(cluster_settings, progress.step) as regions, AsyncExitStack() as stack:
        crashes = _Crashes(regions, stack, Random(wanted.seed))
        await crashes.prepare()
        steps = [
            ("follower", crashes.follower),
            ("leader", crashes.leader),
            ("replica", crashes.replica),
            ("tailer", crashes.tailer),
            ("master", crashes.master),
        ]
        for number in range(repetitions):
            for place, (role, crash) in enumerate(steps):
                progress.step(f"{role}, {number + 1} of {repetitions}", (number + place / len(steps)) / repetitions)
                for what, value in (await crash()).items():
                    seconds.setdefault(role, {}).setdefault(what, []).append(value)
                await until_well(regions.cluster, _WELL_SECONDS)
    measured = {role: {what: _figures(each) for what, each in found.items()} for role, found in seconds.items()}
    rows: list[tuple[str, ...]] = [
        (role, what, f"{each['p50']:.2f}", f"{each['max']:.2f}", f"{each['count']}")
        for role, found in measured.items()
        for what, each in found.items()
    ]
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={"rtt_ms": SEMI_SYNC_RTT_MS, "durability": "semi_sync", "repetitions": repetitions},
        listings=[Listing(title="seconds after the crash", columns=("who", "what", "p50", "max", "times"), rows=rows)],
        aims=[
            at_most(f"service again within {_PATIENT_SECONDS:g} s", each["max"], _PATIENT_SECONDS, f"{role}: {what}")
            for role, found in measured.items()
            for what, each in found.items()
        ],
        measured=measured,
    )


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


class _Crashes:
    """Crashes servers; each method returns the seconds until each kind of service was back."""

    def __init__(self, regions: TwoRegions, stack: AsyncExitStack, chance: Random) -> None:
        self._regions: Final = regions
        self._cluster: Final = regions.cluster
        self._stack: Final = stack
        self._chance: Final = chance
        self._graphs: dict[str, Graph] = {}
        self._users: list[int] = []
        self._written = 0
        self._absent = 0

    async def prepare(self) -> None:
        """Connect clients of both regions, and add objects to read and write."""
        for region in (MASTER, REMOTE):
            settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, attach_own_writes=False)
            target = str(self._cluster.topology_path)
            self._graphs[region] = await self._stack.enter_async_context(
                connect(target, region=region, settings=settings)
            )
        graph = self._graphs[MASTER]
        shards = self._regions.routes.shards
        for number in range(_USERS):
            (user,) = await graph.reserve_ids(1, shard=number % shards)
            await graph.obj_add("user", {"name": "recovery", "home": "0"}, id=user)
            self._users.append(user)

    async def follower(self) -> dict[str, float]:
        """Crash the home follower of an object in the nearest tier."""
        user = self._chance.choice(self._users)
        home = self._routes().follower_tiers(MASTER)[0].home(user >> SHARD_SHIFT).name
        graph = self._graphs[MASTER]
        await graph.obj_get(user)
        await self._cluster.kill(home)
        reading = await _until("follower, reading", lambda: graph.obj_get(user))
        writing = await _until("follower, writing", lambda: self._write(graph, user))
        return {"reads": reading, "writes": writing, "start": await self._start(home)}

    async def leader(self) -> dict[str, float]:
        """Crash the leader of a shard in its master region."""
        user = self._chance.choice(self._users)
        region = self._master_region()
        leader = self._routes().leaders(region).home(user >> SHARD_SHIFT).name
        await self._cluster.kill(leader)
        graph = self._graphs[region]
        missing = await _until(
            "leader, missing", lambda: graph.assoc_count(self._unread(user >> SHARD_SHIFT), "follows")
        )
        writing = await _until("leader, writing", lambda: self._write(graph, user))
        critical = await _until("leader, critical", lambda: graph.obj_get(user, critical=True))
        await self._cluster.restart(leader)
        return {"misses": missing, "writes": missing + writing, "critical reads": missing + writing + critical}

    async def replica(self) -> dict[str, float]:
        """Crash the replica in the other region. Commits wait for it, since it is the only one."""
        user, region = self._chance.choice(self._users), self._remote_region()
        database = self._topology().databases[0]
        graph, name = self._graphs[region], database.servers[region].name
        await self._cluster.kill(name)
        missing = await _until(
            "replica, missing", lambda: graph.assoc_count(self._unread(user >> SHARD_SHIFT), "follows")
        )
        starting = asyncio.create_task(self._start(name))
        writing = await _until("replica, writing", lambda: self._write(graph, user))
        return {"misses": missing, "writes, since its start": writing, "start": await starting}

    async def tailer(self) -> dict[str, float]:
        """Crash the other region's tailer, through which alone the writes of the master region come."""
        user, region = self._chance.choice(self._users), self._remote_region()
        far, near = self._graphs[self._master_region()], self._graphs[region]
        await near.obj_get(user)
        tailer = next(n for n, role in self._cluster.processes.items() if role is Role.TAILER and region in n)
        await self._cluster.kill(tailer)
        began = time.monotonic()
        await self._write(far, user)
        wanted = str(self._written)

        async def seen() -> None:
            found = await near.obj_get(user)
            if found is None or found.fields["home"] != wanted:
                raise OperatorError("not yet")

        starting = asyncio.create_task(self._start(tailer))
        await _until("tailer, fresh", seen)
        fresh = time.monotonic() - began
        return {"fresh again": fresh, "start": await starting}

    async def master(self) -> dict[str, float]:
        """Crash a master, which a watcher finds lost and replaces."""
        user, region = self._chance.choice(self._users), self._master_region()
        name, graph = self._topology().databases[0].servers[region].name, self._graphs[region]
        await self._cluster.kill(name)
        missing = await _until(
            "master, missing", lambda: graph.assoc_count(self._unread(user >> SHARD_SHIFT), "follows")
        )
        writing = missing + await _until("master, writing", lambda: self._write(graph, user))
        promotion = await self._promotion()
        await self._cluster.restart(name)
        return {
            "misses": missing,
            "writes": writing,
            "detection": promotion["detected_after_seconds"],
            "promotion": promotion["promoted_within_seconds"],
        }

    async def _start(self, name: str) -> float:
        """Start a process again; returns the seconds until it is ready."""
        began = time.monotonic()
        await self._cluster.restart(name)
        return time.monotonic() - began

    async def _promotion(self) -> dict[str, Any]:  # Any: names and seconds
        """Return the times of the latest promotion, from the watcher that made it."""
        for name, role in self._cluster.processes.items():
            if role is Role.WATCHER:
                stats = await server_stats(self._cluster.admin(name))
                if stats["active"] and stats["last_promotion"]:
                    return dict(stats["last_promotion"])
        raise OperatorError("no watcher reports a promotion")

    async def _write(self, graph: Graph, user: int) -> None:
        self._written += 1
        await graph.obj_update(user, {"home": str(self._written)}, "user")

    def _unread(self, shard: int) -> int:
        """Return an id that nobody has read before."""
        self._absent += 1
        return make_id(shard, _OLD_UNIX_MS + self._absent // SEQUENCE_PER_MS, self._absent % SEQUENCE_PER_MS)

    def _topology(self) -> Topology:
        return parse_topology(self._cluster.topology_path.read_bytes(), "topology")

    def _routes(self) -> Routes:
        return Routes(self._topology())

    def _master_region(self) -> str:
        return self._topology().databases[0].master_region

    def _remote_region(self) -> str:
        return next(region for region in self._graphs if region != self._master_region())


async def _until(what: str, ask: Callable[[], Awaitable[object]]) -> float:
    """Ask until it succeeds; returns the seconds until then. Raises `OperatorError` when it never does."""
    began = time.monotonic()
    last = ""
    while time.monotonic() < began + _PATIENT_SECONDS:
        try:
            await ask()
        except TaoError as error:
            last = error.message
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            return time.monotonic() - began
    raise OperatorError(f"{what}: no service again within {_PATIENT_SECONDS:g} s: {last}")


def _figures(seconds: list[float]) -> dict[str, float]:
    return {"p50": round(median(seconds), 3), "max": round(max(seconds), 3), "count": len(seconds)}
