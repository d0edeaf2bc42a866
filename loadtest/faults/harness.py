"""The harness of fault runs: start two regions, put a load on them, carry out plans of faults, wait until all is quiet,
and compare everything.

A scenario says what cluster it wants, which clients load it (`ClientLoad`) and what happens to it (`Plan`), and judges
the outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from loadtest.conditions import together
from loadtest.faults.injection import Injector
from loadtest.faults.plan import Plan, carry_out
from loadtest.faults.record import Fault, RunRecord
from loadtest.region_cluster import RegionCluster, region_cluster
from loadtest.results import Aim, at_most
from loadtest.scenario import Progress
from tao.devcluster.layout import ClusterSettings
from tao.model.errors import OperatorError

_STEP_SECONDS: Final = 0.5
_QUIET_SECONDS: Final = 120.0
_LOADED: Final = 0.85
"""The part of a run that the load takes, for its progress."""


class ClientLoad:
    """Clients that read and write while plans are carried out."""

    def __init__(self) -> None:
        self._tasks: Final[list[asyncio.Task[None]]] = []
        self._beside: Final[list[asyncio.Task[None]]] = []

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin the work of a client."""
        self._tasks.append(asyncio.create_task(work))

    def begin_beside(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work that is cancelled when the plans are carried out."""
        self._beside.append(asyncio.create_task(work))

    async def while_running(self, work: Coroutine[Any, Any, object]) -> None:
        """Do something while the load goes on. An error of the load itself cancels the work and is raised."""
        doing = asyncio.create_task(work)
        pending = {doing, *self._tasks, *self._beside}
        try:
            while not doing.done():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (doing, *self._beside):
                task.cancel()
            await asyncio.gather(doing, *self._beside, return_exceptions=True)

    async def stop(self) -> None:
        """Wait until the clients have ended. Raises their errors."""
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Cancel everything."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def before_fault(self, kind: str) -> None:
        """Prepare for a fault of this kind, which begins when this returns. Most loads do nothing."""

    async def after_fault(self, fault: Fault) -> None:
        """Do what has to be done when a fault is mended, before the cluster is waited for. Most loads do nothing."""

    def describe(self) -> tuple[str, float]:
        """Return what has been done so far, and which part of the whole that is, 0 to 1."""
        raise NotImplementedError

    async def differences(self) -> int:
        """Compare, once all is quiet, what the clients wrote with what there is; returns how much differs."""
        raise NotImplementedError


Beside = Callable[[RegionCluster, RunRecord], Coroutine[Any, Any, None]]
"""Runs beside the plans until it is cancelled; an error of its own ends the run. (`Any`: as in `Coroutine`.)"""


@dataclass(frozen=True, kw_only=True)
class FaultRun:
    """What a scenario wants of the harness."""

    cluster: ClusterSettings
    load: Callable[[RegionCluster, RunRecord, Random], AbstractAsyncContextManager[ClientLoad]]
    """Connect the clients and begin."""
    plans: Callable[[Injector, RunRecord, ClientLoad], Sequence[Plan]]
    """What happens to the cluster, each plan beside the others."""
    seed: int
    well_seconds: float | None
    """The time for the cluster to become healthy after each step of a plan; None when the next one does not wait."""
    logs: Path | None = None
    """A folder to leave the servers' logs in."""
    beside: Beside | None = None
    """Looks at the cluster while the plans are carried out."""


@dataclass(slots=True)
class Outcome:
    """What a run recorded, and what the comparison at its end found."""

    record: RunRecord = field(default_factory=RunRecord)
    busy_seconds: float = 0.0
    """The time from the beginning of the load to its end."""
    quiet_seconds: float = 0.0
    """From the end of the load until everything written had arrived everywhere."""
    stale: int | None = None
    """How much differed when all was quiet; None when nothing was compared."""
    differences: dict[str, int] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    not_well: str = ""
    """Why the run ended early: the cluster did not become healthy, or not quiet."""

    def logs(self) -> dict[str, Any]:
        """Return the examples and the logged failures for the JSON. `Any`: nested values."""
        return {
            "examples": self.record.examples,
            "failed_read_log": msgspec.to_builtins(self.record.failed),
            "failed_write_log": self.record.failed_writes,
        }

    def demands(self, measured: Mapping[str, Any], zeros: Sequence[str]) -> list[Aim]:
        """Return the aims that the run came to its end and that these counts, or sums of counts, are 0, where they are
        known."""
        aims = [at_most("the cluster becomes healthy and quiet", int(bool(self.not_well)), 0, self.not_well)]
        for name in zeros:
            count = sum(measured[name].values()) if isinstance(measured[name], Mapping) else measured[name]
            if count is not None:
                aims.append(at_most(f"no {name.replace('_', ' ')}", count, 0))
        return aims


async def carry_out_run(wanted: FaultRun, versions: dict[str, str], progress: Progress) -> Outcome:
    """Run load while plans are carried out, then compare everything. ``versions`` gets those of the servers.

    A cluster that does not become healthy or quiet ends the run; what was measured until then is returned with the
    reason. Raises `OperatorError` when the cluster does not start."""
    async with region_cluster(wanted.cluster, progress.step, logs=wanted.logs) as regions:
        versions.update(regions.versions)
        return await carry_out_in(regions, wanted, progress)


async def carry_out_in(regions: RegionCluster, wanted: FaultRun, progress: Progress) -> Outcome:
    """Do the same in a cluster that runs already, whose settings ``wanted`` has."""
    outcome = Outcome()
    record = outcome.record
    injector = Injector(regions, Random(wanted.seed + 1))
    async with wanted.load(regions, record, Random(wanted.seed)) as load:
        showing = asyncio.create_task(_show(load, progress))
        if wanted.beside is not None:
            load.begin_beside(wanted.beside(regions, record))
        try:
            plans = wanted.plans(injector, record, load)
            await load.while_running(
                together(carry_out(plan, injector, record, wanted.well_seconds, load) for plan in plans)
            )
            await load.stop()
            outcome.busy_seconds = record.now()
            showing.cancel()
            await _compare(regions, load, outcome, progress)
        except OperatorError as error:
            outcome.not_well = error.message
        finally:
            showing.cancel()
            await load.cancel()
            outcome.busy_seconds = outcome.busy_seconds or record.now()
    return outcome


async def _compare(regions: RegionCluster, load: ClientLoad, outcome: Outcome, progress: Progress) -> None:
    progress.step("waiting until all is quiet", 0.88)
    await regions.quiet(_QUIET_SECONDS)
    outcome.quiet_seconds = outcome.record.now() - outcome.busy_seconds
    differing = await load.differences()
    found = await regions.differences(lambda server, count: progress.step(f"{server}: {count:,}", 0.95))
    outcome.stale = differing + sum(found.kinds.values())
    outcome.differences, outcome.compared = found.kinds, found.compared
    if found.kinds:
        for example in found.examples:
            outcome.record.example(example)


async def _show(load: ClientLoad, progress: Progress) -> None:
    while True:
        text, done = load.describe()
        progress.step(text, _LOADED * min(1.0, done))
        await asyncio.sleep(_STEP_SECONDS)
