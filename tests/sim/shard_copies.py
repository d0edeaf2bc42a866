"""The statements of a move at simulated database servers: `tao.replication.move_statements` and the SQL of
`tao.replication.row_copy`.

The product's mover, its copy, its follower, its comparison and its steps run above them unchanged.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from tao.model.errors import DeadlineExceeded, OperatorError, ShardBlocked
from tao.model.rows import RowChanges, ShardRow
from tao.replication import move_statements, row_copy
from tao.replication.move_statements import Advance, CopiedTable, KeyRange, NetRows, PrimaryKey, ShardThere
from tao.replication.server_statements import wait_for_position
from tao.replication.shard_move_plan import CopyState, MoveAborted, fenced_row, unfenced_row
from tao.storage.dialect import SessionSetup
from tao.storage.failures import TablesMissing
from tao.storage.names import schema_name, shard_of_incoming_schema, shard_of_schema
from tao.storage.session import ServerAccount, open_session
from tests.sim.copied_tables import ROW, TABLES, changes_of, tables_of
from tests.sim.database import SimDatabase, unix_ms
from tests.sim.loop import CURRENT, Process
from tests.sim.rows import CopiedRows, IncomingCopy, Rows
from tests.sim.sessions import PackedRow, SimSession
from tests.sim.stores import check_writable
from tests.sim.substitutes import Substitution
from tests.sim.world import World

_HIGHEST: Final = (1 << 64) - 1
_POLL_SECONDS: Final = 0.02
_ROW_BYTES: Final = 100
"""The size of a row in a server's estimates."""
_LOCK_WAIT_SECONDS: Final = 1.0
"""How long a server waits for the row of a shard."""


def copy_substitutes(world: World) -> list[Substitution]:
    """Return the substitutes beneath moves."""

    async def sim_open_session(account: ServerAccount, name: str, _: SessionSetup, *, deadline: float) -> SimSession:
        session = SimSession(world, world.databases[name])
        await session.run(lambda server: None, deadline)
        return session

    of_moves: list[Callable[..., Any]] = [
        *(read_shard, shards_held, fenced_shards, binlog_position, data_bytes, free_bytes),
        *(begin_copy, copy_tables, store_position, drop_schema, copied_tables, apply_rows),
        *(next_range, range_checksum, checksums_in_range, checksums_of),
        *(partial(fence_shard, world), partial(unfence_shard, world)),
        *(rename_copy, rename_back, partial(mark_moved, world), partial(moved_since, world)),
    ]
    of_rows = (prepare_to_insert, select_rows, check_columns, partial(begin_snapshot, world))
    return [
        *(Substitution(getattr(move_statements, _name(each)), each) for each in of_moves),
        *(Substitution(getattr(row_copy, _name(each)), each) for each in of_rows),
        Substitution(open_session, sim_open_session),
        Substitution(wait_for_position, sim_wait_for_position),
    ]


def _name(statement: Callable[..., Any]) -> str:
    function = statement.func if isinstance(statement, partial) else statement
    return str(function.__name__)


# ---- what servers have -----------------------------------------------------------------------------------------------


async def read_shard(session: SimSession, shard: int, *, deadline: float) -> ShardThere:
    def look(server: SimDatabase) -> ShardThere:
        rows = server.rows
        copy = rows.incoming.get(shard)
        return ShardThere(rows.shards.get(shard), None if copy is None else copy.state, shard in rows.moved_away)

    return await session.run(look, deadline)


async def shards_held(session: SimSession, *, deadline: float) -> tuple[list[int], list[int]]:
    return await session.run(lambda server: (sorted(server.rows.shards), sorted(server.rows.incoming)), deadline)


async def fenced_shards(
    session: SimSession, shards: Sequence[int], other_servers: Sequence[str], *, deadline: float
) -> list[int]:
    def look(server: SimDatabase) -> list[int]:
        return [shard for shard in shards if server.rows.shards[shard].master_server in other_servers]

    return await session.run(look, deadline)


async def binlog_position(session: SimSession, *, deadline: float) -> str:
    return await session.run(lambda server: server.position, deadline)


async def data_bytes(session: SimSession, shards: Iterable[int], *, deadline: float) -> dict[int, int]:
    def estimate(server: SimDatabase) -> dict[int, int]:
        held = {shard: tables_of(server.rows.of_shard(shard)) for shard in shards if shard in server.rows.shards}
        return {shard: _ROW_BYTES * sum(map(len, held.get(shard, {}).values())) for shard in shards}

    return await session.run(estimate, deadline)


async def free_bytes(session: SimSession, *, deadline: float) -> int | None:
    return await session.run(lambda _: None, deadline)


async def copied_tables(session: SimSession, schema: str, *, deadline: float) -> dict[str, CopiedTable]:
    def look(server: SimDatabase) -> dict[str, CopiedTable]:
        shard, incoming = shard_of_schema(schema), shard_of_incoming_schema(schema)
        copy = None if incoming is None else server.rows.incoming.get(incoming)
        is_there = shard in server.rows.shards or (copy is not None and not copy.is_renamed)
        return dict(TABLES) if is_there else {}

    return await session.run(look, deadline)


async def sim_wait_for_position(session: SimSession, position: str, *, deadline: float) -> None:
    loop = asyncio.get_running_loop()
    while not await session.run(lambda server: server.shows(position), deadline):
        if loop.time() >= deadline:
            raise DeadlineExceeded(f"{session.server.name} does not show {position} in time")
        await asyncio.sleep(_POLL_SECONDS)


# ---- the copy --------------------------------------------------------------------------------------------------------


async def begin_copy(session: SimSession, shard: int, state: CopyState, *, deadline: float) -> None:
    def begin(rows: Rows) -> None:
        rows.incoming[shard] = IncomingCopy(state)

    async def work() -> None:
        if shard in session.server.truth.incoming:
            raise OperatorError(f"{session.server.name} has an incoming copy of shard {shard} already")
        await session.server.execute(begin)

    await session.do(work, deadline)


async def copy_tables(source: SimSession, target: SimSession, shard: int, *, deadline: float) -> None:
    await copied_tables(source, schema_name(shard), deadline=deadline)
    await target.run(lambda _: None, deadline)


async def store_position(session: SimSession, shard: int, position: str, *, deadline: float) -> None:
    async def work() -> None:
        _copy_at(session.server, shard)
        check_writable(session.server)
        await session.server.execute(partial(_advance, shard, position, dict[str, dict[PrimaryKey, object]]()))

    await session.do(work, deadline)


async def drop_schema(session: SimSession, schema: str, *, deadline: float) -> None:
    shard, incoming = shard_of_schema(schema), shard_of_incoming_schema(schema)

    def drop(rows: Rows) -> None:
        if shard is not None:
            rows.forget(shard)
        rows.incoming.pop(-1 if incoming is None else incoming, None)

    await session.do(lambda: session.server.execute(drop, *([] if shard is None else [shard])), deadline)


async def apply_rows(
    session: SimSession,
    shard: int,
    net: NetRows,
    tables: Mapping[str, CopiedTable],
    advance: Advance,
    *,
    deadline: float,
) -> None:
    changed = {
        name: {key: None if image is None else image[ROW] for key, image in rows.items()} for name, rows in net.items()
    }

    async def work() -> None:
        check_writable(session.server)  # the account is the leaders'
        copy = _copy_at(session.server, shard)
        if copy.state.position != advance.before:
            raise MoveAborted(f"another process has gone on with the copy of shard {shard}")
        if net and copy.is_renamed:
            raise TablesMissing(f"{session.server.name} has no tables of an incoming copy of shard {shard}")
        await session.server.execute(partial(_advance, shard, advance.after, changed))

    await session.do(work, deadline)


def _advance(shard: int, position: str, changed: CopiedRows, rows: Rows) -> None:
    copy = rows.incoming[shard]
    copy.state = msgspec.structs.replace(copy.state, position=position)
    for name, some in changed.items():
        table = copy.tables.setdefault(name, {})
        for key, row in some.items():
            if row is None:
                table.pop(key, None)
            else:
                table[key] = row


def _copy_at(server: SimDatabase, shard: int) -> IncomingCopy:
    copy = server.truth.incoming.get(shard)
    if copy is None:
        raise TablesMissing(f"{server.name} has no incoming copy of shard {shard}")
    return copy


async def prepare_to_insert(session: SimSession, deadline: float) -> None:
    await session.run(lambda _: None, deadline)


async def check_columns(session: SimSession, schema: str, deadline: float) -> None:
    await session.run(lambda _: None, deadline)


async def begin_snapshot(world: World, session: SimSession, deadline: float) -> str:
    """Begin a snapshot of all shards. A master has committed what it does not show yet; the snapshot has it."""

    def begin(server: SimDatabase) -> str:
        is_replica = any(server in each.replicas for each in world.databases.values())
        rows = server.rows if is_replica else server.truth
        session.snapshot = {shard: tables_of(rows.of_shard(shard)) for shard in rows.shards}
        return server.visible_position if is_replica else server.position

    return await session.run(begin, deadline)


async def select_rows(session: SimSession, shard: int, table: CopiedTable, deadline: float) -> None:
    def select(server: SimDatabase) -> None:
        tables = session.snapshot.get(shard)
        if tables is None:
            raise TablesMissing(f"{server.name} has no tables of shard {shard}")
        session.reading = [PackedRow.of(key, row) for key, row in sorted(tables[table.name].items(), key=_first)]

    await session.run(select, deadline)


def _first(row: tuple[PrimaryKey, object]) -> tuple[Any, ...]:
    return row[0]


# ---- the comparison --------------------------------------------------------------------------------------------------


def _rows(server: SimDatabase, schema: str, table: str) -> dict[PrimaryKey, object]:
    shard, incoming = shard_of_schema(schema), shard_of_incoming_schema(schema)
    copy = None if incoming is None else server.rows.incoming.get(incoming)
    if copy is not None and not copy.is_renamed:
        return copy.tables.get(table, {})
    if shard is not None and shard in server.rows.shards:
        return tables_of(server.rows.of_shard(shard))[table]
    raise TablesMissing(f"{server.name} has no {schema}.{table}")


def _first_number(key: PrimaryKey) -> int:
    first = key[0]
    assert isinstance(first, int), "primary keys begin with a number"
    return first


def _checksum(key: PrimaryKey, row: object) -> int:
    return zlib.crc32(repr((key, row)).encode())


async def next_range(
    session: SimSession, schema: str, table: CopiedTable, low: int, rows: int, *, deadline: float
) -> KeyRange:
    def look(server: SimDatabase) -> KeyRange:
        numbers = sorted(number for number in map(_first_number, _rows(server, schema, table.name)) if number >= low)
        return KeyRange(low, numbers[rows] if len(numbers) > rows else _HIGHEST)

    return await session.run(look, deadline)


async def range_checksum(
    session: SimSession, schema: str, table: CopiedTable, keys: KeyRange, *, deadline: float
) -> tuple[int, ...]:
    found = await checksums_in_range(session, schema, table, keys, deadline=deadline)
    return len(found), sum(found.values())


async def checksums_in_range(
    session: SimSession, schema: str, table: CopiedTable, keys: KeyRange, *, deadline: float
) -> dict[PrimaryKey, int]:
    def look(server: SimDatabase) -> dict[PrimaryKey, int]:
        rows = _rows(server, schema, table.name).items()
        return {key: _checksum(key, row) for key, row in rows if keys.low <= _first_number(key) <= keys.high}

    return await session.run(look, deadline)


async def checksums_of(
    session: SimSession, schema: str, table: CopiedTable, keys: Sequence[PrimaryKey], *, deadline: float
) -> dict[PrimaryKey, int]:
    def look(server: SimDatabase) -> dict[PrimaryKey, int]:
        rows = _rows(server, schema, table.name)
        return {key: _checksum(key, rows[key]) for key in keys if key in rows}

    return await session.run(look, deadline)


# ---- the fence and the switch ----------------------------------------------------------------------------------------


async def fence_shard(
    world: World, session: SimSession, shard: int, source_master: str, target_master: str, *, deadline: float
) -> ShardRow:
    async def fence() -> ShardRow:
        row = session.server.truth.shards.get(shard)
        if row is None or row.master_server != source_master:
            raise MoveAborted(f"the row of shard {shard} at {source_master} is {row}")
        fenced = fenced_row(row, target_master)
        await _write_row(world, session.server, fenced)
        return fenced

    return await session.do(partial(_locked, session.server, shard, CURRENT.get(), fence), deadline)


async def unfence_shard(
    world: World, session: SimSession, shard: int, source_master: str, source_epoch: int, *, deadline: float
) -> None:
    async def unfence() -> None:
        row = session.server.truth.shards.get(shard)
        if row is not None and row.master_server != source_master:
            await _write_row(world, session.server, unfenced_row(row, source_master, source_epoch))
            world.trace.note("released", shard)

    await session.do(partial(_locked, session.server, shard, CURRENT.get(), unfence), deadline)


async def _locked(server: SimDatabase, shard: int, client: Process | None, work: Callable[[], Any]) -> Any:
    """Do something with the row of a shard locked, for a client that lives. An administrator may do it at a server that
    is closed."""
    try:
        async with asyncio.timeout(_LOCK_WAIT_SECONDS):
            await server.locks.exclude(shard)
    except TimeoutError:
        raise ShardBlocked(f"the row of shard {shard} was not had", shard) from None
    try:
        if client is not None and client.state == "killed":
            raise TablesMissing("the session has ended with its client")
        return await work()
    finally:
        server.locks.free_exclusive(shard)


async def _write_row(world: World, server: SimDatabase, row: ShardRow) -> None:
    await asyncio.sleep(server.log(RowChanges(), world.schema, {row.shard: row}))
    server.show(RowChanges(), {row.shard: row})


async def rename_copy(session: SimSession, row: ShardRow, *, deadline: float) -> None:
    shard = row.shard

    def rename(rows: Rows) -> None:
        copy = rows.incoming[shard]
        rows.write(changes_of(copy.tables))
        rows.shards[shard] = row
        copy.tables, copy.is_renamed = {}, True

    async def work() -> None:
        _copy_at(session.server, shard)
        if shard in session.server.truth.shards:
            raise OperatorError(f"{session.server.name} has tables of shard {shard} already")
        await session.server.execute(rename, shard)

    await session.do(work, deadline)


async def rename_back(session: SimSession, shard: int, *, deadline: float) -> None:
    def rename(rows: Rows) -> None:
        copy = rows.incoming[shard]
        copy.tables, copy.is_renamed = tables_of(rows.of_shard(shard)), False
        rows.forget(shard)

    async def work() -> None:
        _copy_at(session.server, shard)
        if shard in session.server.truth.shards:
            await session.server.execute(rename, shard)

    await session.do(work, deadline)


async def mark_moved(world: World, session: SimSession, shard: int, target: str, *, deadline: float) -> None:
    since = unix_ms(world.loop.now) // 1000

    async def work() -> None:
        rows = session.server.truth
        if shard in rows.shards and shard not in rows.moved_away:
            await session.server.execute(lambda rows: rows.moved_away.update({shard: (target, since)}), shard)

    await session.do(work, deadline)


async def moved_since(world: World, session: SimSession, shard: int, *, deadline: float) -> tuple[str, int]:
    def look(server: SimDatabase) -> tuple[str, int]:
        target, since = server.rows.moved_away.get(shard, ("", 0))
        return target, unix_ms(world.loop.now) // 1000 - since if target else 0

    return await session.run(look, deadline)
