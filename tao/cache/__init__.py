"""The contents of a cache server: objects, list prefixes and counts, and the answers that follow from them.

The package is pure and synchronous: time is passed in, nothing is awaited, logged or drawn at random. So a hit is a
plain call, and the whole package is tested against a naive dictionary with messages reordered, repeated and late.

Versions decide everything: a floor per key holds the highest known version, whether or not the key is cached, and a
fill below its floor is neither stored nor served. The callers decide where misses are fetched from.

Read from the top: `graph_cache` (called by the servers) → `shard` (how fills and changes enter) → `answers` and
`splices` (pure functions on edge blocks), `version_floors`, `tables` (the entries and their memory) → `eviction`.
"""

from tao.cache.graph_cache import GraphCache
from tao.cache.outcomes import (
    Applied,
    ArenaStatistics,
    CachedKey,
    EdgesAnswer,
    EntryKind,
    FillTicket,
    FloorStatistics,
    KeySample,
    Stored,
)
from tao.cache.settings import DEFAULT_ARENA, ArenaChoice, CacheSettings

__all__ = [
    "DEFAULT_ARENA",
    "Applied",
    "ArenaChoice",
    "ArenaStatistics",
    "CacheSettings",
    "CachedKey",
    "EdgesAnswer",
    "EntryKind",
    "FillTicket",
    "FloorStatistics",
    "GraphCache",
    "KeySample",
    "Stored",
]
