"""Identities against a naive model: whatever is shown and accepted, a peer is nobody that no credential vouches for."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.errors import Unauthorized, Unavailable
from tao.wire.identity import (
    AcceptedCredentials,
    AcceptedToken,
    Credentials,
    PeerIdentity,
    ShownCredentials,
    SpiffeCluster,
    digest_of,
    identify,
)
from tests.rigs.effort import examples

DOMAINS = st.sampled_from(["a.org", "b.org"])
WORDS = st.sampled_from(["x", "y"])
ROLES = st.sampled_from(["leader", "follower", "tailer", "watcher", "operator"])
STATED_ROLES = st.sampled_from(["leader", "operator", "tailer", "watcher", "client", "", "king"])
SECRETS = st.sampled_from(["s", "t"])


@dataclass(frozen=True)
class Certificate:
    """The parts of an id: an application's has a domain and a name."""

    domain: str
    name: str
    cluster: str = ""
    region: str = ""
    role: str = "client"

    @property
    def uri(self) -> str:
        if self.role == "client":
            return f"spiffe://{self.domain}/app/{self.name}"
        return f"spiffe://{self.domain}/tao/{self.cluster}/{self.region}/{self.role}/{self.name}"


@dataclass(frozen=True)
class Token:
    secret: str
    role: str
    caller: str
    expires_at: float


CERTIFICATES = st.one_of(
    st.builds(Certificate, DOMAINS, WORDS), st.builds(Certificate, DOMAINS, WORDS, WORDS, WORDS, ROLES)
)
TOKENS = st.builds(
    Token,
    SECRETS,
    st.one_of(ROLES, st.just("client")),
    st.sampled_from(["", "x", "y"]),
    st.sampled_from([5.0, float("inf")]),
)
LISTED = st.sets(st.tuples(ROLES, WORDS, WORDS), max_size=4)


def might_be(
    stated: Credentials,
    certificates: list[Certificate],
    tokens: list[Token] | None,
    cluster: SpiffeCluster | None,
    listed: set[tuple[str, str, str]],
    now: float,
) -> set[tuple[str, str, str]]:
    """Return every (name, role, caller) that the peer could be: one for each credential that would do by itself."""
    bound_to_the_topology = {"leader", "follower", "tailer"}
    if any(role == "watcher" for role, _, _ in listed):
        bound_to_the_topology.add("watcher")
    wanted = stated.role if stated.role in ("leader", "follower", "tailer", "watcher", "operator") else "client"
    if tokens is None and cluster is None:
        return {(stated.name, stated.role, "")}
    found: set[tuple[str, str, str]] = set()
    if cluster is not None and certificates:
        if len(certificates) > 1:
            return set()
        shown = certificates[0]
        ours = shown.domain == cluster.domain and shown.cluster in ("", cluster.cluster)
        if not ours or wanted not in ("client", shown.role):
            return set()
        if shown.role == "client":
            return {(stated.name, "client", f"app/{shown.name}")}
        if wanted == shown.role != "operator" and stated.name != shown.name:
            return set()
        if shown.role in bound_to_the_topology and (shown.role, shown.name, shown.region) not in listed:
            return set()
        return {(shown.name, shown.role, f"{shown.role}/{shown.name}")}
    for token in tokens or ():
        if token.secret != stated.token or token.expires_at <= now:
            continue
        role = token.role
        if wanted not in ("client", role):
            continue
        if role == "client":
            found.add((stated.name, "client", token.caller))
            continue
        bound = token.caller
        if bound and wanted == role != "operator" and bound != stated.name:
            continue
        name = bound or stated.name
        known = any((role, name, region) in listed for region in ("x", "y"))
        if role in bound_to_the_topology and not known:
            continue
        found.add((name, role, f"{role}/{name}" if bound or known else role))
    return found


@settings(deadline=None, max_examples=examples(2000))
@given(
    st.builds(Credentials, WORDS, STATED_ROLES, st.sampled_from(["", "s", "t", "u"])),
    st.lists(CERTIFICATES, max_size=2),
    st.none() | st.lists(TOKENS, max_size=3, unique_by=lambda token: token.secret),
    st.none() | st.builds(SpiffeCluster, DOMAINS, WORDS),
    LISTED,
    st.sampled_from([4.0, 5.0, 6.0]),
)
def test_a_peer_is_what_one_of_its_credentials_proves_or_is_refused(
    stated: Credentials,
    certificates: list[Certificate],
    tokens: list[Token] | None,
    cluster: SpiffeCluster | None,
    listed: set[tuple[str, str, str]],
    now: float,
) -> None:
    accepted = AcceptedCredentials(
        None
        if tokens is None
        else tuple(
            AcceptedToken(each.secret, each.role, digest_of(each.secret), each.caller, each.expires_at)
            for each in tokens
        ),
        cluster=cluster,
        is_listed=lambda role, name, region: any(
            each[0] == role and name in ("", each[1]) and region in ("", each[2]) for each in listed
        ),
    )
    expected = might_be(stated, certificates, tokens, cluster, listed, now)
    found: PeerIdentity | None
    try:
        found = identify(ShownCredentials(stated, tuple(each.uri for each in certificates)), accepted, now)
    except (Unauthorized, Unavailable):
        found = None
    assert {(found.name, found.role, found.caller)} == expected if found else not expected


@settings(deadline=None, max_examples=examples(500))
@given(st.text(max_size=60), st.lists(st.text(max_size=80) | CERTIFICATES.map(lambda each: each.uri + "/"), max_size=2))
def test_no_text_of_a_peer_proves_anything_without_a_credential(token: str, uris: list[str]) -> None:
    accepted = AcceptedCredentials(
        (AcceptedToken("only", "client", digest_of("a secret that no example has"), "web"),),
        cluster=SpiffeCluster("a.org", "x"),
    )
    shown = ShownCredentials(Credentials("x", "client", token), tuple(uris))
    try:
        identify(shown, accepted, 0.0)
    except Unauthorized:
        return
    raise AssertionError("a peer without a credential was admitted")
