"""Scenario `geo`: what two regions that lie a round trip apart make of writes, of their visibility, and of reads.

One database whose master is in the first region, full local durability, asynchronous between the regions, a delay line
that adds half of the round trip each way. Rates are constant and low: latencies are measured, not capacity. Reads take
turns with and without the round trip on one cluster, so that nothing else differs between the two. A running cluster
has the round trip that it has, which its operator tells.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import randbelow
from typing import Final

import msgspec

from loadtest.cached_reads import SCHEMA
from loadtest.client_process import run_job
from loadtest.geo_client import (
    MISSES_PER_SECOND,
    POLL_SECONDS,
    READS_PER_SECOND,
    VISIBLE_WRITES_PER_SECOND,
    WRITES_PER_SECOND,
)
from loadtest.jobs import GeoJob, GeoPhase
from loadtest.open_loop import Latencies, Samples
from loadtest.results import Quantity, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.target import running_topology
from loadtest.two_regions import MASTER, REMOTE, two_regions
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Shape
from tao.devcluster.line_control import SetRoundTrip, ask_line
from tao.devcluster.server_options import Durability
from tao.model.errors import OperatorError

SUMMARY: Final = "two regions: latency of writes in either, visibility in the other, reads with and without round trip"
_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=1, databases=1, shards=8)
_TOY_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=1, shards=8)
DEFAULT_PHASE_SECONDS: Final = 20.0
_OBJECTS: Final = 2_000
_TOY_OBJECTS: Final = 50
_TURNS: Final = 3
_TOY_PHASE_SECONDS: Final = 0.5
_SAME_REGION_MS: Final = 5.0
_REMOTE_MS: Final = 6.0
_VISIBLE_P50_MS: Final = 15.0
_VISIBLE_P99_MS: Final = 100.0
_SEEDS: Final = 1_000_000
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


@dataclass(frozen=True, slots=True)
class GeoSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    rtt_ms: float = DEFAULT_RTT_MS
    phase_seconds: float = DEFAULT_PHASE_SECONDS
    """At 50 writes a second ten samples lie above the 99th percentile."""
    topology: Path | None = None
    """Of a running cluster of two regions or more, whose round trip ``rtt_ms`` is; its schema has the types of
    `SCHEMA`."""

    def __post_init__(self) -> None:
        check_bounds({"--rtt-ms": (self.rtt_ms, 0.001, 1_000), "--seconds": (self.phase_seconds, 0.001, 100)})


class AimOfGeo(msgspec.Struct, frozen=True, kw_only=True):
    """A bound on one of the figures, in milliseconds."""

    figure: str
    bound: float
    value: float
    met: bool


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it; latencies in milliseconds."""

    rtt_ms: float
    write_ms: dict[str, Latencies]
    """same_region, remote_region; 50 writes a second in each at once."""
    visible_ms: Latencies
    visible_resolution_ms: float
    visible_writes_ms: Latencies
    """The writes during which that was measured."""
    read_ms: dict[str, Latencies]
    """remote_region, of cached objects, and remote_region_misses, filled from the region's replica; of a cluster of its
    own the same with ``_no_round_trip``."""
    failed: dict[str, int]
    aims: list[AimOfGeo]


async def run(settings: BenchSettings, progress: Progress, geo: GeoSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    wanted = geo or GeoSettings()
    seconds = min(wanted.phase_seconds, _TOY_PHASE_SECONDS) if settings.toy else wanted.phase_seconds
    own = ClusterSettings(
        state_dir=settings.work_dir / "geo",
        shape=_TOY_SHAPE if settings.toy else _SHAPE,
        schema_file=SCHEMA,
        rtt_ms=wanted.rtt_ms,
        durability=Durability.FULL,
        log_level="warning",
    )
    async with _regions_for(wanted.topology, own, settings, progress) as regions:
        measured = await _Phases(regions, settings, progress, seconds, wanted.rtt_ms).measure()
    return ScenarioResult(
        summary=SUMMARY,
        conditions={
            "rtt_ms": wanted.rtt_ms,
            "writes_per_second_and_region": WRITES_PER_SECOND,
            "visible_writes_per_second": VISIBLE_WRITES_PER_SECOND,
            "reads_per_second": READS_PER_SECOND,
            "misses_per_second": MISSES_PER_SECOND,
            "phase_seconds": seconds,
            "durability": "full, asynchronous between regions" if wanted.topology is None else "the cluster's own",
        },
        quantities=_quantities(measured),
        notes=[*_NOTES, *([_OF_A_RUNNING_ONE] if wanted.topology else []), *map(_told, measured.aims)],
        measured=msgspec.to_builtins(measured),
    )


@dataclass(frozen=True, slots=True)
class Regions:
    """Where is measured."""

    topology_file: str
    shards: int
    master: str
    """All databases have their masters there."""
    remote: str
    line: Path | None = None
    """The control of the delay line between them; None: of regions whose distance is what it is."""


def running_regions(topology_file: Path) -> Regions:
    """Of a cluster that runs: where its databases are mastered, and the first of its other regions. Raises
    `OperatorError` for one that has no two regions, or masters in several, and what `running_topology` raises."""
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
    async with two_regions(own, progress.step) as regions:
        cluster = regions.cluster
        database = cluster.database(_SHAPE.database_server(MASTER, _SHAPE.database_names[0]))
        settings.versions[database.binary.flavour] = database.binary.version_text
        yield Regions(str(cluster.topology_path), _SHAPE.shards, MASTER, REMOTE, cluster.line_control)


class _Phases:
    def __init__(
        self, regions: Regions, settings: BenchSettings, progress: Progress, seconds: float, rtt_ms: float
    ) -> None:
        self._regions: Final = regions
        self._settings: Final = settings
        self._progress: Final = progress
        self._seconds: Final = seconds
        self._rtt_ms: Final = rtt_ms
        self._jobs = 0
        # What is asked for the first time in a running cluster is nothing that an earlier run has asked for.
        self._seed: Final = 0 if regions.line else randbelow(_SEEDS)

    async def measure(self) -> Measured:
        writes = await self._job("writes", self._rtt_ms)
        visible = await self._job("visible", self._rtt_ms)
        reads: dict[str, Samples] = {}
        turns = 1 if self._settings.toy else _TURNS
        line = self._regions.line
        distances = (("", self._rtt_ms), ("_no_round_trip", 0.0)) if line else (("", self._rtt_ms),)
        for _ in range(turns):
            for suffix, rtt_ms in distances:
                if line is not None:
                    await ask_line(line, SetRoundTrip(rtt_ms))
                found = await self._job("reads", rtt_ms, 1 / turns)
                for name, part in (("remote_region", "reads"), ("remote_region_misses", "misses")):
                    _add(reads.setdefault(f"{name}{suffix}", Samples()), found[part])
        failed = {name: samples.failed for name, samples in {**writes, **visible, **reads}.items() if samples.failed}
        write_ms = {name: samples.latencies() for name, samples in writes.items()}
        visible_ms = visible["visible"].latencies()
        return Measured(
            rtt_ms=self._rtt_ms,
            write_ms=write_ms,
            visible_ms=visible_ms,
            visible_resolution_ms=1000 * POLL_SECONDS,
            visible_writes_ms=visible["visible_writes"].latencies(),
            read_ms={name: samples.latencies() for name, samples in reads.items()},
            failed=failed,
            aims=[
                _aim("write_ms.same_region.avg", _SAME_REGION_MS, write_ms["same_region"].avg),
                _aim("write_ms.remote_region.avg", self._rtt_ms + _REMOTE_MS, write_ms["remote_region"].avg),
                _aim("visible_ms.p50", self._rtt_ms / 2 + _VISIBLE_P50_MS, visible_ms.p50),
                _aim("visible_ms.p99", self._rtt_ms / 2 + _VISIBLE_P99_MS, visible_ms.p99),
            ],
        )

    async def _job(self, phase: GeoPhase, rtt_ms: float, share: float = 1.0) -> dict[str, Samples]:
        self._jobs += 1
        job = GeoJob(
            topology_file=self._regions.topology_file,
            phase=phase,
            master_region=self._regions.master,
            remote_region=self._regions.remote,
            shards=self._regions.shards,
            objects=_TOY_OBJECTS if self._settings.toy else _OBJECTS,
            seconds=self._seconds * share,
            rtt_ms=rtt_ms,
            seed=self._seed + self._jobs,
        )
        log = self._settings.work_dir / f"geo-{self._jobs}.log"
        return await run_job(job, self._progress, log, dict[str, Samples])


def _add(all_of: Samples, more: Samples) -> None:
    all_of.seconds += more.seconds
    all_of.elapsed += more.elapsed
    all_of.failed += more.failed
    all_of.late_seconds += more.late_seconds


def _aim(figure: str, bound: float, value: float) -> AimOfGeo:
    return AimOfGeo(figure=figure, bound=round(bound, 3), value=value, met=value <= bound)


def _told(aim: AimOfGeo) -> str:
    return f"{aim.figure}: {aim.value:,.1f} ms, aim ≤ {aim.bound:,.1f} ms: {'met' if aim.met else 'not met'}"


def _quantities(measured: Measured) -> list[Quantity]:
    named = {
        "writes of the master region": measured.write_ms["same_region"],
        "writes of the other region": measured.write_ms["remote_region"],
        "visible in the other region": measured.visible_ms,
        **{
            f"{what} of the other region{distance}": measured.read_ms[name]
            for what, distance, name in (
                ("reads", "", "remote_region"),
                ("reads", ", no round trip", "remote_region_no_round_trip"),
                ("misses", "", "remote_region_misses"),
                ("misses", ", no round trip", "remote_region_misses_no_round_trip"),
            )
            if name in measured.read_ms
        },
    }
    parts: dict[str, Callable[[Latencies], float]] = {
        "average": lambda found: found.avg,
        "p50": lambda found: found.p50,
        "p99": lambda found: found.p99,
    }
    return [
        *(
            Quantity(name=f"{name}, {part}", value=value(found), unit="ms")
            for name, found in named.items()
            for part, value in parts.items()
        ),
        *(
            Quantity(name=f"{name}, of it begun late", value=found.late, unit="ms")
            for name, found in named.items()
            if found.late
        ),
        *(Quantity(name=f"{name}, failed", value=count, unit="times") for name, count in measured.failed.items()),
    ]
