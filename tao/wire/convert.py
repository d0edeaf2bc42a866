"""Convert changes, deliveries, writes and errors between the model and protobuf.

Everything that the model can express can be sent. What a peer has sent is checked, and `ProtocolError` says what is
malformed. Values (objects, counts, edge blocks) are not converted: they travel as the bytes that the cache holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import msgspec

from tao.model.changes import ListChange, ListInvalidation, ObjectChange, ObjectInvalidation, ShardMessages
from tao.model.delivery import Delivery, Position, ShardDelivery, Span
from tao.model.edge_states import UNSET_NODE, EdgeRegisters, NodeState, State
from tao.model.errors import InvalidArgument, NotMine, ProtocolError, TaoError, error_from_reason
from tao.model.graph import EXISTS, EXISTS_NOT
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobRow, NewJob
from tao.model.queries import PairPage
from tao.model.relay import Reference, Relay, Relayed, Touch
from tao.model.tokens import PendingInverse, WriteToken
from tao.model.writes import (
    AddJob,
    AnnounceIntent,
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    CancelJob,
    FlushCounter,
    FoldCounter,
    ForgetIntent,
    ForgetJob,
    JoinEdges,
    LeaseJob,
    NodeSetState,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    PauseJobs,
    PlacedPage,
    PlaceEdges,
    PurgeEdge,
    ReadJob,
    ReadState,
    ReportJob,
    ResumeJob,
    SettleEdge,
    TouchKeys,
    Write,
    WriteOutcome,
)
from tao.schema.registry import Schema
from tao.wire.v1 import session_pb2 as pb

try:
    from tao.wire.messages_core import read_messages, write_messages
except ImportError:  # built without a compiler (`hatch_build.py`)
    from tao.wire.messages_python import read_messages, write_messages


def error_to_pb(error: TaoError) -> pb.Error:
    """Convert an error: reason and message; with `NotMine` also the answering server's topology version."""
    version = error.topology_version if isinstance(error, NotMine) else 0
    return pb.Error(reason=error.reason, message=error.message, topology_version=version)


def error_from_pb(error: pb.Error) -> TaoError:
    """Return the error as it was raised; an error with a reason unknown here becomes a plain `TaoError`."""
    return error_from_reason(error.reason, error.message, error.topology_version)


def error_in(answer: pb.Answer) -> TaoError | None:
    """Return the error that an answer carries as a whole."""
    return error_from_pb(answer.error) if answer.HasField("error") else None


# ---- changes ---------------------------------------------------------------------------------------------------


def shard_messages_to_pb(messages: ShardMessages) -> pb.ShardMessages:
    """Convert the messages of one shard, oldest first."""
    converted = pb.ShardMessages()
    write_shard_messages(messages, converted)
    return converted


def write_shard_messages(messages: ShardMessages, to: pb.ShardMessages) -> None:
    """Convert the messages of one shard, oldest first, into an empty message."""
    to.shard, to.version_epoch = messages.shard, messages.version_epoch
    write_messages(messages.messages, to)


def shard_messages_from_pb(messages: pb.ShardMessages) -> ShardMessages:
    """Convert the messages of one shard. Raises `ProtocolError` when a message is malformed."""
    # Mostly there are none: a server that subscribes many shards receives one of these for each.
    converted = read_messages(messages) if messages.messages else ()
    return ShardMessages(messages.shard, messages.version_epoch, converted)


# ---- deliveries ------------------------------------------------------------------------------------------------


def _write_position(position: Position, to: pb.Position) -> None:
    to.shard, to.stream, to.sequence = position.shard, position.stream, position.sequence
    to.source, to.reached = position.source, position.reached


def subscribe_to_pb(subscriber: str, positions: Iterable[Position], series: int) -> pb.Request:
    """Build a request for the messages of shards from these positions on. Each is made in its place, since a copy would
    cost as much again: a server that starts subscribes thousands of shards, all of them from the beginning."""
    request = pb.Request()
    subscribe = request.subscribe
    subscribe.subscriber, subscribe.series, subscribe.takes_repeats = subscriber, series, True
    add = subscribe.positions.add
    for position in positions:
        if position.stream or position.source or position.sequence or position.reached:
            _write_position(position, add())
        else:
            add(shard=position.shard)
    return request


def position_from_pb(position: pb.Position) -> Position:
    """Convert a position in a shard's stream."""
    return Position(position.shard, position.stream, position.sequence, position.source, position.reached)


def span_to_pb(span: Span) -> pb.Span:
    """Convert a span of a shard's history."""
    return pb.Span(
        shard=span.shard,
        source=span.source,
        after=span.after,
        number=span.number,
        more=span.more,
        within=span.within,
    )


def span_from_pb(span: pb.Span) -> Span:
    """Convert a span of a shard's history."""
    return Span(span.shard, span.source, span.after, span.number, span.more, span.within)


def delivery_to_pb(delivery: Delivery) -> pb.Delivery:
    """Convert a delivery, which is acknowledged as one unit."""
    converted = pb.Delivery(
        delivery_number=delivery.number,
        refused_shards=delivery.refused,
        proven_databases=[database for database, _ in delivery.proven],
        proven_unix_ms=[unix_ms for _, unix_ms in delivery.proven],
        reached_sources=[source for source, _ in delivery.reached],
        reached_numbers=[number for _, number in delivery.reached],
    )
    for shard in delivery.shards:
        part = converted.shards.add(reset=shard.reset, continued=shard.continued, repeated=shard.repeated)
        _write_position(shard.position, part.position)
        if shard.messages is not None:
            part.messages.SetInParent()
            write_shard_messages(shard.messages, part.messages)
    return converted


def delivery_from_pb(delivery: pb.Delivery) -> Delivery:
    """Convert a delivery. Raises `ProtocolError` when a message is malformed."""
    shards = tuple(
        [
            ShardDelivery(
                position_from_pb(shard.position),
                shard.reset,
                shard_messages_from_pb(shard.messages) if shard.HasField("messages") else None,
                shard.continued,
                shard.repeated,
            )
            for shard in delivery.shards
        ]
    )
    if len(delivery.proven_databases) != len(delivery.proven_unix_ms):
        raise ProtocolError("a delivery proves times of databases in columns of different length")
    if len(delivery.reached_sources) != len(delivery.reached_numbers):
        raise ProtocolError("a delivery proves positions in columns of different length")
    proven = tuple(zip(delivery.proven_databases, delivery.proven_unix_ms, strict=True))
    reached = tuple(zip(delivery.reached_sources, delivery.reached_numbers, strict=True))
    return Delivery(delivery.delivery_number, shards, tuple(delivery.refused_shards), proven, reached)


# ---- relays ----------------------------------------------------------------------------------------------------


def touch_to_pb(touch: Touch) -> pb.Touch:
    """Convert a request to give a key a new version."""
    return pb.Touch(id=touch.id, atype=touch.atype, version=touch.version)


def touch_from_pb(touch: pb.Touch) -> Touch:
    """Convert a request to give a key a new version."""
    return Touch(touch.id, touch.atype, touch.version)


def relay_to_pb(relay: Relay) -> pb.Relay:
    """Convert a relay: the messages that a tailer hands to a leader."""
    return pb.Relay(
        changes=map(shard_messages_to_pb, relay.changes),
        touches=map(touch_to_pb, relay.touches),
        bulk_shards=relay.bulk_shards,
        source_unix_ms=relay.source_unix_ms,
        source=relay.source,
        position=relay.position,
        spans=map(span_to_pb, relay.spans),
        reached_source=relay.reached[0],
        reached_number=relay.reached[1],
        references=map(_reference_to_pb, relay.references),
    )


def relay_from_pb(relay: pb.Relay) -> Relay:
    """Convert a relay. Raises `ProtocolError` when a message is malformed."""
    return Relay(
        changes=tuple(map(shard_messages_from_pb, relay.changes)),
        touches=tuple(map(touch_from_pb, relay.touches)),
        bulk_shards=tuple(relay.bulk_shards),
        source=relay.source,
        source_unix_ms=relay.source_unix_ms,
        position=relay.position,
        spans=tuple(map(span_from_pb, relay.spans)),
        reached=(relay.reached_source, relay.reached_number),
        references=tuple(map(_reference_from_pb, relay.references)),
    )


def _reference_to_pb(reference: Reference) -> pb.Reference:
    return pb.Reference(
        shard=reference.shard, source=reference.source, numbers=reference.numbers, place=reference.place
    )


def _reference_from_pb(reference: pb.Reference) -> Reference:
    return Reference(reference.shard, reference.source, tuple(reference.numbers), reference.place)


def relayed_to_pb(relayed: Relayed) -> pb.Relayed:
    """Convert a leader's answer to a relay."""
    return pb.Relayed(
        wanted=map(span_to_pb, relayed.wanted),
        missing=map(_reference_to_pb, relayed.missing),
        takes_references=relayed.takes_references,
    )


def relayed_from_pb(relayed: pb.Relayed) -> Relayed:
    """Convert a leader's answer to a relay."""
    return Relayed(
        wanted=tuple(map(span_from_pb, relayed.wanted)),
        missing=tuple(map(_reference_from_pb, relayed.missing)),
        takes_references=relayed.takes_references,
    )


# ---- writes ----------------------------------------------------------------------------------------------------


def write_to_pb(write: Write) -> pb.Write:
    """Convert a write on its way to a leader. `AnnounceIntent`, `ForgetIntent` and `TouchKeys` are internal to a
    leader and never travel."""
    match write:
        case ObjAdd():
            return pb.Write(obj_add=pb.ObjAdd(id=write.id, otype=write.otype, data=write.data))
        case ObjUpdate():
            return pb.Write(obj_update=pb.ObjUpdate(id=write.id, otype=write.otype, patch=write.patch))
        case ObjDelete():
            return pb.Write(obj_delete=pb.ObjDelete(id=write.id, otype=write.otype))
        case AssocAdd():
            add = pb.AssocAdd(id1=write.id1, atype=write.atype, id2=write.id2, time=write.time, data=write.data)
            return pb.Write(assoc_add=add)
        case AssocDelete():
            return pb.Write(assoc_delete=pb.AssocDelete(id1=write.id1, atype=write.atype, id2=write.id2))
        case AssocChangeType():
            move = pb.AssocChangeType(id1=write.id1, atype=write.atype, id2=write.id2, new_atype=write.new_atype)
            return pb.Write(assoc_change_type=move)
        case AssocMerge():
            return pb.Write(assoc_merge=pb.AssocMerge(**msgspec.structs.asdict(write)))
        case ReadState():
            return pb.Write(read_state=pb.ReadState(id1=write.id1, atype=write.atype, id2=write.id2))
        case NodeSetState(id=node, atypes=atypes, state=state, state_us=state_us):
            return pb.Write(node_set_state=pb.NodeSetState(id=node, atypes=atypes, state=state, state_us=state_us))
        case FlushCounter():
            return pb.Write(flush_counter=flush_to_pb(write))
        case PlaceEdges():
            return pb.Write(place_edges=pb.PlaceEdges(**msgspec.structs.asdict(write)))
        case SettleEdge():
            settle = pb.SettleEdge(
                id1=write.id1,
                atype=write.atype,
                id2=write.id2,
                present=write.present,
                time=write.time,
                data=write.data,
                if_room=write.if_room,
                registers=None if write.registers is None else _registers_to_pb(write.registers),
            )
            return pb.Write(settle_edge=settle)
        case AddJob(job=job):
            return pb.Write(
                add_job=pb.AddJob(
                    id=0 if write.allocated else job.id,
                    shard=job.id >> SHARD_SHIFT if write.allocated else 0,
                    kind=job.kind,
                    priority=job.priority,
                    body=job.body,
                    repeat_seconds=job.repeat_seconds,
                )
            )
        case ReadJob():
            return pb.Write(read_job=pb.ReadJob(id=write.id))
        case CancelJob():
            return pb.Write(cancel_job=pb.CancelJob(id=write.id))
        case LeaseJob() | ReportJob() | ResumeJob() | ForgetJob() | PauseJobs():
            raise TypeError(f"{type(write).__name__} is planned by the leader of the shard and is not sent")
        case PurgeEdge() | JoinEdges() | FoldCounter():
            raise TypeError(f"{type(write).__name__} is planned by the leader of the shard and is not sent")
        case AnnounceIntent() | ForgetIntent():
            raise TypeError(f"{type(write).__name__} is planned by the leader that holds the intent and is not sent")
        case TouchKeys():
            raise TypeError("TouchKeys is planned by the leader of the shard and is not sent")


def flush_to_pb(write: FlushCounter) -> pb.FlushCounter:
    """Convert a flush of a counter."""
    return pb.FlushCounter(
        id=write.id,
        atype=write.counter,
        slot=write.slot,
        number=write.number,
        plus=write.plus,
        minus=write.minus,
    )


def write_from_pb(write: pb.Write) -> Write:
    """Convert a write. An object without an id gets the lowest number of its shard in place of one, which is no id yet:
    the leader replaces it.

    Raises `ProtocolError` for an operation unknown here. Values are not checked, because that takes the schema.
    """
    match write.WhichOneof("operation"):
        case "obj_add":
            add = write.obj_add
            return ObjAdd(add.id or add.shard << SHARD_SHIFT, add.otype, add.data, allocated=add.id == 0)
        case "obj_update":
            return ObjUpdate(write.obj_update.id, write.obj_update.otype, write.obj_update.patch)
        case "obj_delete":
            return ObjDelete(write.obj_delete.id, write.obj_delete.otype)
        case "assoc_add":
            edge = write.assoc_add
            return AssocAdd(edge.id1, edge.atype, edge.id2, edge.time, edge.data)
        case "assoc_delete":
            return AssocDelete(write.assoc_delete.id1, write.assoc_delete.atype, write.assoc_delete.id2)
        case "assoc_change_type":
            move = write.assoc_change_type
            return AssocChangeType(move.id1, move.atype, move.id2, move.new_atype)
        case "settle_edge":
            settle = write.settle_edge
            registers = registers_from_pb(settle.registers) if settle.HasField("registers") else None
            ends = (settle.id1, settle.atype, settle.id2)
            return SettleEdge(*ends, settle.present, settle.time, settle.data, settle.if_room, registers)
        case "assoc_merge":
            merge = write.assoc_merge
            return AssocMerge(
                merge.id1,
                merge.atype,
                merge.id2,
                merge.state,
                merge.state_us,
                merge.has_payload,
                merge.payload_us,
                merge.time,
                merge.data,
            )
        case "read_state":
            return ReadState(write.read_state.id1, write.read_state.atype, write.read_state.id2)
        case "node_set_state":
            node = write.node_set_state
            return NodeSetState(node.id, tuple(sorted(set(node.atypes))), node.state, node.state_us)
        case "place_edges":
            page = write.place_edges
            return PlaceEdges(page.id1, page.atype, page.after, page.limit, page.asks_nobody, tuple(page.far_groups))
        case "flush_counter":
            flush = write.flush_counter
            return FlushCounter(flush.id, flush.atype, flush.slot, flush.number, flush.plus, flush.minus)
        case "counter_add":
            raise InvalidArgument("followers count: send counter_add to one of them")
        case "add_job":
            new = write.add_job
            job = NewJob(new.id or new.shard << SHARD_SHIFT, new.kind, new.priority, new.body, new.repeat_seconds)
            return AddJob(job, allocated=new.id == 0)
        case "read_job":
            return ReadJob(write.read_job.id)
        case "cancel_job":
            return CancelJob(write.cancel_job.id)
        case _:
            raise ProtocolError("a write is of a kind that this version does not know")


def job_to_pb(row: JobRow) -> pb.Job:
    """Convert the row of a job."""
    return pb.Job(**msgspec.structs.asdict(row))


def job_from_pb(job: pb.Job) -> JobRow:
    """Convert the row of a job."""
    return JobRow(*(getattr(job, name) for name in JobRow.__struct_fields__))


def _registers_to_pb(registers: EdgeRegisters) -> pb.EdgeRegisters:
    return pb.EdgeRegisters(**msgspec.structs.asdict(registers))


def registers_from_pb(registers: pb.EdgeRegisters) -> EdgeRegisters:
    """Convert the registers of an edge. Raises `ProtocolError` for a state unknown here."""
    highest = max(registers.own_state, registers.id2_state)
    if highest > State.REMOVED:
        raise ProtocolError(f"{highest} is no state of an edge that this version knows")
    return EdgeRegisters(
        registers.own_state,
        registers.state_us,
        registers.payload_us,
        registers.time,
        registers.data,
        registers.id2_state,
        registers.id2_state_us,
    )


def node_state_from_pb(node: pb.NodeState) -> NodeState:
    """Convert the state of a node. Raises `ProtocolError` for a state unknown here."""
    if node.state > State.REMOVED:
        raise ProtocolError(f"{node.state} is no state of a node that this version knows")
    return NodeState(node.state_us, node.state)


def _placed_page_to_pb(page: PlacedPage) -> pb.PlacedPage:
    return pb.PlacedPage(edges=page.edges, next_after=page.next_after, owed_groups=page.owed_groups)


def outcome_to_pb(
    outcome: WriteOutcome, messages: Iterable[ShardMessages] = (), pending: Sequence[PendingInverse] = ()
) -> pb.WriteResult:
    """Convert the result of a write. ``messages`` are those sent to the writer's caches; the changed keys and their
    versions are taken from them. ``pending``: the lists that do not have its inverse edges yet."""
    result = pb.WriteResult(id=outcome.id, found=outcome.found, superseded=outcome.superseded)
    # Only what is set, and columns are appended to: most results have a change or two and nothing else.
    ids, atypes, versions = result.changed_ids, result.changed_atypes, result.changed_versions
    for (key_id, atype), version in reached_versions(messages).items():
        ids.append(key_id)
        atypes.append(atype)
        versions.append(version)
    if outcome.error is not None:
        result.error.CopyFrom(error_to_pb(outcome.error))
    if pending:
        result.inverse_pending = True
        result.pending.extend(map(pending_to_pb, pending))
    node = outcome.node
    if outcome.registers is not None:
        result.effective_state = outcome.registers.effective_state(node.state)
        result.registers.CopyFrom(_registers_to_pb(outcome.registers))
    if node != UNSET_NODE:
        result.node.CopyFrom(pb.NodeState(state=node.state, state_us=node.state_us))
    if outcome.page is not None:
        result.page.CopyFrom(_placed_page_to_pb(outcome.page))
    if outcome.job is not None:
        result.job.CopyFrom(job_to_pb(outcome.job))
    return result


def reached_versions(messages: Iterable[ShardMessages]) -> dict[tuple[int, int], int]:
    """Return ``(id, atype) → version`` of every key that these messages name; atype is 0 for objects. A key that never
    had a row has no version to wait for and is left out."""
    reached: dict[tuple[int, int], int] = {}
    for batch in messages:
        for message in batch.messages:
            if isinstance(message, ListChange):  # first, because most messages are one
                key, version = (message.id1, message.atype), message.after
            elif isinstance(message, ObjectChange):
                key, version = (message.id, 0), message.after
            elif isinstance(message, ListInvalidation):
                key, version = (message.id1, message.atype), message.version
            elif isinstance(message, ObjectInvalidation):
                key, version = (message.id, 0), message.version
            else:
                continue
            if version > reached.get(key, 0):
                reached[key] = version
    return reached


def token_of(results: Iterable[pb.WriteResult]) -> WriteToken:
    """Return the token of these writes, given in order of time."""
    results = tuple(results)
    return WriteToken(
        (
            triple
            for result in results
            for triple in zip(result.changed_ids, result.changed_atypes, result.changed_versions, strict=False)
        ),
        pending=chain.from_iterable(pending_of(result.pending) for result in results if result.pending),
    )


def pending_to_pb(pending: PendingInverse) -> pb.PendingInverse:
    """Convert a pending inverse."""
    return pb.PendingInverse(id1=pending.id1, atype=pending.atype, coordinator_id=pending.coordinator_id)


def pending_of(messages: Iterable[pb.PendingInverse]) -> list[PendingInverse]:
    """Convert pending inverses."""
    return [PendingInverse(each.id1, each.atype, each.coordinator_id) for each in messages]


def settle_request(pending: Sequence[PendingInverse], schema: Schema) -> pb.Request:
    """Return the request that has these pairs settled. Raises `UnknownType`, and `InvalidArgument` for a type that has
    no inverse."""
    pairs = []
    for each in pending:
        atype = schema.atype(each.atype)
        if atype.inverse is None:
            raise InvalidArgument(f"edges of type {atype.name} have no inverse that could be pending")
        inverse = schema.declared((atype.inverse,))
        pairs.append(pb.Pair(low_id=each.coordinator_id, high_id=each.id1, atypes=inverse))
    return pb.Request(settle_pairs=pb.SettlePairs(pairs=pairs))


def settle_shards_request(coordinator_shard: int, shard: int) -> pb.Request:
    """Return the request that has all pending pairs between two shards settled."""
    between = pb.ShardPair(low_shard=coordinator_shard, high_shard=shard)
    return pb.Request(settle_pairs=pb.SettlePairs(shards=(between,)))


def coordinating_shards(settle: pb.SettlePairs) -> set[int]:
    """Return the shards whose leaders coordinate the pairs that are to be settled."""
    return {pair.low_id >> SHARD_SHIFT for pair in settle.pairs} | {each.low_shard for each in settle.shards}


def exists_in(value: bytes) -> bool:
    """Return the answer to `assoc_exists`. Raises `ProtocolError` for another value than its two."""
    if value != EXISTS and value != EXISTS_NOT:
        raise ProtocolError(f"an answer to assoc_exists is one byte, 0 or 1, not {value[:16].hex()}")
    return value == EXISTS


# ---- answers in parts ------------------------------------------------------------------------------------------


def join_answers(parts: Iterable[pb.Answer]) -> pb.Answer:
    """Return one answer made of the parts in which it came. A read part without slots answers slots 0, 1, 2, …; its
    slots are written out when other parts follow."""
    joined: pb.Answer | None = None
    for part in parts:
        if joined is None:
            joined = part
            continue
        for each in (joined, part):
            if each.HasField("read") and not each.read.slots:
                each.read.slots.extend(range(len(each.read.values)))
        joined.MergeFrom(part)
        joined.more = part.more
    if joined is None:
        raise TypeError("an answer has at least one part")
    return joined


def pair_page_to_pb(page: PairPage) -> pb.ScannedPairs:
    """Return the message of a page of edges."""
    return pb.ScannedPairs(
        version_epoch=page.version_epoch,
        id1s=page.id1s,
        versions=page.versions,
        sizes=page.sizes,
        id2s=page.id2s,
        after_id1=page.after_id1,
        after_id2=page.after_id2,
        known_id1s=page.known_id1s,
        known_versions=page.known_versions,
    )


def pair_page_from_pb(message: pb.ScannedPairs) -> PairPage:
    """Raise `ProtocolError` for columns that do not belong together."""
    page = PairPage(
        message.version_epoch,
        message.id1s[:],
        message.versions[:],
        message.sizes[:],
        message.id2s[:],
        message.after_id1,
        message.after_id2,
        message.known_id1s[:],
        message.known_versions[:],
    )
    lists = len(page.id1s)
    if (
        lists != len(page.versions)
        or lists != len(page.sizes)
        or sum(page.sizes) != len(page.id2s)
        or len(page.known_id1s) != len(page.known_versions)
    ):
        raise ProtocolError("a page of edges has columns of different lengths")
    return page
