"""Scenario `states`: merges of edges with states beside plain adds, and a whole node archived and restored.

64 writers add edges of a type without states and of one with states, each with its inverse, in turns. Then a node gets
many edges, a tenth of them to nodes with states of their own. Every page of its job is done as fast as it goes, with
the timeouts of a worker; and once more at the pace of a worker, with the latencies of reads compared with those before.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Final

import msgspec

from loadtest.drivers import WrongAnswer
from loadtest.results import ScenarioResult, at_least, at_most, result_of
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from tao.client import Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.edge_states import State
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import NodeStateBody
from tao.worker.node_state import NodeStates
from tao.worker.runner import RunnerSettings
from tao.worker.server import graph_settings

PLAIN: Final = "peer"
WITH_STATES: Final = "member"
_SHARDS: Final = 8
_READERS: Final = 4
_PACED_PER_SECOND: Final = 1_000


@dataclass(frozen=True, slots=True)
class _Size:
    writers: int = 64
    rounds: int = 5
    round_seconds: float = 3.0
    edges: int = 100_000
    paced_seconds: float = 15.0


_TOY: Final = _Size(4, 1, 0.2, 600, 0.5)


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Measure merges, then a node of many edges. Raises `OperatorError`."""
    size = _TOY if settings.toy else _Size()
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "states",
        shape=Shape(tiers=1, followers=1, leaders=1, databases=1, shards=_SHARDS),
        schema_file=SCHEMA,
        durability=Durability.RELAXED,
    )
    client = graph_settings(RunnerSettings())
    async with (
        DevCluster(cluster_settings, progress.step) as cluster,
        connect(str(cluster.topology_path), settings=client) as graph,
    ):
        progress.step("adds and merges", 0.1)
        rates = await _rates(graph, size)
        progress.step("a node of many edges", 0.4)
        measured = {"merges": rates, "node": await _node(graph, size, progress)}
    node = measured["node"]
    return result_of(
        {"writers": size.writers, "edges": size.edges, "rounds": size.rounds, "shards": _SHARDS},
        measured,
        aims=[
            at_least("merges ÷ plain adds", rates["ratio"], 0.8),
            at_least("archive, edges a second", node["archive_per_second"], 5_000),
            at_least("restore, edges a second", node["restore_per_second"], 5_000),
            at_most("p99 of reads while a node is archived at 1,000/s ÷ before", node["reads_p99_ratio"], 1.5),
        ],
        notes=["A pair of an edge and its inverse counts as two edges of a node."],
    )


SCENARIO: Final = Scenario(
    name="states", summary="merges of edges with states beside plain adds; a whole node archived and restored", run=run
)


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


async def _node(graph: Graph, size: _Size, progress: Progress) -> dict[str, float]:
    """Return how fast a node is archived and restored, and what that does to reads at a worker's pace."""
    node = 1 << 40
    others = [number % _SHARDS << SHARD_SHIFT | (1 << 41) + number for number in range(size.edges)]
    for start in range(0, size.edges, 500):
        await graph.assoc_add_many([(node, WITH_STATES, other, 1) for other in others[start : start + 500]])
    # Each tenth far node has been archived and restored by itself, so it has a state that the near ends have to learn.
    inverse = graph.schema.inverse_of(graph.schema.atype(WITH_STATES))
    assert inverse is not None, "the scenario's type has an inverse"
    for start in range(0, size.edges, 500):
        some = others[start : start + 500 : 10]
        await asyncio.gather(*(graph.node_set_state(other, State.NORMAL.label, [inverse.name]) for other in some))
    found: dict[str, float] = {}
    for state, name in ((State.ARCHIVED, "archive"), (State.NORMAL, "restore")):
        progress.step(f"{name} a node", 0.7)
        await graph.node_set_state(node, state.label, [WITH_STATES])
        began = time.perf_counter()
        edges = await _walk(graph, node)
        found[f"{name}_per_second"] = round(2 * edges / (time.perf_counter() - began))
        assert await graph.assoc_count(node, WITH_STATES, state.label) == size.edges
    progress.step("reads beside a node", 0.9)
    before = await _reads_p99(graph, others, size.paced_seconds)
    await graph.node_set_state(node, State.ARCHIVED.label, [WITH_STATES])
    walking = asyncio.create_task(_walk(graph, node, _PACED_PER_SECOND))
    during = await _reads_p99(graph, others, size.paced_seconds)
    if not walking.cancel():
        raise WrongAnswer(f"nothing was moved beside the reads any more: the walk ended after {walking.result()} edges")
    found |= {"reads_p99_before_us": round(before * 1e6), "reads_p99_during_us": round(during * 1e6)}
    found["reads_p99_ratio"] = round(during / before, 2)
    return found


async def _walk(graph: Graph, node: int, per_second: float = float("inf")) -> int:
    """Do the pages of the job of a node, at most so many edges a second. Return how many edges there were."""
    kind = NodeStates()
    body = msgspec.msgpack.encode(NodeStateBody(node, (graph.schema.atype(WITH_STATES).number,)))
    cursor, edges, began = b"", 0, time.perf_counter()
    while True:
        page = await kind.page(graph, body, cursor, 500)
        cursor, edges = page.cursor, edges + page.edges
        if page.done:
            return edges
        ahead = 2 * edges / per_second - (time.perf_counter() - began)
        if ahead > 0:
            await asyncio.sleep(ahead)


async def _reads_p99(graph: Graph, others: list[int], seconds: float) -> float:
    """Return the 99th percentile of the latencies of reads of lists that do not change, in seconds."""
    latencies: list[float] = []
    random = Random(7)

    async def reader() -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            await graph.assoc_range(random.choice(others[:1000]), PLAIN, 0, 50)
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(0.002)

    await asyncio.gather(*(reader() for _ in range(_READERS)))
    return sorted(latencies)[len(latencies) * 99 // 100]
