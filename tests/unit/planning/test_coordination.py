"""The coordinator of a write, and the rows and lane keys that the write takes."""

import pytest

from tao.model.graph import EdgeKey, ListKey
from tao.model.writes import (
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    ForgetIntent,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    SettleEdge,
    Write,
)
from tao.planning.coordination import PlannedWrite, coordinating_shard, coordinator_side, keys_of, lane_keys, shards_of
from tests.unit.planning.stored_rows import FOLLOWS, HIGH, LIKED_BY, LIKES, LOW, PAIR, SCHEMA, TAGS, USER

PAIRED: list[Write] = [
    AssocAdd(LOW, LIKES, HIGH, 1, b""),
    AssocAdd(HIGH, LIKES, LOW, 1, b""),
    AssocDelete(HIGH, LIKES, LOW),
    AssocChangeType(HIGH, LIKES, LOW, TAGS),
    AssocChangeType(HIGH, LIKES, LOW, FOLLOWS),
    AssocChangeType(HIGH, FOLLOWS, LOW, LIKES),
]
AT_HOME: list[Write] = [
    ObjAdd(HIGH, USER, b"", False),
    ObjUpdate(HIGH, USER, b""),
    ObjDelete(HIGH),
    AssocAdd(HIGH, FOLLOWS, LOW, 1, b""),
    AssocAdd(HIGH, LIKES, HIGH, 1, b""),
    AssocDelete(HIGH, FOLLOWS, LOW),
    SettleEdge(HIGH, LIKED_BY, LOW, False),
]


@pytest.mark.parametrize("write", PAIRED)
def test_a_pair_is_coordinated_on_the_shard_of_the_smaller_id(write: Write) -> None:
    assert coordinator_side(write, SCHEMA) == (LOW, HIGH)
    assert coordinating_shard(write, SCHEMA) == 1
    assert shards_of(write, SCHEMA) == {1, 2}
    for both_sides in (True, False):
        planned = PlannedWrite(write, both_sides)
        assert PAIR in lane_keys(planned, SCHEMA)
        assert keys_of([planned], SCHEMA).intents == (set() if both_sides else {PAIR})


@pytest.mark.parametrize("write", AT_HOME)
def test_every_other_write_is_coordinated_at_home(write: Write) -> None:
    assert coordinator_side(write, SCHEMA) is None
    assert coordinating_shard(write, SCHEMA) == 2
    assert shards_of(write, SCHEMA) == {2}
    assert keys_of([PlannedWrite(write, False)], SCHEMA).intents == set()


def test_an_intent_is_forgotten_where_the_pair_is_coordinated() -> None:
    write = ForgetIntent(LOW, HIGH, 1)
    assert coordinating_shard(write, SCHEMA) == 1
    assert lane_keys(PlannedWrite(write, False), SCHEMA) == {PAIR}
    assert keys_of([PlannedWrite(write, False)], SCHEMA).intents == {PAIR}


def test_one_side_reads_and_locks_the_coordinators_rows_alone() -> None:
    planned = PlannedWrite(AssocAdd(HIGH, LIKES, LOW, 1, b""), both_sides=False)
    keys = keys_of([planned], SCHEMA)
    assert keys.edges == {EdgeKey(LOW, LIKED_BY, HIGH)}
    assert keys.lists == {ListKey(LOW, LIKED_BY)}
    assert lane_keys(planned, SCHEMA) == {ListKey(LOW, LIKED_BY), PAIR}


def test_a_change_of_type_reads_the_edges_of_both_types_at_both_ends() -> None:
    keys = keys_of([PlannedWrite(AssocChangeType(LOW, LIKES, HIGH, FOLLOWS), True)], SCHEMA)
    assert keys.edges == {EdgeKey(LOW, LIKES, HIGH), EdgeKey(HIGH, LIKED_BY, LOW), EdgeKey(LOW, FOLLOWS, HIGH)}
    assert keys.lists == {ListKey(edge.id1, edge.atype) for edge in keys.edges}
