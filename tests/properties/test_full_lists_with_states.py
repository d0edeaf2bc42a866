"""Bounded lists of a type with states, against a naive model: an add is refused exactly when it changes the edge, the
list of normal edges is full and the edge is not in it, whatever else the transaction does. Only restored edges exceed
the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.edge_states import State
from tao.model.errors import ListFull
from tao.model.graph import ListKey
from tao.model.ids import make_id
from tao.model.writes import AssocAdd, AssocDelete, AssocMerge, NodeSetState, PlaceEdges, Write
from tao.schema.registry import load_schema
from tests.rigs.effort import examples
from tests.unit.planning.stored_rows import NOW, StoredRows, on_shard

MOST = 2
BOUNDED, ARCHIVED, REMOVED = 1, 11, 12
SCHEMA = load_schema(
    f"""
format: 1
objects: {{user: {{number: 1}}}}
associations:
  follows: {{number: {BOUNDED}, max_edges: {MOST}, states: {{archived: {ARCHIVED}, removed: {REMOVED}}}}}
""",
    "schema.yaml",
)
STATE_OF = {BOUNDED: State.NORMAL, ARCHIVED: State.ARCHIVED, REMOVED: State.REMOVED}
READER = on_shard(0)
OTHERS = [on_shard(1, sequence) for sequence in range(MOST + 2)]
STATES = (State.NORMAL, State.ARCHIVED, State.REMOVED)

others = st.sampled_from(OTHERS)
times = st.integers(0, 2)  # of an operation, in steps of half the time between two transactions
writes = st.one_of(
    st.builds(lambda id2: AssocAdd(READER, BOUNDED, id2, 5, b""), others),
    st.builds(lambda id2: AssocDelete(READER, BOUNDED, id2), others),
    st.builds(lambda id2, state: AssocMerge(READER, BOUNDED, id2, state, 0, False), others, st.sampled_from(STATES)),
    st.builds(
        lambda id2, state, at: AssocMerge(READER, BOUNDED, id2, state, at, True, at, 5),
        others,
        st.sampled_from(STATES),
        times,
    ),
    st.builds(lambda state: NodeSetState(READER, (BOUNDED,), state), st.sampled_from(STATES)),
)
PLACE = PlaceEdges(READER, BOUNDED, 0, 500, asks_nobody=True)
transactions = st.lists(st.lists(writes, min_size=1, max_size=5) | st.just([PLACE]), max_size=12)


@dataclass
class ModelEdge:
    """The times of the newest state and payload, the state, and that of the list in which the edge is."""

    state_us: int = 0
    state: State = State.NORMAL
    payload_us: int = 0
    place: State | None = None


@dataclass
class Model:
    """The edges of one list, by id2, and the state of its node."""

    edges: dict[int, ModelEdge] = field(default_factory=dict)
    node: tuple[int, State] = (0, State.NORMAL)

    def apply(self, write: Write, now_us: int) -> bool:
        """Apply a write. Returns whether it was refused because the list is full."""
        match write:
            case NodeSetState(state=state):
                self.node = max(now_us, self.node[0] + 1), State(state)
            case PlaceEdges():
                for edge in self.edges.values():
                    edge.place = self.state_of(edge)
            case AssocAdd(id2=id2):
                return self.operate(id2, State.NORMAL, 0, True, now_us)
            case AssocDelete(id2=id2):
                return self.operate(id2, State.REMOVED, 0, False, now_us)
            case AssocMerge(id2=id2, state=state, state_us=state_us, has_payload=has_payload):
                return self.operate(id2, State(state), state_us, has_payload, now_us)
        return False

    def operate(self, id2: int, state: State, at: int, has_payload: bool, now_us: int) -> bool:
        known = self.edges.get(id2, ModelEdge())
        at = at or max(now_us, known.state_us + 1, known.payload_us + 1)
        state_us, state = max((at, state), (known.state_us, known.state))
        after = ModelEdge(state_us, state, max(known.payload_us, at) if has_payload else known.payload_us)
        after.place = self.state_of(after)
        grows = after.place is State.NORMAL and known.place is not State.NORMAL
        is_repeated = (after.state_us, after.state, after.payload_us) == (known.state_us, known.state, known.payload_us)
        if has_payload and grows and not is_repeated and self.length >= MOST:
            return True
        self.edges[id2] = after
        return False

    def state_of(self, edge: ModelEdge) -> State:
        return max(edge.state, self.node[1]) if edge.payload_us else State.REMOVED

    @property
    def length(self) -> int:
        return sum(edge.place is State.NORMAL for edge in self.edges.values())


def at_its_time(write: Write, now: int, number: int) -> Write:
    """Return the write with its time, which other writes may have as well, and with the id of its job."""
    if isinstance(write, AssocMerge) and write.has_payload:
        at = NOW * 1000 + 5_000 * write.state_us
        return AssocMerge(write.id1, write.atype, write.id2, write.state, at, True, at, write.time)
    if isinstance(write, NodeSetState):
        return NodeSetState(write.id, write.atypes, write.state, 0, make_id(3, now, number))
    return write


@settings(max_examples=examples(2_000), deadline=None)
@given(transactions)
def test_an_add_beyond_the_bound_is_refused_and_restored_edges_may_exceed_it(
    drawn: Sequence[Sequence[Write]],
) -> None:
    stored, model = StoredRows(full_schema=SCHEMA), Model()
    for number, transaction in enumerate(drawn):
        now = NOW + 10 * number
        stamped = [at_its_time(each, now, place) for place, each in enumerate(transaction)]
        planned = stored.run(*stamped, now=now, schema=SCHEMA)
        refused = [model.apply(each, now * 1000) for each in stamped]
        assert [isinstance(each.error, ListFull) for each in planned.outcomes] == refused
        assert all(each.error is None or isinstance(each.error, ListFull) for each in planned.outcomes)
        found = {key.id2: STATE_OF[key.atype] for key in stored.rows.edges}
        assert found == {id2: edge.place for id2, edge in model.edges.items()}
        row = stored.rows.lists.get(ListKey(READER, BOUNDED))
        assert (row.count if row is not None else 0) == model.length


def test_hidden_edges_need_no_room_and_come_back_beyond_the_bound() -> None:
    stored = StoredRows(full_schema=SCHEMA)
    for id2 in OTHERS[:MOST]:
        stored.run(AssocAdd(READER, BOUNDED, id2, 5, b""), schema=SCHEMA)
    full = stored.run(AssocAdd(READER, BOUNDED, OTHERS[2], 5, b""), schema=SCHEMA)
    assert isinstance(full.outcomes[0].error, ListFull)
    stored.run(AssocMerge(READER, BOUNDED, OTHERS[0], State.ARCHIVED, 0, False), schema=SCHEMA)
    assert stored.run(AssocAdd(READER, BOUNDED, OTHERS[2], 5, b""), schema=SCHEMA).outcomes[0].error is None
    restored = stored.run(AssocMerge(READER, BOUNDED, OTHERS[0], State.NORMAL, 0, False), schema=SCHEMA)
    assert restored.outcomes[0].error is None
    assert stored.rows.lists[ListKey(READER, BOUNDED)].count == MOST + 1


def test_an_add_that_is_repeated_between_the_restore_of_its_node_and_the_job_is_not_refused() -> None:
    stored = StoredRows(full_schema=SCHEMA)
    at = NOW * 1000
    stored.run(NodeSetState(READER, (BOUNDED,), State.ARCHIVED, 0, make_id(3, NOW, 1)), schema=SCHEMA)
    added = AssocMerge(READER, BOUNDED, OTHERS[0], State.NORMAL, at, True, at, 5)
    assert stored.run(added, schema=SCHEMA).outcomes[0].error is None
    stored.run(NodeSetState(READER, (BOUNDED,), State.NORMAL, 0, make_id(3, NOW, 2)), schema=SCHEMA)
    for id2 in OTHERS[1 : 1 + MOST]:
        assert stored.run(AssocAdd(READER, BOUNDED, id2, 5, b""), schema=SCHEMA).outcomes[0].error is None
    assert stored.run(added, schema=SCHEMA).outcomes[0].error is None
    another = AssocMerge(READER, BOUNDED, OTHERS[3], State.NORMAL, at, True, at, 5)
    assert isinstance(stored.run(another, schema=SCHEMA).outcomes[0].error, ListFull)
    stored.run(PLACE, schema=SCHEMA)
    assert stored.rows.lists[ListKey(READER, BOUNDED)].count == MOST + 1
