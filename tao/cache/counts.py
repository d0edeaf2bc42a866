"""The counts of one shard and association type: packed, or, for the few that do not fit, in a table like lists.

It stands where an `EntryTable` would: accounts for what it takes, remembers the version of what leaves, tells the
witness. Packed counts have an order of their own, within their buckets, and do not stand in the arena's queue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from tao.cache.outcomes import CachedKey
from tao.cache.packed import PackedCounts
from tao.cache.witness import EVICTED
from tao.model.ids import SHARD_SHIFT

if TYPE_CHECKING:
    from tao.cache.eviction import Arena
    from tao.cache.tables import Arenas, EntryTable

_DISPLACED: Final = 2


class CountTable:
    """``packed`` may be read directly; it looks into ``wide``, too. Only the methods here change either."""

    __slots__ = ("_shard", "_shared", "arena", "atype", "kind", "packed", "wide")

    def __init__(self, shard: int, atype: int, version_epoch: int, wide: EntryTable, shared: Arenas) -> None:
        self.kind: Literal["count"] = "count"
        self.atype = atype
        self.arena: Arena = wide.arena
        self.wide = wide
        self.packed: PackedCounts = self.arena.packed.open(version_epoch, wide.entries)
        self._shard = shard
        self._shared = shared
        self.arena.count_tables[self.packed.number] = self

    @property
    def live(self) -> int:
        """Counts held."""
        return self.packed.live + self.wide.live

    def fits(self, value: bytes) -> bool:
        """See `EntryTable.fits`."""
        return self.wide.fits(value)

    def put(self, key: int, value: bytes) -> None:
        """See `EntryTable.put`."""
        arena = self.arena
        bytes_before = arena.packed.size_bytes
        outcome = self.packed.put(key, value)
        arena.bytes += arena.packed.size_bytes - bytes_before
        if not outcome:
            self.wide.put(key, value)
            return
        if self.wide.live:
            self.wide.drop(key)
        if outcome == _DISPLACED:
            number, key_id, version = arena.packed.displaced
            arena.evictions += 1
            arena.count_tables[number].displaced(key_id, version)

    def displaced(self, key_id: int, version: int) -> None:
        """An entry of this table has left its bucket for a newer one."""
        key = self._shard << SHARD_SHIFT | key_id
        self._shared.departed.record(key, self.atype, version)
        self._shared.witness.tell_key(key, self.atype, EVICTED, version)

    def key_of(self, key_id: int) -> CachedKey:
        """The name of a packed count."""
        return CachedKey(self.kind, self._shard << SHARD_SHIFT | key_id, self.atype)

    def drop(self, key: int) -> bool:
        """Forget the count. Returns whether there was one."""
        return self.packed.drop(key) or self.wide.drop(key)

    def retire(self) -> None:
        """Nothing looks here any more: in no time, whatever is held; the arena sweeps it out."""
        self.arena.count_tables.pop(self.packed.number, None)
        self.packed.close()
        self.wide.retire()
