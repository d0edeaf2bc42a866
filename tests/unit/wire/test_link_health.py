"""A link whose server refuses connections, hangs or recovers: failing fast, probing, and using it again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from tao.model.errors import DeadlineExceeded, Unavailable
from tao.model.topology import CacheServer
from tao.routing.failure_detector import DetectorSettings, Health
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials
from tao.wire.links import Link, Links, LinkSettings
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import PATIENT_SECONDS, until

ME = Credentials("test", "client")
QUICK = LinkSettings(
    telling_timeout_seconds=0.01, detector=DetectorSettings(first_probe_seconds=0.005, max_probe_seconds=0.02)
)


class Server:
    """Answers reads with empty results, or hangs: on every request, or on all but probes."""

    def __init__(self) -> None:
        self.mute = self.slow = False
        self.seen: list[pb.Request] = []

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.seen.append(request)
        if not (self.mute or (self.slow and request.read.obj_ids)):
            reply.send(pb.Answer(read=pb.ReadAnswer()))

    @property
    def real(self) -> int:
        """Requests other than probes."""
        return sum(bool(each.read.obj_ids) for each in self.seen)


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    links = Links(QUICK, ME)
    yield links
    await links.close()


def anything() -> pb.Request:
    return pb.Request(read=pb.ReadBatch(obj_ids=[1]))


def at(address: str) -> CacheServer:
    return CacheServer(name="a", grpc="127.0.0.1:1", frames=address)


async def until_down(link: Link) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not link.is_down:
            with suppress(Unavailable, DeadlineExceeded):
                await link.ask(anything(), 0.03)
            await asyncio.sleep(0.001)


async def until_answered(link: Link) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while True:
            with suppress(Unavailable):
                await link.ask(anything(), PATIENT_SECONDS)
                return
            await asyncio.sleep(0.001)


async def test_a_server_that_refuses_is_down_and_requests_to_it_fail_fast(links: Links) -> None:
    link = links.to(at("127.0.0.1:1"))
    assert not links.is_down(link.server)
    with pytest.raises(Unavailable):
        await link.ask(anything(), PATIENT_SECONDS)
    assert link.is_impaired, "one refusal is enough to prefer another"
    await until_down(link)
    assert links.is_down(link.server)
    with pytest.raises(Unavailable, match=r"is (down|probing)"):
        await link.ask(anything(), PATIENT_SECONDS)
    figures = links.figures()["a"]
    assert (figures["up"], figures["transitions"]) == (False, 1)
    assert "cannot connect" in str(figures["reason"])


async def test_a_server_that_hangs_is_down_until_enough_probes_succeed(links: Links) -> None:
    server = Server()
    serving = FrameServer(server, ServingSettings(), name="a", topology_version=lambda: 0)
    address = await serving.start("127.0.0.1:0")
    link = links.to(at(address))
    await link.ask(anything(), PATIENT_SECONDS)
    server.mute = True
    await until_down(link)
    asked = server.real
    with pytest.raises(Unavailable):
        await link.ask(anything(), PATIENT_SECONDS)
    assert server.real == asked, "it is not asked while it is down"
    server.mute = False
    await until(lambda: not link.is_impaired)
    assert server.real == asked
    assert links.states()["a"].health is Health.UP
    await link.ask(anything(), PATIENT_SECONDS)
    await serving.close()


@asynccontextmanager
async def hasty(telling_seconds: float) -> AsyncIterator[tuple[Server, Link]]:
    """A server and a link to it whose requests have shorter timeouts than `telling_timeout_seconds`."""
    server = Server()
    serving = FrameServer(server, ServingSettings(), name="a", topology_version=lambda: 0)
    detector = DetectorSettings(first_probe_seconds=0.005, probe_timeout_seconds=600.0)
    links = Links(LinkSettings(telling_timeout_seconds=telling_seconds, detector=detector), ME)
    link = links.to(at(await serving.start("127.0.0.1:0")))
    await link.ask(anything(), PATIENT_SECONDS)
    yield server, link
    await links.close()
    await serving.close()


async def test_a_server_that_hangs_goes_down_for_requests_with_short_timeouts_too() -> None:
    async with hasty(telling_seconds=0.3) as (server, link):
        server.mute = True
        await until_down(link)


async def test_short_timeouts_do_not_take_down_a_server_that_answers_probes() -> None:
    async with hasty(telling_seconds=600.0) as (server, link):
        server.slow = True
        for _ in range(20):
            with pytest.raises(DeadlineExceeded):
                await link.ask(anything(), 0.01)
        await until(lambda: len(server.seen) > server.real)
        assert not link.is_impaired
        server.slow = False
        await link.ask(anything(), PATIENT_SECONDS)


async def test_a_removed_link_stops_probing(links: Links) -> None:
    link = links.to(at("127.0.0.1:1"))
    await until_down(link)
    links.keep_only({})
    assert links.states() == {}
    await links.close()
