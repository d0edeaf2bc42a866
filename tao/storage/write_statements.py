# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""The statements of a write transaction, as pure functions from rows to SQL with bound values. Keys are numbers, and
stand in the text.

The number of round trips decides the rate, and then the number of statements: the server sends the answer to each by
itself, which wakes the client. All locking reads of a transaction are one UNION, whatever the number of shards and
tables, and all writes are one packet.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Final

from tao.model.changes import sort_edges
from tao.model.edge_states import EdgeRegisters, NodeState
from tao.model.errors import InternalError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobQuery, JobRow, JobState, PausedKind
from tao.model.rows import (
    EdgePage,
    ExistingRows,
    IntentKey,
    IntentRow,
    ListRow,
    ObjectRow,
    OldestEdges,
    RowChanges,
    ShardRow,
    StateRows,
    WriteKeys,
)
from tao.schema.types import STATES_TABLE
from tao.storage.dialect import Dialect
from tao.storage.names import EdgeTables, schema_name
from tao.storage.result_packets import Columns, Row

_OBJECT: Final = 0
_LIST: Final = 1
_EDGE: Final = 2
_INTENT: Final = 3
_RECOUNT: Final = 4
_RESERVED_TIME: Final = 5
_STATE_EDGE: Final = 6
_JOB: Final = 7
_PAUSED_JOBS: Final = 8
_NODE: Final = 9
"""Kinds of the rows of `lock_rows`. The kind of a row of ``shard`` is negative: ``~shard``."""
LOCKED_COLUMNS: Final = Columns(("kind", "a", "b", "c", "d", "e", "f"), (int, int, int, int, int, None, None))
"""The columns of `lock_rows`: numbers and texts, whose meaning depends on the kind."""

_DELETED_AT_ONCE: Final = 500
"""Most edges that one statement deletes: the server keeps all parts of a union in memory while it plans it."""
_PACKET_DATA_BYTES: Final = 4 << 20
"""Bytes of data in one packet: escaped, they may double, and MariaDB accepts no packet above 16 MB."""
_ROW_BYTES: Final = 100
"""Bytes that a row takes in text beside its data."""
REGISTERS_AND_DATA: Final = "CONCAT_WS(',', own_state, state_us, payload_us, id2_state, id2_state_us, data)"
_EDGE_KEY: Final = ("id1", "atype", "id2")
_EDGE_COLUMNS: Final = ("time", "version", "data")
_REGISTER_COLUMNS: Final = ("own_state", "state_us", "payload_us", "id2_state", "id2_state_us", "changed_unix_s")
_JOB_TEXTS: Final = ("kind", "worker", "progress", "error", "body")
_JOB_NUMBERS: Final = (
    *("priority", "state", "due_unix_ms", "attempts", "leases", "edges", "created_unix_ms", "repeat_seconds"),
)
_JOB_LENGTHS: Final = ", ".join(f"LENGTH({name})" for name in _JOB_TEXTS)
_JOB_COLUMNS: Final = f"CONCAT_WS(',', {', '.join(_JOB_NUMBERS)}, {_JOB_LENGTHS}, CONCAT({', '.join(_JOB_TEXTS)}))"
"""A row of ``jobs`` without its id: its numbers and the lengths of its texts, then the texts, which may hold commas."""
_LISTED_JOB_COLUMNS: Final = _JOB_COLUMNS.replace("LENGTH(body)", "0").replace(", body)", ")")
"""The same with an empty body: up to 64 KiB of each job, of which many are listed."""
_ZERO: Final = "CAST(0 AS UNSIGNED)"
_SHARD_COLUMNS: Final = "master_server, version_epoch, owner, generation"


_Tables = defaultdict[tuple[str, tuple[str, ...], tuple[str, ...]], list[tuple[object, ...]]]
"""Rows by table, columns of the key, and other columns."""


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


def _among(columns: str, keys: Sequence[tuple[int, ...]]) -> str:
    """Return the condition that these columns of the primary key are one of the keys.

    A list of keys takes the server two thirds of what one condition for each key, joined by OR, takes. Keys are
    numbers, and stand in the text unbound: text is refused here, and to bind a number costs more than all else about
    its row."""
    key = f"({', '.join(['%d'] * len(keys[0]))})"
    return f"({columns}) IN ({', '.join([key] * len(keys)) % tuple(chain.from_iterable(keys))})"


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


class _ShardKeys:
    """The keys of rows of one shard, each kind in order.

    Edges and recounted lists are by the table of the edges, and edges with states, as pairs of ids, by the types in
    whose lists they may be."""

    __slots__ = ("edges", "intents", "lists", "nodes", "objects", "recounts", "state_edges")

    def __init__(self) -> None:
        self.objects: list[int] = []
        self.lists: list[tuple[int, int]] = []
        self.nodes: list[tuple[int, int]] = []
        self.edges: dict[str, list[tuple[int, int, int]]] = {}
        self.state_edges: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        self.recounts: dict[str, list[tuple[int, int]]] = {}
        self.intents: list[tuple[int, int]] = []


def _by_shard(keys: WriteKeys, edge_tables: EdgeTables) -> dict[int, _ShardKeys]:
    # Sorted as tuples of numbers, which are compared in a third of the time of named keys.
    shards: dict[int, _ShardKeys] = defaultdict(_ShardKeys)
    for object_id in sorted(keys.objects):
        shards[object_id >> SHARD_SHIFT].objects.append(object_id)
    edges = sorted([(key.id1, key.atype, key.id2) for key in keys.edges])
    tables: dict[int, str] = {}
    for edge in edges:
        table = tables.get(edge[1]) or tables.setdefault(edge[1], edge_tables(edge[1]))
        shards[edge[0] >> SHARD_SHIFT].edges.setdefault(table, []).append(edge)
    for end in sorted([(key.id1, key.id2, numbers) for key, numbers in keys.state_edges.items()]):
        shards[end[0] >> SHARD_SHIFT].state_edges.setdefault(end[2], []).append(end[:2])
    recounts = sorted([(key.id1, key.atype) for key in keys.recounts])
    for counted in recounts:
        shards[counted[0] >> SHARD_SHIFT].recounts.setdefault(edge_tables(counted[1]), []).append(counted)
    for listed in sorted({*recounts, *[(key.id1, key.atype) for key in keys.lists]}):
        shards[listed[0] >> SHARD_SHIFT].lists.append(listed)
    for pair in sorted([(pair.low_id, pair.high_id) for pair in keys.intents]):
        shards[pair[0] >> SHARD_SHIFT].intents.append(pair)
    for node in sorted([(node.id1, node.atype) for node in keys.nodes]):
        shards[node[0] >> SHARD_SHIFT].nodes.append(node)
    return shards


def lock_rows(shards: Iterable[int], keys: WriteKeys, edge_tables: EdgeTables) -> StatementText:
    """Return the statement that share-locks and reads the shard rows, in shard order, and then locks and reads the
    named rows, shard by shard, in key order within a table: one UNION of `LOCKED_COLUMNS`. The primary key is forced:
    on a small table the optimizer would scan, and wait for the rows of other transactions."""
    text = StatementText()
    add = text.parts.append  # no call of Python code, for parts without values
    for shard in sorted(shards):
        # The shard is in the column of kinds, which are all plain numbers: a UNION of one with unsigned columns makes
        # decimals of them.
        add(
            f"(SELECT {~shard:d}, version_epoch, generation, generation, generation, master_server, owner "
            f"FROM {schema_name(shard)}.shard WHERE only_row = 1 LOCK IN SHARE MODE)"
        )
    for shard, named in sorted(_by_shard(keys, edge_tables).items()):
        schema = schema_name(shard)
        if named.objects:
            text.add(
                f"(SELECT {_OBJECT}, id, otype, version, deleted, data, NULL "
                f"FROM {schema}.objects FORCE INDEX (PRIMARY) WHERE id IN %s FOR UPDATE)",
                named.objects,
            )
        if named.lists:
            add(
                f"(SELECT {_LIST}, id1, atype, count, version, NULL, NULL FROM {schema}.assoc_lists "
                f"FORCE INDEX (PRIMARY) WHERE {_among('id1, atype', named.lists)} FOR UPDATE)"
            )
        if named.nodes:
            # They are locked in share mode: a popular node is read by the writes of all its edges. A first state of a
            # node has no row to be locked, and waits for such writes in its leader, which has the lists of the node's
            # edges written by one transaction at a time.
            add(
                f"(SELECT {_NODE}, id, atype, state, state_us, NULL, NULL "
                f"FROM {schema}.node_states FORCE INDEX (PRIMARY) WHERE {_among('id, atype', named.nodes)} "
                "LOCK IN SHARE MODE)"
            )
        for table, edges in sorted(named.edges.items()):
            add(
                f"(SELECT {_EDGE}, id1, atype, id2, time, data, NULL FROM {schema}.{table} FORCE INDEX (PRIMARY) "
                f"WHERE {_among('id1, atype, id2', edges)} FOR UPDATE)"
            )
        if named.state_edges:
            # All rows of a UNION have as many columns, so registers and data are one text.
            where = " OR ".join(
                f"({_among('id1, id2', ids)} AND atype IN ({', '.join(map(str, atypes))}))"
                for atypes, ids in sorted(named.state_edges.items())
            )
            add(
                f"(SELECT {_STATE_EDGE}, id1, atype, id2, time, {REGISTERS_AND_DATA}, NULL "
                f"FROM {schema}.{STATES_TABLE} FORCE INDEX (PRIMARY) WHERE {where} FOR UPDATE)"
            )
        for table, recounted in sorted(named.recounts.items()):
            # A locking count: a plain one would miss rows that another transaction has written and not committed yet,
            # or count too early. It is cast, because COUNT is signed, and a UNION of signed and unsigned makes decimals
            # of the whole column, also for other rows.
            add(
                f"(SELECT {_RECOUNT}, id1, atype, CAST(COUNT(*) AS UNSIGNED), MAX(version), NULL, NULL "
                f"FROM {schema}.{table} FORCE INDEX (PRIMARY) WHERE {_among('id1, atype', recounted)} "
                "GROUP BY id1, atype LOCK IN SHARE MODE)"
            )
        if named.intents:
            add(
                f"(SELECT {_INTENT}, low_id, high_id, token, created_unix_ms, atypes, NULL "
                f"FROM {schema}.inverse_intents FORCE INDEX (PRIMARY) "
                f"WHERE {_among('low_id, high_id', named.intents)} FOR UPDATE)"
            )
    _lock_reserved_times(text, keys.reserved_times)
    if keys.jobs or keys.paused_jobs:
        _lock_jobs(text, keys)
    return text


def lock_page_rows(page: EdgePage, edge_tables: EdgeTables) -> StatementText:
    """Return the statement that locks and reads the rows of a page of edges with states: one UNION."""
    text = StatementText()
    for atype in page.atypes:
        text.add(
            f"(SELECT id1, atype, id2, time, {REGISTERS_AND_DATA} FROM "
            f"{schema_name(page.id1 >> SHARD_SHIFT)}.{edge_tables(atype)} FORCE INDEX (PRIMARY) "
            "WHERE id1 = %s AND atype = %s AND id2 > %s ORDER BY id2 LIMIT %s FOR UPDATE)",
            *(page.id1, atype, page.after, page.limit),
        )
    return text


def page_rows(rows: Iterable[Row]) -> StateRows:
    """Make the rows of a page from the rows of `lock_page_rows`."""
    registers = {EdgeKey(*row[:3]): edge_registers(row[3], row[4]) for row in rows}
    return StateRows({key: Edge(key.id2, each.time, each.data) for key, each in registers.items()}, registers)


def _lock_reserved_times(text: StatementText, shards: Iterable[int]) -> None:
    for shard in sorted(shards):
        # Numbers are cast, as other rows of the UNION have unsigned columns.
        text.add(
            f"(SELECT {_RESERVED_TIME}, CAST({shard:d} AS UNSIGNED), reserved_unix_ms, {_ZERO}, {_ZERO}, NULL, NULL "
            f"FROM {schema_name(shard)}.reserved_ids WHERE only_row = 1 FOR UPDATE)"
        )


def _lock_jobs(text: StatementText, keys: WriteKeys) -> None:
    by_shard: dict[int, list[int]] = defaultdict(list)
    for job_id in sorted(keys.jobs):
        by_shard[job_id >> SHARD_SHIFT].append(job_id)
    for shard, job_ids in by_shard.items():
        text.add(
            f"(SELECT {_JOB}, id, id, id, id, {_JOB_COLUMNS}, NULL "
            f"FROM {schema_name(shard)}.jobs FORCE INDEX (PRIMARY) WHERE id IN %s FOR UPDATE)",
            job_ids,
        )
    kinds: dict[int, list[bytes]] = defaultdict(list)
    for key in sorted(keys.paused_jobs):
        kinds[key.shard].append(key.kind.encode())
    for shard, names in kinds.items():
        text.add(
            f"(SELECT {_PAUSED_JOBS}, CAST({shard:d} AS UNSIGNED), {_ZERO}, {_ZERO}, {_ZERO}, kind, NULL "
            f"FROM {schema_name(shard)}.paused_jobs WHERE kind IN %s FOR UPDATE)",
            names,
        )


def job_row(job_id: int, columns: bytes) -> JobRow:
    """Make the row of a job from its id and the column `_JOB_COLUMNS`."""
    *numbers, texts = columns.split(b",", len(_JOB_NUMBERS) + len(_JOB_TEXTS))
    values = list(map(int, numbers))
    priority, state, due_unix_ms, attempts, leases, edges, created_unix_ms, repeat_seconds = values[: len(_JOB_NUMBERS)]
    parts: list[bytes] = []
    at = 0
    for length in values[len(_JOB_NUMBERS) :]:
        parts.append(texts[at : at + length])
        at += length
    kind, worker, cursor, error, body = parts
    return JobRow(
        *(job_id, kind.decode(), priority, state, due_unix_ms, attempts, leases, worker.decode(), body, cursor, edges),
        *(error.decode(errors="replace"), created_unix_ms, repeat_seconds),
    )


def read_jobs(shards: Iterable[int], query: JobQuery) -> StatementText:
    """Return the statement that reads jobs of each shard without bodies or locks, the first to be done first: one
    UNION."""
    text = StatementText()
    for shard in shards:
        schema = schema_name(shard)
        where = StatementText()
        where.add("TRUE")
        for column, wanted in (("state", query.states), ("priority", query.priorities)):
            if wanted:
                where.add(f"{column} IN %s", wanted)
        if query.due_by_unix_ms:
            where.add("due_unix_ms <= %s", query.due_by_unix_ms)
        if query.kinds:
            where.add("kind IN %s", [kind.encode() for kind in query.kinds])
        if query.is_failing:
            where.add("attempts > 0 AND worker = ''")
        if query.routine_kinds:
            kinds = [kind.encode() for kind in query.routine_kinds]
            where.add("NOT (kind IN %s AND state = %s AND attempts = 0)", kinds, JobState.WAITING.value)
        if query.is_running:
            where.add(f"kind NOT IN (SELECT kind FROM {schema}.paused_jobs)")
        text.add(
            f"(SELECT id, {_LISTED_JOB_COLUMNS} FROM {schema}.jobs WHERE {' AND '.join(where.parts)} "
            "ORDER BY state, priority, due_unix_ms LIMIT %s)",
            *where.values,
            query.limit,
        )
    return text


def count_jobs(shards: Iterable[int]) -> StatementText:
    """Return the statement that counts the jobs of each shard that wait or are parked: one UNION."""
    text = StatementText()
    for shard in shards:
        text.add(
            "(SELECT state, worker <> '' AS is_leased, attempts > 0 AS is_failing, COUNT(*) "
            f"FROM {schema_name(shard)}.jobs WHERE state IN %s GROUP BY state, is_leased, is_failing)",
            (JobState.WAITING.value, JobState.PARKED.value),
        )
    return text


def read_paused_jobs(shards: Iterable[int]) -> StatementText:
    """Return the statement that reads the paused kinds of jobs of each shard: one UNION."""
    text = StatementText()
    for shard in shards:
        text.add(f"(SELECT {shard:d}, kind FROM {schema_name(shard)}.paused_jobs)")
    return text


def shard_row(row: Row) -> ShardRow:
    """Make the row of ``shard`` from the columns of table ``shard``."""
    shard, master_server, version_epoch, owner, generation = row
    return ShardRow(int(shard), master_server.decode(), version_epoch, owner.decode(), generation)


def locked_rows(rows: Iterable[Row]) -> tuple[dict[int, ShardRow], ExistingRows]:
    """Make the shard rows by shard, and the existing rows, from the rows of `lock_rows`."""
    shards: dict[int, ShardRow] = {}
    existing = ExistingRows()
    for kind, a, b, c, d, e, f in rows:
        if kind < 0:
            shards[~kind] = ShardRow(~kind, e.decode(), a, f.decode(), b)
        elif kind == _OBJECT:
            existing.objects[a] = ObjectRow(a, b, c, bool(d), e)
        elif kind == _LIST:
            existing.lists[ListKey(a, b)] = ListRow(c, d)
        elif kind == _EDGE:
            existing.edges[EdgeKey(a, b, c)] = Edge(c, d, e)
        elif kind == _RECOUNT:
            existing.recounted[ListKey(a, b)] = ListRow(c, d)
        elif kind == _RESERVED_TIME:
            existing.reserved_times[a] = b
        elif kind == _NODE:
            existing.nodes[ListKey(a, b)] = NodeState(d, c)
        elif kind == _STATE_EDGE:
            registers = existing.registers[EdgeKey(a, b, c)] = edge_registers(d, e)
            existing.edges[EdgeKey(a, b, c)] = Edge(c, d, registers.data)
        elif kind == _JOB:
            existing.jobs[a] = job_row(a, e)
        elif kind == _PAUSED_JOBS:
            existing.paused_jobs.add(PausedKind(a, e.decode()))
        else:
            existing.intents[IntentKey(a, b)] = intent_row((a, b, e, c, d))
    return shards, existing


def lock_oldest_edges(lists: Mapping[ListKey, int], edge_tables: EdgeTables) -> StatementText:
    """Return the statement that locks and reads so many of the oldest edges of each list, oldest first: one UNION. The
    index that lists are read by is forced, since it is the one that ends after the first rows."""
    text = StatementText()
    for key, limit in sorted(lists.items()):
        table = f"{schema_name(key.id1 >> SHARD_SHIFT)}.{edge_tables(key.atype)}"
        text.add(
            f"(SELECT id1, atype, id2, time, data FROM {table} FORCE INDEX (by_time) WHERE id1 = %s AND atype = %s "
            "ORDER BY time, id2 LIMIT %s FOR UPDATE)",
            key.id1,
            key.atype,
            limit,
        )
    return text


def oldest_edges(rows: Iterable[Row], lists: Mapping[ListKey, int]) -> dict[ListKey, OldestEdges]:
    """Make the oldest edges of each list from the rows of `lock_oldest_edges`."""
    found: dict[ListKey, list[Edge]] = {key: [] for key in lists}
    for id1, atype, id2, time, data in rows:
        found[ListKey(id1, atype)].append(Edge(id2, time, data))
    # The order within a part of a UNION is not promised.
    return {
        key: OldestEdges(tuple(reversed(sort_edges(edges))), len(edges) < lists[key]) for key, edges in found.items()
    }


def edge_registers(time: int, registers_and_data: bytes) -> EdgeRegisters:
    """Make the registers of an edge from its time and the column `REGISTERS_AND_DATA`."""
    own_state, state_us, payload_us, id2_state, id2_us, data = registers_and_data.split(b",", 5)
    return EdgeRegisters(int(own_state), int(state_us), int(payload_us), time, data, int(id2_state), int(id2_us))


def intent_row(row: Row) -> IntentRow:
    """Make the row from ``low_id, high_id, atypes, token, created_unix_ms``."""
    low_id, high_id, atypes, token, created_unix_ms = row
    numbers = tuple(int(number) for number in atypes.split(b",") if number)
    return IntentRow(low_id, high_id, numbers, token, created_unix_ms)


def write_rows(changes: RowChanges, edge_tables: EdgeTables, dialect: Dialect) -> list[StatementText]:
    """Return the statements that write ``changes``, as packets: the parts of each are to be joined by semicolons.
    Upserts cannot span shards. Raises `InternalError` for an edge put without its list, whose version would be unknown.
    """
    tables: _Tables = defaultdict(list)
    for row in changes.put_objects:
        tables[
            f"{schema_name(row.id >> SHARD_SHIFT)}.objects", ("id",), ("otype", "version", "deleted", "data")
        ].append((row.id, row.otype, row.version, int(row.deleted), row.data))
    _add_edges(tables, changes, edge_tables)
    _add_lists(tables, changes)
    for intent in changes.put_intents:
        table = f"{schema_name(intent.low_id >> SHARD_SHIFT)}.inverse_intents"
        tables[table, ("low_id", "high_id"), ("atypes", "token", "created_unix_ms")].append(
            (intent.low_id, intent.high_id, ",".join(map(str, intent.atypes)), intent.token, intent.created_unix_ms)
        )
    _add_nodes(tables, changes)
    for shard, reserved_unix_ms in changes.put_reserved_times.items():
        tables[f"{schema_name(shard)}.reserved_ids", ("only_row",), ("reserved_unix_ms",)].append((1, reserved_unix_ms))
    for job in changes.put_jobs.values():
        tables[f"{schema_name(job.id >> SHARD_SHIFT)}.jobs", ("id",), (*_JOB_NUMBERS, *_JOB_TEXTS)].append(
            (
                *(job.id, job.priority, job.state, job.due_unix_ms, job.attempts, job.leases, job.edges),
                *(job.created_unix_ms, job.repeat_seconds, job.kind.encode(), job.worker.encode(), job.cursor),
                *(job.error.encode(), job.body),
            )
        )
    packets = [StatementText()]
    _delete_edges(packets[0], changes.delete_edges, edge_tables)
    for (table, columns, values), rows in sorted(tables.items()):
        rows.sort()
        for some in _split(rows):
            if packets[-1].data_bytes + some.data_bytes > _PACKET_DATA_BYTES:
                packets.append(StatementText())
            packets[-1].data_bytes += some.data_bytes
            packets[-1].add(dialect.upsert_rows(table, columns, values, some.parts), *some.values)
    for pair in sorted(changes.delete_intents):
        packets[-1].add(
            f"DELETE FROM {schema_name(pair.low_id >> SHARD_SHIFT)}.inverse_intents WHERE low_id = %s AND high_id = %s",
            pair.low_id,
            pair.high_id,
        )
    for job_id in sorted(changes.delete_jobs):
        packets[-1].add(f"DELETE FROM {schema_name(job_id >> SHARD_SHIFT)}.jobs WHERE id = %s", job_id)
    for of_kind, paused in sorted(changes.put_paused_jobs.items()):
        how = "INSERT IGNORE INTO {} (kind) VALUES (%s)" if paused else "DELETE FROM {} WHERE kind = %s"
        packets[-1].add(how.format(f"{schema_name(of_kind.shard)}.paused_jobs"), of_kind.kind.encode())
    return [packet for packet in packets if packet.parts]


def _add_edges(tables: _Tables, changes: RowChanges, edge_tables: EdgeTables) -> None:
    # Found by numbers, because to make and to hash names for each row takes as long as its text.
    edges_of: dict[tuple[int, int, bool], list[tuple[object, ...]]] = {}
    for edge_key, edge in changes.put_edges.items():
        id1, atype = edge_key.id1, edge_key.atype
        of_list = changes.put_lists.get(ListKey(id1, atype))
        if of_list is None:
            raise InternalError(f"edge {edge_key} is written, but not the version of its list")
        registers = changes.put_registers.get(edge_key)
        rows = edges_of.get((id1 >> SHARD_SHIFT, atype, registers is None))
        if rows is None:
            table = f"{schema_name(id1 >> SHARD_SHIFT)}.{edge_tables(atype)}"
            columns = _EDGE_COLUMNS if registers is None else (*_EDGE_COLUMNS, *_REGISTER_COLUMNS)
            rows = edges_of[id1 >> SHARD_SHIFT, atype, registers is None] = tables[table, _EDGE_KEY, columns]
        cells = (id1, atype, edge_key.id2, edge.time, of_list.version, edge.data)
        rows.append(cells if registers is None else (*cells, *_register_values(registers, changes)))
    for edge_key, registers in changes.put_registers.items():
        if edge_key not in changes.put_edges:
            # The row exists and is locked. What an upsert would insert, it leaves alone.
            table = f"{schema_name(edge_key.id1 >> SHARD_SHIFT)}.{edge_tables(edge_key.atype)}"
            cells = (edge_key.id1, edge_key.atype, edge_key.id2, registers.time, 0, registers.data)
            rows = tables[table, (*_EDGE_KEY, *_EDGE_COLUMNS), _REGISTER_COLUMNS]
            rows.append((*cells, *_register_values(registers, changes)))


def _add_lists(tables: _Tables, changes: RowChanges) -> None:
    lists_of: dict[int, list[tuple[object, ...]]] = {}
    for key, of_list in changes.put_lists.items():
        rows = lists_of.get(key.id1 >> SHARD_SHIFT)
        if rows is None:
            table = f"{schema_name(key.id1 >> SHARD_SHIFT)}.assoc_lists"
            rows = lists_of[key.id1 >> SHARD_SHIFT] = tables[table, ("id1", "atype"), ("count", "version")]
        rows.append((key.id1, key.atype, of_list.count, of_list.version))


def _add_nodes(tables: _Tables, changes: RowChanges) -> None:
    for node, state in changes.put_nodes.items():
        table = f"{schema_name(node.id1 >> SHARD_SHIFT)}.node_states"
        cells = (node.id1, node.atype, state.state, state.state_us)
        tables[table, ("id", "atype"), ("state", "state_us")].append(cells)


def _register_values(registers: EdgeRegisters, changes: RowChanges) -> tuple[int, ...]:
    """Return the values of `_REGISTER_COLUMNS`."""
    states = registers.own_state, registers.state_us, registers.payload_us
    return *states, registers.id2_state, registers.id2_state_us, changes.changed_unix_s


def _split(rows: Iterable[tuple[object, ...]]) -> list[StatementText]:
    """Return runs of rows with at most `_PACKET_DATA_BYTES` of data, or of one row: each row is a part of the text."""
    run = StatementText()
    runs = [run]
    for row in rows:
        text, bound = _row_text(row)
        size = _ROW_BYTES
        if bound:
            size += sum([len(value) for value in bound if type(value) is bytes])
        if run.parts and run.data_bytes + size > _PACKET_DATA_BYTES:
            run = StatementText()
            runs.append(run)
        run.data_bytes += size
        run.parts.append(text)
        run.values += bound
    return runs


def _row_text(row: tuple[object, ...]) -> tuple[str, list[object]]:
    """Return a row as text, and the values of its placeholders: all but numbers and empty data. Each has its own,
    because the driver marks bytes as binary only outside of sequences."""
    cells: list[str] = []
    bound: list[object] = []
    for value in row:
        if type(value) is int:
            cells.append(str(value))
        elif value == b"":
            cells.append("''")
        else:
            cells.append("%s")
            bound.append(value)
    return f"({', '.join(cells)})", bound


def _delete_edges(text: StatementText, keys: Iterable[EdgeKey], edge_tables: EdgeTables) -> None:
    by_table: dict[str, list[EdgeKey]] = defaultdict(list)
    for key in sorted(keys):
        by_table[f"{schema_name(key.id1 >> SHARD_SHIFT)}.{edge_tables(key.atype)}"].append(key)
    for table, edges in sorted(by_table.items()):
        for start in range(0, len(edges), _DELETED_AT_ONCE):
            text.add(_deletion(table, edges[start : start + _DELETED_AT_ONCE]))


def _deletion(table: str, edges: Sequence[EdgeKey]) -> str:
    """Return the statement that deletes these rows of a table.

    Several are joined one by one. Given as conditions, as row constructors or with an index hint, the servers read a
    table with few rows for each key as a whole, and wait for those that others have locked."""
    first = edges[0]
    if len(edges) == 1:  # which is always found by its key, in three quarters of the time of a join
        return f"DELETE FROM {table} WHERE id1 = {first.id1:d} AND atype = {first.atype:d} AND id2 = {first.id2:d}"
    names = f"SELECT {first.id1:d} AS id1, {first.atype:d} AS atype, {first.id2:d} AS id2"
    others = [f"SELECT {each.id1:d}, {each.atype:d}, {each.id2:d}" for each in edges[1:]]
    same = " AND ".join([f"{table}.{column} = named.{column}" for column in _EDGE_KEY])
    return (
        f"DELETE FROM {table} USING ({' UNION ALL '.join((names, *others))}) AS named "
        f"STRAIGHT_JOIN {table} FORCE INDEX (PRIMARY) ON {same}"
    )
