"""TLS handshakes start one in a turn of the loop, at a bounded rate for strangers."""

from __future__ import annotations

import asyncio
import gc
import ssl
from pathlib import Path

from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.handshake_turns import Handshake, HandshakeTurns
from tao.wire.identity import Credentials
from tao.wire.session import Reply
from tao.wire.settings import DoorstepSettings, ServingSettings, SessionSettings
from tao.wire.tls import ServerCheck, TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.certificates import TestAuthority
from tests.rigs.pacing import PATIENT_SECONDS, until
from tests.rigs.paused_handshake import PausedHandshake

ONE_A_MINUTE = 1 / 60
PATIENT = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)


class Echo:
    def handle(self, request: pb.Request, reply: Reply) -> None:
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"v"] * len(request.read.obj_ids))))


class Port:
    """The turns of a port, and the names of the handshakes that have begun."""

    def __init__(self, saved: int) -> None:
        self.begun = list[str]()
        settings = DoorstepSettings(stranger_handshakes_per_second=ONE_A_MINUTE, max_pending_per_address=16 * saved)
        self.turns = HandshakeTurns(settings)

    def arrive(self, address: str, name: str = "") -> Handshake:
        handshake = self.turns.make(address, lambda: self.begun.append(name or address))
        handshake.wait()
        return handshake


async def test_one_handshake_begins_in_a_turn_of_the_loop() -> None:
    port = Port(saved=4)
    for number in range(6):
        port.arrive("192.0.2.1", str(number))
    assert port.begun == ["0"]
    begun = list[int]()
    for _ in range(6):
        await asyncio.sleep(0)
        begun.append(len(port.begun))
    assert begun == [2, 3, 4, 4, 4, 4]
    assert port.begun[1:] == ["5", "4", "3"]
    port.turns.stop()


async def test_peers_that_greet_give_their_turns_back() -> None:
    port = Port(saved=2)
    for number in range(20):
        handshake = port.arrive("192.0.2.1", str(number))
        await until(lambda: len(port.begun) == number + 1)  # noqa: B023 - awaited here
        handshake.greeted()
    port.turns.stop()


async def test_a_turn_that_is_given_back_is_the_next_one_s_at_once() -> None:
    port = Port(saved=1)
    first = port.arrive("192.0.2.1", "first")
    port.arrive("192.0.2.1", "second")
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # the next is expected in a minute
    assert port.begun == ["first"]
    first.greeted()
    assert port.begun == ["first", "second"]
    port.turns.stop()


async def test_strangers_elsewhere_do_not_delay_an_address_from_which_somebody_has_greeted() -> None:
    port = Port(saved=1)
    port.turns.greeted("192.0.2.1")
    port.turns.greeted("192.0.2.1")
    port.turns.left("192.0.2.1")
    for _ in range(10):
        port.arrive("192.0.2.66")
    assert port.begun == ["192.0.2.66"]
    port.arrive("192.0.2.2")
    assert port.begun == ["192.0.2.66"]
    port.arrive("192.0.2.1")
    assert port.begun == ["192.0.2.66", "192.0.2.1"]
    port.arrive("192.0.2.1")  # among such addresses the bound is the same
    assert port.begun == ["192.0.2.66", "192.0.2.1"]
    port.turns.left("192.0.2.1")
    port.turns.stop()
    assert not port.turns._greeted


async def test_a_handshake_that_is_withdrawn_never_begins() -> None:
    port = Port(saved=1)
    first, second = port.arrive("192.0.2.1", "first"), port.arrive("192.0.2.1", "second")
    second.withdraw()
    first.greeted()
    port.arrive("192.0.2.1", "third")
    await until(lambda: port.begun == ["first", "third"])
    port.turns.stop()


def client_hello(files: TlsFiles) -> bytes:
    """Return what a client sends first; who has it can send it again and again."""
    sent = ssl.MemoryBIO()
    client = files.client_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost")
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return sent.read()
    raise AssertionError("a handshake needs an answer")


async def test_replayed_first_messages_begin_a_bounded_number_of_handshakes(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).issue("srv")
    doorstep = DoorstepSettings(
        stranger_handshakes_per_second=ONE_A_MINUTE,
        max_pending_per_address=4,
        greeting_timeout_seconds=PATIENT_SECONDS,
    )
    server = FrameServer(
        Echo(),
        ServingSettings(doorstep=doorstep),
        name="srv",
        topology_version=lambda: 1,
        tls=files.server_context(),
    )
    address = await server.start("127.0.0.1:0")
    host, port = address.split(":")
    check = ServerCheck(files.client_context())

    async def connect() -> None:
        await (await connect_frames(address, PATIENT, Credentials("good", "client"), check)).close()

    session = await connect_frames(address, PATIENT, Credentials("good", "client"), check)
    for _ in range(20):  # more than one
        await connect()
    hello, strangers = client_hello(files), list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]()
    for _ in range(12):
        reader, writer = await asyncio.open_connection(host, int(port), local_addr=("127.0.0.2", 0))
        writer.write(hello)
        strangers.append((reader, writer))
    await until(lambda: server.doorstep.turned_away["displaced"] == 8)
    answered = [reader for reader, _ in strangers if reader._buffer]  # type: ignore[attr-defined]
    assert len(answered) <= 1
    for _ in range(20):  # nor do they delay the newcomers of an address from which somebody has greeted
        await connect()
    assert list((await session.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), PATIENT_SECONDS)).read.values) == [b"v"]
    await session.close()
    await server.close()
    assert (len(server.doorstep.pending), len(server.waiting)) == (0, 0)
    for _, writer in strangers:
        writer.close()


async def test_a_silent_crowd_at_the_address_of_a_newcomer_displaces_it_at_no_stage_of_its_handshake(
    tmp_path: Path,
) -> None:
    files = TestAuthority(tmp_path).issue("srv")
    doorstep = DoorstepSettings(max_pending_per_address=4, greeting_timeout_seconds=PATIENT_SECONDS)
    settings = ServingSettings(doorstep=doorstep)
    server = FrameServer(Echo(), settings, name="srv", topology_version=lambda: 1, tls=files.server_context())
    address = await server.start("127.0.0.1:0")
    host, _, port = address.partition(":")
    crowd = list[asyncio.StreamWriter]()

    async def flood() -> None:
        """Have silent connections take all places, three times over."""
        wanted = server.doorstep.turned_away["displaced"] + 12
        while server.doorstep.turned_away["displaced"] < wanted:
            crowd.append((await asyncio.open_connection(host, int(port)))[1])

    await flood()
    newcomer = await PausedHandshake.begin(address, files.client_context())
    await flood()
    assert await newcomer.greet(Credentials("good", "client"))
    newcomer.close()
    await server.close()
    for writer in crowd:
        writer.close()


async def test_a_connection_leaves_no_cycle_to_the_garbage_collector(tmp_path: Path) -> None:
    files = TestAuthority(tmp_path).issue("srv")
    server = FrameServer(Echo(), ServingSettings(), name="srv", topology_version=lambda: 1, tls=files.server_context())
    address = await server.start("127.0.0.1:0")
    check = ServerCheck(files.client_context())
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await (await connect_frames(address, PATIENT, Credentials("good", "client"), check)).close()
        await until(lambda: not server.connections)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert [each for each in gc.garbage if isinstance(each, Handshake)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    await server.close()


def test_servers_send_no_session_tickets(tmp_path: Path) -> None:
    assert TestAuthority(tmp_path).issue("srv").server_context().num_tickets == 0
