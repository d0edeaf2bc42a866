# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""The statements of a write transaction, as pure functions from rows to SQL with bound values.

The number of round trips decides the rate. All locking reads of a transaction are one packet of two UNIONs, whatever
the number of shards and tables (a result costs the client 100 µs before its first row), and all writes are one packet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final

from tao.model.errors import InternalError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ListRow, ObjectRow, RowChanges, ShardRow, WriteKeys
from tao.storage.dialect import Dialect
from tao.storage.names import EdgeTables, schema_name
from tao.storage.result_packets import Row

_OBJECT: Final = 0
_LIST: Final = 1
_EDGE: Final = 2
_INTENT: Final = 3
_RECOUNT: Final = 4
_RESERVED_TIME: Final = 5

_PACKET_DATA_BYTES: Final = 4 << 20
"""Bytes of data in one packet: escaped, they may double, and MariaDB accepts no packet above 16 MB."""
_ROW_BYTES: Final = 100
"""Bytes that a row takes in text beside its data."""
_SHARD_COLUMNS: Final = "master_server, version_epoch, owner, generation"


class StatementText:
    """SQL text and the values for its placeholders, which grow side by side."""

    __slots__ = ("data_bytes", "parts", "values")

    def __init__(self) -> None:
        self.data_bytes = 0
        self.parts: list[str] = []
        self.values: list[object] = []

    def add(self, sql: str, *values: object) -> None:
        self.parts.append(sql)
        self.values.extend(values)


def lock_shards(shards: Sequence[int]) -> StatementText:
    """Return the statement that share-locks and reads the shard rows, in shard order: one UNION."""
    text = StatementText()
    for shard in sorted(shards):
        text.add(
            f"(SELECT %s AS shard, {_SHARD_COLUMNS} FROM {schema_name(shard)}.shard WHERE only_row = 1 "
            "LOCK IN SHARE MODE)",
            shard,
        )
    return text


def lock_shards_for_takeover(shards: Sequence[int]) -> StatementText:
    """Return the statement that locks and reads shard rows exclusively: one UNION. Of several shards, those that are
    locked are skipped."""
    text = StatementText()
    how = "FOR UPDATE SKIP LOCKED" if len(shards) > 1 else "FOR UPDATE"
    for shard in sorted(shards):
        text.add(
            f"(SELECT %s AS shard, {_SHARD_COLUMNS} FROM {schema_name(shard)}.shard WHERE only_row = 1 {how})", shard
        )
    return text


def read_shards(shards: Sequence[int]) -> StatementText:
    """Return the statement that reads shard rows without locks: one UNION."""
    text = StatementText()
    for shard in shards:
        text.add(f"(SELECT %s AS shard, {_SHARD_COLUMNS} FROM {schema_name(shard)}.shard WHERE only_row = 1)", shard)
    return text


def read_intents(shard: int, far_shard: int, limit: int) -> StatementText:
    """Return the statement that reads the intents between two shards, and in front of each, or alone when there are
    none, the version epoch of the first shard."""
    schema = schema_name(shard)
    text = StatementText()
    text.add(
        f"SELECT s.version_epoch, i.low_id, i.high_id, i.atypes, i.token, i.created_unix_ms FROM {schema}.shard AS s "
        f"LEFT JOIN {schema}.inverse_intents AS i ON i.high_id BETWEEN %s AND %s WHERE s.only_row = 1 LIMIT %s",
        far_shard << SHARD_SHIFT,
        (far_shard + 1 << SHARD_SHIFT) - 1,
        limit,
    )
    return text


def write_owners(rows: Iterable[ShardRow]) -> StatementText:
    """Return the statements that write owner and generation of locked shard rows."""
    text = StatementText()
    for row in rows:
        text.add(
            f"UPDATE {schema_name(row.shard)}.shard SET generation = %s, owner = %s WHERE only_row = 1",
            row.generation,
            row.owner,
        )
    return text


def lock_rows(keys: WriteKeys, edge_tables: EdgeTables) -> StatementText:
    """Return the statement that locks and reads the named rows, shard by shard, in key order within a table. The
    primary key is forced: on a small table the optimizer would scan, and wait for the rows of other transactions."""
    objects: dict[int, list[int]] = defaultdict(list)
    for object_id in sorted(keys.objects):
        objects[object_id >> SHARD_SHIFT].append(object_id)
    edges: dict[int, dict[str, dict[ListKey, list[int]]]] = defaultdict(dict)
    for edge in sorted(keys.edges):
        by_list = edges[edge.id1 >> SHARD_SHIFT].setdefault(edge_tables(edge.atype), defaultdict(list))
        by_list[ListKey(edge.id1, edge.atype)].append(edge.id2)
    lists: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(keys.lists | keys.recounts | {ListKey(edge.id1, edge.atype) for edge in keys.edges}):
        lists[key.id1 >> SHARD_SHIFT][key.id1].append(key.atype)
    recounts: dict[int, dict[str, dict[int, list[int]]]] = defaultdict(dict)
    for key in sorted(keys.recounts):
        by_id1 = recounts[key.id1 >> SHARD_SHIFT].setdefault(edge_tables(key.atype), defaultdict(list))
        by_id1[key.id1].append(key.atype)
    intents: dict[int, list[IntentKey]] = defaultdict(list)
    for pair in sorted(keys.intents):
        intents[pair.low_id >> SHARD_SHIFT].append(pair)
    text = StatementText()
    for shard in sorted(objects.keys() | edges.keys() | lists.keys() | intents.keys()):
        schema = schema_name(shard)
        if shard in objects:
            text.add(
                f"(SELECT {_OBJECT} AS kind, id AS a, otype AS b, version AS c, deleted AS d, data AS e "
                f"FROM {schema}.objects FORCE INDEX (PRIMARY) WHERE id IN %s FOR UPDATE)",
                objects[shard],
            )
        if shard in lists:
            where = StatementText()
            for id1, atypes in lists[shard].items():
                where.add("(id1 = %s AND atype IN %s)", id1, atypes)
            text.add(
                f"(SELECT {_LIST}, id1, atype, count, version, NULL FROM {schema}.assoc_lists FORCE INDEX (PRIMARY) "
                f"WHERE {' OR '.join(where.parts)} FOR UPDATE)",
                *where.values,
            )
        for table, by_list in sorted(edges.get(shard, {}).items()):
            where = StatementText()
            for key, id2s in by_list.items():
                where.add("(id1 = %s AND atype = %s AND id2 IN %s)", key.id1, key.atype, id2s)
            text.add(
                f"(SELECT {_EDGE}, id1, atype, id2, time, data FROM {schema}.{table} FORCE INDEX (PRIMARY) "
                f"WHERE {' OR '.join(where.parts)} FOR UPDATE)",
                *where.values,
            )
        for table, recounted in sorted(recounts.get(shard, {}).items()):
            where = StatementText()
            for id1, atypes in recounted.items():
                where.add("(id1 = %s AND atype IN %s)", id1, atypes)
            # A locking count: a plain one would miss rows that another transaction has written and not committed yet,
            # or count too early. It is cast, because COUNT is signed, and a UNION of signed and unsigned makes decimals
            # of the whole column, also for other rows.
            text.add(
                f"(SELECT {_RECOUNT}, id1, atype, CAST(COUNT(*) AS UNSIGNED), MAX(version), NULL FROM {schema}.{table} "
                f"FORCE INDEX (PRIMARY) WHERE {' OR '.join(where.parts)} GROUP BY id1, atype LOCK IN SHARE MODE)",
                *where.values,
            )
        if shard in intents:
            where = StatementText()
            for pair in intents[shard]:
                where.add("(low_id = %s AND high_id = %s)", pair.low_id, pair.high_id)
            text.add(
                f"(SELECT {_INTENT}, low_id, high_id, token, created_unix_ms, atypes FROM {schema}.inverse_intents "
                f"FORCE INDEX (PRIMARY) WHERE {' OR '.join(where.parts)} FOR UPDATE)",
                *where.values,
            )
    _lock_reserved_times(text, keys.reserved_times)
    return text


def _lock_reserved_times(text: StatementText, shards: Iterable[int]) -> None:
    for shard in sorted(shards):
        # Numbers are cast, because a UNION of signed and unsigned makes decimals of the whole column.
        text.add(
            f"(SELECT {_RESERVED_TIME} AS kind, CAST({shard:d} AS UNSIGNED) AS a, reserved_unix_ms AS b, "
            f"CAST(0 AS UNSIGNED) AS c, CAST(0 AS UNSIGNED) AS d, NULL AS e FROM {schema_name(shard)}.reserved_ids "
            "WHERE only_row = 1 FOR UPDATE)"
        )


def shard_row(row: Row) -> ShardRow:
    """Make the row of ``shard`` from the columns of table ``shard``."""
    shard, master_server, version_epoch, owner, generation = row
    return ShardRow(int(shard), master_server.decode(), version_epoch, owner.decode(), generation)


def existing_rows(rows: Iterable[Row]) -> ExistingRows:
    """Make the existing rows from the rows of `lock_rows`."""
    existing = ExistingRows()
    for kind, a, b, c, d, e in rows:
        if kind == _OBJECT:
            existing.objects[a] = ObjectRow(a, b, c, bool(d), e)
        elif kind == _LIST:
            existing.lists[ListKey(a, b)] = ListRow(c, d)
        elif kind == _EDGE:
            existing.edges[EdgeKey(a, b, c)] = Edge(c, d, e)
        elif kind == _RECOUNT:
            existing.recounted[ListKey(a, b)] = ListRow(c, d)
        elif kind == _RESERVED_TIME:
            existing.reserved_times[a] = b
        else:
            existing.intents[IntentKey(a, b)] = intent_row((a, b, e, c, d))
    return existing


def intent_row(row: Row) -> IntentRow:
    """Make the row from ``low_id, high_id, atypes, token, created_unix_ms``."""
    low_id, high_id, atypes, token, created_unix_ms = row
    numbers = tuple(int(number) for number in atypes.split(b",") if number)
    return IntentRow(low_id, high_id, numbers, token, created_unix_ms)


def write_rows(changes: RowChanges, edge_tables: EdgeTables, dialect: Dialect) -> list[StatementText]:
    """Return the statements that write ``changes``, as packets: the parts of each are to be joined by semicolons.
    Upserts cannot span shards. Raises `InternalError` for an edge put without its list, whose version would be unknown.
    """
    tables: dict[tuple[str, tuple[str, ...], tuple[str, ...]], list[tuple[object, ...]]] = defaultdict(list)
    for row in changes.put_objects:
        tables[
            f"{schema_name(row.id >> SHARD_SHIFT)}.objects", ("id",), ("otype", "version", "deleted", "data")
        ].append((row.id, row.otype, row.version, int(row.deleted), row.data))
    for edge_key, edge in changes.put_edges.items():
        of_list = changes.put_lists.get(ListKey(edge_key.id1, edge_key.atype))
        if of_list is None:
            raise InternalError(f"edge {edge_key} is written, but not the version of its list")
        table = f"{schema_name(edge_key.id1 >> SHARD_SHIFT)}.{edge_tables(edge_key.atype)}"
        tables[table, ("id1", "atype", "id2"), ("time", "version", "data")].append(
            (edge_key.id1, edge_key.atype, edge_key.id2, edge.time, of_list.version, edge.data)
        )
    for key, of_list in changes.put_lists.items():
        tables[f"{schema_name(key.id1 >> SHARD_SHIFT)}.assoc_lists", ("id1", "atype"), ("count", "version")].append(
            (key.id1, key.atype, of_list.count, of_list.version)
        )
    for intent in changes.put_intents:
        table = f"{schema_name(intent.low_id >> SHARD_SHIFT)}.inverse_intents"
        tables[table, ("low_id", "high_id"), ("atypes", "token", "created_unix_ms")].append(
            (intent.low_id, intent.high_id, ",".join(map(str, intent.atypes)), intent.token, intent.created_unix_ms)
        )
    for shard, reserved_unix_ms in changes.put_reserved_times.items():
        tables[f"{schema_name(shard)}.reserved_ids", ("only_row",), ("reserved_unix_ms",)].append((1, reserved_unix_ms))
    packets = [StatementText()]
    _delete_edges(packets[0], changes.delete_edges, edge_tables)
    for (table, columns, values), rows in sorted(tables.items()):
        rows.sort()
        for some, data_bytes in _split(rows):
            if packets[-1].data_bytes + data_bytes > _PACKET_DATA_BYTES:
                packets.append(StatementText())
            packets[-1].data_bytes += data_bytes
            # Each value has its own placeholder: the driver marks bytes as binary only outside of sequences.
            packets[-1].add(dialect.upsert(table, columns, values, len(some)), *chain.from_iterable(some))
    for pair in sorted(changes.delete_intents):
        packets[-1].add(
            f"DELETE FROM {schema_name(pair.low_id >> SHARD_SHIFT)}.inverse_intents WHERE low_id = %s AND high_id = %s",
            pair.low_id,
            pair.high_id,
        )
    return [packet for packet in packets if packet.parts]


def _split(rows: Sequence[tuple[object, ...]]) -> Iterator[tuple[Sequence[tuple[object, ...]], int]]:
    """Yield runs of rows with at most `_PACKET_DATA_BYTES` of data, or of one row, and the bytes of each run."""
    start, data_bytes = 0, 0
    for at, row in enumerate(rows):
        size = _ROW_BYTES + sum([len(value) for value in row if type(value) is bytes])
        if at > start and data_bytes + size > _PACKET_DATA_BYTES:
            yield rows[start:at], data_bytes
            start, data_bytes = at, 0
        data_bytes += size
    yield rows[start:], data_bytes


def _delete_edges(text: StatementText, keys: Iterable[EdgeKey], edge_tables: EdgeTables) -> None:
    by_table: dict[str, dict[ListKey, list[int]]] = defaultdict(lambda: defaultdict(list))
    for key in sorted(keys):
        table = f"{schema_name(key.id1 >> SHARD_SHIFT)}.{edge_tables(key.atype)}"
        by_table[table][ListKey(key.id1, key.atype)].append(key.id2)
    for table, lists in sorted(by_table.items()):
        where = StatementText()
        for of_list, id2s in lists.items():
            where.add("(id1 = %s AND atype = %s AND id2 IN %s)", of_list.id1, of_list.atype, id2s)
        # DELETE takes no index hint, and neither does a multi-table DELETE. Its ranges are on the whole primary key.
        text.add(f"DELETE FROM {table} WHERE {' OR '.join(where.parts)}", *where.values)
