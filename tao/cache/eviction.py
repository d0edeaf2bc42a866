"""Eviction from a full arena: S3-FIFO, in which an entry pays for its stay by its size.

New entries stand in a small queue, a tenth of the entries. The eviction hand takes the oldest entry of that queue or of
the main queue. A use adds to an entry's credit. An entry that can pay its price goes to the end of the main queue,
whichever queue it was in; an entry that cannot is evicted. The price is the entry's size divided by the mean size: a
hit on a small entry is worth as much as one on a large entry, and keeping it costs a fraction of the memory. A client
that walks once through everything passes through a tenth of the arena and leaves the rest alone. A ghost of an entry
that left recently leads straight to the main queue when the key comes back, and counts what a larger arena would have
held.

What an arena remembers beside its entries are plain integers in arrays: the order in which the entries came
(`RecordQueue`), and which keys left recently (`Ghosts`). Nothing there is ever copied or visited as a whole, and the
garbage collector has nothing to visit.

A use adds to one byte, in the compiled module that answers hits; no Python object is held for an entry. Hit rates by
policy and size of the cache are on the page about eviction in docs/explanation.

Invariant: an entry's key is in a table exactly as long as one record of it is in a queue. Dropping a value leaves an
empty value in its place, which the hand removes when it passes; so records never pile up.
"""

from __future__ import annotations

from array import array
from collections import deque
from math import ceil
from typing import Final, Protocol

from tao.cache.packed import PackedStore

_CHUNK_ITEMS: Final = 1_024  # pairs of 512 records: their times differ by little, and 8 KB are soon free
_UNIT_BYTES: Final = 256
_CLOCK_MASK: Final = (1 << 32) - 1
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
        self._begin(0.0)

    def _begin(self, now: float) -> None:
        self._head = self._tail = array("Q")
        self._at = 0
        self.began = now
        """Return the time at which the oldest records were appended, the first of some hundreds."""

    def append(self, number: int, key: int, now: float) -> None:
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

    __slots__ = ("_budget_bytes", "_slots", "gone_bytes", "returns")

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        slots = min(_MOST_SLOTS, max(_LEAST_SLOTS, budget_bytes // _BYTES_PER_SLOT | 1))
        self._slots = array("Q", bytes(8 * slots))
        self.gone_bytes = 0
        self.returns = [0] * len(RETURN_PARTS)
        """Return the number of keys that came back before an eighth, a quarter, a half and all of the budget had been
        evicted since they left: what an arena larger by that much would have held."""

    def leaves(self, key: int, atype: int, size_bytes: int) -> None:
        """Note that the entry is evicted."""
        self.gone_bytes += size_bytes
        hashed = hash((key, atype))
        clock = self.gone_bytes // _UNIT_BYTES & _CLOCK_MASK
        self._slots[(hashed >> 32) % len(self._slots)] = (hashed & _CLOCK_MASK) << 32 | clock

    def returned(self, key: int, atype: int) -> bool:
        """Note that the key enters. Returns whether it had left so recently that twice the budget would have held
        it."""
        hashed = hash((key, atype))
        slot = (hashed >> 32) % len(self._slots)
        held = self._slots[slot]
        if held >> 32 != hashed & _CLOCK_MASK or not held:
            return False
        self._slots[slot] = 0
        gone = ((self.gone_bytes // _UNIT_BYTES - held) & _CLOCK_MASK) * _UNIT_BYTES
        for place, part in enumerate(RETURN_PARTS):
            if gone * part <= self._budget_bytes:
                self.returns[place] += 1
                return True
        return False


_WAYS: Final = 8  # entries in a bucket of packed counts
_SMALL_PART: Final = 10
USE_CREDIT: Final = 2
"""Credit that a use adds. An entry of half the mean size, or less, stays twice for it."""
MOST_CREDIT: Final = 30
"""Credit at which a use adds nothing more. Fifteen uses are enough for an entry of any size to stay once more, and a
key that is no longer read uses them up soon. The compiled `tao.cache.answers_core` has the same two numbers."""


class Moment:
    """The time of the current operation in seconds, on the clock of the callers that pass time in."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0


class EvictableTable(Protocol):
    """The table operations that the eviction hand needs."""

    number: int
    atype: int

    def size_of(self, key: int) -> int:
        """Return the bytes of the entry; 0 when its value has been dropped."""
        ...

    def evict(self, key: int) -> None:
        """Remove the key and its value, if any, and account for it."""
        ...

    def free_some(self, limit: int) -> int:
        """Free up to ``limit`` entries of a retired table. Returns how many."""
        ...

    def __len__(self) -> int: ...


class PackedTable(Protocol):
    """A table of packed counts, which leave the arena when newer ones take their place in a bucket."""

    def displaced(self, key_id: int, version: int) -> None:
        """Note that an entry of this table was replaced in its bucket by a newer one."""


class Arena:
    """A byte budget, the tables that share it, and the order in which their entries leave."""

    __slots__ = (
        "_credit",
        "_dead_records",
        "_main",
        "_max_reinsertions",
        "_moment",
        "_next_number",
        "_retired",
        "_small",
        "_tables",
        "budget_bytes",
        "bytes",
        "count_tables",
        "eviction_age_seconds",
        "evictions",
        "ghosts",
        "kept",
        "largest_entry_bytes",
        "name",
        "packed",
    )

    def __init__(
        self,
        name: str,
        budget_bytes: int,
        largest_entry_bytes: int,
        credit: bytearray,
        max_reinsertions: int,
        packed: PackedStore,
        moment: Moment,
    ) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.largest_entry_bytes = largest_entry_bytes
        self.bytes = 0
        self.evictions = 0
        self.kept = 0
        """Return the number of entries that could pay and went to the end of the main queue."""
        self.eviction_age_seconds: float | None = None
        """Return an upper bound of the seconds since the last use of the entry last evicted from the main queue; None
        when none was evicted."""
        self.ghosts = Ghosts(budget_bytes)
        self.packed = packed
        self.count_tables: dict[int, PackedTable] = {}
        self._credit = credit
        self._max_reinsertions = max_reinsertions
        self._moment = moment
        self._small = RecordQueue()
        self._main = RecordQueue()
        self._tables: dict[int, EvictableTable] = {}
        self._retired: deque[EvictableTable] = deque()
        self._dead_records = 0
        self._next_number = 1

    @property
    def records(self) -> int:
        """Return the length of the queues: entries, empty values, and records of retired tables that the hand has not
        passed."""
        return self._small.length + self._main.length

    def register(self, table: EvictableTable) -> None:
        """Give the table its number, under which its records stand in the queue."""
        table.number = self._next_number
        self._next_number += 1
        self._tables[table.number] = table

    def retire(self, table: EvictableTable) -> None:
        """Retire a table that nothing reads any more. Time: O(1); its memory is freed in steps, its records when
        passed."""
        del self._tables[table.number]
        if len(table):
            self._dead_records += len(table)
            self._retired.append(table)

    def admit(self, table: EvictableTable, key: int) -> None:
        """Record a new key of the table."""
        queue = self._main if self.ghosts.returned(key, table.atype) else self._small
        queue.append(table.number, key, self._moment.now)

    def make_room(self) -> None:
        """Evict until the budget is kept: first the entries of retired tables, then the ones that the hand finds."""
        while self.bytes > self.budget_bytes:
            if self._retired:
                self._free_retired(1)
            elif not self._evict_one():
                return

    def reclaim(self, limit: int) -> bool:
        """Free up to ``limit`` retired entries, or let the hand pass that many records when too many of them are dead.
        Returns whether more is left to do."""
        bytes_before = self.packed.size_bytes
        unswept = self.packed.sweep(max(1, limit // _WAYS))
        self.bytes += self.packed.size_bytes - bytes_before
        if self._retired:
            self._free_retired(limit)
        elif 4 * self._dead_records > self.records:
            self._pass_records(limit)
        return unswept or bool(self._retired) or 4 * self._dead_records > self.records

    def _evict_one(self) -> bool:
        credit, reinsertions_left, main = self._credit, self._max_reinsertions, self._main
        taken_bytes = max(1, self.bytes - self.packed.size_bytes)
        while records := self.records:
            from_small = self._small.length * _SMALL_PART > records or not main.length
            queue = self._small if from_small else main
            number, key = queue.pop()
            table = self._tables.get(number)
            if table is None:
                self._dead_records -= 1
                continue
            size_bytes = table.size_of(key)
            if size_bytes and reinsertions_left:
                place = (key + table.atype) % len(credit)
                price = max(1, min(MOST_CREDIT, ceil(USE_CREDIT * size_bytes * records / taken_bytes)))
                if credit[place] >= price:
                    credit[place] -= price
                    reinsertions_left -= 1
                    self.kept += 1
                    main.append(number, key, self._moment.now)
                    continue
            table.evict(key)
            if size_bytes:
                self.evictions += 1
                self.ghosts.leaves(key, table.atype, size_bytes)
                if not from_small:
                    self.eviction_age_seconds = max(0.0, self._moment.now - main.began)
            return True
        return False

    def _free_retired(self, limit: int) -> None:
        while limit > 0 and self._retired:
            limit -= self._retired[0].free_some(limit)
            if not len(self._retired[0]):
                self._retired.popleft()

    def _pass_records(self, limit: int) -> None:
        # One full turn leaves the order of the live entries as it was.
        part = limit * self._small.length // max(1, self.records) + 1
        for queue, passed in ((self._small, part), (self._main, limit)):
            for _ in range(min(passed, queue.length)):
                number, key = queue.pop()
                if number in self._tables:
                    queue.append(number, key, self._moment.now)
                else:
                    self._dead_records -= 1
