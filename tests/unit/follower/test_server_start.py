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
from tao.model.errors import Unavailable
from tao.model.topology import CacheServer, Tier, Topology
from tao.observability.logs import logger
from tao.runtime.token_file import dump_tokens, entry_for
from tao.topology.document import dump_topology
from tao.wire.frames_client import connect_frames
from tao.wire.identity import Credentials
from tao.wire.settings import SessionSettings
from tests.rigs.leader_rig import make_topology
from tests.rigs.pacing import until
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


@pytest.mark.parametrize(("asks", "expected"), [(False, 1), (True, 0)])
async def test_an_access_document_without_credentials_is_noted(tmp_path: Path, asks: bool, expected: int) -> None:
    (tmp_path / "access.yaml").write_text(ACCESS)
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text("tokens: []")
    with capture_logs() as logs:
        async with started(tmp_path, accepted_tokens_file=tokens if asks else None):
            pass
    assert sum(each["event"] == "access_without_credentials" for each in logs) == expected


async def test_the_connection_of_a_server_ends_when_the_topology_lists_it_no_more(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.yaml"
    tokens.write_text(dump_tokens((entry_for("of leaders", "", "leader", None, []),)))
    async with started(tmp_path, accepted_tokens_file=tokens) as (server, own):
        kept, removed = [
            await connect_frames(own.frames, SessionSettings(), Credentials(name, "leader", "of leaders"))
            for name in ("leader-1", "leader-2")
        ]
        (tmp_path / "topology.json").write_text(dump_topology(topology_of(own, 2, ("leader-1",))))
        await server.reload()
        await until(lambda: not removed.is_open)
        with pytest.raises(Unavailable, match="lists no leader 'leader-2'"):
            await connect_frames(own.frames, SessionSettings(), Credentials("leader-2", "leader", "of leaders"))
        assert kept.is_open
        await kept.close()
