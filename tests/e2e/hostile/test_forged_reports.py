"""A watcher marks a server of another region only when a watcher there agrees. Nobody else can agree for it, and nobody
else is answered what a watcher sees."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest
import yaml

from loadtest.hostile.attacks import SECONDS, Grip
from tao.model.errors import TaoError
from tao.model.topology import CacheServer, Database, DatabaseServer, Region, Tier, Topology, WatcherProcess
from tao.runtime.admin_client import admin_get
from tao.serving.audit import AuditTrail
from tao.serving.status_port import StatusService
from tao.topology.document import dump_topology, parse_topology
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.settings import ServingSettings
from tao.wire.tls import TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.doorstep_rig import until_healthy
from tests.e2e.region_access import until
from tests.rigs.certificates import TestAuthority
from tests.rigs.ports import free_ports

pytestmark = [pytest.mark.e2e]

CLUSTER = "spiffe://example.org/tao/main"
WATCHER, LEADER = "west-watcher-1", "west-leader-1"
FORGED = pb.WatcherReport(region="west", verdicts={LEADER: "down"}, renewed_seconds_ago={"db": 1_000.0})
ASK = pb.Request(get_watcher_report=pb.GetWatcherReport())
TRIES = 3


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
async def running_watcher(folder: Path) -> AsyncIterator[Watcher]:
    frames, admin, other, unused = (f"127.0.0.1:{port}" for port in free_ports(4))
    authority = TestAuthority(folder / "certificates")

    def region(name: str, address: str) -> Region:
        def tier(kind: str) -> Tier:
            servers = (CacheServer(name=f"{name}-{kind}-{number}", grpc=unused, frames=unused) for number in (1, 2))
            return Tier(name=f"{kind}s", servers=tuple(servers))

        watcher = WatcherProcess(name=f"{name}-watcher-1", frames=address)
        return Region(name=name, leaders=tier("leader"), followers=(tier("follower"),), watchers=(watcher,))

    servers = {name: DatabaseServer(name=f"db-{name}", socket="/none") for name in ("east", "west")}
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


class Answerer:
    """Answers at the address of the west's watcher that the leader there is down."""

    def __init__(self, address: str, context: ssl.SSLContext) -> None:
        self.handshakes = 0
        context.sni_callback = self._count
        self._address = address
        self._server = FrameServer(
            StatusService("get_watcher_report", lambda: pb.Answer(watcher_report=FORGED), AuditTrail()),
            ServingSettings(),
            name=WATCHER,
            topology_version=lambda: 1,
            tls=context,
        )

    def _count(self, *_: object) -> None:
        self.handshakes += 1

    async def __aenter__(self) -> Self:
        await self._server.start(self._address)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.close()


async def test_a_report_of_somebody_else_marks_no_server_and_that_of_the_watcher_does(tmp_path: Path) -> None:
    async with running_watcher(tmp_path) as watcher:
        right_id = f"{CLUSTER}/west/watcher/{WATCHER}"
        elsewhere = TestAuthority(tmp_path / "elsewhere", "another authority")
        forgers = {
            "an application": watcher.issue("app", "spiffe://example.org/app/web"),
            "a leader": watcher.issue(LEADER, f"{CLUSTER}/west/leader/{LEADER}"),
            "another watcher": watcher.issue("other", f"{CLUSTER}/west/watcher/west-watcher-2"),
            "another authority": watcher.issue("forger", right_id, elsewhere),
        }

        for who, files in forgers.items():
            async with Answerer(watcher.other, files.server_context()) as forger:

                async def has_asked(asked: Answerer = forger) -> bool:
                    return asked.handshakes >= TRIES

                await until(has_asked, f"the watcher does not ask {who}")
                assert (await watcher.stats())["peers"] == {"west": False}, who
        assert not watcher.is_marked
        async with Answerer(watcher.other, watcher.issue(WATCHER, right_id).server_context()):

            async def is_marked() -> bool:
                return watcher.is_marked

            await until(is_marked, "the leader is not marked")


async def test_only_watchers_are_answered_and_strangers_keep_them_from_no_answer(tmp_path: Path) -> None:
    async with running_watcher(tmp_path) as watcher, Grip() as grip:
        await grip.open(300, watcher.itself.frames)
        await grip.open(300, watcher.admin)
        files = watcher.issue(WATCHER, f"{CLUSTER}/west/watcher/{WATCHER}")
        assert (await watcher.ask(files, WATCHER, "watcher")).watcher_report.region == "east"
        assert (await admin_get(watcher.admin, "/health", SECONDS))[0] == 200
        app = watcher.issue("app", "spiffe://example.org/app/web")
        foreign = watcher.issue("forger", f"{CLUSTER}/west/watcher/{WATCHER}", TestAuthority(tmp_path / "foreign", "x"))
        for wrong, name in ((app, "web"), (app, WATCHER), (foreign, WATCHER), (None, WATCHER)):
            with pytest.raises(TaoError):
                await watcher.ask(wrong, name, "watcher")
