"""The harness of `chaos` and `rolling`: start two regions, run load with recorded operations, carry out a plan, wait
until all is quiet, compare, and summarise."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from loadtest.faults.injection import Injector
from loadtest.faults.load import FaultLoad, Rates, load_on
from loadtest.faults.plan import Plan, carry_out
from loadtest.faults.record import RunRecord
from loadtest.options import LOGS, READS, SEED, WRITES, Options
from loadtest.results import Aim, Listing, at_most
from loadtest.scenario import BenchSettings, Progress
from loadtest.target import versions_of
from loadtest.two_regions import semi_sync_settings, two_regions
from tao.devcluster.layout import Shape
from tao.model.errors import OperatorError

SHAPE: Final = Shape(
    regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16, watchers=1
)
_TOY_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
_TOY_RATES: Final = Rates(200.0, 20.0)
_STEP_SECONDS: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class FaultOptions(Options):
    """The options of a fault run."""

    seed: int = SEED.default(1)
    reads: float = READS.default(800.0)
    writes: float = WRITES.default(60.0)
    logs: Path | None = LOGS.default(None)


@dataclass(slots=True)
class Outcome:
    """What a run recorded, and what the comparison at its end found."""

    record: RunRecord = field(default_factory=RunRecord)
    busy_seconds: float = 0.0
    """The time from the beginning of the load to its end."""
    stale: int | None = None
    """How much differed when all was quiet; None when nothing was compared."""
    differences: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    not_well: str = ""
    """Why the run ended early: the cluster did not become healthy, or not quiet."""

    def violations(self, *demands: str) -> int:
        """Count the violations of these demands."""
        return sum(count for (_, demand), count in self.record.violations.items() if demand in demands)

    def logs(self) -> dict[str, Any]:
        """Return the examples and the logged failures for the JSON. `Any`: nested values."""
        return {
            "examples": self.record.examples,
            "failed_read_log": msgspec.to_builtins(self.record.failed),
            "failed_write_log": self.record.failed_writes,
        }


async def run_plan(
    settings: BenchSettings,
    progress: Progress,
    options: FaultOptions,
    plan: Callable[[Injector, RunRecord], Plan],
    *,
    well_seconds: float,
) -> Outcome:
    """Run load while a plan is carried out, then compare everything.

    A cluster that does not become healthy or quiet ends the run; what was measured until then is returned with the
    reason. Raises `OperatorError` when the cluster does not start."""
    cluster_settings = semi_sync_settings(settings.work_dir, _TOY_SHAPE if settings.toy else SHAPE, log_level="info")
    outcome = Outcome()
    record = outcome.record
    rates = _TOY_RATES if settings.toy else Rates(options.reads, options.writes)
    async with two_regions(cluster_settings, progress.step, logs=options.logs) as regions:
        settings.versions.update(versions_of(regions.cluster.database(next(iter(regions.cluster.processes)))))
        injector = Injector(regions.cluster, Random(options.seed + 1))
        async with load_on(regions, record, Random(options.seed)) as load:
            load.start(rates)
            showing = asyncio.create_task(_show(record, progress))
            try:
                await load.while_running(carry_out(plan(injector, record), injector, record, well_seconds))
                await _compare(load, outcome, progress)
            except OperatorError as error:
                outcome.not_well = error.message
            finally:
                showing.cancel()
                outcome.busy_seconds = outcome.busy_seconds or record.now()
    return outcome


async def _compare(load: FaultLoad, outcome: Outcome, progress: Progress) -> None:
    await load.stop()
    outcome.busy_seconds = outcome.record.now()
    progress.step("waiting for writes of unknown outcome", 0.85)
    await load.settle_all()
    progress.step("waiting until all is quiet", 0.88)
    outcome.stale, outcome.differences, outcome.compared = await load.stale(progress)


async def _show(record: RunRecord, progress: Progress) -> None:
    while True:
        active = ", ".join(f"{fault.kind} {fault.victim}" for fault in record.active)
        text = f"{record.reads:,} reads, {record.failed_reads} failed; {record.acknowledged:,} writes"
        wrong = record.lost + sum(record.violations.values())
        progress.step(f"{text}; {wrong} wrong; {active}", min(0.85, record.done))
        await asyncio.sleep(_STEP_SECONDS)


def none_of(counts: Mapping[str, Any], names: Sequence[str]) -> list[Aim]:
    """Return the aims that these counts are 0, where they are known."""
    return [at_most(f"no {name.replace('_', ' ')}", counts[name], 0) for name in names if counts[name] is not None]


def count_listing(title: str, counts: dict[str, Any]) -> Listing:
    """Return the table of some counts; None stands for what was not compared."""
    rows: list[tuple[str, ...]] = [
        (name.replace("_", " "), "not compared" if count is None else f"{count:,}") for name, count in counts.items()
    ]
    return Listing(title=title, columns=("", "count"), rows=rows)
