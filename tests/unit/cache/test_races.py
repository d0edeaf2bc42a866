"""The named races of cache systems, as far as they concern one cache alone."""

from __future__ import annotations

from tao.cache import Applied, Stored
from tao.model.changes import ListInvalidation, ObjectChange, ObjectInvalidation, ShardInvalidation
from tao.model.edge_block import encode_block
from tao.model.graph import Edge, encode_count, encode_object, version_of
from tests.unit.cache.graphs import (
    ATYPE,
    ID1,
    SHARD,
    edges_of,
    list_change,
    open_cache,
    store_count,
    store_list,
    store_object,
    times_in,
    v,
)


def test_stale_fill_against_invalidation() -> None:
    cache = open_cache()
    ticket = cache.object_ticket(ID1, 0.0)
    stale = encode_object(v(1), 1, b"old")
    assert cache.apply(ObjectInvalidation(ID1, v(2)), 1, 0.0) is Applied.NOT_CACHED
    assert cache.store_object(ticket, stale, 1, 0.0) is Stored.BELOW_FLOOR
    assert cache.object(ID1) is None


def test_message_ahead_of_the_row() -> None:
    """The message comes first, then a fill starts, and its SELECT cannot see the row yet."""
    cache = open_cache()
    cache.apply(ListInvalidation(ID1, ATYPE, v(2)), 1, 0.0)
    assert store_list(cache, v(1), edges_of(10)) is Stored.BELOW_FLOOR
    assert store_list(cache, v(2), edges_of(10, 20)) is Stored.STORED


def test_changeset_overtaken_by_a_later_one() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(10))
    assert cache.apply(list_change(6, 3, put=(30,)), 1, 0.0) is Applied.DROPPED
    assert cache.apply(list_change(5, 2, put=(20,)), 1, 0.0) is Applied.IGNORED
    assert store_list(cache, v(6), edges_of(10, 20)) is Stored.BELOW_FLOOR
    assert store_list(cache, v(7), edges_of(10, 20, 30)) is Stored.STORED


def test_fill_across_a_bump() -> None:
    cache = open_cache()
    ticket = cache.object_ticket(ID1, 0.0)
    cache.bump_shard(SHARD)
    assert cache.store_object(ticket, encode_object(v(1), 1, b"x"), 1, 0.0) is Stored.NOT_KEPT
    assert cache.object(ID1) is None


def test_fill_across_closing_and_opening_the_shard() -> None:
    cache = open_cache()
    ticket = cache.object_ticket(ID1, 0.0)
    cache.close_shard(SHARD)
    assert cache.store_object(ticket, encode_object(v(1), 1, b"x"), 1, 0.0) is Stored.NOT_KEPT
    cache.open_shard(SHARD, 1)
    assert cache.store_object(ticket, encode_object(v(1), 1, b"x"), 1, 0.0) is Stored.NOT_KEPT


def test_a_fill_older_than_what_is_held_is_below_the_floor() -> None:
    cache = open_cache()
    ticket = cache.object_ticket(ID1, 0.0)
    store_object(cache, v(3))
    assert cache.store_object(ticket, encode_object(v(2), 1, b"x"), 1, 0.0) is Stored.BELOW_FLOOR
    assert version_of(cache.object(ID1) or b"") == v(3)


def test_list_and_count_share_one_floor() -> None:
    cache = open_cache()
    ticket = cache.list_ticket(ID1, ATYPE, 0.0)
    store_list(cache, v(3), edges_of(10))
    assert store_count(cache, v(4), 2) is Stored.STORED
    assert cache.range(ID1, ATYPE, 0, 1) is None, "the list of version 3 went when version 4 was learnt"
    assert cache.store_count(ticket, encode_count(v(3), 1), 1, 0.0) is Stored.BELOW_FLOOR
    assert store_list(cache, v(4), edges_of(10, 20)) is Stored.STORED


def test_a_shorter_fill_of_the_same_version_does_not_shorten_what_is_held() -> None:
    cache = open_cache()
    store_list(cache, v(3), edges_of(30, 20, 10))
    assert store_list(cache, v(3), edges_of(30), count=3) is Stored.STORED
    assert store_count(cache, v(3), 3) is Stored.STORED
    assert times_in(cache.peek_list(ID1, ATYPE)) == [30, 20, 10]


def test_a_block_that_does_not_start_the_list_is_answered_and_not_kept() -> None:
    cache = open_cache()
    block = encode_block(v(1), 9, [Edge(1, 1)], 0)
    assert cache.store_list(cache.list_ticket(ID1, ATYPE, 0.0), block, 1, 0.0) is Stored.NOT_KEPT


def test_a_fill_that_took_longer_than_floors_live_is_not_kept() -> None:
    cache = open_cache(floor_seconds=10.0)
    ticket = cache.object_ticket(ID1, 0.0)
    assert cache.store_object(ticket, encode_object(v(1), 1, b"x"), 1, 10.5) is Stored.NOT_KEPT


def test_a_floor_lives_for_at_least_floor_seconds() -> None:
    cache = open_cache(floor_seconds=10.0)
    cache.raise_object_floor(ID1, v(9), 5.0)
    for other, now in enumerate((6.0, 14.9)):
        cache.raise_object_floor(ID1 + 1 + other, v(1), now)
        assert cache.floor_of_object(ID1) == v(9)
    cache.forget_old_floors(25.0)
    cache.forget_old_floors(36.0)
    assert cache.floor_of_object(ID1) == 0


def test_a_ticket_carries_the_floor_that_is_forgotten_while_the_fill_is_under_way() -> None:
    cache = open_cache(floor_seconds=10.0)
    cache.forget_old_floors(10.0)
    cache.raise_object_floor(ID1, v(9), 10.0)
    ticket = cache.object_ticket(ID1, 25.0)
    cache.forget_old_floors(25.0)
    cache.forget_old_floors(35.0)
    assert cache.floor_of_object(ID1) == 0
    assert cache.store_object(ticket, encode_object(v(8), 1, b"x"), 1, 35.0) is Stored.BELOW_FLOOR


def test_an_applied_change_is_a_floor_of_its_own() -> None:
    """The outcome for the entry does not matter: here a change finds nothing to change."""
    cache = open_cache()
    assert cache.apply(list_change(5, 2, put=(20,)), 1, 0.0) is Applied.NOT_CACHED
    assert store_list(cache, v(5), edges_of(10)) is Stored.BELOW_FLOOR
    assert cache.apply(ObjectChange(ID1, v(5), v(6), 1, b"x"), 1, 0.0) is Applied.NOT_CACHED
    assert store_object(cache, v(5)) is Stored.BELOW_FLOOR


def test_a_list_takes_the_place_of_its_count() -> None:
    cache = open_cache()
    store_count(cache, v(3), 1)
    store_list(cache, v(4), edges_of(10, 20))
    assert version_of(cache.count(ID1, ATYPE) or b"") == v(4)
    assert [figures.counts for figures in cache.arenas()] == [0, 0]


def test_when_floors_overflow_fills_of_the_shard_are_not_kept_for_that_time() -> None:
    cache = open_cache(floor_seconds=10.0, max_floors_per_shard=2)
    for other in range(3):
        cache.raise_object_floor(ID1 + 1 + other, v(1), 0.0)
    assert store_object(cache, v(1)) is Stored.NOT_KEPT
    figures = cache.floor_statistics(0.0)
    assert (figures.floors, figures.overflows, figures.overflowed_shards) == (2, 1, 1)
    ticket = cache.object_ticket(ID1, 10.0)
    assert cache.store_object(ticket, encode_object(v(1), 1, b"x"), 1, 10.0) is Stored.STORED


def test_eviction_does_not_let_an_older_value_in() -> None:
    """The paper's "value goes back in time": evicted after the changeset, reloaded from a lagging replica."""
    cache = open_cache(arena_bytes={"default": 2000}, largest_entry_fraction=1.0)
    store_object(cache, v(5))
    for other in range(1, 40):
        store_object(cache, v(1), id_=ID1 + other)
    assert cache.object(ID1) is None
    assert store_object(cache, v(4)) is Stored.BELOW_FLOOR


def test_a_higher_version_epoch_invalidates_the_shard_and_is_then_applied() -> None:
    cache = open_cache()
    store_object(cache, v(5))
    store_list(cache, v(5), edges_of(10))
    change = ObjectChange(ID1, v(5), v(6, epoch=2), 1, b"new")
    assert cache.apply(change, 2, 0.0, insert=True) is Applied.EPOCH_BUMPED
    assert version_of(cache.object(ID1) or b"") == v(6, epoch=2)
    assert cache.count(ID1, ATYPE) is None


def test_data_of_a_lower_version_epoch_is_never_applied_and_a_message_of_it_drops_its_key() -> None:
    cache = open_cache()
    cache.apply(ShardInvalidation(SHARD), 2, 0.0)
    ticket = cache.object_ticket(ID1, 0.0)
    old = encode_object(v(9), 1, b"lost with its master")
    assert cache.store_object(ticket, old, 1, 0.0) is Stored.BELOW_FLOOR
    assert cache.store_object(ticket, encode_object(v(3), 1, b"survived"), 2, 0.0) is Stored.STORED
    assert cache.apply(ObjectChange(ID1, v(8), v(9), 1, b"lost"), 1, 0.0) is Applied.DROPPED
    assert cache.object(ID1) is None
    again = cache.object_ticket(ID1, 0.0)
    assert cache.store_object(again, encode_object(v(3), 1, b"survived"), 2, 0.0) is Stored.STORED, "v9 is no floor"


def test_floors_of_an_older_version_epoch_no_longer_apply() -> None:
    cache = open_cache()
    cache.raise_object_floor(ID1, v(9), 0.0)
    before = cache.object_ticket(ID1, 0.0)
    cache.apply(ShardInvalidation(SHARD), 2, 0.0)
    assert cache.store_object(before, encode_object(v(3), 1, b"x"), 2, 0.0) is Stored.NOT_KEPT
    assert cache.floor_of_object(ID1) == v(3)
