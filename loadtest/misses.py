"""Scenario `misses`: CPU of a follower, of its leader and of the database for a query that no cache has, by operation.

A graph is written, and follower and leader are restarted, so that both caches are empty. Then every object and list is
asked for exactly once: each query misses in the follower and in the leader, and is fetched from the database. Shapes
take turns; a round is a number of queries and not a time, because keys that nobody has asked for are used up. The
servers' counters prove that what was asked were misses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final, Literal

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import ITEM, LINK, VALUE_BYTES
from loadtest.results import Aim, Listing, ScenarioResult, at_most
from loadtest.rounds import cpu_seconds, percentile, settle_collector
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import FOLLOWER, LEADER, follower_cluster, pids_of, versions_of
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster
from tao.model.errors import OperatorError

_DATABASE: Final = "db-1"
_EDGES: Final = 10
"""Edges of each list."""
_AWAITERS: Final = 64
_BATCH: Final = 100
_TIMEOUT_SECONDS: Final = 60.0
_ROWS_AT_ONCE: Final = 2_000
_FIRST_TIME: Final = 1_700_000_000
_TOY_PART: Final = 50
"""At toy size a round has one query in so many."""
_LEAST_MISSES: Final = 0.95
"""Share of the queries that must have missed, or the figures would mean nothing."""

Operation = Literal["obj_get", "assoc_count", "assoc_range"]


class MissShape(msgspec.Struct, frozen=True):
    """One shape of load: ``awaiters`` ask ``batch`` queries at a time, ``queries`` in a round.

    The aims are microseconds of CPU for a query, some two fifths above what two busy cores of an AMD EPYC took."""

    operation: Operation
    awaiters: int
    batch: int
    queries: int
    follower_aim_us: float
    leader_aim_us: float

    @property
    def name(self) -> str:
        """The name of the shape in tables and in the JSON."""
        many = f"{self.operation}, batches of {self.batch}" if self.batch > 1 else self.operation
        return f"{many}, {self.awaiters} awaiter{'' if self.awaiters == 1 else 's'}"


_SHAPES: Final = (
    MissShape("obj_get", _AWAITERS, 1, 1_000, 60, 75),
    MissShape("assoc_count", _AWAITERS, 1, 1_000, 60, 75),
    MissShape("assoc_range", _AWAITERS, 1, 1_000, 75, 140),
    MissShape("obj_get", 1, _BATCH, 2_000, 50, 60),
    MissShape("assoc_count", 1, _BATCH, 1_000, 50, 60),
    MissShape("assoc_range", 1, _BATCH, 1_000, 65, 130),
    MissShape("obj_get", 1, 1, 300, 300, 450),
)


class MissTurn(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one round of one shape; CPU in seconds by process."""

    shape: str
    queries: int
    elapsed: float
    latencies: list[float]
    """Seconds of each call, which has as many queries as the shape's batch."""
    cpu: dict[str, float]
    client_cpu: float
    misses: dict[str, int]
    """Queries that missed in the follower, and in the leader."""


class MissFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one shape over all rounds; microseconds of CPU are for one query."""

    queries: int
    per_second: float
    """The median of the rounds."""
    follower_us: float
    leader_us: float
    database_us: float
    client_us: float
    p50_ms: float
    """Latency of a call."""
    p99_ms: float
    follower_missed: float
    """Misses of the follower for a query."""
    leader_missed: float


async def run(settings: BenchSettings, progress: Progress, _options: object) -> ScenarioResult:
    """Write a graph, empty the caches, and ask for each key once. Raises `OperatorError`."""
    part = _TOY_PART if settings.toy else 1
    shapes = [msgspec.structs.replace(each, queries=max(each.batch, each.queries // part)) for each in _SHAPES]
    async with follower_cluster(settings, "misses", progress) as cluster:
        settings.versions.update(versions_of(cluster.database(_DATABASE)))
        keys = await _write(cluster, shapes, settings.rounds + 1, progress)
        for name in (LEADER, FOLLOWER):
            await cluster.restart(name)
        pids = await pids_of(cluster)
        job = MissJob(
            topology_file=str(cluster.topology_path),
            admins={"follower": cluster.admin(FOLLOWER), "leader": cluster.admin(LEADER)},
            pids={"follower": pids[FOLLOWER], "leader": pids[LEADER], "database": pids[_DATABASE]},
            shapes=shapes,
            keys=keys,
        )
        turns = await run_job(job, progress, settings.work_dir / "misses.log", list[MissTurn])
    measured = {shape.name: _summary([turn for turn in turns if turn.shape == shape.name]) for shape in shapes}
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={"value_bytes": VALUE_BYTES, "edges_of_a_list": _EDGES, "rounds": settings.rounds},
        listings=[_listing(measured)],
        notes=["Every key is asked for once, after follower and leader were restarted; CPU is for one query."],
        aims=[aim for shape in shapes for aim in _aims(shape, measured[shape.name])],
        measured=msgspec.to_builtins(measured),
        faults=[
            f"{name}: only {each.follower_missed:.0%} and {each.leader_missed:.0%} missed in follower and leader"
            for name, each in measured.items()
            if min(each.follower_missed, each.leader_missed) < _LEAST_MISSES
        ],
    )


SCENARIO: Final = Scenario(
    name="misses",
    summary="CPU of a follower and its leader per query that no cache has, by operation and in batches",
    run=run,
)


def _summary(turns: Sequence[MissTurn]) -> MissFigures:
    queries = sum(turn.queries for turn in turns)
    latencies = [seconds for turn in turns for seconds in turn.latencies]

    def us(seconds: float) -> float:
        return round(1e6 * seconds / queries, 1)

    return MissFigures(
        queries=queries,
        per_second=round(median(turn.queries / turn.elapsed for turn in turns), 1),
        follower_us=us(sum(turn.cpu["follower"] for turn in turns)),
        leader_us=us(sum(turn.cpu["leader"] for turn in turns)),
        database_us=us(sum(turn.cpu["database"] for turn in turns)),
        client_us=us(sum(turn.client_cpu for turn in turns)),
        p50_ms=round(1e3 * percentile(latencies, 0.5), 3),
        p99_ms=round(1e3 * percentile(latencies, 0.99), 3),
        follower_missed=sum(turn.misses["follower"] for turn in turns) / queries,
        leader_missed=sum(turn.misses["leader"] for turn in turns) / queries,
    )


def _aims(shape: MissShape, found: MissFigures) -> list[Aim]:
    return [
        at_most(f"a miss takes at most {bound:g} µs of the {role}", value, bound, shape.name)
        for role, value, bound in (
            ("follower", found.follower_us, shape.follower_aim_us),
            ("leader", found.leader_us, shape.leader_aim_us),
        )
    ]


def _listing(measured: dict[str, MissFigures]) -> Listing:
    columns = ("misses", "queries/s", "follower µs", "leader µs", "database µs", "client µs", "p50 ms", "p99 ms")
    rows: list[tuple[str, ...]] = [
        (
            name,
            f"{each.per_second:,.0f}",
            *(f"{value:.1f}" for value in (each.follower_us, each.leader_us, each.database_us, each.client_us)),
            *(f"{value:.2f}" for value in (each.p50_ms, each.p99_ms)),
        )
        for name, each in measured.items()
    ]
    return Listing(title="", columns=columns, rows=rows)


async def _write(
    cluster: DevCluster, shapes: list[MissShape], rounds: int, progress: Progress
) -> list[list[list[int]]]:
    """Write the keys of every round: ids by round and by shape."""
    settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
    async with connect(str(cluster.topology_path), settings=settings) as graph:
        row = (ITEM, {"value": bytes(VALUE_BYTES)})
        keys: list[list[list[int]]] = []
        for number in range(rounds):
            progress.step(f"writing the keys of round {number + 1} of {rounds}", 0.5 * number / rounds)
            ids = [await graph.obj_add_many([row] * shape.queries) for shape in shapes]
            lists = [
                id1 for shape, mine in zip(shapes, ids, strict=True) if shape.operation != "obj_get" for id1 in mine
            ]
            ends = ids[0]
            edges = [
                (id1, LINK, ends[(place + index) % len(ends)], _FIRST_TIME + index)
                for place, id1 in enumerate(lists)
                for index in range(_EDGES)
            ]
            for start in range(0, len(edges), _ROWS_AT_ONCE):
                await graph.assoc_add_many(edges[start : start + _ROWS_AT_ONCE])
            keys.append(ids)
    return keys


class MissJob(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the keys of each round and shape; the first round warms and is not counted."""

    topology_file: str
    admins: dict[str, str]
    """Admin address of the follower and the leader."""
    pids: dict[str, int]
    """Process id of the follower, the leader and the database."""
    shapes: list[MissShape]
    keys: list[list[list[int]]]
    """Ids by round and by shape."""

    async def work(self, report: StepReport) -> list[MissTurn]:
        """Return the figures of all rounds but the first. Raises `TaoError`."""
        turns: list[MissTurn] = []
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(self.topology_file, settings=settings) as graph:
            for number, by_shape in enumerate(self.keys):
                for shape, ids in zip(self.shapes, by_shape, strict=True):
                    report(f"{shape.name}, round {number} of {len(self.keys) - 1}", 0.5 + 0.5 * number / len(self.keys))
                    turn = await self._turn(graph, shape, ids)
                    if number:
                        turns.append(turn)
        return turns

    async def _turn(self, graph: Graph, shape: MissShape, ids: list[int]) -> MissTurn:
        settle_collector()
        batches = iter([ids[start : start + shape.batch] for start in range(0, len(ids), shape.batch)])
        ask, latencies = _asking(graph, shape), list[float]()
        missed, cpu = await self._misses(), self._cpu()
        client_cpu, began = process_time(), perf_counter()
        await asyncio.gather(*(_ask_all(batches, ask, latencies) for _ in range(shape.awaiters)))
        elapsed, client_cpu = perf_counter() - began, process_time() - client_cpu
        cpu_after, missed_after = self._cpu(), await self._misses()
        return MissTurn(
            shape=shape.name,
            queries=len(ids),
            elapsed=elapsed,
            latencies=latencies,
            cpu={role: after - cpu[role] for role, after in cpu_after.items()},
            client_cpu=client_cpu,
            misses={role: after - missed[role] for role, after in missed_after.items()},
        )

    async def _misses(self) -> dict[str, int]:
        return {role: int((await server_stats(admin))["misses"]) for role, admin in self.admins.items()}

    def _cpu(self) -> dict[str, float]:
        return {role: cpu_seconds(pid) for role, pid in self.pids.items()}


async def _ask_all(
    batches: Iterator[list[int]], ask: Callable[[list[int]], Awaitable[bool]], latencies: list[float]
) -> None:
    for ids in batches:
        began = perf_counter()
        right = await ask(ids)
        latencies.append(perf_counter() - began)
        if not right:
            raise OperatorError(f"a query for one of {ids[:3]} found something else than what was written")


def _asking(graph: Graph, shape: MissShape) -> Callable[[list[int]], Awaitable[bool]]:
    """Return the call that asks for one batch of a shape and tells whether its answers are right."""
    one: dict[Operation, Callable[[int], Awaitable[Any]]] = {
        "obj_get": graph.obj_get,
        "assoc_count": lambda id1: graph.assoc_count(id1, LINK),
        "assoc_range": lambda id1: graph.assoc_range(id1, LINK, 0, _EDGES),
    }
    several: dict[Operation, Callable[[list[int]], Awaitable[Sequence[Any]]]] = {
        "obj_get": graph.obj_get_many,
        "assoc_count": lambda ids: graph.assoc_count_many([(id1, LINK) for id1 in ids]),
        "assoc_range": lambda ids: graph.assoc_range_many([(id1, LINK, 0, _EDGES) for id1 in ids]),
    }

    def is_right(answer: Any) -> bool:
        if shape.operation == "obj_get":
            return answer is not None
        return (answer if isinstance(answer, int) else len(answer)) == _EDGES

    async def ask(ids: list[int]) -> bool:
        if shape.batch == 1:
            return is_right(await one[shape.operation](ids[0]))
        return all(map(is_right, await several[shape.operation](ids)))

    return ask
