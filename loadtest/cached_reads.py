"""Scenario `cached_reads`: what a warm follower answers, beside Redis on the same values in the same shapes.

One follower process, one load process: on two cores each has its own, and leader and database have nothing to do. The
aims are the product's (DESIGN.md §11): a graph cache in Python has to be worth asking instead of one without a graph.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from loadtest.client_process import run_job
from loadtest.dataset import TOY, DatasetSize
from loadtest.jobs import Pace, ReadsJob
from loadtest.redis_server import find_redis_server, private_redis
from loadtest.results import Figure, ScenarioResult
from loadtest.scenario import BenchSettings, Progress
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.ports import LOOPBACK
from tao.devcluster.server_options import Durability

SUMMARY: Final = "cached reads of one follower, over every transport, beside redis-py and redis-server"
SCHEMA: Final = Path(__file__).with_name("schema.yaml")
SHAPE: Final = Shape(tiers=1, followers=1, leaders=1, databases=1, shards=8)
_FOLLOWER: Final = "follower-1a"
_AWAITERS: Final = 64
_TOY_AWAITERS: Final = 8
_NOTES: Final = [
    "Separate connections: a session sends the next message from its answer's callback; redis-py has to be awaited.",
    "A page of a list is ZREVRANGE WITHSCORES of a sorted set; redis-py opens a connection per command under way.",
]


async def run(settings: BenchSettings, progress: Progress) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    _, settings.versions["redis-server"] = find_redis_server()
    size = TOY if settings.toy else DatasetSize()
    awaiters = _TOY_AWAITERS if settings.toy else _AWAITERS
    # Nothing is written while it is measured; syncing every commit would only draw out the filling.
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "cached_reads", shape=SHAPE, schema_file=SCHEMA, durability=Durability.RELAXED
    )
    async with AsyncExitStack() as stack:
        redis_port, redis_pid = await stack.enter_async_context(private_redis(settings.work_dir / "redis"))
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        job = ReadsJob(
            topology_file=str(cluster.topology_path),
            grpc=cluster.client_address,
            frames=f"{LOOPBACK}:{cluster.record.ports[_FOLLOWER].frames}",
            topology_version=cluster.record.topology_version,
            follower_pid=pids[_FOLLOWER],
            redis_port=redis_port,
            redis_pid=redis_pid,
            size=size,
            awaiters=awaiters,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        figures = await run_job(job, progress, settings.work_dir / "cached_reads.log", list[Figure])
    conditions: dict[str, str | int | float] = {
        "objects": size.objects,
        "value_bytes": 100,
        "awaiters": awaiters,
        "rounds": settings.rounds,
        "round_seconds": settings.round_seconds,
    }
    return ScenarioResult(summary=SUMMARY, conditions=conditions, figures=figures, notes=_NOTES)
