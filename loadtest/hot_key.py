"""Scenario `hot_key`: one object takes half of all reads of a tier of four followers (DESIGN.md §10).

By itself it keeps the follower that has it busy while the others wait. Its shard can be cloned to all four; the clients
can keep it, ask for it once for all who want it at a moment, and hear "unchanged". Each alone, both, and neither: how
much is answered, and how much the busiest follower has to do, as a multiple of what each would have of the same work.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from loadtest.client_process import run_job
from loadtest.dataset import ITEM
from loadtest.hot_key_client import HotKeyTurn
from loadtest.jobs import HotKeyJob, Pace
from loadtest.results import Listing, ScenarioResult
from loadtest.scenario import BenchSettings, PartOfProgress, Progress
from tao.client import ClientSettings, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ONLY_REGION, ClusterSettings, Shape
from tao.devcluster.server_options import Durability
from tao.model.errors import TopologyError
from tao.model.ids import SHARD_SHIFT
from tao.peers.links import Links, LinkSettings
from tao.topology.file_store import TopologyFile
from tao.watcher.cloning import Cloner, CloningSettings, asking_by
from tao.wire.identity import Credentials

SUMMARY: Final = "one object takes half of all reads: with and without clones of its shard and a cache in the client"
FOLLOWERS: Final = 4
VALUE_BYTES: Final = 1_000
_SHAPE: Final = Shape(tiers=1, followers=FOLLOWERS, leaders=1, databases=1, shards=16)
_SCHEMA: Final = Path(__file__).with_name("schema.yaml")
_TIER: Final = "tier-1"
_TIMEOUT_SECONDS: Final = 30.0
_OBJECTS: Final = 4_000
_TOY_OBJECTS: Final = 100
_CLIENTS: Final = 4
_AWAITERS: Final = 32
_TOY_AWAITERS: Final = 8
_NOTES: Final = [
    "All processes share the machine's cores: with few of them, the busiest one's load tells more than rates do.",
]


async def run(settings: BenchSettings, progress: Progress) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "hot_key", shape=_SHAPE, schema_file=_SCHEMA, durability=Durability.RELAXED
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        patient = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        graph = await stack.enter_async_context(connect(str(cluster.topology_path), settings=patient))
        objects = _TOY_OBJECTS if settings.toy else _OBJECTS
        ids = await graph.obj_add_many([(ITEM, {"value": bytes(VALUE_BYTES)})] * objects)
        followers = [server for each in graph.topology.regions[0].followers for server in each.servers]
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        job = HotKeyJob(
            topology_file=str(cluster.topology_path),
            admins={server.name: server.admin for server in followers},
            pids={server.name: pids[server.name] for server in followers},
            ids=tuple(ids),
            cloned=False,
            clients=_CLIENTS,
            awaiters=_TOY_AWAITERS if settings.toy else _AWAITERS,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        log = settings.work_dir / "hot_key.log"
        turns = await run_job(job, PartOfProgress(progress, 0.0, 0.5), log, list[HotKeyTurn])
        await _clone(cluster, ids[0] >> SHARD_SHIFT)
        job = msgspec.structs.replace(job, cloned=True)
        turns += await run_job(job, PartOfProgress(progress, 0.5, 0.5), log, list[HotKeyTurn])
    measured = {name: _summed_up([turn for turn in turns if turn.contestant == name]) for name in _names(turns)}
    plain = measured["neither"]["reads_per_second"]
    columns = (
        *("", "reads/s", "× neither", "p50 ms", "p99 ms", "queries per read", "of the busiest", "busiest ÷ mean"),
        *("server µs per read", "client µs"),
    )
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{found['reads_per_second']:,.0f}",
            f"{found['reads_per_second'] / plain:.2f}",
            f"{found['p50_ms']:.2f}",
            f"{found['p99_ms']:.2f}",
            f"{found['queries_per_read']:.2f}",
            f"{found['busiest_queries_per_read']:.2f}",
            f"{found['busiest_share']:.2f}",
            f"{found['server_cpu_us']:.1f}",
            f"{found['client_cpu_us']:.1f}",
        )
        for name, found in measured.items()
    ]
    return ScenarioResult(
        summary=SUMMARY,
        conditions={
            "followers": FOLLOWERS,
            "objects": objects,
            "value_bytes": VALUE_BYTES,
            "clients": job.clients,
            "awaiters": job.clients * job.awaiters,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
        },
        listings=[Listing(title="one key takes half of all reads", columns=columns, rows=rows)],
        notes=_NOTES,
        measured=dict(measured),
        faults=[f"{turn.contestant}: {fault}" for turn in turns for fault in turn.faults],
    )


def _names(turns: list[HotKeyTurn]) -> list[str]:
    return list(dict.fromkeys(turn.contestant for turn in turns))


def _summed_up(turns: list[HotKeyTurn]) -> dict[str, float]:
    """Medians of the rounds. ``busiest_share``: of the queries, as a multiple of the mean, so that 1.0 is an even
    load; CPU time is per read, of all followers and of the load process."""

    def middle(values: list[float]) -> float:
        return round(median(values), 3)

    return {
        "reads_per_second": middle([turn.reads / turn.seconds for turn in turns]),
        "queries_per_read": middle([sum(turn.queries.values()) / turn.reads for turn in turns]),
        "busiest_queries_per_read": middle([max(turn.queries.values()) / turn.reads for turn in turns]),
        "p50_ms": middle([turn.p50_ms for turn in turns]),
        "p99_ms": middle([turn.p99_ms for turn in turns]),
        "busiest_share": middle([_busiest(turn.queries) for turn in turns]),
        "server_cpu_us": middle([1e6 * sum(turn.cpu_seconds.values()) / turn.reads for turn in turns]),
        "client_cpu_us": middle([1e6 * turn.client_cpu_seconds / turn.reads for turn in turns]),
    }


def _busiest(load: dict[str, float]) -> float:
    total = sum(load.values())
    return max(load.values()) * len(load) / total if total else 1.0


async def _clone(cluster: DevCluster, shard: int) -> None:
    def fail(error: TopologyError) -> None:
        raise error

    settings = CloningSettings()
    links = Links(LinkSettings(), Credentials("loadtest", "operator"))
    try:
        store = TopologyFile(cluster.topology_path, on_error=fail)
        cloner = Cloner(store, asking_by(links, settings), settings, lambda _: None)
        await cloner.run(await cloner.plan(ONLY_REGION, _TIER, shard, FOLLOWERS - 1))
    finally:
        await links.close()
