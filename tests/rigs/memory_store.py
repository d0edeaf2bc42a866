"""A database in a dictionary: `ReadStore` and `WriteStore` with gates and faults at every step.

Shard rows are locked as in the real store (shared by a transaction until it ends, exclusively by a takeover) because
fencing rests on it. Other rows are not: the lanes of one leader and the fence between two keep writers apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType
from typing import Self

from tao.model.changes import sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block
from tao.model.edge_states import NO_OPERATION, EdgeRegisters
from tao.model.errors import OperatorError, TaoError
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey, deleted_data, encode_count, encode_object
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.jobs import JobCount, JobQuery, JobRow, PausedKind
from tao.model.ports import OnRead, ReadStore, StoredState
from tao.model.queries import (
    CountQuery,
    FillRead,
    ObjectQuery,
    PairPage,
    PairsQuery,
    Query,
    RangeQuery,
    TimeRangeQuery,
)
from tao.model.rows import (
    EdgePage,
    ExistingRows,
    IntentKey,
    IntentRow,
    ListRow,
    OldestEdges,
    RowChanges,
    ShardRow,
    StateRows,
    WriteKeys,
)
from tests.rigs.job_rows import count_jobs, select_jobs
from tests.rigs.pair_pages import page_of_rows

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
        self.changed_unix_s: dict[EdgeKey, int] = {}
        """Edge → the time at which its registers were written, in seconds since 1970."""
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

    async def read_jobs(self, shards: Sequence[int], query: JobQuery, *, timeout_seconds: float) -> list[JobRow]:
        return select_jobs(self.rows.jobs.values(), shards, query, self.rows.paused_jobs.__contains__)

    async def count_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[JobCount]:
        return count_jobs(self.rows.jobs.values(), shards)

    async def paused_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[PausedKind]:
        return sorted(key for key in self.rows.paused_jobs if key.shard in shards)

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

    async def read_pairs(self, query: PairsQuery, *, deadline: float) -> PairPage:
        await self.before_read()
        versions = {key: row.version for key, row in self.rows.lists.items()}
        page = page_of_rows(self.shards[query.shard].version_epoch, query, versions, self.rows.edges)
        await self.after_read()
        return page

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


class MemoryScans:
    """A `tao.model.ports.ShardScans` of a store in memory."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def scan_object_types(self, shard: int, after_id: int, limit: int) -> list[tuple[int, int]]:
        rows = sorted(self._store.rows.objects.values(), key=lambda row: row.id)
        here = [row for row in rows if row.id >> SHARD_SHIFT == shard and row.id > after_id]
        return [(row.id, ABSENT if row.deleted else row.otype) for row in here][:limit]

    async def scan_edges(self, shard: int, table: str, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, Edge]]:
        edges = self._store.rows.edges
        return [(key, edges[key]) for key in sorted(edges) if key.id1 >> SHARD_SHIFT == shard and key > after][:limit]

    async def scan_states(self, shard: int, after: EdgeKey, limit: int) -> list[StoredState]:
        registers, changed = self._store.rows.registers, self._store.changed_unix_s
        keys = [key for key in sorted(registers) if key.id1 >> SHARD_SHIFT == shard and key > after]
        return [StoredState(key, registers[key], changed.get(key, 0)) for key in keys][:limit]


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
        rows, edges = store.rows, keys.rows_of_edges()
        existing = ExistingRows(
            {key: rows.objects[key] for key in keys.objects if key in rows.objects},
            {key: rows.lists[key] for key in keys.lists | keys.recounts if key in rows.lists},
            {key: rows.edges[key] for key in edges if key in rows.edges},
            {key: rows.intents[key] for key in keys.intents if key in rows.intents},
            {key: ListRow(len(all_), 0) for key in keys.recounts if (all_ := store.edges(key.id1, key.atype))},
            {shard: rows.reserved_times[shard] for shard in keys.reserved_times if shard in rows.reserved_times},
            registers={key: rows.registers[key] for key in edges if key in rows.registers},
            nodes={key: rows.nodes[key] for key in keys.nodes if key in rows.nodes},
            jobs={key: rows.jobs[key] for key in keys.jobs if key in rows.jobs},
            paused_jobs=keys.paused_jobs & rows.paused_jobs,
        )
        return {shard: store.shards[shard] for shard in shards if shard in store.shards}, existing

    async def lock_oldest(self, lists: Mapping[ListKey, int]) -> dict[ListKey, OldestEdges]:
        edges = {key: tuple(reversed(self._store.edges(key.id1, key.atype))) for key in lists}
        return {key: OldestEdges(edges[key][:limit], len(edges[key]) < limit) for key, limit in lists.items()}

    async def lock_lists(self, lists: AbstractSet[ListKey]) -> dict[ListKey, ListRow]:
        rows = self._store.rows.lists
        return {key: rows[key] for key in lists if key in rows}

    async def lock_page(self, page: EdgePage) -> StateRows:
        rows = self._store.rows
        return page_in(page, rows.edges, rows.registers)

    async def apply(self, rows: RowChanges) -> None:
        self._changes = rows

    async def commit(self) -> str:
        store = self._store
        await store.before_commit()
        fault, store.commit_fault = store.commit_fault, None
        if fault is None or store.commit_happens:
            _write(store.rows, self._changes)
            store.changed_unix_s.update(dict.fromkeys(self._changes.put_registers, self._changes.changed_unix_s))
        if fault is not None:
            raise fault
        store.commits += 1
        return f"0-1-{store.commits}"


def page_in(page: EdgePage, edges: dict[EdgeKey, Edge], registers: dict[EdgeKey, EdgeRegisters]) -> StateRows:
    """Return the rows of a page, as a database does."""
    found: list[EdgeKey] = []
    for atype in page.atypes:
        of_list = [key for key in edges if (key.id1, key.atype) == (page.id1, atype) and key.id2 > page.after]
        found += sorted(of_list)[: page.limit]
    return StateRows({key: edges[key] for key in found}, {key: registers.get(key, NO_OPERATION) for key in found})


def _write(rows: ExistingRows, changes: RowChanges) -> None:
    rows.objects.update({row.id: row for row in changes.put_objects})
    rows.lists.update(changes.put_lists)
    rows.edges.update(changes.put_edges)
    rows.registers.update(changes.put_registers)
    rows.nodes.update(changes.put_nodes)
    for edge in changes.delete_edges:
        rows.edges.pop(edge, None)
        rows.registers.pop(edge, None)
    for intent in changes.delete_intents:
        rows.intents.pop(intent, None)
    rows.intents.update({IntentKey(row.low_id, row.high_id): row for row in changes.put_intents})
    rows.reserved_times.update(changes.put_reserved_times)
    rows.jobs.update(changes.put_jobs)
    for job_id in changes.delete_jobs:
        rows.jobs.pop(job_id, None)
    for kind, paused in changes.put_paused_jobs.items():
        (rows.paused_jobs.add if paused else rows.paused_jobs.discard)(kind)
