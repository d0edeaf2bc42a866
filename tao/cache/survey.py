"""Looking over what a cache holds: samples of its keys, figures of its arenas and floors. Nothing is marked as used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from itertools import islice

from tao.cache.eviction import Arena
from tao.cache.outcomes import ArenaFigures, CachedKey, FloorFigures, KeySample
from tao.cache.shard import CachedShard


def sample_keys(shard: CachedShard | None, limit: int, after: int, stride: int) -> KeySample:
    """Every ``stride``-th key from place ``after`` on, at most ``limit``. Time: the number of keys passed."""
    if shard is None:
        return KeySample((), None, 0)
    total = sum(table.live for table in shard.tables())
    keys = (
        CachedKey(table.kind, key, table.atype)
        for table in shard.tables()
        for key, value in table.entries.items()
        if value
    )
    end = after + limit * stride
    found = tuple(islice(keys, after, end, stride))
    return KeySample(found, end if len(found) == limit else None, total)


def arena_figures(shards: Collection[CachedShard], arenas: Mapping[str, Arena]) -> list[ArenaFigures]:
    """One line per arena. Time: the number of tables."""
    live: Counter[tuple[str, str]] = Counter()
    for shard in shards:
        for table in shard.tables():
            live[table.arena.name, table.kind] += table.live
    return [
        ArenaFigures(
            name,
            arena.bytes,
            arena.budget_bytes,
            live[name, "object"],
            live[name, "list"],
            live[name, "count"],
            arena.evictions,
        )
        for name, arena in arenas.items()
    ]


def floor_figures(shards: Collection[CachedShard], overflows_before: int, now: float) -> FloorFigures:
    """``overflows_before``: of shards closed meanwhile."""
    floors = [shard.floors for shard in shards]
    return FloorFigures(
        sum(map(len, floors)),
        overflows_before + sum(each.overflows for each in floors),
        sum(each.is_overflowed(now) for each in floors),
    )
