"""Scenario `converge`: random writes in both regions at once, with or without faults, and then nothing may differ.

Once writes stop and messages are delivered, every cache in every region equals its database, and the databases equal
each other. This measures no speed: any difference fails the run.

The writes are made to collide: few hot objects, both ends of pairs, all kinds of operations. A write that fails is
counted by its reason and never repeated: a write that is refused or lost on its way may leave nothing behind that
differs. Reads go on between the writes, since only what is cached can be wrong.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Final

from loadtest import options
from loadtest.faults.harness import ClientLoad, FaultRun, Outcome, carry_out_run
from loadtest.faults.injection import Injector, line_cut, stopped
from loadtest.faults.plan import FaultMoment, Plan, PlanStep, random_moments
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import RegionCluster
from loadtest.results import Conditions, ScenarioResult, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.client import Graph, RetryableError, TaoError
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Role, Shape
from tao.model.errors import RequestError
from tao.model.ids import SEQUENCE_PER_MS, make_id

_SHAPE: Final = Shape(regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16)
_TOY_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=2, mixed_mastership=True, shards=4)
_WRITERS_PER_REGION: Final = 48
_TOY_WRITERS_PER_REGION: Final = 8
_WRITING_SECONDS: Final = 600.0
"""Bound on the writing; a slower machine issues fewer writes, and the figures say so."""
_HOT_PER_SHARD: Final = 3
_TIMEOUT_SECONDS: Final = 5.0
_PAIRED: Final = ("friend", "likes", "liked_by", "follows", "followed_by", "page_likes")
_SINGLE: Final = ("comment", "note")
_MOVABLE: Final = ("friend", "likes", "page_likes")
"""Types without fields that differ: an edge may move between them, whatever was written with it."""
_RECENT: Final = 500
_COLD_IDS_PER_SHARD: Final = 250
_COLD_UNIX_MS: Final = 1_650_000_000_000
_FAILURE_PAUSE_SECONDS: Final = 0.2
"""The mean pause after a failed write: a cut line refuses writes faster than it could take them, and should not use up
the run."""
_ZEROS: Final = ("differences", "missing_objects")


@dataclass(frozen=True, kw_only=True)
class ConvergeOptions(options.Options):
    """The options of `converge`."""

    writes: int = options.WRITE_COUNT.default(100_000, toy=400)
    tailer_kills: int = options.TAILER_KILLS.default(0, toy=1)
    link_cuts: int = options.LINK_CUTS.default(0, toy=1)
    rtt_ms: float = options.RTT_MS.default(DEFAULT_RTT_MS, toy=10.0)
    seed: int = options.SEED.default(1)


async def run(settings: BenchSettings, progress: Progress, wanted: ConvergeOptions) -> ScenarioResult:
    """Write, wait until all is quiet, and compare. Raises `OperatorError`."""
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    writers = _TOY_WRITERS_PER_REGION if settings.toy else _WRITERS_PER_REGION
    load = CollidingLoad(wanted.writes)
    run_ = FaultRun(
        cluster=ClusterSettings(
            state_dir=settings.work_dir / "two",  # short: database servers keep a Unix socket in there
            shape=shape,
            rtt_ms=wanted.rtt_ms,
            durability=Durability.RELAXED,
            log_level="warning",
        ),
        load=partial(_begun, load, writers),
        plans=lambda injector, _, load: [
            _kills(injector, random_moments(wanted.tailer_kills, injector.chance), load),
            _cuts(random_moments(wanted.link_cuts, injector.chance), load),
        ],
        seed=wanted.seed,
        well_seconds=None,
    )
    outcome = await carry_out_run(run_, settings.versions, progress)
    measured = _measured(outcome, load, wanted.seed)
    conditions: Conditions = {
        "writers_per_region": writers,
        "hot_objects": _HOT_PER_SHARD * shape.shards,
        "shards": shape.shards,
        "rtt_ms": wanted.rtt_ms,
        "durability": "relaxed",
        "seed": wanted.seed,
    }
    return result_of(conditions, measured, outcome.demands(measured, _ZEROS), examples=outcome.record.examples)


SCENARIO: Final = Scenario(
    name="converge",
    summary="random writes in two regions at once; afterwards no cache, database or region may differ from another",
    run=run,
    options=ConvergeOptions,
    help="""Make random writes in two regions at once, with faults; afterwards nothing may differ.

    The JSON has what `measured` of the scenario has in a report of `bench`, its aims, and the machine. The exit status
    is 1 when anything differs.""",
)


def _measured(outcome: Outcome, load: CollidingLoad, seed: int) -> dict[str, Any]:
    # Any: the JSON's values differ in kind.
    record = outcome.record
    kinds = Counter(fault.kind for fault in record.faults)
    return {
        "writes": {"issued": load.issued, "acknowledged": record.acknowledged},
        "failed": dict(record.refused + record.unknown),
        "reads": record.reads,
        "failed_reads": dict(load.failed_reads),
        "tailer_kills": kinds["tailer_kill"],
        "link_cuts": kinds["link_cut"],
        "seed": seed,
        "writing_seconds": round(outcome.busy_seconds, 3),
        "quiet_seconds": round(outcome.quiet_seconds, 3),
        "compared": outcome.compared,
        "differences": outcome.differences,
        "missing_objects": load.missing_objects,
        "examples": record.examples,
    }


def _kills(injector: Injector, moments: list[FaultMoment], load: ClientLoad) -> Plan:
    tailers = injector.regions.named(Role.TAILER)
    for moment in moments:
        tailer = tailers[moment.which % len(tailers)]
        kill = partial(stopped, victim=partial(_named, name=tailer))
        yield [PlanStep("tailer_kill", kill, moment.reached(lambda: load.describe()[1]), moment.away_seconds)]


def _named(_injector: Injector, name: str) -> str:
    return name


def _cuts(moments: list[FaultMoment], load: ClientLoad) -> Plan:
    """Cut the line: every other kind refuses connections, the rest swallows what is sent."""
    for moment in moments:
        cut = partial(line_cut, silent=moment.which % 2 == 0)
        yield [PlanStep("link_cut", cut, moment.reached(lambda: load.describe()[1]), moment.away_seconds)]


class CollidingLoad(ClientLoad):
    """Writers of both regions: each makes a write, perhaps a read, and the next write, until all are issued."""

    def __init__(self, to_issue: int) -> None:
        super().__init__()
        self.to_issue = to_issue
        self.issued = 0
        self.failed_reads: Final = Counter[str]()
        self.kept: Final[set[int]] = set()
        """Objects whose addition was acknowledged and that nobody deleted: all of them must exist at the end."""
        self.missing_objects: int | None = None
        """How many of these the databases do not have; None before they are asked."""
        self._record = RunRecord()
        self._graph: Graph | None = None

    def take(self) -> bool:
        """Issue one more write; returns whether there is one left."""
        if self.issued >= self.to_issue:
            return False
        self.issued += 1
        return True

    def begin_all(self, graph: Graph, writers: Sequence[Writer], record: RunRecord) -> None:
        """Begin to write; ``graph`` looks for lost objects at the end."""
        self._graph, self._record = graph, record
        record.begin()
        for writer in writers:
            self.begin(writer.run())

    def describe(self) -> tuple[str, float]:
        """See `ClientLoad`."""
        record, kinds = self._record, Counter(fault.kind for fault in self._record.faults)
        failed = record.refused.total() + record.unknown.total()
        faults = f"{kinds['tailer_kill']} kills, {kinds['link_cut']} cuts"
        by_count = self.issued / self.to_issue if self.to_issue else 1.0
        return f"{self.issued:,} writes, {failed:,} failed, {faults}", max(by_count, record.now() / _WRITING_SECONDS)

    async def stop(self) -> None:
        """Wait until all writes are issued, for a bounded time, and pending ones are answered."""
        await asyncio.wait(self._tasks, timeout=max(0.0, _WRITING_SECONDS - self._record.now()))
        self.to_issue = self.issued
        await super().stop()

    async def differences(self) -> int:
        """Count the acknowledged objects that the databases do not have."""
        assert self._graph is not None
        self.missing_objects = (await self._graph.obj_get_many(sorted(self.kept), critical=True)).count(None)
        return self.missing_objects


@asynccontextmanager
async def _begun(
    load: CollidingLoad, writers: int, regions: RegionCluster, record: RunRecord, chance: Random
) -> AsyncIterator[CollidingLoad]:
    shape = regions.cluster.record.shape
    async with AsyncExitStack() as stack:
        graphs = {
            region: [await regions.graph(region, tier, stack, _TIMEOUT_SECONDS) for tier in shape.tier_names]
            for region in shape.region_names
        }
        first = next(iter(graphs.values()))[0]
        ground = await prepare(first, regions.routes.shards, _HOT_PER_SHARD)
        crowd = [
            Writer(
                of_region[number % len(of_region)], of_region, ground, load, record, Random(chance.randrange(1 << 62))
            )
            for of_region in graphs.values()
            for number in range(writers)
        ]
        load.begin_all(first, crowd, record)
        yield load


@dataclass(frozen=True, slots=True)
class Playground:
    """The ids that all writers of both regions write to."""

    hot: Sequence[int]
    cold: Sequence[int]
    """Ends of edges that are no objects: the ends of an edge are not looked up."""
    edges: deque[tuple[int, str, int]] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Edges that were added recently."""
    objects: deque[int] = field(default_factory=lambda: deque(maxlen=_RECENT))


async def prepare(graph: Graph, shards: int, hot_per_shard: int) -> Playground:
    """Create the hot objects, the same number on every shard, so that each region is master of as many."""
    ids = [await graph.reserve_ids(hot_per_shard, shard=shard) for shard in range(shards)]
    hot = [object_id for of_shard in ids for object_id in of_shard]
    await graph.obj_add_many([("user", {"name": "hot"}, None, object_id) for object_id in hot])
    cold = [
        make_id(shard, _COLD_UNIX_MS + number // SEQUENCE_PER_MS, number % SEQUENCE_PER_MS)
        for shard in range(shards)
        for number in range(_COLD_IDS_PER_SHARD)
    ]
    return Playground(hot, cold)


@dataclass(frozen=True, slots=True)
class Writer:
    """One of many writers of a region."""

    graph: Graph
    reading: Sequence[Graph]
    """A graph of each tier of the same region."""
    ground: Playground
    load: CollidingLoad
    record: RunRecord
    chance: Random

    async def run(self) -> None:
        """Write until all writes are issued."""
        load, record = self.load, self.record
        while load.take():
            number, began = load.issued, record.now()
            try:
                await self._write(number)
                record.acknowledged += 1
            except TaoError as error:
                record.failed_write(
                    error, began, f"write {number}", unknown=not isinstance(error, RetryableError | RequestError)
                )
                await asyncio.sleep(2 * _FAILURE_PAUSE_SECONDS * self.chance.random())
            if self.chance.random() < 0.5:
                await self._read()

    async def _write(self, number: int) -> None:
        chance, graph, ground = self.chance, self.graph, self.ground
        kind = chance.random()
        if kind < 0.45:
            edge = self._any_edge()
            fields = {"text": f"n{number}"} if edge[1] == "note" else None
            await graph.assoc_add(*edge, number, fields)
            ground.edges.append(edge)
        elif kind < 0.60:
            await graph.assoc_delete(*self._known_edge())
        elif kind < 0.68:
            id1, atype, id2 = self._known_edge()
            if atype not in _MOVABLE:
                atype = chance.choice(_MOVABLE)
            await graph.assoc_change_type(id1, atype, id2, chance.choice(_MOVABLE))
        elif kind < 0.83:
            await graph.obj_update(chance.choice(ground.hot), {"home": f"h{number}"}, "user")
        elif kind < 0.88 and ground.objects:
            await graph.obj_update(chance.choice(ground.objects), {"home": f"h{number}"}, "user")
        elif kind < 0.92 and ground.objects:
            doomed = chance.choice(ground.objects)
            self.load.kept.discard(doomed)  # also when the deletion's outcome is unknown
            ground.objects.remove(doomed)
            await graph.obj_delete(doomed)
        else:
            added = await graph.obj_add("user", {"name": f"u{number}"})
            ground.objects.append(added)
            self.load.kept.add(added)

    async def _read(self) -> None:
        chance, graph = self.chance, self.chance.choice(self.reading)
        id1, atype, id2 = self._known_edge()
        try:
            await asyncio.gather(
                graph.assoc_range(id1, atype, 0, chance.choice((1, 50))),
                graph.assoc_count(id2, chance.choice(_PAIRED)),
                graph.assoc_get(id1, atype, [id2]),
                graph.obj_get(chance.choice(self.ground.hot)),
            )
            self.record.reads += 4
        except TaoError as error:
            self.load.failed_reads[error.reason] += 1

    def _any_edge(self) -> tuple[int, str, int]:
        chance, ground = self.chance, self.ground
        id1 = chance.choice(ground.hot if chance.random() < 0.7 else ground.cold)
        id2 = chance.choice(ground.hot if chance.random() < 0.5 else ground.cold)
        return id1, chance.choice(_SINGLE if chance.random() < 0.1 else _PAIRED), id2

    def _known_edge(self) -> tuple[int, str, int]:
        edges = self.ground.edges
        return self.chance.choice(edges) if edges and self.chance.random() < 0.7 else self._any_edge()
