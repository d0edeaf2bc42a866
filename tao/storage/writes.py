# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""`WriteStore` over the master databases: transactions, ownership of shards, intents.

A transaction is two round trips: lock and read, then apply and commit. An error before COMMIT rolls
everything back, so it is known that nothing was written. A connection lost after COMMIT was sent leaves the outcome
unknown. The caller checks who may write (owner, generation, master) against the `ShardRow` that the transaction holds
locked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Final, Self

from tao.model.errors import InternalError, MasterReadOnly, OutcomeUnknown, ShardBlocked, TaoError, Unavailable
from tao.model.graph import ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobCount, JobQuery, JobRow, PausedKind
from tao.model.rows import (
    EdgePage,
    ExistingRows,
    IntentRow,
    ListRow,
    OldestEdges,
    RowChanges,
    ShardRow,
    StateRows,
    WriteKeys,
)
from tao.storage.dialect import SEMI_SYNC_STATUS, SessionSetup, semi_sync_state
from tao.storage.disk_space import DiskSpace
from tao.storage.failures import ConnectionLost
from tao.storage.names import EdgeTables, schema_name
from tao.storage.pools import Pool, Pools
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession
from tao.storage.write_statements import (
    LOCKED_COLUMNS,
    StatementText,
    count_jobs,
    intent_row,
    job_row,
    lock_oldest_edges,
    lock_page_rows,
    lock_rows,
    lock_shards_for_takeover,
    locked_rows,
    oldest_edges,
    page_rows,
    read_jobs,
    read_paused_jobs,
    read_shards,
    shard_row,
    write_owners,
    write_rows,
)

WRITE_SETUP: Final = SessionSetup(writes=True)

_UNION: Final = " UNION ALL "


LOCK_WAIT_MILLISECONDS: Final = 300
"""Time limit for locking the shard rows and the touched rows. The commit lane waits meanwhile. Legitimate holders
(other lanes, a takeover) take a few milliseconds."""
_PARTS_PER_MILLISECOND: Final = 2
"""Parts of a locking statement for which it has a millisecond more: the server plans and reads each by itself, in 0.15
ms (MariaDB) or 0.25 to 0.8 (MySQL) on a busy machine. A transaction of 192 writes may have a thousand."""
PROBE_MILLISECONDS: Final = 20
"""Time limit per shard, to find the shard that blocks after a lock was not acquired. Free locks take well under a
millisecond."""
SHARDS_PER_STATEMENT: Final = 64
"""Most shards that a statement reads ownership or intents of. Each shard is a table of its own: the server opens them
all before the first row, and a statement over a thousand takes long enough to delay the transactions beside it."""
ROLLBACK_SECONDS: Final = 1.0
"""A rollback that takes longer is left to the server, by closing the connection."""


class MySqlTransaction:
    """See `tao.model.ports.Transaction`. Made by `MySqlWriteStore.transaction`. Entering it raises `DatabaseFull` while
    the server waits for room on its disk."""

    def __init__(self, pool: Pool, edge_tables: EdgeTables, *, timeout_seconds: float) -> None:
        self._pool = pool
        self._edge_tables = edge_tables
        self._timeout_seconds = timeout_seconds
        self._deadline = 0.0
        self._session: DatabaseSession | None = None
        self._loan: AbstractAsyncContextManager[DatabaseSession] | None = None
        self._is_open = False  # begun, and neither committed nor rolled back
        self._unsent = StatementText()  # sent along with COMMIT

    async def __aenter__(self) -> Self:
        self._deadline = asyncio.get_running_loop().time() + self._timeout_seconds
        await self._borrow(fresh=False)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception) or error is None:
                await self._roll_back()
            elif self._session is not None:
                self._session.quit()  # cancelled: no waiting, the server rolls back
        finally:
            await self._give_back(error)

    async def lock_and_read(self, shards: Sequence[int], keys: WriteKeys) -> tuple[dict[int, ShardRow], ExistingRows]:
        """See the port. Also raises `Unavailable`, `Overloaded` and `DeadlineExceeded`: nothing was written."""
        try:
            try:
                return await self._lock(shards, keys)
            except ConnectionLost as error:
                # A pooled connection died while it was idle. Nothing had begun that could be lost.
                await self._give_back(error)
                await self._borrow(fresh=True)
                return await self._lock(shards, keys)
        except ShardBlocked as error:
            await self._roll_back()
            blocked = await self._find_blocked(
                shards, lambda shard: lock_rows([shard], _keys_of(shard, keys), self._edge_tables)
            )
            raise ShardBlocked(error.message, blocked) from error

    async def lock_oldest(self, lists: Mapping[ListKey, int]) -> dict[ListKey, OldestEdges]:
        """See the port."""
        rows = await self._lock_more(
            lock_oldest_edges(lists, self._edge_tables),
            sorted({key.id1 >> SHARD_SHIFT for key in lists}),
            lambda shard: lock_oldest_edges(_lists_of(shard, lists), self._edge_tables),
        )
        return oldest_edges(rows, lists)

    async def lock_lists(self, lists: AbstractSet[ListKey]) -> dict[ListKey, ListRow]:
        """See the port."""
        keys = WriteKeys(lists=set(lists))
        rows = await self._lock_more(
            lock_rows((), keys, self._edge_tables),
            sorted({key.id1 >> SHARD_SHIFT for key in lists}),
            lambda shard: lock_rows((), _keys_of(shard, keys), self._edge_tables),
        )
        return locked_rows(rows)[1].lists

    async def lock_page(self, page: EdgePage) -> StateRows:
        """See the port."""
        text = lock_page_rows(page, self._edge_tables)
        return page_rows(await self._lock_more(text, [page.id1 >> SHARD_SHIFT], lambda _: text))

    async def _lock_more(
        self, text: StatementText, shards: Sequence[int], locks_of: Callable[[int], StatementText]
    ) -> list[Row]:
        session = self._opened()
        sql = _locking(session, text)
        try:
            with self._pool.space.locking():
                (rows,) = await session.run(sql, text.values, deadline=self._deadline)
        except ShardBlocked as error:
            await self._roll_back()
            raise ShardBlocked(error.message, await self._find_blocked(shards, locks_of)) from error
        except TaoError:
            await self._roll_back()
            raise
        return rows

    async def apply(self, rows: RowChanges) -> None:
        """See the port. Nothing is committed when it raises. `commit` sends the last packet, usually the only one,
        because a round trip costs three wake-ups, a third of all the work for a small transaction."""
        session = self._opened()
        try:
            for packet in write_rows(rows, self._edge_tables, session.dialect):
                unsent, self._unsent = self._unsent, packet
                if unsent.parts:
                    with self._pool.space.writing(session):
                        await session.run("; ".join(unsent.parts), unsent.values, deadline=self._deadline)
        except TaoError:
            await self._roll_back()
            raise

    async def commit(self) -> str:
        """Return the GTID; empty when there is none, and when nothing was changed.

        Raises what `apply` does for what is refused of the rows: nothing is committed then. `OutcomeUnknown` for
        nearly any other failure: whatever the server says in COMMIT, it may have logged before. `MasterReadOnly` is
        said before anything is logged, and rolled back. `ConnectionLost`: before COMMIT was sent."""
        session = self._opened()
        unsent, self._unsent = self._unsent, StatementText()
        done: list[list[Row]] = []
        try:
            sql = "; ".join([*unsent.parts, "COMMIT"])
            with self._pool.space.writing(session):
                await session.run(sql, unsent.values, deadline=self._deadline, results=done)
            self._is_open = False
            return session.committed_gtid
        except MasterReadOnly:
            session.quit()
            raise
        except TaoError as error:
            # A refused statement ends its packet: the statements after it did not run.
            if session.is_open and len(done) < len(unsent.parts):
                await self._roll_back()
                raise
            session.quit()
            raise OutcomeUnknown(f"in COMMIT: {error.message}") from error
        except BaseException:
            session.quit()
            raise

    async def _lock(self, shards: Sequence[int], keys: WriteKeys) -> tuple[dict[int, ShardRow], ExistingRows]:
        if self._session is None or self._is_open:
            raise InternalError("a transaction locks once, and first")
        self._is_open = True
        text = lock_rows(shards, keys, self._edge_tables)
        if not text.parts:
            return locked_rows(())
        # The session does not commit by itself, so this statement begins the transaction.
        sql = _locking(self._session, text)
        with self._pool.space.locking():
            (rows,) = await self._session.run(sql, text.values, deadline=self._deadline, columns=LOCKED_COLUMNS)
        return locked_rows(rows)

    async def _find_blocked(self, shards: Sequence[int], locks_of: Callable[[int], StatementText]) -> int:
        """Return the first shard whose locks are not free now, or -1 when all are."""
        if len(shards) == 1:
            return shards[0]
        for shard in sorted(shards):
            session = self._session
            if session is None or not session.is_open:
                return -1
            text = locks_of(shard)
            self._is_open = True
            try:
                sql = session.dialect.locking(_UNION.join(text.parts), PROBE_MILLISECONDS)
                await session.run(sql, text.values, deadline=self._deadline)
            except ShardBlocked:
                return shard
            except TaoError:
                return -1  # the search is best effort: report the first error
            finally:
                await self._roll_back()
        return -1

    async def _borrow(self, *, fresh: bool) -> None:
        self._pool.space.check()
        loan = self._pool.session(deadline=self._deadline, fresh=fresh)
        self._session = await loan.__aenter__()
        self._loan = loan

    async def _give_back(self, error: BaseException | None) -> None:
        """Return the session. ``error``: the exception that ended its use. The pool receives it only when it has cost
        the connection. After any other error the server is known to answer, and the connection can be reused."""
        loan, self._loan = self._loan, None
        session, self._session = self._session, None
        self._is_open = False
        if loan is not None and session is not None:
            await loan.__aexit__(None, None if session.is_open else error, None)

    def _opened(self) -> DatabaseSession:
        if self._session is None or not self._is_open:
            raise InternalError("the transaction is not open: lock_and_read comes first, and once")
        if not self._session.is_open:
            raise ConnectionLost("the connection was lost before COMMIT: nothing was written")
        return self._session

    async def _roll_back(self) -> None:
        """Release the locks before the error is reported, so that a second attempt does not wait for the first."""
        if not self._is_open or self._session is None:
            return
        self._is_open = False
        if not self._session.is_open:
            return
        try:
            deadline = asyncio.get_running_loop().time() + ROLLBACK_SECONDS
            await self._session.run("ROLLBACK", deadline=deadline)
        except TaoError:
            self._session.quit()  # the server rolls back what a closed connection had open


class MySqlWriteStore:
    """See `tao.model.ports.WriteStore`."""

    def __init__(
        self,
        master_of: Callable[[int], str],
        pools: Pools,
        edge_tables: EdgeTables,
    ) -> None:
        """``master_of``: shard → name of the server that is its master; ``pools`` are those of the leader's account,
        set up with `WRITE_SETUP`."""
        self._master_of = master_of
        self._pools = pools
        self._edge_tables = edge_tables

    def server_of(self, shard: int) -> str:
        """Name of the shard's master server."""
        return self._master_of(shard)

    def transaction(self, server: str, *, timeout_seconds: float) -> MySqlTransaction:
        """A transaction on that server; ``timeout_seconds`` bounds it as a whole."""
        return MySqlTransaction(self._pools.of(server), self._edge_tables, timeout_seconds=timeout_seconds)

    async def take_ownership(self, shards: Sequence[int], owner: str, *, timeout_seconds: float) -> dict[int, ShardRow]:
        """See the port. Raises `ShardBlocked` for a single shard, `MasterReadOnly` for one that moves, `Unavailable`,
        `OutcomeUnknown` (the caller asks again: the generation rises once more, which harms nobody)."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        servers = {self._master_of(shard) for shard in shards}
        if len(servers) > 1:
            raise Unavailable(f"shards {min(shards)} to {max(shards)} are on {len(servers)} database servers now")
        server = servers.pop()
        pool = self._pools.of(server)
        pool.space.check()

        async def take(session: DatabaseSession) -> dict[int, ShardRow]:
            found = await self._lock_for_takeover(pool.space, session, shards, deadline)
            taken = {row.shard: row.taken_by(owner) for row in found if row.master_server == server}
            if len(shards) == 1 and not taken:
                await session.run("ROLLBACK", deadline=deadline)
                raise _not_to_be_taken(server, shards[0], found)
            await self._write_owners(pool.space, session, taken.values(), deadline)
            return taken

        try:
            async with pool.session(deadline=deadline) as session:
                return await take(session)
        except ConnectionLost:
            # A pooled connection that died while it was idle: before COMMIT nothing was written.
            async with pool.session(deadline=deadline, fresh=True) as session:
                return await take(session)

    async def _lock_for_takeover(
        self, space: DiskSpace, session: DatabaseSession, shards: Sequence[int], deadline: float
    ) -> list[ShardRow]:
        locks = lock_shards_for_takeover(shards)
        sql = _locking(session, locks)
        try:
            with space.locking():
                (rows,) = await session.run(sql, locks.values, deadline=deadline)
        except ShardBlocked as error:
            raise ShardBlocked(error.message, shards[0] if len(shards) == 1 else -1) from error
        return list(map(shard_row, rows))

    async def _write_owners(
        self, space: DiskSpace, session: DatabaseSession, taken: Iterable[ShardRow], deadline: float
    ) -> None:
        text = write_owners(taken)
        done: list[list[Row]] = []
        try:
            with space.writing(session):
                sql = "; ".join([*text.parts, "COMMIT"])
                await session.run(sql, text.values, deadline=deadline, results=done)
        except TaoError as error:
            # A refused statement ends its packet: COMMIT did not run.
            is_refused = session.is_open and len(done) < len(text.parts)
            session.quit()
            if isinstance(error, MasterReadOnly) or is_refused:
                raise
            raise OutcomeUnknown(f"in COMMIT: {error.message}") from error

    async def read_ownership(self, shards: Sequence[int], *, timeout_seconds: float) -> dict[int, ShardRow]:
        """The shard rows, asked in statements of at most `SHARDS_PER_STATEMENT` shards of one server."""
        found: dict[int, ShardRow] = {}
        for server, some in self._chunks(shards):
            rows = await self._read(server, read_shards(some), timeout_seconds)
            found.update((row.shard, row) for row in map(shard_row, rows))
        return found

    async def write_heartbeat(self, shard: int, writer: str, unix_ms: int, *, timeout_seconds: float) -> bool:
        """See the port. Raises `MasterReadOnly`, `Unavailable`, `DeadlineExceeded`. The row may have been written
        all the same: it says nothing false then."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        pool = self._pools.of(self._master_of(shard))
        pool.space.check()
        async with pool.session(deadline=deadline) as session:
            upsert = session.dialect.upsert(f"{schema_name(shard)}.heartbeat", ("writer",), ("written_unix_ms",), 1)
            sql = f"{SEMI_SYNC_STATUS}; {upsert}; COMMIT"
            with pool.space.writing(session):
                figures, *_ = await session.run(sql, [writer.encode(), unix_ms], deadline=deadline)
            return semi_sync_state(session.dialect, figures).waits

    async def old_intents(
        self,
        shards: Sequence[int],
        *,
        before_unix_ms: int,
        limit: int,
        timeout_seconds: float = 5.0,
    ) -> list[IntentRow]:
        """See the port; the oldest first. Asked in statements of at most `SHARDS_PER_STATEMENT` shards of one
        server."""
        found: list[IntentRow] = []
        for server, some in self._chunks(shards):
            text = StatementText()
            for shard in some:
                text.add(
                    f"(SELECT low_id, high_id, atypes, token, created_unix_ms FROM {schema_name(shard)}.inverse_intents"
                    " WHERE created_unix_ms < %s ORDER BY created_unix_ms LIMIT %s)",
                    before_unix_ms,
                    limit,
                )
            found.extend(map(intent_row, await self._read(server, text, timeout_seconds)))
        return sorted(found, key=lambda intent: intent.created_unix_ms)[:limit]

    async def read_jobs(self, shards: Sequence[int], query: JobQuery, *, timeout_seconds: float) -> list[JobRow]:
        """See the port."""
        found: list[JobRow] = []
        for server, some in self._chunks(shards):
            for job_id, columns in await self._read(server, read_jobs(some, query), timeout_seconds):
                found.append(job_row(job_id, columns))
        return found

    async def count_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[JobCount]:
        """See the port."""
        found: list[JobCount] = []
        for server, some in self._chunks(shards):
            for state, is_leased, is_failing, jobs in await self._read(server, count_jobs(some), timeout_seconds):
                found.append(JobCount(state, bool(is_leased), bool(is_failing), jobs))
        return found

    async def paused_jobs(self, shards: Sequence[int], *, timeout_seconds: float) -> list[PausedKind]:
        """See the port."""
        found: list[PausedKind] = []
        for server, some in self._chunks(shards):
            for shard, kind in await self._read(server, read_paused_jobs(some), timeout_seconds):
                found.append(PausedKind(int(shard), kind.decode()))
        return found

    async def _read(self, server: str, text: StatementText, timeout_seconds: float) -> list[Row]:
        """One UNION; committed at once, so that the pooled session keeps no snapshot."""
        deadline = asyncio.get_running_loop().time() + timeout_seconds
        sql = f"{_UNION.join(text.parts)}; COMMIT"
        pool = self._pools.of(server)
        try:
            async with pool.session(deadline=deadline) as session:
                return (await session.run(sql, text.values, deadline=deadline))[0]
        except ConnectionLost:
            async with pool.session(deadline=deadline, fresh=True) as session:
                return (await session.run(sql, text.values, deadline=deadline))[0]

    def _chunks(self, shards: Sequence[int]) -> Iterator[tuple[str, list[int]]]:
        """Yield the shards by their servers, a bounded number at a time."""
        grouped: dict[str, list[int]] = {}
        for shard in sorted(set(shards)):
            grouped.setdefault(self._master_of(shard), []).append(shard)
        for server, of_server in grouped.items():
            for start in range(0, len(of_server), SHARDS_PER_STATEMENT):
                yield server, of_server[start : start + SHARDS_PER_STATEMENT]


def _not_to_be_taken(server: str, shard: int, found: Sequence[ShardRow]) -> TaoError:
    """Return why a shard whose row was locked cannot be taken at a server."""
    if not found:
        return InternalError(f"table {schema_name(shard)}.shard is empty: its migrations have not run to their end")
    return MasterReadOnly(
        f"shard {shard} takes no writes at {server}: its row there names {found[0].master_server or 'no server'} as "
        "master. It moves to another database, or its master has just been replaced; try again"
    )


def _locking(session: DatabaseSession, text: StatementText) -> str:
    """Return the UNION of locking parts, under its time limit."""
    milliseconds = LOCK_WAIT_MILLISECONDS + len(text.parts) // _PARTS_PER_MILLISECOND
    return session.dialect.locking(_UNION.join(text.parts), milliseconds)


def _keys_of(shard: int, keys: WriteKeys) -> WriteKeys:
    return WriteKeys(
        {object_id for object_id in keys.objects if object_id >> SHARD_SHIFT == shard},
        {key for key in keys.lists if key.id1 >> SHARD_SHIFT == shard},
        {key for key in keys.edges if key.id1 >> SHARD_SHIFT == shard},
        {pair for pair in keys.intents if pair.low_id >> SHARD_SHIFT == shard},
        {key for key in keys.recounts if key.id1 >> SHARD_SHIFT == shard},
        keys.reserved_times & {shard},
        {key for key in keys.nodes if key.id1 >> SHARD_SHIFT == shard},
        {job_id for job_id in keys.jobs if job_id >> SHARD_SHIFT == shard},
        {key for key in keys.paused_jobs if key.shard == shard},
        {key: numbers for key, numbers in keys.state_edges.items() if key.id1 >> SHARD_SHIFT == shard},
    )


def _lists_of(shard: int, lists: Mapping[ListKey, int]) -> dict[ListKey, int]:
    return {key: limit for key, limit in lists.items() if key.id1 >> SHARD_SHIFT == shard}
