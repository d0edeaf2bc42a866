"""Budgets, who stays for its uses, and dropped tables."""

from __future__ import annotations

import gc

import pytest

from tao.cache import CacheSettings, GraphCache, Stored
from tao.model.errors import SettingsError
from tao.model.graph import decode_count, encode_object
from tests.unit.cache.graphs import (
    ATYPE,
    ID1,
    SHARD,
    Types,
    edges_of,
    open_cache,
    store_list,
    store_object,
    v,
)


def figures(cache: GraphCache, name: str = "default") -> tuple[int, int, int, int]:
    (found,) = [each for each in cache.arenas() if each.name == name]
    assert found.bytes <= found.budget_bytes
    return found.objects, found.lists, found.counts, found.evictions


def test_the_budget_is_kept_and_the_oldest_leave_first() -> None:
    cache = open_cache(arena_bytes={"default": 20_000})
    for place in range(500):
        store_object(cache, v(1), id_=ID1 + place)
    objects, _, _, evictions = figures(cache)
    assert objects + evictions == 500
    assert cache.peek_object(ID1 + 499) is not None
    assert cache.peek_object(ID1) is None


def test_what_was_read_stays() -> None:
    cache = open_cache(arena_bytes={"default": 20_000})
    store_object(cache, v(1))
    for place in range(1, 500):
        store_object(cache, v(1), id_=ID1 + place)
        assert cache.object(ID1) is not None


def test_an_eviction_is_bounded_when_everything_is_in_use() -> None:
    cache = open_cache(arena_bytes={"default": 20_000}, max_reinsertions=4)
    for place in range(500):
        store_object(cache, v(1), id_=ID1 + place)
        assert cache.object(ID1 + place) is not None
    assert figures(cache)[0] > 0


def test_an_arena_does_not_evict_the_entries_of_another() -> None:
    cache = open_cache(arena_bytes={"default": 20_000, "special": 20_000})
    store_object(cache, v(1), otype=2)
    for place in range(1, 500):
        store_object(cache, v(1), id_=ID1 + place)
    assert figures(cache, "special") == (1, 0, 0, 0)


def test_an_entry_too_large_for_its_arena_is_answered_and_not_kept() -> None:
    cache = open_cache(arena_bytes={"default": 20_000})
    store_object(cache, v(1), id_=ID1 + 1)
    assert store_object(cache, v(1), b"x" * 10_000) is Stored.NOT_KEPT
    assert figures(cache) == (1, 0, 0, 0)


def test_a_large_list_leaves_its_count_behind() -> None:
    cache = open_cache(arena_bytes={"default": 20_000}, keep_count_of_list_bytes=1000)
    store_list(cache, v(1), edges_of(*range(100)))
    for place in range(1, 130):
        store_object(cache, v(1), id_=ID1 + place)
    assert cache.peek_list(ID1, ATYPE) is None
    assert decode_count(cache.count(ID1, ATYPE) or b"") == (v(1), 100)


def test_dropping_and_caching_a_key_again_and_again_does_not_grow_anything() -> None:
    cache = open_cache()
    for turn in range(1, 1000):
        store_object(cache, v(turn))
        cache.raise_object_floor(ID1, v(turn + 1), 0.0)
    arena = cache._arenas.all()["default"]
    assert arena.records == 1


def test_a_bumped_shard_is_reclaimed_in_steps_and_its_memory_goes_first() -> None:
    cache = open_cache(reclaim_entries_per_step=100)
    for place in range(250):
        store_object(cache, v(1), id_=ID1 + place)
    cache.bump_shard(SHARD)
    assert cache.object(ID1) is None
    store_object(cache, v(1))
    steps = 1
    while cache.reclaim_step():
        steps += 1
    assert steps >= 3
    arena = cache._arenas.all()["default"]
    assert figures(cache)[0] == 1
    assert arena.records == 1
    assert arena.bytes < 300


def test_bumping_again_and_again_is_bounded_by_the_budget_without_reclaiming() -> None:
    cache = open_cache(arena_bytes={"default": 20_000})
    for turn in range(50):
        for place in range(20):
            store_object(cache, v(1), id_=ID1 + place)
        assert figures(cache)[0] == 20, turn
        cache.bump_shard(SHARD)


def test_a_type_that_moves_to_another_arena_starts_there_with_nothing() -> None:
    cache = open_cache()
    store_list(cache, v(1), edges_of(1))
    cache.set_types(Types(special_list=ATYPE))
    assert cache.count(ID1, ATYPE) is None
    store_list(cache, v(1), edges_of(1))
    assert figures(cache, "special") == (0, 1, 0, 0)


def test_entries_are_invisible_to_the_garbage_collector() -> None:
    cache = open_cache(arena_bytes={"default": 16 << 20})
    store_object(cache, v(1))
    store_list(cache, v(1), edges_of(1))
    gc.collect()
    before = len(gc.get_objects())
    for place in range(1, 5000):
        store_object(cache, v(1), id_=ID1 + place)
        store_list(cache, v(1), edges_of(1, 2), id1=ID1 + place)
        cache.raise_object_floor(ID1 + place, v(1), 0.0)
    gc.collect()
    assert figures(cache)[:2] == (5000, 5000)
    assert len(gc.get_objects()) - before < 50


def test_settings_that_cannot_work_are_refused_with_their_name() -> None:
    for wrong, name in (
        ({"arena_bytes": {"other": 5}}, "arena_bytes"),
        ({"arena_bytes": {"default": 0}}, "default"),
        ({"credit_slots": 0}, "credit_slots"),
        ({"floor_seconds": 0.0}, "floor_seconds"),
        ({"largest_entry_fraction": 2.0}, "largest_entry_fraction"),
    ):
        with pytest.raises(SettingsError, match=name):
            CacheSettings(**wrong)


def test_a_scan_does_not_flush_what_is_in_use() -> None:
    cache = open_cache(arena_bytes={"default": 100_000})
    hot = [ID1 + place for place in range(100)]
    for key in hot:
        store_object(cache, v(1), id_=key)
        store_object(cache, v(1), id_=key + 1_000)
        assert cache.object(key) is not None
    for place in range(2_000, 20_000):
        store_object(cache, v(1), id_=ID1 + place)
    assert sum(cache.object(key) is not None for key in hot) > 90


def test_of_entries_used_alike_the_small_ones_stay() -> None:
    cache = open_cache(arena_bytes={"default": 100_000})
    for place in range(1_000):
        size = 2_000 if place % 5 == 0 else 20
        store_object(cache, v(1), bytes(size), id_=ID1 + place)
        assert cache.object(ID1 + place) is not None
    held = [place for place in range(900) if cache.peek_object(ID1 + place) is not None]
    assert len(held) > 300
    assert all(place % 5 for place in held)


def test_a_large_entry_that_is_used_as_much_as_its_size_asks_for_stays() -> None:
    cache = open_cache(arena_bytes={"default": 100_000})
    store_object(cache, v(1), bytes(5_000))
    for place in range(1, 2_000):
        store_object(cache, v(1), bytes(20), id_=ID1 + place)
        assert cache.object(ID1) is not None


def test_an_arena_says_for_how_long_what_it_evicts_was_not_used() -> None:
    cache = open_cache(arena_bytes={"default": 20_000})
    now = 0.0
    for turn in range(3_000):
        now += 1.0
        key = ID1 + turn
        for again in (key, key - 20):  # the second comes back after it has left the small queue
            value = encode_object(v(1), 1, b"data")
            cache.store_object(cache.object_ticket(again, now), value, 1, now)
            cache.object(again)
    age = cache._arenas.all()["default"].eviction_age_seconds
    assert age is not None
    assert 0 < age < 600
