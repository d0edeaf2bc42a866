"""The server's end of connections of frames.

Everything that a peer sends in one read is handled and answered in one write. The server reads nothing from a peer that
does not read its answers, and keeps what it has read undecoded: a quarter of a megabyte of small requests can ask for
gigabytes. A peer that stays so is disconnected, so that a stuck client costs its own connection and no other. One timer
checks the timeouts of all connections.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from typing import cast

from google.protobuf.message import DecodeError

from tao.model.errors import Overloaded, ProtocolError, TaoError
from tao.wire import framing
from tao.wire.address import TcpAddress, parse_address
from tao.wire.convert import error_to_pb
from tao.wire.framing import FrameDecoder, pack_header
from tao.wire.http2_refusal import PREFACE, Http2Refusal
from tao.wire.identity import PeerIdentity, check_token
from tao.wire.server_session import ServedConnection
from tao.wire.session import RequestHandler
from tao.wire.settings import ServingSettings
from tao.wire.v1 import frames_pb2, session_pb2

_logger = logging.getLogger(__name__)


class FrameServer:
    """Serves one handler on any number of addresses. ``name`` and ``topology_version`` are sent to every peer that
    connects; a gRPC client is refused, and referred to ``grpc_address``."""

    def __init__(
        self,
        handler: RequestHandler,
        settings: ServingSettings,
        *,
        name: str,
        topology_version: Callable[[], int],
        grpc_address: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.handler = handler
        self.settings = settings
        self.name = name
        self.topology_version = topology_version
        self.grpc_address = grpc_address
        self.connections: set[FrameConnection] = set()
        self.draining = False
        self._tls = tls
        self._servers: list[asyncio.Server] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, address: str) -> str:
        """Listen on the address. Returns it with the port that was assigned. Raises `OSError` when the port is
        taken."""
        loop = asyncio.get_running_loop()
        where = parse_address(address)
        bound: str
        if isinstance(where, TcpAddress):
            server = await loop.create_server(
                lambda: FrameConnection(self, loop), where.host, where.port, ssl=self._tls
            )
            bound = str(TcpAddress(where.host, int(server.sockets[0].getsockname()[1])))
        else:
            server = await loop.create_unix_server(lambda: FrameConnection(self, loop), where.path, ssl=self._tls)
            bound = str(where)
        self._servers.append(server)
        if self._sweeper is None:
            self._schedule_sweep(loop)
        return bound

    async def drain(self, grace_seconds: float) -> None:
        """Accept no more connections, ask all peers to leave, and wait until requests with a deadline have been
        answered or the grace period has passed. Requests that come meanwhile are served. Series go on until `close`."""
        self._stop_listening()
        self.draining = True
        for connection in tuple(self.connections):
            connection.go_away()
        waits = [asyncio.ensure_future(connection.until_idle()) for connection in self.connections]
        if waits:
            _, late = await asyncio.wait(waits, timeout=grace_seconds)
            for wait in late:
                wait.cancel()

    async def close(self) -> None:
        """Close every connection; answers already given are still written."""
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        ends = [connection.ended for connection in self.connections]
        for connection in tuple(self.connections):
            connection.shut()
        if ends:
            _, late = await asyncio.wait(ends, timeout=self.settings.blocked_timeout_seconds)
            if late:
                for connection in tuple(self.connections):
                    connection.abort()

    def _stop_listening(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def _schedule_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self.settings.sweep_interval_seconds
        self._sweeper = loop.call_later(self.settings.sweep_interval_seconds, self._sweep, loop, due)

    def _sweep(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        if now - due <= self.settings.pause_seconds:
            for connection in tuple(self.connections):
                connection.check_timeouts(now)
        self._schedule_sweep(loop)


class FrameConnection(ServedConnection, asyncio.Protocol):
    """One accepted connection; made by `FrameServer`."""

    def __init__(self, server: FrameServer, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(server.handler, server.settings, PeerIdentity("", ""))
        self.ended: asyncio.Future[None] = loop.create_future()
        self._server = server
        self._loop = loop
        self._decoder = FrameDecoder(server.settings.max_message_bytes)
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_due = False
        self._greeted = False
        self._refusal: Http2Refusal | None = None
        self._closing = False
        self._made_at = self._last_heard = loop.time()
        self._blocked_since: float | None = None
        self._transport: asyncio.Transport

    # ---- called by the loop ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._settings.write_high_water_bytes)
        name = self._transport.get_extra_info("peername")
        self.peer = PeerIdentity("", "", str(name) if name else "unix")
        self._server.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        if not self._greeted and (self._refusal is not None or data.startswith(PREFACE)):
            self._refuse_grpc(data)
            return
        try:
            self._arrived.extend(self._decoder.feed(data))
        except TaoError as error:
            self._fatal(error)
        else:
            self._serve_arrived()

    def _serve_arrived(self) -> bool:
        """Handle the frames received so far, until the peer leaves too much unread. Returns whether the peer keeps
        up."""
        # Answers given at once are flushed below, without another turn of the loop.
        self._flush_due = True
        arrived = self._arrived
        try:
            while arrived and self._blocked_since is None and not self._closing:
                kind, payload = arrived.popleft()
                if kind == framing.REQUEST and self._greeted:
                    self.receive(session_pb2.Request.FromString(payload))
                else:
                    self._control_arrived(kind, payload)
        except DecodeError as error:
            self._fatal(ProtocolError(f"a message cannot be decoded: {error}"))
        except TaoError as error:  # errors that the greeting is rejected with
            self._fatal(error)
        finally:
            self._flush()
        return self._blocked_since is None

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self._blocked_since = self._loop.time()
        if not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._blocked_since = None
        self._last_heard = self._loop.time()
        # Answers to requests that had arrived may fill the buffer again.
        if self._serve_arrived() and not self._transport.is_closing():
            self._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self.peer_gone()
        self._arrived.clear()
        self._drop_out()
        if not self.ended.done():
            self.ended.set_result(None)

    # ---- called by the server --------------------------------------------------------------------------------------

    def go_away(self) -> None:
        """Ask the peer to send new requests to another server."""
        if self._greeted and not self._closing:
            message = frames_pb2.GoAway(message=f"{self._server.name} is draining")
            self._queue(framing.GO_AWAY, message.SerializeToString())

    def shut(self) -> None:
        """Write the answers given so far, and close."""
        self._flush()
        self._closing = True
        self._blocked_since = self._blocked_since or self._loop.time()
        self.peer_gone()
        self._transport.close()

    def abort(self) -> None:
        """Drop the connection at once."""
        self._closing = True
        self._transport.abort()

    def check_timeouts(self, now: float) -> None:
        """Disconnect a peer that does not read, is silent, or never sent a greeting."""
        settings = self._settings
        if self._blocked_since is not None:
            late = now - self._blocked_since > settings.blocked_timeout_seconds
        elif not self._greeted:
            late = now - self._made_at > settings.greeting_timeout_seconds
        else:
            late = now - self._last_heard > settings.silence_timeout_seconds
        if late:
            _logger.warning("%s does not read, or is silent; its connection is dropped", self.peer)
            self.abort()

    # ---- sending ---------------------------------------------------------------------------------------------------

    def transmit(self, answer: session_pb2.Answer) -> None:
        for message in self.fitting(answer):
            self._queue(framing.ANSWER, message)

    @property
    def unsent_bytes(self) -> int:
        # The transport holds less than the high-water mark while it is not blocked; reading its size costs more than
        # this.
        return self._out_bytes + (self._transport.get_write_buffer_size() if self._blocked_since is not None else 0)

    def _queue(self, kind: int, payload: bytes) -> None:
        self._out.append(pack_header(len(payload), kind))
        self._out.append(payload)
        self._out_bytes += len(payload)
        if self._out_bytes > self._settings.write_high_water_bytes:
            self._write()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._out:
            self._write()

    def _write(self) -> None:
        """Pass the queued answers to the transport, which calls `pause_writing` when the peer does not keep up."""
        if not self._closing:
            self._transport.write(b"".join(self._out))
            if self._transport.get_write_buffer_size() > self._settings.max_unsent_bytes:
                _logger.warning("%s has left too much unread; its connection is dropped", self.peer)
                self.abort()
        self._drop_out()

    def _drop_out(self) -> None:
        self._out.clear()
        self._out_bytes = 0

    # ---- the rest of the protocol ----------------------------------------------------------------------------------

    def _control_arrived(self, kind: int, payload: bytes) -> None:
        if kind == framing.HELLO and not self._greeted:
            self._greet(frames_pb2.Hello.FromString(payload))
        elif kind == framing.PING and self._greeted:
            self._queue(framing.PONG, payload)
        elif kind != framing.PONG or not self._greeted:
            raise ProtocolError(f"a frame of kind {kind} is not expected here")

    def _greet(self, hello: frames_pb2.Hello) -> None:
        if hello.protocol_version != framing.PROTOCOL_VERSION:
            raise ProtocolError(
                f"{self._server.name} speaks version {framing.PROTOCOL_VERSION} of the frame protocol, not "
                f"{hello.protocol_version}; use gRPC or a matching release"
            )
        # Not sooner: closing a socket with an unread greeting would lose the answer that says why.
        if len(self._server.connections) > self._settings.max_connections:
            raise Overloaded(f"{self._server.name} has {self._settings.max_connections} connections already")
        stated = PeerIdentity(hello.name, hello.role, self.peer.address)
        try:
            check_token(self._settings.accepted_tokens, hello.token, hello.role)
        except TaoError as error:
            self._settings.on_refused(stated, error)
            raise
        self.peer = stated
        self._greeted = True
        welcome = frames_pb2.Welcome(
            protocol_version=framing.PROTOCOL_VERSION,
            server_name=self._server.name,
            topology_version=self._server.topology_version(),
        )
        self._queue(framing.WELCOME, welcome.SerializeToString())
        if self._server.draining:
            self.go_away()

    def _refuse_grpc(self, data: bytes) -> None:
        """Answer a gRPC client in its own protocol. The time for a greeting ends the connection if the client does
        not."""
        if self._refusal is None:
            name, grpc_address = self._server.name, self._server.grpc_address
            where = f"its gRPC port is {grpc_address}" if grpc_address else "use its gRPC port"
            self._refusal = Http2Refusal(f"this is the frames port of {name}, which does not speak gRPC; {where}")
            _logger.warning("%s is a gRPC client at the frames port of %s; %s", self.peer, name, where)
            self._transport.write(self._refusal.greeting)
            data = data.removeprefix(PREFACE)
        self._transport.write(self._refusal.feed(data))

    def _fatal(self, error: TaoError) -> None:
        """Send the reason to the peer, and close."""
        _logger.warning("the connection of %s is closed: %s", self.peer, error)
        self._queue(framing.ERROR, error_to_pb(error).SerializeToString())
        self.shut()
