"""TLS from the same PEM files on both transports: between servers, with clients, and with unknown peers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tao.model.errors import SettingsError, TlsMismatch, Unauthorized, Unavailable
from tao.model.topology import CacheServer, ServerPlace
from tao.serving.requests import Listeners
from tao.storage.tls import DatabaseTlsFiles
from tao.wire.identity import (
    AcceptedCredentials,
    AcceptedToken,
    Credentials,
    PeerAuthenticator,
    PeerIdentity,
    SpiffeCluster,
    digest_of,
)
from tao.wire.links import Links, LinkSettings
from tao.wire.settings import ServingSettings, SessionSettings
from tao.wire.tls import TlsFiles
from tests.conformance.transport_rig import ME, Handler, read, until
from tests.rigs.certificates import TestAuthority, encrypt_key
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.ports import free_ports

CLUSTER = "spiffe://example.org/tao/main"
PEER = Credentials("leader-1", "leader", "secret")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> TestAuthority:
    return TestAuthority(tmp_path_factory.mktemp("tls"))


def patient(transport: str) -> LinkSettings:
    session = SessionSettings(connect_timeout_seconds=PATIENT_SECONDS)
    return LinkSettings(transport="grpc" if transport == "grpc" else "frames", session=session)


class Served:
    """Listeners on loopback, and links to them by either transport."""

    def __init__(self, tls: TlsFiles | None, accepted: AcceptedCredentials | None = None) -> None:
        grpc, frames = (f"127.0.0.1:{port}" for port in free_ports(2))
        self.server = CacheServer(name="follower-1", grpc=grpc, frames=frames)
        accepted = accepted or AcceptedCredentials(
            (AcceptedToken("leader-1", "leader", digest_of("secret")),), is_listed=lambda *_: True
        )
        settings = ServingSettings(authenticator=PeerAuthenticator(accepted))
        self.handler = Handler()
        self.listeners = Listeners(self.server, self.handler, settings, lambda: 1, lambda: 0, tls=tls)

    async def ask(
        self,
        transport: str,
        tls: TlsFiles | None,
        credentials: Credentials = PEER,
        name: str = "follower-1",
        place: ServerPlace | None = None,
    ) -> list[bytes]:
        links = Links(patient(transport), credentials, tls)
        links.keep_only({} if place is None else {name: place})
        try:
            server = msgspec.structs.replace(self.server, name=name)
            return list((await links.to(server).ask(read(1), PATIENT_SECONDS)).read.values)
        finally:
            await links.close()

    async def peer(self, transport: str, tls: TlsFiles, credentials: Credentials) -> PeerIdentity:
        """Return who the server takes a peer for."""
        links = Links(patient(transport), credentials, tls)
        asked = asyncio.ensure_future(links.to(self.server).ask(read(1, critical=True), PATIENT_SECONDS))
        await until(lambda: bool(self.handler.held) or asked.done())
        if asked.done():
            await asked
        found = self.handler.held.pop().peer
        asked.cancel()
        await links.close()
        return found


@pytest.fixture
async def demanding(authority: TestAuthority) -> AsyncIterator[Served]:
    served = Served(authority.issue("follower-1"))
    await served.listeners.start()
    yield served
    await served.listeners.close()


@pytest.fixture
async def open_to_clients(authority: TestAuthority) -> AsyncIterator[Served]:
    served = Served(replace(authority.issue("follower-1"), demand_certificates=False))
    await served.listeners.start()
    yield served
    await served.listeners.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_peers_with_certificates_of_the_same_authority_talk_and_others_do_not(
    transport: str, demanding: Served, authority: TestAuthority, tmp_path: Path
) -> None:
    leader = authority.issue("leader-1")
    stranger = replace(TestAuthority(tmp_path, "another authority").issue("leader-1"), authorities=authority.file)
    assert await demanding.ask(transport, leader) == [b"v1"]
    with pytest.raises(TlsMismatch):
        await demanding.ask(transport, None)
    for outsider in (TlsFiles(authorities=authority.file), stranger):
        with pytest.raises(Unavailable, match=r"that demands a certificate: .* --certificate and --private-key"):
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


@pytest.fixture
async def without_tls() -> AsyncIterator[Served]:
    served = Served(None)
    await served.listeners.start()
    yield served
    await served.listeners.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_a_peer_without_tls_at_a_server_with_it_and_the_other_way_round_hear_what_to_do(
    transport: str, demanding: Served, without_tls: Served, authority: TestAuthority
) -> None:
    port = demanding.server.frames if transport == "frames" else demanding.server.grpc
    with pytest.raises(
        TlsMismatch, match=f"^follower-1: {port} speaks TLS, and this process connects without it: .*--ca"
    ):
        await demanding.ask(transport, None)
    with pytest.raises(TlsMismatch, match=f"^{port} speaks TLS"):
        await demanding.ask(transport, None, name=port)
    port = without_tls.server.frames if transport == "frames" else without_tls.server.grpc
    said = f"^follower-1: {port} answers without TLS, and this process connects with it: "
    for tls in (authority.issue("leader-1"), authority.issue("leader-1", uri_of("leader", "leader-1"), CLUSTER)):
        with pytest.raises(TlsMismatch, match=said):
            await without_tls.ask(transport, tls)
    assert await without_tls.ask(transport, None) == [b"v1"]


async def test_a_peer_without_tls_is_refused_at_its_first_connection(demanding: Served) -> None:
    """The frames port says at once that it speaks TLS: the peer need not try again, nor ask by another connection."""
    _, frames = demanding.listeners.doorsteps
    with pytest.raises(TlsMismatch):
        await demanding.ask("frames", None)
    assert frames.turned_away == {"tls_failed": 1}
    assert len(frames.pending) == 0


def uri_of(role: str, name: str) -> str:
    return f"{CLUSTER}/east/{role}/{name}"


@pytest.fixture
async def by_ids(authority: TestAuthority) -> AsyncIterator[Served]:
    accepted = AcceptedCredentials(
        cluster=SpiffeCluster.parse(CLUSTER), is_listed=lambda role, name, _: (role, name) == ("leader", "leader-1")
    )
    served = Served(authority.issue("follower-1", uri_of("follower", "follower-1"), CLUSTER), accepted)
    await served.listeners.start()
    yield served
    await served.listeners.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_a_peer_is_known_by_the_id_in_its_certificate(
    transport: str, by_ids: Served, authority: TestAuthority
) -> None:
    web = authority.issue("web", "spiffe://example.org/app/web", CLUSTER)
    leader = authority.issue("leader-1", uri_of("leader", "leader-1"), CLUSTER)
    found = await by_ids.peer(transport, web, Credentials("web-17", "client"))
    assert (found.name, found.role, found.caller) == ("web-17", "client", "app/web")
    found = await by_ids.peer(transport, leader, Credentials("leader-1", "leader"))
    assert (found.name, found.role, found.caller) == ("leader-1", "leader", "leader/leader-1")
    for stated in (Credentials("leader-1", "leader"), Credentials("web", "operator")):
        with pytest.raises(Unauthorized, match="that of a client"):
            await by_ids.ask(transport, web, stated)
    with pytest.raises(Unauthorized, match="that of leader-1"):
        await by_ids.ask(transport, leader, Credentials("leader-2", "leader"))
    unlisted = authority.issue("leader-2", uri_of("leader", "leader-2"), CLUSTER)
    with pytest.raises(Unavailable, match="lists no leader 'leader-2'"):
        await by_ids.ask(transport, unlisted, Credentials("leader-2", "leader"))
    with pytest.raises(Unauthorized, match="SPIFFE id"):
        await by_ids.ask(transport, authority.issue("nobody", "", CLUSTER), Credentials("web", "client"))


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_a_certificate_that_is_not_demanded_names_its_peer(transport: str, authority: TestAuthority) -> None:
    own = authority.issue("follower-1", uri_of("follower", "follower-1"), CLUSTER)
    accepted = AcceptedCredentials(cluster=SpiffeCluster.parse(CLUSTER))
    served = Served(replace(own, demand_certificates=False), accepted)
    await served.listeners.start()
    web = authority.issue("web", "spiffe://example.org/app/web", CLUSTER)
    assert (await served.peer(transport, web, Credentials("web-17", "client"))).caller == "app/web"
    with pytest.raises(Unauthorized, match="the token is missing"):
        await served.ask(transport, TlsFiles(authorities=authority.file), Credentials("web-17", "client"))
    await served.listeners.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_a_client_asks_no_server_but_the_one_that_the_topology_names(
    transport: str, by_ids: Served, authority: TestAuthority
) -> None:
    web, credentials = authority.issue("web", "spiffe://example.org/app/web", CLUSTER), Credentials("web", "client")
    with pytest.raises(Unauthorized, match="that of follower follower-1 of region east, not of follower-2"):
        await by_ids.ask(transport, web, credentials, "follower-2")
    address = by_ids.server.grpc if transport == "grpc" else f"frames:{by_ids.server.frames}"
    assert await by_ids.ask(transport, web, credentials, address) == [b"v1"]
    posing = Served(authority.issue("web", "spiffe://example.org/app/web", CLUSTER))
    await posing.listeners.start()
    with pytest.raises(Unauthorized, match="that of app/web, not of follower-1"):
        await posing.ask(transport, web, credentials)
    await posing.listeners.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_a_server_answers_only_in_the_role_region_and_cluster_of_its_certificate(
    transport: str, by_ids: Served, authority: TestAuthority
) -> None:
    peers = [
        (authority.issue("web", "spiffe://example.org/app/web", CLUSTER), Credentials("web", "client")),
        (authority.issue("leader-1", uri_of("leader", "leader-1"), CLUSTER), Credentials("leader-1", "leader")),
    ]
    for files, credentials in peers:
        for role, region in (("leader", "east"), ("follower", "west"), ("watcher", "east")):
            with pytest.raises(
                Unauthorized, match=f"follower-1 of region east, not of {role} follower-1 of .* {region}"
            ):
                await by_ids.ask(transport, files, credentials, place=ServerPlace(role, region))
        place = ServerPlace("follower", "east")
        assert await by_ids.ask(transport, files, credentials, place=place) == [b"v1"]
        other_cluster = replace(files, cluster="spiffe://example.org/tao/other")
        with pytest.raises(
            Unauthorized, match=r"only servers of spiffe://example\.org/tao/other .*not one of this cluster"
        ):
            await by_ids.ask(transport, other_cluster, credentials, place=place)


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_changed_files_are_used_for_new_connections_and_wrong_ones_are_not(
    transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tao.serving.requests.CERTIFICATES_SECONDS", 0.01)
    old, new = TestAuthority(tmp_path / "old", "old authority"), TestAuthority(tmp_path / "new", "new one")
    files = old.issue("follower-1")
    served = Served(files)
    await served.listeners.start()
    peer = replace(old.issue("leader-1"), authorities=tmp_path / "trusted.pem")
    trusted = tmp_path / "trusted.pem"
    trusted.write_bytes(old.file.read_bytes() + new.file.read_bytes())
    links = Links(patient(transport), PEER, peer)
    link = links.to(served.server)
    assert (await link.ask(read(1), PATIENT_SECONDS)).read.values

    async def answers() -> bool:
        try:
            return bool(await served.ask(transport, peer))
        except Unavailable:
            return False

    assert files.certificate is not None
    assert files.private_key is not None
    files.private_key.write_text("not a key")
    replaced = new.issue("follower-1")
    assert replaced.certificate is not None
    assert replaced.private_key is not None
    assert await answers()
    old.file.write_bytes(new.file.read_bytes() + old.file.read_bytes())
    files.certificate.write_bytes(replaced.certificate.read_bytes())
    files.private_key.write_bytes(replaced.private_key.read_bytes())
    trusted.write_bytes(new.file.read_bytes())
    async with asyncio.timeout(PATIENT_SECONDS):
        while not await answers():  # noqa: ASYNC110 - until the server shows the new authority's certificate
            await asyncio.sleep(0.01)
    assert (await link.ask(read(1), PATIENT_SECONDS)).read.values, "the open connection has been kept"
    await links.close()
    await served.listeners.close()


@pytest.mark.parametrize("transport", ["frames", "grpc"])
async def test_a_server_speaks_tls_1_3_and_nothing_below(transport: str, tmp_path: Path) -> None:
    files = replace(TestAuthority(tmp_path).issue("follower-1"), demand_certificates=False)
    served = Served(files)
    await served.listeners.start()
    address = served.server.grpc if transport == "grpc" else served.server.frames
    host, port = address.split(":")
    try:

        async def version(only: ssl.TLSVersion) -> str | None:
            context = ssl.create_default_context(cafile=str(files.authorities))
            context.set_alpn_protocols(["h2"])
            context.minimum_version = context.maximum_version = only
            _, writer = await asyncio.open_connection(host, int(port), ssl=context)
            found: str | None = writer.get_extra_info("ssl_object").version()
            writer.transport.abort()
            return found

        assert await version(ssl.TLSVersion.TLSv1_3) == "TLSv1.3"
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await version(ssl.TLSVersion.TLSv1_2)
    finally:
        await served.listeners.close()


def test_ids_need_authorities_and_a_cluster_of_spiffe_s_form() -> None:
    with pytest.raises(SettingsError, match=r"tls\.authorities"):
        TlsFiles(cluster=CLUSTER)
    with pytest.raises(SettingsError, match="spiffe://DOMAIN/tao/CLUSTER"):
        TlsFiles(authorities=Path("ca.pem"), cluster="main")


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    missing = TlsFiles(tmp_path / "no.pem", tmp_path / "no.key")
    for use in (missing.server_context, missing.client_context):
        with pytest.raises(SettingsError, match=r"no\.pem: cannot be read: No such file"):
            use()
    with pytest.raises(SettingsError, match="private key"):
        TlsFiles(authorities=tmp_path / "authority.pem").server_context()


def test_files_that_do_not_belong_together_are_named(authority: TestAuthority, tmp_path: Path) -> None:
    web, other = authority.issue("web"), authority.issue("other")
    with pytest.raises(SettingsError, match=r"certificate \S*web\S* cannot be used with the private key \S*other"):
        replace(web, private_key=other.private_key).client_context()
    with pytest.raises(SettingsError, match=r"certificate \S*web\S* cannot be used alone: no private key is named"):
        replace(web, private_key=None).client_context()
    (tmp_path / "empty.pem").touch()
    with pytest.raises(SettingsError, match=r"authorities \S*empty.pem cannot be used"):
        replace(web, authorities=tmp_path / "empty.pem").client_context()


def test_an_encrypted_key_is_refused_and_no_terminal_is_asked_for_its_passphrase(authority: TestAuthority) -> None:
    files = authority.issue("leader-1")
    encrypt_key(files)
    database = DatabaseTlsFiles(
        authorities=files.authorities, certificate=files.certificate, private_key=files.private_key
    )
    for use in (files.server_context, files.client_context, lambda: database.if_set):
        with pytest.raises(SettingsError, match=r"leader-1\.key is encrypted, .*openssl pkey -in"):
            use()


def test_no_file_means_plain_connections() -> None:
    assert TlsFiles().if_set is None
