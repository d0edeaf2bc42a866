# ruff: noqa: S608 - schema and table names come from tao.storage.names or the server's own tables, values are bound
"""Copies the rows of a shard from one snapshot of a server into the tables of an incoming copy at another one.

The rows pass through as the source packs them (`tao.storage.session.PackedInsert`): neither this process nor the target
parses or quotes anything. They come in the order of the primary key, and several connections insert at the same time,
because a commit may have to wait for a replica in another region.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from tao.replication.database_tools import CopyFailed
from tao.replication.move_statements import CopiedTable
from tao.replication.shard_move_plan import MoveRefused
from tao.storage.dialect import Dialect, SessionSetup
from tao.storage.names import incoming_schema_name, schema_name
from tao.storage.session import MAX_PARAMETERS, DatabaseSession, PackedInsert, ServerAccount, open_session

_BATCH_BYTES: Final = 512 << 10
"""Bytes of rows that one statement inserts, a transaction of its own: 12 ms of the target's time. Smaller ones wait
more often for a replica."""
_LEAST_BATCH_BYTES: Final = 64 << 10
_BATCH_SECONDS: Final = 0.007
"""A copy with a pace sends a statement so often. Commits of other shards wait behind one in the target's binlog and on
the way to its replicas: at 9 MB/s their 99th percentile rose by a half with 0.02 s, by a tenth with this."""
_LATE_SECONDS: Final = 1.0
"""How much time a copy with a pace may make up for, when servers were slow."""
_LEAST_PAUSE: Final = 0.8
"""While it does so, the part of the usual time between two statements."""
_MAX_ROWS: Final = 4_096
_ROWS_PER_STEP: Final = 16
"""Rows that are taken at once, so that a few large ones do not fill the memory."""
_WRITERS: Final = 2
"""Sessions that insert: one works while the commit of the other waits for a replica. More hold each other up."""
_PAUSE_SECONDS: Final = 86_400
"""How long the servers wait for a copy that is held up, before they end its sessions."""
_FROM_SOURCE: Final = SessionSetup(writes=False)
_INTO_TARGET: Final = SessionSetup(writes=True, idle_session_seconds=_PAUSE_SECONDS)
_UTC: Final = "time_zone = '+00:00'"


@dataclass(frozen=True, slots=True)
class CopyPace:
    """How fast a copy may be. ``stall_seconds``: it fails when a server does not answer for this long.
    ``bytes_per_second``: the most bytes of rows, 0 for no bound. ``may_go_on``: awaited before each statement, to hold
    the copy up for however long."""

    stall_seconds: float
    bytes_per_second: float = 0.0
    may_go_on: Callable[[], Awaitable[None]] | None = None

    @property
    def batch_bytes(self) -> int:
        """The bytes of rows in a statement."""
        if not self.bytes_per_second:
            return _BATCH_BYTES
        return max(_LEAST_BATCH_BYTES, min(_BATCH_BYTES, int(self.bytes_per_second * _BATCH_SECONDS)))


class PacedStarts:
    """When the statements of a copy begin: at its pace on average, and a quarter faster after a delay."""

    def __init__(self, bytes_per_second: float, now: float) -> None:
        """``bytes_per_second``: the pace, 0 for no bound. ``now``: the time in seconds."""
        self._bytes_per_second: Final = bytes_per_second
        self._due = now
        self.next_at = now
        """The time at which the next statement may begin."""

    def begun(self, size: int, now: float) -> None:
        """Count a statement that begins now with so many bytes of rows."""
        if self._bytes_per_second:
            seconds = size / self._bytes_per_second
            self._due = max(self._due, now - _LATE_SECONDS) + seconds
            self.next_at = max(self._due, now + _LEAST_PAUSE * seconds)


@dataclass(frozen=True, slots=True)
class CopyEnds:
    """The server that has the rows of a shard, and the one that gets them, each with its name. The account of the
    target may be one that only writes rows."""

    shard: int
    source: ServerAccount
    source_name: str
    target: ServerAccount
    target_name: str


async def copy_rows(
    ends: CopyEnds, tables: Mapping[str, CopiedTable], pace: CopyPace, on_copied: Callable[[int], None]
) -> tuple[int, str]:
    """Copy all rows of the tables into the incoming copy, which has the tables, through the target's binlog, so that
    its replicas get them too.

    ``on_copied`` receives the bytes of rows so far. Returns these bytes, and a position of the source: the copy has
    every change up to it, and may have later ones. Raises `MoveRefused` for a table that cannot be copied, `CopyFailed`
    for a source without a position, and other `TaoError`; the copy may then have any part of the rows."""
    copy = _RowCopy(ends, pace, on_copied)
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(copy.session(ends.source, ends.source_name, _FROM_SOURCE))
        for _ in range(_WRITERS):
            target = await stack.enter_async_context(copy.session(ends.target, ends.target_name, _INTO_TARGET))
            await prepare_to_insert(target, copy.deadline())
            copy.writers.append(_Writer(target))
        stack.push_async_callback(copy.stop)
        await check_columns(source, schema_name(ends.shard), copy.deadline())
        position = await begin_snapshot(source, copy.deadline())
        if not position:
            raise CopyFailed(f"{ends.source_name} names no position: is its binlog on, with GTIDs?")
        for table in tables.values():
            await copy.copy_table(source, table)
    return copy.copied_bytes, position


async def begin_snapshot(session: DatabaseSession, deadline: float) -> str:
    """Begin a snapshot. Returns a position whose transactions are all visible in it."""
    await session.run(f"SET SESSION net_write_timeout = {_PAUSE_SECONDS:d}, {_UTC}", deadline=deadline)
    if session.dialect is Dialect.MYSQL:
        # A transaction is in the set of the executed ones after it has become visible. Those that commit between the
        # two statements are in the snapshot, and applied again from the binlog.
        _, rows, _ = await session.run(
            "SET SESSION max_execution_time = 0; SELECT @@GLOBAL.gtid_executed; "
            "START TRANSACTION WITH CONSISTENT SNAPSHOT",
            deadline=deadline,
        )
        return str(rows[0][0] or "").replace("\n", "")
    # Here a transaction is in the binlog's position before it is visible. The server itself knows the place in the
    # binlog of such a snapshot.
    *_, shown = await session.run(
        "SET SESSION max_statement_time = 0; START TRANSACTION WITH CONSISTENT SNAPSHOT; "
        "SHOW STATUS LIKE 'binlog_snapshot_%%'",
        deadline=deadline,
    )
    place = {str(name).lower(): str(value) for name, value in shown}
    at = (place.get("binlog_snapshot_file", ""), int(place.get("binlog_snapshot_position") or 0))
    ((((position,)),),) = await session.run("SELECT BINLOG_GTID_POS(%s, %s)", at, deadline=deadline)
    return position.decode() if isinstance(position, bytes) else str(position or "")


async def prepare_to_insert(session: DatabaseSession, deadline: float) -> None:
    """Have a session of the target commit each statement, and take times as the source sends them."""
    await session.run(f"SET SESSION autocommit = 1, {_UTC}", deadline=deadline)


async def select_rows(session: DatabaseSession, shard: int, table: CopiedTable, deadline: float) -> None:
    """Begin to read a table of a shard in the order of its primary key; `DatabaseSession.take_packed` has the rows."""
    columns, key = ", ".join(table.columns), ", ".join(table.key)
    name = f"{schema_name(shard)}.{table.name}"
    await session.select_packed(f"SELECT {columns} FROM {name} FORCE INDEX (PRIMARY) ORDER BY {key}", deadline=deadline)


async def check_columns(session: DatabaseSession, schema: str, deadline: float) -> None:
    """Raise `MoveRefused` for columns that may be NULL, which is packed in another way in a statement's values."""
    (found,) = await session.run(
        "SELECT table_name, column_name FROM information_schema.columns "
        "WHERE table_schema = %s AND is_nullable = 'YES' LIMIT 1",
        (schema,),
        deadline=deadline,
    )
    if found:
        table, column = found[0]
        raise MoveRefused(f"{schema}.{table}.{column} may be NULL, which a move cannot copy: declare it NOT NULL")


class _Writer:
    """A session that inserts, with the statements that it has prepared for the table at hand."""

    def __init__(self, session: DatabaseSession) -> None:
        self._session: Final = session
        self._prepared: dict[tuple[str, int], PackedInsert] = {}

    async def insert(self, table: str, columns: Sequence[str], rows: Sequence[bytes], deadline: float) -> None:
        """Insert rows, and commit."""
        key = (table, len(rows))
        if key not in self._prepared:
            self._prepared[key] = await self._session.prepare_insert(table, columns, len(rows), deadline=deadline)
        await self._session.insert_packed(self._prepared[key], rows, deadline=deadline)


@dataclass(slots=True)
class _RowCopy:
    """A copy under way."""

    ends: CopyEnds
    pace: CopyPace
    on_copied: Callable[[int], None]
    writers: deque[_Writer] = field(default_factory=deque)
    """The writers, in the order in which they insert."""
    copied_bytes: int = 0
    _starts: PacedStarts = field(init=False)
    _inserting: deque[asyncio.Task[None]] = field(default_factory=deque)
    """The tasks of the last of the writers, the oldest first."""

    def __post_init__(self) -> None:
        self._starts = PacedStarts(self.pace.bytes_per_second, asyncio.get_running_loop().time())

    def deadline(self) -> float:
        """Return the time by which a server has to answer."""
        return asyncio.get_running_loop().time() + self.pace.stall_seconds

    @asynccontextmanager
    async def session(self, login: ServerAccount, name: str, setup: SessionSetup) -> AsyncIterator[DatabaseSession]:
        """Open a session. What is under way there at the end is given up."""
        session = await open_session(login, name, setup, deadline=self.deadline())
        try:
            yield session
        finally:
            session.abort()

    async def copy_table(self, source: DatabaseSession, table: CopiedTable) -> None:
        """Copy the rows of one table."""
        await select_rows(source, self.ends.shard, table, self.deadline())
        most_rows = min(_MAX_ROWS, MAX_PARAMETERS // len(table.columns))
        rows: list[bytes] = []
        size = 0  # of these rows
        is_at_end = False
        while rows or not is_at_end:
            while not is_at_end and len(rows) < most_rows and size < self.pace.batch_bytes:
                more, is_at_end = await source.take_packed(_ROWS_PER_STEP, deadline=self.deadline())
                rows += more
                size += sum(map(len, more))
            count = rows_of_statement(rows, most_rows, 2 * self.pace.batch_bytes)
            if count:
                size -= await self._insert(table, rows[:count])
                del rows[:count]
        await self._finish(0)

    async def _insert(self, table: CopiedTable, rows: list[bytes]) -> int:
        """Have the writer whose turn it is insert rows, as soon as it has inserted its last ones. Returns how many
        bytes they are."""
        await self._hold_up()
        await self._finish(len(self.writers) - 1)
        writer, incoming = self.writers[0], f"{incoming_schema_name(self.ends.shard)}.{table.name}"
        self.writers.rotate(-1)
        task = asyncio.create_task(writer.insert(incoming, table.columns, rows, self.deadline()), name="row copy")
        self._inserting.append(task)
        size = sum(map(len, rows))
        self.copied_bytes += size
        self._starts.begun(size, asyncio.get_running_loop().time())
        self.on_copied(self.copied_bytes)
        return size

    async def _hold_up(self) -> None:
        if self.pace.may_go_on is not None:
            await self.pace.may_go_on()
        await asyncio.sleep(max(0.0, self._starts.next_at - asyncio.get_running_loop().time()))

    async def _finish(self, left: int) -> None:
        """Wait until at most so many statements are under way."""
        while len(self._inserting) > left:
            await self._inserting.popleft()

    async def stop(self) -> None:
        """End what is still under way after a failure."""
        for task in self._inserting:
            task.cancel()
        await asyncio.gather(*self._inserting, return_exceptions=True)


def rows_of_statement(rows: Sequence[bytes], most_rows: int, most_bytes: int) -> int:
    """Return how many of the rows the next statement inserts: a power of two, so that few statements are prepared.
    ``most_rows``, ``most_bytes``: the most that one may have; a single row may be larger."""
    if not rows:
        return 0
    count, size = 1, len(rows[0])
    while 2 * count <= min(len(rows), most_rows):
        size += sum(map(len, rows[count : 2 * count]))
        if size > most_bytes:
            break
        count *= 2
    return count
