"""Scenario `replay`: the same operations in order, shuffled and doubled end in the same rows at both ends.

The operations add, archive, remove and restore edges and make them negative, each with a time of its own, some with the
same. They are made three times on edges of other nodes. Each time the rows of both ends are compared, column by column,
with the join of the operations, and the counts of all lists with the rows. Only the versions of rows, and when they
changed by the leader's clock, depend on the order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final, NamedTuple

from loadtest import options
from loadtest.region_cluster import RegionCluster, region_cluster
from loadtest.results import Conditions, ScenarioResult, at_most, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.client import ClientSettings, Graph, SomeFailed, connect
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.edge_states import EdgeRegisters, State
from tao.model.errors import RequestError
from tao.model.graph import EdgeKey
from tao.model.ids import SHARD_SHIFT

_SHAPE: Final = Shape(tiers=1, followers=1, leaders=2, databases=2, shards=8)
_TYPES: Final = ("subscribes", "subscribers")
_OPERATIONS_PER_EDGE: Final = 20
_EDGES_PER_NODE: Final = 10
_TIMES_PER_OPERATION: Final = 0.25
"""So few times that operations on an edge share some."""
_WRITERS: Final = 32
_BATCH: Final = 50
_NODES_APART: Final = 1 << 24
"""The distance between the nodes of two orders; more than there are nodes."""
_ORDERS: Final = ("in order", "shuffled", "doubled")
_TIMEOUT_SECONDS: Final = 30.0
_PAGE_ROWS: Final = 2_000


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(options.Options):
    """The options of `replay`."""

    operations: int = options.OPERATION_COUNT.default(100_000, toy=600)
    seed: int = options.SEED.default(1)


class _Operation(NamedTuple):
    """One operation on an edge. The ends are numbers of nodes. ``time``: of the edge; None: it is left."""

    user: int
    page: int
    state: State
    at: int
    time: int | None


Rows = dict[EdgeKey, EdgeRegisters]


async def run(settings: BenchSettings, progress: Progress, wanted: ReplayOptions) -> ScenarioResult:
    """Make the operations in each order, and compare. Raises `OperatorError`."""
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "replay", shape=_SHAPE, durability=Durability.RELAXED, log_level="warning"
    )
    random = Random(wanted.seed)
    ordered = sorted(_drawn(wanted.operations, random), key=lambda each: each.at)
    shuffled = random.sample(ordered, len(ordered))
    doubled = random.sample(ordered * 2, 2 * len(ordered))
    differing: dict[str, int] = {}
    per_second: dict[str, int] = {}
    async with region_cluster(cluster_settings, progress.step) as regions:
        settings.versions.update(regions.versions)
        client = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(str(regions.cluster.topology_path), settings=client) as graph:
            for place, (name, operations) in enumerate(zip(_ORDERS, (ordered, shuffled, doubled), strict=True)):
                progress.step(name, place / len(_ORDERS))
                began = time.perf_counter()
                await _make(graph, place, operations, in_order=name == "in order")
                per_second[name] = round(len(operations) / (time.perf_counter() - began))
                differing[name] = await _differing(regions, graph, place, _joined(regions, ordered))
    conditions: Conditions = {"operations": len(ordered), "writers": _WRITERS, "batch": _BATCH, "seed": wanted.seed}
    edges = len({(each.user, each.page) for each in ordered})
    demands = [at_most(f"rows and counts that are not the join, {name}", differing[name], 0) for name in _ORDERS]
    return result_of(conditions, {"edges": edges, "differing": differing, "per_second": per_second}, demands)


SCENARIO: Final = Scenario(
    name="replay",
    summary="the same operations on edges with states in order, shuffled and doubled: the same rows at both ends",
    run=run,
    options=ReplayOptions,
    help="""Make the same operations on edges with states in order, shuffled and doubled.

    The exit status is 1 when a row of either end, or a count, is another than the join of the operations.""",
    in_bench=False,
)


def _drawn(number: int, random: Random) -> Iterator[_Operation]:
    nodes = max(_EDGES_PER_NODE, number // _OPERATIONS_PER_EDGE // _EDGES_PER_NODE)
    now_us = time.time_ns() // 1_000
    times = max(1, int(number * _TIMES_PER_OPERATION))
    for number_of_operation in range(1, number + 1):
        state = random.choice([*State, State.NORMAL])
        user = random.randrange(nodes)
        page = nodes + (user + random.randrange(_EDGES_PER_NODE)) % nodes
        has_payload = state <= State.NEGATIVE and random.random() < 0.5
        at = now_us - random.randrange(times)
        yield _Operation(user, page, state, at, number_of_operation if has_payload else None)


def _node(number: int, place: int) -> int:
    """Return the id of a node for the order at this place."""
    return number % _SHAPE.shards << SHARD_SHIFT | place * _NODES_APART + number + 1


async def _make(graph: Graph, place: int, operations: Sequence[_Operation], *, in_order: bool) -> None:
    """Make the operations; with ``in_order`` those on each edge one after the other."""
    queues: list[list[_Operation]] = [[] for _ in range(_WRITERS)]
    for number, each in enumerate(operations):
        queues[hash((each.user, each.page)) % _WRITERS if in_order else number % _WRITERS].append(each)

    async def write(queue: list[_Operation]) -> None:
        for start in range(0, len(queue), _BATCH):
            edges = [
                (_node(each.user, place), _TYPES[0], _node(each.page, place), each.state.label, each.at, each.time)
                for each in queue[start : start + _BATCH]
            ]
            while True:
                try:
                    await graph.assoc_set_state_many(edges)
                    break
                except SomeFailed as failed:  # all are repeated, whatever their outcome: that must not matter
                    if any(isinstance(error, RequestError) for error in failed.errors.values()):
                        raise

    async with asyncio.TaskGroup() as group:
        for queue in queues:
            group.create_task(write(queue))


def _joined(regions: RegionCluster, operations: Sequence[_Operation]) -> Rows:
    """Return the rows of both ends that are the join of the operations, by numbers of nodes."""
    states: dict[tuple[int, int], tuple[int, int]] = {}
    payloads: dict[tuple[int, int], tuple[int, int]] = {}
    for user, page, state, at, edge_time in operations:
        edge = (user, page)
        states[edge] = max(states.get(edge, (0, 0)), (at, int(state)))
        if edge_time is not None:
            payloads[edge] = max(payloads.get(edge, (0, 0)), (at, edge_time))
    rows: Rows = {}
    near, far = (regions.schema.atype(name) for name in _TYPES)
    for edge, (state_us, own) in states.items():
        payload_us, edge_time = payloads.get(edge, (0, 0))
        registers = EdgeRegisters(own, state_us, payload_us, edge_time)
        shown = State(own) if payload_us else State.REMOVED
        rows[EdgeKey(edge[0], near.states[shown], edge[1])] = registers
        rows[EdgeKey(edge[1], far.states[shown], edge[0])] = registers
    return rows


async def _differing(regions: RegionCluster, graph: Graph, place: int, expected: Rows) -> int:
    """Return how many rows and counts of the order at this place are not the expected ones."""
    await regions.quiet(60.0)
    wanted = {
        EdgeKey(_node(key.id1, place), key.atype, _node(key.id2, place)): registers
        for key, registers in expected.items()
    }
    found = await _rows(regions, place)
    counts = Counter((key.id1, key.atype) for key in wanted)
    nodes = {key.id1 for key in wanted}
    wrong = sum(found.get(key) != wanted.get(key) for key in found.keys() | wanted.keys())
    for name in _TYPES:
        for state, number in enumerate(regions.schema.atype(name).states):
            lists = [(node, name, State(state).label) for node in sorted(nodes)]
            counted = await graph.assoc_count_many(lists, critical=True)
            wrong += sum(count != counts[node, number] for (node, _, _), count in zip(lists, counted, strict=True))
    return wrong


async def _rows(regions: RegionCluster, place: int) -> Rows:
    """Return the rows of the order at this place, from the databases."""
    rows: Rows = {}
    async with regions.access() as access:
        for shard in range(_SHAPE.shards):
            last = EdgeKey(_node(shard, place) - 1, 0, 0)
            while page := await access.scans.scan_registers(shard, last, _PAGE_ROWS):
                last = page[-1][0]
                rows.update(each for each in page if each[0].id1 < _node(shard, place + 1))
    return rows
