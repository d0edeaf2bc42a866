"""Statistics of a cache: samples of its keys, its arenas and version floors. Nothing is marked as used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice
from typing import Final

from tao.cache.eviction import Arena
from tao.cache.outcomes import ArenaStatistics, CachedKey, FloorStatistics, KeySample
from tao.cache.shard import CachedShard
from tao.cache.tables import CountTable

_PACKED: Final = 1 << 100
_TABLE_SHIFT: Final = 68
_PLACE_SHIFT: Final = 32
_BUCKETS_PER_CALL: Final = 16_384
"""Buckets passed in one call of `sample_keys`, which other shards share: 2 MB, half a millisecond."""


def sample_keys(shard: CachedShard | None, limit: int, after: int, stride: int) -> KeySample:
    """Return every ``stride``-th key from place ``after`` on: at most ``limit``, and fewer when many buckets of counts
    had to be passed. Time: the number of keys passed.

    A place beyond `_PACKED` is a count table of the shard, a bucket in it, and how many keys to skip there.
    """
    if shard is None:
        return KeySample((), None, 0)
    tables = list(shard.tables())
    total = sum(table.live for table in tables)
    packed = [table for table in tables if isinstance(table, CountTable)]
    found: list[CachedKey] = []
    skip = 0
    if after < _PACKED:
        plain = [table.wide if isinstance(table, CountTable) else table for table in tables]
        keys = (
            CachedKey(table.kind, key, table.atype) for table in plain for key, value in table.entries.items() if value
        )
        found.extend(islice(keys, after, after + limit * stride, stride))
        after += len(found) * stride
        if len(found) == limit:
            return KeySample(tuple(found), after, total)
        skip = max(0, after - sum(table.live for table in plain))
        after = _PACKED
    index, place = divmod(after - _PACKED, 1 << _TABLE_SHIFT)
    place, rest = divmod(place, 1 << _PLACE_SHIFT)
    skip += rest
    left = _BUCKETS_PER_CALL
    while index < len(packed):
        room = limit - len(found)
        if not room or left <= 0:
            cursor = _PACKED + (index << _TABLE_SHIFT) + (place << _PLACE_SHIFT) + skip
            return KeySample(tuple(found), cursor, total)
        buckets = max(1, min(left, room * stride // 8))
        ids, following = packed[index].packed.scan(place, buckets)
        left -= buckets
        picked = ids[skip::stride][:room]
        found += [packed[index].key_of(key_id) for key_id in picked]
        skip += len(picked) * stride
        if len(picked) == room:
            continue  # the rest of the ids is for the next call
        skip = max(0, skip - len(ids))
        index, place = (index, following) if following >= 0 else (index + 1, 0)
    return KeySample(tuple(found), None, total)


def arena_statistics(shards: Collection[CachedShard], arenas: Mapping[str, Arena]) -> list[ArenaStatistics]:
    """Return the statistics of each arena. Time: the number of tables."""
    live: Counter[tuple[str, str]] = Counter()
    for shard in shards:
        for table in shard.tables():
            live[table.arena.name, table.kind] += table.live
    return [
        ArenaStatistics(
            name,
            arena.bytes,
            arena.budget_bytes,
            live[name, "object"],
            live[name, "list"],
            live[name, "count"],
            arena.evictions,
            arena.eviction_age_seconds,
            arena.kept,
            tuple(arena.ghosts.returns),
            arena.packed.size_bytes,
        )
        for name, arena in arenas.items()
    ]


def floor_statistics(shards: Collection[CachedShard], overflows_before: int, now: float) -> FloorStatistics:
    """Return the statistics of all version floors. ``overflows_before``: overflows of shards closed meanwhile."""
    floors = [shard.floors for shard in shards]
    return FloorStatistics(
        sum(map(len, floors)),
        overflows_before + sum(each.overflows for each in floors),
        sum(each.is_overflowed(now) for each in floors),
    )
