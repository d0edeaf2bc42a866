"""A client whose connection ends before the server has said anything connects again, and a refused one does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path

import pytest

from tao.model.errors import Unauthorized, Unavailable
from tao.wire.frames_client import connect_frames
from tao.wire.frames_server import FrameServer
from tao.wire.identity import CLIENT, AcceptedCredentials, AcceptedToken, Credentials, PeerAuthenticator
from tao.wire.session import Reply
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.tls import ServerCheck, TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.certificates import TestAuthority
from tests.rigs.hanging_up import hanging_up
from tests.rigs.pacing import PATIENT_SECONDS

PATIENT = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
ME = Credentials("web", "client")


class Echo:
    def handle(self, request: pb.Request, reply: Reply) -> None:
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"v"] * len(request.read.obj_ids))))


class Server:
    """A server of frames, and what a client needs to reach it."""

    def __init__(self, folder: Path, *, tls: bool, settings: ServingSettings) -> None:
        self.files = TestAuthority(folder).issue("srv") if tls else None
        self.check = None if self.files is None else ServerCheck(self.files.client_context())
        context = None if self.files is None else self.files.server_context()
        self.frames = FrameServer(Echo(), settings, name="srv", topology_version=lambda: 1, tls=context)
        self.address = ""


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
async def server(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Server]:
    server = Server(tmp_path, tls=request.param, settings=ServingSettings())
    server.address = await server.frames.start("127.0.0.1:0")
    yield server
    await server.frames.close()


@pytest.mark.parametrize("resets", [False, True])
async def test_a_connection_that_ends_before_the_server_has_said_anything_is_made_again(
    server: Server, *, resets: bool
) -> None:
    async with hanging_up(server.address, 2, resets=resets) as port:
        session = await connect_frames(port.address, PATIENT, ME, server.check)
        answer = await session.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), PATIENT_SECONDS)
        assert list(answer.read.values) == [b"v"]
        assert port.connections == 3
        await session.close()


async def test_a_server_that_hangs_up_every_time_is_unavailable_after_three_connections(server: Server) -> None:
    async with hanging_up(server.address, 3) as port:
        with pytest.raises(Unavailable, match=port.address):
            await connect_frames(port.address, PATIENT, ME, server.check)
        # One more looks at what the server speaks.
        assert port.connections == 4


async def test_a_server_without_a_listener_is_tried_once(monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    await server.frames.close()
    loop, attempts = asyncio.get_running_loop(), 0
    create_connection = loop.create_connection

    async def count(*arguments: object, **others: object) -> object:
        nonlocal attempts
        attempts += 1
        return await create_connection(*arguments, **others)  # type: ignore[call-overload]

    monkeypatch.setattr(loop, "create_connection", count)
    with pytest.raises(Unavailable):
        await connect_frames(server.address, PATIENT, ME, server.check)
    assert attempts == 1


async def test_a_client_whose_credential_or_certificate_is_refused_connects_once(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    files = authority.issue("srv")
    demanding = FrameServer(
        Echo(), ServingSettings(), name="srv", topology_version=lambda: 1, tls=files.server_context()
    )
    without_certificate = ServerCheck(TlsFiles(authorities=files.authorities).client_context())
    async with hanging_up(await demanding.start("127.0.0.1:0"), 0) as port:
        with pytest.raises(Unavailable) as refused:
            await connect_frames(port.address, PATIENT, ME, without_certificate)
        assert refused.value.is_refusal
        assert port.connections == 1
    await demanding.close()
    accepted = AcceptedCredentials((AcceptedToken("web", CLIENT, sha256(b"secret").digest(), "web"),))
    settings = ServingSettings(authenticator=PeerAuthenticator(accepted))
    asking = FrameServer(Echo(), settings, name="srv", topology_version=lambda: 1)
    async with hanging_up(await asking.start("127.0.0.1:0"), 0) as port:
        with pytest.raises(Unauthorized):
            await connect_frames(port.address, PATIENT, ME)
        assert port.connections == 1
    await asking.close()
