"""A gRPC client at a port that does not speak gRPC is shown which port that is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc
import pytest
from structlog.testing import capture_logs

from tao.client import Unavailable, connect
from tao.observability.logs import logger
from tao.runtime.admin import AdminPages, AdminServer, AdminSettings
from tao.wire.frames_server import FrameServer
from tao.wire.http2_refusal import PREFACE, Http2Refusal
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb

GRPC = "127.0.0.1:7100"


class NeverAsked:
    def handle(self, request: pb.Request, reply: Reply) -> None:
        raise AssertionError(request)


@pytest.fixture
async def frames_port() -> AsyncIterator[str]:
    server = FrameServer(
        NeverAsked(), ServingSettings(), name="follower-1a", topology_version=lambda: 1, grpc_address=GRPC
    )
    yield await server.start("127.0.0.1:0")
    await server.close()


@pytest.fixture
async def admin_port() -> AsyncIterator[str]:
    pages = AdminPages(metrics=lambda: b"", stats=dict, not_ready=lambda: "")
    server = AdminServer(AdminSettings(), pages, logger("test"), GRPC)
    yield await server.start()
    await server.close()


async def call_fails_with(address: str) -> tuple[grpc.StatusCode, str]:
    async with grpc.aio.insecure_channel(address) as channel:
        method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/tao.v1.Graph/ObjGet")
        call = method(b"x" * 100_000)
        return await call.code(), str(await call.details())


async def test_a_grpc_client_at_the_frames_port_is_referred_to_the_grpc_port(
    frames_port: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        code, message = await call_fails_with(frames_port)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert message == f"this is the frames port of follower-1a, which does not speak gRPC; its gRPC port is {GRPC}"
    assert "is a gRPC client at the frames port of follower-1a" in caplog.text


async def test_a_grpc_client_at_the_admin_port_is_referred_to_the_grpc_port(admin_port: str) -> None:
    with capture_logs() as logs:
        code, message = await call_fails_with(admin_port)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert message == (f"{admin_port} is an admin port (HTTP/1.1), which does not speak gRPC; the gRPC port is {GRPC}")
    assert [(each["event"], each["grpc_address"]) for each in logs] == [("grpc_client_at_admin_port", GRPC)]


async def test_the_sdk_at_the_wrong_port_shows_the_same(frames_port: str, admin_port: str) -> None:
    for address, port in ((frames_port, "the frames port"), (admin_port, "an admin port")):
        with pytest.raises(Unavailable, match=f"is {port}.* gRPC port is {GRPC}"):
            await connect(address)


async def test_the_ports_still_serve_their_own_clients(admin_port: str) -> None:
    await call_fails_with(admin_port)
    reader, writer = await asyncio.open_connection(*admin_port.split(":"))
    writer.write(b"GET /health HTTP/1.1\r\n\r\n")
    assert (await reader.read()).endswith(b"ok\n")
    writer.close()


SETTINGS = bytes.fromhex("000006 04 00 00000000 000400100000")
HEADERS = bytes.fromhex("000003 01 00 00000001 828386")
CONTINUATION = bytes.fromhex("000001 09 04 00000001 84")


@pytest.mark.parametrize("piece", [1, 2, 9, 100])
def test_bytes_may_arrive_in_any_pieces(piece: int) -> None:
    refusal, sent = Http2Refusal("wrong port: 50 %"), SETTINGS + HEADERS + CONTINUATION + HEADERS
    answer = b"".join(refusal.feed(sent[at : at + piece]) for at in range(0, len(sent), piece))
    assert answer.startswith(bytes.fromhex("000000 04 01 00000000"))  # the client's settings, acknowledged
    assert answer.count(b"grpc-message") == 1
    assert b"wrong port: 50 %25" in answer
    assert answer.endswith(b"wrong port: 50 %")  # the GOAWAY


def test_a_long_message_is_one_header() -> None:
    answer = Http2Refusal("x" * 1_000).feed(SETTINGS + HEADERS + CONTINUATION)
    assert b"\x0cgrpc-message\x7f\xe9\x06" + b"x" * 1_000 in answer  # 127 + 0x69 + (6 << 7) = 1,000


def test_the_preface_is_no_frame_that_a_client_of_frames_could_send() -> None:
    assert len(PREFACE) == 24
    assert int.from_bytes(PREFACE[:4], "little") > 1 << 28
