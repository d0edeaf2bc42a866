"""Which role may send which request to which server, asked of the servers' own handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tao.model.errors import TaoError, Unauthorized
from tao.wire.session import RequestHandler
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.links_rig import MemoryReply
from tests.rigs.region_rig import RegionRig

SETTLE = pb.WriteBatch(writes=[pb.Write(settle_edge=pb.SettleEdge(id1=1, atype=1, id2=2))])
EVERYONE = {"follower", "leader", "operator", "watcher", "client"}
AT_LEADERS = {
    "read": (pb.Request(read=pb.ReadBatch(obj_ids=[1])), {"follower", "leader", "operator", "watcher"}),
    "write": (pb.Request(write=pb.WriteBatch()), {"follower", "leader", "operator"}),
    "settle_edge": (pb.Request(write=SETTLE), {"leader"}),
    "reserve_ids": (pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=1)), {"follower", "leader", "operator"}),
    "subscribe": (pb.Request(subscribe=pb.Subscribe(subscriber="x")), {"follower"}),
    "acknowledge": (pb.Request(acknowledge=pb.Acknowledge(subscribe_number=99)), {"follower"}),
    "inspect": (pb.Request(inspect=pb.Inspect(obj_ids=[1])), {"follower", "leader", "operator", "watcher"}),
    "invalidate": (pb.Request(invalidate=pb.Invalidate(shards=[0])), {"follower", "leader", "operator"}),
    "settle_pairs": (pb.Request(settle_pairs=pb.SettlePairs()), {"follower", "leader", "operator"}),
    "get_topology": (
        pb.Request(get_topology=pb.GetTopology()),
        EVERYONE,
    ),
}
AT_FOLLOWERS = {
    "apply": (pb.Request(apply=pb.ApplyChanges()), {"follower"}),
    "inspect": (pb.Request(inspect=pb.Inspect(obj_ids=[1])), {"follower", "leader", "operator", "watcher"}),
    "invalidate": (pb.Request(invalidate=pb.Invalidate(shards=[0])), {"follower", "leader", "operator"}),
    "read": (pb.Request(read=pb.ReadBatch(obj_ids=[1])), EVERYONE),
    "write": (pb.Request(write=pb.WriteBatch()), EVERYONE),
    "watch": (pb.Request(watch=pb.Watch()), EVERYONE),
}


@pytest.fixture
async def region() -> AsyncIterator[RegionRig]:
    rig = RegionRig()
    await rig.start()
    yield rig
    await rig.close()


def refused(server: RequestHandler, request: pb.Request, role: str) -> bool:
    request.deadline_ms = 5_000
    try:
        server.handle(request, MemoryReply(lambda _: None, peer=role))
    except Unauthorized as error:
        return role in error.message  # it says what the peer is taken for
    except TaoError:
        return False
    return False


@pytest.mark.parametrize("role", ["leader", "follower", "operator", "watcher", "client"])
async def test_each_kind_of_request_is_served_only_to_the_roles_it_is_for(region: RegionRig, role: str) -> None:
    servers: list[tuple[RequestHandler, dict[str, tuple[pb.Request, set[str]]]]] = [
        (region.leader.service, AT_LEADERS),
        (region.near.service, AT_FOLLOWERS),
    ]
    for server, kinds in servers:
        for kind, (request, roles) in kinds.items():
            assert refused(server, request, role) == (role not in roles), kind
