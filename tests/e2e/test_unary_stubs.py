"""The generated stubs and one follower's address are all that a program in any language needs.

Nothing of the SDK is used here. The follower hosts only a part of the shards; it relays requests about the others.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator

import grpc
import msgspec
import pytest
import pytest_asyncio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from tao.devcluster.cluster import DevCluster
from tao.devcluster.database_program import Durability
from tao.devcluster.layout import ClusterSettings, Shape
from tao.model.edge_states import State
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobState
from tao.wire.v1 import graph_pb2 as graph
from tao.wire.v1 import session_pb2 as pb
from tao.wire.v1.graph_pb2_grpc import GraphStub
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.e2e, pytest.mark.database]

SHARDS = 8
USER, FRIEND, LIKES, LIKED_BY, COMMENT, NOTE = 1, 1, 4, 5, 10, 14
SUBSCRIBES, SUBSCRIBERS = 15, 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DevCluster]:
    settings = ClusterSettings(
        state_dir=tmp_path_factory.mktemp("cluster"),
        shape=Shape(tiers=2, followers=2, leaders=2, databases=1, shards=SHARDS),
        durability=Durability.RELAXED,
        log_level="warning",
    )
    async with DevCluster(settings) as running:
        yield running


@pytest.fixture
def channel(cluster: DevCluster) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(cluster.client_address) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> GraphStub:
    return GraphStub(channel)


def data(**fields: object) -> bytes:
    """Encode an object's data; keyword f7 is field number 7."""
    return msgspec.msgpack.encode({int(name[1:]): value for name, value in fields.items()})


def ids_on_every_shard(stub: GraphStub, count: int = 1) -> list[int]:
    reserved = [
        stub.ReserveObjectIds(pb.ReserveIds(shard=shard, count=count), timeout=PATIENT_SECONDS)
        for shard in range(SHARDS)
    ]
    return [object_id for reply in reserved for object_id in reply.ids]


def refusal(call: Callable[..., Message], asked: Message) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(asked, timeout=PATIENT_SECONDS)
    assert caught.value.details()
    reasons = [each.value for each in caught.value.trailing_metadata() if each.key == "tao-reason"]
    return caught.value.code(), str(reasons[0])


def test_objects_of_every_shard_are_made_read_changed_and_deleted_at_one_address(stub: GraphStub) -> None:
    for number, object_id in enumerate(ids_on_every_shard(stub)):
        add = graph.ObjAddRequest(id=object_id, otype=USER, data=data(f1=f"user {number}", f2="here"))
        for _ in range(2):  # with a reserved id, adding again is a success without effect
            assert stub.ObjAdd(add, timeout=PATIENT_SECONDS).id == object_id
        got = stub.ObjGet(graph.ObjGetRequest(id=object_id), timeout=PATIENT_SECONDS)
        assert (got.found, got.otype, msgspec.msgpack.decode(got.data, strict=False)) == (
            True, USER, {1: f"user {number}", 2: "here"},
        )  # fmt: skip
        update = graph.ObjUpdateRequest(id=object_id, otype=USER, patch=data(f2="there"))
        assert stub.ObjUpdate(update, timeout=PATIENT_SECONDS).found
        for critical in (False, True):
            got = stub.ObjGet(graph.ObjGetRequest(id=object_id, critical=critical), timeout=PATIENT_SECONDS)
            assert msgspec.msgpack.decode(got.data)[2] == "there"
        assert stub.ObjDelete(graph.ObjDeleteRequest(id=object_id), timeout=PATIENT_SECONDS).found
        assert not stub.ObjGet(graph.ObjGetRequest(id=object_id), timeout=PATIENT_SECONDS).found
        assert not stub.ObjDelete(graph.ObjDeleteRequest(id=object_id), timeout=PATIENT_SECONDS).found


def test_a_new_object_lies_near_the_one_named_and_others_are_spread(stub: GraphStub) -> None:
    for near in ids_on_every_shard(stub):
        added = stub.ObjAdd(graph.ObjAddRequest(otype=USER, near=near, data=data(f1="n")), timeout=PATIENT_SECONDS)
        assert added.id >> 47 == near >> 47
    spread = {stub.ObjAdd(graph.ObjAddRequest(otype=USER), timeout=PATIENT_SECONDS).id >> 47 for _ in range(60)}
    assert len(spread) > SHARDS // 2


def test_edges_between_every_two_shards_are_seen_from_both_ends(stub: GraphStub) -> None:
    ids = ids_on_every_shard(stub)
    hub = ids[3]
    for time, id2 in enumerate(ids):
        add = graph.AssocAddRequest(id1=hub, atype=LIKES, id2=id2, time=time)
        assert not stub.AssocAdd(add, timeout=PATIENT_SECONDS).found
        assert stub.AssocAdd(add, timeout=PATIENT_SECONDS).found
        back = stub.AssocRange(graph.AssocRangeRequest(id1=id2, atype=LIKED_BY, limit=10), timeout=PATIENT_SECONDS)
        assert [(edge.id2, edge.time) for edge in back.edges] == [(hub, time)]
    newest_first = [(id2, time) for time, id2 in reversed(list(enumerate(ids)))]
    for critical in (False, True):
        ranged = stub.AssocRange(
            graph.AssocRangeRequest(id1=hub, atype=LIKES, pos=1, limit=3, critical=critical), timeout=PATIENT_SECONDS
        )
        assert [(edge.id2, edge.time) for edge in ranged.edges] == newest_first[1:4]
        counted = stub.AssocCount(
            graph.AssocCountRequest(id1=hub, atype=LIKES, critical=critical), timeout=PATIENT_SECONDS
        )
        assert counted.count == SHARDS
        window = graph.AssocTimeRangeRequest(id1=hub, atype=LIKES, high=5, low=2, limit=9, critical=critical)
        assert [edge.time for edge in stub.AssocTimeRange(window, timeout=PATIENT_SECONDS).edges] == [5, 4, 3, 2]
        named = graph.AssocGetRequest(id1=hub, atype=LIKES, id2s=ids[:4], low=1, high=2, critical=critical)
        assert [edge.time for edge in stub.AssocGet(named, timeout=PATIENT_SECONDS).edges] == [2, 1]
    assert stub.AssocRange(graph.AssocRangeRequest(id1=hub, atype=LIKES, limit=7000), timeout=PATIENT_SECONDS).limit_cut


def test_sets_of_lists_on_all_shards_are_evaluated_at_one_address(stub: GraphStub) -> None:
    ids = ids_on_every_shard(stub)
    one, other = ids[2], ids[5]
    token = ""
    for time, id2 in enumerate(ids):
        for id1 in (one, other) if time % 2 else (one,):
            add = graph.AssocAddRequest(id1=id1, atype=COMMENT, id2=id2, time=time)
            token = stub.AssocAdd(add, timeout=PATIENT_SECONDS).token
    both = [
        pb.SelectTerm(list=pb.ListTerm(id1=one, atype=COMMENT)),
        pb.SelectTerm(list=pb.ListTerm(id1=other, atype=COMMENT)),
        pb.SelectTerm(operator=pb.SET_AND),
    ]
    for freshness in ({}, {"critical": True}, {"after": token}):
        found, cursor = [], ""
        while True:
            page = stub.Select(
                pb.SelectRequest(terms=both, limit=3, cursor=cursor, **freshness), timeout=PATIENT_SECONDS
            )
            found += [(edge.id1, edge.id2, edge.time) for edge in page.edges]
            cursor = page.cursor
            if not cursor:
                break
        assert found == [(one, ids[time], time) for time in (7, 5, 3, 1)]
    union = [pb.SelectTerm(union=pb.UnionTerm(id1s=[one, other], atype=COMMENT))]
    counted = stub.Select(pb.SelectRequest(terms=union, limit=100, count_only=True), timeout=PATIENT_SECONDS)
    assert (counted.count, counted.exact) == (SHARDS, True)
    assert refusal(stub.Select, pb.SelectRequest(terms=both[:2], limit=3)) == (
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT",
    )  # fmt: skip


def test_an_edge_changes_its_type_and_is_deleted_at_both_ends(stub: GraphStub) -> None:
    for id1, id2 in zip(ids_on_every_shard(stub), reversed(ids_on_every_shard(stub)), strict=True):
        stub.AssocAdd(graph.AssocAddRequest(id1=id1, atype=LIKES, id2=id2, time=4), timeout=PATIENT_SECONDS)
        move = graph.AssocChangeTypeRequest(id1=id1, atype=LIKES, id2=id2, new_atype=FRIEND)
        assert stub.AssocChangeType(move, timeout=PATIENT_SECONDS).found
        assert not stub.AssocChangeType(move, timeout=PATIENT_SECONDS).found
        gone = stub.AssocCount(graph.AssocCountRequest(id1=id2, atype=LIKED_BY), timeout=PATIENT_SECONDS)
        assert gone.count == 0
        friends = stub.AssocGet(graph.AssocGetRequest(id1=id2, atype=FRIEND, id2s=[id1]), timeout=PATIENT_SECONDS)
        assert [edge.time for edge in friends.edges] == [4]
        delete = graph.AssocDeleteRequest(id1=id2, atype=FRIEND, id2=id1)
        assert stub.AssocDelete(delete, timeout=PATIENT_SECONDS).found
        assert not stub.AssocDelete(delete, timeout=PATIENT_SECONDS).found
        assert stub.AssocCount(graph.AssocCountRequest(id1=id1, atype=FRIEND), timeout=PATIENT_SECONDS).count == 0


def test_states_of_edges_and_nodes_and_jobs_need_no_sdk(stub: GraphStub) -> None:
    for user, page in zip(ids_on_every_shard(stub), reversed(ids_on_every_shard(stub)), strict=True):
        state = pb.ReadState(id1=user, atype=SUBSCRIBES, id2=page)
        assert not stub.AssocState(state, timeout=PATIENT_SECONDS).found
        stub.AssocAdd(graph.AssocAddRequest(id1=user, atype=SUBSCRIBES, id2=page, time=4), timeout=PATIENT_SECONDS)
        archive = graph.NodeSetStateRequest(id=page, atypes=[SUBSCRIBERS], state=State.ARCHIVED)
        job_id = stub.NodeSetState(archive, timeout=PATIENT_SECONDS).job_id
        job = stub.ReadJob(pb.ReadJob(id=job_id), timeout=PATIENT_SECONDS)
        assert (job.found, job.id, job.state) == (True, job_id, JobState.WAITING)
        # An operation on the edge meets the state of its node before the job does.
        stub.AssocAdd(graph.AssocAddRequest(id1=user, atype=SUBSCRIBES, id2=page, time=5), timeout=PATIENT_SECONDS)
        found = stub.AssocState(state, timeout=PATIENT_SECONDS)
        assert (found.found, found.own_state, found.effective_state) == (True, State.NORMAL, State.ARCHIVED)
        assert found.state_us == found.payload_us > 0
        assert stub.CancelJob(pb.CancelJob(id=job_id), timeout=PATIENT_SECONDS).state == JobState.CANCELLED
        (reserved,) = stub.ReserveObjectIds(
            pb.ReserveIds(shard=user >> SHARD_SHIFT, count=1), timeout=PATIENT_SECONDS
        ).ids
        add = graph.AddJobRequest(id=reserved, kind="of_nobody", job_priority=3)
        assert [stub.AddJob(add, timeout=PATIENT_SECONDS).found for _ in range(2)] == [False, True]
        assert refusal(stub.AddJob, graph.AddJobRequest(near=user, kind="of_nobody", job_priority=4))[1] == (
            "INVALID_ARGUMENT"
        )


def test_an_invalid_request_gets_the_standard_status_with_its_reason(stub: GraphStub) -> None:
    ids = ids_on_every_shard(stub)
    for number, object_id in enumerate(ids):  # the follower's own shards and those it relays answer alike
        user = graph.ObjAddRequest(id=object_id, otype=USER, data=data(f1="n"))
        stub.ObjAdd(user, timeout=PATIENT_SECONDS)
        invalid = grpc.StatusCode.INVALID_ARGUMENT
        other = ids[number - 1]
        cases: list[tuple[Callable[..., Message], Message, str]] = [
            (stub.ObjAdd, graph.ObjAddRequest(near=object_id, otype=999), "UNKNOWN_TYPE"),
            (stub.ObjAdd, graph.ObjAddRequest(near=object_id, otype=USER, data=data(f1=7)), "INVALID_FIELD"),
            (stub.ObjUpdate, graph.ObjUpdateRequest(id=object_id, otype=2, patch=data(f1="x")), "WRONG_TYPE"),
            (stub.AssocAdd, graph.AssocAddRequest(id1=object_id, atype=999, id2=other), "UNKNOWN_TYPE"),
            (stub.AssocAdd, graph.AssocAddRequest(id1=object_id, atype=LIKES, id2=other, time=1 << 63),
             "INVALID_ARGUMENT"),
            (stub.AssocAdd, graph.AssocAddRequest(id1=object_id, atype=COMMENT, id2=other, data=data(f1="x" * 300)),
             "TOO_LARGE"),
            (stub.AssocGet, graph.AssocGetRequest(id1=object_id, atype=LIKES, id2s=range(1, 6002)), "TOO_LARGE"),
            (stub.AssocRange, graph.AssocRangeRequest(id1=object_id, atype=LIKES, pos=1 << 63, limit=1),
             "INVALID_ARGUMENT"),
            (stub.AssocCount, graph.AssocCountRequest(id1=object_id, atype=999), "UNKNOWN_TYPE"),
        ]  # fmt: skip
        for call, asked, reason in cases:
            assert refusal(call, asked) == (invalid, reason), asked
    wrong_ids = {0: "INVALID_ARGUMENT", 1 << 63: "INVALID_ARGUMENT", (1 << 64) - 1: "INVALID_ARGUMENT"}
    wrong_ids[(SHARDS + 1) << 47 | 1] = "UNKNOWN_SHARD"
    for wrong, reason in wrong_ids.items():
        assert refusal(stub.ObjGet, graph.ObjGetRequest(id=wrong)) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
        assert refusal(stub.ObjDelete, graph.ObjDeleteRequest(id=wrong))[1] == reason
    wrong_shard = pb.ReserveIds(shard=SHARDS, count=1)
    assert refusal(stub.ReserveObjectIds, wrong_shard)[1] == "UNKNOWN_SHARD"
    assert refusal(stub.ReserveObjectIds, pb.ReserveIds(shard=0, count=0))[1] == "INVALID_ARGUMENT"


def test_absence_is_an_answer(stub: GraphStub) -> None:
    for never in ids_on_every_shard(stub):
        assert not stub.ObjGet(graph.ObjGetRequest(id=never), timeout=PATIENT_SECONDS).found
        assert stub.AssocCount(graph.AssocCountRequest(id1=never, atype=LIKES), timeout=PATIENT_SECONDS).count == 0
        empty = stub.AssocRange(graph.AssocRangeRequest(id1=never, atype=LIKES, limit=5), timeout=PATIENT_SECONDS)
        assert not empty.edges
        assert not stub.ObjUpdate(graph.ObjUpdateRequest(id=never, patch=data(f1="x")), timeout=PATIENT_SECONDS).found


def test_schema_and_topology_can_be_had_and_watched(stub: GraphStub) -> None:
    topology = stub.Topology(pb.GetTopology(), timeout=PATIENT_SECONDS)
    document = json.loads(topology.json)
    assert (document["version"], document["shards"]) == (topology.version, SHARDS)
    schema = stub.Schema(pb.GetSchema(), timeout=PATIENT_SECONDS)
    assert b"friend" in schema.json
    watch = stub.WatchConfiguration(pb.Watch(topology_version=0, schema_hash=""), timeout=PATIENT_SECONDS)
    first = next(watch)
    assert (first.topology, first.schema) == (topology, schema)
    watch.cancel()


def test_health_and_reflection_are_the_standard_ones(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "tao.v1.Graph"):
        status = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENT_SECONDS).status
        assert status == health_pb2.HealthCheckResponse.SERVING
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    listed = next(reflection.ServerReflectionInfo(asked, timeout=PATIENT_SECONDS)).list_services_response.service
    assert {each.name for each in listed} >= {"tao.v1.Graph", "grpc.health.v1.Health"}


@pytest.mark.asyncio(loop_scope="module")
async def test_the_other_tier_answers_for_a_follower_that_is_gone(cluster: DevCluster, stub: GraphStub) -> None:
    ids = ids_on_every_shard(stub)
    for object_id in ids:
        stub.ObjAdd(graph.ObjAddRequest(id=object_id, otype=USER, data=data(f1="before")), timeout=PATIENT_SECONDS)
    await cluster.kill("follower-1b")
    for object_id in ids:
        assert stub.ObjGet(graph.ObjGetRequest(id=object_id), timeout=PATIENT_SECONDS).found
        update = graph.ObjUpdateRequest(id=object_id, patch=data(f1="after"))
        assert stub.ObjUpdate(update, timeout=PATIENT_SECONDS).found
    await cluster.restart("follower-1b")
