"""The races of a membership filter's build, one by one."""

from __future__ import annotations

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.cache.filters import FilterBuild
from tao.cache.shard import CachedShard
from tao.model.changes import GoneEdge, ListChange, ListInvalidation
from tao.model.graph import Edge
from tests.properties.test_cache_model import Types
from tests.rigs.versions import make_version

SHARD, ATYPE = 3, 1
ID1 = (SHARD << 47) + 64


def v(counter: int) -> int:
    return make_version(1, counter)


class Scanned:
    """A cache, and a build of which the first page (ids 1 to 9, of version 5) has been read."""

    def __init__(self) -> None:
        self.cache = GraphCache(CacheSettings(), Types())
        self.cache.open_shard(SHARD, 1)
        shard = self.cache.filter_shard(SHARD)
        assert shard is not None
        self.shard: CachedShard = shard
        self.build: FilterBuild = shard.begin_filter(ID1, ATYPE)
        assert self.build.take(1, v(5), 18, range(1, 10))

    def change(self, before: int, put: tuple[int, ...] = (), gone: tuple[int, ...] = ()) -> None:
        edges, old = tuple(Edge(id2, 0) for id2 in put), tuple(GoneEdge(id2, 0) for id2 in gone)
        self.cache.apply(ListChange(ID1, ATYPE, v(before), v(before + 1), 18, old, edges), 1, 0.0)

    def finish(self) -> bool:
        return self.shard.finish_filter(self.build, 0.0)

    def denies(self, id2: int) -> bool:
        answer = self.cache.edges(ID1, ATYPE, (id2,))
        return answer is not None and not answer.missing


@pytest.fixture
def scanned() -> Scanned:
    return Scanned()


def test_a_finished_filter_denies_what_is_not_there_and_nothing_else(scanned: Scanned) -> None:
    assert scanned.build.take(1, v(5), 18, range(10, 19))
    assert scanned.finish()
    assert not any(map(scanned.denies, range(1, 19)))
    assert scanned.denies(500)
    assert scanned.cache.denials == 1
    assert scanned.cache.edges(ID1, ATYPE, (500,), minimum=v(6)) is None


def test_a_page_newer_than_the_received_messages_waits_for_them(scanned: Scanned) -> None:
    """Edge 12 was there at version 5 and is deleted by 6: at version 5 it must not be denied."""
    assert scanned.build.take(1, v(6), 17, [id2 for id2 in range(10, 19) if id2 != 12])
    assert not scanned.finish()
    assert not scanned.build.is_abandoned
    scanned.change(5, gone=(12,))
    assert scanned.finish()
    assert scanned.shard.filters.version(ID1, ATYPE) == v(6)


def test_a_page_older_than_the_first_invalidates_the_build(scanned: Scanned) -> None:
    """The page comes from a server that lags: an edge added by version 5 would be in neither page nor change."""
    assert not scanned.build.take(1, v(4), 17, range(10, 18))
    assert not scanned.finish()


def test_a_message_ahead_of_the_scan_invalidates_the_build(scanned: Scanned) -> None:
    scanned.change(5, put=(50,))
    build = scanned.shard.begin_filter(ID1, ATYPE)
    assert not build.take(1, v(5), 18, range(1, 19)), "the row of the change is not visible yet"


def test_changes_of_the_time_of_the_scan_are_chained_in_whatever_order_they_come(scanned: Scanned) -> None:
    for before, put in ((7, 70), (5, 50), (6, 60), (6, 60), (3, 30)):
        scanned.change(before, put=(put,))
    assert scanned.finish()
    assert scanned.shard.filters.version(ID1, ATYPE) == v(8)
    assert not any(map(scanned.denies, (50, 60, 70)))


def test_a_gap_between_the_changes_is_waited_for_and_never_bridged(scanned: Scanned) -> None:
    scanned.change(6, put=(60,))
    assert not scanned.finish()
    scanned.change(5, put=(50,))
    assert scanned.finish()
    scanned.change(9, put=(90,))
    assert scanned.shard.filters.get(ID1, ATYPE) is None


@pytest.mark.parametrize("event", ["invalidated", "foreign", "bumped", "epoch"])
def test_an_event_other_than_a_change_invalidates_build_and_filter(event: str) -> None:
    for finished in (False, True):
        scanned = Scanned()
        if finished:
            assert scanned.finish()
        cache = scanned.cache
        if event == "invalidated":
            cache.apply(ListInvalidation(ID1, ATYPE, v(6)), 1, 0.0)
        elif event == "foreign":
            scanned.shard.drop(ID1, ATYPE)
        elif event == "bumped":
            cache.bump_shard(SHARD)
        else:
            cache.open_shard(SHARD, 2)
        assert scanned.shard.filters.get(ID1, ATYPE) is None
        assert finished or not scanned.finish()


def test_many_deletions_make_a_filter_loose(scanned: Scanned) -> None:
    assert scanned.finish()
    for step in range(5):
        scanned.change(5 + step, gone=(step + 1,))
    held = scanned.shard.filters.get(ID1, ATYPE)
    assert held is not None
    assert held.is_loose
    assert not scanned.denies(1), "a deleted edge is asked of the database"


def test_a_filter_is_counted_in_its_arena_and_leaves_like_an_entry() -> None:
    cache = GraphCache(CacheSettings(arena_bytes={"default": 40_000}, largest_entry_fraction=0.5), Types())
    cache.open_shard(SHARD, 1)
    shard = cache.filter_shard(SHARD)
    assert shard is not None
    for number in range(4):
        build = shard.begin_filter(ID1 + number, ATYPE)
        assert build.take(1, v(1), 8_000, ())
        assert shard.finish_filter(build, 0.0)
        (arena,) = cache.arenas()
        assert 15_000 <= arena.bytes <= 40_000
    assert shard.filters.get(ID1, ATYPE) is None, "the oldest made room"
    assert shard.floor(ID1, ATYPE) == v(1), "its version is not forgotten"
    build = shard.begin_filter(ID1, ATYPE)
    assert build.take(1, v(1), 80_000, ())
    assert not shard.finish_filter(build, 0.0), "larger than an entry may be"
