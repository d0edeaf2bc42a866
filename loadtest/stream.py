"""Scenario `stream`: CPU of a follower for each cached query that comes in batches on the stream, by operation; and how
long a batch takes at a constant rate of queries from one process.

One follower process, one load process, as in `cached_reads`, and bare sessions: what is measured is the server.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from loadtest.client_process import run_job
from loadtest.dataset import LINK, TOY, DatasetSize
from loadtest.jobs import Pace, StreamJob
from loadtest.results import Figure, ScenarioResult
from loadtest.scenario import BenchSettings, Progress
from tao.cache.packed import CORE
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_options import Durability
from tao.schema.registry import load_schema

SUMMARY: Final = "CPU of a follower per cached query on the stream, by operation; latency at 100,000 queries a second"
SCHEMA: Final = Path(__file__).with_name("schema.yaml")
SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=8)
_FOLLOWER: Final = "follower-1a"
_BATCH: Final = 100
_CONNECTIONS: Final = 4
_RATE: Final = 100_000
_TOY_RATE: Final = 2_000
_NOTES: Final = [
    "Operations are drawn from the paper's mix, whose lists are mostly empty; pages are of lists of 40 edges.",
    "At a constant rate latency counts from when a batch should have begun; the load process keeps its loop turning.",
]


async def run(settings: BenchSettings, progress: Progress) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "stream", shape=SHAPE, schema_file=SCHEMA, durability=Durability.RELAXED
    )
    size, rate = (TOY, _TOY_RATE) if settings.toy else (DatasetSize(), _RATE)
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        job = StreamJob(
            topology_file=str(cluster.topology_path),
            grpc=cluster.client_address,
            frames=f"{LOOPBACK}:{cluster.record.ports[_FOLLOWER].frames}",
            topology_version=cluster.record.topology_version,
            follower_pid=pids[_FOLLOWER],
            size=size,
            atype=load_schema(SCHEMA.read_text(), SCHEMA.name).atype(LINK).number,
            batch=_BATCH,
            connections=_CONNECTIONS,
            queries_per_second=rate,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        figures = await run_job(job, progress, settings.work_dir / "stream.log", list[Figure])
    conditions: dict[str, str | int | float] = {
        "core": CORE,
        "objects": size.objects,
        "batch": _BATCH,
        "connections": _CONNECTIONS,
        "rate": rate,
        "rounds": settings.rounds,
        "round_seconds": settings.round_seconds,
    }
    return ScenarioResult(summary=SUMMARY, conditions=conditions, figures=figures, notes=_NOTES)
