"""Which writes may share the next transaction: the queue in front of group commit (DESIGN.md §3).

A few *lanes* per database server work side by side, each with one open transaction. A key is in at most one of them,
and of two writes that share a key the earlier goes first (or both go in one batch, in order).

Each key has its own queue of waiting tickets. A ticket counts the keys at which another stands before it (``behind``)
and, once there are none, the keys that an open batch holds (``held``); at zero it is ready. Taking a ticket or
finishing a batch touches the counts of those next in line and nobody else, so the cost of a write depends on its own
keys, not on how many wait: also when thousands wait for one key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from tao.model.errors import InternalError, Overloaded

_WAITING: Final = 0  # batch numbers start at 1
_WITHDRAWN: Final = -1
_SMALL_HEAP: Final = 64  # below this many entries, dead ones are not worth a sweep

_AHEAD: Final = 1 << 62  # more than ever arrive


class _Entry:
    """A write, waiting or in the open batch ``batch``. ``listed``: it is in its server's heap of ready entries."""

    __slots__ = ("batch", "behind", "data_bytes", "held", "keys", "listed", "rank", "shards", "sub_write", "ticket")

    def __init__(
        self,
        ticket: int,
        order: int,
        keys: frozenset[Hashable],
        shards: frozenset[int],
        sub_write: bool,
        data_bytes: int,
    ) -> None:
        self.ticket = ticket
        # Sub-writes go first: a writer at another leader holds its pair until they are done, while callers who wait
        # longer for their turn hold nothing.
        self.rank = order - _AHEAD if sub_write else order
        self.keys = keys
        self.shards = shards
        self.sub_write = sub_write
        self.data_bytes = data_bytes
        self.batch = _WAITING
        self.behind = 0
        self.held = 0
        self.listed = False

    def is_ready(self) -> bool:
        return not (self.batch or self.behind or self.held)

    def __lt__(self, other: _Entry) -> bool:
        return self.rank < other.rank


class _Key:
    """``holder``: the open batch that has the key, or `_WAITING`."""

    __slots__ = ("holder", "queue")

    def __init__(self) -> None:
        self.holder = _WAITING
        self.queue: OrderedDict[int, _Entry] = OrderedDict()

    def head(self) -> _Entry | None:
        return next(iter(self.queue.values()), None)


class _Server:
    """``ready`` is a heap by order of arrival; an entry that is ready no longer stays in it until it is met."""

    __slots__ = ("keys", "open", "ready", "waiting")

    def __init__(self) -> None:
        self.keys: dict[Hashable, _Key] = {}
        self.open: dict[int, list[_Entry]] = {}
        self.ready: list[_Entry] = []
        self.waiting = 0

    def arrive_at_front(self, entry: _Entry) -> None:
        """No other waits before the entry at any of its keys."""
        entry.held = sum(self.keys[name].holder != _WAITING for name in entry.keys)
        if not entry.held:
            self.list_ready(entry)

    def list_ready(self, entry: _Entry) -> None:
        if not entry.listed:
            entry.listed = True
            heappush(self.ready, entry)

    def pop_first(self, joining: list[_Entry]) -> _Entry | None:
        """The earliest of the ready entries and of those that can only join the batch being made."""
        ready = self.ready
        while ready and not ready[0].is_ready():
            heappop(ready).listed = False
        if joining and not (ready and ready[0].rank < joining[0].rank):
            return heappop(joining)
        if not ready:
            return None
        entry = heappop(ready)
        entry.listed = False
        return entry

    def leave_queue(self, name: Hashable, entry: _Entry) -> _Entry | None:
        """Take the entry out of the key's queue; returns the one that has no key left at which it is not the first,
        if this made it so."""
        key = self.keys[name]
        was_head = key.head() is entry
        del key.queue[entry.ticket]
        successor = key.head()
        if successor is None:
            if key.holder == _WAITING:
                del self.keys[name]
            return None
        if not was_head:
            return None
        successor.behind -= 1
        return None if successor.behind else successor

    def free_keys(self, number: int, entries: Sequence[_Entry]) -> None:
        """The batch has ended: those next in line at its keys may go when nothing else holds them up."""
        for entry in entries:
            for name in entry.keys:
                key = self.keys.get(name)
                if key is None or key.holder != number:
                    continue
                key.holder = _WAITING
                head = key.head()
                if head is None:
                    del self.keys[name]
                elif not head.behind:
                    head.held -= 1
                    if not head.held:
                        self.list_ready(head)

    def sweep(self) -> None:
        """Drop dead entries once they are most of the heap, so that writes withdrawn while every lane is busy do not
        pile up in it."""
        if len(self.ready) <= _SMALL_HEAP + 2 * self.waiting:
            return
        for entry in self.ready:
            entry.listed = entry.is_ready()
        self.ready = [entry for entry in self.ready if entry.listed]
        heapify(self.ready)


class LaneScheduler:
    """Tickets stand for writes; the caller keeps what they mean.

    ``lanes_per_server``: transactions open at a time on one server. ``max_batch_writes``: writes in one of them, of
    which the last may go beyond ``max_batch_bytes`` of data.
    ``max_waiting_per_shard``: waiting writes that touch one shard, and as many sub-writes beside them: they come from
    leaders in the middle of a write, who would wait for each other if callers' writes could fill their space. What
    `requeue` puts back may exceed the bound by the writes of the open batches.
    """

    __slots__ = (
        "_entries",
        "_lanes",
        "_last_batch",
        "_last_order",
        "_max_batch",
        "_max_bytes",
        "_max_waiting",
        "_servers",
        "_shards",
    )

    def __init__(
        self, lanes_per_server: int, max_batch_writes: int, max_waiting_per_shard: int, max_batch_bytes: int = 4 << 20
    ) -> None:
        self._lanes = lanes_per_server
        self._max_batch = max_batch_writes
        self._max_bytes = max_batch_bytes
        self._max_waiting = max_waiting_per_shard
        self._servers: dict[str, _Server] = {}
        self._entries: dict[int, tuple[_Server, _Entry]] = {}
        self._shards: dict[tuple[int, bool], int] = {}
        self._last_order = 0
        self._last_batch = _WAITING

    def offer(
        self,
        ticket: int,
        server: str,
        keys: frozenset[Hashable],
        shards: frozenset[int],
        sub_write: bool,
        data_bytes: int = 0,
    ) -> None:
        """Let the write wait for its turn. Raises `Overloaded`, with nothing changed, when as many writes as may
        already wait for one of its shards; `InternalError` when the ticket is in use."""
        if ticket in self._entries:
            raise InternalError(f"ticket {ticket} is in use")
        for shard in shards:
            if self._shards.get((shard, sub_write), 0) >= self._max_waiting:
                raise Overloaded(f"{self._max_waiting} writes wait for shard {shard}; try again later")
        self._last_order += 1
        entry = _Entry(ticket, self._last_order, keys, shards, sub_write, data_bytes)
        state = self._servers.get(server)
        if state is None:
            state = self._servers[server] = _Server()
        self._entries[ticket] = (state, entry)
        self._count(state, entry, 1)
        for name in keys:
            key = state.keys.get(name)
            if key is None:
                key = state.keys[name] = _Key()
            elif key.queue:
                entry.behind += 1
            key.queue[ticket] = entry
        if not entry.behind:
            state.arrive_at_front(entry)

    def next_batch(self, server: str) -> list[int] | None:
        """Tickets for one transaction, sub-writes first, else in order of arrival; None when every lane is busy or
        nobody is ready."""
        state = self._servers.get(server)
        if state is None or len(state.open) >= self._lanes:
            return None
        number = self._last_batch + 1
        batch: list[_Entry] = []
        # Those who can go only because this batch has their keys: the next in line behind its writes.
        joining: list[_Entry] = []
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
        return [entry.ticket for entry in batch]

    def finished(self, batch: Sequence[int]) -> None:
        """The transaction has ended and its tickets are done with. ``batch`` as `next_batch` returned it."""
        _, entries = self._close(batch)
        for entry in entries:
            del self._entries[entry.ticket]

    def requeue(self, batch: Sequence[int], without_shard: int | None) -> list[int]:
        """The transaction was rolled back: its writes wait again, before all that share a key with them.

        Those that touch ``without_shard`` are not put back but returned, and forgotten here: their caller fails them
        or offers them again later (behind what came meanwhile)."""
        state, entries = self._close(batch)
        removed: list[int] = []
        for entry in reversed(entries):
            entry.batch = _WAITING
            if without_shard is not None and without_shard in entry.shards:
                del self._entries[entry.ticket]
                removed.append(entry.ticket)
            else:
                self._put_first(state, entry)
        removed.reverse()
        return removed

    def withdraw(self, ticket: int) -> bool:
        """Take a waiting write away. False when it does not wait: it is in an open batch, or unknown."""
        found = self._entries.get(ticket)
        if found is None or found[1].batch != _WAITING:
            return False
        state, entry = found
        del self._entries[ticket]
        self._count(state, entry, -1)
        entry.batch = _WITHDRAWN
        for name in entry.keys:
            successor = state.leave_queue(name, entry)
            if successor is not None:
                state.arrive_at_front(successor)
        state.sweep()
        return True

    def waiting(self, server: str) -> int:
        """How many writes wait for a lane of the server."""
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

    def _take(self, state: _Server, entry: _Entry, number: int, joining: list[_Entry]) -> None:
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
                heappush(joining, successor)

    def _close(self, batch: Sequence[int]) -> tuple[_Server, list[_Entry]]:
        found = self._entries.get(batch[0]) if batch else None
        if found is not None:
            state, first = found
            entries = state.open.get(first.batch)
            if entries is not None and [entry.ticket for entry in entries] == list(batch):
                del state.open[first.batch]
                state.free_keys(first.batch, entries)
                return state, entries
        raise InternalError(f"tickets {list(batch)} are not an open batch")

    def _put_first(self, state: _Server, entry: _Entry) -> None:
        self._count(state, entry, 1)
        entry.behind = entry.held = 0
        for name in entry.keys:
            key = state.keys.get(name)
            if key is None:
                key = state.keys[name] = _Key()
            head = key.head()
            if head is not None:
                head.behind += 1
            key.queue[entry.ticket] = entry
            key.queue.move_to_end(entry.ticket, last=False)
        state.list_ready(entry)
