"""Bulk invalidation of types: what is of them is gone at once, the rest stays, nothing under way slips in (§4)."""

from __future__ import annotations

import pytest

from tao.cache import Applied, GraphCache, Stored
from tao.model.changes import ShardInvalidation
from tao.model.edge_block import PREFIX, encode_block
from tao.model.graph import ABSENT, encode_object
from tests.unit.cache.graphs import (
    ATYPE,
    ID1,
    SHARD,
    SMALL_ATYPE,
    Types,
    edges_of,
    open_cache,
    store_list,
    store_object,
    v,
)

ABSENT_ID, SPECIAL_ID = ID1 + 64, ID1 + 128


@pytest.fixture
def cache() -> GraphCache:
    cache = open_cache()
    store_list(cache, v(1), edges_of(10))
    store_list(cache, v(1), edges_of(20), atype=SMALL_ATYPE)
    store_object(cache, v(1))
    store_object(cache, v(1), b"", ABSENT_ID, ABSENT)
    store_object(cache, v(1), b"special", SPECIAL_ID, 2)
    return cache


def invalidate_types(cache: GraphCache, *, otypes: tuple[int, ...] = (), atypes: tuple[int, ...] = ()) -> Applied:
    return cache.apply(ShardInvalidation(SHARD, otypes, atypes), 1, 0.0)


def test_lists_of_the_type_are_gone_and_all_else_stays(cache: GraphCache) -> None:
    assert invalidate_types(cache, atypes=(ATYPE,)) is Applied.EPOCH_BUMPED
    assert cache.range(ID1, ATYPE, 0, 10) is None
    assert cache.count(ID1, ATYPE) is None
    assert cache.range(ID1, SMALL_ATYPE, 0, 10) is not None
    assert None not in cache.objects([ID1, ABSENT_ID, SPECIAL_ID])


def test_objects_go_with_their_arena_and_absent_ones_with_any(cache: GraphCache) -> None:
    invalidate_types(cache, otypes=(2,))
    assert cache.object(SPECIAL_ID) is None
    assert cache.object(ABSENT_ID) is None  # it might be of the type by now
    assert cache.range(ID1, ATYPE, 0, 10) is not None


def test_objects_of_an_arena_of_their_own_outlive_those_of_the_default_one(cache: GraphCache) -> None:
    invalidate_types(cache, otypes=(1,))
    assert cache.object(ID1) is None
    assert cache.object(SPECIAL_ID) is not None
    assert cache.objects([SPECIAL_ID, ID1]) == [cache.object(SPECIAL_ID), None]
    store_object(cache, v(1))
    assert cache.object(ID1) is not None


@pytest.mark.parametrize("unrelated", [(), (3,)])
def test_objects_put_before_a_schema_moved_their_type_to_another_arena_go_too(
    cache: GraphCache, unrelated: tuple[int, ...]
) -> None:
    invalidate_types(cache, otypes=unrelated, atypes=(SMALL_ATYPE,))
    cache.set_types(Types(special_object=3))
    cache.set_types(Types(special_object=4))
    invalidate_types(cache, atypes=(ATYPE,))
    assert cache.object(SPECIAL_ID) is not None
    invalidate_types(cache, otypes=(2,))
    assert cache.object(SPECIAL_ID) is None


def test_objects_go_into_the_arena_that_a_new_schema_chooses(cache: GraphCache) -> None:
    cache.set_types(Types(special_object=1))
    store_object(cache, v(2), b"new")
    assert [arena.objects for arena in cache.arenas()] == [1, 2]
    assert cache.object(ID1) == encode_object(v(2), 1, b"new")
    invalidate_types(cache, otypes=(2,))  # in the default arena from now on, where absent ones are
    store_object(cache, v(3), b"newer")
    assert cache.object(ID1) == encode_object(v(3), 1, b"newer")
    invalidate_types(cache, otypes=(1,))
    assert cache.objects([ID1, ABSENT_ID, SPECIAL_ID]) == [None, None, None]


def test_a_fill_begun_before_is_answered_and_not_kept(cache: GraphCache) -> None:
    ticket = cache.list_ticket(ID1, ATYPE, 0.0)
    invalidate_types(cache, atypes=(ATYPE,))
    assert cache.is_invalid(ticket)
    block = encode_block(v(1), 1, edges_of(10), PREFIX)
    assert cache.store_list(ticket, block, 1, 0.0) is Stored.NOT_KEPT
    assert cache.range(ID1, ATYPE, 0, 10) is None
    assert store_list(cache, v(1), edges_of(10)) is Stored.STORED


def test_a_floor_raised_before_a_type_invalidation_still_holds(cache: GraphCache) -> None:
    cache.raise_object_floor(ID1, v(3), 0.0)
    invalidate_types(cache, otypes=(1,))
    assert cache.store_object(cache.object_ticket(ID1, 0.0), encode_object(v(2), 1, b""), 1, 0.0) is Stored.BELOW_FLOOR


def test_the_memory_of_what_is_gone_comes_back(cache: GraphCache) -> None:
    before = sum(arena.bytes for arena in cache.arenas())
    invalidate_types(cache, otypes=(1, 2), atypes=(ATYPE, SMALL_ATYPE))
    while cache.reclaim_step():
        pass
    assert sum(arena.bytes for arena in cache.arenas()) == 0 < before


def test_every_so_many_th_key_of_a_shard_can_be_sampled(cache: GraphCache) -> None:
    every = cache.sample_keys(SHARD, 100)
    second = cache.sample_keys(SHARD, 100, 1, 2)
    assert (every.total, second.total) == (5, 5)
    assert second.keys == every.keys[1::2]
    first = cache.sample_keys(SHARD, 1, 0, 2)
    assert first.after is not None
    assert first.keys + cache.sample_keys(SHARD, 100, first.after, 2).keys == every.keys[::2]
