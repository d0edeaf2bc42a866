"""Identities of peers: what a peer shows and says of itself, what is accepted, and who the peer is by that.

A peer says its name and its role in the greeting. Where credentials are in use, they are claims: role and caller come
from the credential, and a claim that contradicts it is refused. A credential is a certificate with a SPIFFE id, or a
token: a secret text, or a document that an issuer has signed (JWT). `identify` decides, once for each connection or
call, and again for an open connection when its credential runs out or when others are accepted; it does no I/O and
reads no clock.

A token is kept as its SHA-256 digest, with the role that it vouches for. Several may be valid at a time, so that one
can be replaced while everything runs: first the new one is accepted too, then every process shows it, then the old one
is revoked. The secret of a server vouches for its own role only, and an application that leaks its token cannot pose as
a server.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tao.model.errors import SettingsError, TaoError, Unauthorized, Unavailable, unreadable

CLIENT: Final = "client"
SERVER_ROLES: Final = frozenset({"leader", "follower", "tailer", "watcher", "worker", "operator"})
"""Roles that only a credential for them proves; see `tao.serving.requests` for what each may do. Every other role that
a peer may state is taken for `CLIENT`."""
PASSING_ON: Final = frozenset({"leader", "follower"})
"""Roles of servers that pass requests on, and are believed on whose behalf."""
LISTED_ROLES: Final = PASSING_ON | {"tailer"}
"""Roles whose processes the topology always lists: a peer that it does not list is not one of them. Watchers are not
among them, because a topology may list none; once it lists one, it lists all."""
SERVING_ROLES: Final = LISTED_ROLES | {"watcher"}
"""Roles of processes that others connect to."""
MAX_TOKEN_BYTES: Final = 3584
"""Longest token: several times what issuers make. It fits into a greeting over frames beside name and role."""
READMISSION_SECONDS: Final = 0.02
"""Time of one sweep for identifying open connections again: thousands by tokens from a file, a dozen by signed ones
that were not seen before. The others wait for the next sweep, and requests for none."""
CLOCK_SECONDS: Final = 30.0
"""How far the clock of an issuer may be ahead of the server's."""

_SPIFFE: Final = "spiffe://"
_SEGMENT: Final = r"(?!\.\.?(?:/|$))[A-Za-z0-9._-]+"
_CLUSTER_ID: Final = re.compile(rf"spiffe://(?P<domain>[a-z0-9._-]+)/tao/(?P<cluster>{_SEGMENT})")
_PEER_ID: Final = re.compile(
    rf"spiffe://(?P<domain>[a-z0-9._-]+)/(?:app/(?P<app>{_SEGMENT})|"
    rf"tao/(?P<cluster>{_SEGMENT})/(?P<region>{_SEGMENT})/(?P<role>{'|'.join(sorted(SERVER_ROLES))})/(?P<name>{_SEGMENT}))"
)


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The process at the other end. Where credentials are in use, ``role`` and ``caller`` are proven by them."""

    name: str
    """The server's name in the topology; for an application what it calls itself, for logs."""

    role: str

    address: str = ""
    """The address from which the connection comes, as `tao.wire.doorstep.name_of` writes it, for logs."""

    caller: str = ""
    """The name that rights, fair shares and audit know the peer by, never what it says of itself: ``app/NAME`` for the
    certificate of an application, the caller of its token, ``ROLE/NAME`` for a server or operator. Empty, which is
    anonymous: no credentials are in use."""

    expires_at: float = math.inf
    """The time at which the credential expires, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The name and role that a process states when it connects, and its token. ``token`` is empty when the servers ask
    for none, or when its certificate identifies the process. ``token_file`` has the token in its place, and is read for
    each connection, so that a new token needs no restart."""

    name: str
    role: str
    token: str = field(default="", repr=False)
    token_file: Path | None = None

    def with_token(self) -> Credentials:
        """Return these credentials with the token that the file has now. Raises `SettingsError`, also for a token that
        is longer than servers take."""
        found = self
        if self.token_file is not None:
            found = replace(self, token=read_secret(self.token_file), token_file=None)
        if (length := len(found.token.encode())) > MAX_TOKEN_BYTES:
            raise SettingsError(f"a token of {length} bytes; servers take at most {MAX_TOKEN_BYTES}: name fewer claims")
        return found


@dataclass(frozen=True, slots=True)
class ShownCredentials:
    """What a peer has shown: what its greeting states, and the URIs of its certificate, which has been verified."""

    stated: Credentials
    uris: tuple[str, ...] = ()
    address: str = ""


@dataclass(frozen=True, slots=True)
class AcceptedToken:
    """A token that is accepted. ``id`` names it for people, who never see the token again."""

    id: str
    role: str
    """The only role that it vouches for."""

    digest: bytes = field(repr=False)
    """The SHA-256 digest of the token."""

    caller: str = ""
    """For `CLIENT` the caller. For another role the name of the only server or operator that may show it; empty: every
    server of that role may."""

    expires_at: float = math.inf
    """The time at which it expires, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class SpiffeCluster:
    """A cluster by SPIFFE's form: its servers are ``spiffe://DOMAIN/tao/CLUSTER/REGION/ROLE/NAME``, the applications
    that it serves ``spiffe://DOMAIN/app/NAME``."""

    domain: str
    cluster: str

    @classmethod
    def parse(cls, text: str) -> SpiffeCluster:
        """Parse ``spiffe://DOMAIN/tao/CLUSTER``. Raises `SettingsError`."""
        found = _CLUSTER_ID.fullmatch(text)
        if found is None:
            raise SettingsError(f"{text!r} is no cluster's id: write it as spiffe://DOMAIN/tao/CLUSTER")
        return cls(found["domain"], found["cluster"])

    def __str__(self) -> str:
        return f"spiffe://{self.domain}/tao/{self.cluster}"


class SignedToken(NamedTuple):
    """What a signed token says; its signature is verified, its times are not checked yet."""

    caller: str
    not_before: float
    """Seconds since 1970; 0 where the token does not say."""
    expires_at: float


def _lists_nobody(_role: str, _name: str, _region: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class AcceptedCredentials:
    """The credentials that a server accepts. Where none are in use, every peer that reaches the port is believed."""

    tokens: tuple[AcceptedToken, ...] | None = None
    """None: tokens are not in use. Empty: they are, and none is accepted at the moment."""

    verify_signed: Callable[[str], SignedToken] | None = None
    """Verify the signature of a signed token of an application. Raises `Unauthorized`. None: they are not in use."""

    cluster: SpiffeCluster | None = None
    """The cluster whose certificates identify their bearers; None: a certificate identifies nobody."""

    is_listed: Callable[[str, str, str], bool] = field(default=_lists_nobody, compare=False)
    """Return whether the topology lists a server, by role, name and region; an empty name or region means any."""

    by_digest: dict[bytes, list[AcceptedToken]] = field(init=False, repr=False, compare=False)
    """The tokens by digest. One secret may be listed for several roles."""

    def __post_init__(self) -> None:
        by_digest: dict[bytes, list[AcceptedToken]] = {}
        for token in self.tokens or ():
            by_digest.setdefault(token.digest, []).append(token)
        object.__setattr__(self, "by_digest", by_digest)

    @property
    def are_in_use(self) -> bool:
        """Whether peers must show a credential."""
        return not (self.tokens is None and self.verify_signed is None and self.cluster is None)


def read_secret(path: Path) -> str:
    """Return the secret in a file, without the line break behind it. Raises `SettingsError`."""
    try:
        secret = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(unreadable(path, error)) from error
    if not secret:
        raise SettingsError(f"{path}: there is no secret in this file")
    return secret


def digest_of(token: str) -> bytes:
    """Return the digest by which a token is kept. A plain hash is enough: a token is random, and no dictionary has
    it."""
    return sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True)
class _Proof:
    """What a credential proves. An empty ``name`` or ``region`` is one that it does not say."""

    role: str
    name: str = ""
    caller: str = ""
    region: str = ""
    expires_at: float = math.inf


def identify(shown: ShownCredentials, accepted: AcceptedCredentials, now: float) -> PeerIdentity:
    """Return who a peer is at ``now``, in seconds since 1970. A certificate with a SPIFFE id goes before a token.

    Raises `Unauthorized` for credentials that are missing, wrong, expired, or for another role or name than the peer
    states; `Unavailable` for one of `LISTED_ROLES` that the topology does not list here, or not yet, and for a watcher
    where it lists others."""
    stated, address = shown.stated, shown.address
    if not accepted.are_in_use:
        return PeerIdentity(stated.name, stated.role, address)
    stated_role = stated.role if stated.role in SERVER_ROLES else CLIENT
    proof = _certificate_proof(shown.uris, accepted.cluster) or _token_proof(stated.token, stated_role, accepted, now)
    role = proof.role
    if stated_role not in (CLIENT, role):
        raise Unauthorized(
            f"this credential is that of a {role}; a peer with the role {stated_role} must show one of its own"
        )
    if role == CLIENT:
        return PeerIdentity(stated.name, role, address, proof.caller, proof.expires_at)
    name = proof.name or stated.name
    if stated_role == role != "operator" and stated.name != name:
        raise Unauthorized(f"this credential is that of {name}; {stated.name!r} must show its own")
    is_listed = name != "" and accepted.is_listed(role, name, proof.region)
    if not is_listed and (role in LISTED_ROLES or (role == "watcher" and accepted.is_listed(role, "", ""))):
        where = f" of region {proof.region}" if proof.region else ""
        raise Unavailable(f"the topology in use here lists no {role} {name!r}{where}; add it there, or wait for it")
    # A name that neither the credential nor the topology confirms is a claim.
    caller = f"{role}/{name}" if proof.name or is_listed else role
    return PeerIdentity(name, role, address, caller, proof.expires_at)


@dataclass(frozen=True, slots=True)
class ExpectedServer:
    """Whose certificate must be at the address of a server. An empty text stands for any: where only an address is
    known yet, that is all of them."""

    name: str = ""
    role: str = ""
    region: str = ""

    def __str__(self) -> str:
        where = f" of region {self.region}" if self.region else ""
        return f"{self.role} {self.name}{where}".strip() or "a server"


def check_server(uris: tuple[str, ...], cluster: SpiffeCluster, expected: ExpectedServer) -> None:
    """Raise `Unauthorized` unless the certificate of a server that was connected to is that of the expected one of the
    cluster."""
    try:
        proof = _certificate_proof(uris, cluster)
        if proof is None:
            raise Unauthorized(
                f"the server's certificate has no SPIFFE id; issue one of cluster {cluster.cluster} to it"
            )
    except Unauthorized as error:
        refusal = Unauthorized(
            f"this process takes only servers of {cluster} (`cluster` of its TLS files, --cluster): {error.message}"
        )
        refusal.is_refusal = True  # it may be this process that has a wrong cluster in its settings
        raise refusal from error
    wanted = ((expected.name, proof.name), (expected.role, proof.role), (expected.region, proof.region))
    if proof.role not in SERVING_ROLES or any(one not in ("", shown) for one, shown in wanted):
        found = ExpectedServer(proof.name, proof.role, proof.region) if proof.name else proof.caller
        raise Unauthorized(
            f"the certificate at this address is that of {found}, not of {expected}; check the address in the topology"
        )


def _certificate_proof(uris: tuple[str, ...], cluster: SpiffeCluster | None) -> _Proof | None:
    """Return what a certificate proves; None when it has no SPIFFE id, or none identifies anybody here."""
    ids = [uri for uri in uris if uri.startswith(_SPIFFE)] if cluster is not None else []
    if cluster is None or not ids:
        return None
    if len(ids) > 1:
        raise Unauthorized(f"the certificate has several SPIFFE ids, {' and '.join(ids)}; issue one with a single id")
    found = _PEER_ID.fullmatch(ids[0])
    own = f"spiffe://{cluster.domain}"
    if found is None or found["domain"] != cluster.domain or found["cluster"] not in (None, cluster.cluster):
        raise Unauthorized(
            f"the certificate's id {ids[0]} is not one of this cluster; issue one of the form {own}/app/NAME for an "
            f"application, {own}/tao/{cluster.cluster}/REGION/ROLE/NAME for a server or operator"
        )
    if found["app"] is not None:
        return _Proof(CLIENT, caller=f"app/{found['app']}")
    return _Proof(found["role"], name=found["name"], region=found["region"])


def _token_proof(shown: str, stated_role: str, accepted: AcceptedCredentials, now: float) -> _Proof:
    """Return what the shown token proves. Raises `Unauthorized`."""
    # The time of this look-up may say how much of a digest is right. That helps nobody: a digest nearer to it cannot be
    # aimed at, and none leads back to the secret, which is random.
    found = accepted.by_digest.get(digest_of(shown), [])
    valid = [token for token in found if now < token.expires_at]
    if not found and accepted.verify_signed is not None and _looks_signed(shown):
        return _signed_proof(accepted.verify_signed(shown), now)
    if not shown or not found:
        or_certificate = ", or a certificate with a SPIFFE id of this cluster" if accepted.cluster else ""
        raise Unauthorized(f"the token is missing or wrong; set the one that the servers accept{or_certificate}")
    if not valid:
        raise Unauthorized(f"the token {found[0].id} has expired; make another one: tao token new")
    # One secret may be listed for several roles; the peer says which of them it has.
    token = next((each for each in valid if each.role == stated_role), valid[0])
    name, caller = ("", token.caller) if token.role == CLIENT else (token.caller, "")
    return _Proof(token.role, name=name, caller=caller, expires_at=token.expires_at)


def _looks_signed(shown: str) -> bool:
    return shown.count(".") == 2 and len(shown) <= MAX_TOKEN_BYTES


def _signed_proof(token: SignedToken, now: float) -> _Proof:
    if now >= token.expires_at:
        raise Unauthorized("the signed token has expired; have another one issued")
    if now < token.not_before - CLOCK_SECONDS:
        raise Unauthorized("the signed token is not valid yet; compare the clocks of its issuer and of this server")
    return _Proof(CLIENT, caller=token.caller, expires_at=token.expires_at)


class PeerAuthenticator:
    """Identifies peers by the credentials that are accepted now, which may change while connections are open."""

    def __init__(
        self, accepted: AcceptedCredentials | None = None, unix_seconds: Callable[[], float] = time.time
    ) -> None:
        self.accepted = accepted or AcceptedCredentials()
        self.listing = 0
        """The number of times that what the topology lists has changed."""
        self._unix_seconds: Final = unix_seconds

    def identify(self, shown: ShownCredentials) -> PeerIdentity:
        """Return who the peer is. Raises as `identify`."""
        return identify(shown, self.accepted, self._unix_seconds())

    def accepts_certificate(self, uris: tuple[str, ...]) -> bool:
        """Return whether a certificate with these URIs is all that its bearer has to show."""
        try:
            proof = _certificate_proof(uris, self.accepted.cluster)
            if proof is None:
                return False
            self.identify(ShownCredentials(Credentials(proof.name, proof.role), uris))
        except TaoError:
            return False
        return True

    def listing_changed(self) -> None:
        """Have the servers among the peers of open connections identified again: the topology may list others now. It
        says nothing about applications, so their connections cost nothing."""
        self.listing += 1

    def admit(self, shown: ShownCredentials) -> Admission:
        """Return the admission of a peer whose connection stays open. Raises as `identify`."""
        return Admission(self, shown)

    def still_valid(self, peer: PeerIdentity) -> bool:
        """Return whether the credential of a peer has not run out."""
        return peer.expires_at == math.inf or self._unix_seconds() < peer.expires_at


class Admission:
    """The peer of an open connection, and what it has shown. Made by `PeerAuthenticator.admit`."""

    __slots__ = ("_accepted", "_authenticator", "_listing", "_shown", "peer")

    def __init__(self, authenticator: PeerAuthenticator, shown: ShownCredentials) -> None:
        self._authenticator = authenticator
        self._shown = shown
        self._accepted = authenticator.accepted
        self._listing = authenticator.listing
        self.peer = authenticator.identify(shown)

    @property
    def is_current(self) -> bool:
        """Whether nothing has changed since the peer was identified. Cheap."""
        authenticator = self._authenticator
        return (
            self._accepted is authenticator.accepted
            and (self._listing == authenticator.listing or self.peer.role == CLIENT)
            and authenticator.still_valid(self.peer)
        )

    def refusal(self) -> TaoError | None:
        """Identify the peer again. Returns why it is not admitted any more: its credential has run out, or what is
        accepted or listed has changed."""
        accepted, listing = self._authenticator.accepted, self._authenticator.listing
        try:
            found = self._authenticator.identify(self._shown)
        except TaoError as error:
            return error
        if replace(found, expires_at=self.peer.expires_at) != self.peer:
            return Unauthorized(f"this credential is that of {found.role} {found.caller} now; connect again")
        self.peer, self._accepted, self._listing = found, accepted, listing
        return None


Connection = TypeVar("Connection")


def readmit(connections: Iterable[Connection], check: Callable[[Connection], None]) -> None:
    """Call ``check`` with connections whose admission is not current, one at least, for `READMISSION_SECONDS`."""
    until = time.monotonic() + READMISSION_SECONDS
    for connection in connections:
        check(connection)
        if time.monotonic() >= until:
            return
