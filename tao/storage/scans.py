# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""Scans of whole tables, page by page in key order, for operators: verify, export, repair.

Each page is one statement, so one snapshot; pages are of different moments. The next page starts after the last key of
the previous one, which costs the same however far the scan has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tao.model.errors import InternalError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import MemberPage
from tao.model.rows import ListRow, ObjectRow
from tao.storage.failures import ConnectionLost
from tao.storage.names import EdgeTables, check_edge_table, schema_name
from tao.storage.pools import Pools
from tao.storage.result_packets import Row

FIRST_LIST: Final = ListKey(0, 0)
"""A key before every list."""
FIRST_EDGE: Final = EdgeKey(0, 0, 0)
"""A key before every edge."""


class Scans:
    """Reads a region's databases (or the masters); ``server_of`` maps a shard to a server name."""

    def __init__(self, server_of: Callable[[int], str], pools: Pools, *, page_seconds: float = 5.0) -> None:
        """``page_seconds`` bounds a page: a thousand rows take milliseconds, so only a sick server exceeds it."""
        self._server_of = server_of
        self._pools = pools
        self._page_seconds = page_seconds

    async def scan_objects(self, shard: int, after_id: int, limit: int) -> list[ObjectRow]:
        """Return objects with ``id > after_id``, ascending, deleted ones too; fewer than ``limit`` at the end."""
        rows = await self._select(
            shard,
            f"SELECT id, otype, version, deleted, data FROM {schema_name(shard)}.objects WHERE id > %s "
            "ORDER BY id LIMIT %s",
            after_id,
            limit,
        )
        return [ObjectRow(row[0], row[1], row[2], bool(row[3]), row[4]) for row in rows]

    async def scan_lists(self, shard: int, after: ListKey, limit: int) -> list[tuple[ListKey, ListRow]]:
        """Return lists after that key, in key order, empty ones too."""
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
        """Return edges of one table after that key, in key order (which is not list order)."""
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
        """Return the number of edges of each list after that key in one table, in key order, for ``limit`` lists that
        have any. Time: all their edges, along the primary key."""
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
        """Return the row of a list (zeros when there is none) and its number of edges, in one snapshot."""
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


_SHARD = 0
_LIST = 1


class MySqlMemberScans:
    """See `tao.model.ports.MemberScans`."""

    def __init__(self, server_of: Callable[[int], str], pools: Pools, edge_tables: EdgeTables) -> None:
        """``server_of`` maps a shard to the name of the region's server. ``pools`` as in
        `tao.storage.reads.MySqlReadStore`."""
        self._server_of = server_of
        self._pools = pools
        self._edge_tables = edge_tables

    async def read_members(self, id1: int, atype: int, after_id2: int, limit: int, *, deadline: float) -> MemberPage:
        """See the port."""
        shard = id1 >> SHARD_SHIFT
        schema = schema_name(shard)
        # The first column says what a row is; columns without a use repeat one of their own (see `read_plan`).
        sql = (
            f"(SELECT {_SHARD}, version_epoch, only_row FROM {schema}.shard WHERE only_row = 1) UNION ALL "
            f"(SELECT {_LIST}, version, count FROM {schema}.assoc_lists FORCE INDEX (PRIMARY) "
            "WHERE id1 = %s AND atype = %s) UNION ALL "
            f"(SELECT 2, id2, atype FROM {schema}.{self._edge_tables(atype)} FORCE INDEX (PRIMARY) "
            "WHERE id1 = %s AND atype = %s AND id2 > %s ORDER BY id2 LIMIT %s)"
        )
        rows: list[Row] = []
        async with self._pools.of(self._server_of(shard)).session(deadline=deadline) as session:
            await session.stream(sql, (id1, atype, id1, atype, after_id2, limit), rows.extend, deadline=deadline)
        version_epoch = version = count = 0
        id2s: list[int] = []
        for kind, value, other in rows:
            if kind == _SHARD:
                version_epoch = value
            elif kind == _LIST:
                version, count = value, other
            else:
                id2s.append(value)
        if not version_epoch:
            raise InternalError(f"table {schema}.shard is empty: run the shard's migrations")
        return MemberPage(version_epoch, version, count, id2s)
