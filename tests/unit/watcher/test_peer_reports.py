"""Watchers report to each other over frames: to watchers and operators alone, and only for their own region."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from tao.model.errors import InvalidArgument, SettingsError, Unauthorized
from tao.model.topology import Region, Tier, Topology, WatcherProcess
from tao.observability.logs import logger
from tao.serving.audit import AuditTrail
from tao.serving.requests import Listeners
from tao.serving.status_port import StatusService
from tao.topology.document import dump_topology
from tao.watcher.marks import ServerVerdict, WatcherReport
from tao.watcher.probes import PeerReports
from tao.watcher.server import WatcherServer
from tao.watcher.settings import ProbeSettings, WatcherSettings
from tao.wire.frames_server import FrameServer
from tao.wire.identity import (
    AcceptedCredentials,
    AcceptedToken,
    Credentials,
    PeerAuthenticator,
    digest_of,
)
from tao.wire.links import Links, LinkSettings
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.audit_rig import audit_rig
from tests.rigs.links_rig import MemoryReply
from tests.unit.client.fakes import make_topology

PROBES = ProbeSettings(timeout_seconds=20.0)
REPORT = pb.WatcherReport(
    region="west",
    verdicts={"west-leader-1": "up", "west-leader-2": "down", "west-leader-3": "half dead", "west-leader-4": "refused"},
    renewed_seconds_ago={"db": 2.5},
)
ACCEPTED = AcceptedCredentials(
    tuple(AcceptedToken(role, role, digest_of(role), caller="x") for role in ("client", "watcher"))
)


def report_service(audit: AuditTrail | None = None) -> StatusService:
    return StatusService("get_watcher_report", lambda: pb.Answer(watcher_report=REPORT), audit or AuditTrail())


@pytest.fixture
async def watcher() -> AsyncIterator[str]:
    """The address of a watcher of region west that knows peers by their tokens."""
    settings = ServingSettings(authenticator=PeerAuthenticator(ACCEPTED))
    server = FrameServer(report_service(), settings, name="x", topology_version=lambda: 1)
    yield await server.start("127.0.0.1:0")
    await server.close()


def topology_of(**watchers: tuple[str, ...]) -> Topology:
    """Regions and the addresses of their watchers; an empty address is one that is not listed."""
    regions = tuple(
        Region(
            name=region,
            leaders=Tier(name="leaders", servers=()),
            followers=(),
            watchers=tuple(
                WatcherProcess(name=f"{region}-watcher-{number}", frames=address)
                for number, address in enumerate(addresses)
            ),
        )
        for region, addresses in watchers.items()
    )
    return Topology(version=1, shards=1, regions=regions, databases=())


async def reports(topology: Topology, token: str = "watcher") -> tuple[dict[str, WatcherReport | None], float]:
    """Return the first reports of one round, and when the watcher of the west renewed the lease."""
    links = Links(LinkSettings(), Credentials("x", "watcher", token))
    peers = PeerReports(links, lambda: topology, "east", PROBES)
    assert set(peers.reports.values()) <= {None}
    await peers.look()
    ago = await peers.renewed_seconds_ago("west", "db")
    await links.close()
    return peers.reports, ago


async def test_a_watcher_s_report_is_that_of_its_region(watcher: str) -> None:
    found, ago = await reports(topology_of(east=("127.0.0.1:1",), west=(watcher,), north=()))
    verdicts = {
        "west-leader-1": ServerVerdict.UP,
        "west-leader-2": ServerVerdict.DOWN,
        "west-leader-4": ServerVerdict.REFUSED,
    }
    assert found == {"west": WatcherReport("west", verdicts)}
    assert ago == 2.5


async def test_a_server_is_silent_in_its_region_only_if_a_watcher_there_says_so(watcher: str) -> None:
    topology = topology_of(west=(watcher,), north=("127.0.0.1:1",))
    links = Links(LinkSettings(), Credentials("x", "watcher", "watcher"))
    peers = PeerReports(links, lambda: topology, "east", PROBES)
    await peers.look()
    found = [peers.says_silent("west", f"west-leader-{number}") for number in (1, 2, 4, 9)]
    assert found == [False, True, False, False], "one refuses the watcher; the last one has not been asked yet"
    assert not peers.says_silent("north", "north-db"), "the region is cut off"
    await links.close()


@pytest.mark.parametrize("addresses", [("",), ("127.0.0.1:1",)])
async def test_a_watcher_that_cannot_be_asked_is_silent_and_may_have_renewed_just_now(
    addresses: tuple[str, ...],
) -> None:
    assert await reports(topology_of(west=addresses)) == ({"west": None}, 0.0)


async def test_a_watcher_that_refuses_this_one_is_there_and_one_that_is_silent_may_be_lost(watcher: str) -> None:
    topology = topology_of(east=(watcher,), west=("127.0.0.1:1", watcher), north=("127.0.0.1:1",))
    for token, refuses in (("wrong", True), ("watcher", False)):
        links = Links(LinkSettings(), Credentials("x", "watcher", token))
        peers = PeerReports(links, lambda: topology, "east", PROBES)
        await peers.look()
        assert [peers.refuse(region) for region in ("west", "north", "east")] == [refuses, False, False]
        assert peers.all_refuse is refuses
        refusals = {"east-watcher-0", "west-watcher-1"} if refuses else set()
        assert peers.refusals.keys() == refusals
        assert all("token is missing or wrong" in each for each in peers.refusals.values())
        await links.close()


async def test_a_watcher_to_which_one_region_reports_is_not_at_fault_where_another_one_refuses_it(
    watcher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = Links(LinkSettings(), Credentials("x", "watcher", "watcher"))
    peers = PeerReports(links, lambda: topology_of(west=(watcher,), north=("127.0.0.1:1",)), "east", PROBES)
    monkeypatch.setattr(links, "refusal_at", {"north-watcher-0": "token is missing or wrong"}.get)
    before_any_report = peers.all_refuse
    await peers.look()
    assert (before_any_report, peers.refuse("north"), peers.all_refuse) == (True, True, False)
    await links.close()


async def test_one_of_two_watchers_is_enough_for_a_report_but_the_other_may_have_renewed(watcher: str) -> None:
    found, ago = await reports(topology_of(west=("127.0.0.1:1", watcher)))
    assert found["west"] is not None
    assert ago == 0.0


@pytest.mark.parametrize(("others", "expected"), [((), math.inf), (("",), 0.0), (("127.0.0.1:1",), 0.0)])
async def test_the_other_watchers_of_the_own_region_are_asked_for_renewals_too(
    others: tuple[str, ...], expected: float
) -> None:
    links = Links(LinkSettings(), Credentials("x", "watcher", "watcher"))
    topology = topology_of(east=("127.0.0.1:9", *others))
    peers = PeerReports(links, lambda: topology, "east", PROBES, "east-watcher-0")
    assert await peers.renewed_seconds_ago("east", "db") == expected
    await links.close()


async def test_another_watcher_of_the_region_says_when_it_renewed(watcher: str) -> None:
    links = Links(LinkSettings(), Credentials("x", "watcher", "watcher"))
    topology = topology_of(west=("127.0.0.1:9", watcher))
    peers = PeerReports(links, lambda: topology, "west", PROBES, "west-watcher-0")
    assert await peers.renewed_seconds_ago("west", "db") == 2.5
    await peers.look()
    assert peers.says_up("west", "west-leader-1"), "so it sees for its region too"
    assert not peers.says_up("west", "west-leader-2")
    assert peers.reports == {}, "which are those of other regions"
    await links.close()


async def test_a_report_about_another_region_is_none(watcher: str) -> None:
    links = Links(LinkSettings(), Credentials("x", "watcher", "watcher"))
    peers = PeerReports(links, lambda: topology_of(north=(watcher,)), "east", PROBES)
    await peers.look()
    assert peers.reports == {"north": None}
    await links.close()


async def test_an_application_gets_no_report(watcher: str) -> None:
    assert await reports(topology_of(west=(watcher,)), token="client") == ({"west": None}, 0.0)
    for role in ("client", "follower", "leader"):
        with pytest.raises(Unauthorized):
            report_service().handle(
                pb.Request(get_watcher_report=pb.GetWatcherReport()), MemoryReply(lambda _: None, peer=role)
            )
    with pytest.raises(InvalidArgument, match="serves no 'probe'"):
        report_service().handle(pb.Request(read=pb.ReadBatch()), MemoryReply(lambda _: None))


async def test_who_was_denied_a_report_is_in_the_audit_log(tmp_path: Path) -> None:
    with audit_rig(tmp_path) as audit:
        service = report_service(audit.trail)
        with pytest.raises(Unauthorized):
            service.handle(
                pb.Request(get_watcher_report=pb.GetWatcherReport()), MemoryReply(lambda _: None, peer="leader")
            )
        ((_, action, outcome),) = await audit.shown()
        assert (action, outcome) == ("get_watcher_report", 2)


@pytest.mark.parametrize(("insecure", "tokens"), [(False, True), (False, False), (True, False)])
async def test_a_watcher_that_others_reach_needs_tls_and_credentials_unless_it_is_said_to_be_insecure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, insecure: bool, tokens: bool
) -> None:
    topology = make_topology()
    watched = msgspec.structs.replace(
        topology.regions[0], watchers=(WatcherProcess(name="watcher-1", frames="tao.example.org:7001"),)
    )
    path, accepted = tmp_path / "topology.json", tmp_path / "tokens.yaml"
    path.write_text(dump_topology(msgspec.structs.replace(topology, regions=(watched, *topology.regions[1:]))))
    accepted.write_text("tokens: []")
    settings = WatcherSettings(
        name="watcher-1",
        region=watched.name,
        topology_file=path,
        administrator_user="tao_admin",
        administrator_password="a",
        replicator_password="b",
        accepted_tokens_file=accepted if tokens else None,
        insecure=insecure,
    )

    async def start(self: Listeners) -> None:
        raise OSError("it would listen")

    monkeypatch.setattr(Listeners, "start", start)
    server = WatcherServer(settings, logger("test"))
    expected = "it would listen" if insecure else r"watcher-1 would serve at tao.example.org:7001.* without TLS"
    with pytest.raises(OSError if insecure else SettingsError, match=expected) as raised:
        await server.start()
    assert ("and credentials" in str(raised.value)) is not (tokens or insecure)
    if insecure:
        await server._admin.close()


@pytest.mark.parametrize(
    ("region", "name", "is_listed"),
    [
        ("east", "east-watcher-0", True),
        ("east", "east-watcher-1", False),
        ("west", "east-watcher-0", False),
        ("north", "east-watcher-0", False),
    ],
)
def test_a_watcher_is_listed_where_the_others_look_for_it(region: str, name: str, is_listed: bool) -> None:
    topology = topology_of(east=("",), west=("",))
    links = Links(LinkSettings(), Credentials("watcher", "watcher"))
    assert PeerReports(links, lambda: topology, region, PROBES, name).is_listed is is_listed
