"""What goes wrong between and in two regions during a run: tailers that crash, a line that is cut.

Moments, victims and lengths are drawn from a seed. A moment is a share of the writes issued, so that a slow machine has
its faults at the same place in the work as a fast one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from loadtest.two_regions import MASTER, REMOTE, TwoRegions
from loadtest.waiting import until
from tao.devcluster.line_control import Cut, Heal, ask_line

_LOOK_SECONDS: Final = 0.02
_MOST_AWAY_SECONDS: Final = 3.0
_EDGE_SHARE: Final = 0.03
"""At the beginning and the end of the work that is left in peace."""


@dataclass(frozen=True, slots=True)
class Fault:
    """When it comes, as a share of the work; for how long; and, by its number, whom it hits or how."""

    share: float
    away_seconds: float
    which: int


@dataclass(slots=True)
class Done:
    """How many faults there were while the writes went on."""

    tailer_kills: int = 0
    link_cuts: int = 0


def plan_faults(count: int, chance: Random) -> list[Fault]:
    """In their order."""
    shares = sorted(chance.uniform(_EDGE_SHARE, 1 - _EDGE_SHARE) for _ in range(count))
    return [Fault(share, chance.uniform(0, _MOST_AWAY_SECONDS), chance.randrange(1 << 16)) for share in shares]


async def kill_tailers(regions: TwoRegions, faults: list[Fault], share: Callable[[], float], done: Done) -> None:
    """SIGKILL, a while without, and started again. Raises `OperatorError` when one does not come back."""
    for fault in faults:
        await _reached(fault.share, share)
        tailer = regions.tailers[fault.which % len(regions.tailers)]
        await regions.cluster.kill(tailer)
        done.tailer_kills += 1
        await asyncio.sleep(fault.away_seconds)
        await regions.cluster.restart(tailer)


async def cut_line(regions: TwoRegions, faults: list[Fault], share: Callable[[], float], done: Done) -> None:
    """Every other kind refuses connections, the rest swallows what is sent. Healed at the end, whatever happens."""
    control, between = regions.cluster.line_control, (MASTER, REMOTE)
    for fault in faults:
        await _reached(fault.share, share)
        try:
            await ask_line(control, Cut(between, silent=fault.which % 2 == 0))
            done.link_cuts += 1
            await asyncio.sleep(fault.away_seconds)
        finally:
            await ask_line(control, Heal(between))


async def _reached(moment: float, share: Callable[[], float]) -> None:
    async def come() -> bool:
        return share() >= moment

    await until(come, _LOOK_SECONDS)
