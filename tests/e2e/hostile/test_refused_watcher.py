"""A watcher that everybody refuses, because its name is not in the topology or its account is locked, replaces nothing:
it cannot judge whom it may not ask."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tao.serving.audit import AuditTrail
from tao.serving.status_port import StatusService
from tao.topology.document import parse_topology
from tao.wire.frames_server import FrameServer
from tao.wire.identity import AcceptedCredentials, PeerAuthenticator, SpiffeCluster
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.region_access import until
from tests.e2e.watcher_rig import CLUSTER, running_watcher
from tests.rigs.certificates import TestAuthority

pytestmark = [pytest.mark.e2e]

KINDS = ("leader", "follower")
CACHE_SERVERS = [f"{region}-{kind}-{number}" for region in ("east", "west") for kind in KINDS for number in (1, 2)]
DATABASES = ["db-east", "db-west"]
PEER = "west-watcher-1"
ROUNDS = 30
"""Probes of a database after which a silent master would have been replaced long ago."""
PROBES = {"interval_seconds": 0.05, "timeout_seconds": 20.0, "retry_seconds": 0.05, "master_gone_seconds": 0.2}


def lists_another_watcher(role: str, name: str, _region: str) -> bool:
    return role == "watcher" and name in ("", "east-watcher-2")


@dataclass
class LockedDatabases:
    """Answers every connection as a database server does whose account for it is locked."""

    connections: int = 0

    async def refuse(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        packet = b"\xff" + struct.pack("<H", 4151) + b"Access denied, this account is locked"
        writer.write(len(packet).to_bytes(3, "little") + b"\x00" + packet)
        writer.close()


@asynccontextmanager
async def refusing_cluster(authority: TestAuthority) -> AsyncIterator[tuple[dict[str, str], LockedDatabases]]:
    """The addresses of servers that refuse the watcher, by name."""
    databases = LockedDatabases()
    accepted = AcceptedCredentials(cluster=SpiffeCluster.parse(CLUSTER), is_listed=lists_another_watcher)
    addresses: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name in (*CACHE_SERVERS, PEER):
            region, role, _ = name.split("-")
            tls = authority.issue(name, f"{CLUSTER}/{region}/{role}/{name}").server_context()
            server = FrameServer(
                StatusService("probe", lambda: pb.Answer(read=pb.ReadAnswer()), AuditTrail()),
                ServingSettings(authenticator=PeerAuthenticator(accepted)),
                name=name,
                topology_version=lambda: 1,
                tls=tls,
            )
            addresses[name] = await server.start("127.0.0.1:0")
            stack.push_async_callback(server.close)
        for name in DATABASES:
            listener = await asyncio.start_server(databases.refuse, "127.0.0.1", 0)
            await stack.enter_async_context(listener)
            addresses[name] = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        yield addresses, databases


async def test_a_watcher_that_is_refused_everywhere_marks_no_server_and_promotes_no_master(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path / "certificates")
    async with (
        refusing_cluster(authority) as (addresses, databases),
        running_watcher(tmp_path, authority, addresses, auto_promote=True, probes=PROBES) as watcher,
    ):

        async def is_refused_everywhere() -> bool:
            stats = await watcher.stats()
            return bool(stats["active"]) and stats["refusals"].keys() == addresses.keys()

        await until(is_refused_everywhere, "the watcher does not say by whom it is refused")
        before = databases.connections

        async def has_probed_often() -> bool:
            return databases.connections >= before + 2 * ROUNDS

        await until(has_probed_often, "the watcher does not probe the databases")
        stats = await watcher.stats()
        assert stats["verdicts"] == dict.fromkeys([*CACHE_SERVERS, *DATABASES], "refused")
        assert (stats["marks_set"], stats["failed_actions"]) == (0, 0)
        assert not any(stats["actions"].values())
        assert parse_topology((tmp_path / "topology.json").read_bytes(), "topology").version == 1
        logged = map(json.loads, (tmp_path / "watcher.log").read_text().splitlines())
        refused = [each["target"] for each in logged if each["event"] == "watcher_refused"]
        assert sorted(refused) == sorted(addresses), "said once of each"
