"""Scenario `converge`: random writes in both regions at once, with or without faults, and then nothing may differ.

Once writes stop and messages are delivered, every cache in every region equals its database, and the databases equal
each other. This measures no speed: any difference fails the run.

The writes are made to collide: few hot objects, both ends of pairs, all kinds of operations. A write that fails is
counted by its reason and never repeated: a write that is refused or lost on its way may leave nothing behind that
differs. Reads go on between the writes, since only what is cached can be wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Final

import msgspec

from loadtest.faults.injection import Injector, line_cut, stopped
from loadtest.faults.plan import FaultMoment, Plan, PlanStep, carry_out, random_moments
from loadtest.faults.record import RunRecord
from loadtest.options import LINK_CUTS, RTT_MS, SEED, TAILER_KILLS, WRITE_COUNT, Options
from loadtest.results import Aim, Quantity, ScenarioResult, at_most
from loadtest.scenario import BenchSettings, Progress, Scenario
from loadtest.target import versions_of
from loadtest.two_regions import Differences, TwoRegions, two_regions
from tao.client import Graph, TaoError
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Shape
from tao.model.ids import SEQUENCE_PER_MS, make_id

_SHAPE: Final = Shape(regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16)
_TOY_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=2, mixed_mastership=True, shards=4)
_TOY_WRITES: Final = 400
_WRITERS_PER_REGION: Final = 48
_TOY_WRITERS_PER_REGION: Final = 8
_WRITING_SECONDS: Final = 600.0
"""Bound on the writing; a slower machine issues fewer writes, and the figures say so."""
_HOT_PER_SHARD: Final = 3
_TIMEOUT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 120.0
_STEP_SECONDS: Final = 0.5
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


@dataclass(frozen=True, kw_only=True)
class ConvergeOptions(Options):
    """The options of `converge`."""

    writes: int = WRITE_COUNT.default(100_000)
    tailer_kills: int = TAILER_KILLS.default(0)
    link_cuts: int = LINK_CUTS.default(0)
    rtt_ms: float = RTT_MS.default(DEFAULT_RTT_MS)
    seed: int = SEED.default(1)

    def at_toy_size(self) -> ConvergeOptions:
        """Return the same options with few writes and faults."""
        return replace(
            self,
            writes=min(self.writes, _TOY_WRITES),
            tailer_kills=min(self.tailer_kills, 1),
            link_cuts=min(self.link_cuts, 1),
            rtt_ms=min(self.rtt_ms, 10.0),
        )


class Converged(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run, as its JSON has it."""

    writes: dict[str, int]
    """Writes that were issued, and that were acknowledged."""
    failed: dict[str, int]
    """Writes that failed, by the error's reason."""
    reads: int
    failed_reads: dict[str, int]
    tailer_kills: int
    link_cuts: int
    seed: int
    writing_seconds: float
    quiet_seconds: float
    """From the last answer to a write until everything written had arrived everywhere."""
    compared: dict[str, int]
    differences: dict[str, int]
    """Differences by kind; empty when there is none."""
    missing_objects: int
    """Objects whose addition was acknowledged, that nobody deleted, and that are not in the database."""
    examples: list[str]


async def run(settings: BenchSettings, progress: Progress, wanted: ConvergeOptions) -> ScenarioResult:
    """Write, wait until all is quiet, and compare. Raises `OperatorError`."""
    if settings.toy:
        wanted = wanted.at_toy_size()
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    writers = _TOY_WRITERS_PER_REGION if settings.toy else _WRITERS_PER_REGION
    cluster_settings = ClusterSettings(
        state_dir=settings.work_dir / "two",  # short: database servers keep a Unix socket in there
        shape=shape,
        rtt_ms=wanted.rtt_ms,
        durability=Durability.RELAXED,
        log_level="warning",
    )
    async with two_regions(cluster_settings, progress.step) as regions:
        database = shape.database_server(shape.region_names[0], shape.database_names[0])
        settings.versions.update(versions_of(regions.cluster.database(database)))
        found = await _converge(regions, wanted, writers, progress)
    return ScenarioResult(
        summary=SCENARIO.summary,
        conditions={
            "writers_per_region": writers,
            "hot_objects": _HOT_PER_SHARD * shape.shards,
            "shards": shape.shards,
            "rtt_ms": wanted.rtt_ms,
            "durability": "relaxed",
            "seed": wanted.seed,
        },
        quantities=_quantities(found),
        aims=_aims(found),
        measured=msgspec.to_builtins(found),
        faults=faults_in(found),
    )


SCENARIO: Final = Scenario(
    name="converge",
    summary="random writes in two regions at once; afterwards no cache, database or region may differ from another",
    run=run,
    options=ConvergeOptions,
    help="""Make random writes in two regions at once, with faults; afterwards nothing may differ.

    The JSON has what `measured` of the scenario has in a report of `bench`, its aims, and the machine. The exit status
    is 1 when anything differs.""",
)


def _quantities(found: Converged) -> list[Quantity]:
    rate = found.writes["acknowledged"] / found.writing_seconds if found.writing_seconds else 0.0
    return [
        Quantity(name="writes issued", value=found.writes["issued"], unit="writes"),
        Quantity(name="acknowledged", value=found.writes["acknowledged"], unit="writes"),
        *(Quantity(name=f"failed as {reason}", value=count, unit="writes") for reason, count in found.failed.items()),
        Quantity(name="tailers killed", value=found.tailer_kills, unit="times"),
        Quantity(name="line cut", value=found.link_cuts, unit="times"),
        Quantity(name="rate of acknowledged writes", value=rate, unit="per_second"),
        Quantity(name="from the last write until all is quiet", value=found.quiet_seconds, unit="seconds"),
        *(Quantity(name=kind, value=count, unit="compared") for kind, count in found.compared.items()),
        Quantity(name="differences", value=sum(found.differences.values()), unit="found"),
    ]


def _aims(found: Converged) -> list[Aim]:
    return [
        at_most("no difference", sum(found.differences.values()), 0),
        at_most("no acknowledged object lost", found.missing_objects, 0),
    ]


def faults_in(found: Converged) -> list[str]:
    """List what is wrong, with examples; empty when nothing is."""
    faults = [f"{kind}: {count:,}" for kind, count in found.differences.items()]
    if found.missing_objects:
        faults.append(f"acknowledged objects that are lost: {found.missing_objects:,}")
    return [*faults, *found.examples] if faults else []


async def _converge(regions: TwoRegions, wanted: ConvergeOptions, writers: int, progress: Progress) -> Converged:
    tally, record, chance = WriteTally(wanted.writes), RunRecord(), Random(wanted.seed)
    shape = regions.cluster.record.shape
    async with AsyncExitStack() as stack:
        graphs = {
            region: [await regions.graph(region, tier, stack, _TIMEOUT_SECONDS) for tier in shape.tier_names]
            for region in shape.region_names
        }
        first = next(iter(graphs.values()))[0]
        ground = await prepare(first, regions.routes.shards, _HOT_PER_SHARD)
        crowd = [
            Writer(of_region[number % len(of_region)], of_region, ground, tally, Random(chance.randrange(1 << 62)))
            for of_region in graphs.values()
            for number in range(writers)
        ]
        record.begin()

        def share() -> float:
            by_count = tally.issued / wanted.writes if wanted.writes else 1.0
            return max(by_count, record.now() / _WRITING_SECONDS)

        injector = Injector(regions.cluster, chance)
        kills = _kills(regions, random_moments(wanted.tailer_kills, chance), share)
        cuts = _cuts(random_moments(wanted.link_cuts, chance), share)
        showing = asyncio.create_task(_show(progress, tally, record, share))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_write_all(crowd, tally))
                group.create_task(carry_out(kills, injector, record, None))
                group.create_task(carry_out(cuts, injector, record, None))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            showing.cancel()
        writing_seconds, ended = record.now(), time.monotonic()
        progress.step("waiting until all is quiet", 0.8)
        await regions.quiet(_QUIET_SECONDS)
        quiet_seconds = time.monotonic() - ended
        lost = await missing(first, tally.kept)
    differences = await regions.differences(lambda server, entries: progress.step(f"{server}: {entries:,}", 0.9))
    return _converged(tally, record, wanted.seed, (writing_seconds, quiet_seconds), lost, differences)


def _kills(regions: TwoRegions, moments: list[FaultMoment], share: Callable[[], float]) -> Plan:
    for moment in moments:
        tailer = regions.tailers[moment.which % len(regions.tailers)]
        kill = partial(stopped, victim=partial(_named, name=tailer))
        yield [PlanStep("tailer_kill", kill, moment.reached(share), moment.away_seconds)]


def _named(_injector: Injector, name: str) -> str:
    return name


def _cuts(moments: list[FaultMoment], share: Callable[[], float]) -> Plan:
    """Cut the line: every other kind refuses connections, the rest swallows what is sent."""
    for moment in moments:
        cut = partial(line_cut, silent=moment.which % 2 == 0)
        yield [PlanStep("link_cut", cut, moment.reached(share), moment.away_seconds)]


async def _write_all(crowd: list[Writer], tally: WriteTally) -> None:
    """Let all write at once, for a bounded time; pending writes are waited for."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(writer.run()) for writer in crowd]
        await asyncio.wait(tasks, timeout=_WRITING_SECONDS)
        tally.close()


def _count(record: RunRecord, kind: str) -> int:
    return sum(fault.kind == kind for fault in record.faults)


async def _show(progress: Progress, tally: WriteTally, record: RunRecord, share: Callable[[], float]) -> None:
    while True:
        faults = f"{_count(record, 'tailer_kill')} kills, {_count(record, 'link_cut')} cuts"
        progress.step(f"{tally.issued:,} writes, {tally.failed.total():,} failed, {faults}", 0.75 * min(1.0, share()))
        await asyncio.sleep(_STEP_SECONDS)


def _converged(
    tally: WriteTally, record: RunRecord, seed: int, seconds: tuple[float, float], lost: int, differences: Differences
) -> Converged:
    """Return the result; ``seconds`` are those of the writing, and until all was quiet."""
    return Converged(
        writes={"issued": tally.issued, "acknowledged": tally.acknowledged},
        failed=dict(tally.failed),
        reads=tally.reads,
        failed_reads=dict(tally.failed_reads),
        tailer_kills=_count(record, "tailer_kill"),
        link_cuts=_count(record, "link_cut"),
        seed=seed,
        writing_seconds=round(seconds[0], 3),
        quiet_seconds=round(seconds[1], 3),
        compared=differences.compared,
        differences=differences.kinds,
        missing_objects=lost,
        examples=differences.examples,
    )


@dataclass(slots=True)
class WriteTally:
    """The outcomes of the writes of one run."""

    to_issue: int
    issued: int = 0
    acknowledged: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    reads: int = 0
    failed_reads: Counter[str] = field(default_factory=Counter)
    kept: set[int] = field(default_factory=set)
    """Objects whose addition was acknowledged and that nobody deleted: all of them must exist at the end."""

    def take(self) -> bool:
        """Issue one more write; returns whether there is one left."""
        if self.issued >= self.to_issue:
            return False
        self.issued += 1
        return True

    def close(self) -> None:
        """Issue no more writes."""
        self.to_issue = self.issued


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


class Writer:
    """One of many writers of a region: a write, perhaps a read, the next write."""

    def __init__(
        self, graph: Graph, reading: Sequence[Graph], ground: Playground, tally: WriteTally, chance: Random
    ) -> None:
        """``reading`` has a graph of each tier of the same region."""
        self._graph: Final = graph
        self._reading: Final = reading
        self._ground: Final = ground
        self._tally: Final = tally
        self._chance: Final = chance

    async def run(self) -> None:
        """Write until all writes are issued."""
        tally = self._tally
        while tally.take():
            try:
                await self._write(tally.issued)
                tally.acknowledged += 1
            except TaoError as error:
                tally.failed[error.reason] += 1
                await asyncio.sleep(2 * _FAILURE_PAUSE_SECONDS * self._chance.random())
            if self._chance.random() < 0.5:
                await self._read()

    async def _write(self, number: int) -> None:
        chance, graph, ground = self._chance, self._graph, self._ground
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
            self._tally.kept.discard(doomed)  # also when the deletion's outcome is unknown
            ground.objects.remove(doomed)
            await graph.obj_delete(doomed)
        else:
            added = await graph.obj_add("user", {"name": f"u{number}"})
            ground.objects.append(added)
            self._tally.kept.add(added)

    async def _read(self) -> None:
        chance, graph = self._chance, self._chance.choice(self._reading)
        id1, atype, id2 = self._known_edge()
        try:
            await asyncio.gather(
                graph.assoc_range(id1, atype, 0, chance.choice((1, 50))),
                graph.assoc_count(id2, chance.choice(_PAIRED)),
                graph.assoc_get(id1, atype, [id2]),
                graph.obj_get(chance.choice(self._ground.hot)),
            )
            self._tally.reads += 4
        except TaoError as error:
            self._tally.failed_reads[error.reason] += 1

    def _any_edge(self) -> tuple[int, str, int]:
        chance, ground = self._chance, self._ground
        id1 = chance.choice(ground.hot if chance.random() < 0.7 else ground.cold)
        id2 = chance.choice(ground.hot if chance.random() < 0.5 else ground.cold)
        return id1, chance.choice(_SINGLE if chance.random() < 0.1 else _PAIRED), id2

    def _known_edge(self) -> tuple[int, str, int]:
        edges = self._ground.edges
        return self._chance.choice(edges) if edges and self._chance.random() < 0.7 else self._any_edge()


async def missing(graph: Graph, kept: set[int]) -> int:
    """Count the acknowledged objects that the databases do not have."""
    found = await graph.obj_get_many(sorted(kept), critical=True)
    return found.count(None)
