"""Writes as the leader plans them: validated, ids fixed, types numeric."""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from tao.model.edge_states import UNSET_NODE, EdgeRegisters, NodeState
from tao.model.errors import TaoError
from tao.model.jobs import JobRow, NewJob
from tao.model.relay import Touch


class ObjAdd(msgspec.Struct, frozen=True, tag="obj_add"):
    """Create object ``id``. ``allocated``: the leader chose the id itself, so when it is taken another is chosen;
    otherwise the caller reserved it, and adding the same type and data again is a success without effect."""

    id: int
    otype: int
    data: bytes
    allocated: bool


EVERY_TYPE: Final = -1
"""The bit set of all object types."""


class ObjUpdate(msgspec.Struct, frozen=True, tag="obj_update"):
    """Merge ``patch`` (msgpack map; nil removes a field) into the object. ``otype=0``: of any type. An object of a type
    that is not in the bit set ``writable`` is left alone, as if it did not exist."""

    id: int
    otype: int
    patch: bytes
    writable: int = EVERY_TYPE


class ObjDelete(msgspec.Struct, frozen=True, tag="obj_delete"):
    """Delete an object; its edges stay. ``otype=0``: of any type. ``writable``: see `ObjUpdate`."""

    id: int
    otype: int = 0
    writable: int = EVERY_TYPE


class AssocAdd(msgspec.Struct, frozen=True, tag="assoc_add"):
    """Add or overwrite an edge, and its inverse when the type has one."""

    id1: int
    atype: int
    id2: int
    time: int
    data: bytes


class AssocDelete(msgspec.Struct, frozen=True, tag="assoc_delete"):
    """Delete an edge, and its inverse."""

    id1: int
    atype: int
    id2: int


class AssocChangeType(msgspec.Struct, frozen=True, tag="assoc_change_type"):
    """Move an edge, and its inverse, to another type; time and data stay."""

    id1: int
    atype: int
    id2: int
    new_atype: int


class AssocMerge(msgspec.Struct, frozen=True, tag="assoc_merge"):
    """Apply an operation to an edge of a type with states, and to its inverse: it sets the edge's state at ``state_us``
    and, with ``has_payload``, its time and data at ``payload_us``, unless a newer operation has set them.

    ``state_us`` 0: the leader stamps the operation. ``payload_us`` 0: the payload has the time of the state."""

    id1: int
    atype: int
    id2: int
    state: int
    state_us: int = 0
    has_payload: bool = False
    payload_us: int = 0
    time: int = 0
    data: bytes = b""


class ReadState(msgspec.Struct, frozen=True, tag="read_state"):
    """Read the registers of an edge at ``id1``, and the state of node ``id1``, under lock, and change nothing."""

    id1: int
    atype: int
    id2: int


class PurgeEdge(msgspec.Struct, frozen=True, tag="purge_edge"):
    """Remove the row of a removed edge of a type with states at ``id1``, unless an operation has changed ``registers``
    since they were read, or its other end is still to be written."""

    id1: int
    atype: int
    id2: int
    registers: EdgeRegisters


class FlushCounter(msgspec.Struct, frozen=True, tag="flush_counter"):
    """Set the totals of a slot of a counter, unless a flush with a higher number has: see `tao.model.counters`."""

    id: int
    counter: int
    slot: int
    number: int
    plus: int
    minus: int


class FoldCounter(msgspec.Struct, frozen=True, tag="fold_counter"):
    """Count these slots of a counter in slot 0, and remove those whose lives can write no more."""

    id: int
    counter: int
    slots: tuple[int, ...]


class SettleEdge(msgspec.Struct, frozen=True, tag="settle_edge"):
    """Make one edge equal to what the coordinator of its pair holds: ``present`` with this time and data, or absent.

    An edge of a type with states is joined with the coordinator's ``registers`` instead, in which the state of ``id2``
    is that of the coordinator's node. The sub-write that mirrors a
    coordinator's current rows to the other side of a pair; idempotent. ``if_room``: it is written before the
    coordinator's row, and fails with `ListFull` where the list may have no new edge."""

    id1: int
    atype: int
    id2: int
    present: bool
    time: int = 0
    data: bytes = b""
    if_room: bool = False
    registers: EdgeRegisters | None = None


class NodeSetState(msgspec.Struct, frozen=True, tag="node_set_state"):
    """Set the state of a node for its edges of these types, unless a newer operation has set it, and add the job that
    moves the edges. ``state_us`` 0: the leader stamps the operation. ``job_id``: an id of the node's shard, which the
    leader allocates; it is left unused where `tao.model.jobs.node_job_id` serves."""

    id: int
    atypes: tuple[int, ...]
    state: int
    state_us: int = 0
    job_id: int = 0


class JoinEdges(msgspec.Struct, frozen=True, tag="join_edges"):
    """Join copies of edges of one type with states, whose ends are on one shard: what a leader makes of copies that it
    writes itself, in place of a write for each."""

    edges: tuple[SettleEdge, ...]


class PlaceEdges(msgspec.Struct, frozen=True, tag="place_edges"):
    """Move the edges of a page to the lists of their effective states, at ``id1``. The page has the edges of a type
    with states, in the lists of all states, whose ``id2`` is above ``after``, ascending, at most ``limit``.

    The leader moves them at their far ends, too; with ``far_groups`` only at shards of these groups (`group_of`), and
    with ``asks_nobody`` only where it owns the far shard, on the same database server."""

    id1: int
    atype: int
    after: int
    limit: int
    asks_nobody: bool = False
    far_groups: tuple[int, ...] = ()


FAR_GROUPS: Final = 128
"""Groups of far shards. The ones that a job owes fit into its cursor, however many shards there are."""


def group_of(shard: int) -> int:
    """Return the group of a far shard, by which pages of edges owe it."""
    return shard % FAR_GROUPS


class PlacedPage(msgspec.Struct, frozen=True):
    """The result of `PlaceEdges`: the copies that do the same at the far ends, how many edges the page has, and the
    ``after`` of the next page, 0 behind the last one. ``known``: for each copy, the registers that the near end has.
    ``owed_groups``: of the far shards that have not answered or were not asked, so that their ends are still to be
    moved."""

    copies: tuple[SettleEdge, ...]
    edges: int
    next_after: int
    known: tuple[EdgeRegisters, ...] = ()
    owed_groups: tuple[int, ...] = ()


class Coordinator(msgspec.Struct, frozen=True):
    """The ownership under which the mirrors of a pair are written: the shard that coordinates the pair, and the
    generation of its owner. A leader rejects copies of a deposed owner, because they may be older than what its
    successor has written."""

    shard: int
    generation: int


class ForgetIntent(msgspec.Struct, frozen=True, tag="forget_intent"):
    """Remove the intent of a pair if it still carries ``token``: the pair's other side has been settled up to then."""

    low_id: int
    high_id: int
    token: int


class AnnounceIntent(msgspec.Struct, frozen=True, tag="announce_intent"):
    """Record the intent of a pair before an edge is written at its other side, so that a failure in between has that
    side made equal to the coordinator's again. ``atypes``: as in `tao.model.rows.IntentRow`. ``adds``: the type whose
    list at ``low_id`` is to have a new edge."""

    low_id: int
    high_id: int
    atypes: tuple[int, ...]
    adds: int


class TouchKeys(msgspec.Struct, frozen=True, tag="touch"):
    """Give these keys of ``shard`` a new version each, and each list the count that its edges have, because a program
    that keeps no versions has changed them. An object whose row is gone leaves a tombstone."""

    shard: int
    touches: tuple[Touch, ...]


class AddJob(msgspec.Struct, frozen=True, tag="add_job"):
    """Insert a job, due at once. ``allocated``: the leader chose the id itself."""

    job: NewJob
    allocated: bool = False


class ReadJob(msgspec.Struct, frozen=True, tag="read_job"):
    """Read a job, under lock, and change nothing."""

    id: int


class CancelJob(msgspec.Struct, frozen=True, tag="cancel_job"):
    """End a job that waits, is leased or is parked. Its worker learns of it when it reports its page."""

    id: int


class ResumeJob(msgspec.Struct, frozen=True, tag="resume_job"):
    """Let a parked job wait again, as one that never failed."""

    id: int


class ForgetJob(msgspec.Struct, frozen=True, tag="forget_job"):
    """Remove the row of a job that is done or cancelled."""

    id: int


class LeaseJob(msgspec.Struct, frozen=True, tag="lease_job"):
    """Lease a job to a worker if it is due and its kind, which has to be ``kind``, is not paused."""

    id: int
    kind: str
    worker: str
    lease_ms: int


class ReportJob(msgspec.Struct, frozen=True, tag="report_job"):
    """Record the progress of a job whose lease number ``lease`` stands.

    ``cursor``: where the next page begins. ``edges``: handled since the job began. ``error``: why the page after that
    failed; empty: none did. ``lease_ms``: for how long the worker keeps the lease from now on; 0: it lets it go.
    ``pause_ms``: with an error that is no failure of the job, which is due again after this."""

    id: int
    kind: str
    lease: int
    cursor: bytes
    edges: int
    done: bool = False
    error: str = ""
    lease_ms: int = 0
    pause_ms: int = 0


class PauseJobs(msgspec.Struct, frozen=True, tag="pause_jobs"):
    """Pause the jobs of a kind on a shard, also those that are yet to come, or end that pause."""

    shard: int
    kind: str
    paused: bool


JobWrite = AddJob | ReadJob | CancelJob | ResumeJob | ForgetJob | LeaseJob | ReportJob | PauseJobs
Write = (
    ObjAdd
    | ObjUpdate
    | ObjDelete
    | AssocAdd
    | AssocDelete
    | AssocChangeType
    | AssocMerge
    | ReadState
    | NodeSetState
    | PlaceEdges
    | PurgeEdge
    | FlushCounter
    | FoldCounter
    | SettleEdge
    | JoinEdges
    | AnnounceIntent
    | ForgetIntent
    | TouchKeys
    | JobWrite
)


class JoinedEdge(NamedTuple):
    """The registers that one end of an edge has after a join, and the state of the node at that end."""

    registers: EdgeRegisters
    node: NodeState


class WriteOutcome(msgspec.Struct):
    """The outcome of one write. ``id``: the object's id for `ObjAdd`. ``found``: the object or edge named existed
    before. ``error``: the write failed and nothing of it was written. ``otype``: the type of the object that an update
    or deletion has met, also of one that it may not write. ``registers``: those of the edge of a type with states after
    the write, at one end; ``node``: the state of the node at that end, or of the node that the write named.
    ``superseded``: a newer operation was there already. ``page``: see `PlacedPage`. ``joined``: of each edge of
    `JoinEdges`. ``job``: the row of the job after the write."""

    id: int = 0
    found: bool = False
    error: TaoError | None = None
    otype: int = 0
    registers: EdgeRegisters | None = None
    superseded: bool = False
    node: NodeState = UNSET_NODE
    page: PlacedPage | None = None
    joined: tuple[JoinedEdge, ...] = ()
    job: JobRow | None = None
