"""Choose the writes that share the next transaction: the queue in front of group commit.

A few *lanes* per database server work side by side, each with one open transaction. At most one lane holds a key at a
time. Of two writes that share a key, the one of lower rank goes first, or both go in one batch, in order. Writes of
one kind rank by arrival. A sub-write ranks before other writes that wait: a writer at another leader waits for it, and
its time is short. Behind the thousands of writes that wait for a popular list, it would run out, and the inverse edge
would be left pending. But only a bounded number of the server's sub-writes overtake a write, so that sub-writes that
alone fill the rate of a list do not keep it waiting for ever. Ranks are fixed at arrival and order all writes of a
server, so no two writes can each wait for the other at different keys.

Each key has its own queue of waiting writes. A write counts the keys at which another write is queued before it
(``behind``) and, once there are none, the keys that an open batch holds (``held``). When both counts are zero, the
write is ready. Taking a write or finishing a batch updates only the counts of the writes next in line. So the cost
of a write depends on its own keys and not on the length of the queue, even when thousands of writes wait for one
key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

import msgspec

from tao.model.errors import InternalError, Overloaded

_WAITING: Final = 0  # batch numbers start at 1
_WITHDRAWN: Final = -1
_SMALL_HEAP: Final = 64  # below this many entries, a sweep costs more than it frees


class _Entry(msgspec.Struct, eq=False):
    """A write that waits or belongs to the open batch ``batch``.

    ``listed``: the entry is in its server's heap of ready entries."""

    sequence_number: int
    rank: tuple[int, int]
    keys: frozenset[Hashable]
    shards: frozenset[int]
    sub_write: bool
    data_bytes: int
    batch: int = _WAITING
    behind: int = 0
    held: int = 0
    listed: bool = False

    def is_ready(self) -> bool:
        return not (self.batch or self.behind or self.held)


_Ranked = tuple[tuple[int, int], _Entry]
"""An entry in a heap. No two have the same rank, so a heap compares numbers and never entries."""


def _earlier(one: _Entry, other: _Entry) -> _Entry:
    return one if one.rank < other.rank else other


class _Key(msgspec.Struct, eq=False):
    """The writes that wait for one key: a queue of the sub-writes and one of the others, each in the order of rank.

    ``holder``: the number of the open batch that has the key, or `_WAITING`. ``only``: the one write that waits, while
    there has been no other: most keys never have two, and to make a queue takes longer than all else about a key.
    ``is_queued``: there has been another, so that a queue exists."""

    only: _Entry | None
    holder: int = _WAITING
    is_queued: bool = False
    sub_writes: OrderedDict[int, _Entry] | None = None
    others: OrderedDict[int, _Entry] | None = None

    def head(self) -> _Entry | None:
        if self.only is not None:
            return self.only
        if not self.sub_writes:
            return next(iter(self.others.values())) if self.others else None
        sub_write = next(iter(self.sub_writes.values()))
        return _earlier(sub_write, next(iter(self.others.values()))) if self.others else sub_write

    def append(self, entry: _Entry) -> None:
        """Queue the entry behind those of its kind, which rank before it."""
        if self.only is None and not self.others and not self.sub_writes:
            self.only = entry
            return
        self._count_behind(entry)
        self._queue_of(entry)[entry.sequence_number] = entry

    def put_first(self, entry: _Entry) -> None:
        """Queue the entry before those of its kind, which rank behind it."""
        self._count_behind(entry)
        queue = self._queue_of(entry)
        queue[entry.sequence_number] = entry
        queue.move_to_end(entry.sequence_number, last=False)

    def remove(self, entry: _Entry) -> None:
        del self._queue_of(entry)[entry.sequence_number]

    def _count_behind(self, entry: _Entry) -> None:
        """Count whichever is behind the other now: the new entry, or the head that it overtakes."""
        head = self.head()
        if head is not None:
            later = entry if _earlier(entry, head) is head else head
            later.behind += 1

    def _queue_of(self, entry: _Entry) -> OrderedDict[int, _Entry]:
        self.is_queued = True
        only, self.only = self.only, None
        if only is not None:
            self._queue_of(only)[only.sequence_number] = only
        if entry.sub_write:
            if self.sub_writes is None:
                self.sub_writes = OrderedDict()
            return self.sub_writes
        if self.others is None:
            self.others = OrderedDict()
        return self.others


class _Server:
    """The queues and open batches of one database server.

    ``ready`` is a heap ordered by rank. An entry that is no longer ready stays in it until it reaches the top.
    ``sub_writes``: how many sub-writes have arrived."""

    __slots__ = ("keys", "open", "ready", "sub_writes", "waiting")

    def __init__(self) -> None:
        self.keys: dict[Hashable, _Key] = {}
        self.open: dict[int, list[_Entry]] = {}
        self.ready: list[_Ranked] = []
        self.sub_writes = 0
        self.waiting = 0

    def arrive_at_front(self, entry: _Entry) -> None:
        """Count the held keys of an entry that is now first in the queues of all its keys."""
        entry.held = sum(self.keys[name].holder != _WAITING for name in entry.keys)
        if not entry.held:
            self.list_ready(entry)

    def list_ready(self, entry: _Entry) -> None:
        if not entry.listed:
            entry.listed = True
            heappush(self.ready, (entry.rank, entry))

    def pop_first(self, joining: list[_Ranked]) -> _Entry | None:
        """Return the earliest of the ready entries and of ``joining``, the entries that can only join this batch."""
        ready = self.ready
        while ready and not ready[0][1].is_ready():
            heappop(ready)[1].listed = False
        if joining and not (ready and ready[0] < joining[0]):
            return heappop(joining)[1]
        if not ready:
            return None
        entry = heappop(ready)[1]
        entry.listed = False
        return entry

    def leave_queue(self, name: Hashable, entry: _Entry) -> _Entry | None:
        """Remove the entry from the key's queue.

        Returns the new head when this removal made it the first in the queues of all its keys."""
        key = self.keys[name]
        if key.only is entry:
            key.only = None
            if key.holder == _WAITING:
                del self.keys[name]
            return None
        was_head = key.head() is entry
        key.remove(entry)
        successor = key.head()
        if successor is None:  # mostly: few keys have more than one write
            if key.holder == _WAITING:
                del self.keys[name]
            return None
        if not was_head:
            return None
        successor.behind -= 1
        return None if successor.behind else successor

    def free_keys(self, number: int, entries: Sequence[_Entry]) -> None:
        """Release the keys of a finished batch, and list the next entries that nothing else blocks as ready."""
        for entry in entries:
            for name in entry.keys:
                key = self.keys.get(name)
                if key is None or key.holder != number:
                    continue
                key.holder = _WAITING
                head = key.head() if key.is_queued else key.only
                if head is None:
                    del self.keys[name]
                elif not head.behind:
                    head.held -= 1
                    if not head.held:
                        self.list_ready(head)

    def sweep(self) -> None:
        """Drop entries that are no longer ready once they fill most of the heap.

        Otherwise writes that are withdrawn while every lane is busy would accumulate in it."""
        if len(self.ready) <= _SMALL_HEAP + 2 * self.waiting:
            return
        for _, entry in self.ready:
            entry.listed = entry.is_ready()
        self.ready = [ranked for ranked in self.ready if ranked[1].listed]
        heapify(self.ready)


class LaneScheduler:
    """Queues writes by sequence number; the caller keeps what each number stands for.

    ``lanes_per_server``: open transactions per database server. ``max_batch_writes``: writes in one transaction.
    ``max_batch_bytes``: bytes of data in one transaction, which only its last write may exceed.
    ``max_waiting_per_shard``: waiting writes that change one shard, and as many sub-writes besides. Sub-writes have
    room of their own because they come from leaders in the middle of a write, which would wait for each other if
    callers' writes could fill that room. Writes that `requeue` puts back may exceed the bound by the size of the
    open batches.
    ``max_overtaking``: sub-writes of the server that arrive after another write and still go before it. That is more
    than a popular list has waiting (they should go before all of these), and a few seconds' worth on a busy server."""

    __slots__ = (
        "_entries",
        "_lanes",
        "_last_batch",
        "_last_order",
        "_max_batch",
        "_max_bytes",
        "_max_overtaking",
        "_max_waiting",
        "_servers",
        "_shards",
    )

    def __init__(
        self,
        lanes_per_server: int,
        max_batch_writes: int,
        max_waiting_per_shard: int,
        max_batch_bytes: int = 4 << 20,
        max_overtaking: int = 10_000,
    ) -> None:
        self._lanes = lanes_per_server
        self._max_batch = max_batch_writes
        self._max_bytes = max_batch_bytes
        self._max_waiting = max_waiting_per_shard
        self._max_overtaking = max_overtaking
        self._servers: dict[str, _Server] = {}
        self._entries: dict[int, tuple[_Server, _Entry]] = {}
        self._shards: dict[tuple[int, bool], int] = {}
        self._last_order = 0
        self._last_batch = _WAITING

    def offer(
        self,
        sequence_number: int,
        server: str,
        keys: frozenset[Hashable],
        shards: frozenset[int],
        sub_write: bool,
        data_bytes: int = 0,
    ) -> None:
        """Queue a write.

        Raises `Overloaded`, with nothing changed, when one of its shards has the maximum of waiting writes, and
        `InternalError` when the sequence number is in use."""
        if sequence_number in self._entries:
            raise InternalError(f"sequence number {sequence_number} is in use")
        for shard in shards:
            if self._shards.get((shard, sub_write), 0) >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} writes wait for shard {shard}; try again later")
        state = self._servers.get(server)
        if state is None:
            state = self._servers[server] = _Server()
        self._last_order += 1
        # The turn of another write is that of the sub-write which arrives as the first that may not overtake it.
        turn = state.sub_writes + (0 if sub_write else self._max_overtaking)
        state.sub_writes += sub_write
        entry = _Entry(sequence_number, (turn, self._last_order), keys, shards, sub_write, data_bytes)
        self._entries[sequence_number] = (state, entry)
        self._count(state, entry, 1)
        held = 0
        for name in keys:
            key = state.keys.get(name)
            if key is None:
                state.keys[name] = _Key(entry)
                continue
            if key.holder != _WAITING:
                held += 1
            key.append(entry)
        if not entry.behind:
            entry.held = held
            if not held:
                state.list_ready(entry)

    def next_batch(self, server: str) -> list[int] | None:
        """Return the sequence numbers of one transaction, in the order of rank.

        Returns None when every lane is busy or no write is ready."""
        state = self._servers.get(server)
        if state is None or len(state.open) >= self._lanes:
            return None
        number = self._last_batch + 1
        batch: list[_Entry] = []
        # Entries that can go only because this batch holds their keys: the next in line behind its writes.
        joining: list[_Ranked] = []
        data_bytes = 0
        while len(batch) < self._max_batch and data_bytes < self._max_bytes:
            entry = state.pop_first(joining)
            if entry is None:
                break
            batch.append(entry)
            data_bytes += entry.data_bytes
            self._take(state, entry, number, joining)
        if not batch:
            return None
        self._last_batch = number
        state.open[number] = batch
        return [entry.sequence_number for entry in batch]

    def finish(self, batch: Sequence[int]) -> None:
        """Forget the writes of a transaction that has ended. ``batch`` is what `next_batch` returned."""
        _, entries = self._close(batch)
        for entry in entries:
            del self._entries[entry.sequence_number]

    def requeue(self, batch: Sequence[int], without_shard: int | None) -> list[int]:
        """Queue the writes of a rolled back transaction again, before all others of their kind that share a key with
        them.

        Writes that change ``without_shard`` are forgotten and returned instead. The caller fails them, or offers
        them again later, behind the writes that arrived meanwhile."""
        state, entries = self._close(batch)
        removed: list[int] = []
        for entry in reversed(entries):
            entry.batch = _WAITING
            if without_shard is not None and without_shard in entry.shards:
                del self._entries[entry.sequence_number]
                removed.append(entry.sequence_number)
            else:
                self._put_first(state, entry)
        removed.reverse()
        return removed

    def withdraw(self, sequence_number: int) -> bool:
        """Remove a waiting write. Returns False when it does not wait: it is in an open batch, or unknown."""
        found = self._entries.get(sequence_number)
        if found is None or found[1].batch != _WAITING:
            return False
        state, entry = found
        del self._entries[sequence_number]
        self._count(state, entry, -1)
        entry.batch = _WITHDRAWN
        for name in entry.keys:
            successor = state.leave_queue(name, entry)
            if successor is not None:
                state.arrive_at_front(successor)
        state.sweep()
        return True

    def waiting_writes(self, server: str) -> int:
        """Return the number of writes that wait for a lane of the server."""
        state = self._servers.get(server)
        return 0 if state is None else state.waiting

    def _count(self, state: _Server, entry: _Entry, step: int) -> None:
        state.waiting += step
        for shard in entry.shards:
            place = (shard, entry.sub_write)
            count = self._shards.get(place, 0) + step
            if count:
                self._shards[place] = count
            else:
                del self._shards[place]

    def _take(self, state: _Server, entry: _Entry, number: int, joining: list[_Ranked]) -> None:
        entry.batch = number
        self._count(state, entry, -1)
        for name in entry.keys:
            state.keys[name].holder = number
            successor = state.leave_queue(name, entry)
            if successor is None:
                continue
            holders = [state.keys[each].holder for each in successor.keys]
            successor.held = len(holders) - holders.count(_WAITING)
            if successor.held == holders.count(number):
                heappush(joining, (successor.rank, successor))

    def _close(self, batch: Sequence[int]) -> tuple[_Server, list[_Entry]]:
        found = self._entries.get(batch[0]) if batch else None
        if found is not None:
            state, first = found
            entries = state.open.get(first.batch)
            if entries is not None and [entry.sequence_number for entry in entries] == list(batch):
                del state.open[first.batch]
                state.free_keys(first.batch, entries)
                return state, entries
        raise InternalError(f"sequence numbers {list(batch)} are not an open batch")

    def _put_first(self, state: _Server, entry: _Entry) -> None:
        self._count(state, entry, 1)
        entry.behind = entry.held = 0
        for name in entry.keys:
            key = state.keys.get(name)
            if key is None:
                key = state.keys[name] = _Key(None)
            key.put_first(entry)
        if not entry.behind:
            state.list_ready(entry)
