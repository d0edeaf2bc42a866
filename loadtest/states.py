"""Scenario `states`: merges of edges with states beside plain adds, and a whole node archived and restored.

64 writers add edges of a type without states and of one with states, each with its inverse, in turns. Then a node gets
many edges, a tenth of them to nodes with states of their own. Every page of its job is done as fast as it goes, with
the timeouts of a worker; and again at the pace of a worker, in rounds that compare the latencies of reads with those
of a pause before. An application in another process does the reads. There both ends of each edge are in one database.
In a second cluster half of the far ends of a smaller node belong to another leader and its database, so that the job
has to come back to them, and four fifths of the job are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.drivers import WrongAnswer
from loadtest.results import ScenarioResult, at_least, at_most, result_of
from loadtest.rounds import percentile
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.edge_states import State
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import NodeStateBody
from tao.worker.node_state import MAX_PAGE_EDGES, NodeStates
from tao.worker.runner import RunnerSettings
from tao.worker.server import graph_settings

PLAIN: Final = "peer"
WITH_STATES: Final = "member"
_SHARDS: Final = 8
_READERS: Final = 4
_PACED: Final = RunnerSettings(edges_per_second=500)
"""1,000 edges a second where an edge and its inverse count as two, as in all other figures here."""
_UNPACED: Final = RunnerSettings(edges_per_second=inf, page_edges=MAX_PAGE_EDGES)
_NODE: Final = 1 << 40
_START_SECONDS: Final = 2.0
"""How long the process that reads may take to start."""


@dataclass(frozen=True, slots=True)
class _Size:
    writers: int = 64
    rounds: int = 5
    round_seconds: float = 3.0
    edges: int = 100_000
    edges_apart: int = 15_000


_TOY: Final = _Size(4, 1, 0.2, 600, 600)


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure merges, then a node of many edges. Raises `OperatorError`."""
    size = _TOY if settings.toy else _Size()
    async with _cluster(settings, "states", 1, progress) as (graph, reader):
        progress.step("adds and merges", 0.1)
        rates = await _rates(graph, size)
        progress.step("a node of many edges", 0.3)
        node = await _node(graph, reader, size, progress)
    async with _cluster(settings, "states-apart", 2, progress) as (graph, reader):
        progress.step("a node whose far ends are apart", 0.8)
        apart = await _apart(graph, reader, size)
    ratio = "p99 of reads while a node is archived at 1,000/s ÷ before"
    return result_of(
        {
            "writers": size.writers,
            "edges": size.edges,
            "edges_apart": size.edges_apart,
            "rounds": size.rounds,
            "shards": _SHARDS,
        },
        {"merges": rates, "node": node, "node_apart": apart},
        aims=[
            at_least("merges ÷ plain adds", rates["ratio"], 0.8),
            at_least("archive, edges a second", node["archive_per_second"], 5_000),
            at_least("restore, edges a second", node["restore_per_second"], 5_000),
            at_most(ratio, node["reads_p99_ratio"], 1.5, "both ends together"),
            at_most(ratio, apart["reads_p99_ratio"], 1.5, "half of the far ends apart, the whole node"),
        ],
        notes=["A pair of an edge and its inverse counts as two edges a second."],
    )


SCENARIO: Final = Scenario(
    name="states", summary="merges of edges with states beside plain adds; a whole node archived and restored", run=run
)


class ReadsJob(msgspec.Struct, frozen=True):
    """Reads of lists that do not change, by an application that waits 2 ms after each. Their latencies are compared
    with the clock of the machine, which the runner sees too."""

    topology: str
    ids: list[int]
    seconds: float

    async def work(self, report: StepReport) -> _Reads:
        """Read for so long and return what it took."""
        reads = _Reads([], [])
        random, until = Random(7), time.perf_counter() + self.seconds

        async def reader(graph: Graph) -> None:
            while (began := time.perf_counter()) < until:
                await graph.assoc_range(random.choice(self.ids), PLAIN, 0, 50)
                reads.began_us.append(int(began * 1e6))
                reads.latencies_us.append(int((time.perf_counter() - began) * 1e6))
                await asyncio.sleep(0.002)

        async with connect(self.topology) as graph, asyncio.TaskGroup() as group:
            for _ in range(_READERS):
                group.create_task(reader(graph))
        return reads


class _Reads(msgspec.Struct, frozen=True):
    """When reads began, and how long they took, both in microseconds, in the order of their ends."""

    began_us: list[int]
    latencies_us: list[int]

    def p99(self, since: float, until: float) -> float:
        """Return the 99th percentile of the latencies of the reads that began in a span, in microseconds."""
        found = [
            float(latency)
            for began, latency in zip(self.began_us, self.latencies_us, strict=True)
            if since * 1e6 <= began < until * 1e6
        ]
        if not found:
            raise WrongAnswer("nothing was read in a round: the job has ended before it, or the machine was too busy")
        return percentile(found, 0.99)


@dataclass(frozen=True, slots=True)
class _Reader:
    """The process that reads beside the job of a node."""

    topology: str
    log: Path
    progress: Progress

    async def read(self, ids: Sequence[int], seconds: float) -> _Reads:
        """Read lists for so long, and a moment longer for the start of the process."""
        job = ReadsJob(self.topology, list(ids[:1000]), seconds + _START_SECONDS)
        return await run_job(job, self.progress, self.log, _Reads)


@asynccontextmanager
async def _cluster(
    settings: BenchSettings, name: str, databases: int, progress: Progress
) -> AsyncIterator[tuple[Graph, _Reader]]:
    """Start a cluster with so many databases and leaders, and connect to it as a worker does."""
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / name,
        shape=Shape(tiers=1, followers=1, leaders=databases, databases=databases, shards=_SHARDS),
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
    )
    client = graph_settings(RunnerSettings())
    async with (
        DevCluster(cluster_settings, progress.step) as cluster,
        connect(str(cluster.topology_path), settings=client) as graph,
    ):
        yield graph, _Reader(str(cluster.topology_path), settings.work_dir / f"{name}-reads.log", progress)


async def _rates(graph: Graph, size: _Size) -> dict[str, float]:
    """Return the median rates of adds of both types, a second, and the median ratio of neighbouring rounds."""
    numbers = itertools.count(1)
    random = Random(3)

    async def round_of(atype: str) -> float:
        until, done = time.perf_counter() + size.round_seconds, 0

        async def writer() -> None:
            nonlocal done
            while time.perf_counter() < until:
                one, two = (random.randrange(_SHARDS) << SHARD_SHIFT | next(numbers) for _ in range(2))
                await graph.assoc_add(one, atype, two, 1)
                done += 1

        began = time.perf_counter()
        await asyncio.gather(*(writer() for _ in range(size.writers)))
        return done / (time.perf_counter() - began)

    rounds: dict[str, list[float]] = {PLAIN: [], WITH_STATES: []}
    for number in range(size.rounds):
        for atype in (PLAIN, WITH_STATES) if number % 2 else (WITH_STATES, PLAIN):
            rounds[atype].append(await round_of(atype))
    ratios = [merged / plain for plain, merged in zip(rounds[PLAIN], rounds[WITH_STATES], strict=True)]
    return {
        "plain_per_second": round(median(rounds[PLAIN])),
        "merges_per_second": round(median(rounds[WITH_STATES])),
        "ratio": round(median(ratios), 3),
    }


async def _node(graph: Graph, reader: _Reader, size: _Size, progress: Progress) -> dict[str, float]:
    """Return how fast a node is archived and restored, and what that does to reads at a worker's pace."""
    others = await _add_edges(graph, size.edges)
    found: dict[str, float] = {}
    for state, name in ((State.ARCHIVED, "archive"), (State.NORMAL, "restore")):
        progress.step(f"{name} a node", 0.5)
        await graph.node_set_state(_NODE, state.label, [WITH_STATES])
        began = time.perf_counter()
        walk = _Walk(graph, _UNPACED)
        await walk.go_on()
        found[f"{name}_per_second"] = round(2 * walk.edges / (time.perf_counter() - began))
        assert await graph.assoc_count(_NODE, WITH_STATES, state.label) == size.edges
    progress.step("reads beside a node", 0.7)
    await graph.node_set_state(_NODE, State.ARCHIVED.label, [WITH_STATES])
    walk = _Walk(graph, _PACED)
    compared = await _compared(reader, others, walk, size, size.rounds)
    if walk.is_done:
        raise WrongAnswer("nothing was moved beside the last reads: the walk has ended before them")
    return found | compared


async def _apart(graph: Graph, reader: _Reader, size: _Size) -> dict[str, float]:
    """Return what archiving a whole node at a worker's pace does to reads, where the job comes back to far ends."""
    others = await _add_edges(graph, size.edges_apart)
    await graph.node_set_state(_NODE, State.ARCHIVED.label, [WITH_STATES])
    walk = _Walk(graph, _PACED)
    rounds = max(
        1, int(0.8 * size.edges_apart / _PACED.edges_per_second / size.round_seconds)
    )  # it must not end sooner
    compared = await _compared(reader, others, walk, size, rounds)
    await walk.go_on()
    inverse = _inverse_of_members(graph)
    counts = await graph.assoc_count_many([(other, inverse, State.ARCHIVED.label) for other in others], critical=True)
    if sum(counts) != size.edges_apart:
        raise WrongAnswer(f"{sum(counts)} of {size.edges_apart} far ends are archived after the job")
    return compared


class _Round(NamedTuple):
    """The times of a round, by the machine's clock: a pause, then the pages."""

    began: float
    pages_began: float
    ended: float


async def _compared(reader: _Reader, others: Sequence[int], walk: _Walk, size: _Size, rounds: int) -> dict[str, float]:
    """Return the medians over rounds of the 99th percentiles of reads, before pages are done and beside them."""
    reading = asyncio.create_task(reader.read(others, 2 * rounds * size.round_seconds))
    await asyncio.sleep(_START_SECONDS)
    times: list[_Round] = []
    for _ in range(rounds):
        began = time.perf_counter()
        await asyncio.sleep(size.round_seconds)
        pages_began = time.perf_counter()
        await walk.go_on(size.round_seconds)
        times.append(_Round(began, pages_began, time.perf_counter()))
    reads = await reading
    before = [reads.p99(each.began, each.pages_began) for each in times]
    during = [reads.p99(each.pages_began, each.ended) for each in times]
    return {
        "reads_p99_before_us": round(median(before)),
        "reads_p99_during_us": round(median(during)),
        "reads_p99_ratio": round(median(after / former for former, after in zip(before, during, strict=True)), 2),
        "rounds": rounds,
    }


def _inverse_of_members(graph: Graph) -> str:
    inverse = graph.schema.inverse_of(graph.schema.atype(WITH_STATES))
    assert inverse is not None, "the scenario's type has an inverse"
    return inverse.name


async def _add_edges(graph: Graph, edges: int) -> list[int]:
    """Give the node its edges, and return the far nodes. Each tenth of them has been archived and restored by itself,
    so it has a state that the near ends have to learn."""
    others = [number % _SHARDS << SHARD_SHIFT | (1 << 41) + number for number in range(edges)]
    for start in range(0, edges, 500):
        await graph.assoc_add_many([(_NODE, WITH_STATES, other, 1) for other in others[start : start + 500]])
    inverse = _inverse_of_members(graph)
    for start in range(0, edges, 500):
        some = others[start : start + 500 : 10]
        await asyncio.gather(*(graph.node_set_state(other, State.NORMAL.label, [inverse]) for other in some))
    return others


@dataclass(slots=True)
class _Walk:
    """The job of the node, done as by a worker with these settings."""

    graph: Graph
    settings: RunnerSettings
    cursor: bytes = b""
    edges: int = 0
    """Edges that were moved."""
    is_done: bool = False

    async def go_on(self, most_seconds: float = inf) -> None:
        """Do pages at the worker's pace, for so many seconds at most."""
        kind = NodeStates()
        pace, limit = self.settings.pace(kind.name), self.settings.page_limit(kind.name)
        body = msgspec.msgpack.encode(NodeStateBody(_NODE, (self.graph.schema.atype(WITH_STATES).number,)))
        looked_at, began = 0, time.perf_counter()
        while not self.is_done and time.perf_counter() - began < most_seconds:
            page = await kind.page(self.graph, body, self.cursor, limit)
            self.cursor, self.edges, self.is_done = page.cursor, self.edges + page.edges, page.done
            looked_at += limit
            await asyncio.sleep(max(0.0, looked_at / pace - (time.perf_counter() - began)))
