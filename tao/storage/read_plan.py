# ruff: noqa: S608 - schema and table names come from tao.storage.names, and all else is a number
"""Turn queries into statements, and rows into encoded answers. Pure functions.

One statement answers many queries: a UNION whose parts are numbered in the first column, so that keys of several shards
share a round trip and a result (merging keys is what saves the client's CPU). A part begins with the shard's row, which
holds the version epoch, and joins an object, a count, or a list's row with its edges, when no order is asked of them.
So a part has a row even where nothing is found, and most of a server's work for a statement is by part. InnoDB gives a
statement one snapshot. Version, count and edges of one answer always stand in one statement, so they agree.

Columns that a part does not use repeat one of its own: a NULL or a literal beside a BIGINT UNSIGNED makes the whole
column of the union DECIMAL.

A version epoch that is *older* than the data would be safe as well: the fill counts as older than it is, and a cache
that knows a newer version drops it. A newer one would not be safe.

Most lists have fewer edges than a query asks for. Such a list is read by the primary key, under which its rows lie side
by side; the index of times would look each of them up. Its count says, within the statement, whether it is short. The
few lists that are longer are read in a second statement, by the index.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from tao.model.edge_block import COMPLETE, PREFIX, pack_columns
from tao.model.graph import ABSENT, MAX_TIME, deleted_data, encode_count, encode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.storage.master_check import MasterState, master_check, master_states
from tao.storage.names import EdgeTables, schema_name
from tao.storage.result_packets import Columns, Row

COLUMNS: Final = Columns(
    ("part", "version_epoch", "id_or_time", "otype_or_id2", "version", "count", "data"), (*[int] * 6, None)
)
"""The first columns of every statement's result."""

_OBJECTS: Final = 0
_COUNTS: Final = 1
_LIST: Final = 2
"""The list's row with its edges, in any order."""
_HEAD: Final = 3
"""The list's row alone."""
_PAGE: Final = 4
"""Edges alone, by the index."""

MAX_KEYS_PER_PART: Final = 500
"""Ids in one IN list; beyond that, parsing the text costs more than another part."""
_DEFERRED_FROM_POS: Final = 128
"""From this number on, skipped edges are skipped in the index alone; below it, the detour costs more than it saves."""
_WHOLE_LIMITS: Final = range(100, 1001)
"""Limits of prefixes that are tried as a whole list. Fills ask for 129 edges, and few lists have more. This does not
hold for a smaller page, and for a larger one the edges would have to be sorted for a millisecond."""

_ABSENT_OBJECT: Final = encode_object(0, ABSENT, b"")
_DELETED: Final = 1 << 16
"""Added to the type of a deleted object, beyond every type."""

_OBJECT_COLUMNS: Final = f"o.id, o.otype + {_DELETED} * o.deleted, o.version, s.only_row, o.data"
_COUNT_COLUMNS: Final = "l.id1, s.only_row, l.version, l.count, NULL"
_EDGE_COLUMNS: Final = "a.time, a.id2, l.version, l.count, a.data"

_NO_COUNT: Final = encode_count(0, 0)

_ListQuery = RangeQuery | TimeRangeQuery | EdgesQuery


def shard_of_query(query: Query) -> int:
    """Return the shard that answers the query."""
    return (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT


class Statement:
    """One UNION. Numbers stand in its text; ``values`` are the names that are bound."""

    __slots__ = ("cost", "parts", "shard", "values")

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.values: list[object] = []
        self.shard = -1  # of a part
        self.cost = 0

    @property
    def sql(self) -> str:
        parts = self.parts
        return parts[0] if len(parts) == 1 else f"({') UNION ALL ('.join(parts)})"


class ReadPlan:
    """The statements for some queries of one server, and the place where their rows come together.

    ``rows_per_statement`` and ``parts_per_statement`` bound a statement; a query that needs more gets a statement of
    its own.
    """

    def __init__(
        self,
        queries: Sequence[Query],
        edge_tables: EdgeTables,
        *,
        master: str = "",
        rows_per_statement: int = 8192,
        parts_per_statement: int = 128,
    ) -> None:
        """``master``: for critical reads, the server that is asked. The version epoch of a shard is then 0 where its
        row names another master: the shard moves to another database, which may have later rows by now."""
        self._queries = queries
        self._edge_tables = edge_tables
        self._master = master
        self._rows_per_statement = rows_per_statement
        self._parts_per_statement = parts_per_statement
        self._targets: list[tuple[int, int, int]] = []  # part number → kind, shard, and type or query
        self._objects: dict[int, bytes] = {}
        self._counts: dict[tuple[int, int], bytes] = {}
        self._lists: dict[int, tuple[int, int]] = {}  # query → version, recorded count
        self._edges: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)
        self._tried_whole: dict[int, RangeQuery] = {}
        self.version_epochs: dict[int, int] = {}
        self.master_states: dict[int, MasterState] = {}
        """What the server said of itself after the rows, by the shard whose row was looked at."""
        self._checks_due = 0
        self.statements: list[Statement] = []
        """Return the statements to send now."""
        self._plan()

    def receive(self, rows: list[Row]) -> None:
        """Take rows of any of the statements."""
        latest, kind, index = -1, 0, 0
        edges: list[tuple[int, int, bytes]] = []
        for part, epoch, a, b, version, count, data in rows:
            if part != latest:  # the rows of a part are adjacent
                latest = part
                kind, shard, index = self._targets[part]
                if kind != _PAGE:
                    # Statements run one after the other: rows that were read first may lack what the later epoch stands
                    # for.
                    self.version_epochs[shard] = min(epoch, self.version_epochs.get(shard, epoch))
                if kind >= _LIST:
                    edges = self._edges[index]
                    if kind != _PAGE:
                        self._lists[index] = (version or 0, count or 0)
            if a is None or kind == _HEAD:
                continue  # nothing is found, or nothing was asked for
            if kind >= _LIST:
                edges.append((a, b, data))
            elif kind == _OBJECTS:
                is_there = b < _DELETED
                self._objects[a] = (
                    encode_object(version, b, data)
                    if is_there
                    else encode_object(version, ABSENT, deleted_data(b - _DELETED))
                )
            else:
                self._counts[a, index] = encode_count(version, count)

    def checked_sql(self, statement: Statement, *, with_lease: bool) -> str:
        """Return the statement's UNION, and behind it the statement that shows whether the server was the master when
        it ran. The plan is unconfirmed until `receive_check` gets the row of the latter."""
        self._checks_due += 1
        return f"{statement.sql}; {master_check(statement.shard, with_lease=with_lease)}"

    def receive_check(self, rows: list[Row]) -> None:
        """Take the row of the check behind a statement's rows."""
        self.master_states.update(master_states(rows))
        self._checks_due -= len(rows)

    @property
    def is_unconfirmed(self) -> bool:
        """True while a check has brought no row: that of its shard is missing, or the check was never answered."""
        return self._checks_due > 0

    @property
    def names_other_master(self) -> bool:
        """True when the row of a shard of a critical read names another server as master: the shard moves."""
        return bool(self._master) and 0 in self.version_epochs.values()

    def go_on(self) -> None:
        """Note that all rows have been received. `statements` become those for lists that turned out to be longer than
        expected, or none."""
        tried, self._tried_whole = self._tried_whole, {}
        self.statements = []
        for index, query in tried.items():
            # Rows written by hand may outnumber the recorded count, and be any rows of the list.
            if max(self._lists.get(index, (0, 0))[1], len(self._edges[index])) > query.limit:
                self._edges[index].clear()
                self._plan_list(index, query)

    def answers(self) -> Iterator[bytes]:
        """Return the encoded answer to each query, in order, once there are no more statements."""
        for index, query in enumerate(self._queries):
            if isinstance(query, ObjectQuery):
                yield self._objects.get(query.id, _ABSENT_OBJECT)
            elif isinstance(query, CountQuery):
                yield self._counts.get((query.id1, query.atype), _NO_COUNT)
            else:
                yield self._block(index, query)

    def _block(self, index: int, query: _ListQuery) -> bytes:
        version, recorded = self._lists.get(index, (0, 0))
        edges = self._edges.pop(index, [])
        edges.sort(reverse=True)  # by time, then id2; a union promises no order, though it keeps it
        flags = 0
        if len(edges) == recorded:
            flags = PREFIX | COMPLETE
        elif (isinstance(query, RangeQuery) and query.pos == 0) or (
            isinstance(query, TimeRangeQuery) and query.high >= MAX_TIME and not query.start
        ):
            flags = PREFIX
        # Rows written by hand may outnumber the recorded count, until the list is touched.
        count = max(recorded, len(edges))
        times, id2s, data = ([list(column) for column in zip(*edges, strict=True)]) if edges else ([], [], [])
        return pack_columns(version, count, flags, id2s, times, data)

    def _plan(self) -> None:
        objects: dict[int, set[int]] = {}
        counts: dict[tuple[int, int], set[int]] = {}
        for index, query in enumerate(self._queries):
            if isinstance(query, ObjectQuery):
                objects.setdefault(query.id >> SHARD_SHIFT, set()).add(query.id)
            elif isinstance(query, CountQuery):
                counts.setdefault((query.id1 >> SHARD_SHIFT, query.atype), set()).add(query.id1)
            elif isinstance(query, RangeQuery) and query.pos == 0 and query.limit in _WHOLE_LIMITS:
                self._tried_whole[index] = query
                self._plan_whole(index, query)
            elif isinstance(query, EdgesQuery) and not query.id2s:
                self._plan_list(index, RangeQuery(query.id1, query.atype, 0, 0))
            else:
                self._plan_list(index, query)
        for shard, ids in objects.items():
            for some in _split(ids):
                found = f"objects AS o FORCE INDEX (PRIMARY) ON o.id IN ({_listed(some)})"
                self._add(self._room(len(some), 1), _OBJECTS, shard, 0, _OBJECT_COLUMNS, found)
        for (shard, atype), id1s in counts.items():
            for some in _split(id1s):
                found = f"assoc_lists AS l FORCE INDEX (PRIMARY) ON l.id1 IN ({_listed(some)}) AND l.atype = {atype:d}"
                self._add(self._room(len(some), 1), _COUNTS, shard, atype, _COUNT_COLUMNS, found)

    def _plan_whole(self, index: int, query: RangeQuery) -> None:
        """Plan to read all edges, if there are no more than wanted."""
        edges = (
            f"{self._table(query)} AS a FORCE INDEX (PRIMARY) "
            f"ON a.id1 = {query.id1:d} AND a.atype = {query.atype:d} AND COALESCE(l.count, 0) <= {query.limit:d}"
        )
        # One row more than wanted shows that the recorded count is wrong.
        self._add_list(self._room(query.limit + 1, 1), index, query, edges, f" LIMIT {query.limit + 1:d}")

    def _plan_list(self, index: int, query: _ListQuery) -> None:
        """Plan to read the list's row and the edges, in one statement."""
        table = self._table(query)
        of_list = f"id1 = {query.id1:d} AND atype = {query.atype:d}"
        if isinstance(query, EdgesQuery):
            id_sets = _split(set(query.id2s))
            statement = self._room(len(query.id2s) + 1, len(id_sets))
            for id2s in id_sets:
                edges = (
                    f"{table} AS a FORCE INDEX (PRIMARY) ON a.id1 = {query.id1:d} AND a.atype = {query.atype:d} "
                    f"AND a.id2 IN ({_listed(id2s)}) AND a.time BETWEEN {query.low:d} AND {query.high:d}"
                )
                self._add_list(statement, index, query, edges)
            return
        # Separate parts: within a join, the server would put the edges into a temporary table.
        statement = self._room(query.limit + 1, 2)
        head = f"assoc_lists AS l ON l.id1 = {query.id1:d} AND l.atype = {query.atype:d}"
        shard = query.id1 >> SHARD_SHIFT
        self._add(statement, _HEAD, shard, index, "s.only_row, s.only_row, l.version, l.count, NULL", head)
        newest_first = "ORDER BY time DESC, id2 DESC"
        columns = f"{len(self._targets)}, id1, time, id2, id1, id1, data"
        where = f"FROM {table} FORCE INDEX (by_time) WHERE {of_list}"
        if isinstance(query, TimeRangeQuery) and query.below_id2:
            # Two ranges of the index, in its order: the edges of one time may be more than a page, or a million.
            high, low = query.high, query.low
            page = (
                f"SELECT {columns} {where} "
                f"AND ((time = {high:d} AND time >= {low:d} AND id2 < {query.below_id2:d}) "
                f"OR (time >= {low:d} AND time < {high:d})) {newest_first} LIMIT {query.limit:d}"
            )
        elif isinstance(query, TimeRangeQuery) and not query.pos:
            page = (
                f"SELECT {columns} {where} AND time BETWEEN {query.low:d} AND {query.high:d} {newest_first} "
                f"LIMIT {query.limit:d}"
            )
        else:
            if isinstance(query, TimeRangeQuery):
                where += f" AND time BETWEEN {query.low:d} AND {query.high:d}"
            page = f"{where} {newest_first} LIMIT {query.pos:d}, {query.limit:d}"
            if query.pos < _DEFERRED_FROM_POS:
                page = f"SELECT {columns} {page}"
            else:
                full_row = ", ".join(f"full_row.{name}" for name in ("id1", "time", "id2", "id1", "id1", "data"))
                page = (
                    f"SELECT {len(self._targets)}, {full_row} FROM (SELECT id2 {page}) AS page "
                    f"JOIN {table} AS full_row FORCE INDEX (PRIMARY) ON full_row.id1 = {query.id1:d} "
                    f"AND full_row.atype = {query.atype:d} AND full_row.id2 = page.id2"
                )
        statement.parts.append(page)
        self._targets.append((_PAGE, shard, index))

    def _table(self, query: _ListQuery) -> str:
        return f"{schema_name(query.id1 >> SHARD_SHIFT)}.{self._edge_tables(query.atype)}"

    def _room(self, rows: int, parts: int) -> Statement:
        """Return the last statement when this much more fits into it, else a new one."""
        last = self.statements[-1] if self.statements else None
        if (
            last is None
            or last.cost + rows > self._rows_per_statement
            or len(last.parts) + parts > self._parts_per_statement
        ):
            last = Statement()
            self.statements.append(last)
        last.cost += rows
        return last

    def _add_list(self, statement: Statement, index: int, query: _ListQuery, edges: str, end: str = "") -> None:
        found = f"assoc_lists AS l ON l.id1 = {query.id1:d} AND l.atype = {query.atype:d} LEFT JOIN {edges}"
        self._add(statement, _LIST, query.id1 >> SHARD_SHIFT, index, _EDGE_COLUMNS, found, end)

    def _add(
        self, statement: Statement, kind: int, shard: int, index: int, columns: str, found: str, end: str = ""
    ) -> None:
        schema = schema_name(shard)
        statement.shard = shard
        epoch = "s.version_epoch"
        if self._master:
            # In the snapshot of the rows: a shard that was not fenced in it had no later rows in another database.
            epoch = "CAST(s.version_epoch * (s.master_server = %s) AS UNSIGNED)"
            statement.values.append(self._master)
        statement.parts.append(
            f"SELECT {len(self._targets)}, {epoch}, {columns} "
            f"FROM {schema}.shard AS s LEFT JOIN {schema}.{found} WHERE s.only_row = 1{end}"
        )
        self._targets.append((kind, shard, index))


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(int.__repr__, ids))  # raises for anything else


def _split(ids: set[int]) -> Sequence[list[int]]:
    ordered = sorted(ids)
    if len(ordered) <= MAX_KEYS_PER_PART:
        return (ordered,)
    return [ordered[start : start + MAX_KEYS_PER_PART] for start in range(0, len(ordered), MAX_KEYS_PER_PART)]
