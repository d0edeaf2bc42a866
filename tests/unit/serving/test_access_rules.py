"""Which role may send which request to which server, asked of the servers' own handlers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tao.model.errors import SettingsError, TaoError, Unauthorized
from tao.model.topology import CacheServer
from tao.serving.requests import check_exposure
from tao.wire.session import RequestHandler
from tao.wire.tls import TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import make_topology
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import quiet, until
from tests.rigs.region_rig import RegionRig

SETTLE = pb.WriteBatch(writes=[pb.Write(settle_edge=pb.SettleEdge(id1=1, atype=1, id2=2))])
EVERYONE = {"follower", "leader", "operator", "watcher", "worker", "client"}
AT_LEADERS = {
    "read": (pb.Request(read=pb.ReadBatch(obj_ids=[1])), {"follower", "leader", "operator"}),
    "probe": (pb.Request(read=pb.ReadBatch()), {"follower", "leader", "operator", "watcher"}),
    "write": (pb.Request(write=pb.WriteBatch()), {"follower", "leader", "operator"}),
    "settle_edge": (pb.Request(write=SETTLE), {"leader"}),
    "reserve_ids": (pb.Request(reserve_ids=pb.ReserveIds(shard=0, count=1)), {"follower", "leader", "operator"}),
    "subscribe": (pb.Request(subscribe=pb.Subscribe(subscriber="x")), {"follower"}),
    "acknowledge": (pb.Request(acknowledge=pb.Acknowledge(subscribe_number=99)), {"follower"}),
    "inspect": (pb.Request(inspect=pb.Inspect(obj_ids=[1])), {"follower", "leader", "operator"}),
    "most_read": (pb.Request(inspect=pb.Inspect(hot_limit=9)), {"follower", "leader", "operator", "watcher"}),
    "invalidate": (pb.Request(invalidate=pb.Invalidate(shards=[0])), {"follower", "leader", "operator"}),
    "settle_pairs": (pb.Request(settle_pairs=pb.SettlePairs()), {"follower", "leader", "operator"}),
    "get_topology": (
        pb.Request(get_topology=pb.GetTopology()),
        EVERYONE,
    ),
    "lease_jobs": (pb.Request(lease_jobs=pb.LeaseJobs()), {"worker"}),
    "report_jobs": (pb.Request(report_jobs=pb.ReportJobs()), {"worker"}),
    "scan_shard": (pb.Request(scan_shard=pb.ScanShard(limit=1)), {"worker"}),
    "purge_removed": (pb.Request(purge_removed=pb.PurgeRemoved(limit=1)), {"worker"}),
    "fold_counters": (pb.Request(fold_counters=pb.FoldCounters(limit=1)), {"worker"}),
    "list_jobs": (pb.Request(list_jobs=pb.ListJobs()), {"operator"}),
    "change_jobs": (pb.Request(change_jobs=pb.ChangeJobs(pause_kind="walk")), {"operator"}),
}
AT_FOLLOWERS = {
    "apply": (pb.Request(apply=pb.ApplyChanges()), {"follower"}),
    "inspect": (pb.Request(inspect=pb.Inspect(obj_ids=[1])), {"follower", "leader", "operator"}),
    "most_read": (pb.Request(inspect=pb.Inspect(hot_limit=9)), {"follower", "leader", "operator", "watcher"}),
    "invalidate": (pb.Request(invalidate=pb.Invalidate(shards=[0])), {"follower", "leader", "operator"}),
    "read": (pb.Request(read=pb.ReadBatch(obj_ids=[1])), {"client", "follower", "worker", "operator"}),
    "probe": (pb.Request(read=pb.ReadBatch()), {"client", "follower", "worker", "operator", "watcher"}),
    "write": (pb.Request(write=pb.WriteBatch()), {"client", "follower", "worker", "operator"}),
    "get_counters": (pb.Request(get_counters=pb.GetCounters()), {"client", "follower", "worker", "operator"}),
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


@pytest.mark.parametrize("role", ["leader", "follower", "operator", "watcher", "worker", "client"])
async def test_each_kind_of_request_is_served_only_to_the_roles_it_is_for(region: RegionRig, role: str) -> None:
    servers: list[tuple[RequestHandler, dict[str, tuple[pb.Request, set[str]]]]] = [
        (region.leader.service, AT_LEADERS),
        (region.near.service, AT_FOLLOWERS),
    ]
    for server, kinds in servers:
        for kind, (request, roles) in kinds.items():
            assert refused(server, request, role) == (role not in roles), kind


async def test_a_peer_that_may_not_ask_cannot_make_a_server_read_the_topology(region: RegionRig) -> None:
    region.document = make_topology(2)
    request = pb.Request(topology_version=2, read=pb.ReadBatch(obj_ids=[1]))
    assert refused(region.near.service, request, "watcher")
    await quiet()
    assert region.near.configuration.routes.version == 1
    assert not refused(region.near.service, request, "client")
    await until(lambda: region.near.configuration.routes.version == 2)


TLS = TlsFiles(Path("server.pem"), Path("server.key"))
DEMANDING = replace(TLS, authorities=Path("authority.pem"))


def server_at(grpc: str, frames: str = "") -> CacheServer:
    return CacheServer(name="follower-1", grpc=grpc, frames=frames)


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "127.8.0.1:7000", "localhost:7000", "[::1]:7000", "unix:/run/t"])
def test_a_server_that_only_its_machine_reaches_needs_no_credentials(address: str) -> None:
    check_exposure(server_at(address, "unix:/run/tao.sock"), TlsFiles(), has_credentials=False)


@pytest.mark.parametrize("address", ["0.0.0.0:7000", "192.0.2.1:7000", "[::]:7000", "east-leader-1:7000"])
@pytest.mark.parametrize(
    ("tls", "has_credentials", "lacks"),
    [
        (TlsFiles(), False, ["TLS", "credentials"]),
        (TlsFiles(), True, ["TLS"]),
        (TLS, False, ["credentials"]),
        (replace(DEMANDING, demand_certificates=False), False, ["credentials"]),
        (DEMANDING, False, ["credentials"]),
        (TLS, True, []),
    ],
)
def test_a_server_that_others_reach_needs_tls_and_credentials(
    address: str, tls: TlsFiles, has_credentials: bool, lacks: list[str]
) -> None:
    for server in (server_at(address), server_at("127.0.0.1:7000", address)):
        if not lacks:
            check_exposure(server, tls, has_credentials=has_credentials)
            continue
        with pytest.raises(SettingsError, match="`insecure: true`") as caught:
            check_exposure(server, tls, has_credentials=has_credentials)
        message = caught.value.message
        assert address in message
        assert [each for each in ("TLS", "credentials") if f"{each} (" in message] == lacks
