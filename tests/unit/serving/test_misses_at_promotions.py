"""Fills and critical reads in the second in which a master is replaced: rows are of a version epoch that not every
server goes by yet."""

from __future__ import annotations

import asyncio

from tao.model.errors import DatabaseDown
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import ObjectQuery
from tao.serving.sources import deliver
from tests.rigs.asking import answer
from tests.rigs.pacing import quiet, until
from tests.unit.serving.test_misses import A, Rig, rig, v

__all__ = ["rig"]


async def test_a_fetch_that_meets_a_master_being_replaced_is_repeated_without_it(rig: Rig) -> None:
    rig.cache.raise_object_floor(A, v(2), 1_000.0)
    rig.source.manual = True
    reading = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    for number in range(3):
        await until(lambda number=number: len(rig.source.calls) > number)  # type: ignore[misc]
        if rig.source.calls[number].critical:
            deliver(rig.source.calls[number].take, DatabaseDown("the former master"))
        else:
            rig.source.answer(rig.source.calls[number])
    await until(lambda: len(rig.source.calls) == 4)
    rig.source.version = v(2)
    rig.source.answer(rig.source.calls[3])
    assert version_of((await reading).value) == v(2)
    assert [call.critical for call in rig.source.calls] == [False, False, True, False]


async def test_a_critical_read_from_the_former_master_is_repeated_at_the_new_one(rig: Rig) -> None:
    rig.source.manual = True
    reading = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=True))
    await quiet()
    rig.cache.open_shard(A >> SHARD_SHIFT, 2)
    rig.source.manual = False
    (former,) = rig.source.calls
    rig.source.answer(former)
    rig.source.epoch, rig.source.version = 2, v(7)
    assert version_of((await reading).value) == v(7)
    assert [call.critical for call in rig.source.calls] == [True, True]
