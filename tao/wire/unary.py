"""The unary methods of service Graph: each is a request of the message layer and a part of its answer.

There is one table, and the server runs every row in the same way, so that a plain gRPC client in any language uses the
very code that serves sessions. `data` is passed through, edge blocks become `Edge` messages, and absence is an answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from google.protobuf.message import Message

from tao.model.edge_block import LIMIT_CUT, check_block, decode_block, header
from tao.model.errors import InternalError, InvalidArgument, TooLarge
from tao.model.graph import ABSENT, MAX_ID2_SET, MAX_TIME, ListKey, decode_count, decode_object
from tao.model.ids import MAX_ID, SHARD_SHIFT, shard_of
from tao.model.jobs import JobPriority
from tao.model.queries import start_at
from tao.model.tokens import WriteToken
from tao.wire.convert import error_from_pb, exists_in, pending_to_pb, registers_from_pb, token_of
from tao.wire.v1 import graph_pb2 as graph
from tao.wire.v1 import session_pb2 as pb

_NORMAL_JOB: Final = JobPriority.NORMAL + 1
"""The number of a job's priority where requests count them from 1."""

Asked = TypeVar("Asked", bound=Message)
ChooseShard = Callable[[], int]
ReadRequest = (
    graph.ObjGetRequest
    | graph.AssocCountRequest
    | graph.AssocRangeRequest
    | graph.AssocTimeRangeRequest
    | graph.AssocGetRequest
    | graph.AssocExistsRequest
    | pb.SelectRequest
)

Journaled = (
    graph.ObjAddRequest
    | graph.AssocAddRequest
    | graph.AssocDeleteRequest
    | graph.AssocMergeRequest
    | graph.NodeSetStateRequest
    | graph.AddJobRequest
)


class UnaryMethod(msgspec.Struct, frozen=True):
    """One method. ``to_request`` may raise a `RequestError`, ``to_reply`` the error that the answer carries."""

    name: str
    asked: type[Message]
    to_request: Callable[[Message], pb.Request]
    to_reply: Callable[[pb.Answer], Message]


def unary_methods(choose_shard: ChooseShard) -> list[UnaryMethod]:
    """Return all methods. ``choose_shard`` chooses the shard of a new object that names no neighbour."""

    def obj_add(asked: graph.ObjAddRequest) -> pb.Request:
        shard = 0
        if not asked.id:
            shard = shard_of(checked_id(asked.near)) if asked.HasField("near") else choose_shard()
        add = pb.ObjAdd(id=asked.id, shard=shard, otype=asked.otype, data=asked.data)
        return _journaled(pb.Write(obj_add=add), asked)

    return [
        _method("ObjAdd", graph.ObjAddRequest, obj_add, _id_reply),
        *_READS,
        *_WRITES,
        *_CONFIGURATION,
    ]


def _method(
    name: str,
    asked: type[Asked],
    to_request: Callable[[Asked], pb.Request],
    to_reply: Callable[[pb.Answer], Message],
) -> UnaryMethod:
    def checked(message: Message) -> pb.Request:
        assert isinstance(message, asked)
        return to_request(message)

    return UnaryMethod(name, asked, checked, to_reply)


# ---- reads -----------------------------------------------------------------------------------------------------


def _obj_get(asked: graph.ObjGetRequest) -> pb.Request:
    return read_request(pb.ReadBatch(obj_ids=[asked.id]), asked, asked.id)


def _assoc_count(asked: graph.AssocCountRequest) -> pb.Request:
    batch = pb.ReadBatch(count_id1s=[asked.id1], count_atypes=[asked.atype])
    return read_request(batch, asked, asked.id1, asked.atype)


def _assoc_range(asked: graph.AssocRangeRequest) -> pb.Request:
    batch = pb.ReadBatch(
        range_id1s=[asked.id1],
        range_atypes=[asked.atype],
        range_positions=[asked.pos],
        range_limits=[asked.limit],
    )
    return read_request(batch, asked, asked.id1, asked.atype)


def _assoc_time_range(asked: graph.AssocTimeRangeRequest) -> pb.Request:
    if asked.pos and asked.below_id2:
        raise InvalidArgument(
            f"pos is {asked.pos} and below_id2 {asked.below_id2}: a page begins at a position or after an edge"
        )
    start = checked_id(asked.below_id2) if asked.below_id2 else start_at(_checked_position(asked.pos))
    batch = pb.ReadBatch(
        time_range_id1s=[asked.id1],
        time_range_atypes=[asked.atype],
        time_range_highs=[checked_time(asked.high)],
        time_range_lows=[checked_time(asked.low)],
        time_range_limits=[asked.limit],
        time_range_starts=[start] if start else (),
    )
    return read_request(batch, asked, asked.id1, asked.atype)


def _assoc_get(asked: graph.AssocGetRequest) -> pb.Request:
    if len(asked.id2s) > MAX_ID2_SET:
        raise TooLarge(f"{len(asked.id2s)} id2s in one query; ask for at most {MAX_ID2_SET} at a time")
    batch = pb.ReadBatch(
        get_id1s=[asked.id1],
        get_atypes=[asked.atype],
        get_id2_counts=[len(asked.id2s)],
        get_id2s=asked.id2s,
        get_highs=[checked_time(asked.high) if asked.HasField("high") else MAX_TIME],
        get_lows=[checked_time(asked.low)],
    )
    return read_request(batch, asked, asked.id1, asked.atype)


def _assoc_exists(asked: graph.AssocExistsRequest) -> pb.Request:
    batch = pb.ReadBatch(exist_id1s=[asked.id1], exist_atypes=[asked.atype], exist_id2s=[asked.id2])
    return read_request(batch, asked, asked.id1, asked.atype)


def read_request(batch: pb.ReadBatch, asked: ReadRequest, key_id: int, atype: int = 0) -> pb.Request:
    """Return the request of one query with the freshness that is asked for. Raises `InvalidArgument` for a text that is
    no token."""
    batch.critical = asked.critical
    batch.max_staleness_ms = asked.max_staleness_ms
    if asked.after:
        token = WriteToken.from_text(asked.after)
        minimum = token.minimum_of_list(ListKey(key_id, atype)) if atype else token.minimum_of_object(key_id)
        if token.is_critical(key_id >> SHARD_SHIFT):
            batch.critical = True
        elif minimum:
            batch.minimum_slots.append(0)
            batch.minimum_versions.append(minimum)
        if atype and token.has_pending:
            return pb.Request(
                read=batch,
                settle_first=map(pending_to_pb, token.pending_in(ListKey(key_id, atype))),
                settle_shards_first=[
                    pb.ShardPair(low_shard=each.coordinator_shard, high_shard=each.shard)
                    for each in token.pending_at(key_id >> SHARD_SHIFT)
                ],
            )
    return pb.Request(read=batch)


def _value(answer: pb.Answer) -> bytes:
    read = answer.read
    if read.errors:
        raise error_from_pb(read.errors[0])
    if len(read.values) != 1:
        raise InternalError(f"one query was answered by {len(read.values)} values")
    return read.values[0]


def _object_reply(answer: pb.Answer) -> graph.ObjGetReply:
    _, otype, data = decode_object(_value(answer))
    return graph.ObjGetReply(found=True, otype=otype, data=data) if otype != ABSENT else graph.ObjGetReply()


def _count_reply(answer: pb.Answer) -> graph.AssocCountReply:
    return graph.AssocCountReply(count=decode_count(_value(answer))[1])


def _exists_reply(answer: pb.Answer) -> graph.AssocExistsReply:
    return graph.AssocExistsReply(exists=exists_in(_value(answer)))


def _edges_reply(answer: pb.Answer) -> graph.EdgesReply:
    block = check_block(_value(answer))
    edges = [graph.Edge(id2=edge.id2, time=edge.time, data=edge.data) for edge in decode_block(block)]
    return graph.EdgesReply(edges=edges, limit_cut=bool(header(block)[3] & LIMIT_CUT))


# ---- writes ----------------------------------------------------------------------------------------------------


def _write(write: pb.Write) -> pb.Request:
    return pb.Request(write=pb.WriteBatch(writes=[write]))


def _journaled(write: pb.Write, asked: Journaled) -> pb.Request:
    """Return the request of a write that is made at once, or accepted by a journal."""
    return pb.Request(write=pb.WriteBatch(writes=[write], accept=asked.accept, priority=asked.priority))


def _obj_update(asked: graph.ObjUpdateRequest) -> pb.Request:
    return _write(pb.Write(obj_update=pb.ObjUpdate(id=asked.id, otype=asked.otype, patch=asked.patch)))


def _obj_delete(asked: graph.ObjDeleteRequest) -> pb.Request:
    return _write(pb.Write(obj_delete=pb.ObjDelete(id=asked.id, otype=asked.otype)))


def _assoc_add(asked: graph.AssocAddRequest) -> pb.Request:
    add = pb.AssocAdd(id1=asked.id1, atype=asked.atype, id2=asked.id2, time=asked.time, data=asked.data)
    return _journaled(pb.Write(assoc_add=add), asked)


def _assoc_delete(asked: graph.AssocDeleteRequest) -> pb.Request:
    delete = pb.AssocDelete(id1=asked.id1, atype=asked.atype, id2=asked.id2)
    return _journaled(pb.Write(assoc_delete=delete), asked)


def _assoc_change_type(asked: graph.AssocChangeTypeRequest) -> pb.Request:
    move = pb.AssocChangeType(id1=asked.id1, atype=asked.atype, id2=asked.id2, new_atype=asked.new_atype)
    return _write(pb.Write(assoc_change_type=move))


def _assoc_merge(asked: graph.AssocMergeRequest) -> pb.Request:
    merge = pb.AssocMerge(
        id1=asked.id1,
        atype=asked.atype,
        id2=asked.id2,
        state=asked.state,
        state_us=asked.state_us,
        has_payload=asked.has_payload,
        payload_us=asked.payload_us,
        time=asked.time,
        data=asked.data,
    )
    return _journaled(pb.Write(assoc_merge=merge), asked)


def _node_set_state(asked: graph.NodeSetStateRequest) -> pb.Request:
    node = pb.NodeSetState(id=asked.id, atypes=asked.atypes, state=asked.state, state_us=asked.state_us)
    return _journaled(pb.Write(node_set_state=node), asked)


def _add_job(asked: graph.AddJobRequest) -> pb.Request:
    priority = asked.job_priority or _NORMAL_JOB
    if priority > len(JobPriority):
        raise InvalidArgument(f"job_priority {priority} is none: 1 is high, 2 normal, 3 low, 0 normal")
    shard = 0 if asked.id else shard_of(checked_id(asked.near))
    job = pb.AddJob(id=asked.id, shard=shard, kind=asked.kind, priority=priority - 1, body=asked.body)
    return _journaled(pb.Write(add_job=job), asked)


def _result(answer: pb.Answer) -> pb.WriteResult:
    if len(answer.write.results) != 1:
        raise InternalError(f"one write was answered by {len(answer.write.results)} results")
    result = answer.write.results[0]
    if result.HasField("error"):
        raise error_from_pb(result.error)
    return result


def _id_reply(answer: pb.Answer) -> graph.ObjAddReply:
    result = _result(answer)
    return graph.ObjAddReply(id=result.id, token=_token_text(result), found=result.found, accepted=result.accepted)


def _write_reply(answer: pb.Answer) -> graph.WriteReply:
    result = _result(answer)
    return graph.WriteReply(
        found=result.found,
        inverse_pending=result.inverse_pending,
        token=_token_text(result),
        accepted=result.accepted,
    )


def _merge_reply(answer: pb.Answer) -> graph.AssocMergeReply:
    result = _result(answer)
    return graph.AssocMergeReply(
        found=result.found,
        inverse_pending=result.inverse_pending,
        token=_token_text(result),
        effective_state=result.effective_state,
        superseded=result.superseded,
        accepted=result.accepted,
        forgotten=result.forgotten,
    )


def _node_reply(answer: pb.Answer) -> graph.NodeSetStateReply:
    result = _result(answer)
    return graph.NodeSetStateReply(
        superseded=result.superseded,
        state_us=result.node.state_us,
        job_id=result.job.id,
        accepted=result.accepted,
    )


def _state_reply(answer: pb.Answer) -> graph.AssocStateReply:
    result = _result(answer)
    registers = registers_from_pb(result.registers)
    if not registers.has_operation:
        return graph.AssocStateReply()
    return graph.AssocStateReply(
        found=True,
        own_state=registers.own_state,
        effective_state=result.effective_state,
        state_us=registers.state_us,
        payload_us=registers.payload_us,
    )


def _job_reply(answer: pb.Answer) -> graph.JobReply:
    result = _result(answer)
    job = result.job
    return graph.JobReply(
        found=result.found,
        id=job.id,
        state=job.state,
        edges=job.edges,
        error=job.error,
        accepted=result.accepted,
    )


def _counter_get(asked: graph.CounterGetRequest) -> pb.Request:
    get = pb.GetCounters(ids=[checked_id(asked.id)], atypes=[asked.atype], critical=asked.critical)
    get.max_staleness_ms = asked.max_staleness_ms
    return pb.Request(get_counters=get)


def _counter_reply(answer: pb.Answer) -> graph.CounterGetReply:
    found = answer.counter_values
    if found.errors:
        raise error_from_pb(found.errors[0])
    if len(found.values) != 1 or len(found.max_behind_ms) != 1:
        raise InternalError(f"one counter was answered by {len(found.values)} values")
    behind_ms = found.max_behind_ms[0]
    return graph.CounterGetReply(value=found.values[0], max_behind_ms=behind_ms if behind_ms >= 0 else None)


def _counted_reply(answer: pb.Answer) -> graph.CounterAddReply:
    if not answer.write.all_counted:
        _result(answer)
    return graph.CounterAddReply()


def _token_text(result: pb.WriteResult) -> str:
    token = token_of((result,))
    return token.text() if token else ""


# ---- checks and tables -----------------------------------------------------------------------------------------


def checked_id(number: int) -> int:
    """Return an object id. Raises `InvalidArgument`."""
    if not 0 < number <= MAX_ID:
        raise InvalidArgument(f"{number} is not an object id")
    return number


def _checked_position(pos: int) -> int:
    if pos > MAX_TIME:
        raise InvalidArgument(f"pos {pos} is above 2^63 - 1")
    return pos


def checked_time(time: int) -> int:
    """Return the time of an edge. Raises `InvalidArgument`."""
    if time > MAX_TIME:
        raise InvalidArgument(f"time {time} is above 2^63-1")
    return time


_READS: Final = (
    _method("ObjGet", graph.ObjGetRequest, _obj_get, _object_reply),
    _method("AssocGet", graph.AssocGetRequest, _assoc_get, _edges_reply),
    _method("AssocExists", graph.AssocExistsRequest, _assoc_exists, _exists_reply),
    _method("AssocCount", graph.AssocCountRequest, _assoc_count, _count_reply),
    _method("AssocRange", graph.AssocRangeRequest, _assoc_range, _edges_reply),
    _method("AssocTimeRange", graph.AssocTimeRangeRequest, _assoc_time_range, _edges_reply),
    _method("CounterGet", graph.CounterGetRequest, _counter_get, _counter_reply),
    _method("Select", pb.SelectRequest, lambda asked: pb.Request(select=asked), lambda answer: answer.selected),
)
_WRITES: Final = (
    _method("ObjUpdate", graph.ObjUpdateRequest, _obj_update, _write_reply),
    _method("ObjDelete", graph.ObjDeleteRequest, _obj_delete, _write_reply),
    _method("AssocAdd", graph.AssocAddRequest, _assoc_add, _write_reply),
    _method("AssocDelete", graph.AssocDeleteRequest, _assoc_delete, _write_reply),
    _method("AssocChangeType", graph.AssocChangeTypeRequest, _assoc_change_type, _write_reply),
    _method("AssocMerge", graph.AssocMergeRequest, _assoc_merge, _merge_reply),
    _method("AssocState", pb.ReadState, lambda asked: _write(pb.Write(read_state=asked)), _state_reply),
    _method("NodeSetState", graph.NodeSetStateRequest, _node_set_state, _node_reply),
    _method("CounterAdd", pb.CounterAdd, lambda asked: _write(pb.Write(counter_add=asked)), _counted_reply),
    _method("AddJob", graph.AddJobRequest, _add_job, _job_reply),
    _method("ReadJob", pb.ReadJob, lambda asked: _write(pb.Write(read_job=asked)), _job_reply),
    _method("CancelJob", pb.CancelJob, lambda asked: _write(pb.Write(cancel_job=asked)), _job_reply),
    _method("Applied", pb.AwaitApplied, lambda asked: pb.Request(await_applied=asked), _merge_reply),
)
_CONFIGURATION: Final = (
    _method("ReserveObjectIds", pb.ReserveIds, lambda ids: pb.Request(reserve_ids=ids), lambda got: got.reserved_ids),
    _method("Topology", pb.GetTopology, lambda asked: pb.Request(get_topology=asked), lambda answer: answer.topology),
    _method("Schema", pb.GetSchema, lambda asked: pb.Request(get_schema=asked), lambda answer: answer.schema),
)
