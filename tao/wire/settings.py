"""Bounds and intervals of sessions, the same for both transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tao.model.errors import TaoError
from tao.wire.identity import AcceptedTokens, PeerIdentity

MAX_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The client's side of a session."""

    connect_timeout_seconds: float = 1.0
    """Connection and greeting together. A server across an ocean needs some 0.3 s with TLS; a server that takes longer
    than this is better replaced by another."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest message sent or accepted. Sixteen objects of the largest size, or 6,000 edges with 2 KB each."""

    max_unanswered: int = 10_000
    """Requests under way in one session. At 100,000 answers a second this is 0.1 s of work: a server further behind
    than that is better relieved than fed."""

    max_unsent_bytes: int = 32 << 20
    """Bytes that may wait for a server that does not read: two messages of the largest size."""

    deadline_tick_seconds: float = 0.02
    """Deadlines are noticed at most this much late. Finer ticks wake the loop more often, and deadlines are in hundreds
    of milliseconds."""

    ping_interval_seconds: float = 5.0
    """A server that is silent for this long is pinged; firewalls forget idle connections after minutes at the
    earliest."""

    ping_timeout_seconds: float = 5.0
    """A server that is silent for this long after a ping is given up. It is longer than any pause of a healthy server
    (garbage collection, a slow disk), since giving up costs every request under way."""

    pause_seconds: float = 1.0
    """A timer that fires this late says that this process was paused (stopped, swapped out, frozen with its machine).
    The silence was its own, so it reads what has arrived before it gives up a peer. It is longer than a busy loop is
    late."""


def _ignore(_peer: PeerIdentity, _error: TaoError) -> None:
    pass


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The server's side of its connections."""

    accepted_tokens: AcceptedTokens = AcceptedTokens()
    """Shared secrets, one of which a peer has to show. Empty: every peer that reaches the port is served under the
    identity that it states, which is right on loopback and in a network that authenticates by itself."""

    on_refused: Callable[[PeerIdentity, TaoError], None] = _ignore
    """Called with what a peer says of itself, for each connection or call that is refused for its credentials."""

    max_connections: int = 10_000
    """Connections at a time: a web tier of thousands of processes, and below the usual limit of open files."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """As on the client's side; the two should agree."""

    max_unanswered: int = 10_000
    """Requests (series included) that one peer may have unanswered; further ones are rejected as OVERLOADED."""

    write_high_water_bytes: int = 1 << 20
    """The server reads nothing more from a peer that has left this much unread: enough to fill a fast line across an
    ocean for some milliseconds, little enough for thousands of connections."""

    max_unsent_bytes: int = 64 << 20
    """A peer that has left this much unread is disconnected. Only series and answers to requests read before the pause
    reach it, so it bounds memory when the pause does not."""

    blocked_timeout_seconds: float = 10.0
    """A peer that does not read for this long is disconnected. Ten seconds cover a paused garbage collector or the
    retries of a lost packet; beyond that it has failed."""

    greeting_timeout_seconds: float = 5.0
    """Time in which a connection has to send its greeting: one that sends nothing is a port scanner or a dead peer."""

    silence_timeout_seconds: float = 30.0
    """A peer that is silent for this long is gone: six of its pings are missing."""

    sweep_interval_seconds: float = 0.25
    """Interval at which those three timeouts are checked, for all connections together: cheaper than timers for
    each."""

    pause_seconds: float = 1.0
    """As `SessionSettings.pause_seconds`: after a pause of its own, a server reads before it takes peers for silent."""

    unary_deadline_seconds: float = 10.0
    """Deadline of a unary call that names none: longer than any answer that its caller would still want."""
