# ruff: noqa: S608 - schema and table names come from tao.storage.names or the server's own tables, values are bound
"""The SQL of a move: the incoming copy, its rows and checksums, the fence, and the renaming.

A row is written by its primary key, and whole, so that applying a change again, or one that the first copy already has,
changes nothing. Checksums are computed by the servers, over all columns.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final, NamedTuple

from tao.model.errors import ShardBlocked
from tao.model.rows import ShardRow
from tao.planning.row_events import RowEvent
from tao.replication.shard_move_plan import CopySpoiled, CopyState, MoveAborted, fenced_row, unfenced_row
from tao.storage.dialect import Dialect
from tao.storage.failures import TablesMissing
from tao.storage.names import incoming_schema_name, schema_name, shard_of_incoming_schema, shard_of_schema
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession
from tao.storage.write_statements import shard_row

COPY_TABLE: Final = "copy_state"
"""The table in the schema of an incoming copy with its `CopyState`. It is never renamed into the shard."""
MOVED_TABLE: Final = "moved_away"
"""The table in the schema of a shard that has left: since when, and where to."""
SHARD_TABLE: Final = "shard"
"""Not copied as other tables are: its row is the fence."""
_NOT_COMPARED: Final = frozenset({SHARD_TABLE, COPY_TABLE, MOVED_TABLE, "heartbeat", "schema_migrations"})
"""Heartbeats change all the time and say nothing about the graph, and times of migrations depend on time zones."""
_ROW_COLUMNS: Final = "master_server, version_epoch, owner, generation"
_ROWS_PER_STATEMENT: Final = 200
_BYTES_PER_STATEMENT: Final = 4 << 20
_HIGHEST: Final = (1 << 64) - 1
_PAUSE_SECONDS: Final = 0.02

PrimaryKey = tuple[object, ...]
"""The values of a row's primary key, in the order of its columns."""


@dataclass(frozen=True, slots=True)
class CopiedTable:
    """A table of a shard: its columns in their order, and those of its primary key."""

    name: str
    columns: tuple[str, ...]
    key: tuple[str, ...]

    @property
    def is_compared(self) -> bool:
        """Whether its rows are compared between source and copy."""
        return self.name not in _NOT_COMPARED

    def key_of(self, row: Mapping[str, object]) -> PrimaryKey:
        """Return the primary key of a row image."""
        return tuple(row[name] for name in self.key)


@dataclass(frozen=True, slots=True)
class ShardThere:
    """What a server has of a shard: the row of the shard, the state of an incoming copy (empty when that has no row),
    and since when a shard that has left is kept."""

    row: ShardRow | None
    copy: CopyState | None
    is_marked: bool


async def read_shard(session: DatabaseSession, shard: int, *, deadline: float) -> ShardThere:
    """Read what the server has of a shard. A statement that renames its tables may still be under way there: the
    process that sent it has died, or given it up."""
    try:
        return await _read_shard(session, shard, deadline)
    except TablesMissing:
        return await _read_shard(session, shard, deadline)


async def _read_shard(session: DatabaseSession, shard: int, deadline: float) -> ShardThere:
    schema, incoming = schema_name(shard), incoming_schema_name(shard)
    schemas, tables, _ = await session.run(
        "SELECT schema_name FROM information_schema.schemata WHERE schema_name IN (%s, %s); "
        "SELECT table_schema, table_name FROM information_schema.tables WHERE table_schema IN (%s, %s); ROLLBACK",
        (schema, incoming, schema, incoming),
        deadline=deadline,
    )
    present = {(str(of), str(name)) for of, name in tables}
    row: ShardRow | None = None
    if (schema, SHARD_TABLE) in present:
        rows, _ = await session.run(
            f"SELECT {shard:d}, {_ROW_COLUMNS} FROM {schema}.{SHARD_TABLE} WHERE only_row = 1; ROLLBACK",
            deadline=deadline,
        )
        row = next(map(shard_row, rows), None)
    copy: CopyState | None = None
    if incoming in {str(name) for (name,) in schemas}:
        copy = CopyState(source="", source_epoch=0, target_epoch=0)
        if (incoming, COPY_TABLE) in present:
            rows, _ = await session.run(
                f"SELECT source, source_epoch, target_epoch, position FROM {incoming}.{COPY_TABLE}; ROLLBACK",
                deadline=deadline,
            )
            for source, source_epoch, target_epoch, position in rows:
                copy = CopyState(
                    source=source.decode(),
                    source_epoch=source_epoch,
                    target_epoch=target_epoch,
                    position=position.decode(),
                )
    return ShardThere(row, copy, (schema, MOVED_TABLE) in present)


async def shards_held(session: DatabaseSession, *, deadline: float) -> tuple[list[int], list[int]]:
    """Return the shards that the server has schemas of, and those of which it has incoming copies."""
    names, _ = await session.run(
        "SELECT schema_name FROM information_schema.schemata WHERE schema_name LIKE 'tao\\_%%'; ROLLBACK",
        deadline=deadline,
    )
    shards = [shard for (name,) in names if (shard := shard_of_schema(str(name))) is not None]
    incoming = [shard for (name,) in names if (shard := shard_of_incoming_schema(str(name))) is not None]
    return sorted(shards), sorted(incoming)


async def fenced_shards(
    session: DatabaseSession, shards: Sequence[int], other_servers: Sequence[str], *, deadline: float
) -> list[int]:
    """Return those of the shards whose rows name one of ``other_servers``, which belong to other databases."""
    found: list[int] = []
    for at in range(0, len(shards) if other_servers else 0, _ROWS_PER_STATEMENT):
        some = shards[at : at + _ROWS_PER_STATEMENT]
        union = " UNION ALL ".join(
            f"(SELECT {shard:d} FROM {schema_name(shard)}.{SHARD_TABLE} WHERE only_row = 1 AND master_server IN %s)"
            for shard in some
        )
        rows, _ = await session.run(f"{union}; ROLLBACK", [list(other_servers)] * len(some), deadline=deadline)
        found += [int(shard) for (shard,) in rows]
    return found


async def binlog_position(session: DatabaseSession, *, deadline: float) -> str:
    """Return the end of the server's binlog: every commit that has been acknowledged is in it."""
    name = "gtid_binlog_pos" if session.dialect is Dialect.MARIADB else "gtid_executed"
    (((position,),),) = await session.run(f"SELECT @@GLOBAL.{name}", deadline=deadline)
    return str(position or "").replace("\n", "")


async def data_bytes(session: DatabaseSession, shards: Iterable[int], *, deadline: float) -> dict[int, int]:
    """Return about how many bytes each of these shards takes, with its indexes, by the server's estimate."""
    # MySQL's estimates may otherwise be a day old.
    fresh = "SET SESSION information_schema_stats_expiry = 0; " if session.dialect is Dialect.MYSQL else ""
    *_, rows, _ = await session.run(
        f"{fresh}SELECT table_schema, SUM(data_length + index_length) FROM information_schema.tables "
        "WHERE table_schema LIKE 'tao\\_%%' GROUP BY table_schema; ROLLBACK",
        deadline=deadline,
    )
    found = {shard_of_schema(str(name)): int(size or 0) for name, size in rows}
    return {shard: found.get(shard, 0) for shard in shards}


async def free_bytes(session: DatabaseSession, *, deadline: float) -> int | None:
    """Return the free bytes of the disk that has the server's data; None when it is unknown.

    Neither database reports it by itself. MariaDB does with its plugin DISKS; otherwise the disk is looked at when the
    server runs on this machine."""
    ((host, folder),), plugins = await session.run(
        "SELECT @@hostname, @@datadir; SELECT plugin_name FROM information_schema.plugins "
        "WHERE plugin_name = 'DISKS' AND plugin_status = 'ACTIVE'",
        deadline=deadline,
    )
    data = PurePath(str(folder))
    if plugins:
        (disks,) = await session.run("SELECT path, available FROM information_schema.disks", deadline=deadline)
        under = [(len(PurePath(path).parts), kib) for path, kib in disks if data.is_relative_to(path)]
        if under:
            return int(max(under)[1]) << 10
    if str(host) == socket.gethostname():
        with suppress(OSError):  # the server sees other folders, as in a container
            return shutil.disk_usage(data).free
    return None


# ---- the copy --------------------------------------------------------------------------------------------------------


async def begin_copy(session: DatabaseSession, shard: int, state: CopyState, *, deadline: float) -> None:
    """Make the schema of an incoming copy, which has nothing yet."""
    incoming = incoming_schema_name(shard)
    await session.run(
        f"CREATE DATABASE {incoming} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin; "
        f"CREATE TABLE {incoming}.{COPY_TABLE} (only_row TINYINT UNSIGNED NOT NULL, source VARBINARY(255) NOT NULL, "
        "source_epoch BIGINT UNSIGNED NOT NULL, target_epoch BIGINT UNSIGNED NOT NULL, position MEDIUMBLOB NOT NULL, "
        "PRIMARY KEY (only_row)) ENGINE = InnoDB; "
        f"INSERT INTO {incoming}.{COPY_TABLE} VALUES (1, %s, %s, %s, ''); COMMIT",
        (state.source, state.source_epoch, state.target_epoch),
        deadline=deadline,
    )


async def copy_tables(source: DatabaseSession, target: DatabaseSession, shard: int, *, deadline: float) -> None:
    """Make the tables of a shard in the schema of its incoming copy, without rows."""
    schema, incoming = schema_name(shard), incoming_schema_name(shard)
    for name in await copied_tables(source, schema, deadline=deadline):
        shown, _ = await source.run(f"SHOW CREATE TABLE {schema}.{name}; ROLLBACK", deadline=deadline)
        create = str(shown[0][1]).replace("%", "%%")
        await target.run(f"USE {incoming}; {create}", deadline=deadline)


async def store_position(session: DatabaseSession, shard: int, position: str, *, deadline: float) -> None:
    """Note that the copy has everything of the source up to a position."""
    await session.run(f"{_position(shard)}; COMMIT", (position,), deadline=deadline)


def _position(shard: int) -> str:
    return f"UPDATE {incoming_schema_name(shard)}.{COPY_TABLE} SET position = %s"


async def drop_schema(session: DatabaseSession, schema: str, *, deadline: float) -> None:
    """Drop a schema, if it is there."""
    await session.run(f"ROLLBACK; DROP DATABASE IF EXISTS {schema}", deadline=deadline)


async def copied_tables(session: DatabaseSession, schema: str, *, deadline: float) -> dict[str, CopiedTable]:
    """Return the tables of a schema by name, without those that only a move has."""
    columns, keys, _ = await session.run(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = %s "
        "ORDER BY table_name, ordinal_position; "
        "SELECT table_name, column_name FROM information_schema.statistics WHERE table_schema = %s "
        "AND index_name = 'PRIMARY' ORDER BY table_name, seq_in_index; ROLLBACK",
        (schema, schema),
        deadline=deadline,
    )
    names = dict.fromkeys(str(table) for table, _ in columns)
    return {
        name: CopiedTable(
            name,
            tuple(str(column) for table, column in columns if table == name),
            tuple(str(column) for table, column in keys if table == name),
        )
        for name in names
        if name not in (COPY_TABLE, MOVED_TABLE)
    }


NetRows = dict[str, dict[PrimaryKey, Mapping[str, object] | None]]
"""By table and primary key, the last image of each changed row; None for one that is gone."""


def net_rows(events: Iterable[RowEvent], shard: int, tables: Mapping[str, CopiedTable]) -> NetRows:
    """Return what the row events of some transactions leave of a shard, without the row of the shard itself. Raises
    `CopySpoiled` for a table or columns that the copy does not have."""
    net: NetRows = {}
    for event in events:
        if event.shard != shard or event.table in (SHARD_TABLE, MOVED_TABLE):
            continue
        table = tables.get(event.table)
        if table is None:
            raise CopySpoiled(f"the shard has got a table {event.table}, which its copy lacks")
        rows = net.setdefault(event.table, {})
        for image, is_there in ((event.before, False), (event.after, True)):
            if image is not None:
                if len(image) != len(table.columns) or any(name not in image for name in table.columns):
                    raise CopySpoiled(f"the table {event.table} of the shard has got other columns than its copy")
                rows[table.key_of(image)] = image if is_there else None
    return net


@dataclass(frozen=True, slots=True)
class Advance:
    """A step of a copy from one position of the source to the next one."""

    before: str
    after: str


async def apply_rows(
    session: DatabaseSession,
    shard: int,
    net: NetRows,
    tables: Mapping[str, CopiedTable],
    advance: Advance,
    *,
    deadline: float,
) -> None:
    """Write changed rows into the copy, and the position that it reaches thereby, in one transaction. Raises
    `MoveAborted` when the copy is not at the position before: another process has gone on with it."""
    incoming = incoming_schema_name(shard)
    _, stored = await session.run(
        f"START TRANSACTION; SELECT position FROM {incoming}.{COPY_TABLE} FOR UPDATE", deadline=deadline
    )
    if [position.decode() for (position,) in stored] != [advance.before]:
        await session.run("ROLLBACK", deadline=deadline)
        raise MoveAborted(f"another process has gone on with the copy of shard {shard}")
    for name, rows in net.items():
        table = tables[name]
        others = tuple(column for column in table.columns if column not in table.key)
        gone = [key for key, row in rows.items() if row is None]
        for some in _chunks(gone):
            where, values = _one_of(table, some)
            await session.run(f"DELETE FROM {incoming}.{name} WHERE {where}", values, deadline=deadline)
        there = [tuple(row[each] for each in (*table.key, *others)) for row in rows.values() if row is not None]
        for some in _chunks(there):
            upsert = session.dialect.upsert(f"{incoming}.{name}", table.key, others, len(some))
            await session.run(upsert, [value for row in some for value in row], deadline=deadline)
    await session.run(f"{_position(shard)}; COMMIT", (advance.after,), deadline=deadline)


def _one_of(table: CopiedTable, keys: Sequence[PrimaryKey]) -> tuple[str, list[object]]:
    """Return the condition for rows by their keys: ranges of the primary key, which rows in brackets would not be."""
    one = f"({' AND '.join(f'{name} = %s' for name in table.key)})"
    return " OR ".join([one] * len(keys)), [value for key in keys for value in key]


def _chunks(rows: Sequence[tuple[object, ...]]) -> Iterator[Sequence[tuple[object, ...]]]:
    start, size = 0, 0
    for at, row in enumerate(rows):
        row_bytes = sum(len(value) if isinstance(value, bytes | str) else 20 for value in row)
        if at > start and (at - start == _ROWS_PER_STATEMENT or size + row_bytes > _BYTES_PER_STATEMENT):
            yield rows[start:at]
            start, size = at, 0
        size += row_bytes
    if start < len(rows):
        yield rows[start:]


# ---- the comparison --------------------------------------------------------------------------------------------------


class KeyRange(NamedTuple):
    """The rows of a table whose first key column is between two numbers, both included."""

    low: int
    high: int

    @property
    def is_last(self) -> bool:
        """Whether no range follows."""
        return self.high == _HIGHEST


async def next_range(
    session: DatabaseSession, schema: str, table: CopiedTable, low: int, rows: int, *, deadline: float
) -> KeyRange:
    """Return the range from ``low`` that has about so many rows, or all that are left, up to the highest number."""
    first = table.key[0]
    found, _ = await session.run(
        f"SELECT {first} FROM {schema}.{table.name} WHERE {first} >= %s ORDER BY {first} LIMIT 1 OFFSET {rows:d}; "
        "ROLLBACK",
        (low,),
        deadline=deadline,
    )
    return KeyRange(low, int(found[0][0]) if found else _HIGHEST)


async def range_checksum(
    session: DatabaseSession, schema: str, table: CopiedTable, keys: KeyRange, *, deadline: float
) -> tuple[int, ...]:
    """Return the number of rows in a range, and the sum of their checksums.

    An exclusive or would not differ where two rows have each other's contents. Servers compute each mention of a
    checksum anew, so that both would take twice as long."""
    ((found,), _) = await session.run(
        f"SELECT COUNT(*), COALESCE(SUM({_crc(table)}), 0) FROM {schema}.{table.name} "
        f"WHERE {table.key[0]} BETWEEN %s AND %s; ROLLBACK",
        keys,
        deadline=deadline,
    )
    return tuple(map(int, found))


async def checksums_in_range(
    session: DatabaseSession, schema: str, table: CopiedTable, keys: KeyRange, *, deadline: float
) -> dict[PrimaryKey, int]:
    """Return the checksum of each row in a range."""
    where = f"{table.key[0]} BETWEEN %s AND %s"
    return await _checksums(session, schema, table, where, list(keys), deadline)


async def checksums_of(
    session: DatabaseSession, schema: str, table: CopiedTable, keys: Sequence[PrimaryKey], *, deadline: float
) -> dict[PrimaryKey, int]:
    """Return the checksums of those of the rows that exist."""
    found: dict[PrimaryKey, int] = {}
    for some in _chunks(keys):
        found |= await _checksums(session, schema, table, *_one_of(table, some), deadline)
    return found


async def _checksums(
    session: DatabaseSession, schema: str, table: CopiedTable, where: str, values: list[object], deadline: float
) -> dict[PrimaryKey, int]:
    rows, _ = await session.run(
        f"SELECT {_crc(table)}, {', '.join(table.key)} FROM {schema}.{table.name} WHERE {where}; ROLLBACK",
        values,
        deadline=deadline,
    )
    return {tuple(key): int(crc) for crc, *key in rows}


def _crc(table: CopiedTable) -> str:
    return f"CRC32(CONCAT_WS(',', {', '.join(table.columns)}))"


# ---- the fence and the switch ----------------------------------------------------------------------------------------


async def fence_shard(
    session: DatabaseSession, shard: int, source_master: str, target_master: str, *, deadline: float
) -> ShardRow:
    """Let nobody write to a shard any more, and return its row as it is then.

    The exclusive lock waits for the transactions that hold the row; each is committed or rolled back when this
    returns. Raises `MoveAborted` when the row names another master than the source's, and `ShardBlocked`."""
    schema = schema_name(shard)
    rows: list[Row] = []
    while not rows:
        try:
            _, rows = await session.run(
                f"START TRANSACTION; SELECT {shard:d}, {_ROW_COLUMNS} FROM {schema}.{SHARD_TABLE} WHERE only_row = 1 "
                "FOR UPDATE",
                deadline=deadline,
            )
        except ShardBlocked:
            if asyncio.get_running_loop().time() >= deadline - 1.0:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)
        else:
            if not rows:
                raise MoveAborted(f"the row of shard {shard} at {source_master} is missing")
    (row,) = map(shard_row, rows)
    if row.master_server != source_master:
        await session.run("ROLLBACK", deadline=deadline)
        raise MoveAborted(f"the row of shard {shard} at {source_master} names {row.master_server}: repeat the move")
    fenced = fenced_row(row, target_master)
    await _write_row(session, schema, fenced, deadline)
    return fenced


async def unfence_shard(
    session: DatabaseSession, shard: int, source_master: str, source_epoch: int, *, deadline: float
) -> None:
    """Let leaders write to a shard at its source again, under at least the version epoch of its database. Does nothing
    when they may."""
    schema = schema_name(shard)
    _, rows = await session.run(
        f"START TRANSACTION; SELECT {shard:d}, {_ROW_COLUMNS} FROM {schema}.{SHARD_TABLE} WHERE only_row = 1 "
        "FOR UPDATE",
        deadline=deadline,
    )
    row = next(map(shard_row, rows), None)
    if row is None or row.master_server == source_master:
        await session.run("ROLLBACK", deadline=deadline)
        return
    await _write_row(session, schema, unfenced_row(row, source_master, source_epoch), deadline)


async def _write_row(session: DatabaseSession, schema: str, row: ShardRow, deadline: float) -> None:
    await session.run(
        f"UPDATE {schema}.{SHARD_TABLE} SET master_server = %s, version_epoch = %s, owner = %s, generation = %s "
        "WHERE only_row = 1; COMMIT",
        (row.master_server, row.version_epoch, row.owner, row.generation),
        deadline=deadline,
    )


async def rename_copy(session: DatabaseSession, row: ShardRow, *, deadline: float) -> None:
    """Make the copy the shard, under this row, in one statement. Its replicas do the same."""
    schema, incoming = schema_name(row.shard), incoming_schema_name(row.shard)
    tables = await copied_tables(session, incoming, deadline=deadline)
    await _write_row(session, incoming, row, deadline)
    await session.run(
        f"CREATE DATABASE IF NOT EXISTS {schema} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", deadline=deadline
    )
    await _rename(session, incoming, schema, tables, deadline)


async def rename_back(session: DatabaseSession, shard: int, *, deadline: float) -> None:
    """Make the shard an incoming copy again, and drop its empty schema."""
    schema, incoming = schema_name(shard), incoming_schema_name(shard)
    tables = await copied_tables(session, schema, deadline=deadline)
    await session.run(
        f"CREATE DATABASE IF NOT EXISTS {incoming} CHARACTER SET utf8mb4 COLLATE utf8mb4_bin", deadline=deadline
    )
    if tables:
        await _rename(session, schema, incoming, tables, deadline)
    await drop_schema(session, schema, deadline=deadline)


async def _rename(session: DatabaseSession, before: str, after: str, tables: Iterable[str], deadline: float) -> None:
    renamed = ", ".join(f"{before}.{table} TO {after}.{table}" for table in tables)
    await session.run(f"ROLLBACK; RENAME TABLE {renamed}", deadline=deadline)


async def mark_moved(session: DatabaseSession, shard: int, target: str, *, deadline: float) -> None:
    """Note at the source that the shard has left, and when. Does nothing when that is noted, or the shard is gone."""
    if (await read_shard(session, shard, deadline=deadline)).row is None:
        return
    table = f"{schema_name(shard)}.{MOVED_TABLE}"
    await session.run(
        f"CREATE TABLE IF NOT EXISTS {table} (only_row TINYINT UNSIGNED NOT NULL, target VARBINARY(255) NOT NULL, "
        "since TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP, PRIMARY KEY (only_row)) ENGINE = InnoDB; "
        f"INSERT IGNORE INTO {table} (only_row, target) VALUES (1, %s); COMMIT",
        (target,),
        deadline=deadline,
    )


async def moved_since(session: DatabaseSession, shard: int, *, deadline: float) -> tuple[str, int]:
    """Return the database to which a shard has left the server, and how many seconds ago."""
    rows, _ = await session.run(
        f"SELECT target, TIMESTAMPDIFF(SECOND, since, CURRENT_TIMESTAMP) FROM {schema_name(shard)}.{MOVED_TABLE}; "
        "ROLLBACK",
        deadline=deadline,
    )
    return (rows[0][0].decode(), int(rows[0][1])) if rows else ("", 0)
