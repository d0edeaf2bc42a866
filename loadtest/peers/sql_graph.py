"""The graph in MySQL by hand: tables, indexes and transactions as an application without a graph store would have them.

Four tables of edges (links, marks, and the inverses of both), each with its rows in key order and an index by time;
counters beside the links, because counting rows at every page view does not last. The client is aiomysql or asyncmy,
with a pool of connections. A single statement commits by itself, and a transaction of several is one message, as in
LinkBench's own store for MySQL: every request is one round trip.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from time import time_ns
from typing import Any, Final, TypeVar

import aiomysql
import asyncmy
import asyncmy.errors
import pymysql.err

from loadtest.peers.graph_store import AnswerSource, Edge, SqlAddress, planned_rows
from loadtest.published.contestant import Payloads
from loadtest.published.graph_plan import GraphPlan
from loadtest.rounds import Source

DATABASE: Final = "peer"
LINK_TABLES: Final = ("link", "linked_by")
MARK_TABLES: Final = ("mark", "marked_by")
DRIVERS: Final[dict[str, Callable[..., Awaitable[Any]]]] = {
    "aiomysql": aiomysql.create_pool,
    "asyncmy": asyncmy.create_pool,
}
"""What opens a pool, by driver: the two have the same methods. `Any`: aiomysql has no types."""
SQL_ERRORS: Final = (pymysql.err.MySQLError, asyncmy.errors.MySQLError)
_OPERATIONAL: Final = (pymysql.err.OperationalError, asyncmy.errors.OperationalError)
_DEADLOCK: Final = 1213
_ATTEMPTS: Final = 5
_BATCH: Final = 2000
Result = TypeVar("Result")

_AFTER_LINKS: Final = (
    "INSERT INTO linked_by (id1, id2, time, payload) SELECT id2, id1, time, payload FROM link ORDER BY time",
    "INSERT INTO link_count (id1, count) SELECT id1, COUNT(*) FROM link GROUP BY id1",
)


async def open_pool(address: SqlAddress, connections: int, driver: str = "aiomysql") -> Any:
    """Connect, and create the database if it does not exist. Returns a pool of a driver; `Any`: as for `DRIVERS`."""
    where = {"host": address.host, "port": address.port, "user": address.user, "password": address.password}
    connection = await aiomysql.connect(**where)
    async with connection.cursor() as cursor:
        await cursor.execute(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
    await connection.ensure_closed()
    return await DRIVERS[driver](
        minsize=min(4, connections), maxsize=connections, autocommit=True, db=DATABASE, **where
    )


class SqlGraph:
    """The graph over one pool. Methods raise one of `SQL_ERRORS`; reads record their source, the database."""

    def __init__(self, pool: Any) -> None:
        """``pool`` is a pool of one of `DRIVERS`."""
        self._pool = pool

    async def close(self) -> None:
        """Close all connections."""
        self._pool.close()
        await self._pool.wait_closed()

    async def load(self, plan: GraphPlan, ids: Sequence[int], payloads: Payloads) -> None:
        """Create the tables anew and write the planned graph without the binlog, since nothing replicates it."""
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute("SET SESSION sql_log_bin = 0, sql_notes = 0")
            for statement in _tables():
                await cursor.execute(statement)
            nodes, links = planned_rows(plan, ids, payloads)
            while rows := list(islice(nodes, _BATCH)):
                await cursor.executemany("INSERT INTO node (id, payload) VALUES (%s, %s)", rows)
            while edges := list(islice(links, _BATCH)):
                await cursor.executemany("INSERT INTO link (id1, id2, time, payload) VALUES (%s, %s, %s, %s)", edges)
            for statement in _AFTER_LINKS:
                await cursor.execute(statement)

    async def node(self, object_id: int, asked: AnswerSource) -> bytes | None:
        """Return an object's payload; None when it does not exist."""
        rows = await self._rows("SELECT payload FROM node WHERE id = %s", (object_id,), asked)
        return bytes(rows[0][0]) if rows else None

    async def nodes(self, ids: Sequence[int], asked: AnswerSource) -> list[bytes | None]:
        """Return each object's payload."""
        rows = await self._rows("SELECT id, payload FROM node WHERE id IN %s", (tuple(ids),), asked)
        found = {object_id: bytes(payload) for object_id, payload in rows}
        return [found.get(object_id) for object_id in ids]

    async def count(self, id1: int, asked: AnswerSource) -> int:
        """Return the number of links."""
        rows = await self._rows("SELECT count FROM link_count WHERE id1 = %s", (id1,), asked)
        return int(rows[0][0]) if rows else 0

    async def newest(self, id1: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links."""
        return await self._edges("", (id1,), limit, asked)

    async def between(self, id1: int, high: int, low: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links of a time range."""
        return await self._edges("AND time BETWEEN %s AND %s", (id1, low, high), limit, asked)

    async def among(self, id1: int, id2s: Sequence[int], asked: AnswerSource) -> list[Edge]:
        """Return the links to these nodes."""
        return await self._edges("AND id2 IN %s", (id1, tuple(id2s)), len(id2s), asked)

    async def forget(self, nodes: Sequence[int], links: Sequence[tuple[int, int]]) -> None:
        """Delete these objects and links, which a committed write has changed, from a cache, if there is one."""

    async def put_node(self, object_id: int, payload: bytes) -> None:
        """Add or overwrite an object."""
        await self._transaction([(_PUT_NODE, (object_id, payload))])
        await self.forget([object_id], [])

    async def add_node(self, payload: bytes) -> int:
        """Add an object whose id is the clock's nanoseconds, above every loaded id. Returns the id."""
        object_id = time_ns()
        await self._transaction([(_PUT_NODE, (object_id, payload))])
        return object_id

    async def delete_node(self, object_id: int) -> None:
        """Delete an object."""
        await self._transaction([("DELETE FROM node WHERE id = %s", (object_id,))])
        await self.forget([object_id], [])

    async def put_links(self, links: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Add or overwrite ``(id1, id2, time, payload)``, each with its inverse and the counter, in one transaction."""
        await self._transaction([statement for link in sorted(links) for statement in _put(LINK_TABLES, *link)])
        await self.forget([], [(id1, id2) for id1, id2, *_ in links])

    async def delete_link(self, id1: int, id2: int) -> None:
        """Delete a link with its inverse."""
        await self._transaction(_delete(id1, id2))
        await self.forget([], [(id1, id2)])

    async def mark_link(self, id1: int, id2: int) -> None:
        """Turn a link into a mark."""
        move = (
            "INSERT IGNORE INTO {} (id1, id2, time, payload) SELECT id1, id2, time, payload FROM {} WHERE {} FOR UPDATE"
        )
        moves = [
            (move.format(MARK_TABLES[side], LINK_TABLES[side], "id1 = %s AND id2 = %s"), pair)
            for side, pair in enumerate(((id1, id2), (id2, id1)))
        ]
        await self._transaction([*moves, *_delete(id1, id2)])
        await self.forget([], [(id1, id2)])

    async def _rows(self, statement: str, values: tuple[Any, ...], asked: AnswerSource) -> Any:
        asked.at_least(Source.MISS)
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement, values)
            return await cursor.fetchall()

    async def _edges(self, condition: str, values: tuple[Any, ...], limit: int, asked: AnswerSource) -> list[Edge]:
        statement = (
            f"SELECT id2, time, payload FROM link WHERE id1 = %s {condition} "  # noqa: S608 - conditions of ours
            "ORDER BY time DESC, id2 DESC LIMIT %s"
        )
        return [(id2, at, bytes(payload)) for id2, at, payload in await self._rows(statement, (*values, limit), asked)]

    async def _transaction(self, work: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Run statements in order in one transaction, and again after a deadlock; a statement may depend on those
        before it."""

        statements = [statement for statement, _ in work]
        if len(statements) > 1:
            statements = ["BEGIN", *statements, "COMMIT"]
        message, values = "; ".join(statements), [value for _, of in work for value in of]

        async def attempt() -> None:
            async with self._pool.acquire() as connection, connection.cursor() as cursor:
                try:
                    await cursor.execute(message, values)
                    while await cursor.nextset():  # the server stops at the first statement that fails
                        pass
                except BaseException:
                    await connection.rollback()
                    raise

        await repeat_deadlocked(attempt)


@asynccontextmanager
async def transaction(connection: Any) -> AsyncIterator[None]:
    """Commit what is done in this context, or roll it back. `Any`: as for `DRIVERS`."""
    await connection.begin()
    try:
        yield
    except BaseException:
        await connection.rollback()
        raise
    await connection.commit()


async def repeat_deadlocked(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Attempt a transaction again, a few times, when it ended in a deadlock. Raises one of `SQL_ERRORS`."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return await attempt()
        except _OPERATIONAL as error:
            if error.args[0] != _DEADLOCK:
                raise
    return await attempt()


def _tables() -> list[str]:
    edges = (
        "CREATE TABLE {} (id1 BIGINT UNSIGNED NOT NULL, id2 BIGINT UNSIGNED NOT NULL, time BIGINT UNSIGNED NOT NULL, "
        "payload VARBINARY(255) NOT NULL, PRIMARY KEY (id1, id2), KEY by_time (id1, time, id2)) ENGINE = InnoDB"
    )
    return [
        f"DROP TABLE IF EXISTS node, link_count, {', '.join((*LINK_TABLES, *MARK_TABLES))}",
        "CREATE TABLE node (id BIGINT UNSIGNED NOT NULL PRIMARY KEY, payload MEDIUMBLOB NOT NULL) ENGINE = InnoDB",
        *(edges.format(name) for name in (*LINK_TABLES, *MARK_TABLES)),
        "CREATE TABLE link_count (id1 BIGINT UNSIGNED NOT NULL PRIMARY KEY, count BIGINT NOT NULL) ENGINE = InnoDB",
    ]


_PUT_NODE: Final = "INSERT INTO node (id, payload) VALUES (%s, %s) ON DUPLICATE KEY UPDATE payload = VALUES(payload)"
# ROW_COUNT() is that of the statement before: 1 for a link that was inserted, 2 or 0 for one that existed.
_COUNT_ONE_MORE: Final = (
    "INSERT INTO link_count (id1, count) SELECT %s, 1 FROM DUAL WHERE ROW_COUNT() = 1 "
    "ON DUPLICATE KEY UPDATE count = count + 1"
)
_COUNT_ONE_LESS: Final = "UPDATE link_count SET count = count - 1 WHERE id1 = %s AND ROW_COUNT() = 1"
_PUT: Final = (
    "INSERT INTO {} (id1, id2, time, payload) VALUES (%s, %s, %s, %s) "
    "ON DUPLICATE KEY UPDATE time = VALUES(time), payload = VALUES(payload)"
)


def _put(tables: tuple[str, str], id1: int, id2: int, at: int, payload: bytes) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        (_PUT.format(tables[0]), (id1, id2, at, payload)),
        (_COUNT_ONE_MORE, (id1,)),
        (_PUT.format(tables[1]), (id2, id1, at, payload)),
    ]


def _delete(id1: int, id2: int) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        ("DELETE FROM link WHERE id1 = %s AND id2 = %s", (id1, id2)),
        (_COUNT_ONE_LESS, (id1,)),
        ("DELETE FROM linked_by WHERE id1 = %s AND id2 = %s", (id2, id1)),
    ]
