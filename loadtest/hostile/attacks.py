"""Bounded attacks on the ports of a server, of strangers and of one greedy client.

Each opens what it opens and returns; nothing ends until its `Grip` does. The tests of hostile requests make the same
attacks.
"""

from __future__ import annotations

import asyncio
import gzip
import ssl
import struct
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Final, Self

import grpc

from tao.model.errors import TaoError
from tao.wire import framing
from tao.wire.frames_client import connect_frames
from tao.wire.http2_refusal import PREFACE
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.settings import SessionSettings
from tao.wire.tls import ServerCheck, TlsFiles
from tao.wire.v1 import frames_pb2
from tao.wire.v1 import session_pb2 as pb

MEGABYTE: Final = 1 << 20
SECONDS: Final = 30.0
FLOOD_REQUESTS: Final = 126
FLOOD_READS: Final = 1_000
_FLOOD_SECONDS: Final = 200.0
"""The requests of the flood take turns, so all of them end late."""
_GUESS: Final = "guessed"
_CLIENT_HELLO_HEAD: Final = b"\x16\x03\x01\x02\x00\x01"
"""The head of a TLS ClientHello, which never comes."""
_ANOTHER_ADDRESS: Final = "127.0.0.2"
_END_OF_STREAM: Final = 1
_HEADERS, _DATA, _SETTINGS, _GO_AWAY = 1, 0, 4, 7
_MAX_FRAME_BYTES: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Ports:
    """The addresses of a server, ``host:port``."""

    grpc: str
    frames: str
    admin: str
    watcher: str = ""
    """The frames port of a watcher beside it."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A connection of a stranger."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, address: str, context: ssl.SSLContext | None = None, source: str | None = None) -> Self:
        """Connect, by TLS with a context, from the address ``source``."""
        host, _, port = address.rpartition(":")
        local = None if source is None else (source, 0)
        return cls(*await asyncio.open_connection(host, int(port), ssl=context, local_addr=local))

    async def closed(self) -> bool:
        """Wait until the server has closed the connection, by a reset or otherwise. Returns True."""
        with suppress(ConnectionError):
            async with asyncio.timeout(SECONDS):
                while await self.reader.read(1 << 16):
                    pass
        return True


@dataclass(slots=True)
class Grip:
    """What an attack holds open, until its context ends."""

    connections: list[Connection] = field(default_factory=list)
    codes: list[grpc.StatusCode] = field(default_factory=list)
    """The status of each message that was sent whole."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self.connections:
            connection.writer.transport.abort()

    async def open(self, count: int, address: str, context: ssl.SSLContext | None = None) -> list[Connection]:
        """Open so many connections, and hold them."""
        opened = [await Connection.open(address, context) for _ in range(count)]
        self.connections += opened
        return opened


async def _at_once() -> None:
    await asyncio.sleep(0)


async def calls_of_headers(
    ports: Ports, grip: Grip, calls: int = 12_000, pause: Callable[[], Awaitable[object]] = _at_once
) -> None:
    """Open gRPC calls with a wrong token and without a message, 50 at a time on each of twelve connections."""
    connections = await grip.open(12, ports.grpc)
    streams = dict.fromkeys(range(len(connections)), -1)
    for connection in connections:
        connection.writer.write(PREFACE + _http2_frame(_SETTINGS, 0, 0))
    for _ in range(calls // (12 * 50)):
        for index, connection in enumerate(connections):
            for _ in range(50):
                streams[index] += 2
                connection.writer.write(_http2_frame(_HEADERS, 4, streams[index], _CALL_HEADERS))
        await pause()


async def large_requests(ports: Ports, grip: Grip, connections: int = 40) -> None:
    """Send a request of 16 MB before the greeting on each connection."""
    for connection in await grip.open(connections, ports.frames):
        connection.writer.write(framing.pack_header(16 * MEGABYTE, framing.REQUEST))
        with suppress(ConnectionError):  # the server has closed it by now
            for _ in range(15):  # a whole one would be decoded, and fail
                connection.writer.write(bytes(MEGABYTE))
                await connection.writer.drain()


async def large_messages(
    ports: Ports, grip: Grip, calls: int = 10, compression: grpc.Compression | None = None, megabytes: int = 15
) -> None:
    """Send a large message without a token in each of so many calls at the same time, and wait for their refusals."""
    message = bytes(megabytes * MEGABYTE)
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]

    async def send() -> None:
        async with grpc.aio.insecure_channel(ports.grpc, options) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/tao.v1.Graph/AssocAdd")
            grip.codes.append(await call(message, timeout=SECONDS, compression=compression).code())

    await asyncio.gather(*(send() for _ in range(calls)))


async def compressed_messages(ports: Ports, grip: Grip, connections: int = 10) -> None:
    """Send a message of 60 MB with a wrong token on each connection, and wait until it is refused. It is compressed to
    what HTTP/2 lets a client send at once, and has been so before the attack, as it would be for a real one."""
    opened, message = await grip.open(connections, ports.grpc), _compressed_message()
    data = [message[at : at + _MAX_FRAME_BYTES] for at in range(0, len(message), _MAX_FRAME_BYTES)]
    for connection in opened:
        connection.writer.write(PREFACE + _http2_frame(_SETTINGS, 0, 0) + _http2_frame(_HEADERS, 4, 1, _GZIP_HEADERS))
        connection.writer.write(b"".join(_http2_frame(_DATA, 0, 1, piece) for piece in data))
    await asyncio.gather(*(_refused(connection) for connection in opened))


async def _refused(connection: Connection) -> None:
    """Wait for the end of the first stream, or of the connection."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        async with asyncio.timeout(SECONDS):
            while True:
                head = await connection.reader.readexactly(9)
                await connection.reader.readexactly(int.from_bytes(head[:3], "big"))
                kind, flags = head[3], head[4]
                if kind == _GO_AWAY or (kind == _HEADERS and flags & _END_OF_STREAM):
                    return


async def silent_admin_connections(ports: Ports, grip: Grip, connections: int = 400) -> None:
    """Open connections to the admin port and say nothing."""
    await grip.open(connections, ports.admin)


async def ungreeted_connections(ports: Ports, grip: Grip, connections: int = 600, *, tls: bool = False) -> None:
    """Open connections of frames that say nothing; at a port with TLS every other one begins a handshake."""
    for connection in (await grip.open(connections, ports.frames))[::2]:
        with suppress(ConnectionError):
            if tls:
                connection.writer.write(_CLIENT_HELLO_HEAD)


async def wrong_greetings(ports: Ports, _: Grip, connections: int = 600) -> None:
    """Greet wrongly, one connection after the other, so that the server has something to warn of."""
    for _number in range(connections):
        connection = await Connection.open(ports.frames)
        connection.writer.write(framing.frame(framing.HELLO, b""))
        await connection.closed()
        connection.writer.close()


async def half_open_handshakes(ports: Ports, grip: Grip, connections: int = 600) -> None:
    """Open connections to a port with TLS, of which every other one begins a handshake, and none ends it."""
    await ungreeted_connections(ports, grip, connections, tls=True)


async def replayed_handshakes(ports: Ports, grip: Grip, connections: int = 600) -> None:
    """Begin a TLS handshake on each connection by the same first message, which costs nothing, and do not end it. The
    attacker has an address of its own, as strangers have who are not behind the same NAT."""
    hello = _client_hello()
    for _ in range(connections):
        connection = await Connection.open(ports.frames, source=_ANOTHER_ADDRESS)
        grip.connections.append(connection)
        connection.writer.write(hello)


async def forged_reports(ports: Ports, _: Grip, connections: int = 600) -> None:
    """Connect to a watcher as one of another region with a guessed token, and report that its servers are down, one
    connection after the other."""
    hello = frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION, name="watcher-2", role="watcher", token=_GUESS)
    report = pb.Answer(watcher_report=pb.WatcherReport(region="local", verdicts={"follower-1a": "down"}))
    for _number in range(connections):
        connection = await Connection.open(ports.watcher)
        connection.writer.write(framing.frame(framing.HELLO, hello.SerializeToString()))
        connection.writer.write(framing.frame(framing.ANSWER, report.SerializeToString()))
        await connection.closed()
        connection.writer.close()


StrangersAttack = Callable[[Ports, Grip], Awaitable[None]]

STRANGERS: Final[dict[str, StrangersAttack]] = {
    "12,000 calls of headers": calls_of_headers,
    "40 requests of 16 MB before the greeting": large_requests,
    "10 messages of 15 MB": large_messages,
    "10 messages of 60 MB, compressed": compressed_messages,
    "400 silent admin connections": silent_admin_connections,
    "600 ungreeted connections": ungreeted_connections,
    "600 half-open TLS connections": half_open_handshakes,
    "600 replayed TLS handshakes": replayed_handshakes,
    "600 wrong greetings": wrong_greetings,
    "600 forged watcher reports": forged_reports,
}
"""The attacks without a credential, by name."""
OVER_TLS: Final = frozenset({"600 half-open TLS connections", "600 replayed TLS handshakes"})
"""Those on servers with TLS, which the others are made without."""


async def open_client(address: str, credentials: Credentials, tls: TlsFiles | None = None) -> Session:
    """Open a session of frames. Raises `TaoError`."""
    check = None if tls is None else ServerCheck(tls.client_context())
    return await connect_frames(address, SessionSettings(connect_timeout_seconds=SECONDS), credentials, check)


async def flood(session: Session, object_id: int) -> list[str]:
    """Send 126,000 critical reads, which no cache answers and which join no other, and return the outcome of each of
    126 requests: ``answered``, or the reason of its failure."""
    return await outcomes(session, [critical_reads(object_id)] * FLOOD_REQUESTS)


def critical_reads(object_id: int) -> pb.Request:
    """Return a request of 1,000 critical reads."""
    return pb.Request(read=pb.ReadBatch(obj_ids=[object_id] * FLOOD_READS, critical=True))


async def outcomes(session: Session, requests: Iterable[pb.Request]) -> list[str]:
    """Send all requests, and return the outcome of each: ``answered``, or the reason of its first failure."""

    async def outcome(request: pb.Request) -> str:
        try:
            answer = await session.ask(request, _FLOOD_SECONDS)
        except TaoError as error:
            return error.reason
        errors = [*answer.read.errors, *(each.error for each in answer.write.results if each.HasField("error"))]
        return errors[0].reason if errors else "answered"

    return await asyncio.gather(*map(outcome, requests))


def _http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HBBBI", len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


def _headers(fields: dict[str, str]) -> bytes:
    pairs = ((name.encode(), value.encode()) for name, value in fields.items())
    return b"".join(b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in pairs)


def prepare() -> None:
    """Make what attacks send that is made once."""
    _client_hello()
    _compressed_message()


@cache
def _client_hello() -> bytes:
    """Return the first message of a TLS client."""
    context, sent = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent, server_hostname="localhost").do_handshake()
    return sent.read()


@cache
def _compressed_message() -> bytes:
    """Return a message of gRPC of 60 MB, compressed to 58 KB."""
    compressed = gzip.compress(bytes(60 * MEGABYTE), 9)
    return struct.pack(">BI", 1, len(compressed)) + compressed


def _call_headers(path: str, **others: str) -> bytes:
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers", "authorization": f"Bearer {_GUESS}"}
    return _headers(fields | others)


_CALL_HEADERS: Final = _call_headers("/tao.v1.Graph/ObjGet")
_GZIP_HEADERS: Final = _call_headers("/tao.v1.Graph/AssocAdd", **{"grpc-encoding": "gzip"})
