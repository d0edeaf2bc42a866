"""The graph in MySQL by hand: tables, indexes and transactions as an application without a graph store would have them.

Four tables of edges (links, marks, and the inverses of both), each with its rows in key order and an index by time;
counters beside the links, because counting rows at every page view does not last. The client is aiomysql, with a pool
of connections and autocommit for reads.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from time import time_ns
from typing import Any, Final, TypeVar

import aiomysql
import msgspec
import pymysql.err

from loadtest.peers.contestants import Edge
from loadtest.published.contestant import Payloads
from loadtest.published.graph_plan import GraphPlan

DATABASE: Final = "peer"
LINK_TABLES: Final = ("link", "linked_by")
MARK_TABLES: Final = ("mark", "marked_by")
_DEADLOCK: Final = 1213
_ATTEMPTS: Final = 5
_BATCH: Final = 2000
Result = TypeVar("Result")

_AFTER_LINKS: Final = (
    "INSERT INTO linked_by (id1, id2, time, payload) SELECT id2, id1, time, payload FROM link ORDER BY id2, id1",
    "INSERT INTO link_count (id1, count) SELECT id1, COUNT(*) FROM link GROUP BY id1",
)


class SqlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A database server and the account to use there."""

    host: str
    port: int
    user: str
    password: str


class SqlGraph:
    """One pool. `Any`: aiomysql has no types. Methods raise `pymysql.err.MySQLError`."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @classmethod
    async def open(cls, address: SqlAddress, connections: int) -> SqlGraph:
        """Connect, and create the database if it does not exist."""
        where = {"host": address.host, "port": address.port, "user": address.user, "password": address.password}
        connection = await aiomysql.connect(**where)
        async with connection.cursor() as cursor:
            await cursor.execute(f"CREATE DATABASE IF NOT EXISTS {DATABASE}")
        await connection.ensure_closed()
        pool = await aiomysql.create_pool(
            minsize=min(4, connections), maxsize=connections, autocommit=True, db=DATABASE, **where
        )
        return cls(pool)

    async def close(self) -> None:
        """Close all connections."""
        self._pool.close()
        await self._pool.wait_closed()

    async def load(
        self, plan: GraphPlan, ids: Sequence[int], payloads: Payloads, report: Callable[[str, float], None]
    ) -> None:
        """Create the tables and write the planned graph without the binlog, since nothing replicates or reads it
        yet."""
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute("SET SESSION sql_log_bin = 0")
            for statement in _tables():
                await cursor.execute(statement)
            for start in range(0, plan.nodes, _BATCH):
                nodes = range(start, min(plan.nodes, start + _BATCH))
                rows = [(ids[node], payloads.next(plan.object_size(node))) for node in nodes]
                await cursor.executemany("INSERT INTO node (id, payload) VALUES (%s, %s)", rows)
            edges: list[tuple[int, int, int, bytes]] = []
            for node in range(plan.nodes):
                edges += [
                    (ids[node], ids[edge.other], edge.time, payloads.next(edge.size)) for edge in plan.list_of(node)
                ]
                if edges and (len(edges) >= _BATCH or node == plan.nodes - 1):
                    await cursor.executemany(
                        "INSERT INTO link (id1, id2, time, payload) VALUES (%s, %s, %s, %s)", edges
                    )
                    edges.clear()
                    report("writing the graph", 0.0)
            for statement in _AFTER_LINKS:
                await cursor.execute(statement)

    async def copied(self, statements: Iterable[str]) -> None:
        """Run statements that copy what `load` has written, also without the binlog."""
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute("SET SESSION sql_log_bin = 0")
            for statement in statements:
                await cursor.execute(statement)

    async def version_epoch(self, schema: str) -> int:
        """Return the version epoch of one of tao's shards."""
        row = await self._one(f"SELECT version_epoch FROM {schema}.shard", ())  # noqa: S608 - a name of ours
        return int(row[0])

    async def node(self, object_id: int) -> bytes | None:
        """Return an object's payload; None when it does not exist."""
        row = await self._one("SELECT payload FROM node WHERE id = %s", (object_id,))
        return None if row is None else bytes(row[0])

    async def nodes(self, ids: Sequence[int]) -> dict[int, bytes]:
        """Return the payloads of the objects that exist."""
        rows = await self._all("SELECT id, payload FROM node WHERE id IN %s", (tuple(ids),))
        return {row[0]: bytes(row[1]) for row in rows}

    async def count(self, id1: int) -> int:
        """Return the number of links."""
        row = await self._one("SELECT count FROM link_count WHERE id1 = %s", (id1,))
        return 0 if row is None else int(row[0])

    async def newest(self, id1: int, limit: int) -> list[Edge]:
        """Return the newest links."""
        return await self._edges(
            "SELECT id2, time, payload FROM link WHERE id1 = %s ORDER BY time DESC, id2 DESC LIMIT %s", (id1, limit)
        )

    async def between(self, id1: int, high: int, low: int, limit: int) -> list[Edge]:
        """Return the newest links of a time range."""
        return await self._edges(
            "SELECT id2, time, payload FROM link WHERE id1 = %s AND time BETWEEN %s AND %s "
            "ORDER BY time DESC, id2 DESC LIMIT %s",
            (id1, low, high, limit),
        )

    async def among(self, id1: int, id2s: Sequence[int]) -> list[Edge]:
        """Return the links to these nodes."""
        return await self._edges(
            "SELECT id2, time, payload FROM link WHERE id1 = %s AND id2 IN %s ORDER BY time DESC, id2 DESC",
            (id1, tuple(id2s)),
        )

    async def put_node(self, object_id: int, payload: bytes) -> None:
        """Add or overwrite an object."""
        statement = "INSERT INTO node (id, payload) VALUES (%s, %s) ON DUPLICATE KEY UPDATE payload = VALUES(payload)"
        await self._transaction([(statement, (object_id, payload))])

    async def add_node(self, payload: bytes) -> int:
        """Add an object whose id is the clock's nanoseconds, above every loaded id. Returns the id."""
        object_id = time_ns()
        await self.put_node(object_id, payload)
        return object_id

    async def delete_node(self, object_id: int) -> None:
        """Delete an object."""
        await self._transaction([("DELETE FROM node WHERE id = %s", (object_id,))])

    async def put_links(self, links: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Add or overwrite ``(id1, id2, time, payload)``, each with its inverse and the counter, in one transaction."""
        work: list[tuple[str, tuple[Any, ...]]] = []
        for id1, id2, at, payload in sorted(links):
            work += _put(LINK_TABLES, id1, id2, at, payload)
        await self._transaction(work)

    async def delete_link(self, id1: int, id2: int) -> None:
        """Delete a link with its inverse."""
        await self._transaction(_delete(id1, id2))

    async def mark_link(self, id1: int, id2: int) -> None:
        """Turn a link into a mark."""
        move = "INSERT IGNORE INTO {} (id1, id2, time, payload) SELECT id1, id2, time, payload FROM {} WHERE {}"
        moves = [
            (move.format(MARK_TABLES[side], LINK_TABLES[side], "id1 = %s AND id2 = %s"), pair)
            for side, pair in enumerate(((id1, id2), (id2, id1)))
        ]
        await self._transaction([*moves, *_delete(id1, id2)])

    async def _one(self, statement: str, values: tuple[Any, ...]) -> Any:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement, values)
            return await cursor.fetchone()

    async def _all(self, statement: str, values: tuple[Any, ...]) -> Any:
        async with self._pool.acquire() as connection, connection.cursor() as cursor:
            await cursor.execute(statement, values)
            return await cursor.fetchall()

    async def _edges(self, statement: str, values: tuple[Any, ...]) -> list[Edge]:
        return [(id2, at, bytes(payload)) for id2, at, payload in await self._all(statement, values)]

    async def _transaction(self, work: Sequence[tuple[str, tuple[Any, ...]]]) -> None:
        """Run statements in order in one transaction, and again after a deadlock; a statement may depend on those
        before it."""

        async def attempt() -> None:
            async with self._pool.acquire() as connection, transaction(connection), connection.cursor() as cursor:
                for statement, values in work:
                    await cursor.execute(statement, values)

        await repeat_deadlocked(attempt)


@asynccontextmanager
async def transaction(connection: Any) -> AsyncIterator[None]:
    """Commit what is done in this context, or roll it back. `Any`: aiomysql has no types."""
    await connection.begin()
    try:
        yield
    except BaseException:
        await connection.rollback()
        raise
    await connection.commit()


async def repeat_deadlocked(attempt: Callable[[], Awaitable[Result]]) -> Result:
    """Attempt a transaction again, a few times, when it ended in a deadlock. Raises `pymysql.err.MySQLError`."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return await attempt()
        except pymysql.err.OperationalError as error:
            if error.args[0] != _DEADLOCK:
                raise
    return await attempt()


def _tables() -> list[str]:
    edges = (
        "CREATE TABLE {} (id1 BIGINT UNSIGNED NOT NULL, id2 BIGINT UNSIGNED NOT NULL, time BIGINT UNSIGNED NOT NULL, "
        "payload VARBINARY(255) NOT NULL, PRIMARY KEY (id1, id2), KEY by_time (id1, time, id2)) ENGINE = InnoDB"
    )
    return [
        "CREATE TABLE node (id BIGINT UNSIGNED NOT NULL PRIMARY KEY, payload MEDIUMBLOB NOT NULL) ENGINE = InnoDB",
        *(edges.format(name) for name in (*LINK_TABLES, *MARK_TABLES)),
        "CREATE TABLE link_count (id1 BIGINT UNSIGNED NOT NULL PRIMARY KEY, count BIGINT NOT NULL) ENGINE = InnoDB",
    ]


_COUNT_ONE_MORE: Final = (
    "INSERT INTO link_count (id1, count) SELECT %s, 1 FROM DUAL "
    "WHERE NOT EXISTS (SELECT 1 FROM link WHERE id1 = %s AND id2 = %s) "
    "ON DUPLICATE KEY UPDATE count = count + 1"
)
_COUNT_ONE_LESS: Final = (
    "UPDATE link_count SET count = count - 1 WHERE id1 = %s AND EXISTS (SELECT 1 FROM link WHERE id1 = %s AND id2 = %s)"
)
_PUT: Final = (
    "INSERT INTO {} (id1, id2, time, payload) VALUES (%s, %s, %s, %s) "
    "ON DUPLICATE KEY UPDATE time = VALUES(time), payload = VALUES(payload)"
)


def _put(tables: tuple[str, str], id1: int, id2: int, at: int, payload: bytes) -> list[tuple[str, tuple[Any, ...]]]:
    # The counter comes first, and only for an edge that does not exist: its row then serializes the writers of this
    # list.
    return [
        (_COUNT_ONE_MORE, (id1, id1, id2)),
        (_PUT.format(tables[0]), (id1, id2, at, payload)),
        (_PUT.format(tables[1]), (id2, id1, at, payload)),
    ]


def _delete(id1: int, id2: int) -> list[tuple[str, tuple[Any, ...]]]:
    return [
        (_COUNT_ONE_LESS, (id1, id1, id2)),
        ("DELETE FROM link WHERE id1 = %s AND id2 = %s", (id1, id2)),
        ("DELETE FROM linked_by WHERE id1 = %s AND id2 = %s", (id2, id1)),
    ]
