# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""Whole tables, page by page in key order, for operators: verify, export, repair (DESIGN.md §6, §13).

Each page is one statement, so one snapshot; pages are of different moments. The next page starts after the last key of
the one before, which costs the same however far the scan has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.rows import ListRow, ObjectRow
from tao.storage.failures import ConnectionLost
from tao.storage.names import check_edge_table, schema_name
from tao.storage.pools import Pools
from tao.storage.result_packets import Row

FIRST_LIST: Final = ListKey(0, 0)
"""Before every list."""
FIRST_EDGE: Final = EdgeKey(0, 0, 0)
"""Before every edge."""


class Scans:
    """Reads of a region's (or the master) databases; ``server_of``: shard → server name."""

    def __init__(self, server_of: Callable[[int], str], pools: Pools, *, page_seconds: float = 5.0) -> None:
        """``page_seconds`` bounds a page: a thousand rows take milliseconds, so it is met by all but a sick server."""
        self._server_of = server_of
        self._pools = pools
        self._page_seconds = page_seconds

    async def scan_objects(self, shard: int, after_id: int, limit: int) -> list[ObjectRow]:
        """Objects with ``id > after_id``, ascending, deleted ones too; fewer than ``limit`` at the end."""
        rows = await self._select(
            shard,
            f"SELECT id, otype, version, deleted, data FROM {schema_name(shard)}.objects WHERE id > %s "
            "ORDER BY id LIMIT %s",
            after_id,
            limit,
        )
        return [ObjectRow(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows]

    async def scan_lists(self, shard: int, after: ListKey, limit: int) -> list[tuple[ListKey, ListRow]]:
        """Lists after that key, in key order, empty ones too."""
        rows = await self._select(
            shard,
            f"SELECT id1, atype, count, version FROM {schema_name(shard)}.assoc_lists FORCE INDEX (PRIMARY) "
            "WHERE id1 > %s OR (id1 = %s AND atype > %s) ORDER BY id1, atype LIMIT %s",
            after.id1,
            after.id1,
            after.atype,
            limit,
        )
        return [(ListKey(id1, atype), ListRow(count, version)) for id1, atype, count, version in rows]

    async def scan_edges(self, shard: int, table: str, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, Edge]]:
        """Edges of one table after that key, in key order (which is not list order)."""
        rows = await self._select(
            shard,
            f"SELECT id1, atype, id2, time, data FROM {schema_name(shard)}.{check_edge_table(table)} "
            "FORCE INDEX (PRIMARY) WHERE id1 > %s OR (id1 = %s AND atype > %s) "
            "OR (id1 = %s AND atype = %s AND id2 > %s) ORDER BY id1, atype, id2 LIMIT %s",
            after.id1,
            after.id1,
            after.atype,
            after.id1,
            after.atype,
            after.id2,
            limit,
        )
        return [(EdgeKey(id1, atype, id2), Edge(id2, time, data)) for id1, atype, id2, time, data in rows]

    async def count_edges(self, shard: int, table: str, after: ListKey, limit: int) -> list[tuple[ListKey, int]]:
        """How many edges each list after that key has in one table, in key order, for ``limit`` lists that have any.
        Time: all their edges, along the primary key."""
        rows = await self._select(
            shard,
            f"SELECT id1, atype, COUNT(*) FROM {schema_name(shard)}.{check_edge_table(table)} FORCE INDEX (PRIMARY) "
            "WHERE id1 > %s OR (id1 = %s AND atype > %s) GROUP BY id1, atype ORDER BY id1, atype LIMIT %s",
            after.id1,
            after.id1,
            after.atype,
            limit,
        )
        return [(ListKey(id1, atype), count) for id1, atype, count in rows]

    async def count_again(self, shard: int, table: str, key: ListKey) -> tuple[ListRow, int]:
        """The row of a list (zeros when there is none) and how many edges it has, in one snapshot."""
        schema = schema_name(shard)
        rows = await self._select(
            shard,
            f"SELECT counted.edges, COALESCE(list.count, 0), COALESCE(list.version, 0) FROM "
            f"(SELECT COUNT(*) AS edges FROM {schema}.{check_edge_table(table)} WHERE id1 = %s AND atype = %s) counted "
            f"LEFT JOIN {schema}.assoc_lists list ON list.id1 = %s AND list.atype = %s",
            key.id1,
            key.atype,
            key.id1,
            key.atype,
        )
        ((edges, count, version),) = rows
        return ListRow(int(count), int(version)), edges  # COALESCE makes decimals of them

    async def _select(self, shard: int, sql: str, *values: object) -> list[Row]:
        deadline = asyncio.get_running_loop().time() + self._page_seconds
        pool = self._pools.of(self._server_of(shard))
        rows: list[Row] = []
        try:
            async with pool.session(deadline=deadline) as session:
                await session.stream(sql, values, rows.extend, deadline=deadline)
        except ConnectionLost:
            rows.clear()
            async with pool.session(deadline=deadline, fresh=True) as session:
                await session.stream(sql, values, rows.extend, deadline=deadline)
        return rows
