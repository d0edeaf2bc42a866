"""Plan the writes of edges of types with states: join an operation into the edge's registers, and move the edge to the
list of its effective state.

An edge has one row at each end, in the list of the state that its registers give (`EdgeRegisters.effective_state`).
Whatever the rows are, also after a foreign write or a loss, a write joins all of them and leaves one. A write that
changes registers and neither place, time nor data raises no version: caches hold no registers.

Each end is placed by the state of its own node, which is read under the same locks, and by what its row knows of the
other end's node. Where both ends are written in one transaction, both nodes are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from tao.model.edge_states import (
    FOREIGN_PAYLOAD_US,
    MAX_AHEAD_SECONDS,
    NO_OPERATION,
    UNSET_NODE,
    EdgeRegisters,
    NodeState,
    State,
)
from tao.model.errors import InvalidArgument, OperationAhead, OperationTooOld
from tao.model.graph import MAX_TIME, Edge, EdgeKey, ListKey
from tao.model.rows import IntentKey, IntentRow, RowChanges
from tao.model.writes import (
    AssocAdd,
    AssocDelete,
    AssocMerge,
    JoinedEdge,
    JoinEdges,
    PurgeEdge,
    ReadState,
    SettleEdge,
    WriteOutcome,
)
from tao.planning.coordination import intent_here
from tao.planning.draft import (
    Draft,
    PlacedEdge,
    check_room,
    coordinator_edges_of,
    settle_writes,
)
from tao.schema.registry import Schema
from tao.schema.types import AssocType

StateWrite = AssocAdd | AssocDelete | AssocMerge
PURGE_MARGIN_SECONDS: Final = 3_600
"""For how much longer than its type says a removed edge is kept: more than clocks of leaders differ, and times of
operations are ahead."""
_DAY_US: Final = 24 * 3600 * 1_000_000


def validate_merge(write: AssocMerge, schema: Schema) -> None:
    """Check the state and the times of an operation without its rows. Raises `InvalidArgument`."""
    atype = schema.atype(write.atype)
    if not 0 <= write.state <= State.REMOVED:
        raise InvalidArgument(f"{write.state} is no state of an edge; states are 0 to {State.REMOVED:d}")
    schema.state_type(atype, State(write.state))
    for name in ("state_us", "payload_us"):
        if not 0 <= getattr(write, name) <= MAX_TIME:
            raise InvalidArgument(f"{name} {getattr(write, name)} is outside 0 … 2^63 - 1")
    if not write.has_payload and (write.payload_us or write.time or write.data):
        raise InvalidArgument("the operation carries time or data, which it does not set: it lacks has_payload")
    if write.payload_us and not write.state_us:
        raise InvalidArgument("payload_us is given without state_us: the leader stamps both, or none")


class End(NamedTuple):
    """One end of an edge as it is: ``key``, of the edge under its type with states, the registers, the types whose
    lists have a row of it, and the state of the node at this end."""

    key: EdgeKey
    atype: AssocType
    registers: EdgeRegisters
    places: Sequence[int]
    node: NodeState


def end_at(draft: Draft, key: EdgeKey, atype: AssocType) -> End:
    """Return one end of an edge as the draft has it. ``key``: of the edge under its type with states."""
    node = draft.node(ListKey(key.id1, key.atype))
    written = draft.states.get(key)
    if written is not None:
        return End(key, atype, written.registers, (written.place,), node)
    joined, places = NO_OPERATION, []
    stored, id1, id2 = draft.existing.edges, key.id1, key.id2
    for number in atype.state_numbers if stored else ():
        row_key = EdgeKey(id1, number, id2)
        edge = stored.get(row_key)
        if edge is not None:
            places.append(number)
            state = State(atype.states.index(number))
            joined = joined.joined(_stored(draft.existing.registers.get(row_key), edge, state))
    return End(key, atype, joined, places, node)


def merge_edge(
    draft: Draft, write: StateWrite, pair: IntentKey | None, schema: Schema, now_unix_ms: int
) -> WriteOutcome:
    """Apply an operation at both ends, or at that of ``pair.low_id`` alone when a pair is given.

    Raises `OperationTooOld` or `OperationAhead`, and `ListFull` for an add to a list of normal edges that has as many
    as its type allows. An operation that only sets the state brings back an edge also beyond that, and so does one on a
    node: an add that is repeated with its time changes no register, and is not refused where it moves such an edge
    before the node's job does."""
    atype = schema.atype(write.atype)
    inverse = schema.inverse_of(atype)
    ends = [
        end_at(draft, key, end_type)
        for key, end_type in _ends(write, atype, inverse).items()
        if pair is None or key.id1 == pair.low_id
    ]
    before = ends[0].registers
    for end in ends[1:]:
        before = before.joined(end.registers)
    operation = _operation(write, before, now_unix_ms * 1000)
    if isinstance(write, AssocMerge) and write.state_us:
        times = (operation.state_us, operation.payload_us or operation.state_us)
        check_times(times, (atype,), now_unix_ms * 1000)
    after = before.joined(operation)
    if (
        atype.max_edges is not None  # only of a type without an inverse: it has one end
        and operation.payload_us
        and after != before
        and after.effective_state(ends[0].node.state) is State.NORMAL
    ):
        check_room(draft, ends[0].key, atype)
    for end in ends:
        if pair is not None:
            draft.one_sided.setdefault(pair, set()).add(end.key)
        # The other end of an edge from an id to itself may be the same one.
        is_known = pair is None and inverse is not None
        far = ends[1 if end is ends[0] else 0] if len(ends) > 1 else end
        node = max(end.registers.id2_node, far.node) if is_known else end.registers.id2_node
        put_at(draft, end, after if node == after.id2_node else after.with_id2(node))
    placed = draft.states.get(ends[0].key)
    registers = ends[0].registers if placed is None else placed.registers
    was_shown = before.effective_state(ends[0].node.state) is not State.REMOVED
    superseded = _is_superseded(operation, before)
    return WriteOutcome(found=was_shown, registers=registers, superseded=superseded, node=ends[0].node)


def read_state(draft: Draft, write: ReadState, schema: Schema) -> WriteOutcome:
    """Return the registers of an edge at ``id1``, and the state of its node."""
    end = end_at(draft, EdgeKey(write.id1, write.atype, write.id2), schema.atype(write.atype))
    return _outcome_at(end, end.registers)


def purge_before_unix_s(atype: AssocType, now_unix_ms: int) -> int:
    """Return the time before which a removed edge has to have changed last so that it can be purged.

    An operation that could show the edge again is older than its removal, which was at most `MAX_AHEAD_SECONDS` ahead
    of the clock by which it was written. So every leader rejects that operation from then on, if no clock is behind
    another one by more than the margin."""
    return now_unix_ms // 1000 - atype.keep_removed_days * 86_400 - PURGE_MARGIN_SECONDS


def removed_by_nodes_us(registers: EdgeRegisters, node: NodeState = UNSET_NODE) -> int:
    """Return when the nodes of an edge that are removed were removed last, 0 if none is. ``node``: that of this end.

    What such a node hides can be restored for as long after its operation as its type says. The row's own time of
    change does not say: a second removal of the node finds the row in the list of removed edges and leaves it alone.
    """
    return max((each.state_us for each in (node, registers.id2_node) if each.state == State.REMOVED), default=0)


def purge_edge(draft: Draft, write: PurgeEdge, schema: Schema, now_unix_ms: int) -> WriteOutcome:
    """Remove the row of a removed edge. Registers that are still those that were read have not changed since; the node
    at this end may have, and its state is compared with the time here."""
    atype = schema.atype(write.atype)
    key = EdgeKey(write.id1, atype.states[State.REMOVED], write.id2)
    end = end_at(draft, EdgeKey(write.id1, write.atype, write.id2), atype)
    is_owed = any(draft.intent(pair) is not None for pair in intent_here(write))
    if (
        is_owed
        or draft.edge(key) is None
        or end.registers != write.registers
        or end.registers.effective_state(end.node.state) is not State.REMOVED
        or removed_by_nodes_us(end.registers, end.node) // 1_000_000 > purge_before_unix_s(atype, now_unix_ms)
    ):
        return WriteOutcome()
    draft.set_edge(key, None)
    return WriteOutcome(found=True)


def join_settled_edge(draft: Draft, write: SettleEdge, schema: Schema) -> WriteOutcome:
    """Join the registers of the other end into those of this one. The outcome has the result, which differs from what
    was sent when this end knows of newer operations, and the state of the node at this end."""
    assert write.registers is not None, "only copies of edges with states carry registers"
    end = end_at(draft, EdgeKey(write.id1, write.atype, write.id2), schema.atype(write.atype))
    after = end.registers.joined(write.registers)
    put_at(draft, end, after)
    return _outcome_at(end, after)


def join_edges(draft: Draft, write: JoinEdges, schema: Schema) -> WriteOutcome:
    """Join the registers of each edge into those of this end. The outcome has all results."""
    joined: list[JoinedEdge] = []
    for edge in write.edges:
        outcome = join_settled_edge(draft, edge, schema)
        assert outcome.registers is not None, "a join has a result"
        joined.append(JoinedEdge(outcome.registers, outcome.node))
    return WriteOutcome(found=True, joined=tuple(joined))


def _outcome_at(end: End, after: EdgeRegisters) -> WriteOutcome:
    was_shown = end.registers.effective_state(end.node.state) is not State.REMOVED
    return WriteOutcome(found=was_shown, registers=after, node=end.node)


def settlement_of(draft: Draft, intent: IntentRow, schema: Schema) -> list[SettleEdge]:
    """Return the writes that settle an intent by the current rows of the draft. Raises `SchemaBehind`."""
    keys = coordinator_edges_of(intent)
    edges = {key: edge for key in keys if (edge := draft.edge(key)) is not None}
    registers: dict[EdgeKey, EdgeRegisters] = {}
    for key in keys:
        if schema.knows_atype(key.atype) and schema.atype(key.atype).states:
            end = end_at(draft, key, schema.atype(key.atype))
            registers[key] = end.registers.with_id2(end.node)
    return settle_writes(intent, edges, schema, registers)


def write_registers(draft: Draft, rows: RowChanges, now_unix_ms: int) -> None:
    """Add the registers of the written edges to the rows."""
    for key, (registers, place) in draft.states.items():
        row_key = EdgeKey(key.id1, place, key.id2)
        if row_key in rows.put_edges or registers != draft.existing.registers.get(row_key):
            rows.put_registers[row_key] = registers
    if rows.put_registers:
        rows.changed_unix_s = now_unix_ms // 1000


def _stored(registers: EdgeRegisters | None, edge: Edge, state: State) -> EdgeRegisters:
    """Return the registers of a stored row. One of a foreign writer lacks times; its state is that of its list."""
    if registers is not None and registers.has_operation:
        return registers  # the payload of an edge that was archived before it was added is empty, and stays so
    return EdgeRegisters(state, 0, FOREIGN_PAYLOAD_US, edge.time, edge.data)


def _ends(write: StateWrite, atype: AssocType, inverse: AssocType | None) -> dict[EdgeKey, AssocType]:
    ends = {EdgeKey(write.id1, atype.number, write.id2): atype}
    if inverse is not None:
        ends[EdgeKey(write.id2, inverse.number, write.id1)] = inverse
    return ends


def _operation(write: StateWrite, before: EdgeRegisters, now_us: int) -> EdgeRegisters:
    """Return the registers that the operation sets. Without a time of its own it is newer than all before it."""
    stamp_us = max(now_us, before.state_us + 1, before.payload_us + 1)
    match write:
        case AssocAdd(time=time, data=data):
            return EdgeRegisters(State.NORMAL, stamp_us, stamp_us, time, data)
        case AssocDelete():
            return EdgeRegisters(State.REMOVED, stamp_us)
        case AssocMerge(state=state, state_us=state_us, payload_us=payload_us):
            state_us = state_us or stamp_us
            if not write.has_payload:
                return EdgeRegisters(state, state_us)
            return EdgeRegisters(state, state_us, payload_us or state_us, write.time, write.data)


def check_times(times_us: Sequence[int], atypes: Sequence[AssocType], now_us: int) -> None:
    """Check the times of an operation that its caller stamped. Raises `OperationTooOld` or `OperationAhead`."""
    oldest, newest = min(times_us), max(times_us)
    if newest > now_us + MAX_AHEAD_SECONDS * 1_000_000:
        ahead = (newest - now_us) / 1_000_000
        raise OperationAhead(
            f"the operation's time {newest} is {ahead:.0f} s ahead of the leader's clock; at most {MAX_AHEAD_SECONDS} s"
            " are allowed. Times are microseconds since 1970"
        )
    atype = min(atypes, key=lambda each: each.keep_removed_days)
    if oldest < now_us - atype.keep_removed_days * _DAY_US:
        raise OperationTooOld(
            f"the operation's time {oldest} is more than {atype.keep_removed_days} days old: removed edges of type "
            f"{atype.name!r} are kept no longer (keep_removed_days), so it could bring one back"
        )


def _is_superseded(operation: EdgeRegisters, before: EdgeRegisters) -> bool:
    if (operation.state_us, operation.own_state) < (before.state_us, before.own_state):
        return True
    payload = operation.payload_us, operation.time, operation.data
    return bool(operation.payload_us) and payload < (before.payload_us, before.time, before.data)


def put_at(draft: Draft, end: End, registers: EdgeRegisters) -> None:
    """Set the registers of an edge at one end, and move it to its list. The write names the lists that callers read."""
    key, atype = end.key, end.atype
    if not registers.has_operation:
        draft.name_list(key)
        return
    # The list of removed edges holds those in a state that has left the schema.
    place = atype.states[registers.effective_state(end.node.state)] or atype.states[State.REMOVED]
    changes = registers != end.registers
    for number in end.places:
        if number != place:
            draft.set_edge(EdgeKey(key.id1, number, key.id2), None)
            changes = True
    row_key = key if place == key.atype else EdgeKey(key.id1, place, key.id2)
    edge = Edge(key.id2, registers.time, registers.data)
    if place not in end.places or edge != draft.edge(row_key):
        draft.set_edge(row_key, edge)
        changes = True
    else:
        draft.name_list(row_key)
    if place != key.atype and key.atype not in end.places:
        draft.name_list(key)
    if changes:
        draft.states[key] = PlacedEdge(registers, place)
