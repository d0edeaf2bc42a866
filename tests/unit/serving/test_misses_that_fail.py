"""Misses that fail, and waiters that are gone before the answer: no query hangs, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest

from tao.cache import CacheSettings, FillTicket, GraphCache, Stored
from tao.model.errors import InternalError, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import MAX_TIME
from tao.model.queries import CountQuery, EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery
from tao.serving.misses import LoneMiss, Miss
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import deliver
from tests.rigs.asking import Awaited, answer, begin, make_misses
from tests.rigs.leader_rig import ARENAS, COMMENT
from tests.rigs.pacing import ManualClock, quiet
from tests.unit.serving.test_misses import LIMIT, A, ManualSource, Rig, Types, rig

__all__ = ["rig"]


async def test_a_failed_fetch_fails_all_of_its_waiters_and_is_forgotten(rig: Rig) -> None:
    rig.source.manual = True
    waiting = [asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False)) for _ in range(2)]
    await quiet()
    deliver(rig.source.calls[0].take, Unavailable("away"))
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(each) for each in found] == [Unavailable] * 2
    assert rig.misses.single_flight.under_way == 0


@pytest.mark.parametrize("critical", [False, True])
async def test_a_source_that_raises_leaves_nothing_behind_and_is_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture, *, critical: bool
) -> None:
    rig.source.fault = ZeroDivisionError()
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await answer(rig.misses, ObjectQuery(A), 0, critical=critical)
    assert "ZeroDivisionError" in caplog.text
    assert (rig.misses.single_flight.under_way, rig.misses.single_flight.waiting) == (0, 0)
    rig.source.fault = None
    await answer(rig.misses, ObjectQuery(A), 0, critical=False)


@pytest.mark.parametrize("query", [ObjectQuery(A), CountQuery(A, COMMENT)])
async def test_a_ticket_that_cannot_be_taken_leaves_nothing_behind(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, query: Query
) -> None:
    def broken(*_: object) -> FillTicket:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(GraphCache, "ticket", broken)
        with pytest.raises(MemoryError):
            await answer(rig.misses, query, 0, critical=False)
    assert (rig.misses.single_flight.under_way, rig.misses.single_flight.waiting) == (0, 0)
    await answer(rig.misses, query, 0, critical=False)


async def test_an_exception_while_storing_fails_all_waiters_and_is_logged(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> Stored:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(GraphCache, "store_object", broken)
        asking = [answer(rig.misses, ObjectQuery(A), 0, critical=False) for _ in range(2)]
        found = await asyncio.gather(*asking, return_exceptions=True)
    assert [type(each) for each in found] == [InternalError] * 2
    assert "ZeroDivisionError" in caplog.text
    assert rig.misses.single_flight.under_way == 0
    await answer(rig.misses, ObjectQuery(A), 0, critical=False)


async def test_a_waiter_that_raises_costs_the_others_of_its_fetch_nothing(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Awaited):
        def take(self, miss: Miss | LoneMiss, answer: Fetched | TaoError) -> None:
            raise ZeroDivisionError

    begin(rig.misses, ObjectQuery(A), 0, Broken(), critical=False)
    assert (await answer(rig.misses, ObjectQuery(A), 0, critical=False)).value
    assert "ZeroDivisionError" in caplog.text


async def test_a_miss_whose_answer_cannot_be_taken_from_what_was_fetched_fails_at_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr("tao.serving.misses.range_answer", broken)
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await answer(rig.misses, RangeQuery(A, COMMENT, 0, 1), 0, critical=False)
    assert "ZeroDivisionError" in caplog.text
    assert (rig.misses.single_flight.under_way, rig.misses.single_flight.waiting) == (0, 0)


@pytest.mark.parametrize("query", [ObjectQuery(A), RangeQuery(A, COMMENT, 0, 1)])
async def test_a_receiver_that_raises_gets_no_second_answer(rig: Rig, query: Query) -> None:
    taken: list[Fetched | TaoError] = []

    class Broken(Awaited):
        def take(self, miss: Miss | LoneMiss, answer: Fetched | TaoError) -> None:
            taken.append(answer)
            raise ZeroDivisionError

    begin(rig.misses, query, 0, Broken(), critical=False)
    await quiet()
    assert len(taken) == 1
    assert (rig.misses.single_flight.under_way, rig.misses.single_flight.waiting) == (0, 0)


@pytest.mark.parametrize("critical", [False, True])
async def test_more_queries_than_may_wait_are_refused_though_they_would_join_a_fetch(*, critical: bool) -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    misses = make_misses(SingleFlight(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(max_waiting=3)))
    waiting = [asyncio.ensure_future(answer(misses, ObjectQuery(A), 0, critical=critical)) for _ in range(3)]
    await quiet()
    with pytest.raises(Overloaded, match="3 queries wait"):
        await answer(misses, ObjectQuery(A), 0, critical=critical)
    for call in source.calls:
        source.answer(call)
    await asyncio.gather(*waiting)
    source.manual = False
    cache.bump_shard(0)
    await answer(misses, ObjectQuery(A), 0, critical=critical)
    assert misses.single_flight.waiting == 0


@pytest.mark.parametrize("query", [RangeQuery(A, COMMENT, 0, 30), EdgesQuery(A, COMMENT, (1001,), MAX_TIME, 0)])
async def test_no_further_fetch_is_started_for_a_waiter_that_is_gone(rig: Rig, query: Query) -> None:
    rig.source.length, rig.source.manual = 100, True
    begin(rig.misses, RangeQuery(A, COMMENT, 0, 1), 0, Awaited(), critical=False)
    impatient = Awaited()
    begin(rig.misses, query, 0, impatient, critical=False)
    impatient.give_up()
    rig.source.answer(rig.source.calls[0])
    assert len(rig.source.calls) == 1, "a longer prefix, or the edge by itself, would be the next"


async def test_no_critical_read_is_made_for_a_waiter_that_is_gone() -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    misses = make_misses(SingleFlight(cache, source, ManualClock(), lambda _: LIMIT, FillSettings()), past_floors=True)
    impatient = Awaited()
    begin(misses, ObjectQuery(A), 0, impatient, critical=False)
    impatient.give_up()
    deliver(source.calls[0].take, StaleRead("nobody has it"))
    assert len(source.calls) == 1


async def test_gone_waiters_take_no_place_from_others_and_their_fetch_can_be_joined() -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    misses = make_misses(SingleFlight(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(max_waiting=3)))
    impatient = [Awaited() for _ in range(3)]
    for asker in impatient:
        begin(misses, ObjectQuery(A), 0, asker, critical=False)
        asker.give_up()
    waiting = [asyncio.ensure_future(answer(misses, ObjectQuery(A + n), 0, critical=False)) for n in (1, 0)]
    await quiet()
    assert [call.query for call in source.calls] == [ObjectQuery(A), ObjectQuery(A + 1)], "one joined what is under way"
    assert misses.single_flight.waiting == 2
    for call in source.calls:
        source.answer(call)
    await asyncio.gather(*waiting)
    assert (misses.single_flight.under_way, misses.single_flight.waiting) == (0, 0)


async def test_a_fetch_whose_waiters_have_all_gone_finishes_once() -> None:
    cache, source = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types()), ManualSource()
    cache.open_shard(0, 1)
    source.manual = True
    misses = make_misses(SingleFlight(cache, source, ManualClock(), lambda _: LIMIT, FillSettings(max_waiting=1)))
    impatient, patient = Awaited(), Awaited()
    begin(misses, ObjectQuery(A), 0, impatient, critical=False)
    impatient.give_up()
    begin(misses, ObjectQuery(A + 1), 0, patient, critical=False)
    for call in source.calls * 2:
        source.answer(call)
    await patient.answer()
    assert (misses.single_flight.under_way, misses.single_flight.waiting) == (0, 0)
