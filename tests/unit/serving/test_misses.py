"""Misses over a source that the test drives by hand: which share a fetch, what is cached, and every bound."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.model.changes import ListChange, ObjectChange
from tao.model.edge_block import COMPLETE, PREFIX, decode_block, encode_block, header
from tao.model.errors import Overloaded, StaleRead, Unavailable
from tao.model.graph import MAX_TIME, Edge, encode_count, encode_object, version_of
from tao.model.queries import CountQuery, EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery, TimeRangeQuery, start_at
from tao.serving.misses import Misses
from tao.serving.single_flight import FillSettings, SingleFlight
from tao.serving.sources import FetchRequest, OnPause, Take, deliver
from tests.rigs.asking import Awaited, answer, begin, make_misses
from tests.rigs.leader_rig import ARENAS, COMMENT, make_id
from tests.rigs.pacing import ManualClock, quiet, until
from tests.rigs.versions import make_version

A = make_id(64)
LIMIT = 400
SETTINGS = FillSettings(min_prefix_edges=4, max_refetches=2, refetch_pause_seconds=0.001, max_fetches=12)


def v(counter: int) -> int:
    return make_version(1, counter)


@dataclass
class Call:
    """A fetch under way, to be answered by the test."""

    query: Query
    minimum: int
    critical: bool
    take: Take
    on_pause: OnPause


class ManualSource:
    """A `FetchSource` with a list of ``length`` edges (times length … 1, id2 = 1000 + time) at ``version``."""

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self.version = v(1)
        self.epoch = 1
        self.calls: list[Call] = []
        self.manual = False
        self.fault: Exception | None = None

    def fetch(self, asked: FetchRequest) -> None:
        if self.fault is not None:
            raise self.fault
        call = Call(asked.query, asked.minimum, asked.critical, asked.take, asked.on_pause)
        self.calls.append(call)
        if not self.manual:
            asyncio.get_running_loop().call_soon(self.answer, call)

    def answer(self, call: Call, *, keep: bool = True) -> None:
        deliver(call.take, Fetched(self.value(call.query), self.epoch, "source", keep=keep))

    def value(self, query: Query) -> bytes:
        edges = [Edge(1000 + time, time) for time in range(self.length, 0, -1)]
        match query:
            case ObjectQuery():
                return encode_object(self.version, 1, b"x")
            case CountQuery():
                return encode_count(self.version, self.length)
            case RangeQuery(pos=pos, limit=limit):
                part = edges[pos : pos + limit]
                flags = (PREFIX | (COMPLETE if len(part) == self.length else 0)) if pos == 0 else 0
                return encode_block(self.version, self.length, part, flags)
            case TimeRangeQuery(high=high, low=low, limit=limit, pos=pos):
                found = [edge for edge in edges if high >= edge.time >= low][pos : pos + limit]
            case _:
                found = [edge for edge in edges if edge.id2 in query.id2s]
        return encode_block(self.version, self.length, found, 0)


class Types:
    """Lists of at most `LIMIT` edges."""

    def object_arena(self, otype: int) -> str:
        return "default"

    def list_arena(self, atype: int) -> str:
        return "default"

    def list_limit(self, atype: int) -> int:
        return LIMIT


@dataclass
class Rig:
    cache: GraphCache
    source: ManualSource
    misses: Misses

    async def range(self, limit: int, pos: int = 0, minimum: int = 0) -> list[int]:
        query = RangeQuery(A, COMMENT, pos, limit)
        return times((await answer(self.misses, query, minimum, critical=False)).value)


@pytest.fixture
async def rig() -> Rig:
    cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), Types())
    cache.open_shard(0, 1)
    source = ManualSource()
    return Rig(cache, source, make_misses(SingleFlight(cache, source, ManualClock(), lambda _: LIMIT, SETTINGS)))


def times(block: bytes) -> list[int]:
    return [edge.time for edge in decode_block(block)]


async def test_misses_of_one_key_share_one_fetch(rig: Rig) -> None:
    answers = await asyncio.gather(*(answer(rig.misses, ObjectQuery(A), 0, critical=False) for _ in range(20)))
    assert len(set(answers)) == len(rig.source.calls) == 1
    assert (rig.misses.single_flight.started, rig.misses.single_flight.joined, rig.misses.single_flight.under_way) == (
        1,
        19,
        0,
    )


async def test_prefixes_of_one_list_share_one_fetch_and_more_than_asked_is_cached(rig: Rig) -> None:
    await asyncio.gather(rig.range(2), rig.range(3), rig.range(1, pos=1))
    assert [call.query for call in rig.source.calls] == [RangeQuery(A, COMMENT, 0, 5)]
    assert times(rig.cache.peek_list(A, COMMENT) or b"") == [10, 9, 8, 7, 6]


async def test_a_prefix_that_is_too_short_is_doubled(rig: Rig) -> None:
    rig.source.length = 100
    await rig.range(30)
    await rig.range(35)
    assert [getattr(call.query, "limit", 0) for call in rig.source.calls] == [31, 62]


@pytest.mark.parametrize("readers", [2, 8])
async def test_each_of_many_readers_gets_the_length_it_asked_for(rig: Rig, readers: int) -> None:
    """All join flights for shorter prefixes, time and again; the shard keeps nothing, so none is helped by the
    cache."""
    rig.source.length = 300
    rig.cache.bump_shard(0)
    for other in range(70_000):
        rig.cache.raise_object_floor(make_id(1_000_000 + other), v(1), 1_000.0)
    lengths = [5 + 20 * number for number in range(readers)]
    found = await asyncio.gather(*(rig.range(length) for length in lengths))
    assert [len(each) for each in found] == lengths


async def test_a_range_beyond_the_limit_is_fetched_and_not_cached(rig: Rig) -> None:
    rig.source.length = 500
    assert await rig.range(50, pos=380) == list(range(120, 70, -1))
    assert rig.source.calls[-1].query == RangeQuery(A, COMMENT, 380, 50)
    assert rig.cache.peek_list(A, COMMENT) is None


async def test_an_answer_that_is_not_cached_is_fetched_again_below_the_floor(rig: Rig) -> None:
    rig.source.length = 500
    rig.cache.raise_list_floor(A, COMMENT, v(2), 1_000.0)
    with pytest.raises(StaleRead):
        await rig.range(50, pos=380)
    assert len(rig.source.calls) == 3


async def test_an_answer_below_its_floor_is_fetched_again_and_the_last_time_critically(rig: Rig) -> None:
    rig.cache.raise_object_floor(A, v(2), 1_000.0)
    with pytest.raises(StaleRead):
        await answer(rig.misses, ObjectQuery(A), 0, critical=False)
    assert [call.critical for call in rig.source.calls] == [False, False, True]
    assert {call.minimum for call in rig.source.calls} == {v(2)}, "what is known here travels upstream"
    assert rig.cache.peek_object(A) is None


async def test_a_reader_with_a_minimum_takes_no_older_answer_from_a_fetch_it_joined(rig: Rig) -> None:
    rig.source.manual = True
    first = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    second = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), v(2), critical=False))
    await quiet()
    rig.source.answer(rig.source.calls[0])
    await until(lambda: len(rig.source.calls) == 2)
    assert rig.source.calls[1].minimum == v(2)
    rig.source.version = v(2)
    rig.source.answer(rig.source.calls[1])
    assert version_of((await first).value) == v(1)
    assert version_of((await second).value) == v(2)


async def test_a_minimum_that_no_server_has_is_an_error_after_a_bounded_number_of_fetches(rig: Rig) -> None:
    with pytest.raises(StaleRead):
        await answer(rig.misses, ObjectQuery(A), v(9), critical=False)
    assert len(rig.source.calls) <= 3


async def test_no_miss_joins_a_fetch_from_before_a_bulk_invalidation_and_it_is_not_cached(rig: Rig) -> None:
    rig.source.manual = True
    before = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    rig.cache.bump_shard(0)
    after = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    assert len(rig.source.calls) == rig.misses.single_flight.under_way == 2
    rig.source.answer(rig.source.calls[0])
    await before
    assert rig.cache.peek_object(A) is None
    assert not after.done()
    rig.source.answer(rig.source.calls[1])
    await after
    assert rig.cache.peek_object(A) is not None
    assert rig.misses.single_flight.under_way == 0


@pytest.mark.parametrize("query", [ObjectQuery(A), RangeQuery(A, COMMENT, 0, 5)])
async def test_misses_of_a_shard_that_is_not_cached_share_one_fetch(rig: Rig, query: Query) -> None:
    """A leader drops its caches when it loses a region; each of a thousand readers then asked the database."""
    rig.cache.close_shard(0)
    answers = await asyncio.gather(*(answer(rig.misses, query, 0, critical=False) for _ in range(20)))
    assert len(set(answers)) == len(rig.source.calls) == 1
    rig.source.calls.clear()
    needed = await asyncio.gather(*(answer(rig.misses, query, v(1), critical=False) for _ in range(20)))
    assert len(set(needed)) == len(rig.source.calls) == 1


async def test_no_miss_joins_a_fetch_from_before_a_write_that_a_shard_which_is_not_cached_has_passed(rig: Rig) -> None:
    rig.cache.close_shard(0)
    rig.source.manual = True
    before = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    rig.cache.apply(ObjectChange(A, v(1), v(2), 1, b"new"), 1, 0.0, insert=True)
    after = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    assert len(rig.source.calls) == 2
    for call in list(rig.source.calls):
        rig.source.answer(call)
    await asyncio.gather(before, after)


async def test_a_reader_of_a_shard_that_is_not_cached_takes_nothing_older_than_it_asks_for(rig: Rig) -> None:
    rig.cache.close_shard(0)
    rig.source.manual = True
    plain = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    with_token = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), v(2), critical=False))
    await quiet()
    assert [call.minimum for call in rig.source.calls] == [0, v(2)]
    rig.source.answer(rig.source.calls[0])
    await plain
    assert not with_token.done()
    rig.source.version = v(2)
    rig.source.answer(rig.source.calls[1])
    assert version_of((await with_token).value) == v(2)


@pytest.mark.parametrize("opened", [False, True])
async def test_no_miss_joins_a_fetch_from_an_earlier_time_at_which_the_shard_was_not_cached(
    rig: Rig, opened: bool
) -> None:
    rig.cache.close_shard(0)
    rig.source.manual = True
    before = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    rig.cache.open_shard(0)
    if not opened:
        rig.cache.close_shard(0)
    after = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    assert len(rig.source.calls) == 2
    for call in list(rig.source.calls):
        rig.source.answer(call)
    await asyncio.gather(before, after)


async def test_more_fetches_than_may_be_under_way_are_refused(rig: Rig) -> None:
    rig.source.manual = True
    waiting = [asyncio.ensure_future(answer(rig.misses, ObjectQuery(A + n), 0, critical=False)) for n in range(12)]
    await quiet()
    with pytest.raises(Overloaded, match="12 fetches are under way"):
        await answer(rig.misses, ObjectQuery(A + 90), 0, critical=False)
    joined = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    for call in rig.source.calls:
        rig.source.answer(call)
    await asyncio.gather(*waiting, joined)


async def test_a_critical_read_joins_no_fetch_and_drops_an_older_cached_entry(rig: Rig) -> None:
    await answer(rig.misses, ObjectQuery(A), 0, critical=False)
    rig.source.version = v(2)
    assert version_of((await answer(rig.misses, ObjectQuery(A), 0, critical=True)).value) == v(2)
    assert rig.source.calls[-1].critical
    assert rig.cache.peek_object(A) is None


async def test_edges_beyond_the_prefix_are_added_to_those_within(rig: Rig) -> None:
    rig.source.length = 100
    await rig.range(4)
    fetched = await answer(rig.misses, EdgesQuery(A, COMMENT, (1001, 1100, 5), MAX_TIME, 0), 0, critical=False)
    assert times(fetched.value) == [100, 1]
    assert rig.source.calls[-1].query == EdgesQuery(A, COMMENT, (1001, 5), MAX_TIME, 0)
    assert header(fetched.value)[1] == 100


async def test_what_was_asked_of_a_long_list_is_answered_from_memory_until_the_list_changes(rig: Rig) -> None:
    rig.source.length = 100
    query = EdgesQuery(A, COMMENT, (1001, 1002, 1100))
    first = await answer(rig.misses, query, 0, critical=False)
    fetches = len(rig.source.calls)
    kept = rig.cache.edges(A, COMMENT, query.id2s)
    assert kept is not None
    assert (kept.block, kept.missing) == (first.value, ())
    assert rig.cache.kept_edges(A, COMMENT, column(query.id2s), MAX_TIME, 0) == first.value
    assert rig.cache.kept_edges(A, COMMENT, column(query.id2s), MAX_TIME, 0, v(2)) is None, "its reader knows of v2"
    assert rig.cache.kept_edges(A, COMMENT, column(query.id2s), MAX_TIME, 1) is None, "another question"
    assert len(rig.source.calls) == fetches
    rig.cache.apply(ListChange(A, COMMENT, v(1), v(2), 101, (), (Edge(1101, 101),)), 1, 1_000.0)
    assert rig.cache.kept_edges(A, COMMENT, column(query.id2s), MAX_TIME, 0) is None


async def test_an_answer_from_before_a_bulk_invalidation_is_not_kept(rig: Rig) -> None:
    rig.source.length = 100
    await rig.range(3)
    rig.source.manual = True
    query = EdgesQuery(A, COMMENT, (1001, 1002))
    asked = asyncio.ensure_future(answer(rig.misses, query, 0, critical=False))
    await until(lambda: rig.source.calls[-1].query == query)
    late = rig.source.calls[-1]
    rig.cache.bump_shard(0)
    rig.source.manual = False
    await rig.range(3)  # the list is cached again, at the same version
    rig.source.answer(late)
    await asked
    assert rig.cache.peek_list(A, COMMENT) is not None
    assert rig.cache.kept_edges(A, COMMENT, column(query.id2s), MAX_TIME, 0) is None


def column(id2s: tuple[int, ...]) -> bytes:
    return array("Q", id2s).tobytes()


async def test_edges_of_two_versions_are_never_merged(rig: Rig) -> None:
    rig.source.length = 100
    await rig.range(4)
    rig.source.version = v(2)
    rig.source.length = 99
    fetched = await answer(rig.misses, EdgesQuery(A, COMMENT, (1001, 1100), MAX_TIME, 0), 0, critical=False)
    assert version_of(fetched.value) == v(2)
    assert times(fetched.value) == [1], "1100 is gone in version 2"


async def test_a_time_window_is_answered_from_a_first_prefix_or_asked_for_exactly(rig: Rig) -> None:
    rig.source.length = 100
    window = TimeRangeQuery(A, COMMENT, 99, 98, 5)
    assert times((await answer(rig.misses, window, 0, critical=False)).value) == [99, 98]
    deep = TimeRangeQuery(A, COMMENT, 20, 10, 3)
    assert times((await answer(rig.misses, deep, 0, critical=False)).value) == [20, 19, 18]
    assert [type(call.query) for call in rig.source.calls] == [RangeQuery, TimeRangeQuery]


async def test_a_time_window_from_a_position_on_fetches_a_prefix_that_reaches_it_or_itself(rig: Rig) -> None:
    rig.source.length = LIMIT + 100
    near = TimeRangeQuery(A, COMMENT, LIMIT + 99, LIMIT + 80, 3, start_at(2))
    found = await answer(rig.misses, near, 0, critical=False)
    assert times(found.value) == [LIMIT + 97, LIMIT + 96, LIMIT + 95]
    far = TimeRangeQuery(make_id(65), COMMENT, LIMIT + 99, 0, 3, start_at(LIMIT))
    assert times((await answer(rig.misses, far, 0, critical=False)).value) == [99, 98, 97]
    assert [type(call.query) for call in rig.source.calls] == [RangeQuery, TimeRangeQuery]


@pytest.mark.parametrize(
    "unreachable", [v(1 << 40), make_version(9, 1)], ids=["too high a counter", "too high an epoch"]
)
async def test_a_version_that_no_copy_has_fails_only_the_readers_that_ask_for_it(rig: Rig, unreachable: int) -> None:
    rig.source.manual = True
    doomed = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), unreachable, critical=False))
    await quiet()
    others = [asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False)) for _ in range(5)]
    await quiet()
    deliver(rig.source.calls[0].take, StaleRead("the database does not have it"))
    await quiet()
    assert len(rig.source.calls) == 2, "those who were refused with it are one flight again"
    rig.source.answer(rig.source.calls[1])
    assert {version_of((await each).value) for each in others} == {v(1)}
    with pytest.raises(StaleRead):
        await doomed


async def test_a_reader_that_asks_for_an_unknown_epoch_delays_no_other(rig: Rig) -> None:
    rig.source.manual = True
    doomed = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), make_version(9, 1), critical=False))
    await quiet()
    other = asyncio.ensure_future(answer(rig.misses, ObjectQuery(A), 0, critical=False))
    await quiet()
    rig.source.answer(rig.source.calls[1])
    assert version_of((await other).value) == v(1)
    assert not doomed.done()
    rig.source.version = make_version(9, 1)
    rig.source.answer(rig.source.calls[0])
    assert version_of((await doomed).value) == make_version(9, 1)


@pytest.mark.parametrize("query", [ObjectQuery(A), CountQuery(A, COMMENT), RangeQuery(A, COMMENT, 0, 4)])
async def test_an_answer_that_may_not_be_cached_is_checked_against_the_floor(rig: Rig, query: Query) -> None:
    rig.source.manual = True
    answering = asyncio.ensure_future(answer(rig.misses, query, 0, critical=False))
    await until(lambda: rig.source.calls)
    # Heard of while it was on its way: what comes is too old, and is asked for again.
    raise_floor = rig.cache.raise_object_floor if isinstance(query, ObjectQuery) else _raise_list_floor(rig.cache)
    raise_floor(A, v(2), 0.0)
    rig.source.answer(rig.source.calls[0], keep=False)
    await until(lambda: len(rig.source.calls) == 2)
    assert rig.source.calls[1].minimum == v(2)
    rig.source.version = v(2)
    rig.source.answer(rig.source.calls[1], keep=False)
    assert version_of((await answering).value) == v(2)
    assert rig.cache.peek_object(A) is rig.cache.peek_count(A, COMMENT) is rig.cache.peek_list(A, COMMENT) is None


def _raise_list_floor(cache: GraphCache) -> Callable[[int, int, float], None]:
    return lambda id1, version, now: cache.raise_list_floor(id1, COMMENT, version, now)


A_PART = RangeQuery(A, COMMENT, 380, 50)
"""Beyond the limit: it is passed through and not kept."""
EVERY_QUERY = pytest.mark.parametrize(
    "query",
    [ObjectQuery(A), CountQuery(A, COMMENT), RangeQuery(A, COMMENT, 0, 4), A_PART],
    ids=["object", "count", "prefix", "part"],
)
EACH_WAY = pytest.mark.parametrize("critical", [False, True], ids=["fill", "critical"])


@EVERY_QUERY
@EACH_WAY
async def test_a_minimum_of_an_older_epoch_is_met_by_what_was_read_under_a_later_one(
    rig: Rig, query: Query, critical: bool
) -> None:
    """Whatever is left of the older one is in it. Readers without a minimum are one flight with those that have one."""
    rig.source.length = 500
    rig.source.epoch = 2
    token, plain = await asyncio.gather(
        answer(rig.misses, query, v(9), critical=critical), answer(rig.misses, query, 0, critical=critical)
    )
    assert version_of(token.value) == version_of(plain.value) == v(1)
    assert len(rig.source.calls) == 1 + critical


@EVERY_QUERY
async def test_versions_of_a_lost_master_delay_no_reader_of_the_new_one(rig: Rig, query: Query) -> None:
    rig.source.length = 500
    rig.cache.raise_object_floor(A, v(9), 1_000.0)
    rig.cache.raise_list_floor(A, COMMENT, v(9), 1_000.0)
    rig.source.epoch = 2
    assert version_of((await answer(rig.misses, query, 0, critical=False)).value) == v(1)
    assert rig.cache.version_epoch(0) == 2, "and the epoch is known from then on"


@EVERY_QUERY
@EACH_WAY
async def test_a_read_from_a_lost_master_answers_no_query_and_raises_no_floor(
    rig: Rig, query: Query, critical: bool
) -> None:
    rig.source.length = 500
    rig.source.version = v(9)
    rig.cache.open_shard(0, 2)
    with pytest.raises(StaleRead):
        await answer(rig.misses, query, 0, critical=critical)
    assert rig.cache.floor_of_object(A) == rig.cache.floor_of_list(A, COMMENT) == 0
    rig.source.version, rig.source.epoch = v(1), 2
    assert version_of((await answer(rig.misses, query, 0, critical=critical)).value) == v(1)


class WithoutRoom(Awaited):
    """A caller of whom too much pauses already."""

    def put_aside(self) -> bool:
        return False


async def test_a_fetch_that_pauses_goes_on_for_those_who_may_wait_and_fails_the_others(rig: Rig) -> None:
    rig.source.manual = True
    waits, cannot, comes_later = Awaited(), WithoutRoom(), WithoutRoom()
    for each in (cannot, waits):
        begin(rig.misses, ObjectQuery(A), 0, each, critical=False)
    (call,) = rig.source.calls
    assert call.on_pause(Unavailable("away"))
    begin(rig.misses, ObjectQuery(A), 0, comes_later, critical=False)
    for each in (cannot, comes_later):
        with pytest.raises(Unavailable, match="away"):
            await each.answer()
    assert rig.misses.single_flight.waiting == 1
    rig.source.answer(call)
    assert (await waits.answer()).value == rig.source.value(ObjectQuery(A))
    assert rig.misses.single_flight.waiting == rig.misses.single_flight.under_way == 0


async def test_a_fetch_ends_when_nobody_who_waits_for_it_may_pause(rig: Rig) -> None:
    rig.source.manual = True
    refused = WithoutRoom()
    begin(rig.misses, ObjectQuery(A), 0, refused, critical=False)
    (call,) = rig.source.calls
    assert not call.on_pause(Unavailable("away"))
    deliver(call.take, Unavailable("away"))
    with pytest.raises(Unavailable, match="away"):
        await refused.answer()
    assert rig.misses.single_flight.waiting == rig.misses.single_flight.under_way == 0
