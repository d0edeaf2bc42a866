"""What a committed change does to what is held, and that a prefix stays a prefix."""

from __future__ import annotations

from tao.cache import Applied
from tao.model.changes import GoneEdge, ListChange, ListInvalidation, ObjectChange, ObjectInvalidation
from tao.model.edge_block import COMPLETE, decode_block, header
from tao.model.graph import ABSENT, Edge, decode_count, decode_object
from tao.model.ids import SHARD_SHIFT
from tests.unit.cache.graphs import (
    ATYPE,
    ID1,
    SMALL_ATYPE,
    edges_of,
    list_change,
    open_cache,
    store_count,
    store_list,
    store_object,
    times_in,
    v,
)


def test_a_change_applies_to_the_list_at_its_before() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 30))
    assert cache.apply(list_change(5, 2, gone=(30,), put=(40,)), 1, 0.0) is Applied.APPLIED
    block = cache.peek_list(ID1, ATYPE) or b""
    assert decode_block(block) == edges_of(50, 40)
    assert header(block)[:2] == (v(6), 2)


def test_a_change_is_ignored_by_a_list_at_or_past_its_after() -> None:
    cache = open_cache()
    store_list(cache, v(6), edges_of(50))
    assert cache.apply(list_change(5, 1, put=(50,)), 1, 0.0) is Applied.IGNORED
    assert cache.apply(list_change(4, 0, gone=(50,)), 1, 0.0) is Applied.IGNORED
    assert times_in(cache.range(ID1, ATYPE, 0, 9)) == [50]


def test_a_change_drops_an_older_list_and_leaves_its_count() -> None:
    cache = open_cache()
    store_list(cache, v(3), edges_of(50))
    assert cache.apply(list_change(5, 7, put=(60,)), 1, 0.0) is Applied.DROPPED
    assert cache.peek_list(ID1, ATYPE) is None
    assert decode_count(cache.count(ID1, ATYPE) or b"") == (v(6), 7)


def test_a_count_alone_follows_any_later_change() -> None:
    cache = open_cache()
    store_count(cache, v(2), 5)
    assert cache.apply(list_change(7, 9, put=(1,)), 1, 0.0) is Applied.APPLIED
    assert decode_count(cache.count(ID1, ATYPE) or b"") == (v(8), 9)


def test_an_empty_list_takes_the_room_of_a_count_and_grows_into_a_list_again() -> None:
    cache = open_cache()
    for place in reversed(range(1_000)):
        store_list(cache, v(1), [], id1=ID1 + place)
    (arena,) = [each for each in cache.arenas() if each.name == "default"]
    assert arena.lists == 0
    assert arena.counts > 900  # a bucket may be full
    assert arena.bytes < 40 * arena.counts
    assert times_in(cache.range(ID1, ATYPE, 0, 10)) == []
    assert cache.apply(list_change(1, 1, put=(5,)), 1, 0.0) is Applied.APPLIED
    assert times_in(cache.range(ID1, ATYPE, 0, 10)) == [5]


def test_a_list_that_loses_its_last_edge_becomes_a_count() -> None:
    cache = open_cache()
    store_list(cache, v(1), edges_of(5))
    assert cache.apply(list_change(1, 0, gone=(5,)), 1, 0.0) is Applied.APPLIED
    assert cache.peek_list(ID1, ATYPE) is None
    assert times_in(cache.range(ID1, ATYPE, 0, 10)) == []


def test_an_edge_put_beyond_an_incomplete_prefix_changes_the_count_alone() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 40), count=10)
    assert cache.apply(list_change(5, 11, put=(20,)), 1, 0.0) is Applied.APPLIED
    assert times_in(cache.peek_list(ID1, ATYPE)) == [50, 40]
    assert decode_count(cache.count(ID1, ATYPE) or b"") == (v(6), 11)


def test_at_the_oldest_time_of_a_prefix_id2_decides_whether_a_new_edge_is_within_it() -> None:
    for id2, held in ((141, [141, 140]), (139, [140])):
        cache = open_cache()
        store_list(cache, v(5), [Edge(140, 40)], count=10)
        change = ListChange(ID1, ATYPE, v(5), v(6), 11, (), (Edge(id2, 40),))
        assert cache.apply(change, 1, 0.0) is Applied.APPLIED
        assert [edge.id2 for edge in decode_block(cache.peek_list(ID1, ATYPE) or b"")] == held


def test_data_alone_may_change() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 40, 30))
    change = ListChange(ID1, ATYPE, v(5), v(6), 3, (), (Edge(140, 40, b"something longer"),))
    assert cache.apply(change, 1, 0.0) is Applied.APPLIED
    assert [edge.data for edge in decode_block(cache.peek_list(ID1, ATYPE) or b"")] == [
        b"d50",
        b"something longer",
        b"d30",
    ]


def test_an_emptied_prefix_of_a_longer_list_leaves_its_count() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50), count=3)
    assert cache.apply(list_change(5, 2, gone=(50,)), 1, 0.0) is Applied.APPLIED
    assert cache.peek_list(ID1, ATYPE) is None
    assert decode_count(cache.count(ID1, ATYPE) or b"") == (v(6), 2)


def test_a_prefix_becomes_complete_when_all_beyond_it_is_gone() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 40), count=3)
    assert cache.apply(list_change(5, 2, gone=(10,)), 1, 0.0) is Applied.APPLIED
    assert header(cache.peek_list(ID1, ATYPE) or b"")[3] & COMPLETE


def test_a_list_does_not_grow_above_the_limit_of_its_type() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50, 40, 30), atype=SMALL_ATYPE)
    assert cache.apply(list_change(5, 4, put=(60,), atype=SMALL_ATYPE), 1, 0.0) is Applied.APPLIED
    block = cache.peek_list(ID1, SMALL_ATYPE) or b""
    assert times_in(block) == [60, 50, 40]
    assert header(block)[1] == 4
    assert not header(block)[3] & COMPLETE


def test_a_change_that_contradicts_the_list_drops_it() -> None:
    contradictions = (
        list_change(5, 2, gone=(35,), put=(60,)),  # what goes was never there
        list_change(5, 9, put=(60,)),  # the count does not add up
        ListChange(ID1, ATYPE, v(5), v(6), 3, (), (Edge(150, 60),)),  # one id2 at two times
    )
    for change in contradictions:
        cache = open_cache()
        store_list(cache, v(5), edges_of(50, 40))
        assert cache.apply(change, 1, 0.0) is Applied.DROPPED
        assert cache.peek_count(ID1, ATYPE) is None


def test_an_object_change_replaces_whatever_is_older() -> None:
    cache = open_cache()
    store_object(cache, v(1))
    assert cache.apply(ObjectChange(ID1, v(7), v(8), 1, b"new"), 1, 0.0) is Applied.APPLIED
    assert decode_object(cache.object(ID1) or b"") == (v(8), 1, b"new")
    assert cache.apply(ObjectChange(ID1, v(8), v(9), ABSENT, None), 1, 0.0) is Applied.APPLIED
    assert decode_object(cache.object(ID1) or b"") == (v(9), ABSENT, b"")


def test_an_object_change_without_its_value_drops_the_object() -> None:
    cache = open_cache()
    store_object(cache, v(1))
    assert cache.apply(ObjectChange(ID1, v(1), v(2), 1, None), 1, 0.0) is Applied.DROPPED
    assert cache.object(ID1) is None


def test_an_object_lies_in_one_arena_at_a_time() -> None:
    cache = open_cache()
    store_object(cache, v(1), otype=2)
    assert [(figures.name, figures.objects) for figures in cache.arenas()] == [("default", 0), ("special", 1)]
    assert cache.object(ID1) is not None
    cache.apply(ObjectChange(ID1, v(1), v(2), ABSENT, None), 1, 0.0)
    assert [(figures.name, figures.objects) for figures in cache.arenas()] == [("default", 1), ("special", 0)]


def test_what_one_shard_gets_first_does_not_appear_in_another_that_is_still_empty() -> None:
    """Empty shards share what is empty in each."""
    cache = open_cache()
    first, empty = ID1, ID1 + (1 << SHARD_SHIFT)
    cache.open_shard(empty >> SHARD_SHIFT, 1)
    store_object(cache, v(1), id_=first)
    cache.raise_object_floor(first + 1, v(9), 0.0)
    shard, other = (cache.filter_shard(id_ >> SHARD_SHIFT) for id_ in (first, empty))
    assert shard is not None
    assert other is not None
    shard.begin_filter(first, ATYPE)
    assert cache.object(first) is not None
    assert [len(other.objects), len(other.floors), list(other.tables())] == [0, 0, []]
    cache.invalidate_types(empty >> SHARD_SHIFT, (1,), ())
    cache.invalidate_types(first >> SHARD_SHIFT, (1,), ())
    assert cache.object(first) is None
    store_object(cache, v(2), id_=empty)
    assert (cache.object(first), cache.object(empty) is not None) == (None, True)


def test_write_through_caches_a_new_object_and_a_list_of_its_first_version_only() -> None:
    cache = open_cache()
    cache.apply(ObjectChange(ID1, 0, v(1), 1, b"x"), 1, 0.0, insert=True)
    assert cache.object(ID1) is not None
    assert cache.apply(list_change(0, 1, put=(5,)), 1, 0.0, insert=True) is Applied.APPLIED
    assert times_in(cache.range(ID1, ATYPE, 0, 9)) == [5]
    later = ListChange(ID1, SMALL_ATYPE, v(1), v(2), 1, (), (Edge(1, 1),))
    assert cache.apply(later, 1, 0.0, insert=True) is Applied.NOT_CACHED


def test_write_through_does_not_bring_back_what_is_known_to_be_overtaken() -> None:
    cache = open_cache()
    cache.raise_object_floor(ID1, v(5), 0.0)
    assert cache.apply(ObjectChange(ID1, 0, v(1), 1, b"x"), 1, 0.0, insert=True) is Applied.NOT_CACHED
    assert cache.object(ID1) is None


def test_an_invalidation_drops_what_is_older_and_nothing_else() -> None:
    cache = open_cache()
    store_object(cache, v(3))
    store_list(cache, v(3), edges_of(1))
    assert cache.apply(ObjectInvalidation(ID1, v(3)), 1, 0.0) is Applied.IGNORED
    assert cache.apply(ObjectInvalidation(ID1, v(4)), 1, 0.0) is Applied.DROPPED
    assert cache.apply(ListInvalidation(ID1, ATYPE, v(4)), 1, 0.0) is Applied.DROPPED
    assert cache.object(ID1) is None
    assert cache.count(ID1, ATYPE) is None


def test_several_edges_come_and_go_at_once() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(90, 80, 70, 60, 50))
    change = ListChange(ID1, ATYPE, v(5), v(6), 5, (GoneEdge(190, 90), GoneEdge(170, 70)), tuple(edges_of(85, 45)))
    assert cache.apply(change, 1, 0.0) is Applied.APPLIED
    assert decode_block(cache.peek_list(ID1, ATYPE) or b"") == edges_of(85, 80, 60, 50, 45)


def test_a_change_was_applied_when_the_key_is_held_at_its_version_and_the_version_is_its_floor() -> None:
    cache = open_cache()
    store_list(cache, v(5), edges_of(50))
    assert not cache.has_applied(ID1, ATYPE, v(5), 1), "a fill brings the version, and no filter hears of it"
    cache.apply(list_change(5, 2, put=(60,)), 1, 0.0)
    assert cache.has_applied(ID1, ATYPE, v(6), 1)
    assert cache.has_applied(ID1, ATYPE, v(5), 1)
    assert not cache.has_applied(ID1, ATYPE, v(7), 1)
    assert not cache.has_applied(ID1, ATYPE, v(6), 2), "the epoch of the change is news"
    assert not cache.has_applied(ID1, 0, v(6), 1)
    cache.bump_shard(ID1 >> SHARD_SHIFT)
    assert not cache.has_applied(ID1, ATYPE, v(6), 1), "a writer may insert what is not held"
