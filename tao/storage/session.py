"""One connection to a database server: statements with bound values, several in a packet, under a deadline.

A session that is interrupted (deadline, cancellation, a protocol fault) closes its connection, because nothing can
match what the server would still send. A statement that the server refuses leaves the connection open.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from struct import Struct
from types import TracebackType
from typing import Any, Final

from pymysql.constants import FIELD_TYPE

from tao.model.errors import DeadlineExceeded, TaoError
from tao.storage.dialect import Dialect, SessionSetup, dialect_of
from tao.storage.failures import ConnectionLost, translate
from tao.storage.result_packets import Columns, Row
from tao.storage.server_connection import ServerConnection
from tao.storage.tls import DatabaseTls, SessionConnection

_EXECUTE: Final = Struct("<IBI")
"""The number of a prepared statement, no cursor, and how often it is executed."""
_BYTES_TYPE: Final = bytes((FIELD_TYPE.BLOB, 0))
MAX_PARAMETERS: Final = 65_535
"""The most values of a prepared statement."""
_ROWS_PER_TURN: Final = 256
"""Rows converted before the loop runs other tasks: about a millisecond (6,000 at once block it for 17 ms)."""


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """The address of a database server and the account to use. ``socket`` takes precedence over ``host:port``."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    socket: str
    tls: DatabaseTls | None
    """How connections are encrypted; None: they are plain, as those by a Unix socket always are. It has no default, so
    that nobody forgets it."""

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the context of a new connection; None: it is plain."""
        return None if self.tls is None or self.socket else self.tls.context()

    @property
    def address(self) -> str:
        """The address for messages."""
        return self.socket or f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class PackedInsert:
    """A prepared INSERT of a session.

    A row of a SELECT is packed as the values of its columns, each behind its length. The values of a prepared statement
    are packed in the same way when all are declared to be bytes, which the server converts to the types of the columns.
    So rows pass from server to server without being parsed, quoted or made into text. A NULL is packed differently."""

    rows: int
    head: bytes
    """What comes before the rows in the packet."""

    @classmethod
    def of(cls, statement: int, rows: int, columns: int) -> PackedInsert:
        """Return the insert with the server's number of the statement."""
        values = rows * columns
        no_nulls = bytes((values + 7) // 8)
        head = b"".join((_EXECUTE.pack(statement, 0, 1), no_nulls, b"\1", _BYTES_TYPE * values))
        return cls(rows, head)


class _Guard:
    """Guards each use of a connection: translates errors, and closes the connection after anything but a refusal."""

    __slots__ = ("_connection", "_locking", "_server")

    def __init__(self, connection: ServerConnection, server: str, locking: bool) -> None:
        self._connection = connection
        self._server = server
        self._locking = locking

    def __enter__(self) -> None:
        if not self._connection.is_open:
            raise self.closed()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if not isinstance(error, Exception):
            self._connection.close()
            return
        raise self.failure_of(error) from error

    def closed(self) -> ConnectionLost:
        """Return the error of a use of a connection that is closed."""
        return ConnectionLost(f"database server {self._server}: the connection is closed")

    def failure_of(self, error: Exception) -> TaoError:
        """Return what an error of the connection means to its user, and close it after anything but a refusal."""
        if isinstance(error, TimeoutError):
            self._connection.close()
            return DeadlineExceeded(f"database server {self._server}: no answer within the time allowed")
        # The driver may raise anything when a connection breaks: AttributeError for a dropped stream, RuntimeError from
        # uvloop's transport. The connection's state is unknown then, and it must not be used again.
        failure = translate(error, self._server, locking=self._locking)
        if isinstance(failure, ConnectionLost):
            self._connection.close()
        return failure


class DatabaseSession:
    """A connection for one task at a time, made by `open_session`."""

    __slots__ = ("_connection", "_guard", "dialect", "idle_since")

    def __init__(self, connection: ServerConnection, server: str, locking: bool) -> None:
        self._connection = connection
        self._guard = _Guard(connection, server, locking)
        self.dialect: Dialect = dialect_of(connection.server_version)
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """False once the connection is closed, from either side."""
        return self._connection.is_open

    @property
    def committed_gtid(self) -> str:
        """The GTID of the transaction that the last statements committed; empty where the server named none."""
        return self._connection.committed_gtid

    @property
    def thread_id(self) -> int:
        """The server's number for the connection."""
        return self._connection.thread_id

    def abort(self) -> None:
        """Close at once, also in the middle of a statement; the server rolls back what was open and logs an aborted
        connection."""
        self._connection.close()

    def quit(self) -> None:
        """Close between two statements, in the way that the server expects; it rolls back what was open."""
        if self.is_open:
            self._connection.quit()

    async def run(
        self,
        sql: str,
        arguments: Sequence[object] = (),
        *,
        deadline: float,
        results: list[list[Row]] | None = None,
        columns: Columns | None = None,
    ) -> list[list[Row]]:
        """Run all statements in ``sql`` and return the rows of each. ``deadline`` is in the loop's time. ``columns``:
        those of each result that has rows, when they are known.

        ``results``: a list that receives them one by one, for a caller that needs to know how many statements ran
        before one was refused. For results of at most some thousand rows. Raises `DeadlineExceeded`, `ConnectionLost`,
        `ShardBlocked`, or another `TaoError` for what the server refused.
        """
        connection = self._connection
        results = [] if results is None else results
        with self._guard:
            connection.send(sql, arguments, columns)
            await connection.results(results, deadline)
        return results

    async def named(self, sql: str, *, deadline: float) -> list[dict[str, Any]]:
        """Return the rows of one statement by column name, for SHOW, whose columns differ between versions.

        Raises as `run` does. `Any`: see `Row`.
        """
        (rows,) = await self.named_results(sql, deadline=deadline)
        return rows

    async def named_results(self, sql: str, *, deadline: float) -> list[list[dict[str, Any]]]:
        """Run all statements in ``sql`` and return the rows of each by column name. Raises as `run` does."""
        connection = self._connection
        results: list[list[dict[str, Any]]] = []
        with self._guard:
            connection.send(sql, ())
            while not results or connection.has_next:
                rows: list[Row] = []
                names: tuple[str, ...] = ()
                if await connection.head(deadline):
                    names = connection.column_names
                    await connection.rows(rows, sys.maxsize, deadline)
                results.append([dict(zip(names, row, strict=True)) for row in rows])
        return results

    async def stream(
        self,
        sql: str,
        arguments: Sequence[object],
        on_rows: Callable[[list[Row]], None],
        *,
        deadline: float,
        columns: Columns | None = None,
        on_check: Callable[[list[Row]], None] | None = None,
    ) -> None:
        """Pass the rows of one SELECT to ``on_rows`` in chunks, and let the loop run between them. ``columns``: the
        result's columns, when they are known. ``on_check`` takes the rows of a second SELECT in ``sql``,
        and is not called where the server does not answer it. Raises as `run` does."""
        connection = self._connection
        rows: list[Row] = []
        with self._guard:
            connection.send(sql, arguments, columns)
            is_at_end = not await connection.head(deadline) or await connection.rows(rows, _ROWS_PER_TURN, deadline)
        while True:
            try:
                on_rows(rows)
                if is_at_end and (on_check is None or not connection.has_next):
                    return
                if not is_at_end:
                    await asyncio.sleep(0)
            except BaseException:
                self.abort()  # unread rows are left on the connection
                raise
            rows = []
            with self._guard:
                if is_at_end and on_check is not None:
                    on_rows, on_check = on_check, None
                    await connection.head(deadline)
                is_at_end = await connection.rows(rows, _ROWS_PER_TURN, deadline)

    async def select_packed(self, sql: str, *, deadline: float) -> None:
        """Begin with one SELECT whose rows `take_packed` returns. Raises as `run` does."""
        with self._guard:
            self._connection.send(sql, ())
            await self._connection.head(deadline)

    async def take_packed(self, limit: int, *, deadline: float) -> tuple[list[bytes], bool]:
        """Return the next rows of `select_packed`, at most ``limit`` of them, and whether they are the last ones.

        Each row is as the server has packed it: `PackedInsert` takes it, and it is never parsed. The server waits while
        nobody takes the rows. Raises as `run` does."""
        rows: list[bytes] = []
        with self._guard:
            is_at_end = await self._connection.packed_rows(rows, limit, deadline)
        return rows, is_at_end

    async def prepare_insert(self, table: str, columns: Sequence[str], rows: int, *, deadline: float) -> PackedInsert:
        """Prepare an INSERT of this many rows, which `insert_packed` executes. Raises as `run` does."""
        row = f"({', '.join('?' * len(columns))})"
        sql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES {', '.join([row] * rows)}"  # noqa: S608 - names come from `tao.storage.names` or the server's own tables
        with self._guard:
            statement = await self._connection.prepare(sql, deadline)
        return PackedInsert.of(statement, rows, len(columns))

    async def insert_packed(self, insert: PackedInsert, rows: Sequence[bytes], *, deadline: float) -> None:
        """Insert rows that another server has packed, as many as were prepared. Raises as `run` does."""
        assert len(rows) == insert.rows, "each value has its parameter"
        with self._guard:
            await self._connection.execute(b"".join((insert.head, *rows)), deadline)

    def begin_stream(
        self,
        sql: str,
        arguments: Sequence[object],
        on_rows: Callable[[list[Row]], None],
        on_end: Callable[[TaoError | None], None],
        *,
        deadline: float,
        columns: Columns,
    ) -> None:
        """Do as `stream`, by callbacks and without a task: ``on_end`` is called once, with the error that `stream`
        would raise or None, perhaps before this returns. An error that ``on_rows`` raises ends the stream, too, and
        closes the connection."""
        connection = self._connection

        def take(rows: list[Row]) -> None:
            try:
                on_rows(rows)
            except BaseException:
                self.abort()  # unread rows are left on the connection
                raise

        def end(error: Exception | None) -> None:
            on_end(error if error is None or isinstance(error, TaoError) else self._guard.failure_of(error))

        try:
            if not connection.is_open:
                raise self._guard.closed()
            connection.send(sql, arguments, columns)
        except Exception as error:  # noqa: BLE001 - as in `_Guard`
            end(error)
        else:
            connection.pass_rows(take, end, _ROWS_PER_TURN, deadline)


async def connect(account: ServerAccount, **options: Any) -> Any:
    """Return a connection of aiomysql, with further options of it. Raises what it does. `Any`: it has no types."""
    connection = SessionConnection(
        host=account.host,
        port=account.port,
        unix_socket=account.socket or None,
        user=account.user,
        password=account.password,
        charset="utf8mb4",
        program_name="tao",
        ssl=account.ssl_context(),
        **options,
    )
    await connection._connect()
    return connection


async def open_session(account: ServerAccount, server: str, setup: SessionSetup, *, deadline: float) -> DatabaseSession:
    """Connect and set up. Raises `ConnectionLost` (also when it takes too long), or `OperatorError` when refused."""
    connection: Any = None
    began = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(deadline):
            connection = await connect(account, autocommit=None)
            session = DatabaseSession(ServerConnection(connection), server, setup.writes)
            await session.run(setup.statements(session.dialect), deadline=deadline)
            return session
    except TimeoutError as error:
        _close(connection)
        waited = f"{max(0.0, deadline - began):.1f} s"
        raise ConnectionLost(
            f"database server {server} at {account.address} did not answer a new connection within {waited}"
        ) from error
    except TaoError as error:
        _close(connection)
        if isinstance(error, DeadlineExceeded):
            raise ConnectionLost(error.message) from error
        raise
    except Exception as error:  # as in `_Guard`
        _close(connection)
        raise translate(error, f"{server} at {account.address}", locking=False) from error
    except BaseException:
        _close(connection)
        raise


def _close(connection: Any) -> None:
    if connection is not None:
        connection.close()
