"""A follower that has started: what it says about its credentials, and what a change of the topology means to peers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from tao.follower.server import FollowerServer
from tao.follower.settings import FollowerSettings
from tao.model.topology import CacheServer, Tier, Topology
from tao.observability.logs import logger
from tao.topology.document import dump_topology
from tests.rigs.leader_rig import make_topology
from tests.rigs.ports import free_ports

ACCESS = "format: 1\nversion: 1\nmode: count\n"


def topology_of(own: CacheServer, version: int = 1, leaders: tuple[str, ...] = ("leader-1", "leader-2")) -> Topology:
    topology = make_topology(version, leader_servers=leaders)
    tier = Tier(name="near", servers=(own,))
    region = msgspec.structs.replace(topology.regions[0], followers=(tier,))
    return msgspec.structs.replace(topology, regions=(region,))


@asynccontextmanager
async def started(folder: Path, **settings: object) -> AsyncIterator[tuple[FollowerServer, CacheServer]]:
    grpc, admin = free_ports(2)
    own = CacheServer(
        name="near-1", grpc=f"127.0.0.1:{grpc}", frames=f"unix:{folder / 'frames'}", admin=f"127.0.0.1:{admin}"
    )
    topology_file, schema_file = folder / "topology.json", folder / "schema.yaml"
    topology_file.write_text(dump_topology(topology_of(own)))
    schema_file.write_text("format: 1\nobjects: {user: {number: 1}}\n")
    given = FollowerSettings(
        name="near-1",
        topology_file=topology_file,
        schema_file=schema_file,
        cache_mb=1,
        **settings,  # type: ignore[arg-type]  # some of the settings
    )
    server = await FollowerServer(given, logger("test")).start()
    try:
        yield server, own
    finally:
        await server.close()


@pytest.mark.parametrize(("token", "expected"), [("", 1), ("secret", 0)])
async def test_an_access_document_without_credentials_is_noted(tmp_path: Path, token: str, expected: int) -> None:
    (tmp_path / "access.yaml").write_text(ACCESS)
    with capture_logs() as logs:
        async with started(tmp_path, token=token):
            pass
    assert sum(each["event"] == "access_without_credentials" for each in logs) == expected
