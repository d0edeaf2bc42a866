"""Scenario `hot_key`: one object takes half of all reads of a tier of four followers.

Without a remedy the object keeps its follower busy while the others wait. Its shard can be cloned to all four; the
clients can cache it, share one request among all who want it at a moment, and revalidate it. The scenario measures each
remedy alone, both, and neither: the rate, and how much the busiest follower has to do, as a multiple of the mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import cycle, repeat
from random import Random
from statistics import median
from time import perf_counter
from typing import Final

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import ITEM
from loadtest.drivers import WrongAnswer, closed
from loadtest.results import ScenarioResult, at_most, listings_of
from loadtest.rounds import MICRO, Comparison, Pace, Round, Source, Trial, TurnSamples, percentile, take_all_turns
from loadtest.scenario import SCHEMA, BenchSettings, PartOfProgress, Progress, Scenario
from loadtest.target import OWN_TIER, pids_of
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ONLY_REGION, ClusterSettings, Shape
from tao.model.errors import TopologyError
from tao.model.ids import SHARD_SHIFT
from tao.topology.file_store import TopologyFile
from tao.watcher.shard_clones import Cloner, CloningSettings, topology_version_of
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings

FOLLOWERS: Final = 4
VALUE_BYTES: Final = 1_000
_SHAPE: Final = Shape(tiers=1, followers=FOLLOWERS, leaders=1, databases=1, shards=16)
_TIMEOUT_SECONDS: Final = 30.0
_OBJECTS: Final = 4_000
_TOY_OBJECTS: Final = 100
_CLIENTS: Final = 4
_AWAITERS: Final = 32
_TOY_AWAITERS: Final = 8
_WARM_SECONDS: Final = 1.0
"""Time in which the followers find the hot object, and the clients hear of it."""
_PREPARED: Final = 400
"""Keys of each awaiter, asked for again and again."""
_SEED: Final = 5
_NAMES: Final = {
    (False, False): "neither",
    (False, True): "client cache",
    (True, False): "clones",
    (True, True): "clones and client cache",
}
"""The contestants, by whether the shard has clones and whether the clients cache."""
_RELIEF: Final = 0.5
"""The queries per read of the busiest follower with both remedies, as a multiple of those without."""
Measured = dict[str, dict[str, float]]
"""Figures by contestant and name."""


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure the clients with and without a cache, before and after the shard is cloned. Raises `OperatorError`."""
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "hot_key", shape=_SHAPE, schema_file=SCHEMA, durability=Durability.RELAXED
    )
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(DevCluster(cluster_settings, progress.step))
        patient = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        graph = await stack.enter_async_context(connect(str(cluster.topology_path), settings=patient))
        objects = _TOY_OBJECTS if settings.toy else _OBJECTS
        ids = await graph.obj_add_many([(ITEM, {"value": bytes(VALUE_BYTES)})] * objects)
        followers = [server for each in graph.topology.regions[0].followers for server in each.servers]
        pids = await pids_of(cluster)
        job = HotKeyJob(
            topology_file=str(cluster.topology_path),
            admins=tuple(server.admin for server in followers),
            pids={server.name: pids[server.name] for server in followers},
            ids=tuple(ids),
            cloned=False,
            clients=_CLIENTS,
            awaiters=_TOY_AWAITERS if settings.toy else _AWAITERS,
            pace=Pace(settings.rounds, settings.round_seconds),
        )
        log = settings.work_dir / "hot_key.log"
        measured = await run_job(job, PartOfProgress(progress, 0.0, 0.5), log, Measured)
        await _clone(cluster, ids[0] >> SHARD_SHIFT)
        job = msgspec.structs.replace(job, cloned=True)
        measured |= await run_job(job, PartOfProgress(progress, 0.5, 0.5), log, Measured)
    plain, both = measured["neither"], measured["clones and client cache"]
    relief = both["busiest_queries_per_read"] / plain["busiest_queries_per_read"]
    return ScenarioResult(
        conditions={
            "followers": FOLLOWERS,
            "objects": objects,
            "value_bytes": VALUE_BYTES,
            "clients": job.clients,
            "awaiters": job.clients * job.awaiters,
            "rounds": settings.rounds,
            "round_seconds": settings.round_seconds,
        },
        listings=listings_of(measured),
        notes=["All processes share the machine's cores: with few of them, the busiest one's load says more."],
        aims=[at_most(f"busiest follower: at most {_RELIEF:g} × the queries per read of neither", relief, _RELIEF)],
        measured=dict(measured),
    )


SCENARIO: Final = Scenario(
    name="hot_key",
    summary="one object takes half of all reads: with and without clones of its shard and a cache in the client",
    run=run,
)


async def _clone(cluster: DevCluster, shard: int) -> None:
    def fail(error: TopologyError) -> None:
        raise error

    settings = CloningSettings()
    links = Links(LinkSettings(), Credentials("loadtest", "operator"))
    try:
        store = TopologyFile(cluster.topology_path, on_error=fail)
        cloner = Cloner(store, topology_version_of(links, settings), settings, lambda _: None)
        await cloner.run(await cloner.plan(ONLY_REGION, OWN_TIER, shard, FOLLOWERS - 1))
    finally:
        await links.close()


class HotKeyJob(msgspec.Struct, frozen=True, kw_only=True):
    """Read with and without a cache in the clients, in turns; half of the reads are for the first of ``ids``."""

    topology_file: str
    admins: tuple[str, ...]
    """Admin address of each follower, ``host:port``."""
    pids: dict[str, int]
    """Process id of each follower."""
    ids: tuple[int, ...]
    cloned: bool
    """Whether the object's shard has clones, for the name of the contestant."""
    clients: int
    awaiters: int
    """Concurrent reads of each client."""
    pace: Pace

    async def work(self, report: StepReport) -> Measured:
        """Return the medians of all rounds. Raises `TaoError`, `WrongAnswer` when an object is not found."""
        trials: list[Trial] = []
        async with AsyncExitStack() as stack:
            for keeps in (False, True):
                settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, keep_hot_items=keeps)
                pending = [connect(self.topology_file, settings=settings) for _ in range(self.clients)]
                graphs = [await stack.enter_async_context(each) for each in pending]
                await graphs[0].obj_get_many(self.ids)
                trials.append(self._trial(_NAMES[self.cloned, keeps], graphs))
            (turns,) = await take_all_turns([Comparison("reads", tuple(trials))], self.pace, report)
        return {name: _medians(rounds) for name, rounds in turns.items()}

    def _trial(self, name: str, graphs: Sequence[Graph]) -> Trial:
        chance = Random(_SEED)

        def keys() -> list[int]:
            return [self.ids[0] if chance.random() < 0.5 else chance.choice(self.ids) for _ in range(_PREPARED)]

        drive = closed(
            _ask, [zip(repeat(graph), cycle(keys()), strict=False) for graph in graphs for _ in range(self.awaiters)]
        )

        async def warm(seconds: float) -> None:
            await drive(perf_counter() + min(_WARM_SECONDS, 2 * seconds), TurnSamples())

        async def queries() -> dict[str, float]:
            stats = await asyncio.gather(*map(server_stats, self.admins))
            return {admin: each["hits"] + each["misses"] for admin, each in zip(self.admins, stats, strict=True)}

        return Trial(name, drive, self.pids, counters=queries, prepare=warm)


async def _ask(asked: tuple[Graph, int]) -> Source:
    graph, key = asked
    found = await graph.obj_get(key)
    if found is None or found.id != key:
        raise WrongAnswer(f"object {key} is not found")
    return Source.UNKNOWN


def _medians(rounds: Sequence[Round]) -> dict[str, float]:
    """Return the median of each figure. ``busiest_share`` is the busiest follower's queries as a multiple of the mean,
    so that 1.0 is an even load; CPU time is per read, of all followers and of the load process."""
    figures: list[dict[str, float]] = []
    for turn in rounds:
        latencies, answered = turn.samples.ordered(), turn.counts.values()
        reads, busiest = len(latencies), max(answered)
        figures.append(
            {
                "reads_per_second": reads / turn.elapsed,
                "queries_per_read": sum(answered) / reads,
                "busiest_queries_per_read": busiest / reads,
                "p50_ms": 1e3 * percentile(latencies, 0.5),
                "p99_ms": 1e3 * percentile(latencies, 0.99),
                "busiest_share": busiest * len(answered) / max(1.0, sum(answered)),
                "server_cpu_us": MICRO * sum(turn.server_cpu.values()) / reads,
                "client_cpu_us": MICRO * turn.client_cpu / reads,
            }
        )
    return {name: round(median(each[name] for each in figures), 3) for name in figures[0]}
