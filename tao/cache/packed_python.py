"""Counts packed into blocks of memory, without a Python object for each: the implementation in Python.

`tao.cache.packed_core` is the compiled implementation; `tao.cache.packed` chooses between them and says why there are
two. One suite (`tests/conformance/test_packed_counts.py`) holds both to the same behaviour, displacement for
displacement.

**An entry** is a key of 64 bits and a value of 6 bytes, or of 2 for a list without edges: 14 and 10 bytes. The key is a
*number* of 17 bits, which stands for a shard and an association type, and the 47 bits of the id that are not its shard.
The paper's 16-bit table of types thus holds the shard too, and what it saves makes room for the version: every entry
has its own.

* 6 bytes: ``count (22 bits) | version counter (22) | version epochs behind the number's (4)``
* 2 bytes: ``version counter (12) | version epochs behind (4)``, for count 0

A value that does not fit (one list in millions) is for the caller to keep: `PackedCounts.put` says so.

**Buckets** have 8 ways: 8 keys, then 8 values, the most recently used first. A hit slides the others down; a new entry
displaces the last. **Growth** is linear hashing: one bucket at a time is split in two, at most four for one entry, and
memory comes in segments, so there is never a pause to rehash. Tables grow when they are three eighths full, which keeps
displacements rare (3 in a hundred), up to a power of two of buckets. From then on they fill up, and no memory is spent
but on entries.

**Invalidating** a shard or a type drops its number at once. `PackedStore.sweep` takes its entries out in steps, and
only then is the number given out again.
"""

from __future__ import annotations

import struct
from typing import Final

WAYS: Final = 8
SEGMENT_BUCKETS: Final = 512
ID_BITS: Final = 47
MAX_NUMBER: Final = (1 << 64 - ID_BITS) - 1
FIELD_BITS: Final = 22
SHORT_COUNTER_BITS: Final = 12
AGES: Final = 16

_ID_MASK: Final = (1 << ID_BITS) - 1
_COUNTER_MASK: Final = (1 << 48) - 1
_FIELD_MASK: Final = (1 << FIELD_BITS) - 1
_SHORT_MASK: Final = (1 << SHORT_COUNTER_BITS) - 1
_WORD_MASK: Final = (1 << 64) - 1
_VALUE: Final = struct.Struct("<QQ")
_KEYS: Final = struct.Struct(f"<{WAYS}Q")
_KEYS_BYTES: Final = 8 * WAYS
_LIVE, _DYING, _SWEPT = 1, 2, 3
_SPLITS_PER_ENTRY: Final = 4
_ROOMY_ENTRIES: Final = 3  # of a bucket, on average


def _mixed(key: int) -> int:
    """Return 32 bits that depend on all bits of the key, evenly. Ids follow each other, and ids of one millisecond
    differ between shards in the highest bits alone; one multiplication would leave a quarter of the buckets empty."""
    key = (key ^ key >> 32) * 0x9E3779B97F4A7C15 & _WORD_MASK
    return ((key ^ key >> 32) * 0xD6E8FEB86659FD93 & _WORD_MASK) >> 32


class _Ways:
    """Buckets of one size of value."""

    __slots__ = ("_segments", "buckets", "entries", "limit", "mask", "stride", "value_bytes")

    def __init__(self, value_bytes: int, limit: int) -> None:
        self.value_bytes = value_bytes
        self.stride = WAYS * (8 + value_bytes)
        self.limit = limit
        self.release()

    def release(self) -> None:
        self.buckets = self.entries = 0
        self.mask = WAYS - 1
        self._segments: list[bytearray] = []

    def begin(self) -> None:
        while self.buckets < WAYS and self.buckets < self.limit:
            self._add_bucket()

    def _add_bucket(self) -> None:
        if self.buckets == len(self._segments) * SEGMENT_BUCKETS:
            self._segments.append(bytearray(SEGMENT_BUCKETS * self.stride))
        self.buckets += 1
        if self.buckets > self.mask + 1:
            self.mask = self.mask << 1 | 1

    def place_of(self, hashed: int) -> int:
        place = hashed & self.mask
        return place if place < self.buckets else place & self.mask >> 1

    def at(self, place: int) -> tuple[bytearray, int]:
        """Return the bucket: its segment, and its offset there."""
        segment, index = divmod(place, SEGMENT_BUCKETS)
        return self._segments[segment], index * self.stride

    def value(self, block: bytearray, start: int, way: int) -> int:
        at = start + _KEYS_BYTES + way * self.value_bytes
        return int.from_bytes(block[at : at + self.value_bytes], "little")

    def to_front(self, block: bytearray, start: int, way: int, key: int, value: int) -> None:
        """Slide the ways before ``way`` down by one, and write the first."""
        block[start + 8 : start + 8 * way + 8] = block[start : start + 8 * way]
        block[start : start + 8] = key.to_bytes(8, "little")
        start, size = start + _KEYS_BYTES, self.value_bytes
        block[start + size : start + size * way + size] = block[start : start + size * way]
        block[start : start + size] = value.to_bytes(size, "little")

    def take_out(self, block: bytearray, start: int, way: int) -> None:
        block[start + 8 * way : start + _KEYS_BYTES] = (
            block[start + 8 * way + 8 : start + _KEYS_BYTES] + b"\0\0\0\0\0\0\0\0"
        )
        start, size = start + _KEYS_BYTES, self.value_bytes
        end = start + size * WAYS
        block[start + size * way : end] = block[start + size * way + size : end] + bytes(size)
        self.entries -= 1

    def split(self) -> None:
        """Add one bucket: half of the entries of the bucket that it is split from move there, in their order."""
        place = self.buckets
        self._add_bucket()
        source, start = self.at(place & self.mask >> 1)
        target, begin = self.at(place)
        moving = [
            way for way, key in enumerate(_KEYS.unpack_from(source, start)) if key and _mixed(key) & self.mask == place
        ]
        for way in reversed(moving):
            key = int.from_bytes(source[start + 8 * way : start + 8 * way + 8], "little")
            self.to_front(target, begin, WAYS - 1, key, self.value(source, start, way))
            self.take_out(source, start, way)
            self.entries += 1


class PackedStore:
    """The counts of one arena. ``most_buckets`` bounds the buckets of counts, ``most_short_buckets`` those of lists
    without edges: powers of two from 8 on, or 0 for none."""

    __slots__ = ("_dying", "_holders", "_states", "_sweep_place", "_swept", "_unused", "displaced", "ways")

    def __init__(self, most_buckets: int, most_short_buckets: int) -> None:
        self.ways = (_Ways(6, most_buckets), _Ways(2, most_short_buckets))
        self._states = bytearray(1)
        self._holders: list[PackedCounts | None] = [None]
        self._unused: list[int] = []
        self._dying = self._swept = 0
        self._sweep_place = (0, 0)
        self.displaced: tuple[int, ...] = ()
        """After a `PackedCounts.put` that returned 2: number, id (without shard) and version of the displaced entry."""

    @property
    def size_bytes(self) -> int:
        """Return the memory of the buckets in bytes."""
        return sum(ways.buckets * ways.stride for ways in self.ways)

    @property
    def entries(self) -> int:
        """Return the number of entries, including entries of dropped numbers that are not swept yet."""
        return sum(ways.entries for ways in self.ways)

    def open(self, version_epoch: int, wide: dict[int, bytes]) -> PackedCounts:
        """Return a new, empty holder of counts with a number of its own; when all numbers are taken, one with number 0,
        which keeps nothing. ``wide``: where its reads look next. ``version_epoch``: the epoch of the shard."""
        number = 0
        if self._unused:
            number = self._unused.pop()
        elif len(self._holders) <= MAX_NUMBER:
            number = len(self._holders)
            self._holders.append(None)
            self._states.append(0)
        holder = PackedCounts(self, number, version_epoch, wide)
        if number:
            self._holders[number] = holder
            self._states[number] = _LIVE
        return holder

    def holder(self, number: int) -> PackedCounts | None:
        return self._holders[number]

    def retire(self, number: int, *, empty: bool) -> None:
        self._holders[number] = None
        if empty:
            self._states[number] = 0
            self._unused.append(number)
        else:
            self._states[number] = _DYING
            self._dying += 1

    def sweep(self, most_buckets: int) -> bool:
        """Remove the entries of dropped numbers from this many buckets. Returns whether there is more to do."""
        if not self._swept:
            if not self._dying:
                return False
            self._states = self._states.replace(bytes((_DYING,)), bytes((_SWEPT,)))
            self._swept, self._dying = self._dying, 0
            self._sweep_place = (0, 0)
        table, place = self._sweep_place
        while most_buckets > 0 and table < 2:
            ways = self.ways[table]
            if place >= ways.buckets:
                table, place = table + 1, 0
                continue
            block, start = ways.at(place)
            keys = _KEYS.unpack_from(block, start)
            for way in range(WAYS - 1, -1, -1):
                if keys[way] and self._states[keys[way] >> ID_BITS] == _SWEPT:
                    ways.take_out(block, start, way)
            place += 1
            most_buckets -= 1
        self._sweep_place = table, place
        if table == 2:
            for number, state in enumerate(self._states):
                if state == _SWEPT:
                    self._states[number] = 0
                    self._unused.append(number)
            self._swept = 0
            for ways in self.ways:
                if not ways.entries:
                    ways.release()
        return bool(self._swept or self._dying)


class PackedCounts:
    """The counts of one shard and association type."""

    __slots__ = ("_store", "_version_epoch", "_wide", "live", "number")

    def __init__(self, store: PackedStore, number: int, version_epoch: int, wide: dict[int, bytes]) -> None:
        self._store = store
        self._version_epoch = version_epoch
        self._wide = wide
        self.number = number
        self.live = 0
        """Return the number of entries."""

    def get(self, key_id: int) -> bytes | None:
        """Return the count value, and mark it as used."""
        return self._look(key_id, use=True) or (self._wide.get(key_id) if self._wide else None)

    def peek(self, key_id: int) -> bytes | None:
        """Return the count value."""
        return self._look(key_id, use=False) or (self._wide.get(key_id) if self._wide else None)

    def put(self, key_id: int, value: bytes) -> int:
        """Add or replace a count. Returns 0 when the value does not fit and nothing is held; 1 when it is stored; 2
        when it is stored and `PackedStore.displaced` names the entry that had to leave."""
        if len(value) != _VALUE.size:
            raise ValueError("a count value has 16 bytes")
        version, count = _VALUE.unpack(value)
        table = self._table_for(version, count)
        self._drop_but(key_id, table)
        if table < 0:
            return 0
        counter, age = version & _COUNTER_MASK, self._version_epoch - (version >> 48) if version else 0
        field = counter | age << SHORT_COUNTER_BITS
        if not table:
            field = count | counter << FIELD_BITS | age << 2 * FIELD_BITS
        ways = self._store.ways[table]
        key = self.number << ID_BITS | key_id & _ID_MASK
        hashed = _mixed(key)
        ways.begin()
        block, start = ways.at(ways.place_of(hashed))
        keys = _KEYS.unpack_from(block, start)
        if key in keys:
            ways.to_front(block, start, keys.index(key), key, field)
            return 1
        for _ in range(_SPLITS_PER_ENTRY):
            if ways.buckets >= ways.limit or (ways.entries < _ROOMY_ENTRIES * ways.buckets and not keys[-1]):
                break
            ways.split()
            block, start = ways.at(ways.place_of(hashed))
            keys = _KEYS.unpack_from(block, start)
        last, left = keys[-1], ways.value(block, start, WAYS - 1)
        ways.to_front(block, start, WAYS - 1, key, field)
        self.live += 1
        if not last:
            ways.entries += 1
            return 1
        holder = self._store.holder(last >> ID_BITS)
        if holder is None:
            return 1
        holder.live -= 1
        self._store.displaced = (holder.number, last & _ID_MASK, holder.version_in(left, table))
        return 2

    def drop(self, key_id: int) -> bool:
        """Drop the entry. Returns whether there was one."""
        return self._drop_but(key_id, -1)

    def close(self) -> None:
        """Drop all entries in constant time. The holder keeps nothing from now on."""
        if self.number:
            self._store.retire(self.number, empty=not self.live)
            self.number = self.live = 0

    def scan(self, place: int, most_buckets: int) -> tuple[list[int], int]:
        """Return ids (without shard) in this many buckets from ``place`` on, and the next place: -1 when there are no
        more. Entries that come or go between calls may be seen twice or not at all."""
        found: list[int] = []
        first, second = self._store.ways
        end = first.buckets + second.buckets
        while most_buckets and self.live and place < end:
            ways, at = (first, place) if place < first.buckets else (second, place - first.buckets)
            keys = _KEYS.unpack_from(*ways.at(at))
            found += [key & _ID_MASK for key in keys if key >> ID_BITS == self.number]
            place += 1
            most_buckets -= 1
        return found, place if self.live and place < end else -1

    def version_in(self, field: int, table: int) -> int:
        if table:
            counter, age = field & _SHORT_MASK, field >> SHORT_COUNTER_BITS
        else:
            counter, age = field >> FIELD_BITS & _FIELD_MASK, field >> 2 * FIELD_BITS
        return self._version_epoch - age << 48 | counter if counter else 0

    def _table_for(self, version: int, count: int) -> int:
        """Return 0 for a value with a count, 1 for one without, -1 for one that does not fit."""
        counter, age = version & _COUNTER_MASK, self._version_epoch - (version >> 48) if version else 0
        if self.number and 0 <= age < AGES and (counter or not version):
            if not count and counter <= _SHORT_MASK and self._store.ways[1].limit:
                return 1
            if count <= _FIELD_MASK and counter <= _FIELD_MASK and self._store.ways[0].limit:
                return 0
        return -1

    def _look(self, key_id: int, *, use: bool) -> bytes | None:
        if self.number:
            key = self.number << ID_BITS | key_id & _ID_MASK
            hashed = _mixed(key)
            for table, ways in enumerate(self._store.ways):
                if ways.entries:
                    block, start = ways.at(ways.place_of(hashed))
                    keys = _KEYS.unpack_from(block, start)
                    if key in keys:
                        way = keys.index(key)
                        field = ways.value(block, start, way)
                        if use and way:
                            ways.to_front(block, start, way, key, field)
                        return _VALUE.pack(self.version_in(field, table), 0 if table else field & _FIELD_MASK)
        return None

    def _drop_but(self, key_id: int, kept: int) -> bool:
        found = False
        if self.number:
            key = self.number << ID_BITS | key_id & _ID_MASK
            hashed = _mixed(key)
            for table, ways in enumerate(self._store.ways):
                if table != kept and ways.entries:
                    block, start = ways.at(ways.place_of(hashed))
                    keys = _KEYS.unpack_from(block, start)
                    if key in keys:
                        ways.take_out(block, start, keys.index(key))
                        self.live -= 1
                        found = True
        return found
