"""Rules for which role may send which kind of request: only servers and operators change caches, never an application.

A role is what a peer says of itself. Without tokens the server believes it, which suits loopback and a closed network.
With tokens, the servers' token vouches for every role, and the clients' token for the client role only
(`tao.wire.identity.AcceptedTokens`). The check costs one look-up for each request, and a request is a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tao.model.errors import Unauthorized

Rules = Mapping[str, frozenset[str]]
"""A map from the kind of a request to the roles that may send it. Every role may send a kind that is not listed."""

_CACHES: Final = frozenset({"follower", "leader"})
_CACHES_AND_OPERATOR: Final = _CACHES | {"operator"}

FOLLOWER_RULES: Final[Rules] = {
    "apply": frozenset({"follower"}),
    "inspect": _CACHES_AND_OPERATOR,
    "invalidate": _CACHES_AND_OPERATOR,
}

LEADER_RULES: Final[Rules] = {
    "read": _CACHES_AND_OPERATOR,
    "write": _CACHES_AND_OPERATOR,
    "reserve_ids": _CACHES_AND_OPERATOR,
    "subscribe": frozenset({"follower"}),
    "acknowledge": frozenset({"follower"}),
    "inspect": _CACHES_AND_OPERATOR,
    "invalidate": _CACHES_AND_OPERATOR,
    "settle_pairs": _CACHES_AND_OPERATOR,
    "touch_keys": frozenset({"operator"}),
    "settle_edge": frozenset({"leader"}),
    "relay": frozenset({"tailer"}),
    "apply": frozenset({"leader"}),
}
"""The rules of a leader. ``settle_edge`` is a kind of write and is checked separately."""


def check_role(rules: Rules, kind: str, role: str) -> None:
    """Raise `Unauthorized` unless a peer of ``role`` may send requests of ``kind``."""
    allowed = rules.get(kind)
    if allowed is None or role in allowed:
        return
    whose = " and ".join(f"{each}s" for each in sorted(allowed))
    raise Unauthorized(
        f"{kind!r} requests are for {whose}, and this peer says that it is a {role or 'peer without a role'}: "
        "applications ask followers to read and write; operators use the tao command, with the servers' token"
    )
