"""What reaches the servers of a tier: their own counters, which begin anew with a process, and the statements that
reach their database."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, Self

import aiomysql

from loadtest.target import Target
from tao.admin.server_stats import server_stats
from tao.model.errors import Unavailable


class Counts(NamedTuple):
    """The counters of one server since its start, or the increase of those of many."""

    hits: int = 0
    misses: int = 0
    fetches: int = 0
    """Fetches that it began: a follower at its leaders, a leader at its databases."""

    @property
    def queries(self) -> int:
        """All queries that reached it."""
        return self.hits + self.misses


async def counts_of(admins: Mapping[str, str], *, may_restart: bool = False) -> dict[str, Counts]:
    """Return the counters by server. Raises `Unavailable` for a server that does not answer; one that ``may_restart``
    is left out."""
    found = {}
    for name, admin in admins.items():
        try:
            stats = await server_stats(admin)
        except Unavailable:
            if not may_restart:
                raise
            continue
        found[name] = Counts(stats["hits"], stats["misses"], stats["fills"]["started"])
    return found


def increase(before: Mapping[str, Counts], now: Mapping[str, Counts]) -> Counts:
    """Return what these servers have counted since; one that is below its last count has begun anew."""
    total = Counts()
    for name, counts in now.items():
        last = before.get(name, Counts())
        if counts.queries < last.queries:
            last = Counts()
        total = Counts(*(sum_ + new - old for sum_, new, old in zip(total, counts, last, strict=True)))
    return total


class Statements:
    """The statements of a database, by one administrative connection. `Any`: aiomysql has no types. Methods raise
    `pymysql.err.MySQLError`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    @asynccontextmanager
    async def of(cls, target: Target) -> AsyncIterator[Self | None]:
        """Connect to the first database; yields None for a running cluster, whose databases cannot be queried."""
        if target.database is None:
            yield None
            return
        account = target.database.accounts.administrator
        connection = await aiomysql.connect(
            host=target.database.host,
            port=target.database.port,
            user=account.user,
            password=account.password,
            autocommit=True,
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

    async def log_anew(self) -> None:
        """Make the server write every statement into a table, from which they are counted, and empty that table; this
        costs the server some speed."""
        await self._rows("SET GLOBAL log_output = 'TABLE'")
        await self._rows("SET GLOBAL general_log = 1")
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
