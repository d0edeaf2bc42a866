"""Every unary method through the generated stubs alone, as a client in any language uses it."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from tao.model.edge_block import COMPLETE, LIMIT_CUT, PREFIX, encode_block
from tao.model.errors import (
    DeadlineExceeded,
    Fenced,
    InternalError,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    PermissionDenied,
    ShardBlocked,
    TaoError,
    TooLarge,
    Unauthorized,
    Unavailable,
    WriteLost,
)
from tao.model.graph import ABSENT, EXISTS, EXISTS_NOT, MAX_TIME, Edge, encode_count, encode_object
from tao.model.ids import MAX_ID, make_id
from tao.model.queries import start_at
from tao.wire.convert import error_to_pb
from tao.wire.grpc_server import GrpcServer
from tao.wire.session import NO_DEADLINE_MS, Reply, failure
from tao.wire.settings import ServingSettings
from tao.wire.v1 import graph_pb2 as graph
from tao.wire.v1 import graph_pb2_grpc
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import PATIENT_SECONDS

NEAR = make_id(9, 1_700_000_000_000, 0)
CHOSEN_SHARD = 5


class Scripted:
    """Gives the configured answer, and records the requests."""

    def __init__(self) -> None:
        self.asked = pb.Request()
        self.answers: list[pb.Answer] = []
        self.replies: list[Reply] = []

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.asked = request
        self.replies.append(reply)
        for answer in self.answers:
            reply.send(answer)


class Bench:
    def __init__(self, address: str, handler: Scripted, stub: "graph_pb2_grpc.GraphAsyncStub") -> None:
        self.address, self.handler, self.stub = address, handler, stub


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    handler = Scripted()
    settings = ServingSettings(unary_deadline_seconds=0.05)
    server = GrpcServer(handler, settings, name="srv", topology_version=lambda: 1, choose_shard=lambda: CHOSEN_SHARD)
    address = await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(address) as channel:
        yield Bench(address, handler, graph_pb2_grpc.GraphStub(channel))
    await server.close()


def value(encoded: bytes) -> list[pb.Answer]:
    return [pb.Answer(read=pb.ReadAnswer(values=[encoded]))]


def result(**fields: int) -> list[pb.Answer]:
    return [pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(**fields)]))]  # type: ignore[arg-type]


BLOCK = encode_block(4, 9, [Edge(3, 30, b"d"), Edge(2, 20)], COMPLETE | PREFIX | LIMIT_CUT)
EDGES = graph.EdgesReply(edges=[graph.Edge(id2=3, time=30, data=b"d"), graph.Edge(id2=2, time=20)], limit_cut=True)
DONE = result(found=1, inverse_pending=1)
MERGED = result(found=1, effective_state=3, superseded=1)
NODE_SET = [
    pb.Answer(
        write=pb.WriteAnswer(
            results=[pb.WriteResult(superseded=True, node=pb.NodeState(state=2, state_us=5), job=pb.Job(id=77))]
        )
    )
]
STATE = [
    pb.Answer(
        write=pb.WriteAnswer(
            results=[pb.WriteResult(effective_state=2, registers=pb.EdgeRegisters(state_us=5, payload_us=4))]
        )
    )
]
JOB = [
    pb.Answer(
        write=pb.WriteAnswer(
            results=[pb.WriteResult(id=77, found=True, job=pb.Job(id=77, state=2, edges=9, error="why", cursor=b"c"))]
        )
    )
]
JOB_REPLY = graph.JobReply(found=True, id=77, state=2, edges=9, error="why")
DONE_REPLY = graph.WriteReply(found=True, inverse_pending=True)
CASES: list[tuple[str, Message, list[pb.Answer], Message, Message]] = [
    ("ObjAdd", graph.ObjAddRequest(otype=1, data=b"d"), result(id=77),
     pb.ObjAdd(shard=CHOSEN_SHARD, otype=1, data=b"d"), graph.ObjAddReply(id=77)),
    ("ObjAdd", graph.ObjAddRequest(otype=1, near=NEAR), result(id=77),
     pb.ObjAdd(shard=9, otype=1), graph.ObjAddReply(id=77)),
    ("ObjAdd", graph.ObjAddRequest(otype=1, id=NEAR), result(id=NEAR),
     pb.ObjAdd(id=NEAR, otype=1), graph.ObjAddReply(id=NEAR)),
    ("ObjAdd", graph.ObjAddRequest(otype=1, id=NEAR), result(id=NEAR, found=True),
     pb.ObjAdd(id=NEAR, otype=1), graph.ObjAddReply(id=NEAR, found=True)),
    ("ObjGet", graph.ObjGetRequest(id=7, critical=True), value(encode_object(3, 2, b"x")),
     pb.ReadBatch(obj_ids=[7], critical=True), graph.ObjGetReply(found=True, otype=2, data=b"x")),
    ("ObjGet", graph.ObjGetRequest(id=7), value(encode_object(3, ABSENT, b"")),
     pb.ReadBatch(obj_ids=[7]), graph.ObjGetReply(found=False)),
    ("ObjUpdate", graph.ObjUpdateRequest(id=7, otype=2, patch=b"p"), DONE,
     pb.ObjUpdate(id=7, otype=2, patch=b"p"), DONE_REPLY),
    ("ObjDelete", graph.ObjDeleteRequest(id=7, otype=3), DONE, pb.ObjDelete(id=7, otype=3), DONE_REPLY),
    ("AssocAdd", graph.AssocAddRequest(id1=7, atype=2, id2=8, time=3, data=b"d"), DONE,
     pb.AssocAdd(id1=7, atype=2, id2=8, time=3, data=b"d"), DONE_REPLY),
    ("AssocDelete", graph.AssocDeleteRequest(id1=7, atype=2, id2=8), DONE,
     pb.AssocDelete(id1=7, atype=2, id2=8), DONE_REPLY),
    ("AssocChangeType", graph.AssocChangeTypeRequest(id1=7, atype=2, id2=8, new_atype=3), DONE,
     pb.AssocChangeType(id1=7, atype=2, id2=8, new_atype=3), DONE_REPLY),
    ("AssocMerge", graph.AssocMergeRequest(id1=7, atype=2, id2=8, state=2, state_us=5, has_payload=True, payload_us=4,
                                          time=3, data=b"d"), MERGED,
     pb.AssocMerge(id1=7, atype=2, id2=8, state=2, state_us=5, has_payload=True, payload_us=4, time=3, data=b"d"),
     graph.AssocMergeReply(found=True, effective_state=3, superseded=True)),
    ("NodeSetState", graph.NodeSetStateRequest(id=7, atypes=[2, 3], state=2, state_us=5), NODE_SET,
     pb.NodeSetState(id=7, atypes=[2, 3], state=2, state_us=5),
     graph.NodeSetStateReply(superseded=True, state_us=5, job_id=77)),
    ("AssocState", pb.ReadState(id1=7, atype=2, id2=8), STATE, pb.ReadState(id1=7, atype=2, id2=8),
     graph.AssocStateReply(found=True, own_state=0, effective_state=2, state_us=5, payload_us=4)),
    ("AssocState", pb.ReadState(id1=7, atype=2, id2=8), result(effective_state=3), pb.ReadState(id1=7, atype=2, id2=8),
     graph.AssocStateReply()),
    ("AddJob", graph.AddJobRequest(id=NEAR, kind="k", body=b"b"), JOB,
     pb.AddJob(id=NEAR, kind="k", priority=1, body=b"b"), JOB_REPLY),
    ("AddJob", graph.AddJobRequest(near=NEAR, kind="k", job_priority=3), JOB,
     pb.AddJob(shard=9, kind="k", priority=2), JOB_REPLY),
    ("ReadJob", pb.ReadJob(id=77), JOB, pb.ReadJob(id=77), JOB_REPLY),
    ("ReadJob", pb.ReadJob(id=78), result(id=78), pb.ReadJob(id=78), graph.JobReply()),
    ("CancelJob", pb.CancelJob(id=77), JOB, pb.CancelJob(id=77), JOB_REPLY),
    ("Applied", pb.AwaitApplied(accepted=b"r"), MERGED, pb.AwaitApplied(accepted=b"r"),
     graph.AssocMergeReply(found=True, effective_state=3, superseded=True)),
    ("AssocGet", graph.AssocGetRequest(id1=7, atype=2, id2s=[3, 2], low=5), value(BLOCK),
     pb.ReadBatch(get_id1s=[7], get_atypes=[2], get_id2_counts=[2], get_id2s=[3, 2], get_highs=[MAX_TIME],
                  get_lows=[5]), EDGES),
    ("AssocExists", graph.AssocExistsRequest(id1=7, atype=2, id2=3, critical=True), value(EXISTS),
     pb.ReadBatch(exist_id1s=[7], exist_atypes=[2], exist_id2s=[3], critical=True),
     graph.AssocExistsReply(exists=True)),
    ("AssocExists", graph.AssocExistsRequest(id1=7, atype=2, id2=3), value(EXISTS_NOT),
     pb.ReadBatch(exist_id1s=[7], exist_atypes=[2], exist_id2s=[3]), graph.AssocExistsReply(exists=False)),
    ("AssocCount", graph.AssocCountRequest(id1=7, atype=2), value(encode_count(4, 12)),
     pb.ReadBatch(count_id1s=[7], count_atypes=[2]), graph.AssocCountReply(count=12)),
    ("AssocRange", graph.AssocRangeRequest(id1=7, atype=2, pos=1, limit=9), value(BLOCK),
     pb.ReadBatch(range_id1s=[7], range_atypes=[2], range_positions=[1], range_limits=[9]), EDGES),
    ("AssocTimeRange", graph.AssocTimeRangeRequest(id1=7, atype=2, high=9, low=1, limit=4), value(BLOCK),
     pb.ReadBatch(time_range_id1s=[7], time_range_atypes=[2], time_range_highs=[9], time_range_lows=[1],
                  time_range_limits=[4]), EDGES),
    ("AssocTimeRange", graph.AssocTimeRangeRequest(id1=7, atype=2, high=9, low=1, limit=4, below_id2=5), value(BLOCK),
     pb.ReadBatch(time_range_id1s=[7], time_range_atypes=[2], time_range_highs=[9], time_range_lows=[1],
                  time_range_limits=[4], time_range_starts=[5]), EDGES),
    ("AssocTimeRange", graph.AssocTimeRangeRequest(id1=7, atype=2, high=9, low=1, limit=4, pos=5), value(BLOCK),
     pb.ReadBatch(time_range_id1s=[7], time_range_atypes=[2], time_range_highs=[9], time_range_lows=[1],
                  time_range_limits=[4], time_range_starts=[(1 << 63) + 5]), EDGES),
    ("CounterAdd", pb.CounterAdd(id=7, atype=2, by=-3), result(found=True), pb.CounterAdd(id=7, atype=2, by=-3),
     graph.CounterAddReply()),
    ("CounterAdd", pb.CounterAdd(id=7, atype=2, by=1), [pb.Answer(write=pb.WriteAnswer(all_counted=True))],
     pb.CounterAdd(id=7, atype=2, by=1), graph.CounterAddReply()),
    ("CounterGet", graph.CounterGetRequest(id=7, atype=2, critical=True, max_staleness_ms=9),
     [pb.Answer(counter_values=pb.CounterValues(values=[-5], max_behind_ms=[1100]))],
     pb.GetCounters(ids=[7], atypes=[2], critical=True, max_staleness_ms=9),
     graph.CounterGetReply(value=-5, max_behind_ms=1100)),
    ("CounterGet", graph.CounterGetRequest(id=7, atype=2),
     [pb.Answer(counter_values=pb.CounterValues(values=[5], max_behind_ms=[-1]))],
     pb.GetCounters(ids=[7], atypes=[2]), graph.CounterGetReply(value=5)),
    ("Select", pb.SelectRequest(limit=3, cursor="c"), [pb.Answer(selected=pb.SelectReply(count=4, exact=True))],
     pb.SelectRequest(limit=3, cursor="c"), pb.SelectReply(count=4, exact=True)),
    ("ReserveObjectIds", pb.ReserveIds(shard=2, count=3), [pb.Answer(reserved_ids=pb.ReservedIds(ids=[5, 6]))],
     pb.ReserveIds(shard=2, count=3), pb.ReservedIds(ids=[5, 6])),
    ("ReserveObjectIds", pb.ReserveIds(shard=2, count=3, as_interval=True),
     [pb.Answer(reserved_ids=pb.ReservedIds(first=5, count=3))],
     pb.ReserveIds(shard=2, count=3, as_interval=True), pb.ReservedIds(first=5, count=3)),
    ("Topology", pb.GetTopology(), [pb.Answer(topology=pb.TopologyDocument(version=4, json=b"{}"))],
     pb.GetTopology(), pb.TopologyDocument(version=4, json=b"{}")),
    ("Schema", pb.GetSchema(), [pb.Answer(schema=pb.SchemaDocument(hash="h", json=b"{}"))],
     pb.GetSchema(), pb.SchemaDocument(hash="h", json=b"{}")),
]  # fmt: skip


def body_of(request: pb.Request) -> object:
    name = request.WhichOneof("body")
    assert name is not None
    if name != "write":
        return getattr(request, name)
    (write,) = request.write.writes
    operation = write.WhichOneof("operation")
    assert operation is not None
    return getattr(write, operation)


@pytest.mark.parametrize(("method", "asked", "answers", "request_body", "reply"), CASES)
async def test_a_method_asks_one_request_and_replies_its_answer(
    bench: Bench, method: str, asked: Message, answers: list[pb.Answer], request_body: Message, reply: Message
) -> None:
    bench.handler.answers = answers
    assert await getattr(bench.stub, method)(asked, timeout=PATIENT_SECONDS) == reply
    assert body_of(bench.handler.asked) == request_body
    # gRPC rounds what is left of a long time up to a tenth of a second.
    assert abs(PATIENT_SECONDS * 1000 - bench.handler.asked.deadline_ms) < 10_000, "the rest of the caller's time"


JOURNALED: list[tuple[str, Message]] = [
    ("ObjAdd", graph.ObjAddRequest(otype=1, id=NEAR, accept=True, priority=3)),
    ("AssocAdd", graph.AssocAddRequest(id1=7, atype=2, id2=8, accept=True, priority=3)),
    ("AssocDelete", graph.AssocDeleteRequest(id1=7, atype=2, id2=8, accept=True, priority=3)),
    ("AssocMerge", graph.AssocMergeRequest(id1=7, atype=2, id2=8, accept=True, priority=3)),
    ("NodeSetState", graph.NodeSetStateRequest(id=7, atypes=[2], state=2, accept=True, priority=3)),
    ("AddJob", graph.AddJobRequest(id=NEAR, kind="k", accept=True, priority=3)),
]


@pytest.mark.parametrize(("method", "asked"), JOURNALED)
async def test_a_write_to_be_made_later_is_answered_with_its_receipt(bench: Bench, method: str, asked: Message) -> None:
    bench.handler.answers = [pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(accepted=b"receipt")]))]
    reply = await getattr(bench.stub, method)(asked, timeout=PATIENT_SECONDS)
    assert reply.accepted == b"receipt"
    assert bench.handler.asked.write.accept
    assert bench.handler.asked.write.priority == 3


def test_every_method_has_a_case() -> None:
    service = graph.DESCRIPTOR.services_by_name["Graph"]
    assert {case[0] for case in CASES} | {"Session", "WatchConfiguration"} == {each.name for each in service.methods}


async def test_a_hit_and_a_miss_in_two_parts_are_one_reply(bench: Bench) -> None:
    later = pb.Answer(read=pb.ReadAnswer(slots=[0], values=[encode_count(1, 2)], missed_slots=[0]))
    bench.handler.answers = [pb.Answer(more=True, read=pb.ReadAnswer()), later]
    assert await bench.stub.AssocCount(graph.AssocCountRequest(id1=1, atype=1)) == graph.AssocCountReply(count=2)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (TooLarge("m"), grpc.StatusCode.INVALID_ARGUMENT),
        (WriteLost("m"), grpc.StatusCode.DATA_LOSS),
        (Unauthorized("m"), grpc.StatusCode.UNAUTHENTICATED),
        (PermissionDenied("m"), grpc.StatusCode.PERMISSION_DENIED),
        (NotMine("m", 6), grpc.StatusCode.UNAVAILABLE),
        (Overloaded("m"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (ShardBlocked("m"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("m"), grpc.StatusCode.UNAVAILABLE),
        (DeadlineExceeded("m"), grpc.StatusCode.DEADLINE_EXCEEDED),
        (Fenced("m"), grpc.StatusCode.ABORTED),
        (OutcomeUnknown("m"), grpc.StatusCode.UNKNOWN),
        (InternalError("m"), grpc.StatusCode.INTERNAL),
    ],
)
async def test_an_error_is_a_status_with_its_reason(bench: Bench, error: TaoError, code: grpc.StatusCode) -> None:
    in_a_slot = pb.Answer(read=pb.ReadAnswer(failed_slots=[0], errors=[error_to_pb(error)]))
    for answer in (failure(error), in_a_slot):
        bench.handler.answers = [answer]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.stub.ObjGet(graph.ObjGetRequest(id=1))
        assert caught.value.code() == code
        assert caught.value.details() == "m"
        trailers = dict(caught.value.trailing_metadata() or ())
        assert trailers["tao-reason"] == error.reason
        assert trailers.get("tao-topology-version", "0") == str(getattr(error, "topology_version", 0))


async def test_a_call_without_a_deadline_is_given_one(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.ObjGet(graph.ObjGetRequest(id=1))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert bench.handler.replies[0].closed


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"high": 2**63}, "2^63-1"), ({"pos": 2**63}, "pos 9223372036854775808 is above 2^63 - 1"),
     ({"pos": 3, "below_id2": 7}, "pos is 3 and below_id2 7")],
)  # fmt: skip
async def test_a_bound_that_no_time_range_has_is_an_invalid_argument(
    bench: Bench, wrong: dict[str, int], named: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.stub.AssocTimeRange(graph.AssocTimeRangeRequest(id1=1, atype=1, limit=1, **wrong))  # type: ignore[arg-type]
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert named in (caught.value.details() or "")


def test_a_server_that_knows_no_positions_takes_one_for_an_id_that_is_too_large() -> None:
    assert start_at(0) == 0
    assert start_at(1) > MAX_ID


async def test_a_watch_is_a_stream_that_ends_with_its_caller(bench: Bench) -> None:
    event = pb.WatchEvent(topology=pb.TopologyDocument(version=4))
    bench.handler.answers = [pb.Answer(more=True, watch=event), pb.Answer(more=True, watch=event)]
    call = bench.stub.WatchConfiguration(pb.Watch(topology_version=3))
    assert [await call.read(), await call.read()] == [event, event]
    assert bench.handler.asked.deadline_ms == NO_DEADLINE_MS
    closed = asyncio.Event()
    bench.handler.replies[0].on_close(closed.set)
    call.cancel()
    async with asyncio.timeout(PATIENT_SECONDS):
        await closed.wait()


async def test_health_is_answered_without_credentials(bench: Bench) -> None:
    async with grpc.aio.insecure_channel(bench.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service="tao.v1.Graph"))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
