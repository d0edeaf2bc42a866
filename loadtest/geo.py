"""Scenario `geo`: writes, their visibility, and reads of two regions that lie a round trip apart.

One database whose master is in the first region, full local durability, asynchronous replication between the regions, a
delay line that adds half of the round trip each way. Rates are constant and low: latencies are measured, not capacity.
Reads take turns with and without the round trip on one cluster, so that nothing else differs between the two. A running
cluster has the round trip that it has, which its operator states.

Visibility is sampled, since looking for a value is load, too: for every tenth write a follower in the other region that
has the object cached is asked for the acknowledged value, first when it could have arrived at the earliest and then
every two milliseconds. The answer's arrival counts, so a figure is late by a poll and a read at most, never early.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from secrets import randbelow
from time import perf_counter
from typing import Any, Final, Literal

import msgspec

from loadtest import options
from loadtest.client_process import StepReport, run_job
from loadtest.conditions import within
from loadtest.latencies import Latencies, LatencyRecording
from loadtest.open_loop import LATE, sample_at_rate
from loadtest.region_cluster import MASTER, REMOTE, region_cluster
from loadtest.results import ScenarioResult, at_most, listings_of
from loadtest.rounds import settle_collector
from loadtest.scenario import SCHEMA, BenchSettings, Progress, Scenario
from loadtest.target import running_topology
from tao.client import ClientSettings, Graph, Object, connect
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Shape
from tao.devcluster.line_control import SetRoundTrip, ask_line
from tao.model.errors import DeadlineExceeded, OperatorError, TaoError
from tao.model.ids import SEQUENCE_PER_MS, make_id

WRITES_PER_SECOND: Final = 50
"""In each region; half update an object, half add an edge with its inverse."""
VISIBLE_WRITES_PER_SECOND: Final = 500
READS_PER_SECOND: Final = 500
MISSES_PER_SECOND: Final = 50
POLL_SECONDS: Final = 0.002
_SAMPLED_EVERY: Final = 10
_EARLIEST: Final = 0.4
"""Part of the round trip before which nothing can have arrived: it takes half of one."""
_GIVE_UP_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.05
_TIMEOUT_SECONDS: Final = 10.0
_WARM_UP_SECONDS: Final = 2.0
_UNREAD_UNIX_MS: Final = 1_600_000_000_000
_SAMPLES_KEPT: Final = 100_000
_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=1, databases=1, shards=8)
_TOY_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=1, shards=8)
_OBJECTS: Final = 2_000
_TOY_OBJECTS: Final = 50
_TURNS: Final = 3
_SAME_REGION_MS: Final = 5.0
_REMOTE_MS: Final = 6.0
_VISIBLE_P50_MS: Final = 15.0
_VISIBLE_P99_MS: Final = 100.0
_SEEDS: Final = 1_000_000
_REMOTE_HITS: Final = "remote_region"
_REMOTE_MISSES: Final = "remote_region_misses"
GeoPhase = Literal["writes", "visible", "reads"]
_OF_A_RUNNING_ONE: Final = (
    "What was written stays in the running cluster; its round trip is what its operator says (--rtt-ms), and cannot be "
    "taken away for a comparison."
)
_NOTES: Final = [
    "Latencies count from the intended start of an operation, at a constant rate.",
    (
        "Visibility: of every tenth write, from its acknowledgement to the answer of a follower in the other region "
        f"with the new value; asked for every {1000 * POLL_SECONDS:g} ms, so a figure is late by that and a read."
    ),
]


@dataclass(frozen=True, kw_only=True)
class GeoOptions(options.Options):
    """The options of `geo`."""

    rtt_ms: float = options.RTT_MS.default(DEFAULT_RTT_MS)
    seconds: float = options.SECONDS.default(20.0, toy=0.5, help="Measured seconds of each phase.")
    """Measured seconds of each phase. At 50 writes a second ten samples of 20 s lie above the 99th percentile."""
    topology: Path | None = options.TOPOLOGY.default(None)


async def run(settings: BenchSettings, progress: Progress, wanted: GeoOptions) -> ScenarioResult:
    """Measure writes, visibility and reads. Raises `OperatorError`."""
    own = ClusterSettings(
        state_dir=settings.work_dir / "geo",
        shape=_TOY_SHAPE if settings.toy else _SHAPE,
        schema_file=SCHEMA,
        rtt_ms=wanted.rtt_ms,
        durability=Durability.FULL,
        log_level="warning",
    )
    async with _regions_for(wanted.topology, own, settings, progress) as regions:
        measured = await _measure(regions, settings, progress, wanted.seconds, wanted.rtt_ms)
    visible, rtt_ms = measured["visible_ms"], wanted.rtt_ms
    aims = [
        *(
            at_most(f"`write_ms.{where}.avg` {bound:,.1f} ms at most", measured["write_ms"][where]["avg"], bound)
            for where, bound in (("same_region", _SAME_REGION_MS), ("remote_region", rtt_ms + _REMOTE_MS))
        ),
        *(
            at_most(f"`visible_ms.{part}` {bound:,.1f} ms at most", visible[part], bound)
            for part, bound in (("p50", rtt_ms / 2 + _VISIBLE_P50_MS), ("p99", rtt_ms / 2 + _VISIBLE_P99_MS))
        ),
    ]
    return ScenarioResult(
        conditions={
            "rtt_ms": rtt_ms,
            "writes_per_second_and_region": WRITES_PER_SECOND,
            "visible_writes_per_second": VISIBLE_WRITES_PER_SECOND,
            "reads_per_second": READS_PER_SECOND,
            "misses_per_second": MISSES_PER_SECOND,
            "phase_seconds": wanted.seconds,
            "durability": "full, asynchronous between regions" if wanted.topology is None else "the cluster's own",
        },
        listings=listings_of(measured),
        notes=[*_NOTES, *([_OF_A_RUNNING_ONE] if wanted.topology else [])],
        aims=aims,
        measured=measured,
    )


SCENARIO: Final = Scenario(
    name="geo",
    summary="two regions: latency of writes in either, visibility in the other, reads with and without round trip",
    run=run,
    options=GeoOptions,
    help="""Measure latencies of two regions that lie a round trip apart.

    With --topology, --rtt-ms states how far apart the running cluster's regions are. The JSON has what `measured` of
    the scenario has in a report of `bench`, its aims, and the machine.""",
    has_plot=True,
)


@dataclass(frozen=True, slots=True)
class Regions:
    """The regions that are measured."""

    topology_file: str
    shards: int
    master: str
    """The region of all databases' masters."""
    remote: str
    line: Path | None = None
    """The control of the delay line between them; None where nobody can change the distance."""


def running_regions(topology_file: Path) -> Regions:
    """Return a running cluster's region of all masters, and the first of its other regions.

    Raises `OperatorError` when there is no other region or masters are in several, and what `running_topology` raises.
    """
    topology = running_topology(topology_file)
    masters = {database.master_region for database in topology.databases}
    others = [region.name for region in topology.regions if region.name not in masters]
    if len(masters) != 1 or not others:
        raise OperatorError(
            f"geo wants all masters in one region, and another region: {topology_file} has masters in "
            f"{', '.join(sorted(masters))}, and without any {', '.join(others) or 'no region'}"
        )
    return Regions(str(topology_file.resolve()), topology.shards, masters.pop(), others[0])


@asynccontextmanager
async def _regions_for(
    topology_file: Path | None, own: ClusterSettings, settings: BenchSettings, progress: Progress
) -> AsyncIterator[Regions]:
    if topology_file is not None:
        yield running_regions(topology_file)
        return
    async with region_cluster(own, progress.step) as regions:
        cluster = regions.cluster
        settings.versions.update(regions.versions)
        yield Regions(str(cluster.topology_path), _SHAPE.shards, MASTER, REMOTE, cluster.line_control)


async def _measure(
    regions: Regions, settings: BenchSettings, progress: Progress, seconds: float, rtt_ms: float
) -> dict[str, Any]:
    """Return the figures as the JSON has them; latencies in milliseconds.

    ``write_ms`` is by the writer's region. ``read_ms`` has cached objects and misses of the other region, and of a
    cluster of its own the same without the round trip. `Any`: the JSON's values differ in kind."""
    # In a running cluster the first reads must not repeat those of an earlier run.
    jobs = itertools.count(1 if regions.line else 1 + randbelow(_SEEDS))

    async def phase(name: GeoPhase, distance_ms: float, share: float = 1.0) -> LatencyRecording:
        job = GeoJob(
            topology_file=regions.topology_file,
            phase=name,
            master_region=regions.master,
            remote_region=regions.remote,
            shards=regions.shards,
            objects=_TOY_OBJECTS if settings.toy else _OBJECTS,
            seconds=seconds * share,
            rtt_ms=distance_ms,
            seed=next(jobs),
        )
        return await run_job(job, progress, settings.work_dir / f"geo-{job.seed}.log", LatencyRecording)

    writes, visible = Latencies(await phase("writes", rtt_ms)), Latencies(await phase("visible", rtt_ms))
    turns = 1 if settings.toy else _TURNS
    distances = {"": rtt_ms, "_no_round_trip": 0.0} if regions.line else {"": rtt_ms}
    reads = {suffix: Latencies() for suffix in distances}
    for _ in range(turns):
        for suffix, distance_ms in distances.items():
            if regions.line is not None:
                await ask_line(regions.line, SetRoundTrip(distance_ms))
            reads[suffix].add(await phase("reads", distance_ms, 1 / turns))

    def figures(found: Latencies, name: str) -> dict[str, Any]:
        latencies, late = found.summary(name), found.summary(LATE + name)
        if latencies is None:
            raise OperatorError(f"geo: no operation of {name!r} was answered: give it more --seconds")
        rate = round(latencies.count / seconds, 1)
        return {**msgspec.structs.asdict(latencies), "per_second": rate, "late": late.avg if late else 0.0}

    read = {
        f"{name}{suffix}": (found, name) for suffix, found in reads.items() for name in (_REMOTE_HITS, _REMOTE_MISSES)
    }
    failed = Counter({f"{name}{suffix}": count for suffix, of in reads.items() for name, count in of.failed.items()})
    return {
        "rtt_ms": rtt_ms,
        "write_ms": {name: figures(writes, name) for name in ("same_region", "remote_region")},
        "visible_ms": figures(visible, "visible"),
        "visible_resolution_ms": 1000 * POLL_SECONDS,
        "visible_writes_ms": figures(visible, "visible_writes"),
        "read_ms": {name: figures(*found) for name, found in read.items()},
        "failed": dict(writes.failed + visible.failed + failed),
    }


class GeoJob(msgspec.Struct, frozen=True, kw_only=True):
    """One phase at constant rates: writes in both regions, visibility of the master region's writes in the other, or
    reads in the other."""

    topology_file: str
    phase: GeoPhase
    master_region: str
    remote_region: str
    shards: int
    objects: int
    seconds: float
    rtt_ms: float
    seed: int

    async def work(self, report: StepReport) -> LatencyRecording:
        """Return the phase's latencies. Raises `TaoError`."""
        settings = ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)
        async with (
            connect(self.topology_file, region=self.master_region, settings=settings) as near,
            connect(self.topology_file, region=self.remote_region, settings=settings) as far,
        ):
            report(f"{self.phase}: preparing", 0.0)
            ids = await near.obj_add_many([("item", {"value": b"0"})] * self.objects)

            async def all_there() -> bool:
                return None not in await far.obj_get_many(ids)

            await within(_GIVE_UP_SECONDS, all_there, _LOOK_SECONDS, "the other region has not got the objects")
            phases = _Phases(self, near, far, ids)
            phase = {"writes": phases.writes, "visible": phases.visible, "reads": phases.reads}[self.phase]
            report(f"{self.phase}: warming up", 0.0)
            await phase(min(_WARM_UP_SECONDS, self.seconds), Latencies())
            report(f"{self.phase}: measuring", 0.1)
            settle_collector()
            latencies = Latencies()
            await phase(self.seconds, latencies)
            return latencies.recording()


class _Phases:
    """Each method runs its phase for so many seconds and records its latencies."""

    def __init__(self, job: GeoJob, near: Graph, far: Graph, ids: Sequence[int]) -> None:
        self._job: Final = job
        self._near: Final = near
        self._far: Final = far
        self._ids: Final = ids
        self._chance: Final = Random(job.seed)
        self._numbers: Final = itertools.count(1)

    async def writes(self, seconds: float, latencies: Latencies) -> None:
        """Update objects and add edges, in both regions at once."""
        # Half of the objects each: two regions that write one object wait for each other, which is another figure.
        here, there = self._mixed_writes(self._near, self._ids[::2]), self._mixed_writes(self._far, self._ids[1::2])
        await asyncio.gather(
            sample_at_rate(WRITES_PER_SECOND, seconds, here, latencies, "same_region"),
            sample_at_rate(WRITES_PER_SECOND, seconds, there, latencies, "remote_region"),
        )

    def _mixed_writes(self, graph: Graph, ids: Sequence[int]) -> list[Callable[[], Awaitable[None]]]:
        async def update() -> None:
            await graph.obj_update(self._chance.choice(ids), {"value": b"%d" % next(self._numbers)}, "item")

        async def add() -> None:
            id1, id2 = self._chance.sample(ids, 2)
            await graph.assoc_add(id1, "peer", id2, next(self._numbers))

        return [update, add]

    async def visible(self, seconds: float, latencies: Latencies) -> None:
        """Update objects in the master region, and look for some of the values in the other."""
        looking = set[asyncio.Task[None]]()

        async def look(object_id: int, number: int, acknowledged: float) -> None:
            await asyncio.sleep(_EARLIEST * self._job.rtt_ms / 1000)
            while perf_counter() - acknowledged <= _GIVE_UP_SECONDS:
                found = await self._far.obj_get(object_id)
                if found is not None and _number_in(found) >= number:
                    latencies.traced("visible", perf_counter() - acknowledged)
                    return
                await asyncio.sleep(POLL_SECONDS)
            raise DeadlineExceeded(f"object {object_id} was not seen in {_GIVE_UP_SECONDS:g} s")

        async def write() -> None:
            number = next(self._numbers)
            object_id = self._ids[number % len(self._ids)]
            await self._near.obj_update(object_id, {"value": b"%d" % number}, "item")
            if number % _SAMPLED_EVERY == 0:
                looking.add(asyncio.create_task(look(object_id, number, perf_counter())))

        await sample_at_rate(VISIBLE_WRITES_PER_SECOND, seconds, [write], latencies, "visible_writes")
        for outcome in await asyncio.gather(*looking, return_exceptions=True):
            if isinstance(outcome, TaoError):
                latencies.failed["visible"] += 1
            elif isinstance(outcome, BaseException):
                raise outcome

    async def reads(self, seconds: float, latencies: Latencies) -> None:
        """Read cached objects, and lists for the first time, in the other region."""

        async def hit() -> None:
            await self._far.obj_get(self._chance.choice(self._ids))

        async def miss() -> None:
            number = self._job.seed * _SAMPLES_KEPT + next(self._numbers)
            at = _UNREAD_UNIX_MS + number // SEQUENCE_PER_MS
            await self._far.assoc_range(make_id(number % self._job.shards, at, number % SEQUENCE_PER_MS), "link", 0, 10)

        await asyncio.gather(
            sample_at_rate(READS_PER_SECOND, seconds, [hit], latencies, _REMOTE_HITS),
            sample_at_rate(MISSES_PER_SECOND, seconds, [miss], latencies, _REMOTE_MISSES),
        )


def _number_in(found: Object) -> int:
    value = found.fields["value"]
    assert isinstance(value, bytes)
    return int(value)
