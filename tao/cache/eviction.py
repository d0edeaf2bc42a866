"""Eviction from a full arena: S3-FIFO, in which an entry pays for its stay by its size.

New entries stand in a small queue, a tenth of the entries. The eviction hand takes the oldest entry of that queue or of
the main queue. A use adds to an entry's credit. An entry that can pay its price goes to the end of the main queue,
whichever queue it was in; an entry that cannot is evicted. The price is the entry's size divided by the mean size: a
hit on a small entry is worth as much as one on a large entry, and keeping it costs a fraction of the memory. A client
that walks once through everything passes through a tenth of the arena and leaves the rest alone. A ghost of an entry
that left recently leads straight to the main queue when the key comes back, and counts what a larger arena would have
held.

The order in which the entries came (`RecordQueue`), and which keys left recently (`Ghosts`), are in
`tao.cache.records`.

A use adds to one byte, in the compiled module that answers hits; no Python object is held for an entry. Hit rates by
policy and size of the cache are on the page about eviction in docs/explanation.

Invariant: an entry's key is in a table exactly as long as one record of it is in a queue. Dropping a value leaves an
empty value in its place, which the hand removes when it passes; so records never pile up.
"""

from __future__ import annotations

from collections import deque
from math import ceil
from typing import Final, Protocol

from tao.cache.packed import PackedStore
from tao.cache.records import Ghosts, RecordQueue

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
