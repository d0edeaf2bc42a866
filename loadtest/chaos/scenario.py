"""Scenario `chaos`: load from both regions, one fault after the other, and the judgement.

At single failures no acknowledged write may be lost, no read stale beyond what it allows, nothing differ afterwards,
and no read fail that another server could have answered (DESIGN.md §9, §15).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from loadtest.chaos.excuses import MASTER_LOST, Fault
from loadtest.chaos.health import until_well
from loadtest.chaos.load import Load, Rates, load_on
from loadtest.chaos.record import Record
from loadtest.chaos.striking import Harm, all_faults
from loadtest.results import Listing, ScenarioResult
from loadtest.scenario import BenchSettings, Progress, check_bounds
from loadtest.two_regions import SEMI_SYNC_RTT_MS, TwoRegions, semi_sync_settings, two_regions
from tao.devcluster.layout import Shape
from tao.model.errors import OperatorError

SUMMARY: Final = "two regions under load while servers, databases, the line and disks fail, one at a time"
"""For the table."""
_SHAPE: Final = Shape(
    regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16, watchers=1
)
_TOY_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
_TOY_FAULTS: Final = ("follower_kill", "tailer_kill")
_TOY_SECONDS: Final = 6.0
_TOY_RATES: Final = Rates(200.0, 20.0)
_AWAY_SECONDS: Final = 8.0
_TOY_AWAY_SECONDS: Final = 1.0
_PEACE_SECONDS: Final = 4.0
"""Between two faults, at most."""
_WELL_SECONDS: Final = 240.0
_TELL_SECONDS: Final = 0.5
_ALLOWED_SHARE: Final = 5e-6
"""Of all reads, that fail without an explanation: what the paper saw in ninety days."""


@dataclass(frozen=True, slots=True)
class ChaosSettings:
    """What a run consists of. Raises `OperatorError` for what is out of bounds."""

    seconds: float = 600.0
    seed: int = 1
    overlapping: bool = False
    """Two faults at a time: more than is promised to be survived."""
    kinds: tuple[str, ...] = ()
    """Faults, empty for all."""
    rates: Rates = field(default_factory=Rates)
    logs: Path | None = None
    """Where the servers' logs are left."""

    def __post_init__(self) -> None:
        check_bounds(
            {
                "--seconds": (self.seconds, 0.001, 3_600),
                "--reads": (self.rates.reads, 0.001, 50_000),
                "--writes": (self.rates.writes, 0.001, 5_000),
            }
        )
        unknown = set(self.kinds) - all_faults().keys()
        if unknown:
            raise OperatorError(f"there is no fault {', '.join(sorted(unknown))}; there are {', '.join(all_faults())}")


async def run(settings: BenchSettings, progress: Progress, wanted: ChaosSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    chaos = wanted or ChaosSettings()
    if settings.toy:
        chaos = replace(
            chaos, seconds=min(chaos.seconds, _TOY_SECONDS), kinds=chaos.kinds or _TOY_FAULTS, rates=_TOY_RATES
        )
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    cluster_settings = semi_sync_settings(settings.work_dir, shape, log_level="info")
    async with two_regions(cluster_settings, progress.step, logs=chaos.logs) as regions:
        database = regions.cluster.database(next(iter(regions.cluster.processes)))
        settings.versions[database.binary.flavour] = database.binary.version_text
        run_of = _Run(regions, chaos, progress, toy=settings.toy)
        await run_of.go()
        measured = run_of.measured
    return ScenarioResult(
        summary=SUMMARY,
        conditions={
            "seed": chaos.seed,
            "seconds": chaos.seconds,
            "rtt_ms": SEMI_SYNC_RTT_MS,
            "durability": "semi_sync",
            "failures at a time": 2 if chaos.overlapping else 1,
        },
        listings=[_listing(measured)],
        measured=measured,
        faults=run_of.faults(),
    )


class _Run:
    def __init__(self, regions: TwoRegions, wanted: ChaosSettings, progress: Progress, *, toy: bool) -> None:
        self.regions: Final = regions
        self.wanted: Final = wanted
        self.progress: Final = progress
        self.record: Final = Record()
        self.harm: Final = Harm(regions.cluster, Random(wanted.seed + 1), _TOY_AWAY_SECONDS if toy else _AWAY_SECONDS)
        self.measured: dict[str, Any] = {}  # Any: the JSON's values differ in kind

    async def go(self) -> None:
        """A cluster that does not get well, or quiet, ends the run; what was measured until then tells why."""
        async with load_on(self.regions, self.record, Random(self.wanted.seed)) as load:
            try:
                await self._strike_and_compare(load)
            except OperatorError as error:
                self._measure(self.record.now(), None, {"differences": {}, "compared": {}}, not_well=error.message)

    async def _strike_and_compare(self, load: Load) -> None:
        load.start(self.wanted.rates)
        telling = asyncio.create_task(self._tell())
        try:
            await load.while_running(self._strike_all())
        finally:
            telling.cancel()
        await load.stop()
        seconds = self.record.now()
        self.progress.step("waiting for writes of unknown outcome", 0.85)
        await load.settle_all()
        self.progress.step("waiting until all is quiet", 0.88)
        stale, differences, compared = await load.stale(self.progress)
        self._measure(seconds, stale, {"differences": differences, "compared": compared})

    async def _strike_all(self) -> None:
        """Every kind once, in an order by chance, then again; one at least, if a machine slept through the run."""
        chance, record = self.harm.chance, self.record
        kinds = list(self.wanted.kinds or all_faults())
        deck: list[str] = []
        while not record.faults or record.now() < self.wanted.seconds:
            deck = deck or chance.sample(kinds, len(kinds))
            together = [deck.pop()]
            # Without the document nobody knows whom else to strike, or whom to have rejoin.
            if self.wanted.overlapping and deck and "topology_gone" not in (together[0], deck[-1]):
                together.append(deck.pop())
            await asyncio.sleep(chance.uniform(0.2, 1.0) * min(_PEACE_SECONDS, self.wanted.seconds / 4))
            await asyncio.gather(*(self._strike(kind) for kind in together))

    async def _strike(self, kind: str) -> None:
        record = self.record
        async with all_faults()[kind](self.harm) as victim:
            fault = record.strike(kind, victim, self.harm.database_of(victim) if kind in MASTER_LOST else "")
            await self.harm.last()
            fault.healing = record.now()
        fault.mended = record.now()
        await until_well(self.regions.cluster, _WELL_SECONDS)
        record.healed(fault)

    async def _tell(self) -> None:
        record = self.record
        while True:
            now = record.now()
            active = ", ".join(f"{fault.kind} {fault.victim}" for fault in record.active)
            text = f"{record.reads:,} reads, {record.failed_reads} failed; {record.acknowledged:,} writes"
            bad = record.lost + sum(record.violations.values())
            self.progress.step(f"{text}; {bad} wrong; {active}", 0.85 * min(1.0, now / self.wanted.seconds))
            await asyncio.sleep(_TELL_SECONDS)

    def _measure(
        self, seconds: float, stale: int | None, compared: dict[str, dict[str, int]], *, not_well: str = ""
    ) -> None:
        """``stale`` is None, and nothing is compared, of a cluster that is ``not_well``."""
        record = self.record

        def violations(*demands: str) -> int:
            return sum(count for (_, demand), count in record.violations.items() if demand in demands)

        kinds = sorted({fault.kind for fault in record.faults})
        self.measured = {
            "acked_writes": record.acknowledged,
            "acked_writes_lost": record.lost,
            "reads": record.reads,
            "failed_reads": record.failed_reads,
            "failed_reads_during_single_failures": record.failed_in_single,
            "stale_after_quiescence": stale,
            "ryw_violations": violations("own writes"),
            "token_violations": violations("token"),
            "critical_violations": violations("critical"),
            "faults": {kind: sum(fault.kind == kind for fault in record.faults) for kind in kinds},
            "failed_reads_unexplained": record.unexplained,
            "staleness_violations": violations("max_staleness"),
            "monotone_violations": violations("monotone"),
            "wrong_answers": sum(count for (verdict, _), count in record.violations.items() if verdict == "wrong"),
            "failed_writes": dict(record.refused),
            "writes_of_unknown_outcome": dict(record.unknown),
            "failed_reads_by_fault": [
                {"fault": fault, "demand": demand, "reason": reason, "count": count}
                for (fault, demand, reason), count in sorted(record.failures.items())
            ],
            "seed": self.wanted.seed,
            "not_well": not_well,
            "busy_seconds": round(seconds, 1),
            **compared,
            "examples": record.examples,
            "fault_log": [_rounded(fault) for fault in record.faults],
            "failed_read_log": msgspec.to_builtins(record.failed),
            "failed_write_log": record.failed_writes,
        }

    def faults(self) -> list[str]:
        """What makes the run a failed one."""
        found, allowed = self.measured, _ALLOWED_SHARE * self.record.reads
        zeros = (
            *("acked_writes_lost", "stale_after_quiescence", "ryw_violations", "token_violations"),
            *("critical_violations", "staleness_violations", "monotone_violations", "wrong_answers"),
        )
        wrong = [found["not_well"]] if found["not_well"] else []
        wrong += [f"{key}: {found[key]:,}" for key in zeros if found[key]]
        if not self.wanted.overlapping and self.record.unexplained > allowed:
            wrong.append(f"failed reads that no fault explains: {self.record.unexplained:,}")
            wrong += [f"{each.seconds} s: {each}" for each in self.record.failed if not each.explained][:5]
        return wrong + (self.record.examples if wrong else [])


def _rounded(fault: Fault) -> dict[str, object]:
    times = {name: round(getattr(fault, name), 3) for name in ("struck", "healing", "mended", "healthy")}
    return {"kind": fault.kind, "victim": fault.victim, **times}


def _listing(measured: dict[str, Any]) -> Listing:
    names = list(measured)[: list(measured).index("faults")]
    figures = {name: "not compared" if measured[name] is None else f"{measured[name]:,}" for name in names}
    rows: list[tuple[str, ...]] = [(name.replace("_", " "), figure) for name, figure in figures.items()]
    return Listing(title="what the judge found", columns=("", "count"), rows=rows)
