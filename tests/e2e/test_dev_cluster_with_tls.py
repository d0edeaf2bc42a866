"""`tao dev up --tls`: every process has a certificate with its id, and who has none is served nothing."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tao.client import ClientSettings, Credentials, TlsFiles, Unauthorized, Unavailable, connect
from tao.devcluster.certificates import APPLICATION, OPERATOR, tls_files
from tao.devcluster.inspection import stop_cluster
from tao.devcluster.state_folder import StateFolder
from tao.model.topology import CacheServer
from tao.runtime.admin_client import admin_get
from tao.topology.document import parse_topology
from tao.wire.links import Links, LinkSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.forked_programs import run_tao
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = [pytest.mark.database, pytest.mark.e2e, pytest.mark.unhurried]

SHAPE = ["--tiers", "1", "--followers", "2", "--leaders", "2", "--shards", "4", "--durability", "relaxed"]


async def tao(folder: Path, *arguments: str) -> str:
    ended = await run_tao(*arguments, folder=folder.parent)
    assert ended.status == 0, (arguments, ended)
    return ended.output


@pytest.fixture
async def folder(tmp_path: Path) -> AsyncIterator[StateFolder]:
    path = tmp_path / "s"
    try:
        out = await tao(path, "dev", "up", "--tls", "--detach", "--state-dir", str(path), *SHAPE)
        assert f"TLS       {path / 'certificates'}" in out
        yield StateFolder(path)
    finally:
        if StateFolder(path).read() is not None:
            await stop_cluster(path, lambda _: None)


async def test_commands_and_applications_work_by_certificates_and_nobody_else_does(folder: StateFolder) -> None:
    async def command(*arguments: str) -> str:
        return await tao(folder.path, *arguments, "--state-dir", str(folder.path))

    alice = json.loads(await command("add", "object", "user", "--json"))["id"]
    assert str(alice) in await command("get", str(alice))
    await command("verify")
    await command("status")
    await command("history", str(alice))
    await command("invalidate", "--shard", "0", "--yes")
    await command("dev", "restart", "leader-1")

    topology = parse_topology(folder.topology.read_bytes(), "topology")
    (region,) = topology.regions
    leader, follower = region.leaders.servers[0], region.followers[0].servers[0]
    app, operator = tls_files(folder, APPLICATION), tls_files(folder, OPERATOR)
    without_certificate = TlsFiles(authorities=app.authorities)
    for target in (str(folder.topology), follower.grpc, f"frames:{follower.frames}"):
        async with connect(target, settings=ClientSettings(tls=app)) as graph:
            assert await graph.obj_get(alice) is not None
        for wrong in (None, without_certificate):
            with pytest.raises(Unavailable):
                async with connect(target, settings=ClientSettings(tls=wrong)):
                    pass

    async def ask(files: TlsFiles, role: str, server: CacheServer = leader) -> pb.Answer:
        links = Links(LinkSettings(), Credentials(APPLICATION, role), files)
        try:
            return await links.to(server).ask(pb.Request(inspect=pb.Inspect(obj_ids=[alice])), 10.0)
        finally:
            await links.close()

    for role in ("client", "operator", "follower"):
        with pytest.raises(Unauthorized):
            await ask(app, role)
    assert (await ask(operator, "operator")).HasField("inspection")
    with pytest.raises(Unauthorized, match="not of leader-9"):
        await ask(operator, "operator", msgspec.structs.replace(leader, name="leader-9"))


async def test_watchers_of_two_regions_know_each_other_by_their_certificates(tmp_path: Path) -> None:
    path = tmp_path / "s"
    small = ["--regions", "2", "--tiers", "1", "--followers", "1", "--leaders", "1", "--shards", "4"]
    try:
        await tao(path, "dev", "up", "--tls", "--detach", "--state-dir", str(path), "--durability", "relaxed", *small)
        folder = StateFolder(path)
        topology = parse_topology(folder.topology.read_bytes(), "topology")
        east, west = (region.watchers[0] for region in topology.regions)
        async with asyncio.timeout(PATIENT_SECONDS):
            for watcher, other in ((east, "west"), (west, "east")):
                while not json.loads((await admin_get(watcher.admin, "/stats"))[1])["peers"][other]:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        server = CacheServer(name=west.name, grpc="", frames=west.frames)
        for name, role in ((APPLICATION, "client"), ("east-leader-1", "leader")):
            links = Links(LinkSettings(), Credentials(name, role), tls_files(folder, name))
            with pytest.raises((Unauthorized, Unavailable), match=r"watchers|lists no leader"):
                await links.to(server).ask(pb.Request(get_watcher_report=pb.GetWatcherReport()), PATIENT_SECONDS)
            await links.close()
    finally:
        if StateFolder(path).read() is not None:
            await stop_cluster(path, lambda _: None)


async def test_both_ports_speak_tls_1_3_only(folder: StateFolder) -> None:
    topology = parse_topology(folder.topology.read_bytes(), "topology")
    files = tls_files(folder, APPLICATION)
    for server in (topology.regions[0].leaders.servers[0], topology.regions[0].followers[0].servers[0]):
        for address in (server.grpc, server.frames):
            for version, accepted in ((ssl.TLSVersion.TLSv1_3, True), (ssl.TLSVersion.TLSv1_2, False)):
                context = replace(files).client_context()
                context.set_alpn_protocols(["h2"])
                context.minimum_version = ssl.TLSVersion.TLSv1_2
                context.maximum_version = version
                context.minimum_version = version
                host, port = address.split(":")
                try:
                    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
                    writer.transport.abort()
                    shaken = True
                except (ssl.SSLError, ConnectionError):
                    shaken = False
                assert shaken is accepted, (address, version)
