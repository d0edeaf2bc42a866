"""Fills and critical reads in the second in which a master is replaced: rows are of a version epoch that not every
server goes by yet (DESIGN §6, §9)."""

from __future__ import annotations

import asyncio

from tao.model.errors import DatabaseDown
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import ObjectQuery
from tao.serving.fill_source import give
from tests.rigs.asking import answer
from tests.rigs.pacing import quiet, until
from tests.unit.serving.test_fills import A, Rig, rig, v

__all__ = ["rig"]


async def test_a_fill_that_needs_a_master_that_is_just_being_replaced_is_made_once_more_without_it(rig: Rig) -> None:
    rig.cache.raise_object_floor(A, v(2), 1_000.0)
    rig.source.manual = True
    reading = asyncio.ensure_future(answer(rig.fills, ObjectQuery(A), 0, critical=False))
    for number in range(3):
        await until(lambda number=number: len(rig.source.calls) > number)  # type: ignore[misc]
        if rig.source.calls[number].critical:
            give(rig.source.calls[number].take, DatabaseDown("the former master"))
        else:
            rig.source.answer(rig.source.calls[number])
    await until(lambda: len(rig.source.calls) == 4)
    rig.source.version = v(2)
    rig.source.answer(rig.source.calls[3])
    assert version_of((await reading).value) == v(2)
    assert [call.critical for call in rig.source.calls] == [False, False, True, False]


async def test_a_critical_read_that_met_the_former_master_is_made_again_at_the_new_one(rig: Rig) -> None:
    rig.source.manual = True
    reading = asyncio.ensure_future(answer(rig.fills, ObjectQuery(A), 0, critical=True))
    await quiet()
    rig.cache.open_shard(A >> SHARD_SHIFT, 2)
    rig.source.manual = False
    (former,) = rig.source.calls
    rig.source.answer(former)
    rig.source.epoch, rig.source.version = 2, v(7)
    assert version_of((await reading).value) == v(7)
    assert [call.critical for call in rig.source.calls] == [True, True]
