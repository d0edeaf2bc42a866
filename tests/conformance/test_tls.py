"""TLS from the same PEM files on both transports: between servers, with clients, and with unknown peers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tao.model.errors import SettingsError, Unauthorized, Unavailable
from tao.model.topology import CacheServer
from tao.serving.requests import Listeners
from tao.wire.identity import AcceptedCredentials, Credentials, PeerAuthenticator
from tao.wire.links import Links, LinkSettings
from tao.wire.settings import ServingSettings
from tao.wire.tls import TlsFiles
from tests.conformance.transport_rig import ME, PATIENT_SECONDS, Handler, read
from tests.rigs.certificates import TestAuthority
from tests.rigs.ports import free_ports

PEER = Credentials("leader-1", "leader", "secret")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("tls"))


class Served:
    """Listeners on loopback, and links to them by either transport."""

    def __init__(self, tls: TlsFiles) -> None:
        grpc, frames = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.server = CacheServer(name="follower-1", grpc=grpc, frames=frames)
        settings = ServingSettings(authenticator=PeerAuthenticator(AcceptedCredentials.of_secrets("secret", "")))
        self.faces = Listeners(self.server, Handler(), settings, lambda: 1, lambda: 0, tls=tls)

    async def ask(self, transport: str, tls: TlsFiles | None, credentials: Credentials = PEER) -> list[bytes]:
        links = Links(LinkSettings(transport="grpc" if transport == "grpc" else "frames"), credentials, tls)
        try:
            return list((await links.to(self.server).ask(read(1), PATIENT_SECONDS)).read.values)
        finally:
            await links.close()


@pytest.fixture
async def demanding(authority: TestAuthority) -> AsyncIterator[Served]:
    served = Served(authority.issue("follower-1"))
    await served.faces.start()
    yield served
    await served.faces.close()


@pytest.fixture
async def open_to_clients(authority: TestAuthority) -> AsyncIterator[Served]:
    served = Served(replace(authority.issue("follower-1"), demand_certificates=False))
    await served.faces.start()
    yield served
    await served.faces.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_peers_with_certificates_of_the_same_authority_talk_and_others_do_not(
    transport: str, demanding: Served, authority: TestAuthority, tmp_path: Path
) -> None:
    leader = authority.issue("leader-1")
    stranger = replace(TestAuthority(tmp_path, "another authority").issue("leader-1"), authorities=authority.file)
    assert await demanding.ask(transport, leader) == [b"v1"]
    for outsider in (None, TlsFiles(authorities=authority.file), stranger):
        with pytest.raises(Unavailable):
            await demanding.ask(transport, outsider)
    with pytest.raises(Unauthorized):  # the token still decides who the peer is
        await demanding.ask(transport, leader, ME)


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_clients_need_no_certificate_where_none_is_demanded(
    transport: str, open_to_clients: Served, authority: TestAuthority
) -> None:
    client = TlsFiles(authorities=authority.file)
    assert await open_to_clients.ask(transport, client, Credentials("web", "client", "secret")) == [b"v1"]
    with pytest.raises(Unavailable):
        await open_to_clients.ask(transport, None)
    with pytest.raises(Unavailable):  # the system's authorities have not signed it
        await open_to_clients.ask(transport, TlsFiles())


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "no.pem", tmp_path / "no.key")
    for use in (missing.server_context, missing.client_context, missing.server_credentials):
        with pytest.raises(SettingsError, match=r"no\.(pem|key)"):
            use()
    with pytest.raises(SettingsError, match="private key"):
        TlsFiles(authorities=tmp_path / "authority.pem").server_context()


def test_no_file_means_plain_connections() -> None:
    assert TlsFiles().if_set is None
