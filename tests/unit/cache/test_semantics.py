"""Which queries a cached entry answers: the table of docs/explanation/cache.md, line by line."""

from __future__ import annotations

import pytest

from tao.cache import GraphCache
from tao.cache.eviction import MOST_CREDIT, USE_CREDIT
from tao.model.edge_block import COMPLETE, PREFIX, decode_block, header
from tao.model.graph import ABSENT, MAX_TIME, decode_count, decode_object, encode_object
from tests.unit.cache.graphs import (
    ATYPE,
    ID1,
    SHARD,
    edges_of,
    open_cache,
    store_count,
    store_list,
    store_object,
    times_in,
    v,
)


@pytest.fixture
def complete() -> GraphCache:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 40, 30))
    return cache


@pytest.fixture
def prefix() -> GraphCache:
    """Three of ten edges."""
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 40, 30), count=10)
    return cache


def test_an_object_is_answered_with_the_bytes_held() -> None:
    cache = open_cache()
    store_object(cache, v(1), b"hello")
    assert decode_object(cache.object(ID1) or b"") == (v(1), 1, b"hello")


@pytest.mark.parametrize("held", [0b000, 0b001, 0b011, 0b101, 0b111])
def test_objects_asked_for_together_are_answered_like_each_alone(held: int) -> None:
    cache = open_cache()
    ids = [ID1, ID1 + 1, ID1 + 2, (SHARD + 1 << 47) + 64]
    for place, otype in enumerate((1, 2, ABSENT)):  # type 2 has an arena of its own
        if held >> place & 1:
            ticket = cache.object_ticket(ids[place], 0.0)
            cache.store_object(ticket, encode_object(v(place), otype, b""), 1, 0.0)
    assert cache.objects(ids) == [cache.object(each) for each in ids]
    assert cache.objects(ids[:1]) == [cache.object(ids[0])]
    assert cache.objects([]) == []


def test_objects_asked_for_together_are_used_as_often_as_they_are_named() -> None:
    cache = open_cache()
    store_object(cache, v(1), b"hello")
    cache.objects([ID1, ID1 + 1, ID1])
    assert cache._arenas.credit[ID1 % 1009] == 2 * USE_CREDIT
    cache.objects([ID1] * 100)
    assert cache._arenas.credit[ID1 % 1009] == MOST_CREDIT


def test_an_object_known_to_be_absent_is_an_answer() -> None:
    cache = open_cache()
    store_object(cache, 0, b"", otype=ABSENT)
    assert decode_object(cache.object(ID1) or b"") == (0, ABSENT, b"")


def test_a_closed_shard_misses() -> None:
    cache = open_cache()
    store_object(cache, v(1))
    cache.close_shard(SHARD)
    assert cache.object(ID1) is None
    assert cache.open_shards() == []


def test_a_read_with_a_minimum_misses_what_is_older(complete: GraphCache) -> None:
    store_object(complete, v(1))
    assert complete.object(ID1, v(1)) is not None
    assert complete.object(ID1, v(2)) is None
    assert complete.count(ID1, ATYPE, v(5)) is not None
    assert complete.count(ID1, ATYPE, v(6)) is None
    assert complete.range(ID1, ATYPE, 0, 1, v(6)) is None
    assert complete.time_range(ID1, ATYPE, MAX_TIME, 0, 1, v(6)) is None
    assert complete.edges(ID1, ATYPE, [150], minimum=v(6)) is None


def test_a_complete_list_answers_count(complete: GraphCache) -> None:
    assert decode_count(complete.count(ID1, ATYPE) or b"") == (v(5), 3)


def test_a_complete_list_within_the_limit_is_the_very_bytes_held(complete: GraphCache) -> None:
    assert complete.range(ID1, ATYPE, 0, 3) is complete.peek_list(ID1, ATYPE)


def test_a_shorter_range_is_answered_from_a_longer_prefix(prefix: GraphCache) -> None:
    block = prefix.range(ID1, ATYPE, 1, 2)
    assert block is not None
    assert [(edge.time, edge.data) for edge in decode_block(block)] == [(40, b"d40"), (30, b"d30")]
    assert header(block)[3] & (COMPLETE | PREFIX) == 0


def test_a_range_beyond_a_prefix_is_a_miss(prefix: GraphCache) -> None:
    assert prefix.range(ID1, ATYPE, 0, 4) is None
    assert prefix.range(ID1, ATYPE, 3, 1) is None


def test_a_range_beyond_the_count_is_empty(prefix: GraphCache, complete: GraphCache) -> None:
    assert times_in(prefix.range(ID1, ATYPE, 10, 5)) == []
    assert times_in(complete.range(ID1, ATYPE, 3, 5)) == []


def test_a_part_of_a_complete_list_is_not_flagged_complete(complete: GraphCache) -> None:
    block = complete.range(ID1, ATYPE, 0, 2)
    assert block is not None
    assert header(block)[3] & (COMPLETE | PREFIX) == PREFIX


def test_a_time_range_is_answered_when_its_low_bound_is_above_the_oldest_time(prefix: GraphCache) -> None:
    assert times_in(prefix.time_range(ID1, ATYPE, MAX_TIME, 31, 9)) == [50, 40]


def test_a_time_range_down_to_the_oldest_time_is_a_miss_because_ties_may_follow(prefix: GraphCache) -> None:
    assert prefix.time_range(ID1, ATYPE, MAX_TIME, 30, 9) is None


def test_a_time_range_is_answered_when_its_limit_is_found_within_the_prefix(prefix: GraphCache) -> None:
    assert times_in(prefix.time_range(ID1, ATYPE, 40, 0, 2)) == [40, 30]
    assert prefix.time_range(ID1, ATYPE, 40, 0, 3) is None


def test_time_bounds_are_inclusive(complete: GraphCache) -> None:
    assert times_in(complete.time_range(ID1, ATYPE, 40, 30, 9)) == [40, 30]


def test_edges_in_the_prefix_are_answered_in_list_order_and_once(prefix: GraphCache) -> None:
    answer = prefix.edges(ID1, ATYPE, [130, 150, 130])
    assert answer is not None
    assert times_in(answer.block) == [50, 30]
    assert answer.missing == ()


def test_an_entry_is_a_hit_for_some_ids_and_a_miss_for_the_others(prefix: GraphCache) -> None:
    answer = prefix.edges(ID1, ATYPE, [777, 140, 666, 777])
    assert answer is not None
    assert times_in(answer.block) == [40]
    assert answer.missing == (777, 666)


def test_ids_that_are_all_undecided_are_a_plain_miss(prefix: GraphCache) -> None:
    assert prefix.edges(ID1, ATYPE, [777, 666]) is None


def test_a_complete_list_says_that_an_edge_is_absent(complete: GraphCache) -> None:
    answer = complete.edges(ID1, ATYPE, [777])
    assert answer is not None
    assert (times_in(answer.block), answer.missing) == ([], ())


def test_a_low_bound_above_the_oldest_time_says_that_an_edge_is_absent(prefix: GraphCache) -> None:
    answer = prefix.edges(ID1, ATYPE, [777, 150, 130], low=31)
    assert answer is not None
    assert (times_in(answer.block), answer.missing) == ([50], ())


def test_an_edge_outside_the_time_bounds_is_decided_and_not_answered(prefix: GraphCache) -> None:
    answer = prefix.edges(ID1, ATYPE, [150, 140], high=45)
    assert answer is not None
    assert (times_in(answer.block), answer.missing) == ([40], ())


def test_a_count_of_zero_answers_every_query_on_the_list() -> None:
    cache = open_cache()
    store_count(cache, v(4), 0)
    edges = cache.edges(ID1, ATYPE, [1])
    assert edges is not None
    for block in (
        cache.range(ID1, ATYPE, 0, 9),
        cache.range(ID1, ATYPE, 9, 9),
        cache.time_range(ID1, ATYPE, 9, 3, 1),
        edges.block,
    ):
        assert block is not None
        assert header(block) == (v(4), 0, 0, COMPLETE | PREFIX)


def test_a_count_above_zero_answers_no_query_on_edges() -> None:
    cache = open_cache()
    store_count(cache, v(4), 2)
    assert cache.range(ID1, ATYPE, 0, 1) is None
    assert cache.time_range(ID1, ATYPE, 9, 3, 1) is None
    assert cache.edges(ID1, ATYPE, [1]) is None


def test_the_sample_of_a_shard_names_what_is_held_in_steps(complete: GraphCache) -> None:
    store_object(complete, v(1))
    first = complete.sample_keys(SHARD, 1)
    assert first.after is not None
    second = complete.sample_keys(SHARD, 2, first.after)
    assert second.after is None
    assert {(key.kind, key.id, key.atype) for key in first.keys + second.keys} == {
        ("object", ID1, 0),
        ("list", ID1, ATYPE),
    }
