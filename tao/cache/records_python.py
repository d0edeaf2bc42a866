"""What a cache remembers beside its entries: in which order they came (`RecordQueue`) and which left (`Ghosts`,
`DepartedVersions`). `tao.cache.records_core` is the compiled twin, and `tao.cache.records` chooses between them.

All of it is plain integers in arrays. Nothing is ever copied or visited as a whole, and the garbage collector has
nothing to visit. A fill takes seven calls here, each of which computes with integers of 64 bits and more; compiled,
they take a tenth of the time.
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import Final

CHUNK_RECORDS: Final = 512  # the times of so many differ by little, and 8 KB are soon free
_CHUNK_ITEMS: Final = 2 * CHUNK_RECORDS
_UNIT_BYTES: Final = 256
_CLOCK_MASK: Final = (1 << 32) - 1
_HASH_MASK: Final = (1 << 64) - 1
_LEAST_SLOTS: Final = 251
_MOST_SLOTS: Final = 1_048_573
_BYTES_PER_SLOT: Final = 1024
RETURN_PARTS: Final = (8, 4, 2, 1)


class RecordQueue:
    """A first-in, first-out queue of (table number, key) pairs, with the time at which each chunk of them was begun."""

    __slots__ = ("_at", "_chunks", "_head", "_tail", "_times", "began", "length")

    def __init__(self) -> None:
        self._chunks: deque[array[int]] = deque()
        self._times: deque[float] = deque()
        self.length = 0
        """Return the number of records in the queue."""
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._head = self._tail = array("Q")
        self._at = 0
        self.began = now
        """Return the time at which the oldest records were appended, the first of some hundreds."""

    def append(self, number: int, key: int, now: float) -> None:
        """Append a record."""
        if not self.length:
            self._begin(now)
        tail = self._tail
        if len(tail) >= _CHUNK_ITEMS:
            tail = self._tail = array("Q")
            self._chunks.append(tail)
            self._times.append(now)
        tail.append(number)
        tail.append(key)
        self.length += 1

    def pop(self) -> tuple[int, int]:
        """Remove and return the oldest record. Raises `IndexError` when there is none."""
        if not self.length:
            raise IndexError("no record in the queue")
        at = self._at
        if at == len(self._head):
            self._head, self.began = self._chunks.popleft(), self._times.popleft()
            at = 0
        self._at = at + 2
        self.length -= 1
        return self._head[at], self._head[at + 1]


class Ghosts:
    """Keys whose entries left an arena, and how many bytes had been evicted when they came back. Direct-mapped, so a
    new key replaces the previous one in its slot, and of fixed size: 8 bytes for every kilobyte of the budget."""

    __slots__ = ("_budget_bytes", "_gone_bytes", "_slots", "returns")

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        slots = min(_MOST_SLOTS, max(_LEAST_SLOTS, budget_bytes // _BYTES_PER_SLOT | 1))
        self._slots = array("Q", bytes(8 * slots))
        self._gone_bytes = 0
        self.returns = [0] * len(RETURN_PARTS)
        """Return the number of keys that came back before an eighth, a quarter, a half and all of the budget had been
        evicted since they left: what an arena larger by that much would have held."""

    def leaves(self, key: int, atype: int, size_bytes: int) -> None:
        """Note that the entry is evicted."""
        self._gone_bytes += size_bytes
        hashed = _hash_of(key, atype)
        clock = self._gone_bytes // _UNIT_BYTES & _CLOCK_MASK
        self._slots[(hashed >> 32) % len(self._slots)] = (hashed & _CLOCK_MASK) << 32 | clock

    def returned(self, key: int, atype: int) -> bool:
        """Note that the key enters. Returns whether it had left so recently that twice the budget would have held
        it."""
        hashed = _hash_of(key, atype)
        slot = (hashed >> 32) % len(self._slots)
        held = self._slots[slot]
        if held >> 32 != hashed & _CLOCK_MASK or not held:
            return False
        self._slots[slot] = 0
        gone = ((self._gone_bytes // _UNIT_BYTES - held) & _CLOCK_MASK) * _UNIT_BYTES
        for place, part in enumerate(RETURN_PARTS):
            if gone * part <= self._budget_bytes:
                self.returns[place] += 1
                return True
        return False


def _hash_of(key: int, atype: int) -> int:
    mixed = (key ^ atype * 0x9E3779B97F4A7C15) & _HASH_MASK
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _HASH_MASK
    return mixed ^ mixed >> 32


class DepartedVersions:
    """Versions of entries that left the cache, direct-mapped: a new entry replaces the previous one in its slot."""

    __slots__ = ("_atypes", "_ids", "_slots", "_versions")

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self.clear()

    def clear(self) -> None:
        """Forget all versions."""
        self._ids = array("Q", bytes(8 * self._slots))
        self._atypes = array("Q", bytes(8 * self._slots))
        self._versions = array("Q", bytes(8 * self._slots))

    def record(self, key_id: int, atype: int, version: int) -> None:
        """Remember the version of an entry; a lower one than is remembered of it changes nothing."""
        slot = (key_id << 32 | atype) % self._slots
        if self._ids[slot] != key_id or self._atypes[slot] != atype:
            self._ids[slot] = key_id
            self._atypes[slot] = atype
            self._versions[slot] = version
        elif self._versions[slot] < version:
            self._versions[slot] = version

    def get(self, key_id: int, atype: int) -> int:
        """Return the version that the entry had, 0 when it is not remembered."""
        slot = (key_id << 32 | atype) % self._slots
        return self._versions[slot] if self._ids[slot] == key_id and self._atypes[slot] == atype else 0
