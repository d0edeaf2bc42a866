"""Values of the model survive the way through protobuf bytes."""

from hypothesis import given
from hypothesis import strategies as st

from tao.model.changes import (
    GoneEdge,
    ListChange,
    ListInvalidation,
    ObjectChange,
    ObjectInvalidation,
    ShardInvalidation,
    ShardMessages,
)
from tao.model.delivery import Delivery, Position, ShardDelivery
from tao.model.edge_states import EdgeRegisters
from tao.model.errors import Fenced, NotMine, TooLarge, Unavailable
from tao.model.graph import Edge
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobRow, NewJob
from tao.model.relay import Relay, Touch
from tao.model.writes import (
    AddJob,
    AssocAdd,
    AssocChangeType,
    AssocDelete,
    AssocMerge,
    CancelJob,
    ObjAdd,
    ObjDelete,
    ObjUpdate,
    ReadJob,
    ReadState,
    SettleEdge,
    Write,
    WriteOutcome,
)
from tao.wire import convert
from tao.wire.v1 import session_pb2 as pb

ids = st.integers(1, 2**63 - 1)
times = st.integers(0, 2**63 - 1)
versions = st.integers(0, 2**63 - 1)
types = st.integers(0, 2**32 - 1)
data = st.binary(max_size=40)
shards = st.integers(0, 2**16 - 1)
registers = st.builds(EdgeRegisters, st.integers(0, 3), times, times, times, data)
edges = st.lists(st.builds(Edge, ids, times, data), max_size=6).map(tuple)
gone = st.lists(st.builds(GoneEdge, ids, times), max_size=6).map(tuple)
SHARD = 77
messages = st.one_of(
    st.builds(ObjectChange, ids, versions, versions, types, st.none() | data),
    st.builds(ListChange, ids, types, versions, versions, versions, gone, edges),
    st.builds(ObjectInvalidation, ids, versions),
    st.builds(ListInvalidation, ids, types, versions),
    st.builds(
        ShardInvalidation,
        st.just(SHARD),
        st.lists(types, max_size=3).map(tuple),
        st.lists(types, max_size=3).map(tuple),
    ),
)
shard_messages = st.builds(
    ShardMessages, st.just(SHARD), st.integers(0, 2**15 - 1), st.lists(messages, max_size=5).map(tuple)
)
positions = st.builds(Position, shards, st.text(max_size=8), versions)
deliveries = st.builds(
    Delivery,
    versions,
    st.lists(st.builds(ShardDelivery, positions, st.booleans(), st.none() | shard_messages), max_size=4).map(tuple),
    st.lists(shards, max_size=4).map(tuple),
    st.lists(st.tuples(st.text(max_size=8), versions), max_size=3).map(tuple),
)
writes: st.SearchStrategy[Write] = st.one_of(
    st.builds(ObjAdd, ids, types, data, st.just(False)),
    st.builds(ObjUpdate, ids, types, data),
    st.builds(ObjDelete, ids, st.integers(0, 65535)),
    st.builds(AssocAdd, ids, types, ids, times, data),
    st.builds(AssocDelete, ids, types, ids),
    st.builds(AssocChangeType, ids, types, ids, types),
    st.builds(SettleEdge, ids, types, ids, st.booleans(), times, data, st.booleans(), st.none() | registers),
    st.builds(AssocMerge, ids, types, ids, st.integers(0, 3), times, st.booleans(), times, times, data),
    st.builds(ReadState, ids, types, ids),
    st.builds(AddJob, st.builds(NewJob, ids, st.text(max_size=8), st.integers(0, 2), data, st.integers(0, 99))),
    st.builds(ReadJob, ids),
    st.builds(CancelJob, ids),
)
errors = st.one_of(
    st.builds(NotMine, st.text(max_size=9), versions),
    st.sampled_from([Unavailable, Fenced, TooLarge]).flatmap(lambda kind: st.builds(kind, st.text(max_size=9))),
)


@given(shard_messages)
def test_messages_of_a_shard_survive_the_wire(sent: ShardMessages) -> None:
    on_the_wire = convert.shard_messages_to_pb(sent).SerializeToString()
    assert convert.shard_messages_from_pb(pb.ShardMessages.FromString(on_the_wire)) == sent


@given(deliveries)
def test_deliveries_survive_the_wire(sent: Delivery) -> None:
    on_the_wire = convert.delivery_to_pb(sent).SerializeToString()
    assert convert.delivery_from_pb(pb.Delivery.FromString(on_the_wire)) == sent


@given(st.lists(st.builds(Position, shards, st.text(max_size=8), versions, st.text(max_size=8), versions)), versions)
def test_subscriptions_survive_the_wire(sent: list[Position], series: int) -> None:
    request = pb.Request.FromString(convert.subscribe_to_pb("follower-1", sent, series).SerializeToString())
    assert (request.subscribe.subscriber, request.subscribe.series) == ("follower-1", series)
    assert list(map(convert.position_from_pb, request.subscribe.positions)) == sent


@given(writes)
def test_writes_survive_the_wire(sent: Write) -> None:
    on_the_wire = convert.write_to_pb(sent).SerializeToString()
    assert convert.write_from_pb(pb.Write.FromString(on_the_wire)) == sent


@given(
    st.builds(
        JobRow,
        *(ids, st.text(max_size=8), st.integers(0, 2), st.integers(0, 3), times, st.integers(0, 100), times),
        *(st.text(max_size=8), data, data, times, st.text(max_size=8), times, st.integers(0, 99)),
    )
)
def test_jobs_survive_the_wire(sent: JobRow) -> None:
    on_the_wire = convert.outcome_to_pb(WriteOutcome(job=sent)).SerializeToString()
    assert convert.job_from_pb(pb.WriteResult.FromString(on_the_wire).job) == sent


@given(st.one_of(st.none(), errors), ids, st.booleans())
def test_outcomes_and_errors_survive_the_wire(error: NotMine | Unavailable | None, object_id: int, found: bool) -> None:
    on_the_wire = convert.outcome_to_pb(WriteOutcome(object_id, found, error)).SerializeToString()
    back = pb.WriteResult.FromString(on_the_wire)
    assert (back.id, back.found, back.HasField("error")) == (object_id, found, error is not None)
    if error is not None:
        decoded = convert.error_from_pb(back.error)
        assert (type(decoded), decoded.message) == (type(error), error.message)
        assert getattr(decoded, "topology_version", 0) == getattr(error, "topology_version", 0)


def test_an_object_without_an_id_keeps_its_shard_until_the_leader_gives_it_one() -> None:
    write = pb.Write(obj_add=pb.ObjAdd(shard=3, otype=1, data=b"d"))
    assert convert.write_from_pb(write) == ObjAdd(3 << SHARD_SHIFT, 1, b"d", allocated=True)


relays = st.builds(
    Relay,
    changes=st.lists(shard_messages, max_size=3).map(tuple),
    touches=st.lists(st.builds(Touch, ids, types, versions), max_size=3).map(tuple),
    bulk_shards=st.lists(shards, max_size=3).map(tuple),
    source=st.text(max_size=8),
    source_unix_ms=times,
)


@given(relays)
def test_relays_survive_the_wire(relay: Relay) -> None:
    sent = convert.relay_to_pb(relay).SerializeToString()
    assert convert.relay_from_pb(pb.Relay.FromString(sent)) == relay
