"""A watcher process of the east that knows peers by their certificates, in a cluster of two regions of which it is
all that runs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.hostile.attacks import SECONDS
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology, WatcherProcess
from tao.runtime.admin_client import admin_get
from tao.topology.document import dump_topology, parse_topology
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.tls import TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.doorstep_rig import until_healthy
from tests.rigs.certificates import TestAuthority
from tests.rigs.ports import free_ports

CLUSTER = "spiffe://example.org/tao/main"
WATCHER, LEADER = "west-watcher-1", "west-leader-1"
ASK = pb.Request(get_watcher_report=pb.GetWatcherReport())


@dataclass
class Watcher:
    """A watcher of the east, and what it knows of the west: a leader that does not answer, and a watcher's address."""

    folder: Path
    authority: TestAuthority
    itself: CacheServer
    admin: str
    other: str

    def issue(self, name: str, uri: str, authority: TestAuthority | None = None) -> TlsFiles:
        return (authority or self.authority).issue(name, uri, CLUSTER)

    async def stats(self) -> dict[str, Any]:
        return dict(json.loads((await admin_get(self.admin, "/stats", SECONDS))[1]))

    @property
    def is_marked(self) -> bool:
        topology = parse_topology((self.folder / "topology.json").read_bytes(), "topology")
        return any(
            server.down for region in topology.regions for server in region.leaders.servers if server.name == LEADER
        )

    async def ask(self, files: TlsFiles | None, name: str, role: str) -> pb.Answer:
        links = Links(LinkSettings(), Credentials(name, role), files)
        try:
            return await links.to(self.itself).ask(ASK, SECONDS)
        finally:
            await links.close()


@asynccontextmanager
async def running_watcher(
    folder: Path, authority: TestAuthority | None = None, addresses: Mapping[str, str] | None = None, **further: object
) -> AsyncIterator[Watcher]:
    """Run the watcher. ``addresses``: of servers by name; nothing listens at the others. ``further`` settings of it."""
    frames, admin, other, unused = (f"127.0.0.1:{port}" for port in free_ports(4))
    authority, known = authority or TestAuthority(folder / "certificates"), dict(addresses or {})
    other = known.get(WATCHER, other)

    def region(name: str, address: str) -> Region:
        def tier(kind: str) -> Tier:
            names = (f"{name}-{kind}-{number}" for number in (1, 2))
            servers = (CacheServer(name=each, grpc=unused, frames=known.get(each, unused)) for each in names)
            return Tier(name=f"{kind}s", servers=tuple(servers))

        watcher = WatcherProcess(name=f"{name}-watcher-1", frames=address)
        return Region(name=name, leaders=tier("leader"), followers=(tier("follower"),), watchers=(watcher,))

    servers = {name: _database(f"db-{name}", known) for name in ("east", "west")}
    database = Database(name="db", master_region="west", servers=servers, shards=((0, 0),))
    topology = Topology(
        version=1, shards=1, regions=(region("east", frames), region("west", other)), databases=(database,)
    )
    (folder / "topology.json").write_text(dump_topology(topology))
    files = authority.issue("east-watcher-1", f"{CLUSTER}/east/watcher/east-watcher-1")
    settings = {
        "name": "east-watcher-1",
        "region": "east",
        "topology_file": "topology.json",
        "administrator_user": "tao_watcher",
        "administrator_password": "x",
        "replicator_password": "x",
        "admin": admin,
        "auto_promote": False,
        "tls": {
            "certificate": str(files.certificate),
            "private_key": str(files.private_key),
            "authorities": str(files.authorities),
            "cluster": CLUSTER,
        },
        **further,
    }
    (folder / "watcher.yaml").write_text(yaml.safe_dump(settings))
    with (folder / "watcher.log").open("w") as out:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "tao.cli", "watcher", "--settings", "watcher.yaml"),
            cwd=folder,
            stdout=out,
            stderr=out,
            env={**os.environ},
        )
        try:
            await until_healthy(admin)
            yield Watcher(folder, authority, CacheServer(name="east-watcher-1", grpc="", frames=frames), admin, other)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


def _database(name: str, addresses: Mapping[str, str]) -> DatabaseServer:
    if name not in addresses:
        return DatabaseServer(name=name, socket="/none")
    host, _, port = addresses[name].rpartition(":")
    return DatabaseServer(name=name, host=host, port=int(port))
