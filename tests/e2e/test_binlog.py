"""The binlog reader and the translator on a real server: the leader's own changesets, and every known special case."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tao.devcluster.database_program import Flavour
from tao.model.changes import ListChange, ListInvalidation, Message, ObjectChange
from tao.model.graph import ABSENT
from tao.model.ids import make_id
from tao.model.relay import Touch
from tao.model.writes import AssocAdd, AssocChangeType, AssocDelete, ObjAdd, ObjDelete, ObjUpdate, Write
from tao.planning.row_events import Heartbeat, Row, RowEvent, translate
from tao.replication.accounts import ServiceAccounts
from tao.schema.codec import encode_fields, encode_patch
from tao.tailer.binlog import BinlogLost, BinlogUnusable, ServerIdTaken
from tao.tailer.transactions import RowDecoder, decoded_rows
from tests.rigs.binlog_rig import PATIENT_SECONDS, SHARDS, BinlogRig, Following, open_rig, until
from tests.unit.planning.stored_rows import FOLLOWS, FRIEND, LIKES, NOW, SCHEMA, TAGS, USER, WIDE

pytestmark = [pytest.mark.database, pytest.mark.e2e]


@pytest.fixture
async def rig(tmp_path: Path, database_accounts: ServiceAccounts) -> AsyncIterator[BinlogRig]:
    async with open_rig(tmp_path / "one", database_accounts) as rig:
        yield rig


def an_id(sequence: int, shard: int = 0) -> int:
    return make_id(shard, NOW + sequence, 0)


def user(name: str) -> bytes:
    return encode_fields(SCHEMA.otype(USER), {"name": name})


async def mark(rig: BinlogRig, following: Following, name: str) -> None:
    """Wait until everything written so far has been read."""
    await rig.sql(f"REPLACE INTO tao_00000.heartbeat VALUES ('{name}', 1)")
    seen = 0

    def arrived() -> bool:
        nonlocal seen
        assert following.failure is None
        fresh, seen = following.transactions[seen:], len(following.transactions)
        return any(
            e.table == "heartbeat" and (e.after or {}).get("writer") == name.encode() for t in fresh for e in t.events
        )

    await until(arrived)


def random_batch(chance: random.Random) -> list[Write]:
    ids = [an_id(number, shard) for shard in SHARDS for number in range(3)]
    batch: list[Write] = []
    for _ in range(chance.randint(1, 12)):
        id1, id2 = chance.choice(ids), chance.choice(ids)
        atype = chance.choice([FRIEND, LIKES, FOLLOWS, TAGS, WIDE])
        data = chance.choice([b"", encode_fields(SCHEMA.atype(atype), {"text": "x" * 900})]) if atype == WIDE else b""
        match chance.randrange(5):
            case 0 | 1:
                batch.append(AssocAdd(id1, atype, id2, chance.randrange(100), data))
            case 2:
                batch.append(AssocDelete(id1, atype, id2))
            case 3:
                batch.append(AssocChangeType(id1, FOLLOWS, id2, LIKES))
            case _:
                patch = encode_patch(SCHEMA.otype(USER), {"age": chance.randrange(9)})
                batch.append(ObjUpdate(id1, 0, patch) if chance.random() < 0.5 else ObjDelete(id1))
    return batch


async def test_the_binlog_of_a_leaders_transactions_holds_its_changesets(rig: BinlogRig) -> None:
    chance = random.Random(7)
    following = await rig.follow()
    lazy = rig.reader(server_id=4_000_000_002)
    lazy.leave_undecoded(True)
    waiting = await rig.follow(reader=lazy)
    changesets: list[Message] = []
    objects = [
        ObjAdd(an_id(number, shard), USER, user(f"a\0{number}"), False) for shard in SHARDS for number in range(3)
    ]
    for batch in [objects] + [random_batch(chance) for _ in range(40)]:
        by_shard: dict[int, list[Message]] = {}
        for change in await rig.write(*batch):
            by_shard.setdefault(change.shard, []).append(change)
        for shard in sorted(by_shard):
            changesets.extend(by_shard[shard])
    await mark(rig, following, "end")
    assert following.messages == changesets
    await mark(rig, waiting, "end of the undecoded")
    assert waiting.messages == []
    whole = [
        (each.gtid, of_shard)
        for each, translated in zip(following.transactions, following.translated, strict=True)
        for of_shard in translated.messages
    ]
    assert whole == [
        (each.gtid, of_shard)
        for each in waiting.transactions
        for rows in sorted(each.undecoded, key=lambda rows: rows.shard)
        for of_shard in translate(rows.decode().events, SCHEMA).messages
    ]
    assert list(dict.fromkeys(gtid for gtid, _ in whole)) == [gtid for gtid in rig.gtids if gtid]
    assert len(changesets) > 100
    assert any(isinstance(each, ObjectChange) and each.otype == ABSENT for each in changesets)
    assert all(not each.touches and not each.bulk_shards for each in following.translated)
    assert not any(each.invalid_shards or each.all_invalid for each in following.transactions)
    assert len(set(following.gtids)) == len(following.gtids)


async def test_rows_are_decoded_from_their_packets_as_the_library_decodes_them(
    rig: BinlogRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: Counter[str] = Counter()
    differing: list[tuple[list[RowEvent] | None, list[RowEvent]]] = []
    rows = RowDecoder.rows

    def as_bytes(image: Row | None) -> Row | None:
        # The library decodes an empty value by its character set, and so makes a text of it.
        return image and {name: b"" if value == "" else value for name, value in image.items()}

    def compare(decoder: RowDecoder, shard: int, data: bytes, table: Any) -> list[RowEvent] | None:
        here, library = rows(decoder, shard, data, table), decoded_rows(shard, decoder.event(data, table))
        assert library is not None
        normal = [RowEvent(shard, each.table, as_bytes(each.before), as_bytes(each.after)) for each in library]
        if here != normal:
            differing.append((here, normal))
        compared[f"{table.table} {normal[0].kind}"] += 1
        return here

    monkeypatch.setattr(RowDecoder, "rows", compare)
    following = await rig.follow()
    await rig.write(
        *[ObjAdd(an_id(number, shard), USER, user("ada"), False) for shard in SHARDS for number in range(3)]
    )
    chance = random.Random(11)
    for _ in range(60):
        await rig.write(*random_batch(chance))
    await rig.sql(
        "CREATE TABLE tao_00000.other (a TINYINT, b SMALLINT, c MEDIUMINT, d INT, e BIGINT UNSIGNED, f VARBINARY(300))",
        "INSERT INTO tao_00000.other VALUES (-1, -300, -70000, -5, 18446744073709551615, 'x'), (1, 2, 3, 4, 5, NULL)",
        "UPDATE tao_00000.other SET a = NULL, c = 8388607, f = REPEAT('y', 300) WHERE b = -300",
        "DELETE FROM tao_00000.other",
    )
    await mark(rig, following, "marker")
    assert differing == []
    kinds = {"objects update", "assocs insert", "assocs delete", "assoc_lists update", "assocs_wide insert"}
    assert kinds | {"other insert", "other update", "other delete"} <= compared.keys()


async def test_rows_changed_by_hand_are_touched_and_a_mended_version_drops_the_key(rig: BinlogRig) -> None:
    object_id, friend = an_id(1), an_id(2)
    await rig.write(ObjAdd(object_id, USER, user("a"), False), AssocAdd(object_id, FOLLOWS, friend, 5, b""))
    following = await rig.follow()
    await rig.sql(
        f"UPDATE tao_00000.objects SET data = x'80' WHERE id = {object_id}",
        f"INSERT INTO tao_00000.assocs VALUES ({object_id}, {FOLLOWS}, {an_id(3)}, 6, 0, '')",
        f"UPDATE tao_00000.assoc_lists SET count = 9 WHERE id1 = {object_id}",
        f"UPDATE tao_00000.assoc_lists SET count = 2, version = version + 1 WHERE id1 = {object_id}",
        f"DELETE FROM tao_00000.objects WHERE id = {object_id}",
    )
    await mark(rig, following, "end")
    touches = [touch for each in following.translated for touch in each.touches]
    first = 1 << 48 | 1
    assert touches == [
        Touch(object_id, 0, first),
        Touch(object_id, FOLLOWS, 0),
        Touch(object_id, FOLLOWS, first),
        Touch(object_id, 0, first),
    ]
    assert following.messages == [ListInvalidation(object_id, FOLLOWS, first + 1)]


async def test_rows_are_decoded_at_once_where_no_leader_can_have_their_messages(rig: BinlogRig) -> None:
    reader = rig.reader()
    reader.leave_undecoded(True)
    following = await rig.follow(reader=reader)
    edge = f"INSERT INTO tao_00001.assocs VALUES ({an_id(1, 1)}, {FOLLOWS}, {{}}, 1, 0, '')"
    await rig.sql(
        edge.format(1),
        "UPDATE tao_00001.shard SET generation = generation + 1",
        "BEGIN", edge.format(2), "INSERT INTO tao_00002.heartbeat VALUES ('leader-1', 1)", "COMMIT",
        "BEGIN", edge.format(3), "SAVEPOINT a", edge.format(4), "COMMIT",
        "CREATE TABLE tao_00001.other (id INT PRIMARY KEY)",
        "BEGIN", edge.format(5), "INSERT INTO tao_00001.other VALUES (1)", "COMMIT",
        f"INSERT INTO tao_00001.objects VALUES ({an_id(1, 1)}, 1, 0, 0, REPEAT('x', 1000000)),"
        f" ({an_id(2, 1)}, 1, 0, 0, REPEAT('x', 1000000))",
    )  # fmt: skip
    await mark(rig, following, "end")
    first, *others = [each for each in following.transactions if each.events or each.undecoded or each.invalid_shards]
    assert [rows.shard for rows in first.undecoded] == [1]
    assert [event.table for event in first.undecoded[0].decode().events] == ["assocs"]
    assert not any(each.undecoded for each in others)
    assert [sorted(event.table for event in each.events) for each in others] == [
        ["assocs", "heartbeat"],
        ["assocs", "assocs"],
        ["assocs", "other"],
        ["objects", "objects"],
        ["heartbeat"],
    ]
    assert others[1].invalid_shards == {1}


async def test_every_one_of_many_rows_by_hand_is_touched(rig: BinlogRig) -> None:
    following = await rig.follow()
    rows = ", ".join(f"({an_id(number, 1)}, 1, 0, 0, x'80')" for number in range(200))
    await rig.sql(f"INSERT INTO tao_00001.objects VALUES {rows}")
    await mark(rig, following, "end")
    assert [touch.id for each in following.translated for touch in each.touches] == [an_id(n, 1) for n in range(200)]
    assert not any(each.bulk_shards for each in following.translated)


async def test_heartbeats_reach_the_reader(rig: BinlogRig) -> None:
    following = await rig.follow()
    await rig.sql("INSERT INTO tao_00002.heartbeat VALUES ('leader-1', 1700000000123)")
    await mark(rig, following, "end")
    assert following.translated[0].heartbeats == (Heartbeat("leader-1", 1_700_000_000_123),)


async def test_altered_tables_rotated_logs_and_statements_stop_nothing(rig: BinlogRig) -> None:
    following = await rig.follow()
    seen: list[Message] = []
    alterations = [
        "ALTER TABLE tao_00000.objects ADD COLUMN note VARBINARY(20) NULL FIRST",
        "FLUSH BINARY LOGS",
        "ALTER TABLE tao_00000.objects MODIFY COLUMN data LONGBLOB NOT NULL AFTER id",
        "ALTER TABLE tao_00000.objects ADD COLUMN place VARCHAR(9) CHARACTER SET latin1 DEFAULT 'x', DROP COLUMN note",
        "FLUSH TABLES",
        "CREATE TABLE tao_00000.other (id INT PRIMARY KEY, place POINT, size ENUM('a','b'), doc JSON)",
        "INSERT INTO tao_00000.other VALUES (1, POINT(1, 2), 'b', '{}')",
        "CREATE DATABASE elsewhere",
        "CREATE TABLE elsewhere.objects (id INT PRIMARY KEY, size ENUM('a','b'))",
        "INSERT INTO elsewhere.objects VALUES (1, 'b')",
    ]
    for number, statement in enumerate(alterations):
        await rig.sql(statement)
        seen.extend(await rig.write(ObjAdd(an_id(number), USER, user(str(number)), False)))
    await mark(rig, following, "end")
    assert following.messages == seen
    assert not any(each.invalid_shards or each.all_invalid for each in following.transactions)
    assert sum(each.unknown_columns for each in following.translated) > 0
    await rig.sql("TRUNCATE TABLE tao_00001.objects", "DROP TABLE tao_00002.assocs", "CREATE TABLE elsewhere.t (a INT)")
    await mark(rig, following, "truncated")
    assert [each.invalid_shards for each in following.transactions if each.invalid_shards] == [{1}, {2}]


async def test_changes_logged_as_statements_invalidate_their_shard(rig: BinlogRig) -> None:
    if rig.instance.binary.version >= (8, 0) and rig.instance.binary.flavour is Flavour.MYSQL:
        pytest.skip("this server logs rows only")
    following = await rig.follow()
    await rig.sql(
        "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
        "SET SESSION binlog_format = 'STATEMENT'",
        "USE tao_00001",
        f"INSERT INTO objects VALUES ({an_id(1, 1)}, 1, 0, 0, x'80')",
    )
    await mark(rig, following, "end")
    assert [each.invalid_shards for each in following.transactions if each.invalid_shards] == [{1}]


async def test_incomplete_row_images_invalidate_their_shard(rig: BinlogRig) -> None:
    await rig.write(ObjAdd(an_id(1, 1), USER, user("a"), False))
    following = await rig.follow()
    await rig.sql("SET SESSION binlog_row_image = 'MINIMAL'", "UPDATE tao_00001.objects SET deleted = 1")
    await mark(rig, following, "end")
    assert [each.bulk_shards for each in following.translated if each.bulk_shards] == [(1,)]


async def test_compressed_transactions_invalidate_all_shards(rig: BinlogRig) -> None:
    following = await rig.follow()
    await rig.sql(
        "SET GLOBAL log_bin_compress_min_len = 10"
        if rig.instance.binary.flavour is Flavour.MARIADB
        else "SET SESSION binlog_transaction_compression = ON",
        "SET GLOBAL log_bin_compress = ON" if rig.instance.binary.flavour is Flavour.MARIADB else "DO 1",
        f"INSERT INTO tao_00001.objects VALUES ({an_id(1, 1)}, 1, 0, 0, REPEAT('a', 999))",
        "SET GLOBAL log_bin_compress = OFF" if rig.instance.binary.flavour is Flavour.MARIADB else "DO 1",
    )
    await rig.write(ObjAdd(an_id(1), USER, user("a"), False))
    await mark(rig, following, "end")
    assert [each.all_invalid for each in following.transactions].count(True) == 1
    assert len(following.messages) == 1
    assert following.reader.unknown_events > 0


async def test_rows_prepared_for_a_distributed_commit_are_not_delivered_before_it(rig: BinlogRig) -> None:
    following = await rig.follow()
    await rig.sql(
        "XA START 'a'",
        f"INSERT INTO tao_00001.objects VALUES ({an_id(1, 1)}, 1, {(1 << 48) + 1}, 0, x'80')",
        "XA END 'a'",
        "XA PREPARE 'a'",
    )
    await mark(rig, following, "prepared")
    assert following.messages == []
    assert not any(each.all_invalid for each in following.transactions)
    await rig.sql("XA COMMIT 'a'")
    await mark(rig, following, "committed")
    assert following.messages == []
    assert [each.all_invalid for each in following.transactions].count(True) == 1


async def test_a_transaction_too_large_to_keep_invalidates_its_shards(rig: BinlogRig) -> None:
    following = await rig.follow(reader=rig.reader(max_transaction_bytes=50_000))
    rows = ", ".join(f"({an_id(number, 1)}, 1, 0, 0, REPEAT('a', 9999))" for number in range(200))
    await rig.sql(f"INSERT INTO tao_00001.objects VALUES {rows}")
    await mark(rig, following, "end")
    (large,) = [each for each in following.transactions if each.invalid_shards]
    assert large.invalid_shards == {1}
    assert not large.events
    assert following.reader.oversized == 1


async def test_a_killed_server_is_followed_again_without_loss_or_repetition(rig: BinlogRig) -> None:
    following = await rig.follow()
    seen: list[Message] = []
    for number in range(4):
        seen.extend(await rig.write(ObjAdd(an_id(number), USER, user("a"), False)))
        if number % 2:
            await rig.instance.kill()
        else:
            await rig.instance.stop()
        await until(lambda: not following.reader.connected)
        await rig.instance.start()
        # After the restart the server gives this table's number to another table.
        await rig.sql(f"UPDATE tao_00001.shard SET generation = {number}")
        seen.extend(await rig.write(ObjAdd(an_id(100 + number, 1), USER, user("b"), False)))
        await mark(rig, following, f"restarted {number}")
    assert following.messages == seen
    assert len(set(following.gtids)) == len(following.gtids)
    assert following.reader.connections > 4


async def test_a_lost_connection_is_reopened_at_the_position_reached(rig: BinlogRig) -> None:
    following = await rig.follow()
    seen: list[Message] = []
    for number in range(5):
        seen.extend(await rig.write(ObjAdd(an_id(number), USER, user("a"), False)))
        await mark(rig, following, f"before {number}")
        opened = following.reader.connections
        await kill_dump_threads(rig)
        seen.extend(await rig.write(ObjAdd(an_id(100 + number), USER, user("a"), False)))
        await until(lambda opened=opened: following.reader.connections > opened)  # type: ignore[misc]
    await mark(rig, following, "end")
    assert following.messages == seen
    assert len(set(following.gtids)) == len(following.gtids)


async def kill_dump_threads(rig: BinlogRig) -> None:
    for thread, _, _, _, command, *_ in await rig.rows("SHOW PROCESSLIST"):
        if command.startswith("Binlog Dump"):
            await rig.sql(f"KILL {thread}")


async def test_a_silent_server_is_noticed_and_disconnected(rig: BinlogRig) -> None:
    reader = rig.reader(silence_seconds=1.0)
    following = await rig.follow(reader=reader)
    pid = rig.instance.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: reader.silences > 0)
    finally:
        os.kill(pid, signal.SIGCONT)
    changes = await rig.write(ObjAdd(an_id(1), USER, user("a"), False))
    await mark(rig, following, "end")
    assert following.messages == list(changes)


async def test_a_purged_binlog_is_lost(rig: BinlogRig) -> None:
    await rig.write(ObjAdd(an_id(1), USER, user("a"), False))
    position = await rig.reader().current_position()
    await rig.write(ObjAdd(an_id(2), USER, user("a"), False))
    await rig.sql("FLUSH BINARY LOGS")
    await rig.write(ObjAdd(an_id(3), USER, user("a"), False))
    # The server purges a log only once the storage engine no longer needs it for recovery.
    async with asyncio.timeout(PATIENT_SECONDS):
        while len(await rig.rows("SHOW BINARY LOGS")) > 1:
            newest = (await rig.rows("SHOW BINARY LOGS"))[-1][0]
            await rig.sql(f"PURGE BINARY LOGS TO '{newest}'")
    following = await rig.follow(position)
    await until(lambda: following.failure is not None)
    assert isinstance(following.failure, BinlogLost)


async def test_a_position_that_the_server_never_had_is_lost(rig: BinlogRig) -> None:
    reader = rig.reader()
    now = await reader.current_position()
    following = await rig.follow(f"{now.rpartition('-')[0]}-999999", reader)
    await until(lambda: following.failure is not None)
    assert isinstance(following.failure, BinlogLost)


async def test_the_older_of_two_readers_with_one_server_id_reports_the_conflict(rig: BinlogRig) -> None:
    first = await rig.follow(reader=rig.reader(server_id=99))
    second = await rig.follow(reader=rig.reader(server_id=99))
    await rig.write(ObjAdd(an_id(1), USER, user("a"), False))
    await until(lambda: first.failure is not None or second.failure is not None)
    failed = first if first.failure is not None else second
    assert isinstance(failed.failure, ServerIdTaken)
    assert "server_id 99" in str(failed.failure)
    working = second if failed is first else first
    changes = await rig.write(ObjAdd(an_id(2), USER, user("a"), False))
    await mark(rig, working, "end")
    assert working.messages[-1:] == list(changes)


async def test_a_server_whose_binlog_lacks_required_data_is_rejected(rig: BinlogRig) -> None:
    await rig.sql("SET GLOBAL binlog_row_metadata = 'MINIMAL'")
    with pytest.raises(BinlogUnusable, match=r"binlog_row_metadata = (MINIMAL|NO_LOG)"):
        await rig.reader().current_position()


async def test_a_full_transaction_queue_holds_the_reader_back(rig: BinlogRig) -> None:
    reader = rig.reader(read_ahead_bytes=10_000)
    position = await reader.current_position()
    for number in range(30):
        await rig.write(ObjAdd(an_id(number), USER, user("a"), False))
    batches = reader.batches(position)
    first = await anext(batches)
    await until(lambda: reader.waiting_bytes >= 8_000)
    assert reader.waiting_bytes <= 10_000
    count = len(first)
    while count < 30:
        count += len(await anext(batches))
    assert count == 30
    await batches.aclose()


async def test_lists_of_a_custom_table_and_of_the_default_one_are_kept_apart(rig: BinlogRig) -> None:
    following = await rig.follow()
    changes = await rig.write(
        AssocAdd(an_id(1), WIDE, an_id(2), 5, encode_fields(SCHEMA.atype(WIDE), {"text": "é" * 900}))
    )
    await rig.sql(f"INSERT INTO tao_00000.assocs VALUES ({an_id(1)}, {WIDE}, {an_id(3)}, 6, 0, '')")
    await mark(rig, following, "end")
    assert following.messages == list(changes)
    assert isinstance(changes[0], ListChange)
    assert sum(each.passed_over for each in following.translated) == 1
