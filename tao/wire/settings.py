"""Bounds and intervals of sessions, the same for both transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields

from tao.model.errors import SettingsError, TaoError
from tao.wire.identity import PeerAuthenticator, PeerIdentity

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
class DoorstepSettings:
    """Bounds at each port of a server: on peers without a credential, and on the connections of one caller."""

    greeting_timeout_seconds: float = 5.0
    """Time in which a peer has to show who it is: TLS and greeting together; over gRPC TLS, HTTP/2 and a call that is
    admitted. Also the time for the first message of a gRPC call. One that takes longer is a port scanner or a dead
    peer."""

    max_pending: int = 1_024
    """Connections (gRPC: calls) that have not shown yet who they are. An honest one takes a round trip: this is room
    for ten thousand new ones a second from another continent."""

    max_pending_per_address: int = 256
    """Such connections of one address (of one /64 network, with IPv6): enough for a machine of web processes that all
    connect at once, too little for one machine to fill the doorstep."""

    max_connections_per_caller: int = 5_000
    """Connections of one application that has shown its credential, whatever their addresses (of gRPC: sessions,
    watches and unary calls, each counted by themselves). Half of all, so that no credential locks the others out."""

    max_open_calls: int = 256
    """gRPC calls at a time that need no credential: health checks and reflection."""

    max_open_calls_per_address: int = 32
    """Such calls of one address. A load balancer needs one for each server that it watches."""

    max_streams_per_connection: int = 32
    """Calls under way on one gRPC connection. A client with more waits with the rest, or opens another connection. More
    would let a few connections keep the port busy for long: each call that arrives costs a third of a millisecond, and
    nothing can be served before it."""

    refusals_per_second: float = 10
    """gRPC calls that are refused at once for their credential, in each second. Further ones are held first: meanwhile
    they take the places of their connections, whose next calls are refused before they reach Python. It bounds calls
    of connections that have shown another credential before; strangers have bounds of their own."""

    held_refusal_seconds: float = 1.0
    """How long they are held at least. They are let go one in a millisecond."""

    max_held_refusals: int = 2_048
    """Most of them held at a time, at some 20 KB each; further ones are refused at once."""

    stranger_connections_per_second: float = 50
    """gRPC connections that are begun in each second for peers that turn out to show no credential; one with TLS counts
    four times. Up to `max_pending_per_address` of them are saved up. Further ones wait, and addresses take turns. Each
    costs 0.2 ms: at the default 1 % of the server's event loop."""

    stranger_calls_per_second: float = 50
    """gRPC calls that reach gRPC in each second on connections without a credential, health checks included. Each costs
    half a millisecond, at the default 2.5 % of the event loop. Further ones wait, and addresses take turns."""

    stranger_handshakes_per_second: float = 100
    """TLS handshakes that the frames port begins in each second with peers that turn out to show no credential, and as
    many with such peers of addresses from which others have shown theirs. Up to a sixteenth of
    `max_pending_per_address` of them are saved up. Further ones wait, and addresses take turns. Each costs half a
    millisecond, at the default 5 % of the event loop."""

    accepts_per_second: float = 500
    """Connections that the gRPC port and the admin port accept in each second, of everybody: further ones wait in the
    system's queue, and up to a quarter of the rate may be accepted in one burst. Each costs some 45 µs at the gRPC
    port, and 15 µs at the admin port, when it is only turned away."""

    frame_accepts_per_second: float = 6_000
    """The same for frames, at 15 µs each. More, so that the clients of a large tier are back soon when a server has
    restarted, and newcomers do not wait behind a wave of strangers."""

    max_grpc_connections: int = 4_096
    """gRPC connections at a time of peers that have shown a credential. Each costs three file descriptors and some 20
    KB, or 60 KB with TLS. One application may have half of them."""

    idle_connection_seconds: float = 20.0
    """A gRPC connection without a call for this long is closed, once one was admitted on it. Clients connect again by
    themselves, and a session is a call."""

    max_log_lines: int = 10
    """Lines that are logged about peers that were turned away, in each interval. All are counted."""

    log_interval_seconds: float = 10.0
    """The length of that interval."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if not getattr(self, each.name) > 0:
                raise SettingsError(f"{each.name} is {getattr(self, each.name)}; it must be above 0")


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """The server's side of its connections."""

    authenticator: PeerAuthenticator = field(default_factory=PeerAuthenticator)
    """The credentials of which a peer has to show one. None: every peer that reaches the port is served under the
    identity that it states, which is right on loopback and in a network that authenticates by itself."""

    on_refused: Callable[[PeerIdentity, TaoError], None] = _ignore
    """Called with what a peer says of itself, for each connection or call that is refused for its credentials."""

    max_connections: int = 10_000
    """Connections at a time: a web tier of thousands of processes, and below the usual limit of open files. A tenth is
    kept free for servers and operators."""

    max_message_bytes: int = MAX_MESSAGE_BYTES
    """Size limit of a message. It should equal the limit of the clients."""

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

    doorstep: DoorstepSettings = DoorstepSettings()
    """Bounds on peers that have not shown yet who they are."""

    silence_timeout_seconds: float = 30.0
    """A peer that is silent for this long is gone: six of its pings are missing. It is pinged after half of it."""

    leaving_seconds: float = 1.0
    """A peer whose credential is no longer accepted is asked to leave, and served for this long: what it sends before
    it has read that is on its way, from another continent or a busy machine. Then its further requests are refused,
    and the connection ends when those under way are answered, or after `unary_deadline_seconds`."""

    sweep_interval_seconds: float = 0.25
    """Interval at which those timeouts are checked, for all connections together: cheaper than timers for each."""

    pause_seconds: float = 1.0
    """See `SessionSettings.pause_seconds`: after a pause of its own, a server reads before it gives up silent peers."""

    unary_deadline_seconds: float = 10.0
    """Deadline of a unary call that names none: longer than any answer that its caller would still want."""
