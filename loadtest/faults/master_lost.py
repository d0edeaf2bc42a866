"""Scenario `master_lost`: a master database is killed under writes, again and again, and the watcher replaces it.

Rounds take turns between semi-synchronous and asynchronous replication. The figures are the times (until the watcher is
sure, until the new master is open, the longest that a writer waited), and how many acknowledged writes are lost: none
may be under semi-synchronous replication; without it they are the loss window.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, suppress
from itertools import count
from typing import Any, Final

from loadtest.conditions import within
from loadtest.faults.recovery import last_promotion
from loadtest.region_cluster import MASTER, REMOTE, RegionCluster, region_cluster
from loadtest.results import Conditions, ScenarioResult, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
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


class _Writers:
    """Writers that count upwards, each on an object of its own."""

    def __init__(self, graph: Graph) -> None:
        self.acknowledged: Final[dict[int, int]] = {}
        """The last acknowledged number of each object."""
        self._graph: Final = graph

    async def write(self, object_id: int, *, once: bool = False) -> None:
        """Write number after number; ``once``: until one is acknowledged."""
        for number in count(1):
            with suppress(TaoError):
                await self._graph.obj_update(object_id, {"home": str(number)})
                self.acknowledged[object_id] = number
                if once:
                    return


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Run some rounds of each kind, at toy size one with semi-synchronous replication. Raises `OperatorError`.

    An acknowledged write that is lost under semi-synchronous replication is a fault."""
    each = 1 if settings.toy else _ROUNDS
    kinds = [semi_sync for semi_sync in ((True,) if settings.toy else (True, False)) for _ in range(each)]
    rtt_ms = 10.0 if settings.toy else DEFAULT_RTT_MS
    rounds: list[dict[str, Any]] = []  # Any: the JSON's values
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
        async with region_cluster(cluster_settings, lambda _: None) as regions:
            rounds.append(await _lose_master(regions, semi_sync))
    lost = sum(each["lost"] for each in rounds if each["semi_sync"])
    demands = [at_most("no acknowledged write lost with semi-synchronous replication", lost, 0)]
    conditions: Conditions = {
        "writers": _WRITERS,
        "rtt_ms": rtt_ms,
        "rounds_of_each_kind": each,
        "durability": "relaxed",
    }
    return result_of(conditions, {"rounds": rounds}, demands, lists=True)


SCENARIO: Final = Scenario(
    name="master_lost",
    summary="a master is killed under writes and replaced: how long it takes, and what is lost",
    run=run,
)


async def _lose_master(regions: RegionCluster, semi_sync: bool) -> dict[str, Any]:
    """Return the figures of one round; the times of the loss and of the promotion are the watcher's.

    ``writes_again_seconds`` is the time from the kill until every writer had a write acknowledged."""
    cluster = regions.cluster
    async with AsyncExitStack() as stack:
        # Lost writes are counted here; a client that attached its own writes would get an error for them.
        graph = await regions.graph(MASTER, "tier-1", stack, _TIMEOUT_SECONDS, attaches=False)
        ids = await graph.obj_add_many([("user", {"name": "writer"})] * 2 * _WRITERS)
        writers = _Writers(graph)
        tasks = [asyncio.create_task(writers.write(each)) for each in ids[:_WRITERS]]

        async def watched() -> bool:
            stats = [await server_stats(cluster.admin(name)) for name in regions.named(Role.WATCHER)]
            return max(int(each["renewed_leases"]) for each in stats) > 1

        async def are_writing() -> bool:
            found = writers.acknowledged.values()
            return len(found) == _WRITERS and min(found) >= _WRITES_FIRST

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
        killed_at, acknowledged = time.monotonic(), dict(writers.acknowledged)
        async with asyncio.timeout(_PATIENCE_SECONDS):
            await asyncio.gather(*(writers.write(each, once=True) for each in ids[_WRITERS:]))
        again = time.monotonic() - killed_at
        found = await graph.obj_get_many(list(acknowledged), critical=True)
        stored = [0 if each is None else int(str(each.fields.get("home") or 0)) for each in found]
    promotion = await last_promotion(regions)
    return {
        "semi_sync": semi_sync,
        "acknowledged": sum(acknowledged.values()),
        "lost": sum(max(0, number - have) for number, have in zip(acknowledged.values(), stored, strict=True)),
        **{key: promotion[key] for key in ("detected_after_seconds", "promoted_within_seconds")},
        "writes_again_seconds": round(again, 3),
    }
