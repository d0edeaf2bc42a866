"""A running cluster under invalid and hostile requests, with a bystander that must not be affected."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tao.client import Graph
from tao.devcluster.cluster import DevCluster
from tao.devcluster.inspection import ProcessStatus
from tao.devcluster.layout import ONLY_REGION
from tao.model.errors import (
    TaoError,
)
from tao.model.topology import CacheServer
from tao.routing.routes import Routes
from tao.wire import framing
from tao.wire.frames_client import connect_frames
from tao.wire.grpc_client import connect_grpc
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.v1 import frames_pb2
from tao.wire.v1 import session_pb2 as pb
from tests.e2e.cluster_access import PATIENT_SESSION, Bystander
from tests.rigs.pacing import PATIENT_SECONDS

SHARDS = 8
USER, CHECKIN, LIKES, LIKED_BY, COMMENT, NOTE = 1, 2, 4, 5, 10, 14
MEGABYTE = 1 << 20
TOO_HIGH = 1 << 63
HOSTILE_TEXTS = (
    "'; DROP TABLE tao_00001.objects; --",
    '" OR 1=1 /*',
    "%s %(x)s {} \\ \\' `objects` \x00 \x1a \n\r\t",
    "naïve 漢字 🙂 \u202e \ufeff",
    "\x00",
)


@dataclass
class Rig:
    cluster: DevCluster
    bystander: Bystander
    routes: Routes
    before: list[ProcessStatus]

    def follower_of(self, object_id: int) -> CacheServer:
        return self.routes.tier(ONLY_REGION, "tier-1").home(object_id >> 47)

    @asynccontextmanager
    async def session(
        self, server: CacheServer, transport: str = "frames", role: str = "client"
    ) -> AsyncIterator[Session]:
        credentials = Credentials("raw", role)
        if transport == "frames":
            session = await connect_frames(server.frames, PATIENT_SESSION, credentials)
        else:
            session = await connect_grpc(server.grpc, PATIENT_SESSION, credentials)
        try:
            yield session
        finally:
            await session.close()


async def new_user(graph: Graph) -> int:
    return await graph.obj_add("user", {"name": "n", "home": "h"})


async def result_of(session: Session, write: pb.Write) -> str:
    """Return the reason for which the write was rejected, or "" when it was done."""
    try:
        answer = await session.ask(pb.Request(write=pb.WriteBatch(writes=[write])), PATIENT_SECONDS)
    except TaoError as error:
        return error.reason
    (result,) = answer.write.results
    assert not result.HasField("error") or result.error.message
    return result.error.reason


async def reading_of(session: Session, batch: pb.ReadBatch) -> str:
    try:
        answer = await session.ask(pb.Request(read=batch), PATIENT_SECONDS)
    except TaoError as error:
        return error.reason
    assert len(answer.read.errors) + len(answer.read.values) == 1
    return answer.read.errors[0].reason if answer.read.errors else ""


@asynccontextmanager
async def bare_connection(server: CacheServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = server.frames.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 16)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def frame_from(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(PATIENT_SECONDS):
        length, kind = struct.unpack("<IB", await reader.readexactly(5))
        return kind, await reader.readexactly(length)


async def answer_from(reader: asyncio.StreamReader) -> pb.Answer:
    kind, payload = await frame_from(reader)
    assert kind == framing.ANSWER
    return pb.Answer.FromString(payload)


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    hello = frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION, name="bare", role="client")
    writer.write(framing.frame(framing.HELLO, hello.SerializeToString()))
    assert (await frame_from(reader))[0] == framing.WELCOME


def resident_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))
