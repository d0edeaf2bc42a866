"""What pair filters answer beside the entries of the cache."""

from __future__ import annotations

from typing import Final

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.cache.shard import CachedShard
from tao.model.changes import GoneEdge, ListChange, ListInvalidation
from tao.model.edge_block import PREFIX, encode_block
from tao.model.graph import EXISTS_NOT, Edge, decode_count
from tao.model.queries import PairPage
from tao.serving.server import SchemaArenas
from tests.rigs.leader_rig import ARENAS, FOLLOWS, SCHEMA, make_id
from tests.rigs.versions import make_version

A: Final = make_id(64)
THIRD: Final = A + 30


@pytest.fixture
def cache() -> GraphCache:
    made = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), SchemaArenas(SCHEMA, ARENAS))
    made.open_shard(0, 1)
    return made


def shard_of(cache: GraphCache) -> CachedShard:
    shard = cache.filter_shard(0)
    assert shard is not None
    return shard


def install(cache: GraphCache, page: PairPage) -> None:
    shard = shard_of(cache)
    build = shard.begin_pairs(FOLLOWS)
    assert shard.take_pairs(build, page)
    assert shard.finish_pairs(build, 1.0)


def test_a_filter_that_is_ahead_of_the_cached_list_denies_nothing_of_it(cache: GraphCache) -> None:
    """The third edge is deleted at version 7, which a scan has read and whose message is under way."""
    block = encode_block(make_version(1, 6), 3, [Edge(A + 10, 10), Edge(A + 20, 9)], PREFIX)
    cache.store_list(cache.list_ticket(A, FOLLOWS, 0.0), block, 1, 0.0)
    install(cache, PairPage(1, [A], [make_version(1, 7)], [2], [A + 10, A + 20]))
    count = cache.count(A, FOLLOWS)
    assert count is not None
    assert decode_count(count) == (make_version(1, 6), 3)
    assert cache.exists(A, FOLLOWS, THIRD) is None, "the count is of version 6, which had this edge"
    gone = (GoneEdge(THIRD, 8),)
    cache.apply(ListChange(A, FOLLOWS, make_version(1, 6), make_version(1, 7), 2, gone), 1, 1.0)
    assert cache.exists(A, FOLLOWS, A + 40) == EXISTS_NOT


def test_a_list_that_is_scanned_again_is_added_step_by_step_and_without_a_filter_of_its_own(
    cache: GraphCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(cache, PairPage(1, [A], [make_version(1, 5)], [9_000], list(range(1, 9_001))))
    cache.apply(ListInvalidation(A, FOLLOWS, make_version(1, 6)), 1, 0.0)
    monkeypatch.delattr("tao.cache.pair_filters.BloomFilter")
    shard = shard_of(cache)
    build = shard.begin_pairs(FOLLOWS, A)
    assert shard.take_pairs(build, PairPage(1, [A], [make_version(1, 6)], [9_000], list(range(1, 9_001))))
    steps = 1
    while build.add_some():
        steps += 1
    assert steps == 5
    assert shard.finish_pairs(build, 1.0)
    assert not any(shard.denies(A, FOLLOWS, id2, 0) for id2 in range(1, 9_001))
    assert sum(shard.denies(A, FOLLOWS, id2, 0) for id2 in range(10_000, 10_100)) > 0


def test_a_build_beside_a_filter_remembers_only_lists_whose_page_is_behind(cache: GraphCache) -> None:
    """The filter that is held has a version of every list."""
    id1s = [make_id(number) for number in range(64, 1_064)]
    versions = [make_version(1, 5)] * len(id1s)
    page = PairPage(1, id1s, versions, [1] * len(id1s), [A] * len(id1s))
    install(cache, page)
    shard = shard_of(cache)
    build = shard.begin_pairs(FOLLOWS)
    without_lists = build.size_bytes
    assert shard.take_pairs(build, page)
    assert build.size_bytes - without_lists < 100 * len(id1s)
    versions[0] = make_version(1, 4)
    build = shard.begin_pairs(FOLLOWS)
    assert shard.take_pairs(build, page)
    assert shard.finish_pairs(build, 1.0)
    held = shard.pairs.get(FOLLOWS)
    assert held is not None
    assert held.uncertain_lists() == id1s[:1]


def test_lists_that_came_during_a_build_are_counted_and_decided_step_by_step(cache: GraphCache) -> None:
    shard = shard_of(cache)
    build = shard.begin_pairs(FOLLOWS)
    assert shard.take_pairs(build, PairPage(1, [A], [make_version(1, 5)], [1], [THIRD]))
    before = build.size_bytes
    for number in range(1_200):
        change = ListChange(make_id(number + 100), FOLLOWS, 0, make_version(1, 1), 1, put=(Edge(A, 1),))
        cache.apply(change, 1, 0.0)
    assert build.size_bytes - before > 1_200 * 200
    steps = 1
    while build.add_some():
        steps += 1
    assert steps >= 3
    assert shard.finish_pairs(build, 1.0)
    held = shard.pairs.get(FOLLOWS)
    assert held is not None
    assert not held.uncertain_lists()
    assert all(held.version(make_id(number + 100)) == make_version(1, 1) for number in range(1_200))


def test_a_change_that_comes_before_the_one_between_is_kept_while_lists_are_decided(cache: GraphCache) -> None:
    shard = shard_of(cache)
    build = shard.begin_pairs(FOLLOWS)
    assert shard.take_pairs(build, PairPage(1, [A], [make_version(1, 5)], [1], [THIRD]))
    cache.apply(ListChange(A, FOLLOWS, make_version(1, 6), make_version(1, 7), 1), 1, 0.0)
    while build.add_some():
        continue
    cache.apply(ListChange(A, FOLLOWS, make_version(1, 5), make_version(1, 6), 1), 1, 0.0)
    assert shard.finish_pairs(build, 1.0)
    held = shard.pairs.get(FOLLOWS)
    assert held is not None
    assert not held.uncertain_lists()
    assert held.version(A) == make_version(1, 7)


def test_a_filter_with_too_many_uncertain_lists_notes_no_more_and_denies_nothing(
    cache: GraphCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.cache.pair_filters._MAX_UNCERTAIN", 3)
    install(cache, PairPage(1, [A], [make_version(1, 5)], [1], [THIRD]))
    shard = shard_of(cache)
    held = shard.pairs.get(FOLLOWS)
    assert held is not None
    for number in range(100, 120):
        cache.apply(ListInvalidation(make_id(number), FOLLOWS, make_version(1, 2)), 1, 0.0)
        shard.drop(make_id(number + 100), FOLLOWS)
    assert held.is_lost
    assert len(held.uncertain_lists()) == 4
    assert not shard.denies(make_id(119), FOLLOWS, A, 0)
    assert not shard.denies(A, FOLLOWS, A, 0)
    for id1 in held.uncertain_lists():
        shard.pairs.fill(id1, FOLLOWS, make_version(1, 3), ())
    assert not shard.denies(make_id(119), FOLLOWS, A, 0), "what was not noted is still unknown"
