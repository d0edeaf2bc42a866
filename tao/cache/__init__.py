"""What a cache server remembers: objects, list prefixes and counts, and which answers follow from them.

Pure and synchronous: time is passed in, nothing is awaited, logged or drawn at random, so a hit is a plain call and
the whole package can be tested against a naive dictionary with messages reordered, repeated and late.
Versions decide everything: a floor per key remembers the highest version heard of, whether or not anything is cached,
and a fill below its floor is neither stored nor served. Who fetches a miss, and from where, is not decided here.

One reads from the top: `graph_cache` (what the servers call) → `shard` (how fills and changes enter) → `answers` and
`splicing` (pure functions on edge blocks), `floors`, `tables` (where entries lie, and what they cost) → `eviction`.
"""

from tao.cache.graph_cache import GraphCache
from tao.cache.outcomes import (
    Applied,
    ArenaFigures,
    CachedKey,
    EdgesAnswer,
    EntryKind,
    FloorFigures,
    KeySample,
    Stored,
    Ticket,
)
from tao.cache.settings import DEFAULT_ARENA, ArenaChoice, CacheSettings

__all__ = [
    "DEFAULT_ARENA",
    "Applied",
    "ArenaChoice",
    "ArenaFigures",
    "CacheSettings",
    "CachedKey",
    "EdgesAnswer",
    "EntryKind",
    "FloorFigures",
    "GraphCache",
    "KeySample",
    "Stored",
    "Ticket",
]
