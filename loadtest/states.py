"""Scenario `states`: merges of edges with states beside plain adds, and a whole node archived and restored.

64 writers add edges of a type without states and of one with states, each with its inverse, in turns. Then a node gets
many edges, a tenth of them to nodes with states of their own. One worker without a pace archives and restores it as
fast as that goes. Another one does both at the pace of a worker, in rounds that compare the latencies of reads with
those of a pause before, in which it is stopped. An application in another process does the reads. There both ends of
each edge are in one database. In a second cluster half of the far ends of a smaller node belong to another leader and
its database, so that the job has to come back to them, and four fifths of it are compared.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Final, NamedTuple

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.conditions import within
from loadtest.drivers import WrongAnswer
from loadtest.results import ScenarioResult, at_least, at_most, result_of
from loadtest.rounds import percentile
from loadtest.scenario import SCHEMA, BenchSettings, Progress, ProgressListener, Scenario
from loadtest.target import pids_of
from tao.client import ClientSettings, Graph, Job, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.edge_states import State
from tao.model.ids import SHARD_SHIFT
from tao.worker.node_state import MAX_PAGE_EDGES

PLAIN: Final = "peer"
WITH_STATES: Final = "member"
_SHARDS: Final = 8
_READERS: Final = 4
_FAST: Final = "worker-1"
_PACED: Final = "worker-2"
_PACE: Final = 500
"""Edges a second of the latter: 1,000 where an edge and its inverse count as two, as in all other figures here."""
_RUNNERS: Final = {
    _FAST: {"edges_per_second": 1e9, "page_edges": MAX_PAGE_EDGES, "poll_seconds": 0.05},
    _PACED: {"edges_per_second": _PACE, "poll_seconds": 0.05},
}
_OPERATIONS: Final = ((State.ARCHIVED, "archive"), (State.NORMAL, "restore"))
_NODE: Final = 1 << 40
_READS: Final = "reading lists"
_SPARE_SECONDS: Final = 1.0
"""How much longer the process reads than it is looked at."""
_JOB_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class _Size:
    writers: int = 64
    rounds: int = 5
    round_seconds: float = 3.0
    edges: int = 100_000
    edges_apart: int = 7_500
    rounds_apart: int = 4
    """Rounds of the smaller node: four fifths of the time that its edges take at the pace."""


_TOY: Final = _Size(4, 1, 0.2, 3_000, 100, 1)


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure merges, then a node of many edges. Raises `OperatorError`."""
    size = _TOY if settings.toy else _Size()
    async with _cluster(settings, "states", 1, progress) as (graph, workers, reader):
        progress.step("adds and merges", 0.1)
        rates = await _rates(graph, size)
        progress.step("a node of many edges", 0.2)
        node = await _node(graph, workers, reader, size, progress)
    async with _cluster(settings, "states-apart", 2, progress) as (graph, workers, reader):
        progress.step("a node whose far ends are apart", 0.8)
        apart = await _apart(graph, workers, reader, size)
    together, halves = "both ends together", "half of the far ends apart, the whole node"
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
            *(
                at_most(f"p99 of reads during {name} at 1,000/s ÷ before", found[f"{name}_reads_p99_ratio"], 1.5, where)
                for found, where in ((node, together), (apart, halves))
                for _, name in _OPERATIONS
            ),
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
        """Read for so long and return what it took. A step says when it begins."""
        reads, random = _Reads([], []), Random(7)

        async def reader(graph: Graph, until: float) -> None:
            while (began := time.perf_counter()) < until:
                await graph.assoc_range(random.choice(self.ids), PLAIN, 0, 50)
                reads.began_us.append(int(began * 1e6))
                reads.latencies_us.append(int((time.perf_counter() - began) * 1e6))
                await asyncio.sleep(0.002)

        async with connect(self.topology) as graph:
            await graph.assoc_range_many([(each, PLAIN, 0, 50) for each in self.ids])
            report(_READS, 0.0)
            until = time.perf_counter() + self.seconds
            await asyncio.gather(*(reader(graph, until) for _ in range(_READERS)))
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
            raise WrongAnswer("nothing was read in a round: the machine was too busy")
        return percentile(found, 0.99)


@dataclass(frozen=True, slots=True)
class _Reader:
    """The process that reads beside the job of a node."""

    topology: str
    log: Path
    progress: Progress

    @asynccontextmanager
    async def reading(self, ids: Sequence[int], seconds: float) -> AsyncIterator[asyncio.Task[_Reads]]:
        """Read lists for so long, from the beginning of the block on. Yields the task that returns the reads."""
        job, begun = ReadsJob(self.topology, list(ids[:1000]), seconds + _SPARE_SECONDS), asyncio.Event()
        listener = ProgressListener(self.progress, lambda step: begun.set() if step == _READS else None)
        task = asyncio.create_task(run_job(job, listener, self.log, _Reads))
        beginning = asyncio.create_task(begun.wait())
        try:
            await asyncio.wait((task, beginning), return_when=asyncio.FIRST_COMPLETED)
            yield task
        finally:
            beginning.cancel()
            task.cancel()
            await asyncio.gather(beginning, task, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Workers:
    """The workers of a cluster, none of which runs at first."""

    cluster: DevCluster

    @asynccontextmanager
    async def running(self, name: str) -> AsyncIterator[int]:
        """Have this worker run in the block. Yields its process id."""
        await self.cluster.restart(name)
        pid = (await pids_of(self.cluster))[name]
        try:
            yield pid
        finally:
            await self.cluster.kill(name)


@asynccontextmanager
async def _cluster(
    settings: BenchSettings, name: str, databases: int, progress: Progress
) -> AsyncIterator[tuple[Graph, _Workers, _Reader]]:
    """Start a cluster with so many databases and leaders, and connect to it."""
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / name,
        shape=Shape(tiers=1, followers=1, leaders=databases, databases=databases, shards=_SHARDS, workers=2),
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
        server_settings={name: {"runner": runner} for name, runner in _RUNNERS.items()},
    )
    async with (
        DevCluster(cluster_settings, progress.step) as cluster,
        connect(str(cluster.topology_path), settings=ClientSettings(timeout_seconds=30.0)) as graph,
    ):
        for worker in _RUNNERS:
            await cluster.kill(worker)
        log = settings.work_dir / f"{name}-reads.log"
        yield graph, _Workers(cluster), _Reader(str(cluster.topology_path), log, progress)


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


async def _node(graph: Graph, workers: _Workers, reader: _Reader, size: _Size, progress: Progress) -> dict[str, float]:
    """Return how fast a node is archived and restored, and what that does to reads at a worker's pace."""
    others = await _add_edges(graph, size.edges)
    found: dict[str, float] = {}
    async with workers.running(_FAST):
        for state, name in _OPERATIONS:
            progress.step(f"{name} a node", 0.4)
            began = time.perf_counter()
            job = await (await graph.node_set_state(_NODE, state.label, [WITH_STATES])).wait(_JOB_SECONDS)
            found[f"{name}_per_second"] = round(2 * size.edges / (time.perf_counter() - began))
            count = await graph.assoc_count(_NODE, WITH_STATES, state.label, critical=True)
            if (job.state, count) != ("done", size.edges):
                raise WrongAnswer(f"the job is {job.state}; {count} of {size.edges} edges are {state.label}")
    async with workers.running(_PACED) as worker:
        for state, name in _OPERATIONS:
            progress.step(f"reads beside the {name} of a node", 0.6)
            job = await _begun(graph, state)
            compared = await _compared(reader, others, worker, size.round_seconds, size.rounds)
            if (await job.refresh()).state != "waiting":
                raise WrongAnswer("nothing was moved beside the last reads: the job has ended before them")
            found |= {f"{name}_{figure}": value for figure, value in compared.items()}
    return found


async def _apart(graph: Graph, workers: _Workers, reader: _Reader, size: _Size) -> dict[str, float]:
    """Return what archiving and restoring a whole node at a worker's pace does to reads, where the job comes back to
    far ends."""
    others = await _add_edges(graph, size.edges_apart)
    inverse = _inverse_of_members(graph)
    found: dict[str, float] = {}
    async with workers.running(_PACED) as worker:
        for state, name in _OPERATIONS:
            job = await _begun(graph, state)
            compared = await _compared(reader, others, worker, size.round_seconds, size.rounds_apart)
            await job.wait(_JOB_SECONDS)
            counts = await graph.assoc_count_many([(other, inverse, state.label) for other in others], critical=True)
            if sum(counts) != size.edges_apart:
                raise WrongAnswer(f"{sum(counts)} of {size.edges_apart} far ends are {state.label} after the job")
            found |= {f"{name}_{figure}": value for figure, value in compared.items()}
    return found


async def _begun(graph: Graph, state: State) -> Job:
    """Set the state of the node, and return its job when the worker has moved edges."""
    job = await graph.node_set_state(_NODE, state.label, [WITH_STATES])

    async def has_begun() -> bool:
        return (await job.refresh()).edges > 0

    await within(_JOB_SECONDS, has_begun, 0.05, "no worker has begun the job of the node")
    return job


class _Round(NamedTuple):
    """The times of a round, by the machine's clock: a pause, then the pages."""

    began: float
    pages_began: float
    ended: float


async def _compared(
    reader: _Reader, others: Sequence[int], worker: int, round_seconds: float, rounds: int
) -> dict[str, float]:
    """Return the medians over rounds of the 99th percentiles of reads: while the process of the worker is stopped, and
    then while it does pages."""
    times: list[_Round] = []
    async with reader.reading(others, 2 * rounds * round_seconds) as reading:
        for _ in range(rounds):
            os.kill(worker, signal.SIGSTOP)
            began = time.perf_counter()
            await asyncio.sleep(round_seconds)
            os.kill(worker, signal.SIGCONT)
            pages_began = time.perf_counter()
            await asyncio.sleep(round_seconds)
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
    so it has a state that the near ends have to learn. The jobs of these operations are cancelled: the job of the node
    itself does what they would."""
    others = [number % _SHARDS << SHARD_SHIFT | (1 << 41) + number for number in range(edges)]
    for start in range(0, edges, 500):
        await graph.assoc_add_many([(_NODE, WITH_STATES, other, 1) for other in others[start : start + 500]])
    inverse = _inverse_of_members(graph)
    for start in range(0, edges, 500):
        some = others[start : start + 500 : 10]
        jobs = await asyncio.gather(*(graph.node_set_state(other, State.NORMAL.label, [inverse]) for other in some))
        await asyncio.gather(*(job.cancel() for job in jobs))
    return others
