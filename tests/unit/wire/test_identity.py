"""The identity of a peer, by what it shows and what is accepted, as a table."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

from tao.model.errors import SettingsError, TaoError, Unauthorized, Unavailable
from tao.wire import framing, identity
from tao.wire.identity import (
    MAX_TOKEN_BYTES,
    AcceptedCredentials,
    AcceptedToken,
    Credentials,
    PeerAuthenticator,
    PeerIdentity,
    ShownCredentials,
    SpiffeCluster,
    digest_of,
    identify,
)
from tao.wire.v1 import frames_pb2

NOW = 1_000.0
CLUSTER = SpiffeCluster("example.org", "main")
APP = "spiffe://example.org/app/web"
LEADER = "spiffe://example.org/tao/main/east/leader/east-leader-1"


def is_listed(role: str, name: str, region: str) -> bool:
    return (role, name) in (("leader", "east-leader-1"), ("tailer", "east-tailer-1")) and region in ("", "east")


def lists_a_watcher(role: str, name: str, region: str) -> bool:
    return role == "watcher" and name in ("", "w-1") and region in ("", "east")


def listed_token(role: str, secret: str, caller: str = "", expires_at: float = math.inf) -> AcceptedToken:
    return AcceptedToken(f"id of {secret}", role, digest_of(secret), caller, expires_at)


TOKENS = AcceptedCredentials(
    (
        listed_token("client", "of web", "web"),
        listed_token("client", "of web, new", "web", NOW + 1),
        listed_token("client", "of web, old", "web", NOW),
        listed_token("leader", "of leaders"),
        listed_token("tailer", "of tailers"),
        listed_token("operator", "of alice", "alice"),
        listed_token("watcher", "of two roles"),
        listed_token("leader", "of two roles"),
    ),
    is_listed=is_listed,
)
CERTIFICATES = AcceptedCredentials(cluster=CLUSTER, is_listed=is_listed)
WATCHED = AcceptedCredentials(cluster=CLUSTER, is_listed=lists_a_watcher)
WATCHED_BY_TOKENS = replace(TOKENS, is_listed=lists_a_watcher)
BOTH = replace(TOKENS, cluster=CLUSTER)


@dataclass(frozen=True)
class Case:
    accepted: AcceptedCredentials
    role: str = "client"
    name: str = ""
    token: str = ""
    uris: tuple[str, ...] = ()
    expected: tuple[str, str, str] | type[TaoError] = Unauthorized
    says: str = ""


def spiffe(role: str, name: str, region: str = "east", cluster: str = "main", domain: str = "example.org") -> str:
    return f"spiffe://{domain}/tao/{cluster}/{region}/{role}/{name}"


CASES = {
    "without credentials a peer is believed, and anonymous": Case(
        AcceptedCredentials(), "leader", "x", "anything", (LEADER,), ("x", "leader", "")
    ),
    "no token": Case(TOKENS, says="missing or wrong; set the one"),
    "a wrong token": Case(TOKENS, token="of we", says="missing or wrong; set the one"),
    "an unknown role is a client's": Case(TOKENS, "king", "x", "of web", (), ("x", "client", "web")),
    "an application's token": Case(TOKENS, "client", "web-3", "of web", (), ("web-3", "client", "web")),
    "the next token of the same caller": Case(TOKENS, "client", "x", "of web, new", (), ("x", "client", "web")),
    "a token that has expired": Case(TOKENS, token="of web, old", says="id of of web, old has expired; make another"),
    "an application that states a leader's role": Case(TOKENS, "leader", "x", "of web", says="that of a client"),
    "a leader of the topology by the leaders' token": Case(
        TOKENS, "leader", "east-leader-1", "of leaders", (), ("east-leader-1", "leader", "leader/east-leader-1")
    ),
    "a leader that the topology does not list": Case(
        TOKENS, "leader", "east-leader-2", "of leaders", (), Unavailable, "lists no leader 'east-leader-2'; add it"
    ),
    "the leaders' token and another role": Case(TOKENS, "tailer", "t-1", "of leaders", says="that of a leader"),
    "the leaders' token as a client": Case(
        TOKENS, "client", "east-leader-1", "of leaders", (), ("east-leader-1", "leader", "leader/east-leader-1")
    ),
    "a tailer of the topology": Case(
        TOKENS, "tailer", "east-tailer-1", "of tailers", (), ("east-tailer-1", "tailer", "tailer/east-tailer-1")
    ),
    "a tailer that the topology does not list": Case(
        TOKENS, "tailer", "t-1", "of tailers", (), Unavailable, "lists no tailer 't-1'; add it there"
    ),
    "a tailer's certificate": Case(
        CERTIFICATES,
        "tailer",
        "east-tailer-1",
        "",
        (spiffe("tailer", "east-tailer-1"),),
        ("east-tailer-1", "tailer", "tailer/east-tailer-1"),
    ),
    "a certificate of a tailer that the topology does not list": Case(
        CERTIFICATES,
        "tailer",
        "t-1",
        "",
        (spiffe("tailer", "t-1"),),
        Unavailable,
        "lists no tailer 't-1' of region east",
    ),
    "a certificate of a tailer of another region": Case(
        CERTIFICATES,
        "tailer",
        "east-tailer-1",
        "",
        (spiffe("tailer", "east-tailer-1", region="west"),),
        Unavailable,
        "of region west",
    ),
    "a watcher need not be listed, but has no name then": Case(
        TOKENS, "watcher", "w-1", "of two roles", (), ("w-1", "watcher", "watcher")
    ),
    "an operator, whatever it calls itself": Case(
        TOKENS, "operator", "operator", "of alice", (), ("alice", "operator", "operator/alice")
    ),
    "an operator that states no role": Case(
        TOKENS, "client", "x", "of alice", (), ("alice", "operator", "operator/alice")
    ),
    "the second role of a token": Case(
        TOKENS, "leader", "east-leader-1", "of two roles", (), ("east-leader-1", "leader", "leader/east-leader-1")
    ),
    "an application's certificate": Case(CERTIFICATES, "client", "web-3", "", (APP,), ("web-3", "client", "app/web")),
    "a certificate goes before a token": Case(BOTH, "client", "x", "of alice", (APP,), ("x", "client", "app/web")),
    "a certificate without a SPIFFE id leaves it to the token": Case(
        BOTH, "client", "x", "of web", ("https://example.org",), ("x", "client", "web")
    ),
    "an application's certificate and a server's role": Case(
        CERTIFICATES, "operator", "x", "", (APP,), says="operator"
    ),
    "a leader's certificate": Case(
        CERTIFICATES, "leader", "east-leader-1", "", (LEADER,), ("east-leader-1", "leader", "leader/east-leader-1")
    ),
    "a leader that takes another one's name": Case(
        CERTIFICATES, "leader", "east-leader-2", "", (LEADER,), says="that of east-leader-1; 'east-leader-2' must"
    ),
    "a leader of another region": Case(
        CERTIFICATES,
        "leader",
        "east-leader-1",
        "",
        (spiffe("leader", "east-leader-1", region="west"),),
        Unavailable,
        "of region west",
    ),
    "a watcher by its certificate alone, where the topology lists none": Case(
        CERTIFICATES, "watcher", "w-1", "", (spiffe("watcher", "w-1"),), ("w-1", "watcher", "watcher/w-1")
    ),
    "a watcher that the topology lists": Case(
        WATCHED, "watcher", "w-1", "", (spiffe("watcher", "w-1"),), ("w-1", "watcher", "watcher/w-1")
    ),
    "a watcher where the topology lists others": Case(
        WATCHED, "watcher", "w-2", "", (spiffe("watcher", "w-2"),), Unavailable, "lists no watcher 'w-2' of region east"
    ),
    "a watcher of another region": Case(
        WATCHED, "watcher", "w-1", "", (spiffe("watcher", "w-1", region="west"),), Unavailable, "of region west"
    ),
    "a watcher by a token of its role where the topology lists others": Case(
        replace(TOKENS, is_listed=lists_a_watcher),
        "watcher",
        "w-2",
        "of two roles",
        (),
        Unavailable,
        "no watcher 'w-2'",
    ),
    "a watcher without a name": Case(
        WATCHED_BY_TOKENS, "watcher", "", "of two roles", (), Unavailable, "no watcher ''"
    ),
    "an operator by its certificate alone": Case(
        CERTIFICATES, "operator", "operator", "", (spiffe("operator", "bob"),), ("bob", "operator", "operator/bob")
    ),
    "another domain": Case(CERTIFICATES, uris=("spiffe://example.com/app/web",), says="not one of this cluster"),
    "another cluster": Case(CERTIFICATES, uris=(spiffe("leader", "east-leader-1", cluster="test"),), says="/tao/main/"),
    "an unknown role in a certificate": Case(CERTIFICATES, uris=(spiffe("king", "x"),), says="not one of this cluster"),
    "a path that is no name": Case(CERTIFICATES, uris=("spiffe://example.org/app/..",), says="not one of this cluster"),
    "a path that goes on": Case(CERTIFICATES, uris=(f"{APP}/admin",), says="not one of this cluster"),
    "a line break after the id": Case(CERTIFICATES, uris=(f"{APP}\n",), says="not one of this cluster"),
    "several ids": Case(CERTIFICATES, uris=(APP, LEADER), says="issue one with a single id"),
    "no certificate where only those are accepted": Case(
        CERTIFICATES, token="x", says="or a certificate with a SPIFFE id"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_peer_is_who_its_credentials_prove(case: Case) -> None:
    shown = ShownCredentials(Credentials(case.name, case.role, case.token), case.uris, "10.0.0.1:5")
    if isinstance(case.expected, tuple):
        found = identify(shown, case.accepted, NOW)
        assert (found.name, found.role, found.caller) == case.expected
        assert found.address == "10.0.0.1:5"
    else:
        with pytest.raises(case.expected, match=case.says):
            identify(shown, case.accepted, NOW)


def test_an_identity_says_when_its_credential_runs_out() -> None:
    shown = ShownCredentials(Credentials("x", "client", "of web, new"))
    assert identify(shown, TOKENS, NOW).expires_at == NOW + 1
    assert identify(ShownCredentials(Credentials("x", "client", "of web")), TOKENS, NOW).expires_at == math.inf


def test_an_authenticator_follows_its_clock_and_what_is_accepted() -> None:
    times = [NOW, NOW + 1]
    authenticator = PeerAuthenticator(TOKENS, lambda: times.pop(0))
    shown = ShownCredentials(Credentials("x", "client", "of web, new"))
    assert authenticator.identify(shown).caller == "web"
    with pytest.raises(Unauthorized, match="expired"):
        authenticator.identify(shown)
    authenticator.accepted = AcceptedCredentials()
    times.append(NOW)
    assert authenticator.identify(shown) == PeerIdentity("x", "client")


def test_a_change_of_the_topology_concerns_the_servers_among_the_peers() -> None:
    listed = {"east-leader-1"}
    accepted = replace(TOKENS, is_listed=lambda _role, name, _region: name in listed)
    authenticator = PeerAuthenticator(accepted, lambda: NOW)
    client = authenticator.admit(ShownCredentials(Credentials("x", "client", "of web")))
    leader = authenticator.admit(ShownCredentials(Credentials("east-leader-1", "leader", "of leaders")))

    def current() -> list[bool]:
        return [client.is_current, leader.is_current]

    authenticator.listing_changed()
    assert current() == [True, False]
    assert leader.refusal() is None
    assert current() == [True, True]
    listed.clear()
    authenticator.listing_changed()
    assert isinstance(leader.refusal(), Unavailable)
    assert current() == [True, False]
    authenticator.accepted = replace(accepted)
    assert client.refusal() is None
    assert current() == [True, False]


def test_connections_are_identified_again_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(identity, "READMISSION_SECONDS", 0.0)
    identity.readmit(range(3), checked.append)
    assert checked == [0]
    monkeypatch.setattr(identity, "READMISSION_SECONDS", math.inf)
    identity.readmit(range(3), checked.append)
    assert checked == [0, 0, 1, 2]


def test_a_token_that_no_server_takes_is_not_sent() -> None:
    longest = Credentials("x", "client", "t" * MAX_TOKEN_BYTES)
    assert longest.with_token() == longest
    hello = frames_pb2.Hello(protocol_version=framing.PROTOCOL_VERSION, name="n" * 255, role="follower")
    hello.token = longest.token
    assert hello.ByteSize() <= framing.MAX_CONTROL_BYTES
    with pytest.raises(SettingsError, match="3585 bytes; servers take at most 3584"):
        replace(longest, token=longest.token + "t").with_token()


def test_credentials_are_in_use_when_any_kind_is_accepted_and_a_shown_token_is_in_no_log() -> None:
    assert not AcceptedCredentials().are_in_use
    assert AcceptedCredentials(tokens=()).are_in_use
    assert CERTIFICATES.are_in_use
    assert "secret" not in repr(Credentials("web", "client", "secret"))


def test_a_clusters_id_is_parsed_or_its_form_named() -> None:
    assert SpiffeCluster.parse("spiffe://example.org/tao/main") == CLUSTER
    for wrong in ("", "example.org", "spiffe://example.org/tao", "spiffe://Example.org/tao/main", f"{LEADER}"):
        with pytest.raises(SettingsError, match="spiffe://DOMAIN/tao/CLUSTER"):
            SpiffeCluster.parse(wrong)
