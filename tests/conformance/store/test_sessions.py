"""A session reads the same results as the driver alone, and keeps or closes its connection as it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiomysql
import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.errors import DeadlineExceeded, OperatorError, TaoError
from tao.model.rows import RowChanges, WriteKeys
from tao.replication.server_statements import DatabaseProcess, server_processes
from tao.storage.dialect import Dialect
from tao.storage.failures import ConnectionLost
from tao.storage.pools import Pool, PoolSettings
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession, ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP
from tests.conformance.store.stores import LIKES, SERVER, SHARDS, MakePools, Stores, list_of, new_id
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [
    pytest.mark.database,
    # The driver asks for a statement's warnings and raises them; a session ignores them.
    pytest.mark.filterwarnings("ignore::pymysql.err.Warning"),
]

_TABLE = """CREATE TEMPORARY TABLE tao_sessions.kinds (
    number BIGINT UNSIGNED, small TINYINT, ratio DOUBLE, single FLOAT, exact DECIMAL(20, 5), flags BIT(9), year YEAR,
    day DATE, at DATETIME(6), stamp TIMESTAMP NULL, clock TIME(3), word VARCHAR(100), fixed CHAR(5), bin VARBINARY(300),
    text_ MEDIUMTEXT, blob_ MEDIUMBLOB, one_of ENUM('a', 'b'), some_of SET('a', 'b'), document JSON)"""

_ROWS = """INSERT INTO tao_sessions.kinds VALUES
    (18446744073709551615, -128, 1e300, 0.5, -12.34567, b'101010101', 2026, '2026-11-22', '2026-11-22 01:02:03.456789',
     '2026-11-22 01:02:03', '-838:59:58.999', 'gr\u00fc\u00df \U0001f98a', 'a', x'00ff27', 'text', x'fe00', 'b',
     'a,b', '{"a": [1, null]}'),
    (0, 127, -0.0, 1, 0, b'0', 1970, '0001-01-01', '9999-12-31 23:59:59.999999', NULL, '00:00:00', '', '', '', '', '',
     'a', '', 'null'),
    (NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL),
    (1, 2, 3, 4, 5, 6, 2007, '2008-01-01', '2009-01-01', NULL, '1:2:3', REPEAT('x', 100), 'y', REPEAT(x'fb', 250),
     REPEAT('t', 251), REPEAT(x'fe', 70000), NULL, NULL, '[]')"""

_ANSWERS = [
    _TABLE,
    _ROWS,
    "SELECT * FROM tao_sessions.kinds",
    "SELECT * FROM tao_sessions.kinds WHERE number = 5",
    "SELECT COUNT(*), SUM(exact), MAX(bin), NULL FROM tao_sessions.kinds",
    "SELECT 1; UPDATE tao_sessions.kinds SET small = 3; SELECT 2, small FROM tao_sessions.kinds; DO 1; SELECT 3",
    "SELECT CAST('12x' AS UNSIGNED), 1 / 0",  # warnings
    "WITH RECURSIVE n AS (SELECT 1 seq UNION ALL SELECT seq + 1 FROM n WHERE seq < 900) SELECT * FROM n",
    "SELECT 1; SELECT * FROM tao_sessions.none; SELECT 2",
    "SELEC",
    "SELECT id1 + 1, '' AS `` FROM (SELECT 18446744073709551615 AS id1) t",  # an overflow, or an unknown name
    "SHOW VARIABLES LIKE 'sql_mode'",
    "DROP TEMPORARY TABLE tao_sessions.kinds",
]


_IDLE = DatabaseProcess(0, "", "", "")


def _root(server: DatabaseInstance) -> ServerAccount:
    return ServerAccount("127.0.0.1", server.port, "root", "", str(server.socket_path), tls=None)


def _soon() -> float:
    return asyncio.get_running_loop().time() + 60


@asynccontextmanager
async def opened(account: ServerAccount) -> AsyncIterator[DatabaseSession]:
    session = await open_session(account, SERVER, WRITE_SETUP, deadline=_soon())
    try:
        yield session
    finally:
        session.abort()


@asynccontextmanager
async def driver(account: ServerAccount, session: DatabaseSession) -> AsyncIterator[Any]:
    connection = await aiomysql.connect(
        unix_socket=account.socket, user=account.user, charset="utf8mb4", autocommit=None
    )
    async with connection.cursor() as cursor:
        for statement in WRITE_SETUP.statements(session.dialect).split("; "):
            await cursor.execute(statement)
        yield cursor
    connection.close()


async def _by_driver(cursor: Any, sql: str) -> object:
    try:
        await cursor.execute(sql, ())
        results = [list(await cursor.fetchall())]
        while await cursor.nextset():
            results.append(list(await cursor.fetchall()))
    except Exception as error:  # noqa: BLE001 - which one is what is compared
        return error.args[0]
    return [[[(type(value), value) for value in row] for row in rows] for rows in results]


async def _by_session(session: DatabaseSession, sql: str) -> object:
    try:
        results = await session.run(sql, (), deadline=_soon())
    except TaoError as error:
        cause: Any = error.__cause__
        return cause.args[0]
    return [[[(type(value), value) for value in row] for row in rows] for rows in results]


async def test_a_session_reads_what_the_driver_reads(database_server: DatabaseInstance) -> None:
    root = _root(database_server)
    async with opened(root) as session, driver(root, session) as cursor:
        await session.run("CREATE DATABASE tao_sessions", deadline=_soon())
        try:
            for sql in _ANSWERS:
                assert await _by_session(session, sql) == await _by_driver(cursor, sql), sql
                assert session.is_open
            by_name = await session.named("SHOW VARIABLES LIKE 'sql_mode'", deadline=_soon())
            assert [set(row) for row in by_name] == [{"Variable_name", "Value"}]
        finally:
            await session.run("DROP DATABASE tao_sessions", deadline=_soon())


async def test_connections_are_listed_whatever_their_statements_hold(database_server: DatabaseInstance) -> None:
    root = _root(database_server)
    async with opened(root) as session, opened(root) as busy:
        working = asyncio.create_task(busy.run("SELECT SLEEP(60), %s", (b"\x82\xfe",), deadline=_soon()))
        processes: dict[int, DatabaseProcess] = {}
        while not processes.get(busy.thread_id, _IDLE).state:
            processes = {each.thread: each for each in await server_processes(session, deadline=_soon())}
        assert (processes[busy.thread_id].user, processes[busy.thread_id].command) == ("root", "Query")
        assert session.thread_id in processes
        await session.run("KILL %s", (busy.thread_id,), deadline=_soon())
        with pytest.raises(ConnectionLost):
            await working


async def test_values_are_bound_as_the_driver_binds_them(database_server: DatabaseInstance) -> None:
    values = (0, -1, 2**64 - 1, True, None, "it's \\ 100 % \U0001f98a", bytes(range(256)), [1, 2], [b"'", "x"], 0.5)
    sql = "SELECT %s, %s, %s, %s, %s, %s, %s, (1 IN %s), ('x' IN %s), %s, '%%'"
    root = _root(database_server)
    async with opened(root) as session, driver(root, session) as cursor:
        await cursor.execute(sql, values)
        assert await session.run(sql, values, deadline=_soon()) == [list(await cursor.fetchall())]


async def test_rows_and_commands_larger_than_a_packet_are_whole(database_server: DatabaseInstance) -> None:
    root = _root(database_server)
    size = 17 << 20
    async with opened(root) as setting:
        ((before,),) = (await setting.run("SELECT @@GLOBAL.max_allowed_packet", deadline=_soon()))[0]
        await setting.run("SET GLOBAL max_allowed_packet = %s", (64 << 20,), deadline=_soon())
        try:
            async with opened(root) as session:
                ((number, data, last),) = (
                    await session.run(f"SELECT 7, REPEAT(x'fe', {size}), 'end'", deadline=_soon())
                )[0]
                assert (number, len(data), set(data), last) == (7, size, {0xFE}, "end")
                sent = b"x" * size
                assert await session.run("SELECT LENGTH(%s), 8", (sent,), deadline=_soon()) == [[(size, 8)]]
                assert session.is_open
        finally:
            await setting.run("SET GLOBAL max_allowed_packet = %s", (before,), deadline=_soon())


_MANY = "SELECT 1, REPEAT('x', 1000) FROM information_schema.collations a, information_schema.collations b"


async def test_rows_come_in_chunks_and_the_loop_has_its_turn_between_them(database_server: DatabaseInstance) -> None:
    turns = [0]

    async def turn() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    chunks: list[tuple[int, int]] = []
    async with opened(_root(database_server)) as session:
        other = asyncio.create_task(turn())
        await session.stream(
            f"{_MANY} LIMIT 5000", (), lambda rows: chunks.append((len(rows), turns[0])), deadline=_soon()
        )
        other.cancel()
        assert sum(count for count, _ in chunks) == 5000
        assert len({at for _, at in chunks}) == len(chunks)
        assert await session.run("SELECT 1", deadline=_soon()) == [[(1,)]]


async def test_an_error_in_the_middle_of_a_result_is_that_error_and_leaves_the_connection(
    database_server: DatabaseInstance,
) -> None:
    rows: list[Row] = []
    async with opened(_root(database_server)) as session:
        if session.dialect is Dialect.MARIADB:
            await session.run("SET max_statement_time = 0.2", deadline=_soon())
        else:
            await session.run("SET max_execution_time = 200", deadline=_soon())
        with pytest.raises(TaoError) as refused:
            await session.stream(f"{_MANY}, information_schema.collations c", (), rows.extend, deadline=_soon())
        cause: Any = refused.value.__cause__
        assert cause.args[0] in (1969, 3024)
        assert rows
        assert session.is_open
        assert await session.run("SELECT 2", deadline=_soon()) == [[(2,)]]


@pytest.mark.parametrize("way", ["cancelled", "past its deadline", "by a bug"])
async def test_a_reader_that_stops_in_the_middle_of_a_result_closes_the_connection(
    database_server: DatabaseInstance, way: str
) -> None:
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()

    def take(rows: list[Row]) -> None:
        begun.set()
        if way == "by a bug":
            raise LookupError

    async with opened(_root(database_server)) as session:
        deadline = loop.time() + (0.5 if way == "past its deadline" else 60)
        task = asyncio.create_task(
            session.stream(f"{_MANY}, information_schema.collations c", (), take, deadline=deadline)
        )
        await begun.wait()
        if way == "cancelled":
            task.cancel()
        with pytest.raises({"cancelled": asyncio.CancelledError, "by a bug": LookupError}.get(way, DeadlineExceeded)):
            await task
        assert not session.is_open
        with pytest.raises(ConnectionLost):
            await session.run("SELECT 1", deadline=_soon())


@asynccontextmanager
async def cut_after(server_port: int, size: int) -> AsyncIterator[int]:
    """A connection to the server that ends once so many bytes have come from it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", server_port)

        async def forward() -> None:
            while chunk := await reader.read(65_536):
                to_server.write(chunk)

        forwarding = asyncio.create_task(forward())
        left = size
        while left and (chunk := await from_server.read(min(left, 65_536))):
            writer.write(chunk)
            left -= len(chunk)
        forwarding.cancel()
        to_server.close()
        writer.close()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()


async def test_a_server_that_goes_in_the_middle_of_a_result_is_a_lost_connection(
    database_server: DatabaseInstance,
) -> None:
    account = database_server.accounts.reader
    for size in (3_000, 500_000):
        async with (
            cut_after(database_server.port, size) as port,
            opened(ServerAccount("127.0.0.1", port, account.user, account.password, socket="", tls=None)) as session,
        ):
            with pytest.raises(ConnectionLost, match="Lost connection"):
                await session.run(_MANY, deadline=_soon())
            assert not session.is_open


async def test_a_connection_that_the_server_has_ended_is_closed_before_it_is_used(
    database_server: DatabaseInstance,
) -> None:
    root = _root(database_server)
    async with opened(root) as session, opened(root) as other:
        await other.run("KILL CONNECTION %s", (session.thread_id,), deadline=_soon())
        async with asyncio.timeout(PATIENT_SECONDS):
            while session.is_open:  # noqa: ASYNC110 - the state is the condition
                await asyncio.sleep(0.01)
        with pytest.raises(ConnectionLost):
            await session.run("SELECT 1", deadline=_soon())


async def test_a_connection_that_ends_during_a_query_is_lost(database_server: DatabaseInstance) -> None:
    root = _root(database_server)
    async with opened(root) as session, opened(root) as other:
        asked = asyncio.create_task(session.run("SELECT SLEEP(60)", deadline=_soon()))
        query = "SELECT 1 FROM information_schema.processlist WHERE id = %s AND info LIKE '%%SLEEP%%'"
        thread = (session.thread_id,)
        while not (await other.run(query, thread, deadline=_soon()))[0]:  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.01)
        await other.run("KILL CONNECTION %s", (session.thread_id,), deadline=_soon())
        with pytest.raises(ConnectionLost):
            await asked
        assert not session.is_open


async def test_a_refusal_of_one_statement_leaves_nothing_unread(database_server: DatabaseInstance) -> None:
    async with opened(_root(database_server)) as session:
        for _ in range(3):
            with pytest.raises(OperatorError):
                await session.run("SELECT 1; SELECT * FROM mysql.none; SELECT 2", deadline=_soon())
            assert await session.run("SELECT %s", (5,), deadline=_soon()) == [[(5,)]]


async def test_a_pool_drops_connections_that_are_idle_as_the_server_expects(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    """The server counts a connection that ends without a farewell as aborted, and logs it."""
    loop = asyncio.get_running_loop()

    async def status(name: str) -> int:
        login = migrated.accounts.administrator
        watcher = await aiomysql.connect(
            host=migrated.host, port=migrated.port, user=login.user, password=login.password
        )
        async with watcher.cursor() as cursor:
            await cursor.execute(f"SHOW GLOBAL STATUS LIKE '{name}'")
            value = int((await cursor.fetchone())[1])
        await watcher.ensure_closed()
        return value

    async def use(pool: Pool, *, fresh: bool = False) -> None:
        async with pool.session(deadline=loop.time() + 30, fresh=fresh) as session:
            await session.run("SELECT 1", deadline=loop.time() + 30)

    connected, aborted = await status("Threads_connected"), await status("Aborted_clients")
    pool = make_pools(writes=True, settings=PoolSettings(idle_seconds=0.001)).of(SERVER)
    await use(pool)
    await asyncio.sleep(0.002)  # the connection is too old for the next use
    await use(pool)
    await use(pool, fresh=True)

    async def fail_between_statements() -> None:
        async with pool.session(deadline=loop.time() + 30, fresh=True) as session:
            await session.run("START TRANSACTION", deadline=loop.time() + 30)
            raise LookupError("a bug of the caller")

    with pytest.raises(LookupError):
        await fail_between_statements()
    await use(pool)
    await pool.close()
    async with asyncio.timeout(PATIENT_SECONDS):
        while await status("Threads_connected") > connected:
            pass
    assert await status("Aborted_clients") == aborted


async def test_the_answer_to_a_commit_names_the_gtid_of_what_was_committed(
    migrated: DatabaseInstance, stores: Stores
) -> None:
    async def commit(changes: RowChanges) -> str:
        async with stores.write.transaction(SERVER, timeout_seconds=PATIENT_SECONDS) as transaction:
            await transaction.lock_and_read(SHARDS, WriteKeys())
            await transaction.apply(changes)
            return await transaction.commit()

    async def is_newest(gtid: str) -> bool:
        async with opened(_root(migrated)) as session:
            if session.dialect is Dialect.MARIADB:
                ((position,),) = (await session.run("SELECT @@global.gtid_binlog_pos", deadline=_soon()))[0]
                return bool(position == gtid)
            ((executed,),) = (await session.run("SELECT @@global.gtid_executed", deadline=_soon()))[0]
            source, _, number = gtid.partition(":")
            return f"{source}:1-{number}" in executed.split(",")

    first = list_of(new_id(), LIKES, [])
    one = await commit(first)
    assert await is_newest(one)
    assert await commit(RowChanges()) == "", "nothing was committed, and the GTID before is not its"
    assert await commit(first) == "", "the rows are the same as before"
    other = await commit(list_of(new_id(), LIKES, []))
    assert other != one
    assert await is_newest(other)
