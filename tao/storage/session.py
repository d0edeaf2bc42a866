"""One connection to a database server: statements with bound values, several in a packet, under a deadline.

A session that is interrupted in any way (deadline, cancellation, a protocol fault) closes its connection, because what
the server would still send belongs to nobody. A statement that the server refuses leaves it open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import aiomysql

from tao.model.errors import DeadlineExceeded, TaoError
from tao.storage.dialect import Dialect, SessionSetup, dialect_of
from tao.storage.failures import ConnectionLost, translate

Row = tuple[Any, ...]
"""A row as the driver decodes it: int, bytes, str or None by column, which no type checker can know."""

_ROWS_PER_TURN: Final = 256
"""Rows converted before the loop gets its turn: about a millisecond (6,000 in one go hold it for 17)."""


@dataclass(frozen=True, slots=True)
class ServerAccount:
    """Where a database server is and as whom to come in. ``socket`` wins over ``host:port`` when it is given."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    socket: str = ""

    @property
    def address(self) -> str:
        """For messages."""
        return self.socket or f"{self.host}:{self.port}"


# Both pass over warnings: a SHOW WARNINGS between the results of one packet would break the protocol, and strict mode
# has made errors of those that matter.
class _BufferedCursor(aiomysql.Cursor):  # type: ignore[misc]  # aiomysql has no types
    async def _show_warnings(self, conn: object) -> None:
        return


class _StreamingCursor(aiomysql.SSCursor):  # type: ignore[misc]  # aiomysql has no types
    """Rows come as they are asked for; of the first result only, which is why `Session.run` is another method."""

    async def _show_warnings(self, conn: object) -> None:
        return


class Session:
    """Made by `open_session`; used by one task at a time."""

    __slots__ = ("_connection", "_locking", "_server", "dialect", "idle_since")

    def __init__(self, connection: Any, server: str, locking: bool) -> None:
        self._connection = connection  # Any: aiomysql has no types
        self._server = server
        self._locking = locking
        self.dialect: Dialect = dialect_of(connection.get_server_info())
        self.idle_since = 0.0

    @property
    def is_open(self) -> bool:
        """False once the connection is closed, whoever closed it here."""
        return not self._connection.closed

    @property
    def thread_id(self) -> int:
        """The server's number for the connection."""
        return int(self._connection.thread_id())

    def abort(self) -> None:
        """Close at once; the server rolls back what was open."""
        self._connection.close()

    async def quit(self) -> None:
        """Say good-bye and close."""
        if self.is_open:
            try:
                await self._connection.ensure_closed()
            except OSError:
                self.abort()  # the peer was gone before us

    async def run(self, sql: str, arguments: Sequence[object] = (), *, deadline: float) -> list[list[Row]]:
        """The results of all statements in ``sql``, rows of each. ``deadline`` is in the loop's time.

        For results of at most some thousand rows. Raises `DeadlineExceeded`, `ConnectionLost`, `ShardBlocked`, or
        another `TaoError` for what the server refused.
        """
        async with self._guarded(deadline):
            cursor = await self._connection.cursor(_BufferedCursor)
            # An empty tuple would still have the driver look for percent signs, as it should: one rule for all.
            await cursor.execute(sql, tuple(arguments))
            results = [list(await cursor.fetchall() if cursor.description else ())]
            while await cursor.nextset():
                results.append(list(await cursor.fetchall() if cursor.description else ()))
            return results

    async def named(self, sql: str, *, deadline: float) -> list[dict[str, Any]]:
        """The rows of one statement by column name: for SHOW, whose columns differ from version to version.

        Raises as `run` does. `Any`: see `Row`.
        """
        async with self._guarded(deadline):
            cursor = await self._connection.cursor(_BufferedCursor)
            await cursor.execute(sql, ())
            names = [column[0] for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in await cursor.fetchall()]

    async def stream(
        self, sql: str, arguments: Sequence[object], on_rows: Callable[[list[Row]], None], *, deadline: float
    ) -> None:
        """Hand out the rows of one SELECT in chunks; the loop gets a turn between them. Raises as `run` does."""
        async with self._guarded(deadline):
            cursor = await self._connection.cursor(_StreamingCursor)
            await cursor.execute(sql, tuple(arguments))
            rows = await cursor.fetchmany(_ROWS_PER_TURN)
        while True:
            try:
                on_rows(rows)
                if len(rows) < _ROWS_PER_TURN:
                    return
                await asyncio.sleep(0)
            except BaseException:
                self.abort()  # rows are left unread
                raise
            async with self._guarded(deadline):
                rows = await cursor.fetchmany(_ROWS_PER_TURN)

    @asynccontextmanager
    async def _guarded(self, deadline: float) -> AsyncIterator[None]:
        """Errors become ours; after anything but a refusal by the server the connection is closed."""
        if not self.is_open:
            raise ConnectionLost(f"database server {self._server}: the connection is closed")
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError as error:
            self.abort()
            raise DeadlineExceeded(f"database server {self._server}: no answer within the time allowed") from error
        except Exception as error:
            # Whatever the driver fails with when a connection goes under its hands: AttributeError of a stream that it
            # has dropped, RuntimeError of uvloop's transport. Its state is unknown then, and nobody may use it again.
            failure = translate(error, self._server, locking=self._locking)
            if isinstance(failure, ConnectionLost):
                self.abort()
            raise failure from error
        except BaseException:
            self.abort()
            raise


async def open_session(
    account: ServerAccount, server: str, setup: SessionSetup, *, deadline: float, schema: str | None = None
) -> Session:
    """Connect and set up. Raises `ConnectionLost` (also when it takes too long), or `OperatorError` when refused."""
    connection: Any = None
    try:
        async with asyncio.timeout_at(deadline):
            connection = await aiomysql.connect(
                host=account.host,
                port=account.port,
                unix_socket=account.socket or None,
                user=account.user,
                password=account.password,
                db=schema,
                charset="utf8mb4",
                autocommit=None,
                program_name="tao",
            )
            session = Session(connection, server, setup.writes)
            await session.run(setup.statements(session.dialect), deadline=deadline)
            return session
    except TimeoutError as error:
        _close(connection)
        raise ConnectionLost(f"database server {server} at {account.address} did not answer in time") from error
    except TaoError as error:
        _close(connection)
        if isinstance(error, DeadlineExceeded):
            raise ConnectionLost(error.message) from error
        raise
    except Exception as error:  # as in `Session._guarded`
        _close(connection)
        raise translate(error, f"{server} at {account.address}", locking=False) from error
    except BaseException:
        _close(connection)
        raise


def _close(connection: Any) -> None:
    if connection is not None:
        connection.close()
