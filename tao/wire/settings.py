"""The bounds and intervals of sessions, alike for both transports (DESIGN.md §11, §16)."""

from __future__ import annotations

from dataclasses import dataclass

from tao.wire.identity import AcceptedTokens

MAX_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The client's side of a session."""

    connect_timeout_seconds: float = 1.0
    """Connection and greeting together. A server across an ocean needs some 0.3 s with TLS; what takes longer than
    this is better tried elsewhere."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Largest message sent or accepted. Sixteen objects of the largest size, or 6,000 edges with 2 KB each."""

    max_unanswered: int = 10_000
    """Requests on their way in one session. At 100,000 answers a second this is 0.1 s of work: a server further behind
    than that is better relieved than fed."""

    max_unsent_bytes: int = 32 << 20
    """What may wait for a server that does not read: two messages of the largest size."""

    deadline_tick_seconds: float = 0.02
    """Deadlines are noticed this much late at most. Finer ticks wake the loop more often and help nobody whose
    deadline is in hundreds of milliseconds."""

    ping_interval_seconds: float = 5.0
    """After so long without a word from the server it is asked for one; firewalls forget idle connections after
    minutes at the earliest."""

    ping_timeout_seconds: float = 5.0
    """A server silent for so long after a ping is given up. Longer than any pause of a healthy one (garbage, a slow
    disk), since giving up costs every request on its way."""

    pause_seconds: float = 1.0
    """A timer that fires so late says that this process was paused (stopped, swapped out, frozen with its machine): the
    silence was its own, and what has arrived is read before anybody is given up. Longer than a busy loop is late."""


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The server's side of its connections."""

    accepted_tokens: AcceptedTokens = AcceptedTokens()
    """Shared secrets, one of which a peer has to show. Empty: anyone who reaches the port is served, as what it says
    that it is, which is right on loopback and in a network that authenticates by itself."""

    max_connections: int = 10_000
    """A web tier of thousands of processes, and below what the usual limit of open files allows."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """As for the client's side; the two should agree."""

    max_unanswered: int = 10_000
    """Requests (series included) that one peer may have unanswered; further ones are refused as OVERLOADED."""

    write_high_water_bytes: int = 1 << 20
    """Nothing more is read from a peer that has left so much unread: enough to fill a fast line across an ocean for
    some milliseconds, little enough for thousands of connections."""

    max_unsent_bytes: int = 64 << 20
    """A peer that has left so much unread is cut off. Only series and answers to what was read before reading paused
    come this far, so it bounds memory when the pause does not."""

    blocked_timeout_seconds: float = 10.0
    """A peer that does not read for so long is cut off. Ten seconds cover a stopped garbage collector or a lost
    packet's retries; beyond that it has failed."""

    greeting_timeout_seconds: float = 5.0
    """How long a connection may take to say who it is: one that says nothing is a port scanner or a dead peer."""

    silence_timeout_seconds: float = 30.0
    """A peer silent for so long is gone: six of its pings are missing."""

    sweep_interval_seconds: float = 0.25
    """How often those three timeouts are looked at, for all connections together: cheaper than timers for each."""

    pause_seconds: float = 1.0
    """As `SessionSettings.pause_seconds`: after a pause of its own, a server reads before it takes peers for silent."""

    unary_deadline_seconds: float = 10.0
    """For a unary call that names no deadline: longer than any answer that its caller would still want."""
