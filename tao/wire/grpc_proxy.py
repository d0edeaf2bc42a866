"""The listener of the gRPC port: it accepts connections, bounds those of strangers, and passes the others on to gRPC.

grpc.aio takes the calls of all connections in the order in which they have arrived, at a quarter of a millisecond of
the event loop each, and can neither close a connection nor hold one back. So gRPC listens at a private address only,
and every connection to it comes from here. Until a call on a connection has shown a credential, the connection is a
stranger's: it has a place among a bounded number, per address and in all, and its start and each of its calls wait for
a turn (`tao.wire.stranger_turns`). Once a call has shown one, the connection is passed on as it is. A certificate that
is a credential by itself gives the turn of the start back before. From its start a connection has one time for all that
comes before: TLS, HTTP/2, and a call that is admitted. What waits for a turn is not late.

TLS ends here. What a connection's certificate says is found by the name of the socket that leads from here to gRPC,
which is unique and bound while the connection lives; a call that came by another socket is refused.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import ssl
from functools import partial
from itertools import count
from time import monotonic
from typing import Final, cast

from tao.model.errors import ProtocolError, Unavailable
from tao.wire.address import TcpAddress, UnixAddress
from tao.wire.doorstep import LATE, AddressPool, CallerPlaces, Doorstep, address_of, name_of
from tao.wire.http2_calls import TurnSplitter
from tao.wire.http2_refusal import GO_AWAY_BEFORE_CALLS
from tao.wire.identity import PeerIdentity
from tao.wire.listener import Listener
from tao.wire.settings import ServingSettings
from tao.wire.stranger_turns import Pace, StrangerTurns, Turn
from tao.wire.tls import uris_of

_logger = logging.getLogger(__name__)

SAVED_CALLS: Final = 2
"""Turns of calls that are saved up. A caller with a credential gives its own back within milliseconds, so two are
enough for hundreds of them in a second; more calls of strangers at once would keep others waiting for as long."""
_TLS_COST: Final = 4.0
"""What the start of a connection with TLS costs, in plain ones."""


class GrpcProxy:
    """Listens at the public address of a gRPC server, and connects to its private one."""

    def __init__(
        self, settings: ServingSettings, doorstep: Doorstep, name: str, tls: ssl.SSLContext | None = None
    ) -> None:
        """``name`` is the server's, for messages."""
        bounds = settings.doorstep
        self.tls = tls
        """The context of new connections; open ones keep theirs when it is replaced."""
        self.doorstep: Final = doorstep
        self.accepts_certificate: Final = settings.authenticator.accepts_certificate
        """Return whether a certificate with these URIs is a credential by itself."""
        self.blocked_timeout_seconds: Final = settings.blocked_timeout_seconds
        self.strangers: Final = AddressPool(bounds.max_pending, bounds.max_pending_per_address)
        """Connections on which no call has shown a credential."""
        self.places: Final = CallerPlaces(settings, name, "gRPC connections", bounds.max_grpc_connections)
        """The places of the others."""
        per_second = bounds.stranger_connections_per_second
        self.starts: Final = StrangerTurns(per_second, bounds.max_pending_per_address, monotonic)
        self.calls: Final = StrangerTurns(bounds.stranger_calls_per_second, SAVED_CALLS, monotonic)
        self._listener: Final = Listener("gRPC", bounds.accepts_per_second, self._accept)
        self._secret: Final = f"tao-{secrets.token_hex(16)}"
        self._numbers: Final = count(1)
        self._by_name: dict[str, ProxiedConnection] = {}
        self._connections: set[ProxiedConnection] = set()
        self._expected: dict[ProxiedConnection, float] = {}
        """When each connection has begun on which no call was admitted yet, later by the time that it had to wait."""
        self._pace_of_starts: Final = Pace(self.starts, one_in_a_turn=True)
        self._pace_of_calls: Final = Pace(self.calls)

    @property
    def private_address(self) -> str:
        """Return where gRPC has to listen: a name that no file system has, and that only this machine reaches."""
        return f"unix-abstract:{self._secret}"

    def bind(self, where: TcpAddress | UnixAddress) -> TcpAddress | UnixAddress:
        """Take the public address. Returns it with the port that was assigned. Raises `OSError` when it is taken."""
        return self._listener.bind(where)

    def start(self) -> None:
        """Accept connections at the address that was taken."""
        self._listener.start()

    def connection_of(self, peer: str) -> ProxiedConnection:
        """Return the connection of a call, by the peer that its context names. Raises `Unavailable`."""
        connection = self._by_name.get(peer)
        if connection is None:
            raise Unavailable("the connection of this call has ended, or did not come by the server's port")
        return connection

    def stop_listening(self) -> None:
        """Accept no more connections, and start no more of those that wait for it."""
        self._listener.stop()
        self._pace_of_starts.stop()

    async def close(self) -> None:
        """Stop listening, and end every connection."""
        self.stop_listening()
        self._pace_of_calls.stop()
        while self._connections:
            for connection in tuple(self._connections):
                connection.end()
            await asyncio.wait([connection.closed for connection in self._connections])

    def connect(self, connection: ProxiedConnection) -> socket.socket:
        """Return a socket to gRPC, by whose name `connection_of` finds the connection. Raises `OSError`."""
        name = f"{self._secret}-{next(self._numbers)}"
        upstream = socket.socket(socket.AF_UNIX)
        try:
            upstream.setblocking(False)
            upstream.bind(f"\0{name}")
            upstream.connect(f"\0{self._secret}")
        except OSError:
            upstream.close()
            raise
        connection.peer_name = f"unix-abstract:{name}"
        self._by_name[connection.peer_name] = connection
        return upstream

    def forget(self, connection: ProxiedConnection) -> None:
        """Forget a connection that ends, before another socket may have the name of the one that leads to gRPC."""
        self._by_name.pop(connection.peer_name, None)

    def give_turns(self) -> None:
        """Start what has its turn now."""
        self._pace_of_starts.give_turns()
        self._pace_of_calls.give_turns()

    def expect_call(self, connection: ProxiedConnection) -> None:
        """Give a connection that begins its time until a call is admitted."""
        self._expected[connection] = monotonic()

    def note_wait(self, connection: ProxiedConnection, seconds: float) -> None:
        """Note that a connection had to wait for a turn, which is not its fault."""
        if connection in self._expected:
            self._expected[connection] += seconds

    def stop_expecting(self, connection: ProxiedConnection) -> None:
        """Note that a call of the connection was admitted, or that it ends."""
        self._expected.pop(connection, None)

    def turn_late_away(self) -> None:
        """End the connections whose time is over. Call this several times a second, and not after a pause: what peers
        have sent meanwhile may not have been read yet."""
        since = monotonic() - self.doorstep.settings.greeting_timeout_seconds
        for connection in [each for each, begun in self._expected.items() if begun < since]:
            connection.turn_away_unless_waiting()

    def _closed(self, connection: ProxiedConnection, _: asyncio.Future[None]) -> None:
        self._connections.discard(connection)

    def _accept(self, descriptor: int, address: object) -> None:
        accepted = socket.socket(fileno=descriptor)
        accepted.setblocking(False)
        connection = ProxiedConnection(self, accepted, address)
        self._connections.add(connection)
        connection.closed.add_done_callback(partial(self._closed, connection))
        self.give_turns()


class ProxiedConnection(asyncio.Protocol):
    """One accepted connection: the client's side, and what is known of its peer."""

    def __init__(self, proxy: GrpcProxy, accepted: socket.socket, address: object) -> None:
        self.address: Final = name_of(address)
        """The address from which the connection comes, for logs."""
        self.network: Final = address_of(address)
        """The address under which it is counted."""
        self.uris: tuple[str, ...] = ()
        """The URIs of the client's certificate, which has been verified."""
        self.is_proven = False
        """Whether a call has shown a credential."""
        self.peer_name = ""
        self._proxy: Final = proxy
        self._accepted: Final = accepted
        self._client: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._splitter: Final = TurnSplitter()
        self._counted: str | None = None
        self._upstream_is_full = False
        self._waits_since = 0.0  # for the turn of a call
        self._has_ended = False
        self._blocked: asyncio.TimerHandle | None = None  # ends the connection, while its client does not read
        self.closed: Final[asyncio.Future[None]] = asyncio.get_running_loop().create_future()
        """Done when the socket of the client is closed."""
        self._opening: asyncio.Task[None] | None = None
        self._place: Final = proxy.strangers.enter(self.network, self._turn_away)
        cost = _TLS_COST if proxy.tls is not None else 1.0
        self._start: Final = Turn(self.network, self._begin, cost)
        self._start_is_back = False
        self._call: Final = Turn(self.network, self._pass_call)
        proxy.starts.add(self._start)

    # ---- called by the proxy, and by gRPC's admission ----------------------------------------------------------------

    def prove(self, peer: PeerIdentity) -> None:
        """Note that a call has shown a credential. Raises `Overloaded`, also as `TooManyConnections`."""
        if self.is_proven or self._has_ended:
            return
        self._counted = self._proxy.places.enter(peer)
        self.is_proven = True
        self._proxy.stop_expecting(self)
        self._proxy.strangers.leave(self._place)
        self._proxy.calls.withdraw(self._call)
        self._give_start_back()
        self._proxy.calls.give_back(self._call)
        self._write(self._splitter.rest())
        self._update_reading()
        self._proxy.give_turns()

    def call_admitted(self) -> None:
        """Note that a call was admitted that needs no credential."""
        self._proxy.stop_expecting(self)

    def turn_away_unless_waiting(self) -> None:
        """Turn the peer away, because it is late, unless its call waits for a turn. A client that connects ahead of its
        calls may be about to make one, and learns that it can make it on another connection."""
        if self._splitter.needs_turn:
            return
        if self._client is not None and self._upstream is not None and self._splitter.is_before_calls:
            # What gRPC has sent so far is whole frames: its settings, acknowledgements and pings are small.
            self._client.write(GO_AWAY_BEFORE_CALLS)
            self._count_turned_away(LATE)
            self.upstream_lost()
            self._upstream.abort()
        else:
            self._turn_away(LATE)

    def end(self) -> None:
        """End the connection at once."""
        self._forget()
        if self._opening is not None:
            self._opening.cancel()
        elif not self.closed.done():
            self._close_accepted()
        for transport in (self._client, self._upstream):
            if transport is not None:
                transport.abort()

    # ---- the start ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._proxy.expect_call(self)
        self._proxy.strangers.advance(self._place)
        self._opening = asyncio.get_running_loop().create_task(self._open(), name="gRPC connection")
        self._opening.add_done_callback(lambda _: self._close_accepted())

    def _close_accepted(self) -> None:
        """Close the accepted socket unless it has become the client's transport."""
        if self._client is None:
            self._accepted.close()
            self.closed.set_result(None)

    async def _open(self) -> None:
        loop, proxy = asyncio.get_running_loop(), self._proxy
        tls = proxy.tls
        seconds = proxy.doorstep.settings.greeting_timeout_seconds if tls is not None else None
        try:
            await loop.connect_accepted_socket(
                lambda: self, self._accepted, ssl=tls, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds
            )
        except OSError as error:  # failures and timeouts of TLS are such errors
            self._turn_away("tls_failed", str(error))
            return
        if self._has_ended:
            return
        try:
            upstream = proxy.connect(self)
        except OSError as error:
            self._turn_away("overloaded", f"gRPC does not accept it: {error}")
            return
        try:
            await loop.create_connection(lambda: _Upstream(self), sock=upstream)
        finally:
            if self._upstream is None:
                upstream.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast("asyncio.Transport", transport)
        self.uris = uris_of(transport)
        if self._has_ended:
            self._client.abort()
        elif self._proxy.accepts_certificate(self.uris):
            # Clients with a cluster make one connection without a call before that of their calls (`ClientTls.look`).
            self._give_start_back()
            self._proxy.give_turns()

    def _give_start_back(self) -> None:
        """Give back the turn of the start: the peer has shown a credential."""
        if not self._start_is_back:
            self._start_is_back = True
            self._proxy.starts.give_back(self._start)

    def upstream_made(self, transport: asyncio.Transport) -> None:
        """Begin to pass on what the client sends."""
        self._upstream = transport
        if self._has_ended:
            transport.abort()
        else:
            self._forward()

    # ---- passing on --------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.is_proven:
            self._write(data)
            return
        if self._has_ended:  # and what was sent to the client is still on its way
            return
        self._splitter.feed(data)
        if self._upstream is None:
            self._update_reading()
        else:
            self._forward()

    def from_upstream(self, data: bytes) -> None:
        """Pass on what gRPC sends."""
        if self._client is not None:
            self._client.write(data)

    def _forward(self) -> None:
        """Pass on what a stranger has sent, up to its next call."""
        try:
            self._write(self._splitter.take())
        except ProtocolError as error:
            self._turn_away(error.reason.lower(), error.message)
            return
        if self._splitter.needs_turn:
            self._waits_since = monotonic()
            self._proxy.calls.add(self._call)
        self._update_reading()
        self._proxy.give_turns()

    def _pass_call(self) -> None:
        self._proxy.note_wait(self, monotonic() - self._waits_since)
        self._splitter.grant()
        self._forward()

    def _write(self, data: bytes) -> None:
        if data and self._upstream is not None:
            self._upstream.write(data)

    def _update_reading(self) -> None:
        """Read from the client unless what it has sent waits here."""
        client = self._client
        if client is None or client.is_closing():
            return
        if self._upstream is None or self._upstream_is_full or self._splitter.needs_turn:
            client.pause_reading()
        else:
            client.resume_reading()

    def upstream_is_full(self, is_full: bool) -> None:
        """Note whether gRPC does not read what was passed on."""
        self._upstream_is_full = is_full
        self._update_reading()

    def pause_writing(self) -> None:
        # While gRPC is not read, its own end of a connection whose client does not read is not noticed either.
        if self._blocked is None:
            self._blocked = asyncio.get_running_loop().call_later(self._proxy.blocked_timeout_seconds, self.end)
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.pause_reading()

    def resume_writing(self) -> None:
        self._unblock()
        if self._upstream is not None and not self._upstream.is_closing():
            self._upstream.resume_reading()

    def _unblock(self) -> None:
        if self._blocked is not None:
            self._blocked.cancel()
            self._blocked = None

    # ---- the end -----------------------------------------------------------------------------------------------------

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        if self._opening is not None:
            self._opening.cancel()
        if self._upstream is not None:
            self._upstream.close()
        self.closed.set_result(None)

    def upstream_lost(self) -> None:
        """End the connection as gRPC has, when the client has what gRPC sent, or does not read it."""
        if self._has_ended:
            return
        self._forget()
        if self._client is not None:
            self._client.close()
            if self._client.get_write_buffer_size():
                asyncio.get_running_loop().call_later(self._proxy.blocked_timeout_seconds, self.end)

    def _forget(self) -> None:
        self._has_ended = True
        self._unblock()
        self._proxy.forget(self)
        self._proxy.stop_expecting(self)
        self._proxy.strangers.leave(self._place)
        self._proxy.starts.withdraw(self._start)
        self._proxy.calls.withdraw(self._call)
        if self._counted is not None:
            self._proxy.places.leave(self._counted)
            self._counted = None

    def _turn_away(self, reason: str, why: str = "") -> None:
        if not self._has_ended:
            self._count_turned_away(reason, why)
            self.end()

    def _count_turned_away(self, reason: str, why: str = "") -> None:
        if self._proxy.doorstep.turn_away(reason):
            _logger.warning("%s is turned away at the gRPC port: %s", self.address, why or reason)


class _Upstream(asyncio.Protocol):
    """The side of a connection that leads to gRPC."""

    def __init__(self, connection: ProxiedConnection) -> None:
        self._connection: Final = connection
        self.data_received = connection.from_upstream  # type: ignore[method-assign]  # one call less for each message

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.upstream_made(cast("asyncio.Transport", transport))

    def pause_writing(self) -> None:
        self._connection.upstream_is_full(is_full=True)

    def resume_writing(self) -> None:
        self._connection.upstream_is_full(is_full=False)

    def eof_received(self) -> None:
        self._connection.upstream_lost()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.upstream_lost()
