# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""Scans of whole tables, page by page in key order, for operators: verify, export, repair.

Each page is one statement, so one snapshot; pages are of different moments. The next page starts after the last key of
the previous one, which costs the same however far the scan has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from tao.model.edge_states import EdgeRegisters, NodeState
from tao.model.errors import InternalError
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey
from tao.model.ids import MAX_ID, SHARD_SHIFT
from tao.model.ports import StoredState
from tao.model.queries import MemberPage, PairPage, PairsQuery
from tao.model.rows import ListRow, ObjectRow
from tao.schema.types import STATES_TABLE
from tao.storage.failures import ConnectionLost
from tao.storage.names import EdgeTables, check_edge_table, schema_name
from tao.storage.pools import Pools
from tao.storage.result_packets import Row
from tao.storage.write_statements import REGISTERS_AND_DATA, edge_registers

FIRST_LIST: Final = ListKey(0, 0)
"""A key before every list."""
FIRST_EDGE: Final = EdgeKey(0, 0, 0)
"""A key before every edge."""


_KEYS_PER_STATEMENT: Final = 200
"""Edges that one statement names."""


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

    async def scan_object_types(self, shard: int, after_id: int, limit: int) -> list[tuple[int, int]]:
        """Return ids and types of objects with ``id > after_id``, ascending; deleted ones have the type `ABSENT`."""
        rows = await self._select(
            shard,
            f"SELECT id, IF(deleted, {ABSENT}, otype) FROM {schema_name(shard)}.objects FORCE INDEX (PRIMARY) "
            "WHERE id > %s ORDER BY id LIMIT %s",
            after_id,
            limit,
        )
        return [(object_id, int(otype)) for object_id, otype in rows]

    async def scan_registers(self, shard: int, after: EdgeKey, limit: int) -> list[tuple[EdgeKey, EdgeRegisters]]:
        """Return the registers of edges of types with states after that key, as `scan_edges` does edges."""
        return [(each.key, each.registers) for each in await self.scan_states(shard, after, limit)]

    async def scan_states(self, shard: int, after: EdgeKey, limit: int) -> list[StoredState]:
        """Return the registers of edges of types with states after that key, and when they changed."""
        rows = await self._select(
            shard,
            f"SELECT id1, atype, id2, time, {REGISTERS_AND_DATA}, changed_unix_s FROM "
            f"{schema_name(shard)}.{STATES_TABLE} FORCE INDEX (PRIMARY) WHERE id1 > %s OR (id1 = %s AND atype > %s) "
            "OR (id1 = %s AND atype = %s AND id2 > %s) ORDER BY id1, atype, id2 LIMIT %s",
            *(after.id1, after.id1, after.atype, after.id1, after.atype, after.id2, limit),
        )
        return [StoredState(EdgeKey(*row[:3]), edge_registers(row[3], row[4]), row[5]) for row in rows]

    async def read_registers(self, shard: int, keys: Sequence[EdgeKey]) -> list[tuple[EdgeKey, EdgeRegisters]]:
        """Return the registers of those edges of one shard that exist."""
        found: list[tuple[EdgeKey, EdgeRegisters]] = []
        for start in range(0, len(keys), _KEYS_PER_STATEMENT):
            some = keys[start : start + _KEYS_PER_STATEMENT]
            rows = await self._select(
                shard,
                f"SELECT id1, atype, id2, time, {REGISTERS_AND_DATA} FROM {schema_name(shard)}.{STATES_TABLE} "
                f"FORCE INDEX (PRIMARY) WHERE {' OR '.join(['(id1 = %s AND atype = %s AND id2 = %s)'] * len(some))}",
                *(value for key in some for value in (key.id1, key.atype, key.id2)),
            )
            found.extend((EdgeKey(*row[:3]), edge_registers(row[3], row[4])) for row in rows)
        return found

    async def read_nodes(self, shard: int, keys: Collection[ListKey]) -> dict[ListKey, NodeState]:
        """Return the states of those nodes of one shard that have one."""
        found: dict[ListKey, NodeState] = {}
        wanted = sorted(keys)
        for start in range(0, len(wanted), _KEYS_PER_STATEMENT):
            some = wanted[start : start + _KEYS_PER_STATEMENT]
            rows = await self._select(
                shard,
                f"SELECT id, atype, state, state_us FROM {schema_name(shard)}.node_states FORCE INDEX (PRIMARY) "
                f"WHERE {' OR '.join(['(id = %s AND atype = %s)'] * len(some))}",
                *(value for key in some for value in (key.id1, key.atype)),
            )
            found.update((ListKey(*row[:2]), NodeState(row[3], row[2])) for row in rows)
        return found

    async def scan_node_states(self, shard: int, after: ListKey, limit: int) -> list[tuple[ListKey, NodeState]]:
        """Return the states of nodes after that key, in key order; ``atype`` is the type that a node has it for."""
        rows = await self._select(
            shard,
            f"SELECT id, atype, state, state_us FROM {schema_name(shard)}.node_states FORCE INDEX (PRIMARY) "
            "WHERE id > %s OR (id = %s AND atype > %s) ORDER BY id, atype LIMIT %s",
            *(after.id1, after.id1, after.atype, limit),
        )
        return [(ListKey(*row[:2]), NodeState(row[3], row[2])) for row in rows]

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
_LAST_LIST = 2
_EDGE = 3
_LAST_EDGE = 4


class MySqlMemberScans:
    """See `tao.model.ports.MemberScans` and `tao.model.ports.PairReads`."""

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

    async def read_pairs(self, query: PairsQuery, *, deadline: float) -> PairPage:
        """See the port. The keys begin with id1, so rows of other types lie between those of the type: at most as many
        rows as the page may have are read, of whatever type, and the last one says how far the page has come."""
        schema = schema_name(query.shard)
        lists, edges = f"{schema}.assoc_lists", f"{schema}.{self._edge_tables(query.atype)}"
        of_lists = "((id1 > %s AND id1 <= %s) OR (id1 = %s AND atype = %s)) ORDER BY id1, atype LIMIT"
        of_edges = "((id1 > %s AND id1 <= %s) OR (id1 = %s AND atype = %s AND id2 > %s)) ORDER BY id1, atype, id2 LIMIT"
        sql = (
            f"(SELECT {_SHARD}, version_epoch, only_row, only_row FROM {schema}.shard WHERE only_row = 1) UNION ALL "
            f"(SELECT {_LIST}, id1, version, atype FROM (SELECT id1, atype, version FROM {lists} FORCE INDEX (PRIMARY) "
            f"WHERE {of_lists} %s) examined WHERE atype = %s) UNION ALL "
            f"(SELECT {_LAST_LIST}, id1, version, atype FROM {lists} FORCE INDEX (PRIMARY) "
            f"WHERE {of_lists} 1 OFFSET %s) UNION ALL "
            f"(SELECT {_EDGE}, id1, id2, atype FROM (SELECT id1, atype, id2 FROM {edges} FORCE INDEX (PRIMARY) "
            f"WHERE {of_edges} %s) examined WHERE atype = %s) UNION ALL "
            f"(SELECT {_LAST_EDGE}, id1, id2, atype FROM {edges} FORCE INDEX (PRIMARY) "
            f"WHERE {of_edges} 1 OFFSET %s)"
        )
        first, atype, limit = query.after_id1, query.atype, query.limit
        list_keys = (first, query.last_id1, first, atype)
        edge_keys = (*list_keys, query.after_id2)
        values = (*list_keys, limit, atype, *list_keys, limit - 1, *edge_keys, limit, atype, *edge_keys, limit - 1)
        rows: list[Row] = []
        async with self._pools.of(self._server_of(query.shard)).session(deadline=deadline) as session:
            await session.stream(sql, values, rows.extend, deadline=deadline)
        found: dict[int, list[tuple[int, int]]] = {_LIST: [], _EDGE: []}
        last_list: ListKey | None = None
        last_edge: EdgeKey | None = None
        version_epoch = 0
        for kind, value, other, row_atype in rows:
            if kind == _SHARD:
                version_epoch = value
            elif kind == _LAST_LIST:
                last_list = ListKey(value, row_atype)
            elif kind == _LAST_EDGE:
                last_edge = EdgeKey(value, row_atype, other)
            else:
                found[kind].append((value, other))
        if not version_epoch:
            raise InternalError(f"table {schema}.shard is empty: run the shard's migrations")
        end = page_end(atype, last_list, last_edge)
        return pair_page(version_epoch, sorted(found[_LIST]), sorted(found[_EDGE]), end)


def page_end(atype: int, last_list: ListKey | None, last_edge: EdgeKey | None) -> tuple[int, int]:
    """Return the id1 and id2 after which the next page of a type begins, (0, 0) for none. ``last_list`` and
    ``last_edge`` are the last rows read where there may be more, of any type."""
    ends: list[tuple[int, int]] = []
    if last_list is not None:
        ends.append((last_list.id1 + (last_list.atype >= atype), 0))
    if last_edge is not None:
        is_within = last_edge.atype == atype
        ends.append((last_edge.id1 + (last_edge.atype > atype), last_edge.id2 if is_within else 0))
    return min(ends, default=(0, 0))


def pair_page(
    version_epoch: int, lists: Sequence[tuple[int, int]], edges: Sequence[tuple[int, int]], end: tuple[int, int]
) -> PairPage:
    """Return a page of those of ``lists`` (id1 and version) and ``edges`` (id1 and id2), both ascending, that lie
    before its ``end``; see `page_end`."""
    after_id1, after_id2 = end
    last = after_id1 - (not after_id2) if after_id1 else MAX_ID
    versions = {id1: version for id1, version in lists if id1 <= last}
    sizes = dict.fromkeys(versions, 0)
    id2s: list[int] = []
    for id1, id2 in edges:
        if id1 > last:
            break
        sizes[id1] = sizes.get(id1, 0) + 1  # a list without a row has been written by another program than this
        id2s.append(id2)
    id1s = sorted(sizes)
    return PairPage(
        version_epoch,
        id1s,
        [versions.get(id1, 0) for id1 in id1s],
        [sizes[id1] for id1 in id1s],
        id2s,
        after_id1,
        after_id2,
    )
