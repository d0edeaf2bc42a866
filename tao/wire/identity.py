"""Who is at the other end: the name and role that a peer states, and the shared secret that vouches for it.

Servers and clients may have different tokens, so that an application that leaks its own cannot pose as a server. A
server may accept several of each, so that a secret can be changed while everything runs: first the servers accept old
and new, then everyone shows the new one, then the old one goes.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Final

from tao.model.errors import SettingsError, Unauthorized

VOUCHED_ROLES: Final = frozenset({"leader", "follower", "tailer", "operator"})
"""What only a server's token vouches for; see `tao.serving.authority` for what each may do."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """The process at the other end, as it calls itself. ``address`` is where its connection comes from, for logs."""

    name: str
    role: str
    address: str = ""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a process shows when it connects. ``token`` empty: the servers ask for none."""

    name: str
    role: str
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class AcceptedTokens:
    """What vouches for peers: one of ``servers`` for any role, one of ``clients`` for none but that of a client. Both
    empty: whoever reaches the port is believed. Without ``clients``, clients show the servers' token.

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
        """From settings, where an empty text is none. Raises as the constructor."""
        return cls((token,) if token else (), (client_token,) if client_token else ())


def check_token(accepted: AcceptedTokens, shown: str, role: str) -> None:
    """Raises `Unauthorized` unless nothing is asked for, or ``shown`` vouches for ``role``. Takes as long for a token
    that is nearly right as for one that is not, so that it cannot be guessed piece by piece."""
    if not accepted.servers:
        return
    of_servers = [hmac.compare_digest(token.encode(), shown.encode()) for token in accepted.servers]
    of_clients = [hmac.compare_digest(token.encode(), shown.encode()) for token in accepted.clients]
    if any(of_servers):
        return
    if not any(of_clients):
        raise Unauthorized("the token shown is missing or wrong; set the one that the servers accept")
    if role in VOUCHED_ROLES:
        raise Unauthorized(f"the token shown is that of clients; as {role} a peer shows the servers' token")
