"""Scenario `master_lost`: a master database is killed under writes, again and again, and the watcher replaces it.

Rounds take turns between semi-synchronous and asynchronous replication. The figures are the times (until the watcher is
sure, until the new master is open, the longest that a writer waited), and how many acknowledged writes are lost: none
may be under semi-synchronous replication; without it they are the loss window.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from typing import Final

import msgspec

from loadtest.conditions import within
from loadtest.faults.recovery import last_promotion
from loadtest.results import ScenarioResult, at_most, listings_of, missed
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.two_regions import MASTER, REMOTE, TwoRegions, two_regions
from tao.admin.server_stats import server_stats
from tao.client import Graph
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Role, Shape
from tao.devcluster.line_control import Cut, Heal, ask_line
from tao.model.errors import TaoError

_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, shards=4, watchers=1)
_WRITERS: Final = 32
_TIMEOUT_SECONDS: Final = 20.0
_PATIENCE_SECONDS: Final = 90.0
_PAUSE_SECONDS: Final = 0.02
_WRITES_FIRST: Final = 20
_ROUNDS: Final = 3


class LostMaster(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one round; the times are in seconds."""

    semi_sync: bool
    acknowledged: int
    lost: int
    detected_after_seconds: float
    promoted_within_seconds: float
    """As the watcher reports them."""
    writes_again_seconds: float
    """From the kill until every writer had a write acknowledged."""


class _Writer:
    """Counts upwards on an object of its own."""

    def __init__(self, graph: Graph, object_id: int) -> None:
        self.object_id = object_id
        self.acknowledged = 0
        self._graph = graph
        self._count = 0

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            await self.once()

    async def once(self) -> None:
        """Write the next number, until one is acknowledged."""
        while True:
            self._count += 1
            with suppress(TaoError):
                await self._graph.obj_update(self.object_id, {"home": str(self._count)})
                self.acknowledged = self._count
                return


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Run some rounds of each kind, at toy size one with semi-synchronous replication. Raises `OperatorError`.

    An acknowledged write that is lost under semi-synchronous replication is a fault."""
    each = 1 if settings.toy else _ROUNDS
    kinds = [semi_sync for semi_sync in ((True,) if settings.toy else (True, False)) for _ in range(each)]
    rtt_ms = 10.0 if settings.toy else DEFAULT_RTT_MS
    rounds: list[LostMaster] = []
    for number, semi_sync in enumerate(kinds):
        progress.step(f"losing a master {'with' if semi_sync else 'without'} semi-sync", number / len(kinds))
        cluster_settings = ClusterSettings(
            state_dir=settings.work_dir / f"lost{number}",
            shape=_SHAPE,
            rtt_ms=rtt_ms,
            durability=Durability.RELAXED,
            semi_sync=semi_sync,
            log_level="warning",
        )
        async with two_regions(cluster_settings, lambda _: None) as regions:
            rounds.append(await _lose_master(regions, semi_sync))
    lost = sum(each.lost for each in rounds if each.semi_sync)
    demands = [at_most("no acknowledged write lost with semi-synchronous replication", lost, 0)]
    measured = {"rounds": msgspec.to_builtins(rounds)}
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={"writers": _WRITERS, "rtt_ms": rtt_ms, "rounds_of_each_kind": each, "durability": "relaxed"},
        listings=listings_of(measured),
        aims=demands,
        measured=measured,
        faults=missed(demands),
    )


SCENARIO: Final = Scenario(
    name="master_lost",
    summary="a master is killed under writes and replaced: how long it takes, and what is lost",
    run=run,
)


async def _lose_master(regions: TwoRegions, semi_sync: bool) -> LostMaster:
    cluster = regions.cluster
    async with AsyncExitStack() as stack:
        # Lost writes are counted here; a client that attached its own writes would get an error for them.
        graph = await regions.graph(MASTER, "tier-1", stack, _TIMEOUT_SECONDS, attaches=False)
        writers = [_Writer(graph, await graph.obj_add("user", {"name": "writer"})) for _ in range(_WRITERS)]
        others = [_Writer(graph, await graph.obj_add("user", {"name": "other"})) for _ in range(_WRITERS)]
        tasks = [asyncio.create_task(writer.run()) for writer in writers]

        async def watched() -> bool:
            stats = [await server_stats(cluster.admin(name)) for name in regions.named(Role.WATCHER)]
            return max(int(each["renewed_leases"]) for each in stats) > 1

        async def are_writing() -> bool:
            return min(writer.acknowledged for writer in writers) >= _WRITES_FIRST

        try:
            await within(_PATIENCE_SECONDS, watched, _PAUSE_SECONDS, "the master's lease was not renewed")
            await within(_PATIENCE_SECONDS, are_writing, _PAUSE_SECONDS, "the writers did not begin")
            # As when its machine is lost: what it has sent and the other region has not received is lost, too.
            await ask_line(cluster.line_control, Cut((MASTER, REMOTE)))
            await cluster.kill(f"{MASTER}-db-1")
            await ask_line(cluster.line_control, Heal())
        finally:
            # So that no later write hides a lost one.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        killed_at = time.monotonic()
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await asyncio.gather(*(other.once() for other in others))
        again = time.monotonic() - killed_at
        found = await asyncio.gather(*(graph.obj_get(writer.object_id, critical=True) for writer in writers))
        stored = [0 if each is None else int(str(each.fields.get("home") or 0)) for each in found]
    promotion = await last_promotion(regions)
    return LostMaster(
        semi_sync=semi_sync,
        acknowledged=sum(writer.acknowledged for writer in writers),
        lost=sum(max(0, writer.acknowledged - have) for writer, have in zip(writers, stored, strict=True)),
        detected_after_seconds=promotion["detected_after_seconds"],
        promoted_within_seconds=promotion["promoted_within_seconds"],
        writes_again_seconds=round(again, 3),
    )
