"""Scenario `misses`: CPU of a follower, of its leader and of the database for a query that no cache has, by operation.

A graph is written, and follower and leader are restarted, so that both caches are empty. Then every object and list is
asked for exactly once: each query misses in the follower and in the leader, and is fetched from the database. Shapes
take turns; a round is a number of queries and not a time, because keys that nobody has asked for are used up. The
servers' counters prove that what was asked were misses.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from loadtest.client_process import StepReport, run_job
from loadtest.dataset import ITEM, LINK, VALUE_BYTES
from loadtest.drivers import WrongAnswer, closed
from loadtest.results import Figure, ScenarioResult, at_most
from loadtest.rounds import (
    MICRO,
    Comparison,
    Drive,
    Pace,
    Round,
    Source,
    Trial,
    TurnSamples,
    cpu_seconds,
    figures_of,
    take_all_turns,
)
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.table import listing
from loadtest.target import FOLLOWER, LEADER, follower_cluster, pids_of, versions_of
from tao.admin.server_stats import server_stats
from tao.client import ClientSettings, Graph, connect
from tao.devcluster.cluster import DevCluster

_DATABASE: Final = "db-1"
_EDGES: Final = 10
"""Edges of each list."""
_AWAITERS: Final = 64
_BATCH: Final = 100
_TIMEOUT_SECONDS: Final = 60.0
_ROWS_AT_ONCE: Final = 2_000
_FIRST_TIME: Final = 1_700_000_000
_TOY_PART: Final = 50
"""A round at toy size has one query in this many."""
_LEAST_MISSES: Final = 0.95
"""Share of the queries that must have missed, or the figures would mean nothing."""

_LOOK_SECONDS: Final = 0.5
_QUIET_LOOKS: Final = 4
"""Looks in a row that find the database at rest: its purge begins a second after the last write."""
_MOST_LOOKS: Final = 120
_QUIET_SHARE: Final = 0.01
"""Share of a core that the database takes at rest, where leaders check what they own."""

Operation = Literal["obj_get", "assoc_count", "assoc_range"]


class MissShape(msgspec.Struct, frozen=True):
    """One shape of load: ``awaiters`` ask ``batch`` queries at a time, ``queries`` in a round.

    The aims are microseconds of CPU for a query: what a miss may cost alone, and with others under way."""

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
    MissShape("obj_get", _AWAITERS, 1, 1_000, 60, 100),
    MissShape("assoc_count", _AWAITERS, 1, 1_000, 60, 100),
    MissShape("assoc_range", _AWAITERS, 1, 1_000, 60, 100),
    MissShape("obj_get", 1, _BATCH, 2_000, 60, 100),
    MissShape("assoc_count", 1, _BATCH, 1_000, 60, 100),
    MissShape("assoc_range", 1, _BATCH, 1_000, 60, 100),
    MissShape("obj_get", 1, 1, 300, 60, 150),
)


_COLUMNS: Final = {
    "misses": "{shape}",
    "queries/s": "{per_second:,.0f}",
    "follower µs": "{follower_us:.1f}",
    "leader µs": "{leader_us:.1f}",
    "database µs": "{database_us:.1f}",
    "client µs": "{client_us:.1f}",
    "p50 ms": "{p50_ms:.2f}",
    "p99 ms": "{p99_ms:.2f}",
}


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
        progress.step("waiting until the database has done what the writes left to it", 0.5)
        is_quiet = await _at_rest(pids[_DATABASE])
        job = MissJob(
            topology_file=str(cluster.topology_path),
            admins={"follower": cluster.admin(FOLLOWER), "leader": cluster.admin(LEADER)},
            pids={"follower": pids[FOLLOWER], "leader": pids[LEADER], "database": pids[_DATABASE]},
            shapes=shapes,
            keys=keys,
        )
        measured = await run_job(job, progress, settings.work_dir / "misses.log", dict[str, dict[str, float]])
    return ScenarioResult(
        conditions={"value_bytes": VALUE_BYTES, "edges_of_a_list": _EDGES, "rounds": settings.rounds},
        listings=[listing(_COLUMNS, ({"shape": name, **found} for name, found in measured.items()))],
        notes=[
            "Every key is asked for once, after follower and leader were restarted; CPU is for one query.",
            *([] if is_quiet else ["The database was not at rest: its CPU is not that of misses alone."]),
        ],
        aims=[
            at_most(
                f"a miss takes at most {bound:g} µs of the {role}",
                measured[shape.name][f"{role}_us"],
                bound,
                shape.name,
            )
            for shape in shapes
            for role, bound in (("follower", shape.follower_aim_us), ("leader", shape.leader_aim_us))
        ],
        measured=dict(measured),
        faults=[
            f"{name}: only {found[f'{role}_missed']:.0%} of the queries missed in the {role}"
            for name, found in measured.items()
            for role in job.admins
            if found[f"{role}_missed"] < _LEAST_MISSES
        ],
    )


SCENARIO: Final = Scenario(
    name="misses",
    summary="CPU of a follower and its leader per query that no cache has, by operation and in batches",
    run=run,
)


async def _at_rest(pid: int) -> bool:
    """Wait until the database is at rest: after many writes it takes a twentieth of a core for seconds, to purge old
    versions of rows. Returns whether it is."""
    quiet = 0
    for _ in range(_MOST_LOOKS):
        before = cpu_seconds(pid)
        await asyncio.sleep(_LOOK_SECONDS)
        quiet = quiet + 1 if cpu_seconds(pid) - before < _QUIET_SHARE * _LOOK_SECONDS else 0
        if quiet == _QUIET_LOOKS:
            return True
    return False


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
            ids = [[int(each) for each in await graph.obj_add_many([row] * shape.queries)] for shape in shapes]
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

    async def work(self, report: StepReport) -> dict[str, dict[str, float]]:
        """Return the figures by shape; CPU and misses are for one query. Raises `TaoError`."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with connect(self.topology_file, settings=settings) as graph:
            trials = []
            for number, shape in enumerate(self.shapes):
                drive = _drive(graph, shape, iter([of_round[number] for of_round in self.keys]))
                trials.append(Trial(shape.name, drive, self.pids, shape.batch, self._misses))
            comparison = Comparison("misses", tuple(trials))
            pace = Pace(len(self.keys) - 1, math.inf)
            (turns,) = await take_all_turns([comparison], pace, lambda step, done: report(step, 0.5 + done / 2))
        return {each.contestant: self._figures(each, turns[each.contestant]) for each in figures_of(comparison, turns)}

    def _figures(self, figure: Figure, rounds: Sequence[Round]) -> dict[str, float]:
        queries = figure.operations * figure.queries_per_operation
        cpu = {role: sum(each.server_cpu[role] for each in rounds) / queries for role in self.pids}
        missed = {role: sum(each.counts[role] for each in rounds) / queries for role in self.admins}
        return {
            "queries": queries,
            "per_second": round(figure.per_second, 1),
            **{f"{role}_us": round(MICRO * seconds, 1) for role, seconds in cpu.items()},
            "client_us": round(figure.client_cpu_us, 1),
            "p50_ms": round(figure.p50_us / 1000, 3),
            "p99_ms": round(figure.p99_us / 1000, 3),
            **{f"{role}_missed": share for role, share in missed.items()},
        }

    async def _misses(self) -> dict[str, float]:
        return {role: (await server_stats(admin))["misses"] for role, admin in self.admins.items()}


def _drive(graph: Graph, shape: MissShape, keys: Iterator[list[int]]) -> Drive:
    """Return the load of one round after the other: all the keys of a round, however long they take."""
    ask = _asking(graph, shape)

    async def drive(_until: float, samples: TurnSamples) -> None:
        ids = next(keys)
        batches = iter([ids[start : start + shape.batch] for start in range(0, len(ids), shape.batch)])
        await closed(ask, [batches] * shape.awaiters)(math.inf, samples)

    return drive


def _asking(graph: Graph, shape: MissShape) -> Callable[[list[int]], Awaitable[Source]]:
    """Return the call that asks for one batch of a shape, of one query or by the many-form, and checks its answers."""
    rest: tuple[Any, ...] = {"obj_get": (), "assoc_count": (LINK,), "assoc_range": (LINK, 0, _EDGES)}[shape.operation]
    # Any: the operations have different answers.
    one: Callable[..., Awaitable[Any]] = getattr(graph, shape.operation)
    many: Callable[..., Awaitable[Sequence[Any]]] = getattr(graph, f"{shape.operation}_many")

    def is_right(answer: Any) -> bool:
        if shape.operation == "obj_get":
            return answer is not None
        return (answer if isinstance(answer, int) else len(answer)) == _EDGES

    async def ask(ids: list[int]) -> Source:
        if shape.batch == 1:
            answers: Sequence[Any] = (await one(ids[0], *rest),)
        else:
            answers = await many([(id1, *rest) for id1 in ids] if rest else ids)
        if not all(map(is_right, answers)):
            raise WrongAnswer(f"a query for one of {ids[:3]} found something else than what was written")
        return Source.UNKNOWN

    return ask
