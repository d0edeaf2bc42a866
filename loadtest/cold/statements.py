"""The statements that reach a database: exactly those that name a key, and the number of all SELECTs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Self

import aiomysql

from tao.devcluster.database import DatabaseInstance


class Statements:
    """One administrative connection. `Any`: aiomysql has no types. Methods raise `pymysql.err.MySQLError`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def of(cls, database: DatabaseInstance) -> AsyncIterator[Self]:
        """Yield a connection to the server."""
        account = database.accounts.administrator
        connection = await aiomysql.connect(
            host=database.host, port=database.port, user=account.user, password=account.password, autocommit=True
        )
        try:
            yield cls(connection)
        finally:
            await connection.ensure_closed()

    async def selects(self) -> int:
        """Return the number of SELECTs that the server has executed since it started, for any client; this query is not
        one."""
        ((_, value),) = await self._rows("SHOW GLOBAL STATUS LIKE 'Com_select'")
        return int(value)

    async def log_all(self) -> None:
        """Make the server write every statement into a table, from which they are counted; this costs the server some
        speed."""
        await self._rows("SET GLOBAL log_output = 'TABLE'")
        await self._rows("SET GLOBAL general_log = 1")

    async def forget(self) -> None:
        """Empty that table."""
        await self._rows("TRUNCATE mysql.general_log")

    async def naming(self, key: int) -> int:
        """Return the number of logged statements that name the number ``key``."""
        ((count,),) = await self._rows(
            "SELECT COUNT(*) FROM mysql.general_log WHERE command_type IN ('Query', 'Execute') "
            "AND thread_id <> CONNECTION_ID() AND argument LIKE %s",
            (f"%{key:d}%",),
        )
        return int(count)

    async def _rows(self, statement: str, values: tuple[str, ...] = ()) -> Any:
        async with self._connection.cursor() as cursor:
            await cursor.execute(statement, values)
            return await cursor.fetchall()
