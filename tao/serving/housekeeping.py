"""What a cache needs done now and then: old floors forgotten, dropped tables freed in steps (DESIGN.md §4)."""

from __future__ import annotations

import asyncio
from typing import Final

from tao.cache import GraphCache
from tao.model.ports import Clock

LOOK_SECONDS: Final = 0.1
"""Between two looks for dropped tables: their memory waits no longer than this."""

STEP_SECONDS: Final = 0.002
"""Between two steps of freeing: the loop serves requests in between."""

FLOOR_LOOKS: Final = 300
"""Looks between two rounds of forgetting floors: every 30 s, half of the time that floors are kept."""


async def keep_house(cache: GraphCache, clock: Clock) -> None:
    """Until cancelled."""
    looks = 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        more = cache.reclaim_step()
        while more:
            await asyncio.sleep(STEP_SECONDS)
            more = cache.reclaim_step()
        looks += 1
        if looks % FLOOR_LOOKS == 0:
            cache.forget_old_floors(clock.monotonic())
