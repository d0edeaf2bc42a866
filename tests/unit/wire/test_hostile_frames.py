"""Whatever bytes arrive, the frame server survives, says PROTOCOL_ERROR or nothing, and serves the others."""

import asyncio
import random
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from tao.model.errors import Overloaded, TooManyConnections
from tao.wire import frames_server, framing
from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.framing import FrameDecoder, frame
from tao.wire.identity import CLIENT, AcceptedCredentials, AcceptedToken, Credentials, PeerAuthenticator
from tao.wire.session import Reply, Session
from tao.wire.settings import DoorstepSettings, ServingSettings, SessionSettings
from tao.wire.tls import ServerCheck
from tao.wire.v1 import frames_pb2
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.certificates import TestAuthority
from tests.rigs.garbage import garbage_types
from tests.rigs.pacing import until

HELLO = frame(framing.HELLO, frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION).SerializeToString())
REQUEST = pb.Request(number=1, deadline_ms=1000, read=pb.ReadBatch(obj_ids=[1, 2, 3])).SerializeToString()
SETTINGS = ServingSettings(
    max_message_bytes=10_000, doorstep=DoorstepSettings(greeting_timeout_seconds=0.2), sweep_interval_seconds=0.05
)


class Echo:
    def handle(self, request: pb.Request, reply: Reply) -> None:
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"v"] * len(request.read.obj_ids))))


@pytest.fixture
async def server() -> AsyncIterator[tuple[FrameServer, str]]:
    server = FrameServer(Echo(), SETTINGS, name="srv", topology_version=lambda: 1)
    address = await server.start("127.0.0.1:0")
    yield server, address
    await server.close()


async def answer_to(address: str, sent: bytes) -> list[tuple[int, bytes]]:
    """What the server says to these bytes and an end of stream, until it closes."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    writer.write_eof()
    received = b""
    try:
        while piece := await reader.read(1 << 16):
            received += piece
    except ConnectionResetError:
        pass  # it closed before it had read everything
    finally:
        writer.close()
    return FrameDecoder(1 << 24).feed(received)


@pytest.mark.parametrize(
    "sent",
    [
        frame(framing.REQUEST, REQUEST),  # before any greeting
        framing.pack_header(9_000, framing.REQUEST),  # refused before it is buffered
        framing.pack_header(4_097, framing.HELLO),
        HELLO + HELLO,
        HELLO + frame(99, b""),
        HELLO + frame(framing.ANSWER, b""),
        HELLO + frame(framing.REQUEST, b"\xff\xff\xff"),
        HELLO + framing.pack_header(10_001, framing.REQUEST),
        frame(framing.HELLO, b"\xff"),
        frame(framing.HELLO, frames_pb2.Hello(protocol_version=99).SerializeToString()),
        b"GET / HTTP/1.1\r\nHost: example\r\n\r\n",
    ],
)
async def test_a_broken_protocol_is_answered_by_its_reason_and_the_end(
    server: tuple[FrameServer, str], sent: bytes
) -> None:
    *_, (kind, payload) = await answer_to(server[1], sent)
    assert kind == framing.ERROR
    assert pb.Error.FromString(payload).reason == "PROTOCOL_ERROR"


async def test_what_was_sent_before_the_mistake_is_answered(server: tuple[FrameServer, str]) -> None:
    frames = await answer_to(server[1], HELLO + frame(framing.REQUEST, REQUEST) + frame(99))
    assert [kind for kind, _ in frames] == [framing.WELCOME, framing.ANSWER, framing.ERROR]


async def test_a_ping_is_answered_by_its_payload(server: tuple[FrameServer, str]) -> None:
    host, port = server[1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(HELLO + frame(framing.PING, b"abc"))
    decoder, frames = FrameDecoder(1000), list[tuple[int, bytes]]()
    while len(frames) < 2:
        frames += decoder.feed(await reader.read(1000))
    assert frames[1] == (framing.PONG, b"abc")
    writer.close()


async def test_a_connection_that_says_nothing_is_dropped(server: tuple[FrameServer, str]) -> None:
    host, port = server[1].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        assert await reader.read() == b""
    except ConnectionResetError:
        pass  # dropped is dropped
    writer.close()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await reader.read() == b""
    except ConnectionResetError:
        return True


async def test_connections_that_have_not_greeted_displace_each_other_and_no_client() -> None:
    doorstep = DoorstepSettings(max_pending_per_address=3)
    server = FrameServer(
        Echo(), ServingSettings(max_connections=1, doorstep=doorstep), name="srv", topology_version=lambda: 1
    )
    address = await server.start("127.0.0.1:0")
    host, port = address.split(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
    assert await is_closed(silent[0][0])
    assert await is_closed(silent[1][0])
    # The silent ones do not count as connections.
    client = await connect_frames(address, SessionSettings(), Credentials("good", "client"))
    assert await is_closed(silent[2][0])
    assert list((await client.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), 20.0)).read.values) == [b"v"]
    assert (len(server.doorstep.pending), len(server.greeted)) == (2, 1)
    for _, writer in silent:
        writer.close()
    await client.close()
    await until(lambda: not server.connections)
    assert (len(server.doorstep.pending), len(server.greeted)) == (0, 0)
    assert server.doorstep.turned_away == {"displaced": 3}
    await server.close()


async def test_half_open_tls_is_pending_as_well_and_ends_with_the_time_for_the_greeting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = TestAuthority(tmp_path).issue("srv")
    doorstep = DoorstepSettings(greeting_timeout_seconds=1.0, max_pending_per_address=3, max_log_lines=2)
    server = FrameServer(
        Echo(),
        ServingSettings(doorstep=doorstep, sweep_interval_seconds=0.05),
        name="srv",
        topology_version=lambda: 1,
        tls=files.server_context(),
    )
    address = await server.start("127.0.0.1:0")
    host, port = address.split(":")
    half_open = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
    half_open[2][1].write(b"\x16\x03\x01\x02\x00")  # the head of a ClientHello
    ungreeted = await asyncio.open_connection(host, int(port), ssl=files.client_context())
    check = ServerCheck(files.client_context())
    client = await connect_frames(address, SessionSettings(), Credentials("good", "client"), check)
    assert list((await client.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), 20.0)).read.values) == [b"v"]
    for reader, writer in (*half_open, ungreeted):
        assert await is_closed(reader)
        writer.close()
    assert not server.half_open
    assert len(server.greeted) == len(server.connections) == 1
    assert server.doorstep.turned_away.total() == 6
    assert len([each for each in caplog.messages if "turned away" in each]) == 2
    await client.close()
    await server.close()


async def test_connections_above_the_limit_are_rejected_with_a_reason() -> None:
    server = FrameServer(Echo(), ServingSettings(max_connections=0), name="srv", topology_version=lambda: 1)
    address = await server.start("127.0.0.1:0")
    frames = await answer_to(address, HELLO)
    assert pb.Error.FromString(frames[-1][1]).reason == "OVERLOADED"
    await server.close()


async def test_an_application_with_all_the_connections_that_it_may_have_locks_nobody_out() -> None:
    tokens = tuple(
        AcceptedToken(name, role, sha256(name.encode()).digest(), caller)
        for name, role, caller in (("hog", CLIENT, "hog"), ("web", CLIENT, "web"), ("ann", "operator", "ann"))
    )
    settings = ServingSettings(
        authenticator=PeerAuthenticator(AcceptedCredentials(tokens)),
        max_connections=10,
        doorstep=DoorstepSettings(max_connections_per_caller=4),
    )
    server = FrameServer(Echo(), settings, name="srv", topology_version=lambda: 1)
    address = await server.start("127.0.0.1:0")

    async def connect(token: str, role: str = CLIENT) -> Session:
        return await connect_frames(address, SessionSettings(), Credentials("ann", role, token))

    hogs = [await connect("hog") for _ in range(4)]
    with pytest.raises(TooManyConnections, match="4 connections of hog already"):
        await connect("hog")
    others = [await connect("web") for _ in range(4)]
    await hogs.pop().close()
    await until(lambda: len(server.greeted) == 7)
    others += [await connect("hog"), await connect("ann", "operator")]
    with pytest.raises(Overloaded, match="9 connections already, and may have 9"):
        await connect("web")
    others.append(await connect("ann", "operator"))
    assert server.doorstep.turned_away == {"too_many_connections": 1, "overloaded": 1}
    for session in (*hogs, *others):
        await session.close()
    await until(lambda: not server.connections)
    assert len(server.greeted) == 0
    await server.close()


class Large:
    """Answers with a megabyte, and counts."""

    asked = 0

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.asked += 1
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[bytes(1 << 20)])))


async def test_what_waited_for_its_peer_to_read_is_answered_in_order_when_it_does() -> None:
    handler = Large()
    server = FrameServer(handler, ServingSettings(max_unsent_bytes=8 << 20), name="srv", topology_version=lambda: 1)
    host, port = (await server.start("127.0.0.1:0")).split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    requests = (pb.Request(number=n, deadline_ms=60_000, read=pb.ReadBatch(obj_ids=[n])) for n in range(1, 101))
    writer.write(HELLO + b"".join(frame(framing.REQUEST, each.SerializeToString()) for each in requests))
    decoder, numbers = FrameDecoder(1 << 24), list[int]()
    while len(numbers) < 100:
        numbers += [
            pb.Answer.FromString(each).number
            for kind, each in decoder.feed(await reader.read(1 << 16))
            if kind == framing.ANSWER
        ]
        assert handler.asked < len(numbers) + 30
    assert numbers == list(range(1, 101))
    writer.close()
    await server.close()


class Laborious:
    """Answers at once, after what its clock says was a turn's work."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.asked: list[str] = []

    def monotonic(self) -> float:
        return self.seconds

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.seconds += frames_server.TURN_SECONDS
        self.asked.append(reply.peer.name)
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"v"])))


async def test_one_connection_s_pile_of_requests_takes_turns_with_other_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = Laborious()
    monkeypatch.setattr(frames_server, "monotonic", handler.monotonic)
    server = FrameServer(handler, ServingSettings(), name="srv", topology_version=lambda: 1)
    address = await server.start("127.0.0.1:0")
    pile = await connect_frames(address, SessionSettings(), Credentials("pile", "client"))
    other = await connect_frames(address, SessionSettings(), Credentials("other", "client"))
    asking = [asyncio.ensure_future(pile.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), 60.0)) for _ in range(400)]
    await until(lambda: bool(handler.asked))
    await other.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), 60.0)
    assert len(handler.asked) < 200
    await asyncio.gather(*asking)
    assert handler.asked.count("pile") == 400
    for session in (pile, other):
        await session.close()
    await server.close()


async def test_a_server_that_drains_answers_the_pile_that_it_has_received(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = Laborious()
    monkeypatch.setattr(frames_server, "monotonic", handler.monotonic)
    server = FrameServer(handler, ServingSettings(), name="srv", topology_version=lambda: 1)
    pile = await connect_frames(await server.start("127.0.0.1:0"), SessionSettings(), Credentials("pile", "client"))
    asking = [asyncio.ensure_future(pile.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), 60.0)) for _ in range(400)]
    await until(lambda: bool(handler.asked))
    await server.drain(60.0)
    await server.close()
    assert len(await asyncio.gather(*asking)) == 400
    await pile.close()


@pytest.mark.parametrize("seed", range(8))
async def test_random_and_mutated_bytes_affect_no_other_connection(server: tuple[FrameServer, str], seed: int) -> None:
    chance = random.Random(seed)
    good = await connect_frames(server[1], SessionSettings(), Credentials("good", "client"))
    for _ in range(40):
        if chance.random() < 0.3:
            sent = chance.randbytes(chance.randrange(1, 400))
        else:
            mutated = bytearray(HELLO + frame(framing.REQUEST, REQUEST) * 3 + frame(framing.PING, b"p"))
            for _ in range(chance.randrange(1, 6)):
                mutated[chance.randrange(len(mutated))] = chance.randrange(256)
            sent = bytes(mutated[: chance.randrange(1, len(mutated) + 1)])
        await answer_to(server[1], sent)
        answer = await good.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), 20.0)
        assert list(answer.read.values) == [b"v"]
    await good.close()


async def test_a_client_gives_up_a_server_that_has_fallen_silent() -> None:
    async def greet_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(frame(framing.WELCOME, frames_pb2.Welcome(protocol_version=1).SerializeToString()))
        await reader.read()
        writer.close()
        await writer.wait_closed()
        gone.set()

    gone = asyncio.Event()
    silent = await asyncio.start_server(greet_only, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    settings = SessionSettings(ping_interval_seconds=0.02, ping_timeout_seconds=0.02)
    session = await connect_frames(f"127.0.0.1:{port}", settings, Credentials("me", "client"))
    answers: list[pb.Answer] = []
    session.send(pb.Request(watch=pb.Watch()), float("inf"), answers.append)
    await until(lambda: answers)
    assert answers[0].error.reason == "UNAVAILABLE"
    assert not session.is_open
    await gone.wait()
    silent.close()
    await silent.wait_closed()


async def test_connections_that_end_leave_nothing_to_the_garbage_collector(server: tuple[FrameServer, str]) -> None:
    with garbage_types() as found:
        for _ in range(3):
            await (await connect_frames(server[1], SessionSettings(), Credentials("x", "client"))).close()
        await until(lambda: not server[0].connections and not server[0].half_open)
    assert not found.keys() & {"FrameConnection", "Place", "SilentConnection"}
