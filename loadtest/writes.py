"""Scenario `writes`: durable edges with their inverse, beside the same transactions issued one by one.

Full durability (every commit synced, redo log and binlog), a buffer pool that holds everything, one leader, one
follower. What is measured is group commit: the leader gathers what 64 writers want into few transactions.
"""

from __future__ import annotations

from typing import Final

from loadtest.cached_reads import SCHEMA
from loadtest.client_process import run_job
from loadtest.jobs import Pace, WritesJob
from loadtest.results import Figure, ScenarioResult
from loadtest.scenario import BenchSettings, PartOfProgress, Progress
from tao.devcluster.cluster import DevCluster
from tao.devcluster.layout import ClusterSettings, Shape
from tao.devcluster.server_options import Durability
from tao.devcluster.state_folder import service_accounts

SUMMARY: Final = "acknowledged assoc_add with inverse, fully durable, beside single transactions over aiomysql"
_SHARDS: Final = (8, 32)
_WRITERS: Final = 64
_IDS: Final = 32_000
"""Ends of edges, over all shards: lists stay short, and two writers seldom want the same."""
_BUFFER_POOL_MB: Final = 512
_TOY_SHARDS: Final = (2,)
_TOY_WRITERS: Final = 4
_TOY_IDS: Final = 100
_TOY_BUFFER_POOL_MB: Final = 64


async def run(settings: BenchSettings, progress: Progress) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    figures: list[Figure] = []
    shapes = _TOY_SHARDS if settings.toy else _SHARDS
    for number, shards in enumerate(shapes):
        part = PartOfProgress(progress, number / len(shapes), 1 / len(shapes))
        figures += await _with_shards(shards, settings, part)
    conditions: dict[str, str | int | float] = {
        "writers": _TOY_WRITERS if settings.toy else _WRITERS,
        "buffer_pool_mb": _TOY_BUFFER_POOL_MB if settings.toy else _BUFFER_POOL_MB,
        "durability": "full",
        "rounds": settings.rounds,
        "round_seconds": settings.round_seconds,
    }
    return ScenarioResult(summary=SUMMARY, conditions=conditions, figures=figures)


async def _with_shards(shards: int, settings: BenchSettings, progress: Progress) -> list[Figure]:
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / f"writes-{shards}",
        shape=Shape(tiers=1, followers=1, leaders=1, databases=1, shards=shards),
        schema_file=SCHEMA,
        buffer_pool_mb=_TOY_BUFFER_POOL_MB if settings.toy else _BUFFER_POOL_MB,
        durability=Durability.FULL,
    )
    async with DevCluster(cluster_settings, progress.step) as cluster:
        pids = {process.name: process.pid for process in (await cluster.status()).processes}
        (database_name,) = cluster.record.shape.database_names
        database = cluster.database(database_name)
        settings.versions[database.binary.flavour] = database.binary.version_text
        account = service_accounts(cluster.record.passwords).leader
        job = WritesJob(
            topology_file=str(cluster.topology_path),
            server_pids=tuple(pid for name, pid in pids.items() if name != database_name),
            database_pid=pids[database_name],
            database_host=database.host,
            database_port=database.port,
            user=account.user,
            password=account.password,
            shards=shards,
            writers=_TOY_WRITERS if settings.toy else _WRITERS,
            ids_per_shard=(_TOY_IDS if settings.toy else _IDS) // shards,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        return await run_job(job, progress, settings.work_dir / f"writes-{shards}.log", list[Figure])
