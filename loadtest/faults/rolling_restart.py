"""Scenario `rolling`: every server of two regions is restarted, one after the other, under load, and no request fails.

Each is restarted as an operator does it: `tao drain`, restart, `tao undrain`; watchers and tailers, which answer no
requests, are only restarted; a master is first replaced by `tao promote`. A request that fails is a fault of the run.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from loadtest import options
from loadtest.faults.harness import Outcome
from loadtest.faults.health import operator_command
from loadtest.faults.injection import Injector
from loadtest.faults.load import RecordedOptions, run_recorded
from loadtest.faults.plan import PlanStep, at_once
from loadtest.faults.record import RunRecord
from loadtest.region_cluster import SEMI_SYNC_RTT_MS
from loadtest.results import Conditions, ScenarioResult, result_of
from loadtest.scenario import BenchSettings, Progress, Scenario
from tao.devcluster.layout import Role
from tao.model.errors import OperatorError

_WELL_SECONDS: Final = 60.0
_MOST_SECONDS: Final = 1_800.0
"""Twenty-two servers, each of which may take a minute to be healthy again on a busy machine, and some more."""
_ORDER: Final = (Role.WATCHER, Role.TAILER, Role.FOLLOWER, Role.LEADER, Role.DATABASE)
ROLES: Final = tuple(str(role) for role in _ORDER)
_ZEROS: Final = ("failed_reads", "failed_writes", "acked_writes_lost", "violations", "stale_after_quiescence")


@dataclass(frozen=True, kw_only=True)
class RollingOptions(RecordedOptions):
    """The options of `rolling`."""

    roles: tuple[str, ...] = options.ROLE.default((), choices=ROLES)


async def run(settings: BenchSettings, progress: Progress, wanted: RollingOptions) -> ScenarioResult:
    """Restart the servers, and judge. Raises `OperatorError` when the cluster does not start."""
    plan = partial(_plan, wanted.roles, settings.toy)
    outcome = await run_recorded(settings, progress, wanted, plan, _WELL_SECONDS)
    record, measured = outcome.record, _measured(outcome)
    conditions: Conditions = {"rtt_ms": SEMI_SYNC_RTT_MS, "durability": "semi_sync", "seed": wanted.seed}
    examples = [*record.examples, *map(str, record.failed[:5]), *record.failed_writes[:5]]
    return result_of(conditions, measured, outcome.demands(measured, _ZEROS), examples=examples)


SCENARIO: Final = Scenario(
    name="rolling",
    summary="every server of two regions restarted in turn under load: no request may fail",
    run=run,
    options=RollingOptions,
    help="""Drain, restart and put back every server of two regions in turn, under load.

    The exit status is 1 when any request fails, or anything is lost or stale.""",
    in_bench=False,
    seconds_bound=lambda _: _MOST_SECONDS,
)


def _names(injector: Injector, roles: tuple[str, ...], *, one_each: bool) -> list[str]:
    """Return the servers to restart, in order; with ``one_each`` one of each role."""
    chosen = [role for role in _ORDER if not roles or role in roles]
    by_role = [injector.regions.named(role) for role in chosen]
    return [name for names in by_role for name in (names[:1] if one_each else names)]


def _plan(
    roles: tuple[str, ...], one_each: bool, injector: Injector, record: RunRecord
) -> Iterator[Sequence[PlanStep]]:
    names = _names(injector, roles, one_each=one_each)
    for number, name in enumerate(names):
        record.done = number / len(names)
        kind = f"restart of a {injector.cluster.processes[name]}"
        yield [PlanStep(kind, partial(_restarted, name=name), at_once)]


@asynccontextmanager
async def _restarted(injector: Injector, name: str) -> AsyncIterator[str]:
    """Yield first, so that the restart is recorded from its very beginning."""
    yield name
    cluster = injector.cluster
    role = cluster.processes[name]
    if role in (Role.WATCHER, Role.TAILER):
        await cluster.restart(name)
        return
    if role is Role.DATABASE:
        await _replace_master(injector, name)
    await _command(injector, "drain", name, "--timeout", "30")
    await cluster.restart(name)
    await _command(injector, "undrain", name, "--timeout", "30")


async def _replace_master(injector: Injector, name: str) -> None:
    """Make another server the master where this one is."""
    for database in injector.regions.topology.databases:
        if database.servers[database.master_region].name == name:
            others = [region for region in database.servers if region != database.master_region]
            await _command(injector, "promote", database.name, "--to", others[0])


async def _command(injector: Injector, *words: str) -> None:
    status, errors = await operator_command(injector.regions, *words)
    if status:
        raise OperatorError(f"tao {' '.join(words)}: exit status {status}: {errors}")


def _measured(outcome: Outcome) -> dict[str, Any]:
    # Any: the JSON's values differ in kind.
    record = outcome.record
    restarts = [fault for fault in record.faults if fault.healthy]
    return {
        "restarts": len(restarts),
        "reads": record.reads,
        "failed_reads": record.failed_reads,
        "acked_writes": record.acknowledged,
        "failed_writes": record.refused.total() + record.unknown.total(),
        "acked_writes_lost": record.lost,
        "violations": sum(record.violations.values()),
        "stale_after_quiescence": outcome.stale,
        "differences": outcome.differences,
        "seconds": {fault.victim: round(fault.healthy - fault.struck, 2) for fault in restarts},
        "failed_writes_by_reason": {**record.refused, **record.unknown},
        **outcome.logs(),
    }
