"""Plans: what fails during a run, when, and for how long.

A plan is a sequence of groups of steps; the steps of a group happen together, and a group begins when the one before is
over. It may be a generator that looks at the run so far before it gives the next group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

from loadtest.conditions import until
from loadtest.faults.health import until_well
from loadtest.faults.injection import DISK_FULL, LEADER_KILL, LINE_CUT, MASTER_LOST, Injector
from loadtest.faults.record import Fault, RunRecord

_LOOK_SECONDS: Final = 0.02
_MOST_AWAY_SECONDS: Final = 3.0
_EDGE_SHARE: Final = 0.03
"""Share of the work at its beginning and at its end in which no fault is injected."""

Action = Callable[[Injector], AbstractAsyncContextManager[str]]
"""Does something to the cluster and yields the victim's name; it is undone when the context is left."""


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One fault, or one action of an operator: when it begins, and how many seconds it lasts."""

    kind: str
    action: Action
    begin: Callable[[], Awaitable[None]]
    """Returns when the step is to begin."""
    seconds: float = 0.0


Plan = Iterable[Sequence[PlanStep]]


class FaultHooks(Protocol):
    """What is called around each fault."""

    async def before_fault(self, kind: str) -> None:
        """Called just before a fault of this kind begins."""

    async def after_fault(self, fault: Fault) -> None:
        """Called when what failed is back, before the cluster is healthy again."""


async def carry_out(
    plan: Plan,
    injector: Injector,
    record: RunRecord,
    well_seconds: float | None,
    hooks: FaultHooks,
) -> None:
    """Carry out a plan and record its faults.

    After each step the cluster has ``well_seconds`` to become healthy again; with None the next step does not wait for
    that. Raises `OperatorError` when it does not, or a process does not come back."""

    async def one(step: PlanStep) -> None:
        await step.begin()
        await hooks.before_fault(step.kind)
        failed_before = len(record.failed)
        async with step.action(injector) as victim:
            database = injector.database_of(victim) if step.kind in MASTER_LOST else ""
            fault = record.strike(step.kind, victim, database, failed_before)
            if step.kind == LEADER_KILL:
                record.await_writes(fault, injector.led_by(victim))
            if step.kind in LINE_CUT:
                fault.splits_masters = len({each.master_region for each in injector.regions.topology.databases}) > 1
            await asyncio.sleep(step.seconds)
            fault.healing = record.now()
        fault.mended = record.now()
        if step.kind in DISK_FULL:
            record.await_writes(fault, range(injector.regions.routes.shards))
        await hooks.after_fault(fault)
        if well_seconds is not None:
            await until_well(injector.regions, well_seconds)
        record.healed(fault)

    for group in plan:
        await asyncio.gather(*(one(step) for step in group))


async def at_once() -> None:
    """Begin a step as soon as its turn comes."""


def after(seconds: float) -> Callable[[], Awaitable[None]]:
    """Begin a step so many seconds after the one before."""
    return lambda: asyncio.sleep(seconds)


@dataclass(frozen=True, slots=True)
class FaultMoment:
    """When a fault begins, as a share of the work; for how long; and a number that chooses the victim or the kind.

    A share, and not a time, so that a slow machine has its faults at the same place in the work as a fast one."""

    share: float
    away_seconds: float
    which: int

    def reached(self, done: Callable[[], float]) -> Callable[[], Awaitable[None]]:
        """Begin a step when this share of the work is done."""

        async def come() -> bool:
            return done() >= self.share

        return lambda: until(come, _LOOK_SECONDS)


def random_moments(count: int, chance: Random) -> list[FaultMoment]:
    """Draw moments, in their order."""
    shares = sorted(chance.uniform(_EDGE_SHARE, 1 - _EDGE_SHARE) for _ in range(count))
    return [FaultMoment(share, chance.uniform(0, _MOST_AWAY_SECONDS), chance.randrange(1 << 16)) for share in shares]
