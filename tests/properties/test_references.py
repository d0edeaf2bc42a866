"""Both ways of a relay give the same bytes: a leader's own messages, and those decoded from the rows that it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.leader.write_path import group_by_shard
from tao.model.changes import ShardMessages
from tao.model.delivery import Span
from tao.model.relay import Relay, Touch, missing_of, with_messages
from tao.model.rows import ShardRow
from tao.model.writes import AssocAdd, ObjAdd, PlaceEdges, SettleEdge, TouchKeys, Write
from tao.planning.coordination import coordinator_side
from tao.planning.row_events import Translated, translate
from tao.schema.registry import Schema
from tao.tailer.binlog import BinlogTransaction, UndecodedRows
from tao.tailer.leader_outbox import Part, Receipt, contents_of, decoded_parts, relay_of
from tao.tailer.settings import OutboxSettings
from tao.wire.convert import relay_from_pb, relay_to_pb
from tests.properties.test_edge_states import IDS as NODES
from tests.properties.test_edge_states import node_operations, operations
from tests.properties.test_write_plan import copy_of, edge_writes, ids, object_writes
from tests.rigs.effort import examples
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import FOLLOWS, FRIEND, LIKED_BY, LOW, NOW, SCHEMA, USER, StoredRows, on_shard
from tests.unit.planning.test_edge_states import FOLLOWED_BY
from tests.unit.planning.test_edge_states import FOLLOWS as FOLLOWS_IN_STATES
from tests.unit.planning.test_edge_states import SCHEMA as SCHEMA_WITH_STATES

SOURCE = "db@1:0-1"
SETTINGS = OutboxSettings()


def rows_of(stored: StoredRows) -> dict[int, ShardRow]:
    """Return the locked rows of the shards."""
    return {shard: ShardRow(shard, "db1", stored.epoch, "leader1", 1) for shard in range(4)}


def encoded(relay: Relay) -> bytes:
    """Return a relay as it is sent."""
    return relay_to_pb(relay).SerializeToString()


def parts_of(number: int, translated: Translated) -> list[Part]:
    """Return the parts of a decoded transaction."""
    receipt = Receipt([f"0-1-{number}"])
    return [
        Part(receipt, shard, content, size, Span(shard, SOURCE, number - 1, number))
        for shard, content, size in contents_of(translated, SETTINGS)
    ]


def undecoded_parts_of(number: int, translated: Translated) -> list[Part]:
    """Return the parts of the same transaction before it is decoded."""
    receipt = Receipt([f"0-1-{number}"])
    return [
        Part(
            receipt,
            each.shard,
            UndecodedRows(each.shard, 100, partial(BinlogTransaction, gtid="")),
            100,
            Span(each.shard, SOURCE, number - 1, number),
        )
        for each in translated.messages
    ]


settled = st.builds(
    SettleEdge, ids, st.sampled_from([FRIEND, LIKED_BY]), ids, st.booleans(), st.integers(0, 3), st.just(b"")
)
all_writes = st.one_of(edge_writes, edge_writes, object_writes, settled)
transactions = st.lists(st.lists(st.tuples(all_writes, st.booleans()), min_size=1, max_size=8), min_size=1, max_size=6)
pages = st.builds(
    PlaceEdges, st.sampled_from(NODES), st.sampled_from([FOLLOWS_IN_STATES, FOLLOWED_BY]), st.just(0), st.integers(1, 9)
)
state_writes = st.one_of(operations, operations, node_operations, pages)
transactions_of_states = st.lists(
    st.lists(st.tuples(state_writes, st.booleans()), min_size=1, max_size=8), min_size=1, max_size=6
)
promotions = st.lists(st.sampled_from([0, 0, 1]), min_size=6, max_size=6)


def check_both_ways(
    stored: StoredRows,
    schema: Schema,
    runs: Sequence[list[tuple[Write, bool]]],
    promotions: Sequence[int],
    chance: st.DataObject,
) -> None:
    """Run the transactions, and check that a relay that names some of them becomes the relay of all that is decoded."""
    kept: dict[tuple[str, int, int], ShardMessages] = {}
    decoded: list[Part] = []
    sent: list[Part] = []
    for number, batch in enumerate(runs, 1):
        stored.epoch += promotions[number - 1]
        sides = [both or coordinator_side(write, schema) is None for write, both in batch]
        plan = stored.plan(*[write for write, _ in batch], both_sides=sides, now=NOW + number, schema=schema)
        translated = translate(row_events_of(stored.rows, plan.rows, schema), schema)
        stored.apply(plan)
        for messages in group_by_shard(plan.changes, rows_of(stored)):
            kept[SOURCE, number, messages.shard] = messages
        decoded += parts_of(number, translated)
        for part, whole in zip(undecoded_parts_of(number, translated), translated.messages, strict=True):
            # Some were missing before, and the tailer has decoded them.
            is_decoded = chance.draw(st.booleans())
            sent += decoded_parts(part, Translated((whole,)), SETTINGS) if is_decoded else [part]

    def find(source: str, number: int, shard: int) -> ShardMessages | None:
        return kept.get((source, number, shard))

    relay = relay_from_pb(relay_to_pb(relay_of(sent, "db")))
    assert missing_of(relay, find) == ()
    entered = with_messages(relay, find)
    every_part = relay_of(decoded, "db")
    assert encoded(msgspec.structs.replace(entered, references=())) == encoded(every_part)


@settings(max_examples=examples(100), deadline=None)
@given(transactions, promotions, st.data())
def test_a_relay_by_reference_gives_the_same_bytes_as_a_decoded_one(
    runs: list[list[tuple[Write, bool]]], promotions: list[int], chance: st.DataObject
) -> None:
    check_both_ways(StoredRows(), SCHEMA, runs, promotions, chance)


@settings(max_examples=examples(100), deadline=None)
@given(transactions_of_states, promotions, st.data())
def test_a_relay_of_edges_with_states_by_reference_gives_the_same_bytes_as_a_decoded_one(
    runs: list[list[tuple[Write, bool]]], promotions: list[int], chance: st.DataObject
) -> None:
    stored = StoredRows(full_schema=SCHEMA_WITH_STATES)
    check_both_ways(stored, SCHEMA_WITH_STATES, runs, promotions, chance)


def test_a_touch_by_the_owner_gives_the_same_bytes() -> None:
    stored = StoredRows()
    owned = [on_shard(1, sequence) for sequence in range(4)]
    stored.run(
        *[AssocAdd(id1, FOLLOWS, LOW, 1, b"") for id1 in owned], *[ObjAdd(each, USER, b"\x80", False) for each in owned]
    )
    before = copy_of(stored.rows)
    touches = [Touch(each, atype, 0) for each in reversed(owned) for atype in (FOLLOWS, 0)]
    plan = stored.run(TouchKeys(1, tuple(touches)))
    translated = translate(row_events_of(before, plan.rows, SCHEMA), SCHEMA)
    assert len(translated.messages[0].messages) == 8
    assert tuple(group_by_shard(plan.changes, rows_of(stored))) == translated.messages
