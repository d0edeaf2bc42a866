# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""From queries to statements, and from rows to encoded answers: pure (DESIGN.md §3, §4).

One statement answers many queries: a UNION whose parts are numbered in the first column, so that keys of several shards
share a round trip and a result (merging keys is what saves the client's CPU). InnoDB gives a statement one snapshot, so
version, count and edges of one answer, which always stand in one statement, agree.

Columns that a part has no use for repeat one of its own: a NULL or a literal beside a BIGINT UNSIGNED makes the whole
column of the union DECIMAL.

The version epochs of the shards are parts of the same statement. One that is *older* than the data would be safe
as well (the fill counts as older than it is, and is dropped by whoever knows better); a newer one would not.

A plan of one object or count, which most are, is a join of the row with the epoch's instead: a quarter less of the
server's CPU than for a union of the two.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from tao.model.edge_block import COMPLETE, PREFIX, pack_columns
from tao.model.graph import ABSENT, MAX_TIME, encode_count, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.storage.names import EdgeTables, schema_name
from tao.storage.result_packets import Row

_EPOCH: Final = 0
_OBJECT: Final = 1
_COUNT: Final = 2
_HEAD: Final = 3
_EDGE: Final = 4

MAX_KEYS_PER_PART: Final = 500
"""Ids in one IN list; beyond that parsing the text costs more than another part."""
_DEFERRED_FROM_POS: Final = 128
"""From here on, skipped edges are passed over in the index alone; before, the detour costs more than it saves."""

_ABSENT_OBJECT: Final = encode_object(0, ABSENT, b"")
_NO_COUNT: Final = encode_count(0, 0)


def shard_of_query(query: Query) -> int:
    """The shard that answers the query."""
    return (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT


class Statement:
    """One UNION with its values."""

    __slots__ = ("cost", "parts", "shards", "values")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.values: list[object] = []
        self.shards: set[int] = set()
        self.cost = 0

    @property
    def sql(self) -> str:
        return " UNION ALL ".join(self.parts)


class ReadPlan:
    """The statements for some queries of one server, and the place where their rows come together.

    ``rows_per_statement`` and ``parts_per_statement`` bound a statement, but for one query that needs more by itself.
    """

    def __init__(
        self,
        queries: Sequence[Query],
        edge_tables: EdgeTables,
        *,
        rows_per_statement: int = 8192,
        parts_per_statement: int = 128,
    ) -> None:
        self._queries = queries
        self._edge_tables = edge_tables
        self._rows_per_statement = rows_per_statement
        self._parts_per_statement = parts_per_statement
        self._targets: list[tuple[int, int]] = []  # part number → kind, and shard, type or query
        self._objects: dict[int, bytes] = {}
        self._counts: dict[tuple[int, int], bytes] = {}
        self._heads: dict[int, tuple[int, int]] = {}
        self._edges: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
        self._is_join = False
        self.version_epochs: dict[int, int] = {}
        self.statements: list[Statement] = []
        self._plan()

    def receive(self, rows: list[Row]) -> None:
        """Rows of any of the statements."""
        if self._is_join:
            self._receive_joined(rows)
            return
        targets = self._targets
        for part, a, b, c, data in rows:
            kind, index = targets[part]
            if kind == _EDGE:
                self._edges[index].append((a, b, data))
            elif kind == _OBJECT:
                self._objects[a] = encode_object(c, b, data if b else b"")
            elif kind == _COUNT:
                self._counts[a, index] = encode_count(b, c)
            elif kind == _HEAD:
                self._heads[index] = (b, c)
            else:
                # Statements come one after the other: what was read first may lack what the later epoch stands for.
                self.version_epochs[index] = min(a, self.version_epochs.get(index, a))

    def answers(self) -> Iterator[bytes]:
        """The encoded answer to each query, in order, once all rows have been received."""
        for index, query in enumerate(self._queries):
            if isinstance(query, ObjectQuery):
                yield self._objects.get(query.id, _ABSENT_OBJECT)
            elif isinstance(query, CountQuery):
                yield self._counts.get((query.id1, query.atype), _NO_COUNT)
            else:
                yield self._block(index, query)

    def _block(self, index: int, query: RangeQuery | TimeRangeQuery | EdgesQuery) -> bytes:
        version, recorded = self._heads.get(index, (0, 0))
        edges = self._edges.pop(index, [])
        edges.sort(reverse=True)  # by time, then id2; a union promises no order, though it keeps it
        flags = 0
        if len(edges) == recorded:
            flags = PREFIX | COMPLETE
        elif (isinstance(query, RangeQuery) and query.pos == 0) or (
            isinstance(query, TimeRangeQuery) and query.high >= MAX_TIME and not query.below_id2
        ):
            flags = PREFIX
        # Rows written by hand may outnumber the recorded count, until the list is touched (DESIGN.md §7).
        count = max(recorded, len(edges))
        times, id2s, data = ([list(column) for column in zip(*edges, strict=True)]) if edges else ([], [], [])
        return pack_columns(version, count, flags, id2s, times, data)

    def _plan(self) -> None:
        if len(self._queries) == 1 and isinstance(self._queries[0], ObjectQuery | CountQuery):
            self._plan_join(self._queries[0])
            return
        objects: dict[int, set[int]] = defaultdict(set)
        counts: dict[int, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        for query in self._queries:
            if isinstance(query, ObjectQuery):
                objects[query.id >> SHARD_SHIFT].add(query.id)
            elif isinstance(query, CountQuery):
                counts[query.id1 >> SHARD_SHIFT][query.atype].add(query.id1)
        for shard, ids in sorted(objects.items()):
            for some in _split(ids):
                statement = self._room(shard, len(some), 1)
                self._add(
                    statement,
                    _OBJECT,
                    shard,
                    f"id, otype * (1 - deleted), version, data FROM {schema_name(shard)}.objects FORCE INDEX (PRIMARY) "
                    "WHERE id IN %s",
                    some,
                )
        for shard, by_type in sorted(counts.items()):
            for atype, id1s in sorted(by_type.items()):
                for some in _split(id1s):
                    statement = self._room(shard, len(some), 1)
                    self._add(
                        statement,
                        _COUNT,
                        atype,
                        f"id1, version, count, NULL FROM {schema_name(shard)}.assoc_lists FORCE INDEX (PRIMARY) "
                        "WHERE id1 IN %s AND atype = %s",
                        some,
                        atype,
                    )
        for index, each in enumerate(self._queries):
            if not isinstance(each, ObjectQuery | CountQuery):
                self._plan_list(index, each)

    def _plan_join(self, query: ObjectQuery | CountQuery) -> None:
        self._is_join = True
        shard = shard_of_query(query)
        schema = schema_name(shard)
        statement = Statement()
        if isinstance(query, ObjectQuery):
            columns = "found.id, found.otype * (1 - found.deleted), found.version, found.data"
            table, key = "objects", "found.id = %s"
            statement.values.append(query.id)
        else:
            columns = "found.id1, found.version, found.count, NULL"
            table, key = "assoc_lists", "found.id1 = %s AND found.atype = %s"
            statement.values.extend((query.id1, query.atype))
        statement.parts.append(
            f"SELECT epochs.version_epoch, {columns} FROM {schema}.shard AS epochs "
            f"LEFT JOIN {schema}.{table} AS found FORCE INDEX (PRIMARY) ON {key} WHERE epochs.only_row = 1"
        )
        statement.shards.add(shard)
        self.statements.append(statement)

    def _receive_joined(self, rows: list[Row]) -> None:
        (query,) = self._queries
        for epoch, id_, b, c, data in rows:
            self.version_epochs[shard_of_query(query)] = epoch
            if id_ is None:
                continue  # the epoch alone
            if isinstance(query, ObjectQuery):
                self._objects[id_] = encode_object(c, b, data if b else b"")
            elif isinstance(query, CountQuery):
                self._counts[id_, query.atype] = encode_count(b, c)

    def _plan_list(self, index: int, query: RangeQuery | TimeRangeQuery | EdgesQuery) -> None:
        """The list's row and its edges, in one statement."""
        shard = query.id1 >> SHARD_SHIFT
        schema = schema_name(shard)
        table = f"{schema}.{self._edge_tables(query.atype)}"
        key = (query.id1, query.atype)
        id_sets = list(_split(set(query.id2s))) if isinstance(query, EdgesQuery) else []
        rows = len(query.id2s) if isinstance(query, EdgesQuery) else query.limit
        statement = self._room(shard, rows + 1, 1 + max(1, len(id_sets)))
        self._add(
            statement,
            _HEAD,
            index,
            f"id1, version, count, NULL FROM {schema}.assoc_lists FORCE INDEX (PRIMARY) WHERE id1 = %s AND atype = %s",
            *key,
        )
        newest_first = "ORDER BY time DESC, id2 DESC"
        if isinstance(query, EdgesQuery):
            for id2s in id_sets:
                sql = (
                    f"time, id2, atype, data FROM {table} FORCE INDEX (PRIMARY) "
                    "WHERE id1 = %s AND atype = %s AND id2 IN %s AND time BETWEEN %s AND %s"
                )
                self._add(statement, _EDGE, index, sql, *key, id2s, query.low, query.high)
        elif isinstance(query, TimeRangeQuery) and query.below_id2:
            # Two ranges of the index, in its order: edges of one time may be more than a page, or a million.
            sql = (
                f"time, id2, atype, data FROM {table} FORCE INDEX (by_time) WHERE id1 = %s AND atype = %s "
                "AND ((time = %s AND time >= %s AND id2 < %s) OR (time >= %s AND time < %s)) "
                f"{newest_first} LIMIT %s"
            )
            high, low = query.high, query.low
            self._add(statement, _EDGE, index, sql, *key, high, low, query.below_id2, low, high, query.limit)
        elif isinstance(query, TimeRangeQuery):
            sql = (
                f"time, id2, atype, data FROM {table} FORCE INDEX (by_time) "
                f"WHERE id1 = %s AND atype = %s AND time BETWEEN %s AND %s {newest_first} LIMIT %s"
            )
            self._add(statement, _EDGE, index, sql, *key, query.low, query.high, query.limit)
        elif query.pos < _DEFERRED_FROM_POS:
            sql = (
                f"time, id2, atype, data FROM {table} FORCE INDEX (by_time) "
                f"WHERE id1 = %s AND atype = %s {newest_first} LIMIT %s, %s"
            )
            self._add(statement, _EDGE, index, sql, *key, query.pos, query.limit)
        else:
            sql = (
                "full_row.time, full_row.id2, full_row.atype, full_row.data "
                f"FROM (SELECT id2 FROM {table} FORCE INDEX (by_time) WHERE id1 = %s AND atype = %s {newest_first} "
                f"LIMIT %s, %s) AS page JOIN {table} AS full_row FORCE INDEX (PRIMARY) "
                "ON full_row.id1 = %s AND full_row.atype = %s AND full_row.id2 = page.id2"
            )
            self._add(statement, _EDGE, index, sql, *key, query.pos, query.limit, *key)

    def _room(self, shard: int, rows: int, parts: int) -> Statement:
        """The last statement, when so much more fits into it, else a new one; with the shard's epoch."""
        last = self.statements[-1] if self.statements else None
        if (
            last is None
            or last.cost + rows > self._rows_per_statement
            or len(last.parts) + parts >= self._parts_per_statement
        ):
            last = Statement()
            self.statements.append(last)
        last.cost += rows
        if shard not in last.shards:
            last.shards.add(shard)
            sql = f"version_epoch, only_row, only_row, NULL FROM {schema_name(shard)}.shard WHERE only_row = 1"
            self._add(last, _EPOCH, shard, sql)
        return last

    def _add(self, statement: Statement, kind: int, index: int, sql: str, *values: object) -> None:
        statement.parts.append(f"(SELECT {len(self._targets)}, {sql})")
        statement.values.extend(values)
        self._targets.append((kind, index))


def _split(ids: set[int]) -> Iterator[list[int]]:
    ordered = sorted(ids)
    for start in range(0, len(ordered), MAX_KEYS_PER_PART):
        yield ordered[start : start + MAX_KEYS_PER_PART]
