"""Identities of peers: the name and role that a peer states, and the shared secret that proves them.

Servers and clients may have different tokens, so that an application that leaks its own cannot pose as a server. A
server may accept several of each, so that a secret can be changed while everything runs: first the servers accept old
and new, then every process shows the new one, then the old one is removed.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final

from tao.model.errors import SettingsError, Unauthorized

VOUCHED_ROLES: Final = frozenset({"leader", "follower", "tailer", "operator"})
"""Roles that only a server's token proves; see `tao.serving.requests` for what each may do."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The process at the other end, as it names itself. ``address`` is where its connection comes from, for logs.
    ``caller`` is the name that its credentials prove, empty when they prove none."""

    name: str
    role: str
    address: str = ""
    caller: str = ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials that a process shows when it connects. ``token`` is empty when the servers ask for none."""

    name: str
    role: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """The accepted tokens: one of ``servers`` proves any role, one of ``clients`` only the role of a client. When both
    are empty, every peer that reaches the port is believed. Without ``clients``, clients show the servers' token.

    Raises `SettingsError` for tokens of clients alone, which would leave servers without any.
    """

    servers: tuple[str, ...] = field(default=(), repr=False)
    clients: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.clients and not self.servers:
            raise SettingsError(
                "there is a client_token but no token: servers need one of their own to show each other"
            )

    @classmethod
    def of(cls, token: str, client_token: str) -> AcceptedTokens:
        """Make tokens from settings, where an empty text means none. Raises as the constructor does."""
        return cls((token,) if token else (), (client_token,) if client_token else ())


def check_token(accepted: AcceptedTokens, shown: str, role: str) -> None:
    """Raise `Unauthorized` unless no token is asked for, or ``shown`` proves ``role``. The check takes equally long for
    a token that is nearly right, so that it cannot be guessed piece by piece."""
    if not accepted.servers:
        return
    of_servers = [hmac.compare_digest(token.encode(), shown.encode()) for token in accepted.servers]
    of_clients = [hmac.compare_digest(token.encode(), shown.encode()) for token in accepted.clients]
    if any(of_servers):
        return
    if not any(of_clients):
        raise Unauthorized("the token is missing or wrong; set the one that the servers accept")
    if role in VOUCHED_ROLES:
        raise Unauthorized(f"this is the clients' token; a peer with the role {role} must send the servers' token")
