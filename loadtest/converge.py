"""Scenario `converge`: random writes in both regions at once, with or without faults, and then nothing may differ.

Once writes stop and messages are delivered, every cache in every region equals its database, and the databases equal
each other (DESIGN.md §15, invariant 2). This measures no speed: any difference fails the run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from random import Random
from typing import Final

import msgspec

from loadtest.faults import Done, cut_line, kill_tailers, plan_faults
from loadtest.random_writes import Tally, Writer, missing, prepare
from loadtest.results import Quantity, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.two_regions import Differences, TwoRegions, two_regions
from tao.devcluster.layout import DEFAULT_RTT_MS, ClusterSettings, Shape
from tao.devcluster.server_options import Durability

SUMMARY: Final = "random writes in two regions at once; afterwards no cache, database or region may differ from another"
_SHAPE: Final = Shape(regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16)
_TOY_SHAPE: Final = Shape(regions=2, tiers=1, followers=1, leaders=1, databases=2, mixed_mastership=True, shards=4)
DEFAULT_WRITES: Final = 100_000
_TOY_WRITES: Final = 400
_WRITERS_PER_REGION: Final = 48
_TOY_WRITERS_PER_REGION: Final = 8
_HOT_PER_SHARD: Final = 3
_TIMEOUT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 120.0
_TELL_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class ConvergeSettings:
    """What a run consists of. Raises `OperatorError` for numbers out of bounds."""

    writes: int = DEFAULT_WRITES
    tailer_kills: int = 0
    link_cuts: int = 0
    rtt_ms: float = DEFAULT_RTT_MS
    seed: int = 1
    writing_seconds: float = 600.0
    """Bound on the writing; on a machine that is slower than that fewer writes are issued, and the figures say so."""

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--writes": (self.writes, 0, 10_000_000),
                "--tailer-kills": (self.tailer_kills, 0, 1_000),
                "--link-cuts": (self.link_cuts, 0, 1_000),
            }
        )


class Converged(msgspec.Struct, frozen=True, kw_only=True):
    """What a run found, as the JSON has it."""

    writes: dict[str, int]
    """issued, acknowledged."""
    failed: dict[str, int]
    """Writes that failed, by the error's reason: given up, never tried again."""
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
    """By kind; empty when all is right."""
    missing_objects: int
    """Acknowledged, never deleted, and not in the database."""
    examples: list[str]


async def run(settings: BenchSettings, progress: Progress, converge: ConvergeSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    wanted = converge or ConvergeSettings()
    if settings.toy:
        wanted = ConvergeSettings(
            writes=min(wanted.writes, _TOY_WRITES),
            tailer_kills=min(wanted.tailer_kills, 1),
            link_cuts=min(wanted.link_cuts, 1),
            rtt_ms=min(wanted.rtt_ms, 10.0),
            seed=wanted.seed,
        )
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
        database = regions.cluster.database(shape.database_server(shape.region_names[0], shape.database_names[0]))
        settings.versions[database.binary.flavour] = database.binary.version_text
        found = await _converge(regions, wanted, writers, progress)
    quantities = [
        Quantity(name="writes issued", value=found.writes["issued"], unit="writes"),
        Quantity(name="acknowledged", value=found.writes["acknowledged"], unit="writes"),
        *(Quantity(name=f"failed as {reason}", value=count, unit="writes") for reason, count in found.failed.items()),
        Quantity(name="tailers killed", value=found.tailer_kills, unit="times"),
        Quantity(name="line cut", value=found.link_cuts, unit="times"),
        Quantity(name="rate of acknowledged writes", value=_rate(found), unit="per_second"),
        Quantity(name="from the last write until all is quiet", value=found.quiet_seconds, unit="seconds"),
        *(Quantity(name=kind, value=count, unit="compared") for kind, count in found.compared.items()),
        Quantity(name="differences", value=sum(found.differences.values()), unit="found"),
    ]
    return ScenarioResult(
        summary=SUMMARY,
        conditions={
            "writers_per_region": writers,
            "hot_objects": _HOT_PER_SHARD * shape.shards,
            "shards": shape.shards,
            "rtt_ms": wanted.rtt_ms,
            "durability": "relaxed",
            "seed": wanted.seed,
        },
        quantities=quantities,
        measured=msgspec.to_builtins(found),
        faults=faults_in(found),
    )


def _rate(found: Converged) -> float:
    return found.writes["acknowledged"] / found.writing_seconds if found.writing_seconds else 0.0


def faults_in(found: Converged) -> list[str]:
    """What is wrong, with examples; empty when all is right."""
    faults = [f"{kind}: {count:,}" for kind, count in found.differences.items()]
    if found.missing_objects:
        faults.append(f"acknowledged objects that are lost: {found.missing_objects:,}")
    return [*faults, *found.examples] if faults else []


async def _converge(regions: TwoRegions, wanted: ConvergeSettings, writers: int, progress: Progress) -> Converged:
    tally, done = Tally(wanted.writes), Done()
    chance = Random(wanted.seed)
    async with AsyncExitStack() as stack:
        graphs = {
            region: [
                await regions.graph(region, tier, stack, _TIMEOUT_SECONDS)
                for tier in regions.cluster.record.shape.tier_names
            ]
            for region in regions.cluster.record.shape.region_names
        }
        first = next(iter(graphs.values()))[0]
        ground = await prepare(first, regions.routes.shards, _HOT_PER_SHARD)
        crowd = [
            Writer(of_region[number % len(of_region)], of_region, ground, tally, Random(chance.randrange(1 << 62)))
            for of_region in graphs.values()
            for number in range(writers)
        ]
        began = time.monotonic()

        def share() -> float:
            by_count = tally.issued / wanted.writes if wanted.writes else 1.0
            return max(by_count, (time.monotonic() - began) / wanted.writing_seconds)

        kills, cuts = plan_faults(wanted.tailer_kills, chance), plan_faults(wanted.link_cuts, chance)
        telling = asyncio.create_task(_tell(progress, tally, done, share))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_write_all(crowd, tally, wanted.writing_seconds))
                group.create_task(kill_tailers(regions, kills, share, done))
                group.create_task(cut_line(regions, cuts, share, done))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            telling.cancel()
        ended = time.monotonic()
        progress.step("waiting until all is quiet", 0.8)
        await regions.quiet(_QUIET_SECONDS)
        quiet_seconds = time.monotonic() - ended
        lost = await missing(first, tally.kept)
    differences = await regions.differences(lambda server, entries: progress.step(f"{server}: {entries:,}", 0.9))
    return _report(tally, done, wanted.seed, ended - began, quiet_seconds, lost, differences)


async def _write_all(crowd: list[Writer], tally: Tally, seconds: float) -> None:
    """All at once, for so long at most; what is under way then is waited for."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(writer.run()) for writer in crowd]
        await asyncio.wait(tasks, timeout=seconds)
        tally.close()


async def _tell(progress: Progress, tally: Tally, done: Done, share: Callable[[], float]) -> None:
    while True:
        faults = f"{done.tailer_kills} kills, {done.link_cuts} cuts"
        progress.step(f"{tally.issued:,} writes, {tally.failed.total():,} failed, {faults}", 0.75 * min(1.0, share()))
        await asyncio.sleep(_TELL_SECONDS)


def _report(
    tally: Tally, done: Done, seed: int, writing: float, quiet: float, lost: int, differences: Differences
) -> Converged:
    return Converged(
        writes={"issued": tally.issued, "acknowledged": tally.acknowledged},
        failed=dict(tally.failed),
        reads=tally.reads,
        failed_reads=dict(tally.failed_reads),
        tailer_kills=done.tailer_kills,
        link_cuts=done.link_cuts,
        seed=seed,
        writing_seconds=round(writing, 3),
        quiet_seconds=round(quiet, 3),
        compared=differences.compared,
        differences=differences.kinds,
        missing_objects=lost,
        examples=differences.examples,
    )
