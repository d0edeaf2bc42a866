"""A flush arrives after the slot of its life was folded.

follower                          leader                            worker
flushes 5 (number 1)        →     slot: 5
counts 4 more
flushes 9 (number 2)        →     (held)
                                  slot 0: 5, slot: 5, folded 5  ←   folds what has not changed for long
                            →     slot: 9, folded 5
                                  slot 0: 9, slot: 9, folded 9  ←   folds again
the first flush, repeated   →     changes nothing

A fold that forgot the slot would count the late flush as 9, and the sum would be 14. One that forgot the number would
take the repeated flush back to 5.
"""

from __future__ import annotations

import asyncio

from tao.model.counters import FOLDED_SLOT, SlotTotals, decode_totals
from tao.model.writes import FlushCounter, FoldCounter
from tests.rigs.leader_rig import make_id
from tests.rigs.pacing import until
from tests.rigs.region_rig import RegionRig
from tests.unit.follower.test_counters import adding, flushed, value, write

A, VIEWS = make_id(64), 401


def slots(region: RegionRig) -> dict[int, SlotTotals]:
    return {edge.id2: decode_totals(edge.data) for edge in region.store.edges(A, VIEWS)}


async def test_a_flush_that_a_fold_has_overtaken_counts_for_the_difference(region: RegionRig) -> None:
    near, link = region.near, region.near.links["leader-1"]
    await write(near, adding(A, 5))
    await flushed(near)
    (slot,) = slots(region)
    await write(near, adding(A, 4))
    link.hold_requests.add("write")
    drained = asyncio.ensure_future(near.counters.drain())
    await until(lambda: link.held)
    fold = FoldCounter(A, VIEWS, (slot,))
    await region.leader.write(fold)
    assert slots(region) == {FOLDED_SLOT: SlotTotals(5), slot: SlotTotals(5, 0, 5)}
    assert await value(near, critical=True) == 9
    link.let_go()
    await drained
    assert slots(region) == {FOLDED_SLOT: SlotTotals(5), slot: SlotTotals(9, 0, 5)}
    assert await value(near, critical=True) == 9
    await region.leader.write(fold)
    await region.leader.write(FlushCounter(A, VIEWS, slot, 1, 5, 0))
    assert slots(region) == {FOLDED_SLOT: SlotTotals(9), slot: SlotTotals(9, 0, 9)}
    assert await value(region.near) == await value(region.near, critical=True) == 9
