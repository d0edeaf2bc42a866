"""Fills that fail, and those who have gone before they came: nobody waits in vain, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from tao.cache import CacheSettings, GraphCache, Stored
from tao.model.errors import InternalError, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import MAX_TIME
from tao.model.queries import EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery
from tao.serving.fill_source import give
from tao.serving.fills import Fills
from tao.serving.flights import FillSettings
from tests.rigs.asking import Awaited, answer
from tests.rigs.leader_rig import ARENAS, COMMENT
from tests.rigs.pacing import ManualClock, quiet
from tests.unit.serving.test_fills import LIMIT, A, ManualSource, Rig, Types, rig

__all__ = ["rig"]


async def test_a_failed_fetch_fails_all_who_wait_and_is_forgotten(rig: Rig) -> None:
    rig.source.manual = True
    waiting = [asyncio.ensure_future(answer(rig.fills, ObjectQuery(A), 0, critical=False)) for _ in range(2)]
    await quiet()
    give(rig.source.calls[0].take, Unavailable("away"))
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in found] == [Unavailable] * 2
    assert rig.fills.flights.under_way == 0


@pytest.mark.parametrize("critical", [False, True])
async def test_a_source_that_breaks_leaves_nothing_behind_and_is_heard_of(
    rig: Rig, caplog: pytest.LogCaptureFixture, *, critical: bool
) -> None:
    rig.source.fault = ZeroDivisionError()
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await answer(rig.fills, ObjectQuery(A), 0, critical=critical)
    assert "ZeroDivisionError" in caplog.text
    assert (rig.fills.flights.under_way, rig.fills.flights.waiting) == (0, 0)
    rig.source.fault = None
    await answer(rig.fills, ObjectQuery(A), 0, critical=False)


async def test_what_breaks_while_it_is_kept_fails_all_who_wait_and_is_heard_of(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Stored:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(GraphCache, "store_object", broken)
        asking = [answer(rig.fills, ObjectQuery(A), 0, critical=False) for _ in range(2)]
        found = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(each) for each in found] == [InternalError] * 2
    assert "ZeroDivisionError" in caplog.text
    assert rig.fills.flights.under_way == 0
    await answer(rig.fills, ObjectQuery(A), 0, critical=False)


async def test_an_asker_who_breaks_costs_the_others_of_his_flight_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Awaited):
        def take(self, answer: Fetched | TaoError) -> None:
            raise ZeroDivisionError

    rig.fills.answer(ObjectQuery(A), 0, Broken(), critical=False)
    assert (await answer(rig.fills, ObjectQuery(A), 0, critical=False)).value
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("critical", [False, True])
async def test_more_queries_than_may_wait_are_refused_though_they_would_join_a_flight(*, critical: bool) -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    fills = Fills(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(max_waiting=3))
    waiting = [asyncio.ensure_future(answer(fills, ObjectQuery(A), 0, critical=critical)) for _ in range(3)]
    await quiet()
    with pytest.raises(Overloaded, match="3 queries wait"):
        await answer(fills, ObjectQuery(A), 0, critical=critical)
    for call in source.calls:
        source.answer(call)
    await asyncio.gather(*waiting)
    source.manual = False
    cache.bump_shard(0)
    await answer(fills, ObjectQuery(A), 0, critical=critical)
    assert fills.flights.waiting == 0


@pytest.mark.parametrize("query", [RangeQuery(A, COMMENT, 0, 30), EdgesQuery(A, COMMENT, (1001,), MAX_TIME, 0)])
async def test_nothing_further_is_begun_for_an_asker_who_is_gone(rig: Rig, query: Query) -> None:
    rig.source.length, rig.source.manual = 100, True
    rig.fills.answer(RangeQuery(A, COMMENT, 0, 1), 0, Awaited(), critical=False)
    impatient = Awaited()
    rig.fills.answer(query, 0, impatient, critical=False)
    impatient.take(Unavailable("gone"))
    rig.source.answer(rig.source.calls[0])
    assert len(rig.source.calls) == 1, "a longer prefix, or the edge by itself, would be the next"


async def test_what_is_known_and_nobody_has_is_not_read_critically_for_an_asker_who_is_gone() -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    fills = Fills(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(), past_floors=True)
    impatient = Awaited()
    fills.answer(ObjectQuery(A), 0, impatient, critical=False)
    impatient.take(Unavailable("gone"))
    give(source.calls[0].take, StaleRead("nobody has it"))
    assert len(source.calls) == 1


async def test_those_who_have_gone_take_no_place_of_those_who_wait_and_their_flight_is_joined_and_lands() -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    fills = Fills(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(max_waiting=3))
    impatient = [Awaited() for _ in range(3)]
    for asker in impatient:
        fills.answer(ObjectQuery(A), 0, asker, critical=False)
        asker.take(Unavailable("gone"))
    waiting = [asyncio.ensure_future(answer(fills, ObjectQuery(A + n), 0, critical=False)) for n in (1, 0)]
    await quiet()
    assert [call.query for call in source.calls] == [ObjectQuery(A), ObjectQuery(A + 1)], "one joined what is under way"
    assert fills.flights.waiting == 2
    for call in source.calls:
        source.answer(call)
    await asyncio.gather(*waiting)
    assert (fills.flights.under_way, fills.flights.waiting) == (0, 0)


async def test_a_flight_whose_askers_have_all_gone_lands_once() -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    fills = Fills(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(max_waiting=1))
    impatient, patient = Awaited(), Awaited()
    fills.answer(ObjectQuery(A), 0, impatient, critical=False)
    impatient.take(Unavailable("gone"))
    fills.answer(ObjectQuery(A + 1), 0, patient, critical=False)
    for call in source.calls * 2:
        source.answer(call)
    await patient.answer()
    assert (fills.flights.under_way, fills.flights.waiting) == (0, 0)
