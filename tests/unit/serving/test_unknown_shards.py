"""A shard that a server does not know is a mistake of the sender, or one that a newer topology has added."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from tao.model.errors import NotMine, TaoError, UnknownShard
from tao.model.writes import AssocAdd, ObjAdd
from tao.wire.client_session import Waiter
from tao.wire.convert import error_from_pb, write_to_pb
from tao.wire.session import RequestHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, FRIEND, USER, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import until
from tests.rigs.region_rig import RegionRig

A, ADDED = make_id(64), make_id(64, 4)
"""Objects on a shard that every server knows, and on the one that version 2 of the topology adds."""
VIEWS = 401


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    rig = RegionRig()
    await rig.start()
    yield rig
    assert await rig.close() == []


def write(operation: Any) -> pb.Request:
    return pb.Request(write=pb.WriteBatch(writes=[write_to_pb(operation)]))


COUNTED = pb.Write(counter_add=pb.CounterAdd(id=ADDED, atype=VIEWS, by=1))
AT_FOLLOWERS = {
    "read": pb.Request(read=pb.ReadBatch(obj_ids=[ADDED])),
    "critical read": pb.Request(read=pb.ReadBatch(obj_ids=[ADDED], critical=True)),
    "read of a list": pb.Request(read=pb.ReadBatch(count_id1s=[ADDED], count_atypes=[COMMENT])),
    "write": write(ObjAdd(ADDED, USER, b"", allocated=False)),
    "edge from the shard": write(AssocAdd(ADDED, COMMENT, A, 1, b"")),
    "edge to the shard": write(AssocAdd(A, FRIEND, ADDED, 1, b"")),
    "addition to a counter": pb.Request(write=pb.WriteBatch(writes=[COUNTED])),
    "counter": pb.Request(get_counters=pb.GetCounters(ids=[ADDED], atypes=[VIEWS])),
    "reservation": pb.Request(reserve_ids=pb.ReserveIds(shard=4, count=1)),
    "settlement": pb.Request(settle_pairs=pb.SettlePairs(shards=[pb.ShardPair(low_shard=4, high_shard=4)])),
}
AT_LEADERS = {
    "read": AT_FOLLOWERS["read"],
    "edge to the shard": AT_FOLLOWERS["edge to the shard"],
}


async def refused(server: RequestHandler, asked: pb.Request, peer: str, version: int) -> TaoError:
    """Return the error of the one item of a request whose sender routes by this version."""
    request, waiter = pb.Request(), Waiter(asyncio.get_running_loop())
    request.CopyFrom(asked)
    request.topology_version, request.deadline_ms = version, 60_000
    try:
        server.handle(request, MemoryReply(waiter.take, peer=peer))
        answer = await waiter.answer()
    except TaoError as refused_whole:
        return refused_whole
    results = [result.error for result in answer.write.results]
    (error,) = (*answer.read.errors, *answer.counter_values.errors, *results)
    return error_from_pb(error)


@pytest.mark.parametrize("kind", AT_FOLLOWERS)
async def test_a_follower_knows_no_shard_that_a_newer_topology_may_have(region: RegionRig, kind: str) -> None:
    for version in (0, 1):
        assert isinstance(await refused(region.near.service, AT_FOLLOWERS[kind], "client", version), UnknownShard)
    error = await refused(region.near.service, AT_FOLLOWERS[kind], "client", 2)
    assert isinstance(error, NotMine)
    assert error.topology_version == 1


@pytest.mark.parametrize("kind", AT_LEADERS)
async def test_a_leader_knows_no_shard_that_a_newer_topology_may_have(region: RegionRig, kind: str) -> None:
    assert isinstance(await refused(region.leader.service, AT_LEADERS[kind], "follower-1", 1), UnknownShard)
    error = await refused(region.leader.service, AT_LEADERS[kind], "follower-1", 2)
    assert isinstance(error, NotMine)
    assert error.topology_version == 1


async def test_a_server_that_is_asked_for_an_added_shard_reads_the_topology_and_answers_the_rest(
    region: RegionRig,
) -> None:
    region.document = msgspec.structs.replace(region.topology, version=2)
    request = pb.Request(topology_version=2, read=pb.ReadBatch(obj_ids=[A, ADDED]))
    answer = (await region.near.ask(request)).read
    assert list(answer.slots) == [0]
    assert list(answer.failed_slots) == [1]
    assert isinstance(error_from_pb(answer.errors[0]), NotMine)
    await until(lambda: region.near.configuration.routes.version == 2)
