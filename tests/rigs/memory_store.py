"""A database in a dictionary: `ReadStore` and `WriteStore` with gates and faults at every step.

Shard rows are locked as in the real store (shared by a transaction until it ends, exclusively by a takeover) because
fencing rests on it. Other rows are not: the lanes of one leader and the fence between two keep writers apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

from tao.model.changes import sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block
from tao.model.errors import OperatorError, TaoError
from tao.model.graph import ABSENT, Edge, ListKey, deleted_data, encode_count, encode_object
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import CountQuery, FillRead, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ListRow, RowChanges, ShardRow, WriteKeys

Hook = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    return


class MemoryStore(ReadStore):
    """The stored rows.

    ``before_…`` hooks are awaited at that step. ``commit_fault`` fails the next commit, which happens nevertheless when
    ``commit_happens``.
    """

    def __init__(self, shards: int, server_of: Callable[[int], str] = lambda _: "db") -> None:
        self.rows = ExistingRows()
        self.shards = {shard: ShardRow(shard, server_of(shard), 1, "", 0) for shard in range(shards)}
        self.server_of = server_of
        self.before_lock: Hook = _nothing
        self.before_commit: Hook = _nothing
        self.before_read: Hook = _nothing
        self.after_read: Hook = _nothing
        self.commit_fault: BaseException | None = None
        self.commit_happens = True
        self.lock_faults: list[TaoError] = []
        self.take_faults: list[TaoError] = []
        self.read_faults: list[Exception] = []
        self.intent_faults: list[TaoError] = []
        self.ownership_faults: dict[str, TaoError] = {}
        self.unreadable: set[int] = set()
        """Shards whose row cannot be read."""
        self.ownership_reads: list[list[int]] = []
        self.takeovers: list[list[int]] = []
        """The shards of each transaction that took, or tried to take, ownership."""
        self.reads: list[tuple[list[Query], bool]] = []
        self.transactions: list[list[int]] = []
        self.commits = 0
        self.heartbeats: list[tuple[int, str, int]] = []
        self.waits_for_replica = False
        self._share_locked: dict[int, int] = dict.fromkeys(range(shards), 0)
        self._unlocked = asyncio.Condition()

    # WriteStore

    def transaction(self, server: str, *, timeout_seconds: float) -> MemoryTransaction:
        return MemoryTransaction(self)

    async def take_ownership(self, shards: Sequence[int], owner: str, *, timeout_seconds: float) -> dict[int, ShardRow]:
        self.takeovers.append(list(shards))
        if self.take_faults:
            raise self.take_faults.pop(0)
        async with self._unlocked:
            if len(shards) == 1:
                await self._unlocked.wait_for(lambda: not self._share_locked[shards[0]])
            free = [shard for shard in shards if not self._share_locked[shard]]
            rows = {shard: self.shards[shard].taken_by(owner) for shard in free}
            self.shards.update(rows)
        return rows

    async def read_ownership(self, shards: Sequence[int], *, timeout_seconds: float) -> dict[int, ShardRow]:
        self.ownership_reads.append(list(shards))
        for shard in shards:
            if fault := self.ownership_faults.get(self.server_of(shard)):
                raise fault
            if shard in self.unreadable:
                raise OperatorError(f"the schema of shard {shard} is missing")
        return {shard: self.shards[shard] for shard in shards}

    async def write_heartbeat(self, shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        if fault := self.ownership_faults.get(self.server_of(shard)):
            raise fault
        self.heartbeats.append((shard, writer, unix_ms))
        return self.waits_for_replica

    async def old_intents(self, shards: Sequence[int], *, before_unix_ms: int, limit: int) -> list[IntentRow]:
        found = [row for row in self.rows.intents.values() if row.low_id >> SHARD_SHIFT in shards]
        return [row for row in found if row.created_unix_ms < before_unix_ms][:limit]

    async def lock(self, shards: Sequence[int]) -> None:
        async with self._unlocked:
            for shard in shards:
                self._share_locked[shard] += 1

    async def unlock(self, shards: Sequence[int]) -> None:
        async with self._unlocked:
            for shard in shards:
                self._share_locked[shard] -= 1
            self._unlocked.notify_all()

    # ReadStore, IntentReads

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        self.reads.append((list(queries), critical))
        await self.before_read()
        if self.read_faults:
            raise self.read_faults.pop(0)
        values = [self.value(query) for query in queries]
        shards = {(each.id if isinstance(each, ObjectQuery) else each.id1) >> SHARD_SHIFT for each in queries}
        epochs = {shard: self.shards[shard].version_epoch for shard in shards}
        await self.after_read()
        on_read(range(len(queries)), FillRead(values, epochs))

    async def read_intents(self, shard: int, far_shard: int, *, limit: int, timeout_seconds: float) -> list[IntentRow]:
        if self.intent_faults:
            raise self.intent_faults.pop(0)
        ends = shard, far_shard
        return [
            row for row in self.rows.intents.values() if (row.low_id >> SHARD_SHIFT, row.high_id >> SHARD_SHIFT) == ends
        ][:limit]

    def value(self, query: Query) -> bytes:
        """Return the answer of a query now."""
        if isinstance(query, ObjectQuery):
            row = self.rows.objects.get(query.id)
            if row is None or row.deleted:
                return encode_object(row.version if row else 0, ABSENT, deleted_data(row.otype) if row else b"")
            return encode_object(row.version, row.otype, row.data)
        listed = self.rows.lists.get(ListKey(query.id1, query.atype), ListRow(0, 0))
        edges = self.edges(query.id1, query.atype)
        match query:
            case CountQuery():
                return encode_count(listed.version, listed.count)
            case RangeQuery(pos=pos, limit=limit):
                part = edges[pos : pos + limit]
                flags = PREFIX | (COMPLETE if len(part) == listed.count else 0) if pos == 0 else 0
                return encode_block(listed.version, listed.count, part, flags)
            case TimeRangeQuery(high=high, low=low, limit=limit, below_id2=below, pos=pos):
                first = (high, below - 1) if below else (high, MAX_ID)
                part = [edge for edge in edges if first >= (edge.time, edge.id2) >= (low, 0)][pos : pos + limit]
            case _:
                part = [edge for edge in edges if edge.id2 in query.id2s and query.high >= edge.time >= query.low]
        return encode_block(listed.version, listed.count, part, 0)

    def edges(self, id1: int, atype: int) -> list[Edge]:
        """Return the whole list as stored, newest first."""
        found = [edge for key, edge in self.rows.edges.items() if (key.id1, key.atype) == (id1, atype)]
        return sort_edges(found)


class MemoryTransaction:
    """A `tao.model.ports.Transaction` in memory."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._locked: list[int] = []
        self._changes = RowChanges()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._store.unlock(self._locked)

    async def lock_and_read(self, shards: Sequence[int], keys: WriteKeys) -> tuple[dict[int, ShardRow], ExistingRows]:
        store = self._store
        await store.before_lock()
        store.transactions.append(list(shards))
        if store.lock_faults:
            raise store.lock_faults.pop(0)
        await store.lock(shards)
        self._locked = list(shards)
        rows = store.rows
        lists = keys.lists | keys.recounts | {ListKey(key.id1, key.atype) for key in keys.edges}
        existing = ExistingRows(
            {key: rows.objects[key] for key in keys.objects if key in rows.objects},
            {key: rows.lists[key] for key in lists if key in rows.lists},
            {key: rows.edges[key] for key in keys.edges if key in rows.edges},
            {key: rows.intents[key] for key in keys.intents if key in rows.intents},
            {key: ListRow(len(edges), 0) for key in keys.recounts if (edges := store.edges(key.id1, key.atype))},
            {shard: rows.reserved_times[shard] for shard in keys.reserved_times if shard in rows.reserved_times},
        )
        return {shard: store.shards[shard] for shard in shards if shard in store.shards}, existing

    async def apply(self, rows: RowChanges) -> None:
        self._changes = rows

    async def commit(self) -> str:
        store = self._store
        await store.before_commit()
        fault, store.commit_fault = store.commit_fault, None
        if fault is None or store.commit_happens:
            _write(store.rows, self._changes)
        if fault is not None:
            raise fault
        store.commits += 1
        return f"0-1-{store.commits}"


def _write(rows: ExistingRows, changes: RowChanges) -> None:
    rows.objects.update({row.id: row for row in changes.put_objects})
    rows.lists.update(changes.put_lists)
    rows.edges.update(changes.put_edges)
    for edge in changes.delete_edges:
        rows.edges.pop(edge, None)
    for intent in changes.delete_intents:
        rows.intents.pop(intent, None)
    rows.intents.update({IntentKey(row.low_id, row.high_id): row for row in changes.put_intents})
    rows.reserved_times.update(changes.put_reserved_times)
