"""Where entries lie: one plain dictionary from id to encoded bytes per shard, kind and type (DESIGN.md §4 "no stalls").

A dictionary whose keys are integers and whose values are bytes is not tracked by the garbage collector, however large;
one per shard keeps its growth short; and dropping all of a shard is forgetting its dictionaries. Accounting is part of
`EntryTable`, so that no value comes or goes unaccounted. Counts lie in `tao.cache.counts`, behind the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tao.cache.counts import CountTable
from tao.cache.eviction import Arena, Moment
from tao.cache.floors import DepartedVersions
from tao.cache.outcomes import EntryKind
from tao.cache.packed import packed_store
from tao.cache.settings import DEFAULT_ARENA, ArenaChoice, CacheSettings
from tao.cache.witness import EVICTED, Witness
from tao.model.graph import COUNT_VALUE_BYTES, version_of
from tao.model.ids import SHARD_SHIFT

# CPython 3.11 to 3.13 on 64 bits: a bytes object has a 33-byte head, blocks come in steps of 16, and above 512 bytes
# from malloc, which adds 8. `tests/unit/cache/test_accounting.py` holds the sums against the process's memory.
_BYTES_HEAD: Final = 33
_SMALL_BLOCK: Final = 512
# A dictionary slot is 24 bytes and 1.5 index entries of 4; tables are between half and quite full, 3/4 over many.
_SLOT_BYTES: Final = 42
_RECORD_BYTES: Final = 17
_TWO_DIGIT_INT: Final = 1 << 60


def value_bytes(value: bytes) -> int:
    """Memory of an encoded value."""
    size = _BYTES_HEAD + len(value)
    return (size + 15 if size <= _SMALL_BLOCK else size + 23) & -16


class Arenas:
    """The arenas of one server, the credit that they share, and the schema's choice among them."""

    __slots__ = (
        "_arenas",
        "credit",
        "departed",
        "keep_count_of_list_bytes",
        "moment",
        "tell_shrunk",
        "too_large",
        "types",
        "witness",
    )

    def __init__(self, settings: CacheSettings, types: ArenaChoice, witness: Witness) -> None:
        self.types = types
        self.witness = witness
        self.tell_shrunk: Callable[[int, int, int, int], None] = _nobody_is_told
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
        """Absent objects have no type: they lie in the default arena."""
        return self._named(self.types.object_arena(otype)) if otype else self._arenas[DEFAULT_ARENA]

    def for_list(self, atype: int) -> Arena:
        return self._named(self.types.list_arena(atype))

    def all(self) -> Mapping[str, Arena]:
        return self._arenas

    def _named(self, name: str) -> Arena:
        return self._arenas.get(name) or self._arenas[DEFAULT_ARENA]


def _nobody_is_told(id1: int, atype: int, before: int, left: int) -> None:
    """See `GraphCache.on_shrunk`."""


class EntryTable:
    """Entries of one kind (and association type) of one shard, in one arena.

    ``entries`` may be read directly; an empty value is no value. Only the methods change it."""

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
        """Keys, with or without a value."""
        return len(self.entries)

    def size_of(self, key: int) -> int:
        """See `EvictableTable`. Raises `KeyError` for a key that was never put or is evicted."""
        value = self.entries[key]
        return self._key_bytes + value_bytes(value) if value else 0

    def fits(self, value: bytes) -> bool:
        """Whether the arena would keep a value of this size."""
        return self._key_bytes + value_bytes(value) <= self.arena.largest_entry_bytes

    def put(self, key: int, value: bytes) -> None:
        """Add or replace. The arena may be over its budget afterwards, by this entry: then `Arena.make_room`."""
        old = self.entries.get(key)
        if old is None:
            self.arena.admit(self, key)
            self.arena.bytes += self._key_bytes + value_bytes(value)
            self.live += 1
        elif old:
            self.arena.bytes += value_bytes(value) - value_bytes(old)
        else:
            self.arena.bytes += value_bytes(value)
            self.live += 1
        self.entries[key] = value

    def drop(self, key: int) -> bool:
        """Forget the value; its key stays until the hand comes by. Returns whether there was one."""
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
        self._shared.witness.tell_key(key, self.atype, EVICTED, version)
        if self._counts is not None and size >= self._shared.keep_count_of_list_bytes:
            self._counts.put(key, value[:COUNT_VALUE_BYTES])

    def retire(self) -> None:
        """Nothing looks here any more; the arena frees what is left."""
        self.live = 0
        self.arena.retire(self)

    def free_some(self, limit: int) -> int:
        freed = min(limit, len(self.entries))
        for _ in range(freed):
            _, value = self.entries.popitem()
            self.arena.bytes -= self._key_bytes + (value_bytes(value) if value else 0)
        return freed
