"""At the gRPC port with a cluster, a client that shows an accepted certificate takes no turn from strangers.

Such a client makes two connections: over the first one, which has no call, it looks at the server's certificate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tao.wire.grpc_client import connect_grpc
from tao.wire.grpc_server import GrpcServer
from tao.wire.identity import AcceptedCredentials, Credentials, ExpectedServer, PeerAuthenticator, SpiffeCluster
from tao.wire.session import Reply
from tao.wire.settings import DoorstepSettings, ServingSettings, SessionSettings
from tao.wire.tls import ClientTls, TlsFiles
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.certificates import TestAuthority
from tests.rigs.pacing import PATIENT_SECONDS, until

CLUSTER = "spiffe://example.org/tao/main"
TURNS_OF_A_START = 4
ONE_A_DAY = 1 / 86_400


class Echo:
    def handle(self, request: pb.Request, reply: Reply) -> None:
        reply.send(pb.Answer(read=pb.ReadAnswer(values=[b"v"] * len(request.read.obj_ids))))


@dataclass
class Port:
    """A server in a cluster, with as many turns to start connections as one or a few take."""

    server: GrpcServer
    address: str
    authority: TestAuthority

    @property
    def waiting(self) -> int:
        return len(self.server.proxy.starts)

    def client(self, name: str, uri: str = "") -> TlsFiles:
        return self.authority.issue(name, uri, CLUSTER)

    async def stranger(self, files: TlsFiles) -> None:
        """Begin a TLS connection, and wait until it is established or waits for its turn."""
        loop, (host, _, port) = asyncio.get_running_loop(), self.address.partition(":")
        context = files.client_context()
        context.set_alpn_protocols(["h2"])
        begun = loop.create_task(loop.create_connection(asyncio.Protocol, host, int(port), ssl=context))
        await until(lambda: begun.done() or self.waiting == 1)
        begun.cancel()


@asynccontextmanager
async def serving(folder: Path, starts: int) -> AsyncIterator[Port]:
    authority = TestAuthority(folder)
    files = authority.issue("srv", f"{CLUSTER}/home/follower/srv", CLUSTER)
    settings = ServingSettings(
        authenticator=PeerAuthenticator(AcceptedCredentials(cluster=SpiffeCluster.parse(CLUSTER))),
        doorstep=DoorstepSettings(
            stranger_connections_per_second=ONE_A_DAY,
            max_pending_per_address=starts * TURNS_OF_A_START,
            greeting_timeout_seconds=PATIENT_SECONDS,
        ),
    )
    server = GrpcServer(
        Echo(),
        settings,
        name="srv",
        topology_version=lambda: 1,
        choose_shard=lambda: 0,
        tls=files.server_context(),
    )
    address = await server.start("127.0.0.1:0")
    try:
        yield Port(server, address, authority)
    finally:
        await server.close()


async def test_clients_that_look_at_the_certificate_wait_for_no_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, starts=1) as port, asyncio.timeout(PATIENT_SECONDS):
        tls = ClientTls(port.client("web", "spiffe://example.org/app/web"))
        shown = [await tls.look(port.address, ExpectedServer("srv", "follower", "home")) for _ in range(5)]
        session = await connect_grpc(
            port.address,
            SessionSettings(connect_timeout_seconds=PATIENT_SECONDS),
            Credentials("web-1", "client"),
            tls.channel_credentials(shown[0]),
        )
        answer = await session.ask(pb.Request(read=pb.ReadBatch(obj_ids=[1])), PATIENT_SECONDS)
        assert list(answer.read.values) == [b"v"]
        await session.close()


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://example.com/app/web",
        "spiffe://example.org/tao/other/home/follower/follower-1a",
        f"{CLUSTER}/home/follower/not-in-the-topology",
    ],
)
async def test_a_certificate_that_is_not_accepted_keeps_its_turn(tmp_path: Path, uri: str) -> None:
    async with serving(tmp_path, starts=2) as port:
        files = port.client("stranger", uri)
        for _ in range(3):
            await port.stranger(files)
        assert port.waiting == 1


async def test_a_turn_is_given_back_once(tmp_path: Path) -> None:
    async with serving(tmp_path, starts=2) as port, asyncio.timeout(PATIENT_SECONDS):
        await port.stranger(port.client("stranger"))  # which keeps one of two
        tls = ClientTls(port.client("web", "spiffe://example.org/app/web"))
        settings = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
        who = Credentials("web-1", "client")
        session = await connect_grpc(port.address, settings, who, tls.channel_credentials())
        starts = port.server.proxy.starts
        assert starts._saved == pytest.approx(TURNS_OF_A_START, abs=0.1)
        await session.close()
