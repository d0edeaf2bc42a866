"""The operator's settings of the cache, and the schema's choices about caching."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from tao.model.errors import SettingsError

DEFAULT_ARENA: Final = "default"


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Bounds of one server's cache. Raises `SettingsError` for values that cannot work."""

    arena_bytes: Mapping[str, int] = field(default_factory=lambda: {DEFAULT_ARENA: 256 << 20})
    """Budget per arena. An arena that the schema names but that has no budget here shares ``default``. 256 MB suits a
    development machine; a production server sets what it has, less a quarter for the allocator and the sockets."""
    floor_seconds: float = 60.0
    """How long the highest version heard of for a key is remembered. Must exceed replica lag plus queueing; a minute
    is several times what a healthy region shows, and a fill older than that is not cached anyway."""
    max_floors_per_shard: int = 65_536
    """About 8 MB for a shard, and 500 writes a second for two minutes on it; beyond that its fills are not cached
    until the forgotten floors have lost their meaning."""
    departed_slots: int = 65_521
    """Keys whose version is remembered when their entry is evicted (24 bytes each, a prime spreads them). Best effort:
    it keeps a lagging replica from answering with less than was answered a moment ago."""
    credit_slots: int = 4_194_301
    """Bytes that hold the credit which entries have for their uses. A prime near 4 M: few entries share a byte, and the
    array is a small part of any production budget."""
    max_reinsertions: int = 32
    """Used entries that go to the end of the main queue in one eviction; the next leaves whatever its credit. Keeps an
    eviction in the microseconds when everything is in use."""
    largest_entry_fraction: float = 0.125
    """An entry above this share of its arena is answered but not kept: it would evict too much that is wanted."""
    packed_counts_fraction: float = 0.2
    """Most of an arena that counts may take, in blocks that grow as counts come and do not shrink for other entries.
    At 10 to 14 bytes a count, the fifth of a gigabyte has room for 13 million of them."""
    keep_count_of_list_bytes: int = 512
    """A list at least this large leaves its count behind when it is evicted: a fortieth of its size at most, for the
    half of all questions after a long list that ask how long it is."""
    kept_answers_bytes: int = 16 << 20
    """Most bytes of kept answers to queries for edges that cached prefixes could not decide, beside the arenas: of some
    hundred long lists, whose prefixes of 100 KB are counted, too."""
    reclaim_entries_per_step: int = 2_000
    """Entries freed at a time after a bulk invalidation: under half a millisecond, so that no request notices."""

    def __post_init__(self) -> None:
        if DEFAULT_ARENA not in self.arena_bytes:
            raise SettingsError(f"arena_bytes has no arena {DEFAULT_ARENA!r}: give it a budget in bytes")
        for name, budget_bytes in self.arena_bytes.items():
            if budget_bytes <= 0:
                raise SettingsError(f"arena {name!r} has a budget of {budget_bytes} bytes; it must be above 0")
        for name in ("max_floors_per_shard", "departed_slots", "credit_slots", "reclaim_entries_per_step"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1")
        if self.floor_seconds <= 0 or self.max_reinsertions < 0 or self.keep_count_of_list_bytes < 0:
            raise SettingsError(
                "floor_seconds must be above 0; max_reinsertions and keep_count_of_list_bytes not below"
            )
        if self.kept_answers_bytes < 0:
            raise SettingsError("kept_answers_bytes must not be below 0")
        if not 0 <= self.packed_counts_fraction <= 0.5:  # the rest is for lists and objects alone
            raise SettingsError("packed_counts_fraction must be at least 0 and at most 0.5")
        if not 0 < self.largest_entry_fraction <= 1:
            raise SettingsError("largest_entry_fraction must be above 0 and at most 1")


class ArenaChoice(Protocol):
    """The schema's choices about caching. It is asked for every cached type, and must not raise for a type that the
    schema has lost meanwhile (it answers with the defaults)."""

    def object_arena(self, otype: int) -> str: ...

    def list_arena(self, atype: int) -> str: ...

    def list_limit(self, atype: int) -> int:
        """Return the most edges that are cached of a list, at least 1."""
        ...
