"""A watcher believes a tailer only where the tailer has shown who it is: no page and no other server stands for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tao.model.errors import InvalidArgument, TopologyError, Unauthorized
from tao.model.topology import Region, TailerProcess, Tier, Topology
from tao.observability.logs import logger
from tao.routing.failure_detector import DetectorSettings
from tao.serving.audit import AuditTrail
from tao.serving.status_port import StatusPort, StatusService
from tao.tailer.settings import TailerSettings
from tao.topology.document import dump_topology, parse_topology
from tao.topology.sections import sections_of
from tao.watcher.marks import ServerVerdict
from tao.watcher.probes import ServerProbes, servers_at_frames
from tao.watcher.settings import ProbeSettings
from tao.wire.identity import Credentials
from tao.wire.links import Links, LinkSettings
from tao.wire.tls import TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.certificates import TestAuthority
from tests.rigs.links_rig import MemoryReply
from tests.rigs.pacing import until
from tests.rigs.ports import free_ports

CLUSTER = "spiffe://example.org/tao/main"
PROBE = pb.Request(read=pb.ReadBatch())
SERVICE = StatusService("probe", lambda: pb.Answer(read=pb.ReadAnswer()), AuditTrail())
# Failures are as quick as a refusal; what no tailer answers must not be waited for.
DETECTOR = DetectorSettings(failures_until_down=2, first_probe_seconds=0.01, max_probe_seconds=0.01)


def files(authority: TestAuthority, role: str, name: str) -> TlsFiles:
    return authority.issue(name, f"{CLUSTER}/east/{role}/{name}", CLUSTER)


def topology_of(address: str) -> Topology:
    tailer = TailerProcess(name="tailer-1", database="db", admin=address, frames=address)
    region = Region(name="east", leaders=Tier(name="leaders", servers=()), followers=(), tailers=(tailer,))
    return Topology(version=1, shards=1, regions=(region,), databases=())


@asynccontextmanager
async def listening(tls: TlsFiles, topology: Topology | None = None) -> AsyncIterator[str]:
    """The port of a tailer with these certificates."""
    settings = TailerSettings(
        name="tailer-1",
        region="east",
        database_server="db-east",
        topology_file=Path("topology.json"),
        schema_file=Path("schema.yaml"),
        state_folder=Path("state"),
        password="",
        tls=tls,
    )
    topology = topology or topology_of(f"127.0.0.1:{free_ports(1)[0]}")
    (server,) = servers_at_frames(topology.regions[0].tailers)
    port = StatusPort(settings, logger("test"))
    await port.load(server, lambda *_: True)
    await port.start(SERVICE, lambda: 1, lambda *_: None)
    try:
        yield server.frames
    finally:
        await port.close()


@asynccontextmanager
async def forged_page() -> AsyncIterator[str]:
    """An address where somebody answers every request with the page of a healthy server."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def verdict(authority: TestAuthority, address: str, shown: TlsFiles | None = None) -> ServerVerdict:
    """Return what a watcher finds at the address of the tailer, when it is certain."""
    topology = topology_of(address)
    shown = shown or files(authority, "watcher", "watcher-1")
    links = Links(LinkSettings(detector=DETECTOR), Credentials("watcher-1", "watcher"), shown, region="east")
    links.keep_only(topology.server_places)
    probes = ServerProbes(links, lambda: topology, ProbeSettings(interval_seconds=0.01, timeout_seconds=20.0))
    running = asyncio.create_task(probes.run())
    await until(lambda: probes.verdicts.get("tailer-1", ServerVerdict.UNSURE) is not ServerVerdict.UNSURE)
    found = probes.verdicts["tailer-1"]
    running.cancel()
    await links.close()
    return found


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


async def test_a_tailer_is_up_when_it_answers_and_has_shown_its_certificate(authority: TestAuthority) -> None:
    async with listening(files(authority, "tailer", "tailer-1")) as address:
        assert await verdict(authority, address) is ServerVerdict.UP


async def test_another_server_at_its_address_does_not_make_it_up(authority: TestAuthority) -> None:
    for role, name in (("follower", "follower-1"), ("tailer", "tailer-2")):
        async with listening(files(authority, role, name)) as address:
            assert await verdict(authority, address) is ServerVerdict.DOWN


async def test_a_forged_page_at_its_address_does_not_make_it_up(authority: TestAuthority) -> None:
    async with forged_page() as address:
        assert await verdict(authority, address) is ServerVerdict.REFUSED


async def test_a_tailer_that_refuses_the_watcher_or_is_refused_is_not_judged(
    authority: TestAuthority, tmp_path: Path
) -> None:
    foreign = TestAuthority(tmp_path / "foreign", "another authority")
    own = files(authority, "watcher", "watcher-1")
    refused = {
        "a certificate of another authority": replace(
            files(foreign, "watcher", "watcher-1"), authorities=authority.file
        ),
        "no certificate": TlsFiles(authorities=authority.file, cluster=CLUSTER),
        "the id of another name": files(authority, "watcher", "watcher-2"),
        "other authorities": replace(own, authorities=foreign.file),
        "another cluster": replace(own, cluster="spiffe://example.org/tao/other"),
    }
    async with listening(files(authority, "tailer", "tailer-1")) as address:
        for why, shown in refused.items():
            assert await verdict(authority, address, shown) is ServerVerdict.REFUSED, why


async def test_a_tailer_that_has_refused_and_does_not_answer_any_more_is_down(authority: TestAuthority) -> None:
    topology = topology_of(f"127.0.0.1:{free_ports(1)[0]}")
    shown = files(authority, "watcher", "watcher-2")
    links = Links(LinkSettings(detector=DETECTOR), Credentials("watcher-1", "watcher"), shown, region="east")
    links.keep_only(topology.server_places)
    probes = ServerProbes(links, lambda: topology, ProbeSettings(interval_seconds=0.01, timeout_seconds=20.0))
    running = asyncio.create_task(probes.run())
    async with listening(files(authority, "tailer", "tailer-1"), topology):
        await until(lambda: probes.verdicts.get("tailer-1") is ServerVerdict.REFUSED)
        assert "watcher-2" in probes.refusals["tailer-1"]
    await until(lambda: probes.verdicts["tailer-1"] is ServerVerdict.DOWN)
    assert probes.refusals == {}
    running.cancel()
    await links.close()


def test_a_tailer_without_an_address_is_not_probed_and_its_document_suits_earlier_programs() -> None:
    assert servers_at_frames(topology_of("").regions[0].tailers) == []
    assert "frames" not in json.loads(dump_topology(topology_of("")))["regions"][0]["tailers"][0]
    assert "frames" not in json.loads(sections_of(topology_of(""))["tailers/tailer-1"])
    assert json.loads(sections_of(topology_of("h:1"))["tailers/tailer-1"])["frames"] == "h:1"
    with pytest.raises(TopologyError, match=r"east/tailer-1.frames"):
        parse_topology(dump_topology(topology_of("nowhere")).encode(), "topology.json")


def test_a_tailer_answers_watchers_and_operators_and_nothing_but_probes() -> None:
    for role in ("watcher", "operator"):
        answers: list[pb.Answer] = []
        SERVICE.handle(PROBE, MemoryReply(answers.append, peer=role))
        assert [each.HasField("read") for each in answers] == [True]
        with pytest.raises(InvalidArgument):
            SERVICE.handle(pb.Request(read=pb.ReadBatch(obj_ids=[1])), MemoryReply(answers.append, peer=role))
    for role in ("client", "follower-1", "leader-1", "tailer"):
        with pytest.raises(Unauthorized):
            SERVICE.handle(PROBE, MemoryReply(lambda _: None, peer=role))
