"""The graph in PostgreSQL by hand, through asyncpg: the tables and indexes of `SqlGraph`, in PostgreSQL's own manner.

Every read is one prepared statement. Every write is one, too: its parts are data-modifying common table expressions, so
that a link, its inverse and its counter are one round trip and one commit. Rows are loaded with COPY, in key order, and
frozen. asyncpg prepares and caches the statements of each connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from time import time_ns
from typing import Any, Final

import asyncpg

from loadtest.peers.graph_store import AnswerSource, Edge, SqlAddress, planned_rows
from loadtest.published.contestant import Payloads
from loadtest.published.graph_plan import GraphPlan
from loadtest.rounds import Source

POSTGRES_ERRORS: Final = (asyncpg.PostgresError, asyncpg.InterfaceError)
_DATABASE: Final = "postgres"
_ATTEMPTS: Final = 5
_BATCH: Final = 10_000
_UNBOUNDED: Final = 1 << 62
_EDGE_TABLES: Final = ("link", "linked_by", "mark", "marked_by")
_COLUMNS: Final = ("id1", "id2", "time", "payload")

_AFTER_LINKS: Final = (
    "INSERT INTO linked_by (id1, id2, time, payload) SELECT id2, id1, time, payload FROM link ORDER BY time",
    "INSERT INTO link_count (id1, count) SELECT id1, COUNT(*) FROM link GROUP BY id1 ORDER BY id1",
    "VACUUM (FREEZE, ANALYZE)",
    "CHECKPOINT",
)
_PUT_NODE: Final = (
    "INSERT INTO node (id, payload) VALUES ($1, $2) ON CONFLICT (id) DO UPDATE SET payload = excluded.payload"
)
_OVERWRITE: Final = "ON CONFLICT (id1, id2) DO UPDATE SET time = excluded.time, payload = excluded.payload"
# A row that was inserted has no deleting transaction; one that was overwritten has its own.
_PUT_LINKS: Final = f"""
WITH given AS (
    SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[]) AS given (id1, id2, time, payload)
), put AS (
    INSERT INTO link SELECT id1, id2, time, payload FROM given {_OVERWRITE} RETURNING id1, xmax = 0 AS is_new
), inverse AS (
    INSERT INTO linked_by SELECT id2, id1, time, payload FROM given {_OVERWRITE}
)
INSERT INTO link_count (id1, count) SELECT id1, COUNT(*) FROM put WHERE is_new GROUP BY id1
ON CONFLICT (id1) DO UPDATE SET count = link_count.count + excluded.count
"""  # noqa: S608 - conditions of ours
_DELETED: Final = """
link_gone AS (
    DELETE FROM link WHERE id1 = $1 AND id2 = $2 RETURNING id1, id2, time, payload
), inverse_gone AS (
    DELETE FROM linked_by WHERE id1 = $2 AND id2 = $1 RETURNING id1, id2, time, payload
)"""
_COUNTED: Final = "UPDATE link_count SET count = count - 1 WHERE id1 = $1 AND EXISTS (SELECT 1 FROM link_gone)"
_DELETE_LINK: Final = f"WITH {_DELETED} {_COUNTED}"
_MARK_LINK: Final = f"""
WITH {_DELETED}, marked AS (
    INSERT INTO mark SELECT id1, id2, time, payload FROM link_gone ON CONFLICT DO NOTHING
), inverse_marked AS (
    INSERT INTO marked_by SELECT id1, id2, time, payload FROM inverse_gone ON CONFLICT DO NOTHING
) {_COUNTED}
"""  # noqa: S608 - conditions of ours


async def _keep_session(_connection: object) -> None:
    """Do without the reset of a session that is returned to the pool: it has no state, and that is a round trip."""


async def open_postgres_pool(address: SqlAddress, connections: int) -> Any:
    """Connect, and return a pool whose sessions last. `Any`: asyncpg's types do not follow a record's columns."""
    return await asyncpg.create_pool(
        host=address.host,
        port=address.port,
        user=address.user,
        password=address.password,
        database=_DATABASE,
        min_size=connections,
        max_size=connections,
        max_queries=_UNBOUNDED,
        max_inactive_connection_lifetime=0,
        reset=_keep_session,
    )


class PostgresGraph:
    """The graph over one pool: see `GraphStore`. Methods raise one of `POSTGRES_ERRORS`."""

    def __init__(self, pool: Any) -> None:
        """``pool`` is one of `open_postgres_pool`."""
        self._pool = pool

    async def close(self) -> None:
        await self._pool.close()

    async def load(self, plan: GraphPlan, ids: Sequence[int], payloads: Payloads) -> None:
        """Create the tables anew and write the planned graph; afterwards no row needs a vacuum."""
        async with self._pool.acquire() as connection:
            for statement in _tables():
                await connection.execute(statement)
            nodes, links = planned_rows(plan, ids, payloads)
            while rows := list(islice(nodes, _BATCH)):
                await connection.copy_records_to_table("node", records=rows, columns=("id", "payload"))
            while edges := list(islice(links, _BATCH)):
                await connection.copy_records_to_table("link", records=edges, columns=_COLUMNS)
            for statement in _AFTER_LINKS:
                await connection.execute(statement)

    async def node(self, object_id: int, asked: AnswerSource) -> bytes | None:
        asked.at_least(Source.MISS)
        payload: bytes | None = await self._pool.fetchval("SELECT payload FROM node WHERE id = $1", object_id)
        return payload

    async def nodes(self, ids: Sequence[int], asked: AnswerSource) -> list[bytes | None]:
        asked.at_least(Source.MISS)
        found = dict(await self._pool.fetch("SELECT id, payload FROM node WHERE id = ANY($1::bigint[])", ids))
        return [found.get(object_id) for object_id in ids]

    async def count(self, id1: int, asked: AnswerSource) -> int:
        asked.at_least(Source.MISS)
        return int(await self._pool.fetchval("SELECT count FROM link_count WHERE id1 = $1", id1) or 0)

    async def newest(self, id1: int, limit: int, asked: AnswerSource) -> list[Edge]:
        return await self._edges("LIMIT $2", asked, id1, limit)

    async def between(self, id1: int, high: int, low: int, limit: int, asked: AnswerSource) -> list[Edge]:
        return await self._edges("LIMIT $4", asked, id1, low, high, limit, condition="AND time BETWEEN $2 AND $3")

    async def among(self, id1: int, id2s: Sequence[int], asked: AnswerSource) -> list[Edge]:
        return await self._edges("", asked, id1, id2s, condition="AND id2 = ANY($2::bigint[])")

    async def put_node(self, object_id: int, payload: bytes) -> None:
        await self._write(_PUT_NODE, object_id, payload)

    async def add_node(self, payload: bytes) -> int:
        object_id = time_ns()
        await self._write(_PUT_NODE, object_id, payload)
        return object_id

    async def delete_node(self, object_id: int) -> None:
        await self._write("DELETE FROM node WHERE id = $1", object_id)

    async def put_links(self, links: Sequence[tuple[int, int, int, bytes]]) -> None:
        # One statement cannot write a row twice: of the links of a pair, the latest remains.
        latest = {link[:2]: link for link in sorted(links)}
        await self._write(_PUT_LINKS, *map(list, zip(*latest.values(), strict=True)))

    async def delete_link(self, id1: int, id2: int) -> None:
        await self._write(_DELETE_LINK, id1, id2)

    async def mark_link(self, id1: int, id2: int) -> None:
        await self._write(_MARK_LINK, id1, id2)

    async def _edges(self, limit: str, asked: AnswerSource, *values: Any, condition: str = "") -> list[Edge]:
        # Any: ids and numbers, and lists of ids.
        asked.at_least(Source.MISS)
        statement = (
            f"SELECT id2, time, payload FROM link WHERE id1 = $1 {condition} "  # noqa: S608 - conditions of ours
            f"ORDER BY time DESC, id2 DESC {limit}"
        )
        return list(map(tuple, await self._pool.fetch(statement, *values)))

    async def _write(self, statement: str, *values: Any) -> None:
        # Any: ids, numbers and bytes, and lists of them.
        await _repeat_deadlocked(lambda: self._pool.execute(statement, *values))


async def _repeat_deadlocked(attempt: Callable[[], Awaitable[object]]) -> None:
    """Attempt a statement again, a few times, when it ended in a deadlock. Raises one of `POSTGRES_ERRORS`."""
    for _ in range(_ATTEMPTS - 1):
        try:
            await attempt()
        except asyncpg.DeadlockDetectedError:
            continue
        return
    await attempt()


def _tables() -> list[str]:
    edges = (
        "CREATE TABLE {} (id1 BIGINT NOT NULL, id2 BIGINT NOT NULL, time BIGINT NOT NULL, payload BYTEA NOT NULL, "
        "PRIMARY KEY (id1, id2))"
    )
    return [
        f"DROP TABLE IF EXISTS node, link_count, {', '.join(_EDGE_TABLES)}",
        "CREATE TABLE node (id BIGINT NOT NULL PRIMARY KEY, payload BYTEA NOT NULL)",
        # Random bytes: an attempt to compress them is wasted.
        "ALTER TABLE node ALTER COLUMN payload SET STORAGE EXTERNAL",
        *(edges.format(name) for name in _EDGE_TABLES),
        *(f"CREATE INDEX {name}_by_time ON {name} (id1, time, id2)" for name in _EDGE_TABLES),
        # A counter is overwritten in its page.
        "CREATE TABLE link_count (id1 BIGINT NOT NULL PRIMARY KEY, count BIGINT NOT NULL) WITH (fillfactor = 80)",
    ]
