"""Scenario `hot_key`: one object takes half of all reads of a tier of four followers.

Without a remedy the object keeps its follower busy while the others wait. Its shard can be cloned to all four; the
clients can cache it, share one request among all who want it at a moment, and revalidate it. The scenario measures each
remedy alone, both, and neither: the rate, and how much the busiest follower has to do, as a multiple of the mean.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from itertools import cycle
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Final

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import ITEM
from loadtest.drivers import WrongAnswer
from loadtest.results import ScenarioResult, at_most, listings_of
from loadtest.rounds import Pace, cpu_seconds, settle_collector
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
"""Until the followers have found the hot object, and the clients have heard of it."""
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
            pids=tuple(pids[server.name] for server in followers),
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
    measured = {
        name: {
            figure: round(median(turn.figures[figure] for turn in turns if turn.contestant == name), 3)
            for figure in turns[0].figures
        }
        for name in dict.fromkeys(turn.contestant for turn in turns)
    }
    plain, both = measured["neither"], measured["clones and client cache"]
    relief = both["busiest_queries_per_read"] / plain["busiest_queries_per_read"]
    return ScenarioResult(
        summary=SCENARIO.summary,
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


class HotKeyTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one turn, by name.

    ``busiest_share`` is the busiest follower's queries as a multiple of the mean, so that 1.0 is an even load. CPU time
    is per read, of all followers and of the load process."""

    contestant: str
    figures: dict[str, float]


class HotKeyJob(msgspec.Struct, frozen=True, kw_only=True):
    """Read with and without a cache in the clients, in turns; half of the reads are for the first of ``ids``."""

    topology_file: str
    admins: tuple[str, ...]
    """Admin address of each follower, ``host:port``."""
    pids: tuple[int, ...]
    ids: tuple[int, ...]
    cloned: bool
    """Whether the object's shard has clones, for the name of the contestant."""
    clients: int
    awaiters: int
    """Concurrent reads of each client."""
    pace: Pace

    async def work(self, report: StepReport) -> list[HotKeyTurn]:
        """Return all turns. Raises `TaoError`, `WrongAnswer` when an object is not found."""
        turns: list[HotKeyTurn] = []
        async with AsyncExitStack() as stack:
            graphs: dict[bool, list[Graph]] = {}
            for keeps in (False, True):
                settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS, keep_hot_items=keeps)
                graphs[keeps] = [
                    await stack.enter_async_context(connect(self.topology_file, settings=settings))
                    for _ in range(self.clients)
                ]
            await graphs[False][0].obj_get_many(self.ids)
            count = 2 * self.pace.rounds
            for number in range(count):
                keeps = bool(number % 2)
                name = _NAMES[self.cloned, keeps]
                report(f"{name}, round {number // 2 + 1} of {self.pace.rounds}", number / count)
                await _drive(graphs[keeps], self, min(_WARM_SECONDS, 2 * self.pace.round_seconds))
                turns.append(await _turn(name, graphs[keeps], self))
        return turns


async def _turn(name: str, graphs: list[Graph], job: HotKeyJob) -> HotKeyTurn:
    settle_collector()
    queries, cpu = await _queries(job), _cpu(job)
    began, client_cpu = perf_counter(), process_time()
    latencies = sorted(await _drive(graphs, job, job.pace.round_seconds))
    seconds, client_cpu = perf_counter() - began, process_time() - client_cpu
    answered = [after - before for before, after in zip(queries, await _queries(job), strict=True)]
    reads = len(latencies)
    figures = {
        "reads_per_second": reads / seconds,
        "queries_per_read": sum(answered) / reads,
        "busiest_queries_per_read": max(answered) / reads,
        "p50_ms": 1e3 * latencies[reads // 2],
        "p99_ms": 1e3 * latencies[reads * 99 // 100],
        "busiest_share": max(answered) * len(answered) / max(1.0, sum(answered)),
        "server_cpu_us": 1e6 * (_cpu(job) - cpu) / reads,
        "client_cpu_us": 1e6 * client_cpu / reads,
    }
    return HotKeyTurn(contestant=name, figures=figures)


async def _drive(graphs: list[Graph], job: HotKeyJob, seconds: float) -> list[float]:
    """Return the seconds of each read."""
    until = perf_counter() + seconds
    latencies: list[float] = []
    chance = Random(_SEED)

    async def ask(graph: Graph, keys: list[int]) -> None:
        for key in cycle(keys):
            began = perf_counter()
            found = await graph.obj_get(key)
            ended = perf_counter()
            latencies.append(ended - began)
            if found is None or found.id != key:
                raise WrongAnswer(f"object {key} is not found")
            # Checked after the answer: a turn that the machine slept through has one answer of each asker.
            if ended >= until:
                return

    async with asyncio.TaskGroup() as group:
        for graph in graphs:
            for _ in range(job.awaiters):
                keys = [job.ids[0] if chance.random() < 0.5 else chance.choice(job.ids) for _ in range(_PREPARED)]
                group.create_task(ask(graph, keys))
    return latencies


async def _queries(job: HotKeyJob) -> list[float]:
    stats = await asyncio.gather(*map(server_stats, job.admins))
    return [each["hits"] + each["misses"] for each in stats]


def _cpu(job: HotKeyJob) -> float:
    return sum(map(cpu_seconds, job.pids))
