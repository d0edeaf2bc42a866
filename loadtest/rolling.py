"""Scenario `rolling`: every server of two regions is restarted, one after the other, under load: nobody may notice.

The way an operator does it: `tao drain`, restart, `tao undrain`; watchers and tailers, which nobody asks anything, are
only restarted; a master is first replaced by `tao promote`. A request that fails is a fault of the run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from loadtest.chaos.health import until_well
from loadtest.chaos.load import Rates, load_on
from loadtest.chaos.record import Record
from loadtest.chaos.rejoining import command
from loadtest.results import Listing, ScenarioResult
from loadtest.scenario import BenchSettings, Progress
from loadtest.two_regions import SEMI_SYNC_RTT_MS, TwoRegions, semi_sync_settings, two_regions
from tao.devcluster.layout import Role, Shape
from tao.model.errors import OperatorError
from tao.topology.document import parse_topology

SUMMARY: Final = "every server of two regions restarted in turn under load: no request may fail"
_SHAPE: Final = Shape(
    regions=2, tiers=2, followers=2, leaders=2, databases=2, mixed_mastership=True, shards=16, watchers=1
)
_TOY_SHAPE: Final = Shape(regions=2, tiers=2, followers=1, leaders=2, databases=1, shards=4, watchers=1)
_WELL_SECONDS: Final = 60.0
_ORDER: Final = (Role.WATCHER, Role.TAILER, Role.FOLLOWER, Role.LEADER, Role.DATABASE)
ROLES: Final = tuple(str(role) for role in _ORDER)
_TOY_RATES: Final = Rates(200.0, 20.0)


@dataclass(frozen=True, slots=True)
class RollingSettings:
    """What a run consists of."""

    seed: int = 1
    rates: Rates = field(default_factory=Rates)
    roles: tuple[str, ...] = ()
    """Whose servers are restarted; empty for all."""
    logs: Path | None = None
    """Where the servers' logs are left."""


async def run(settings: BenchSettings, progress: Progress, wanted: RollingSettings | None = None) -> ScenarioResult:
    """See `SUMMARY`. Raises `OperatorError`."""
    rolling = wanted or RollingSettings()
    shape = _TOY_SHAPE if settings.toy else _SHAPE
    cluster_settings = semi_sync_settings(settings.work_dir, shape, log_level="info")
    record = Record()
    async with (
        two_regions(cluster_settings, progress.step, logs=rolling.logs) as regions,
        load_on(regions, record, Random(rolling.seed)) as load,
    ):
        load.start(_TOY_RATES if settings.toy else rolling.rates)
        seconds: dict[str, float] = {}
        names = _names(regions, rolling, one_each=settings.toy)
        await load.while_running(_restart_all(regions, names, record, progress, seconds))
        await load.stop()
        progress.step("waiting until all is quiet", 0.9)
        await load.settle_all()
        stale, differences, _ = await load.stale(progress)
    failed_writes = record.refused.total() + record.unknown.total()
    measured = {
        "restarts": len(seconds),
        "reads": record.reads,
        "failed_reads": record.failed_reads,
        "acked_writes": record.acknowledged,
        "failed_writes": failed_writes,
        "acked_writes_lost": record.lost,
        "violations": sum(record.violations.values()),
        "stale_after_quiescence": stale,
        "differences": differences,
        "seconds": {name: round(each, 2) for name, each in seconds.items()},
        "failed_writes_by_reason": {**record.refused, **record.unknown},
        "failed_read_log": msgspec.to_builtins(record.failed),
        "failed_write_log": record.failed_writes,
        "examples": record.examples,
    }
    zeros = ("failed_reads", "failed_writes", "acked_writes_lost", "violations", "stale_after_quiescence")
    faults = [f"{key}: {measured[key]}" for key in zeros if measured[key]]
    if faults:
        faults += [*record.examples, *map(str, record.failed[:5]), *record.failed_writes[:5]]
    return ScenarioResult(
        summary=SUMMARY,
        conditions={"rtt_ms": SEMI_SYNC_RTT_MS, "durability": "semi_sync", "seed": rolling.seed},
        listings=[
            Listing(
                title="what was restarted under what",
                columns=("", "count"),
                rows=[(key.replace("_", " "), f"{measured[key]:,}") for key in list(measured)[:8]],
            )
        ],
        measured=measured,
        faults=faults,
    )


def _names(regions: TwoRegions, wanted: RollingSettings, *, one_each: bool) -> list[str]:
    """Who is restarted, in that order. ``one_each``: of each role."""
    roles = [role for role in _ORDER if not wanted.roles or role in wanted.roles]
    of_role = [[name for name, each in regions.cluster.processes.items() if each is role] for role in roles]
    return [name for names in of_role for name in (names[:1] if one_each else names)]


async def _restart_all(
    regions: TwoRegions, names: list[str], record: Record, progress: Progress, seconds: dict[str, float]
) -> None:
    """``seconds``: by server, from its being drained to its being in use again."""
    cluster = regions.cluster
    for number, name in enumerate(names):
        progress.step(f"{name}; {record.reads:,} reads, {record.failed_reads} failed", 0.9 * number / len(names))
        began = time.monotonic()
        fault = record.strike(f"restart of a {cluster.processes[name]}", name)
        if cluster.processes[name] is Role.DATABASE:
            await _replaced(regions, name)
        if cluster.processes[name] in (Role.WATCHER, Role.TAILER):
            await cluster.restart(name)
        else:
            await _told(regions, "drain", name, "--timeout", "30")
            await cluster.restart(name)
            await _told(regions, "undrain", name, "--timeout", "30")
        await until_well(cluster, _WELL_SECONDS)
        record.healed(fault)
        seconds[name] = time.monotonic() - began


async def _replaced(regions: TwoRegions, name: str) -> None:
    """Make another server the master, where this one is."""
    topology = parse_topology(regions.cluster.topology_path.read_bytes(), "topology")
    for database in topology.databases:
        if database.servers[database.master_region].name == name:
            others = [region for region in database.servers if region != database.master_region]
            await _told(regions, "promote", database.name, "--to", others[0])


async def _told(regions: TwoRegions, *words: str) -> None:
    status, said = await command(regions.cluster, *words)
    if status:
        raise OperatorError(f"tao {' '.join(words)}: exit status {status}: {said}")
