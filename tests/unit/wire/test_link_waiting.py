"""Requests on a link whose server accepts the connection and then sends nothing."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest

from tao.model.errors import DeadlineExceeded, OutcomeUnknown, Overloaded, Unavailable
from tao.model.topology import CacheServer, ServerAddress
from tao.wire.frames_server import FrameServer
from tao.wire.identity import Credentials
from tao.wire.links import Link, Links, LinkSettings
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import session_pb2 as pb

ME = Credentials("test", "client")


@pytest.fixture
async def mute_address() -> AsyncIterator[str]:
    gone: list[asyncio.Event] = []

    async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone.append(asyncio.Event())
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone[-1].set()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    for each in gone:
        await each.wait()
    server.close()
    await server.wait_closed()


@pytest.fixture
async def link(mute_address: str) -> AsyncIterator[Link]:
    settings = LinkSettings(max_waiting=1, session=SessionSettings(connect_timeout_seconds=60.0))
    links = Links(settings, ME)
    yield links.to(CacheServer(name="mute", grpc="127.0.0.1:1", frames=mute_address))
    await links.close()


def anything() -> pb.Request:
    return pb.Request(read=pb.ReadBatch(obj_ids=[1]))


async def test_a_waiting_request_fails_at_its_own_deadline(link: Link) -> None:
    with pytest.raises(DeadlineExceeded):
        await link.ask(anything(), 0.03)


async def test_a_link_uses_the_address_for_its_own_region(mute_address: str) -> None:
    server = CacheServer(
        name="mute", grpc="127.0.0.1:1", frames="127.0.0.1:1", reached_from={"west": ServerAddress(grpc=mute_address)}
    )
    links = Links(LinkSettings(), ME, region="west")
    link = links.to(server)
    assert (link.server.grpc, link.server.frames) == (mute_address, "")
    assert links.to(server) is link
    await links.close()


async def test_requests_beyond_max_waiting_are_rejected(link: Link) -> None:
    waiting = asyncio.ensure_future(link.ask(anything(), 60.0))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await link.ask(anything(), 60.0)
    await link.close()
    with pytest.raises(Unavailable):
        await waiting


async def test_a_cancelled_request_frees_its_place_in_the_queue(link: Link) -> None:
    waiting = asyncio.ensure_future(link.ask(anything(), 60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(DeadlineExceeded):
        await link.ask(anything(), 0.03)


async def test_a_server_with_a_new_address_gets_a_new_link_and_a_removed_server_loses_its_link() -> None:
    links = Links(LinkSettings(), ME)
    before = links.to(CacheServer(name="a", grpc="127.0.0.1:1"))
    assert links.to(CacheServer(name="a", grpc="127.0.0.1:1", weight=2.0)) is before
    after = links.to(CacheServer(name="a", grpc="127.0.0.1:2"))
    assert after is not before
    with pytest.raises(Unavailable):
        await before.ask(anything(), 1.0)
    links.keep_only({})
    assert links.to(CacheServer(name="a", grpc="127.0.0.1:2")) is not after
    await links.close()


class Slow:
    """A server that holds its requests back until the test lets it answer."""

    def __init__(self) -> None:
        self.asked: list[Reply] = []
        self.has_been_asked = asyncio.Event()

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.asked.append(reply)
        self.has_been_asked.set()

    def answer(self) -> None:
        for reply in self.asked:
            reply.send(pb.Answer(write=pb.WriteAnswer()))


@pytest.mark.parametrize("closed", [False, True])
async def test_a_write_in_flight_to_a_former_address_is_answered_unless_all_links_are_closed(*, closed: bool) -> None:
    slow = Slow()
    serving = FrameServer(slow, ServingSettings(), name="a", topology_version=lambda: 0)
    server = CacheServer(name="a", grpc="127.0.0.1:1", frames=await serving.start("127.0.0.1:0"))
    links = Links(LinkSettings(), ME)
    writing = asyncio.ensure_future(links.to(server).ask(pb.Request(write=pb.WriteBatch()), 60.0))
    await slow.has_been_asked.wait()
    links.to(msgspec.structs.replace(server, grpc="127.0.0.1:2"))
    await asyncio.sleep(0)
    if closed:
        await links.close()
        with pytest.raises(OutcomeUnknown):
            await writing
    else:
        slow.answer()
        assert (await writing).WhichOneof("body") == "write"
        await links.close()
    await serving.close()


async def test_the_frames_transport_fails_for_a_server_without_a_frames_address() -> None:
    links = Links(LinkSettings(transport="frames"), ME)
    with pytest.raises(Unavailable, match="has no frames address"):
        await links.to(CacheServer(name="a", grpc="127.0.0.1:1")).ask(anything(), 1.0)
    await links.close()
