"""Plan the states of whole nodes: set one, and move a page of its edges to the lists of their effective states.

The state of a node takes effect at once for edges that are written from then on, because each write of an edge reads
the states of its nodes. The edges that are there already are moved by a job, page by page. A page is planned by the
states as they are then, whichever operation began the job: a newer operation wins, and a page may be repeated. The job
of an operation that a newer one has overtaken ends: the newer one's own job moves all edges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tao.model.edge_states import NODE_STATES, UNSET_NODE, EdgeRegisters, NodeState, State
from tao.model.errors import InvalidArgument
from tao.model.graph import MAX_TIME, EdgeKey, ListKey
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import NODE_STATE_KIND, JobPriority, JobState, NewJob, NodeStateBody, node_job_id
from tao.model.rows import EdgePage, RowChanges
from tao.model.writes import (
    FAR_GROUPS,
    NodeSetState,
    PlacedPage,
    PlaceEdges,
    SettleEdge,
    WriteOutcome,
    group_of,
)
from tao.planning.coordination import PlannedWrite
from tao.planning.draft import Draft
from tao.planning.edge_states import check_times, end_at, put_at
from tao.planning.jobs import put_job
from tao.schema.registry import Schema
from tao.schema.types import AssocType

MAX_PAGE_EDGES: Final = 500
"""Edges of a page. To lock and move so many takes some tens of milliseconds, for which the node's other writes wait."""


def validate_node_state(write: NodeSetState, schema: Schema) -> None:
    """Check an operation on a node without its rows. Raises `InvalidArgument`."""
    if write.state not in NODE_STATES:
        labels = ", ".join(state.label for state in NODE_STATES)
        raise InvalidArgument(f"{write.state} is no state of a node; its states are {labels}")
    if not write.atypes:
        raise InvalidArgument("atypes names no type: name those of the edges whose node is to have the state")
    for number in write.atypes:
        schema.state_type(schema.atype(number), State(write.state))
    if not 0 <= write.state_us <= MAX_TIME:
        raise InvalidArgument(f"state_us {write.state_us} is outside 0 … 2^63 - 1")


def validate_page(write: PlaceEdges, schema: Schema) -> None:
    """Check a page of edges without its rows. Raises `InvalidArgument`."""
    schema.state_type(schema.atype(write.atype), State.REMOVED)
    if not 0 <= write.after <= MAX_TIME:
        raise InvalidArgument(f"after {write.after} is outside 0 … 2^63 - 1")
    if not 1 <= write.limit <= MAX_PAGE_EDGES:
        raise InvalidArgument(f"a page of {write.limit} edges: it may have 1 to {MAX_PAGE_EDGES}")
    if any(group >= FAR_GROUPS for group in write.far_groups):
        raise InvalidArgument(f"far_groups {write.far_groups}: groups are 0 to {FAR_GROUPS - 1}")


def _job_of(draft: Draft, write: NodeSetState, body: bytes) -> int:
    """Return the id of the operation's job: its own id, unless another job has that, or the operation's job was
    cancelled and is to be added once more."""
    own = node_job_id(write.id, write.atypes, write.state, write.state_us)
    row = draft.job(own) if own else None
    is_free = row is None or ((row.kind, row.body) == (NODE_STATE_KIND, body) and row.state != JobState.CANCELLED)
    return own if own and is_free else write.job_id


def set_node_state(draft: Draft, write: NodeSetState, schema: Schema, now_unix_ms: int) -> WriteOutcome:
    """Set the state of a node, and add the job that moves its edges, also when nothing changes: the job of an earlier
    operation may have been cancelled. An operation that is repeated with its time has one job. The outcome has the
    operation, which is superseded where a newer one was there for one of the types. Raises `OperationTooOld` or
    `OperationAhead`."""
    keys = [ListKey(write.id, number) for number in write.atypes]
    before = [draft.node(key) for key in keys]
    now_us = now_unix_ms * 1000
    if write.state_us:
        check_times((write.state_us,), [schema.atype(number) for number in write.atypes], now_us)
    stamp_us = write.state_us or max(now_us, *(each.state_us + 1 for each in before))
    operation = NodeState(stamp_us, write.state)
    for key, known in zip(keys, before, strict=True):
        if operation > known:
            draft.nodes[key] = operation
    body = msgspec.msgpack.encode(NodeStateBody(write.id, write.atypes, stamp_us))
    added = put_job(draft, NewJob(_job_of(draft, write, body), NODE_STATE_KIND, JobPriority.NORMAL, body), now_unix_ms)
    return WriteOutcome(
        found=any(known != UNSET_NODE for known in before),
        superseded=any(known > operation for known in before),
        node=operation,
        job=added.job,
    )


def write_nodes(draft: Draft, rows: RowChanges) -> None:
    """Add the states of nodes to the rows."""
    rows.put_nodes.update(draft.nodes)


def pages_wanted(writes: Sequence[PlannedWrite], schema: Schema) -> list[EdgePage]:
    """Return the pages whose rows have to be locked and read before the writes can be planned."""
    return [
        page_of(planned.write, schema.atype(planned.write.atype))
        for planned in writes
        if isinstance(planned.write, PlaceEdges) and schema.knows_atype(planned.write.atype)
    ]


def page_of(write: PlaceEdges, atype: AssocType) -> EdgePage:
    """Return the page of edges that the write names."""
    return EdgePage(write.id1, atype.state_numbers, write.after, write.limit)


def place_edges(draft: Draft, write: PlaceEdges, schema: Schema) -> WriteOutcome:
    """Move the edges of a page at one end. The outcome has the copies that do the same at the far ends: they join the
    registers of this end, so that an edge whose copy is still under way gets there as well."""
    atype = schema.atype(write.atype)
    id2s, is_last = _read_page(draft, page_of(write, atype))
    copies: list[SettleEdge] = []
    known: list[EdgeRegisters] = []
    for id2 in id2s:
        end = end_at(draft, EdgeKey(write.id1, write.atype, id2), atype)
        put_at(draft, end, end.registers)
        is_wanted = not write.far_groups or group_of(id2 >> SHARD_SHIFT) in write.far_groups
        if atype.inverse is not None and end.registers.has_operation and is_wanted:
            sent = end.registers.with_id2(end.node)
            ends = (id2, atype.inverse, write.id1)
            copies.append(SettleEdge(*ends, True, sent.time, sent.data, registers=sent))
            known.append(end.registers)
    next_after = 0 if is_last else id2s[-1]
    page = PlacedPage(tuple(copies), len(id2s), next_after, tuple(known))
    return WriteOutcome(found=bool(id2s), page=page, node=draft.node(ListKey(write.id1, write.atype)))


def _read_page(draft: Draft, page: EdgePage) -> tuple[list[int], bool]:
    """Return the ``id2`` of the edges of a page, ascending, and whether it is the last one.

    Of a list from which as many rows were read as the page may have, nothing is known behind the last of them."""
    rows = draft.existing.pages[page]
    by_list: dict[int, list[int]] = {}
    for key, edge in rows.edges.items():
        by_list.setdefault(key.atype, []).append(key.id2)
        # What was read with the other rows of the transaction is the same.
        draft.existing.edges[key] = edge
        draft.existing.registers[key] = rows.registers[key]
    cut = [max(id2s) for id2s in by_list.values() if len(id2s) == page.limit]
    found = sorted({id2 for id2s in by_list.values() for id2 in id2s if not cut or id2 <= min(cut)})
    return found[: page.limit], not cut and len(found) <= page.limit
