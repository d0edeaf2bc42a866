"""Operations on edges with states, in any order and any number of times, against a naive model.

The model is the definition itself: of all operations on an edge, the newest decides its state, and the newest of those
that carry time and data decides these. Of all operations on a node, the newest decides its state; an edge is in the
list of the highest of the three. The planner's rows must equal it at both ends, byte for byte but for versions and the
seconds of changes, which say how they came about. The edges of nodes are moved at any time, and at the end."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.edge_states import EdgeRegisters, NodeState, State
from tao.model.graph import EdgeKey, ListKey
from tao.model.ids import make_id
from tao.model.rows import ExistingRows, IntentRow
from tao.model.writes import AssocMerge, ForgetIntent, NodeSetState, PlaceEdges, SettleEdge
from tao.planning.coordination import coordinator_side
from tao.planning.draft import settle_writes
from tao.planning.row_events import translate
from tests.rigs.effort import examples
from tests.unit.planning.row_events_of import row_events_of
from tests.unit.planning.stored_rows import NOW, StoredRows, on_shard
from tests.unit.planning.test_edge_states import FOLLOWED_BY, FOLLOWS, SCHEMA

NOW_US = NOW * 1000
IDS = [on_shard(0), on_shard(1, 0), on_shard(1, 1), on_shard(2)]
Row = tuple[int, int, int, EdgeRegisters]
Operation = AssocMerge | NodeSetState
NODE_STATES = (State.NORMAL, State.ARCHIVED, State.REMOVED)


def merge(one: int, two: int, inverse: bool, state: State, at: int, time: int) -> AssocMerge:
    id1, atype, id2 = (IDS[two], FOLLOWED_BY, IDS[one]) if inverse else (IDS[one], FOLLOWS, IDS[two])
    return AssocMerge(id1, atype, id2, state, NOW_US + at, time > 0, NOW_US + at if time else 0, time)


def set_node(node: int, atypes: tuple[int, ...], state: State, at: int) -> NodeSetState:
    # Jobs are not what is compared: one for each node, its types and the time.
    number = (at % 1_000_000) * 100 + node * 10 + sum(atypes) % 10
    return NodeSetState(IDS[node], atypes, state, NOW_US + at, make_id(3, NOW + number, 0))


node_operations = st.builds(
    set_node,
    st.integers(0, 3),
    st.sampled_from([(FOLLOWS,), (FOLLOWED_BY,), (FOLLOWS, FOLLOWED_BY)]),
    st.sampled_from(NODE_STATES),
    st.integers(0, 5),
)
operations = st.builds(
    merge,
    st.integers(0, 3),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(State),
    st.integers(0, 5),
    st.integers(0, 2),
)


def expected_rows(writes: Iterable[Operation]) -> list[Row]:
    """Return the rows by the definition, without joins."""
    edges: dict[tuple[int, int], list[AssocMerge]] = {}
    nodes: dict[tuple[int, int], NodeState] = {}
    for write in writes:
        if isinstance(write, NodeSetState):
            for atype in write.atypes:
                operation = NodeState(write.state_us, write.state)
                nodes[write.id, atype] = max(operation, nodes.get((write.id, atype), NodeState()))
            continue
        ends = (write.id1, write.id2) if write.atype == FOLLOWS else (write.id2, write.id1)
        edges.setdefault(ends, []).append(write)
    rows: list[Row] = []
    for (one, two), of_edge in edges.items():
        state_us, state = max((each.state_us, each.state) for each in of_edge)
        payload = max(((each.payload_us, each.time, each.data) for each in of_edge if each.has_payload), default=None)
        near, far = nodes.get((one, FOLLOWS), NodeState()), nodes.get((two, FOLLOWED_BY), NodeState())
        place = State(max(state, near.state, far.state)) if payload else State.REMOVED
        registers = EdgeRegisters(state, state_us, *(payload or (0, 0, b"")))
        for id1, atype, id2, other in ((one, FOLLOWS, two, far), (two, FOLLOWED_BY, one, near)):
            rows.append((id1, SCHEMA.atype(atype).states[place], id2, registers.with_id2(other)))
    return sorted(rows, key=lambda row: row[:3])


def stored_in(rows: ExistingRows) -> list[Row]:
    for key, edge in rows.edges.items():
        assert (edge.time, edge.data) == (rows.registers[key].time, rows.registers[key].data)
    counts = Counter(ListKey(key.id1, key.atype) for key in rows.edges)
    assert {key: row.count for key, row in rows.lists.items() if row.count} == counts
    return sorted(((key.id1, key.atype, key.id2, row) for key, row in rows.registers.items()), key=lambda row: row[:3])


def apply(writes: Sequence[Operation], batch: int, sides: random.Random | None = None) -> ExistingRows:
    """Apply the writes in batches. ``sides``: execute some at the coordinator's side only, and settle them later; move
    the edges of a node now and then."""
    stored = StoredRows(full_schema=SCHEMA)
    for start in range(0, len(writes), batch):
        some = writes[start : start + batch]
        # All writes of a pair in a batch are executed at both sides, or none.
        of_pair: dict[object, bool] = {}
        pairs = [coordinator_side(write, SCHEMA) for write in some]
        both = [of_pair.setdefault(pair, sides is None or sides.random() < 0.5) for pair in pairs]
        planned = stored.plan(*some, both_sides=both, schema=SCHEMA)
        assert [outcome.error for outcome in planned.outcomes] == [None] * len(some)
        events = row_events_of(stored.rows, planned.rows, SCHEMA)
        translated = translate(events, SCHEMA)
        messages = [message for part in translated.messages for message in part.messages]
        assert sorted(messages, key=lambda each: (each.shard, each.id1, each.atype)) == sorted(  # type: ignore[union-attr]
            planned.changes,
            key=lambda each: (each.shard, each.id1, each.atype),  # type: ignore[union-attr]
        )
        assert (translated.touches, translated.bulk_shards) == ((), ())
        stored.apply(planned)
        if sides is None:
            assert not stored.rows.intents
        elif sides.random() < 0.5:
            _settle(stored)
        if sides is not None and sides.random() < 0.2:
            _walk(stored, sides.choice(IDS), sides.randint(1, 3))
    if sides is not None:
        _settle(stored)
    for node in IDS:
        _walk(stored, node, 2)
    return stored.rows


def _walk(stored: StoredRows, node: int, limit: int) -> None:
    """Move the edges of a node, as its job does."""
    if not any(key.id1 == node for key in stored.rows.nodes):
        return
    for atype in (FOLLOWS, FOLLOWED_BY):
        after = 0
        while True:
            (outcome,) = stored.run(PlaceEdges(node, atype, after, limit), schema=SCHEMA).outcomes
            assert outcome.page is not None
            for copy in outcome.page.copies:
                (far,) = stored.run(copy, schema=SCHEMA).outcomes
                assert far.registers is not None
                # What the far end knows more is joined at the near one.
                near = far.registers.with_id2(far.node)
                stored.run(SettleEdge(node, atype, copy.id1, True, copy.time, copy.data, registers=near), schema=SCHEMA)
            after = outcome.page.next_after
            if not after:
                break


def _settle(stored: StoredRows) -> None:
    """Settle every intent from the coordinator's rows as they are, as leaders do."""
    for intent in list(stored.rows.intents.values()):
        near = {key: row for key, row in stored.rows.registers.items() if (key.id1, key.id2) == _ids_of(intent)}
        registers = {EdgeKey(key.id1, SCHEMA.declared((key.atype,))[0], key.id2): row for key, row in near.items()}
        nodes = {key: stored.rows.nodes.get(ListKey(key.id1, key.atype), NodeState()) for key in registers}
        sent = {key: row.with_id2(nodes[key]) for key, row in registers.items()}
        settles = settle_writes(intent, {}, SCHEMA, sent)
        for settle, outcome in zip(settles, stored.run(*settles, schema=SCHEMA).outcomes, strict=True):
            near_type = SCHEMA.inverse_of(SCHEMA.atype(settle.atype))
            assert near_type is not None
            assert outcome.registers is not None
            joined = outcome.registers.with_id2(outcome.node)
            ends = (settle.id2, near_type.number, settle.id1)
            stored.run(SettleEdge(*ends, True, joined.time, joined.data, registers=joined), schema=SCHEMA)
        stored.run(ForgetIntent(intent.low_id, intent.high_id, intent.token), schema=SCHEMA)
    assert not stored.rows.intents


def _ids_of(intent: IntentRow) -> tuple[int, int]:
    return intent.low_id, intent.high_id


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(operations | node_operations, max_size=14), st.randoms(use_true_random=False), st.integers(1, 4))
def test_any_order_and_repetition_of_operations_gives_the_same_rows(
    writes: list[Operation], order: random.Random, batch: int
) -> None:
    doubled = [*writes, *order.choices(writes, k=5)] if writes else []
    order.shuffle(doubled)
    expected = expected_rows(writes)
    assert stored_in(apply(writes, batch)) == expected
    assert stored_in(apply(doubled, batch)) == expected
    assert stored_in(apply(doubled, batch, order)) == expected


def test_thousands_of_operations_in_order_shuffled_and_doubled_end_in_the_same_rows() -> None:
    rng = random.Random(7)
    writes: list[Operation] = []
    for at in range(max(10_000, examples(100_000))):
        if at % 50 == 0:
            atypes = rng.choice(((FOLLOWS,), (FOLLOWED_BY,), (FOLLOWS, FOLLOWED_BY)))
            writes.append(set_node(rng.randrange(4), atypes, rng.choice(NODE_STATES), at))
        one, two = rng.choices(range(4), k=2)
        state, time = rng.choice(list(State)), rng.choice((0, 0, at + 1))
        writes.append(merge(one, two, rng.random() < 0.5, state, at, time))
    expected = expected_rows(writes)
    assert stored_in(apply(writes, 64)) == expected
    shuffled = rng.sample(writes, len(writes))
    assert stored_in(apply(shuffled, 64)) == expected
    doubled = rng.sample([*writes, *writes], 2 * len(writes))
    assert stored_in(apply(doubled, 64)) == expected
