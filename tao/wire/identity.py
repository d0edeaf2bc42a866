"""Who is at the other end: the name and role that a peer states, and the shared secret that vouches for it.

A server may accept several tokens, so that the secret can be changed while everything runs: first the servers accept
old and new, then the clients show the new one, then the old one goes.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field

from tao.model.errors import Unauthorized


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


def check_token(accepted: Sequence[str], shown: str) -> None:
    """Raises `Unauthorized` unless nothing is asked for or ``shown`` is among ``accepted``. Takes as long for a token
    that is nearly right as for one that is not, so that it cannot be guessed piece by piece."""
    if not accepted:
        return
    matches = [hmac.compare_digest(token.encode(), shown.encode()) for token in accepted]
    if not any(matches):
        raise Unauthorized("the token shown is missing or wrong; set the one that the servers accept")
