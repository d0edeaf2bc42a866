"""The rig of the conformance suites: over one transport, a server whose handler a test controls, and clients."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from tao.model.errors import (
    NotMine,
)
from tao.model.topology import CacheServer
from tao.wire import framing
from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.grpc_client import connect_grpc
from tao.wire.grpc_server import GrpcServer
from tao.wire.identity import Credentials
from tao.wire.session import NO_DEADLINE_MS, Reply, Session
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.v1 import frames_pb2
from tao.wire.v1 import session_pb2 as pb
from tao.wire.v1.graph_pb2_grpc import GraphStub
from tests.rigs.pacing import PATIENT_SECONDS

ME = Credentials("test", "client")


@dataclass
class Handler:
    """Answers by shard: shard 0 echoes; the others are described in `handle`."""

    held: list[Reply] = field(default_factory=list)
    series: list[Reply] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    seen: list[pb.Request] = field(default_factory=list)
    ended_series: int = 0

    def handle(self, request: pb.Request, reply: Reply) -> None:
        self.seen.append(request)
        match request.WhichOneof("body"):
            case "read":
                self._read(request.read, reply)
            case "write":
                self.held.append(reply)
            case "reserve_ids":
                echo(request.reserve_ids.count, reply)
            case "watch":
                self.series.append(reply)
                reply.on_close(self._series_ended)
            case "acknowledge":
                self.acknowledged.append(request.acknowledge.delivery_number)
                reply.send(pb.Answer())
            case "get_schema":
                raise ValueError("a bug in the handler")
            case "get_topology":
                raise NotMine("shard 7 is not mine", 42)

    def _read(self, read: pb.ReadBatch, reply: Reply) -> None:
        if read.critical:
            self.held.append(reply)
        elif read.for_fill:
            reply.send(pb.Answer(more=True, read=pb.ReadAnswer(values=[b"hit"])))
            asyncio.get_running_loop().call_soon(
                reply.send, pb.Answer(read=pb.ReadAnswer(slots=[1], values=[b"x" * read.obj_ids[0]]))
            )
        else:
            reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"v%d" % number for number in read.obj_ids])))

    def _series_ended(self) -> None:
        self.ended_series += 1


def echo(number: int, reply: Reply) -> None:
    reply.send(pb.Answer(reserved_ids=pb.ReservedIds(ids=[number])))


Server = FrameServer | GrpcServer


@dataclass
class Rig:
    """A transport under test, with servers and clients that are closed at the end."""

    transport: str
    folder: Path
    handler: Handler = field(default_factory=Handler)
    servers: list[Server] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    address: str = ""

    async def serve(self, settings: ServingSettings | None = None, address: str = "") -> Server:
        settings = settings or ServingSettings()
        server: Server
        if self.transport == "grpc":
            server = GrpcServer(self.handler, settings, name="srv", topology_version=lambda: 3, choose_shard=lambda: 5)
        else:
            server = FrameServer(self.handler, settings, name="srv", topology_version=lambda: 3)
        default = f"unix:{self.folder}/s" if self.transport == "unix" else "127.0.0.1:0"
        self.address = await server.start(address or default)
        self.servers.append(server)
        return server

    def forget_socket(self) -> None:
        """Remove the Unix socket, which stays in its folder when its server has gone."""
        if self.transport == "unix":
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    async def connect(self, settings: SessionSettings | None = None, credentials: Credentials = ME) -> Session:
        connect = connect_grpc if self.transport == "grpc" else connect_frames
        settings = settings or SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
        session = await connect(self.address, settings, credentials)
        self.sessions.append(session)
        return session

    def server_as_topology(self) -> CacheServer:
        if self.transport == "grpc":
            return CacheServer(name="srv", grpc=self.address)
        return CacheServer(name="srv", grpc="127.0.0.1:1", frames=self.address)

    async def close(self) -> None:
        for session in self.sessions:
            await session.close()
        for server in self.servers:
            await server.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENT_SECONDS):
        while not condition():  # noqa: ASYNC110 - the condition is the other side's state, which has no event
            await asyncio.sleep(0.001)


def read(*ids: int, critical: bool = False, for_fill: bool = False) -> pb.Request:
    return pb.Request(read=pb.ReadBatch(obj_ids=ids, critical=critical, for_fill=for_fill))


def write() -> pb.Request:
    return pb.Request(write=pb.WriteBatch(writes=[pb.Write(obj_delete=pb.ObjDelete(id=1))]))


class Taken(list[pb.Answer]):
    """Keeps answers in the order of their arrival."""

    @property
    def complete(self) -> bool:
        return bool(self) and not self[-1].more

    async def last(self) -> pb.Answer:
        await until(lambda: self.complete)
        return self[-1]


SERIES = pb.Request(number=1, deadline_ms=NO_DEADLINE_MS, watch=pb.Watch())


@contextlib.asynccontextmanager
async def stuck_peer(
    rig: Rig, requests: Sequence[pb.Request] = (SERIES,)
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A client that asks for a series, or for what it is given, and never reads."""
    if rig.transport == "grpc":
        async with grpc.aio.insecure_channel(rig.address) as channel:
            call = GraphStub(channel).Session()

            async def ask() -> None:
                for request in requests:
                    await call.write(request)

            yield ask
            call.cancel()
        return
    if rig.transport == "unix":
        reader, writer = await asyncio.open_unix_connection(rig.address.removeprefix("unix:"), limit=1)
    else:
        host, port = rig.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1)

    async def ask_frames() -> None:
        hello = frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION, name="stuck", role="client")
        writer.write(framing.frame(framing.HELLO, hello.SerializeToString()))
        writer.write(b"".join(framing.frame(framing.REQUEST, each.SerializeToString()) for each in requests))

    yield ask_frames
    assert reader is not None
    writer.transport.abort()
