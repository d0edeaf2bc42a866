"""Tables of entries: one plain dictionary from id to encoded bytes for each shard, kind and type.

CPython's garbage collector does not track a dictionary whose keys are integers and whose values are bytes, however
large it is. One dictionary per shard keeps the pauses of its growth short, and dropping a shard only drops its
dictionaries. `EntryTable` accounts for the memory, so that no value comes or goes uncounted.

Counts are packed (`CountTable`); the few that do not fit lie in an `EntryTable`, as lists do. A `CountTable` has the
methods of an `EntryTable`: it accounts for its memory, remembers the versions of entries that leave, and reports to the
recorder. Packed counts have an eviction order of their own within their buckets, and are not in the arena's queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from tao.cache.eviction import Arena, Moment
from tao.cache.key_recorder import EVICTED, KeyRecorder
from tao.cache.outcomes import CachedKey, EntryKind
from tao.cache.packed import PackedCounts, packed_store
from tao.cache.records import DepartedVersions
from tao.cache.settings import DEFAULT_ARENA, ArenaChoice, CacheSettings
from tao.model.graph import COUNT_VALUE_BYTES, version_of
from tao.model.ids import SHARD_SHIFT

# CPython 3.11 to 3.13 on 64 bits: a bytes object has a head of 33 bytes. Blocks come in steps of 16 bytes; above 512
# bytes they come from malloc, which adds 8. `tests/unit/cache/test_accounting.py` compares the sums with the process's
# memory.
_BYTES_HEAD: Final = 33
_SMALL_BLOCK: Final = 512
# A dictionary slot takes 24 bytes and 1.5 index entries of 4. Tables are between half full and full; over many tables,
# 3/4.
_SLOT_BYTES: Final = 42
_RECORD_BYTES: Final = 17
_TWO_DIGIT_INT: Final = 1 << 60


def value_bytes(value: bytes) -> int:
    """Return the memory of an encoded value in bytes."""
    size = _BYTES_HEAD + len(value)
    return (size + 15 if size <= _SMALL_BLOCK else size + 23) & -16


class Arenas:
    """The arenas of one server, the credit that they share, and the schema's choice of an arena for each type."""

    __slots__ = (
        "_arenas",
        "credit",
        "departed",
        "keep_count_of_list_bytes",
        "moment",
        "recorder",
        "report_shrunk",
        "too_large",
        "types",
    )

    def __init__(self, settings: CacheSettings, types: ArenaChoice, recorder: KeyRecorder) -> None:
        self.types = types
        self.recorder = recorder
        self.report_shrunk: Callable[[int, int, int, int], None] = lambda *_: None
        self.departed = DepartedVersions(settings.departed_slots)
        self.keep_count_of_list_bytes = settings.keep_count_of_list_bytes
        self.moment = Moment()
        self.too_large = 0
        self.credit = bytearray(settings.credit_slots)
        self._arenas = {
            name: Arena(
                name,
                budget,
                int(budget * settings.largest_entry_fraction),
                self.credit,
                settings.max_reinsertions,
                packed_store(int(budget * settings.packed_counts_fraction)),
                self.moment,
            )
            for name, budget in settings.arena_bytes.items()
        }

    def for_object(self, otype: int) -> Arena:
        """Return the arena of objects of a type; absent ones have none and lie in the default arena."""
        return (self._arenas.get(self.types.object_arena(otype)) if otype else None) or self._arenas[DEFAULT_ARENA]

    def for_list(self, atype: int) -> Arena:
        return self._arenas.get(self.types.list_arena(atype)) or self._arenas[DEFAULT_ARENA]

    def all(self) -> Mapping[str, Arena]:
        return self._arenas


class EntryTable:
    """The entries of one kind (and association type) of one shard, in one arena.

    ``entries`` may be read directly; an empty value means that no value is held. Only the methods change it.
    """

    __slots__ = ("_counts", "_key_bytes", "_shared", "arena", "atype", "entries", "kind", "live", "number")

    def __init__(
        self, kind: EntryKind, shard: int, atype: int, arena: Arena, shared: Arenas, counts: CountTable | None = None
    ) -> None:
        self.kind = kind
        self.atype = atype
        self.arena = arena
        self.entries: dict[int, bytes] = {}
        self.live = 0
        self.number = 0
        self._counts = counts
        self._shared = shared
        largest_key = (shard + 1) << SHARD_SHIFT
        self._key_bytes = _SLOT_BYTES + _RECORD_BYTES + (32 if largest_key <= _TWO_DIGIT_INT else 48)
        arena.register(self)

    def __len__(self) -> int:
        """Return the number of keys, with or without a value."""
        return len(self.entries)

    def size_of(self, key: int) -> int:
        """See `EvictableTable`. Raises `KeyError` for a key that was never put or is evicted."""
        value = self.entries[key]
        return self._key_bytes + value_bytes(value) if value else 0

    def fits(self, value: bytes) -> bool:
        """Return whether the arena would keep a value of this size."""
        return self._key_bytes + value_bytes(value) <= self.arena.largest_entry_bytes

    def put(self, key: int, value: bytes) -> bool:
        """Add or replace a value. Returns False, and changes nothing, when the arena keeps no value of this size. The
        entry may take the arena over its budget: call `Arena.make_room` afterwards."""
        arena, entries = self.arena, self.entries
        size = _BYTES_HEAD + len(value)  # as `value_bytes`
        size = (size + 15 if size <= _SMALL_BLOCK else size + 23) & -16
        if self._key_bytes + size > arena.largest_entry_bytes:
            return False
        old = entries.get(key)
        if old is None:
            arena.admit(self, key)
            arena.bytes += self._key_bytes + size
            self.live += 1
        elif old:
            arena.bytes += size - value_bytes(old)
        else:
            arena.bytes += size
            self.live += 1
        entries[key] = value
        return True

    def drop(self, key: int) -> bool:
        """Drop the value; the key stays until the eviction hand passes it. Returns whether there was a value."""
        old = self.entries.get(key)
        if not old:
            return False
        self.entries[key] = b""
        self.arena.bytes -= value_bytes(old)
        self.live -= 1
        return True

    def evict(self, key: int) -> None:
        value = self.entries.pop(key)
        self.arena.bytes -= self._key_bytes
        if not value:
            return
        size = value_bytes(value)
        self.arena.bytes -= size
        self.live -= 1
        version = version_of(value)
        self._shared.departed.record(key, self.atype, version)
        self._shared.recorder.record_key(key, self.atype, EVICTED, version)
        if self._counts is not None and size >= self._shared.keep_count_of_list_bytes:
            self._counts.put(key, value[:COUNT_VALUE_BYTES])

    def retire(self) -> None:
        """Drop the table. Nothing reads it any more; the arena frees its entries step by step."""
        self.live = 0
        self.arena.retire(self)

    def free_some(self, limit: int) -> int:
        freed = min(limit, len(self.entries))
        for _ in range(freed):
            _, value = self.entries.popitem()
            self.arena.bytes -= self._key_bytes + (value_bytes(value) if value else 0)
        return freed


_DISPLACED: Final = 2


class CountTable:
    """``packed`` may be read directly; it looks into ``wide`` too. Only the methods change them."""

    __slots__ = ("_fits", "_shard", "_shared", "arena", "atype", "kind", "packed", "wide")

    def __init__(self, shard: int, atype: int, version_epoch: int, wide: EntryTable, shared: Arenas) -> None:
        self.kind: Literal["count"] = "count"
        self.atype = atype
        self.arena: Arena = wide.arena
        self.wide = wide
        self.packed: PackedCounts = self.arena.packed.open(version_epoch, wide.entries)
        self._fits: Final = wide.fits(bytes(COUNT_VALUE_BYTES))
        self._shard = shard
        self._shared = shared
        self.arena.count_tables[self.packed.number] = self

    @property
    def live(self) -> int:
        """Return the number of counts held."""
        return self.packed.live + self.wide.live

    def put(self, key: int, value: bytes) -> bool:
        """See `EntryTable.put`."""
        arena = self.arena
        if not self._fits:
            return False
        bytes_before = arena.packed.size_bytes
        outcome = self.packed.put(key, value)
        arena.bytes += arena.packed.size_bytes - bytes_before
        if not outcome:
            return self.wide.put(key, value)
        if self.wide.live:
            self.wide.drop(key)
        if outcome == _DISPLACED:
            number, key_id, version = arena.packed.displaced
            arena.evictions += 1
            arena.count_tables[number].displaced(key_id, version)
        return True

    def displaced(self, key_id: int, version: int) -> None:
        """Note that an entry of this table was replaced in its bucket by a newer one."""
        key = self._shard << SHARD_SHIFT | key_id
        self._shared.departed.record(key, self.atype, version)
        self._shared.recorder.record_key(key, self.atype, EVICTED, version)

    def key_of(self, key_id: int) -> CachedKey:
        """Return the key of a packed count."""
        return CachedKey(self.kind, self._shard << SHARD_SHIFT | key_id, self.atype)

    def drop(self, key: int) -> bool:
        """Drop the count. Returns whether there was one."""
        return self.packed.drop(key) or (self.wide.live > 0 and self.wide.drop(key))

    def retire(self) -> None:
        """Drop the table in constant time; the arena sweeps the packed entries out later."""
        self.arena.count_tables.pop(self.packed.number, None)
        self.packed.close()
        self.wide.retire()
