"""Touches of rows that a foreign writer changed: the new versions they give, and how the binlog shows them."""

from __future__ import annotations

import pytest

from tao.model.changes import ListInvalidation, ObjectChange
from tao.model.graph import ABSENT, Edge, EdgeKey, ListKey
from tao.model.relay import WHOLE_OBJECT, Touch
from tao.model.rows import ExistingRows, ListRow, ObjectRow, RowChanges, ShardRow
from tao.model.writes import AssocAdd, AssocDelete, ObjAdd, ObjUpdate, TouchKeys, Write
from tao.planning.coordination import PlannedWrite, keys_of, lane_keys, mixes_touches, shards_of
from tao.planning.row_events import translate
from tao.planning.write_plan import WritePlan, draft_writes, plan_of
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import FOLLOWS, NOW, SCHEMA, USER, WIDE, on_shard, version

A, B, FAR = on_shard(1, 1), on_shard(1, 2), on_shard(2, 1)
LIST = ListKey(A, FOLLOWS)
UNKNOWN = 99


def planned(existing: ExistingRows, *writes: Write, epoch: int = 1) -> WritePlan:
    shards = {
        shard: ShardRow(shard, "db", epoch, "leader", 1) for write in writes for shard in shards_of(write, SCHEMA)
    }
    return plan_of(draft_writes(existing, [PlannedWrite(write, True) for write in writes], SCHEMA, NOW), shards)


def touch(*touches: Touch) -> TouchKeys:
    return TouchKeys(1, touches)


def test_a_touched_list_gets_the_count_of_its_edges_and_the_next_version() -> None:
    existing = ExistingRows(lists={LIST: ListRow(3, version(5))}, recounted={LIST: ListRow(7, version(4))})
    result = planned(existing, touch(Touch(A, FOLLOWS, version(5))))
    assert result.rows == RowChanges(put_lists={LIST: ListRow(7, version(6))})
    assert result.changes == (ListInvalidation(A, FOLLOWS, version(6)),)
    assert result.changes_of == [(0,)]


@pytest.mark.parametrize(
    ("row", "edges", "seen", "expected"),
    [
        (version(5), version(9), 0, version(10)),
        (version(5), version(4), version(20), version(21)),
        (None, version(4), version(20), version(21)),
        (None, None, 0, version(1)),
        (version(5), version(9, epoch=7), version(3, epoch=9), version(6)),
    ],
    ids=["of its edges", "seen before", "of a row that is gone", "of nothing", "unless of an epoch that never was"],
)
def test_the_new_version_of_a_list_is_above_every_known_version(
    row: int | None, edges: int | None, seen: int, expected: int
) -> None:
    existing = ExistingRows(
        lists={} if row is None else {LIST: ListRow(1, row)},
        recounted={} if edges is None else {LIST: ListRow(1, edges)},
    )
    result = planned(existing, touch(Touch(A, FOLLOWS, seen)))
    assert result.rows.put_lists[LIST].version == expected
    assert result.rows.put_lists[LIST].count == (0 if edges is None else 1)


def test_a_touched_object_keeps_its_foreign_content_under_a_new_version() -> None:
    row = ObjectRow(A, USER, version(3), False, b"\x80")
    result = planned(ExistingRows(objects={A: row}), touch(Touch(A, WHOLE_OBJECT, version(8))))
    assert result.rows.put_objects == [ObjectRow(A, USER, version(9), False, b"\x80")]
    assert result.changes == (ObjectChange(A, version(3), version(9), USER, b"\x80"),)


def test_an_object_whose_row_is_gone_leaves_a_tombstone() -> None:
    result = planned(ExistingRows(), touch(Touch(A, WHOLE_OBJECT, version(8))))
    assert result.rows.put_objects == [ObjectRow(A, ABSENT, version(9), True, b"")]
    assert result.changes == (ObjectChange(A, 0, version(9), ABSENT, b""),)


def test_a_touch_raises_the_version_into_the_shard_s_epoch() -> None:
    existing = ExistingRows(lists={LIST: ListRow(3, version(5))})
    result = planned(existing, touch(Touch(A, FOLLOWS, version(5))), epoch=2)
    assert result.rows.put_lists == {LIST: ListRow(0, version(6, epoch=2))}


def test_keys_of_a_type_that_left_the_schema_are_skipped_and_do_not_block_others() -> None:
    write = touch(Touch(A, UNKNOWN, 0), Touch(A, FOLLOWS, version(5)))
    assert keys_of([PlannedWrite(write, True)], SCHEMA).recounts == {LIST}
    assert planned(ExistingRows(), write).rows.put_lists.keys() == {LIST}


def test_a_touch_locks_its_keys_and_counts_its_lists() -> None:
    write = touch(Touch(A, WHOLE_OBJECT, 0), Touch(A, WIDE, 0))
    wanted = keys_of([PlannedWrite(write, True)], SCHEMA)
    assert (wanted.objects, wanted.lists, wanted.recounts) == ({A}, {ListKey(A, WIDE)}, {ListKey(A, WIDE)})
    assert lane_keys(PlannedWrite(write, True), SCHEMA) == {A, ListKey(A, WIDE)}
    assert shards_of(write, SCHEMA) == {1}


@pytest.mark.parametrize(
    ("other", "mixed"),
    [
        (AssocAdd(A, FOLLOWS, B, 1, b""), True),
        (AssocDelete(B, FOLLOWS, A), False),
        (ObjUpdate(A, USER, b""), True),
        (ObjAdd(B, USER, b"", False), False),
        (AssocAdd(A, UNKNOWN, B, 1, b""), False),
        (touch(Touch(A, FOLLOWS, 0)), False),
    ],
)
def test_a_touch_shares_no_transaction_with_a_write_of_its_keys(other: Write, mixed: bool) -> None:
    writes = [PlannedWrite(other, True), PlannedWrite(touch(Touch(A, FOLLOWS, 0), Touch(A, WHOLE_OBJECT, 0)), True)]
    assert mixes_touches(writes, SCHEMA) is mixed


def test_the_row_events_of_a_touch_do_not_cause_another_touch() -> None:
    existing = ExistingRows(
        objects={A: ObjectRow(A, USER, version(3), False, b"\x80")},
        lists={LIST: ListRow(3, version(5)), ListKey(B, FOLLOWS): ListRow(1, version(1))},
        edges={EdgeKey(A, FOLLOWS, B): Edge(B, 1)},
        recounted={LIST: ListRow(1, version(5)), ListKey(B, FOLLOWS): ListRow(1, version(1))},
    )
    keys = [Touch(A, 0, 0), Touch(B, 0, version(4)), Touch(A, FOLLOWS, 0), Touch(B, FOLLOWS, 0), Touch(B, WIDE, 0)]
    result = planned(existing, touch(*keys), AssocAdd(FAR, FOLLOWS, A, 1, b""))
    translated = translate(row_events_of(existing, result.rows, SCHEMA), SCHEMA)
    assert (translated.touches, translated.bulk_shards) == ((), ())
    messages = [message for each in translated.messages for message in each.messages]
    assert sorted(map(repr, messages)) == sorted(map(repr, result.changes))
