"""Prefixes that deletions make short are refilled in the background, over a source that the test drives by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.model.changes import GoneEdge, ListChange
from tao.model.edge_block import decode_block
from tao.model.errors import SettingsError, Unavailable
from tao.model.queries import CountQuery, RangeQuery
from tao.serving.prefix_refills import PrefixRefills, RefillSettings
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import FetchRequest
from tests.rigs.asking import answer, make_misses
from tests.rigs.leader_rig import ARENAS, COMMENT, make_id
from tests.rigs.pacing import ManualClock, Tasks, quiet, until
from tests.unit.serving.test_misses import LIMIT, ManualSource, Types, v

A, B = make_id(64), make_id(128)
SETTINGS = RefillSettings(pause_seconds=0.001)


class Rig:
    """A cache with a list of 1,000 edges, of which the source gives what is asked for."""

    def __init__(self, settings: RefillSettings = SETTINGS) -> None:
        self.cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types())
        self.cache.open_shard(0, 1)
        self.source, self.tasks = ManualSource(1_000), Tasks()
        fill_settings = FillSettings(min_prefix_edges=4, refetch_pause_seconds=0.001)
        self.single_flight = SingleFlight(self.cache, self.source, ManualClock(), lambda _: LIMIT, fill_settings)
        self.misses = make_misses(self.single_flight)
        self.refills = PrefixRefills(self.single_flight, self.tasks, settings)

    async def read(self, limit: int, id1: int = A) -> None:
        """Have so many edges, or one more, in the cache."""
        await answer(self.misses, RangeQuery(id1, COMMENT, 0, limit), 0, critical=False)
        self.source.calls.clear()

    def delete(self, count: int, id1: int = A) -> None:
        """The newest so many edges go, by one change."""
        before, self.source.version = self.source.version, self.source.version + 1
        gone = tuple(GoneEdge(1000 + time, time) for time in range(self.source.length, self.source.length - count, -1))
        self.source.length -= count
        change = ListChange(id1, COMMENT, before, self.source.version, self.source.length, gone, ())
        self.cache.apply(change, 1, 1_000.0)

    def held(self, id1: int = A) -> list[int]:
        return [edge.time for edge in decode_block(self.cache.peek_list(id1, COMMENT) or b"")]

    @property
    def asked(self) -> list[object]:
        return [call.query for call in self.source.calls]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.tasks.close()
    assert rig.tasks.errors == []


async def test_a_prefix_that_falls_below_half_is_refilled_without_a_read(rig: Rig) -> None:
    await rig.read(LIMIT)
    for _ in range(4):
        rig.delete(LIMIT // 8)
    await quiet()
    assert rig.asked == [], "half is enough"
    rig.delete(1)
    await until(lambda: rig.refills.outcomes["kept"])
    assert rig.asked == [RangeQuery(A, COMMENT, 0, LIMIT)]
    assert rig.held() == list(range(rig.source.length, rig.source.length - LIMIT, -1))
    assert rig.single_flight.started == 1, "the reader's at first: a refill is no flight"
    await until(lambda: not rig.tasks.running)


async def test_a_short_prefix_is_refilled_to_what_a_first_fetch_brings(rig: Rig) -> None:
    await rig.read(1)
    assert len(rig.held()) == 5
    rig.delete(3)
    await until(lambda: rig.refills.outcomes["kept"])
    assert rig.asked == [RangeQuery(A, COMMENT, 0, 5)]


async def test_a_prefix_that_lost_all_of_its_edges_is_refilled(rig: Rig) -> None:
    await rig.read(LIMIT)
    rig.delete(LIMIT)
    assert rig.cache.peek_list(A, COMMENT) is None
    await until(lambda: rig.refills.outcomes["kept"])
    assert len(rig.held()) == LIMIT


async def test_a_list_that_has_become_empty_is_not_read(rig: Rig) -> None:
    await rig.read(LIMIT)
    rig.delete(LIMIT)
    rig.delete(rig.source.length)
    await until(lambda: not rig.tasks.running)
    assert (rig.asked, sum(rig.refills.outcomes.values())) == ([], 0)


async def test_a_list_that_is_cached_whole_is_not_refilled(rig: Rig) -> None:
    rig.source.length = 100
    await rig.read(LIMIT)
    rig.delete(99)
    await quiet()
    assert (rig.held(), rig.tasks.running) == ([1], set())


async def test_a_list_that_a_reader_filled_or_that_was_dropped_is_not_refilled(rig: Rig) -> None:
    await rig.read(LIMIT)
    await rig.read(LIMIT, B)
    rig.delete(LIMIT // 2 + 1)
    rig.source.version -= 1
    rig.delete(LIMIT // 2 + 1, B)
    rig.cache.raise_list_floor(B, COMMENT, v(100), 1_000.0)  # what is held of it is dropped
    rig.source.manual = False
    await answer(rig.misses, RangeQuery(A, COMMENT, 0, LIMIT), 0, critical=False)
    asked = len(rig.asked)
    await until(lambda: not rig.tasks.running)
    assert len(rig.asked) == asked
    assert sum(rig.refills.outcomes.values()) == 0


async def test_lists_are_refilled_one_at_a_time_and_each_once(rig: Rig) -> None:
    await rig.read(LIMIT)
    await rig.read(LIMIT, B)
    rig.source.manual = True
    rig.delete(LIMIT // 2 + 1)
    rig.delete(1)
    rig.source.length, rig.source.version = 1_000, v(1)
    rig.delete(LIMIT // 2 + 1, B)
    await until(lambda: rig.asked)
    rig.delete(1, B)
    await quiet()
    assert rig.asked == [RangeQuery(A, COMMENT, 0, LIMIT)]
    rig.source.answer(rig.source.calls[0])
    await until(lambda: len(rig.asked) == 2)
    rig.source.answer(rig.source.calls[1])
    await until(lambda: not rig.tasks.running)
    assert len(rig.asked) == 2


async def test_a_reader_does_not_wait_for_a_refill(rig: Rig) -> None:
    await rig.read(LIMIT)
    rig.source.manual = True
    rig.delete(LIMIT - 1)
    await until(lambda: rig.asked)
    rig.source.manual = False
    await answer(rig.misses, RangeQuery(A, COMMENT, 0, 20), 0, critical=False)
    assert rig.single_flight.joined == 0
    assert len(rig.held()) == 21
    rig.source.answer(rig.source.calls[0])
    await until(lambda: rig.refills.outcomes["kept"])
    assert len(rig.held()) == LIMIT


async def test_refills_wait_while_readers_wait_for_the_source(rig: Rig) -> None:
    rig = Rig(replace(SETTINGS, max_reader_fills=1))
    await rig.read(LIMIT)
    rig.source.manual = True
    reading = asyncio.ensure_future(answer(rig.misses, CountQuery(B, COMMENT), 0, critical=False))
    rig.delete(LIMIT - 1)
    await asyncio.sleep(0.02)  # many pauses: that nothing happens has no event to wait for
    assert rig.asked == [CountQuery(B, COMMENT)]
    rig.source.answer(rig.source.calls[0])
    rig.source.manual = False
    await reading
    await until(lambda: rig.refills.outcomes["kept"])
    await rig.tasks.close()


async def test_a_failed_refill_is_repeated_a_bounded_number_of_times(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.read(LIMIT)

    def fail(asked: FetchRequest) -> None:
        asked.fail(Unavailable("the database is away"))

    monkeypatch.setattr(rig.source, "fetch", fail)
    rig.delete(LIMIT - 1)
    await until(lambda: not rig.tasks.running)
    assert rig.refills.outcomes["failed"] == SETTINGS.max_attempts
    assert len(rig.held()) == 1


async def test_queued_lists_are_bounded_and_refills_can_be_switched_off() -> None:
    for settings, asked in ((replace(SETTINGS, max_lists=1), 1), (replace(SETTINGS, min_share=0), 0)):
        rig = Rig(settings)
        for id1 in (A, B):
            await rig.read(LIMIT, id1)
        for id1 in (A, B):
            rig.source.length, rig.source.version = 1_000, v(1)
            rig.delete(LIMIT, id1)
        await until(lambda rig=rig: not rig.tasks.running)  # type: ignore[misc]  # bound here
        assert len(rig.asked) == asked


@pytest.mark.parametrize("wrong", [{"min_share": 1.0}, {"pause_seconds": 0.0}, {"max_lists": 0}])
def test_settings_that_cannot_work_are_rejected(wrong: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        RefillSettings(**wrong)  # type: ignore[arg-type]  # numbers of either kind
