"""Statements as text: nothing but numbers and checked names is ever pasted, and each stays within its bounds."""

from __future__ import annotations

import pytest

from tao.model.edge_block import COMPLETE, header, time_column
from tao.model.errors import InternalError, MasterReadOnly, OperatorError
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import MAX_SHARDS, make_id
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery
from tao.model.rows import IntentKey, ListRow, ObjectRow, RowChanges, WriteKeys
from tao.storage.dialect import Dialect, SessionSetup, dialect_of
from tao.storage.master_check import MasterState, master_refusal, master_states
from tao.storage.names import check_edge_table, schema_name, shard_of_schema
from tao.storage.read_plan import MAX_KEYS_PER_PART, ReadPlan
from tao.storage.write_statements import lock_rows, write_rows

NOW = 1_700_000_000_000


def only_table(atype: int) -> str:
    return "assocs"


def test_a_schemas_name_is_made_from_the_shard_number_alone() -> None:
    assert schema_name(42) == "tao_00042"
    assert [shard_of_schema(name) for name in ("tao_00042", "tao_42", "mysql", "tao_00042 ")] == [42, None, None, None]
    for shard in (-1, MAX_SHARDS):
        with pytest.raises(OperatorError):
            schema_name(shard)


@pytest.mark.parametrize("name", ["assocs_A", "objects", "assocs_x;", "assocs_x\n", "assocs_"])
def test_what_is_no_edge_table_is_refused(name: str) -> None:
    with pytest.raises(OperatorError):
        check_edge_table(name)


def test_the_kind_of_server_is_recognised_by_its_greeting() -> None:
    assert dialect_of("5.5.5-10.11.19-MariaDB-0+deb12u1") is Dialect.MARIADB
    assert dialect_of("9.7.4") is Dialect.MYSQL


def test_each_dialect_limits_a_locking_union_and_names_the_incoming_row_in_its_own_words() -> None:
    union = "(SELECT 1 FROM a FOR UPDATE) UNION ALL (SELECT 2 FROM b FOR UPDATE)"
    assert Dialect.MARIADB.locking(union, 250) == f"SET STATEMENT max_statement_time = 0.250 FOR {union}"
    assert Dialect.MYSQL.locking(union, 250).startswith("(SELECT /*+ MAX_EXECUTION_TIME(250) */ 1 FROM a")
    assert Dialect.MARIADB.upsert("t", ("k",), ("v",), 2) == (
        "INSERT INTO t (k, v) VALUES (%s, %s), (%s, %s) ON DUPLICATE KEY UPDATE v = VALUES(v)"
    )
    assert Dialect.MYSQL.upsert("t", ("k",), ("v",), 1) == (
        "INSERT INTO t (k, v) VALUES (%s, %s) AS incoming ON DUPLICATE KEY UPDATE v = incoming.v"
    )
    assert (
        Dialect.MARIADB.upsert("t", ("k",), (), 1)
        == "INSERT INTO t (k) VALUES (%s) ON DUPLICATE KEY UPDATE k = VALUES(k)"
    )


@pytest.mark.parametrize("dialect", list(Dialect))
def test_read_sessions_keep_no_snapshot_and_write_sessions_take_no_gap_locks(dialect: Dialect) -> None:
    reads, writes = (SessionSetup(writes=each).statements(dialect) for each in (False, True))
    assert "autocommit = 1" in reads
    assert "READ ONLY" in reads
    assert "autocommit = 0" in writes
    assert "READ COMMITTED" in writes
    # Otherwise MariaDB joins a long list of keys as a table, and may read and lock all rows.
    assert ("in_predicate_conversion_threshold = 0" in writes) == (dialect is Dialect.MARIADB)
    # A leader that was stopped must not hold its locks for longer than its successor can wait.
    assert ("idle_transaction_timeout = 2" if dialect is Dialect.MARIADB else "wait_timeout = 10") in writes
    assert "NO_BACKSLASH_ESCAPES" not in reads + writes  # the driver escapes with backslashes


def test_locks_are_taken_in_order_of_shard_table_and_key() -> None:
    ids = [make_id(shard, NOW, 0) for shard in (2, 0, 1)]
    edges = {EdgeKey(ids[0], 5, id2) for id2 in (9, 7, 8)}
    keys = WriteKeys(objects=set(ids), lists={ListKey(ids[0], 5)}, edges=edges)
    text = lock_rows([2, 0, 1], keys, only_table)
    assert text.values == [[ids[1]], [ids[2]], [ids[0]]]
    shards, rows = text.parts[:3], text.parts[3:]
    assert [part.split("FROM ")[1] for part in shards] == [
        f"tao_0000{shard}.shard WHERE only_row = 1 LOCK IN SHARE MODE)" for shard in (0, 1, 2)
    ]
    assert [part.split("WHERE ")[1] for part in rows] == [
        *["id IN %s FOR UPDATE)"] * 3,
        f"(id1, atype) IN (({ids[0]}, 5)) FOR UPDATE)",
        f"(id1, atype, id2) IN (({ids[0]}, 5, 7), ({ids[0]}, 5, 8), ({ids[0]}, 5, 9)) FOR UPDATE)",
    ]
    assert all("FORCE INDEX (PRIMARY)" in part for part in rows)


def test_an_edge_with_states_is_looked_for_in_all_of_its_lists() -> None:
    keys = WriteKeys(
        state_edges={EdgeKey(1, 5, 2): (5, 51, 52), EdgeKey(2, 6, 1): (6, 61, 62), EdgeKey(1, 5, 3): (5, 51, 52)}
    )
    (part,) = lock_rows((), keys, only_table).parts
    assert "FROM tao_00000.assocs_states FORCE INDEX (PRIMARY)" in part
    assert part.split("WHERE ")[1] == (
        "((id1, id2) IN ((1, 2), (1, 3)) AND atype IN (5, 51, 52)) OR "
        "((id1, id2) IN ((2, 1)) AND atype IN (6, 61, 62)) FOR UPDATE)"
    )


def test_a_key_that_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError):
        lock_rows((), WriteKeys(intents={IntentKey(1, "2) OR (1, 1")}), only_table)  # type: ignore[arg-type]


def test_an_edge_is_not_written_without_the_version_of_its_list() -> None:
    with pytest.raises(InternalError):
        write_rows(RowChanges(put_edges={EdgeKey(1, 5, 2): Edge(2, 1)}), only_table, Dialect.MARIADB)


def test_a_write_of_many_rows_is_one_statement_for_a_table_of_a_shard() -> None:
    changes = RowChanges()
    for at in range(50):
        id1 = make_id(at % 2, NOW + at, 0)
        changes.put_lists[ListKey(id1, 5)] = ListRow(1, 1)
        changes.put_edges[EdgeKey(id1, 5, 1)] = Edge(1, 1, b"x")
    (packet,) = write_rows(changes, only_table, Dialect.MARIADB)
    assert len(packet.parts) == 4
    assert sum(part.count("%s") for part in packet.parts) == len(packet.values)


def test_large_data_are_split_into_packets_that_any_server_takes() -> None:
    rows = [ObjectRow(make_id(0, NOW + at, 0), 3, 1, False, b"\x00" * 2**20) for at in range(10)]
    packets = write_rows(RowChanges(put_objects=rows), only_table, Dialect.MARIADB)
    assert [value for packet in packets for value in packet.values] == [row.data for row in rows]
    assert sum(packet.parts[0].count("%s") for packet in packets) == len(rows)
    assert all(packet.data_bytes <= 4 << 20 for packet in packets)


def test_keys_of_several_shards_share_a_statement_and_long_sets_share_their_list() -> None:
    queries: list[Query] = [ObjectQuery(make_id(shard, NOW, at)) for shard in range(3) for at in range(60)]
    queries += [CountQuery(make_id(0, NOW, at), 5) for at in range(60)]
    (statement,) = ReadPlan(queries, only_table).statements
    assert len(statement.parts) == 3 + 1
    id2s = tuple(range(1, 6001))
    (statement,) = ReadPlan([EdgesQuery(make_id(0, NOW, 0), 5, id2s)], only_table).statements
    sets = [part.partition("id2 IN (")[2].partition(")")[0].split(",") for part in statement.parts]
    assert max(map(len, sets)) == MAX_KEYS_PER_PART
    assert sorted(int(id2) for some in sets for id2 in some) == list(id2s)


@pytest.mark.parametrize(
    "query",
    [
        ObjectQuery(make_id(3, NOW, 0)),
        CountQuery(make_id(3, NOW, 0), 5),
        RangeQuery(make_id(3, NOW, 0), 5, 0, 129),
        EdgesQuery(make_id(3, NOW, 0), 5, (7,)),
    ],
)
def test_what_needs_no_order_is_by_itself_no_union_and_bears_its_epoch_whatever_is_found(query: Query) -> None:
    plan = ReadPlan([query], only_table)
    (statement,) = plan.statements
    assert (len(statement.parts), statement.sql.count("SELECT")) == (1, 1)
    assert statement.sql.count("%s") == len(statement.values)
    absent = list(plan.answers())
    plan.receive([(0, 7, None, None, None, None, None)])
    plan.go_on()
    assert (list(plan.answers()), plan.version_epochs, plan.statements) == (absent, {3: 7}, [])


def test_statements_are_bounded_in_parts_and_in_rows_but_a_list_is_never_torn() -> None:
    queries: list[Query] = [RangeQuery(make_id(0, NOW + at, 0), 5, 0, 1000) for at in range(20)]
    by_rows = ReadPlan(queries, only_table, rows_per_statement=4096).statements
    assert [len(statement.parts) for statement in by_rows] == [4] * 5
    by_parts = ReadPlan(queries, only_table, rows_per_statement=1 << 20, parts_per_statement=8).statements
    assert [len(statement.parts) for statement in by_parts] == [8, 8, 4]
    id2s = tuple(range(1, 6 * MAX_KEYS_PER_PART))
    torn = ReadPlan([*queries[:3], EdgesQuery(make_id(0, NOW, 0), 5, id2s)], only_table, parts_per_statement=8)
    assert [len(statement.parts) for statement in torn.statements] == [3, 6]


def test_of_several_statements_on_a_shard_the_epoch_of_the_first_counts() -> None:
    """What the first one read may lack what the later epoch stands for: a promotion came in between."""
    queries = [RangeQuery(number, 7, 0, 100) for number in range(1, 4)]
    plan = ReadPlan(queries, only_table, rows_per_statement=101)
    assert len(plan.statements) > 1
    for number, epoch in enumerate(range(4, 4 + len(plan.statements))):
        plan.receive([(number, epoch, None, None, 9, 0, None)])
    assert plan.version_epochs == {0: 4}


@pytest.mark.parametrize("recorded", [129, 130, 3])
def test_a_list_that_is_longer_than_was_asked_for_is_read_again_by_the_index(recorded: int) -> None:
    """Also when only its rows say so, as after a write by hand: those read by the primary key are any of the list's."""
    query = RangeQuery(make_id(0, NOW, 0), 5, 0, 129)
    plan = ReadPlan([query], only_table)
    (first,) = plan.statements
    assert "by_time" not in first.sql
    found = [(0, 1, time, 1_000 - time, 9, recorded, b"") for time in range(recorded if recorded == 129 else 130)]
    plan.receive([(0, 1, None, None, 9, recorded, None)] if recorded == 130 else found)
    plan.go_on()
    if recorded != 129:
        (again,) = plan.statements
        assert "by_time" in again.sql
        newest = [(2, 7, time, 1_000 - time, 7, 7, b"") for time in range(500, 500 - 129, -1)]
        plan.receive([(1, 1, 1, 1, 10, recorded, None), *newest])
        plan.go_on()
    assert plan.statements == []
    version, _, n, flags = header(block := next(plan.answers()))
    assert plan.version_epochs == {0: 1}
    assert (version, n, bool(flags & COMPLETE)) == ((9, 129, True) if recorded == 129 else (10, 129, False))
    assert time_column(block)[0] == (128 if recorded == 129 else 500)


def test_a_message_of_critical_reads_has_one_check_behind_its_rows_however_many_queries_it_has() -> None:
    queries: list[Query] = [ObjectQuery(make_id(shard, NOW, at)) for shard in range(3) for at in range(60)]
    queries += [RangeQuery(make_id(1, NOW, at), 5, 0, 129) for at in range(20)]
    plan = ReadPlan(queries, only_table)
    (statement,) = plan.statements
    rows, _, check = plan.checked_sql(statement, with_lease=True).partition("; ")
    assert rows == statement.sql
    assert ";" not in check
    assert check.count("FROM tao.lease") == check.count("read_only") == 1, "once for the server"
    assert check.count("SELECT") == 2, "one row, and the lease"
    assert "tao.lease" not in plan.checked_sql(statement, with_lease=False)


def test_a_server_confirms_itself_as_master_only_if_all_of_it_matches() -> None:
    master = MasterState(read_only=False, lease_ended=False, master="one", version_epoch=4, generation=1)
    assert master_refusal("one", 7, master, 4) is None
    for differing in (
        master._replace(read_only=True),
        master._replace(lease_ended=True),
        master._replace(master="two"),
        master._replace(version_epoch=5),
    ):
        assert isinstance(master_refusal("one", 7, differing, 4), MasterReadOnly)
    (state,) = master_states([(7, 4, 0, None, 1, 0, b"one")]).values()
    assert state == master, "a server without a row in the table of leases keeps none"
