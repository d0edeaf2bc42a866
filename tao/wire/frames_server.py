"""The server's end of connections of frames.

What a peer sends in one read is handled and answered in one write, unless it holds the loop for too long: then the
rest waits for the next turn of the loop, so that a quarter of a megabyte of requests delays no other connection. Large
amounts of answers (`framing.GATHERED_BYTES`) leave sooner, so that the peer has them while the rest is made. The
server reads nothing from a peer that does not read its answers, and keeps what it has read undecoded: a quarter of a
megabyte of small requests can ask for gigabytes. A peer that stays so is disconnected, so that a stuck client costs its
own connection and no other. One timer checks the timeouts of all connections.

A connection is pending at the doorstep until it has sent its greeting (`tao.wire.doorstep`); nothing else is read
before. TLS belongs to that time: connections are counted when they are accepted, not when TLS has succeeded. Before its
first bytes, with TLS its whole first message, nothing is made for a connection (`tao.wire.silent_connections`), nor for
one that begins without TLS at a port that has it. A handshake waits for its turn (`tao.wire.handshake_turns`).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from math import inf
from time import monotonic
from typing import Final, cast

from google.protobuf.message import DecodeError

from tao.model.errors import ProtocolError, TaoError
from tao.wire import framing
from tao.wire.address import parse_address
from tao.wire.convert import error_to_pb
from tao.wire.doorstep import CallerPlaces, Doorstep, Place, name_of
from tao.wire.framing import FrameDecoder, pack_header
from tao.wire.handshake_turns import Handshake, HandshakeTurns
from tao.wire.http2_refusal import PREFACE, Http2Refusal
from tao.wire.identity import Admission, Credentials, PeerIdentity, ShownCredentials, readmit
from tao.wire.listener import Listener
from tao.wire.server_session import ServedConnection
from tao.wire.session import AtOnceHandler, RequestHandler
from tao.wire.settings import ServingSettings
from tao.wire.silent_connections import SilentConnection, SilentConnections
from tao.wire.tls import UNEXPECTED_MESSAGE, may_begin_handshake, uris_of
from tao.wire.v1 import frames_pb2, session_pb2

_logger = logging.getLogger(__name__)

TURN_SECONDS: Final = 0.002
"""Time for which the requests of one connection are handled before the others have their turn: some hundred hits, or
the longest that a hit waits for each connection that sends more."""


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
        self.answer_at_once = handler.answer_at_once if isinstance(handler, AtOnceHandler) else None
        self.settings = settings
        self.name = name
        self.topology_version = topology_version
        self.grpc_address = grpc_address
        self.tls = tls
        """The context of new connections; open ones keep theirs when it is replaced."""
        self.connections: set[FrameConnection] = set()
        self.greeted = CallerPlaces(settings, name, "connections")
        """The places of connections that have sent their greeting."""
        self.doorstep = Doorstep("frames", settings.doorstep)
        self.silent = SilentConnections(
            self.doorstep.pending, self._spoke, self._turned_away, has_tls=lambda: self.tls is not None
        )
        """Accepted connections that have sent nothing."""
        self.handshakes = HandshakeTurns(settings.doorstep)
        self.waiting: dict[SilentConnection, Handshake] = {}
        """Connections whose handshake waits for its turn."""
        self.half_open: set[asyncio.Task[None]] = set()
        """Connections that have sent something and are being made, TLS included."""
        self.draining = False
        self._listeners: list[Listener] = []
        self._sweeper: asyncio.TimerHandle | None = None

    async def start(self, address: str) -> str:
        """Listen on the address. Returns it with the port that was assigned. Raises `OSError` when the port is
        taken."""
        loop = asyncio.get_running_loop()
        where = parse_address(address)
        per_second = self.settings.doorstep.frame_accepts_per_second
        listener = Listener("frames", per_second, self.silent.add, turn_ended=self.silent.look_at_new)
        bound = listener.bind(where)
        self.silent.start()
        listener.start()
        self._listeners.append(listener)
        if self._sweeper is None:
            self._schedule_sweep(loop)
        return str(bound)

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
        self.silent.close()
        self.handshakes.stop()
        for waiting in self.waiting:
            self.doorstep.pending.leave(waiting.place)
            waiting.socket.close()
        self.waiting.clear()
        ends: list[asyncio.Future[None]] = [*self.half_open, *(connection.ended for connection in self.connections)]
        for opening in tuple(self.half_open):
            opening.cancel()
        for connection in tuple(self.connections):
            connection.shut()
        if ends:
            _, late = await asyncio.wait(ends, timeout=self.settings.blocked_timeout_seconds)
            if late:
                for connection in tuple(self.connections):
                    connection.abort()

    def _spoke(self, silent: SilentConnection) -> None:
        """Make a connection of one that has sent its first bytes; with TLS, when its handshake has its turn."""
        if self.tls is None:
            self._begin(silent)
            return
        if not may_begin_handshake(silent.socket):
            self._refuse_without_tls(silent)
            return
        handshake = self.handshakes.make(silent.place.address, partial(self._handshake_due, silent))
        self.waiting[silent] = handshake
        silent.place.displace = partial(self._displace_waiting, silent)
        handshake.wait()

    def _refuse_without_tls(self, silent: SilentConnection) -> None:
        """Turn a peer away that does not speak TLS, and say so: asyncio would drop the connection without a word, as a
        server does that has no room, and the peer would try again."""
        with suppress(OSError):  # the peer has gone
            silent.socket.recv(framing.MAX_CONTROL_BYTES)  # the system would reset a connection with unread bytes
            silent.socket.send(UNEXPECTED_MESSAGE)
        self.doorstep.pending.leave(silent.place)
        self.silent.close_soon(silent.socket)
        self._turned_away("tls_failed", f"{name_of(silent.peer)}: it does not begin with a TLS handshake")

    def _handshake_due(self, silent: SilentConnection) -> None:
        self.doorstep.pending.advance(silent.place)
        self._begin(silent, self.waiting.pop(silent))

    def _displace_waiting(self, silent: SilentConnection, reason: str) -> None:
        self.waiting.pop(silent).withdraw()
        self.silent.close_soon(silent.socket)
        self._turned_away(reason, name_of(silent.peer))

    def _begin(self, silent: SilentConnection, handshake: Handshake | None = None) -> None:
        accepted, place, name = silent.socket, silent.place, name_of(silent.peer)
        opening = asyncio.get_running_loop().create_task(
            self._open(accepted, place, name, handshake), name="frames connection"
        )

        def displace(reason: str) -> None:
            opening.cancel()
            self._turned_away(reason, name)

        place.displace = displace
        self.half_open.add(opening)
        opening.add_done_callback(lambda ended: self._opened(ended, accepted, place))

    async def _open(self, accepted: socket.socket, place: Place, name: str, handshake: Handshake | None) -> None:
        """Make a connection of an accepted socket, and establish TLS.

        The loops do so themselves, but show nothing of a connection before TLS is established, nor bound them."""
        loop, tls = asyncio.get_running_loop(), self.tls
        seconds = self.settings.doorstep.greeting_timeout_seconds if tls is not None else None
        try:
            await loop.connect_accepted_socket(
                lambda: FrameConnection(self, loop, place, handshake), accepted, ssl=tls, ssl_handshake_timeout=seconds
            )
        except OSError as error:  # failures and timeouts of TLS are such errors
            self.doorstep.pending.leave(place)
            self._turned_away("tls_failed", f"{name}: {error}")

    def _opened(self, opening: asyncio.Task[None], accepted: socket.socket, place: Place) -> None:
        self.half_open.discard(opening)
        if opening.cancelled():
            self.doorstep.pending.leave(place)
            accepted.close()  # it may have been cancelled before it began

    def _turned_away(self, reason: str, why: str) -> None:
        if self.doorstep.turn_away(reason):
            _logger.warning("a connection is turned away before it was established: %s (%s)", why, reason)

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.stop()
        self._listeners.clear()

    def _schedule_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + self.settings.sweep_interval_seconds
        self._sweeper = loop.call_later(self.settings.sweep_interval_seconds, self._sweep, loop, due)

    def _sweep(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        now = loop.time()
        self.doorstep.sweep()
        if now - due <= self.settings.pause_seconds:
            for connection in tuple(self.connections):
                connection.check_timeouts(now)
            outdated = [connection for connection in self.connections if not connection.admission_is_current]
            readmit(outdated, FrameConnection.check_admission)
        self._schedule_sweep(loop)


class FrameConnection(ServedConnection, asyncio.Protocol):
    """One accepted connection; made by `FrameServer`."""

    def __init__(
        self, server: FrameServer, loop: asyncio.AbstractEventLoop, place: Place, handshake: Handshake | None = None
    ) -> None:
        """``place`` is the connection's place at the doorstep. ``handshake``: with TLS, the one that it has begun
        with."""
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
        self._counted = ""  # the name under which it has its place, once it has greeted
        self._admission: Admission | None = None
        self._before_greeting = b""
        self._refusal: Http2Refusal | None = None
        self._closing = False
        self._is_resting = False  # until its next turn
        self._last_heard = loop.time()
        self._pinged_silence_of = -inf
        """The `_last_heard` of the silence in which the peer was pinged: once is enough."""
        self._blocked_since: float | None = None
        self._transport: asyncio.Transport
        self._place: Final = place
        self._handshake: Handshake | None = handshake

    # ---- called by the loop ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._settings.write_high_water_bytes)
        self.peer = PeerIdentity("", "", name_of(self._transport.get_extra_info("peername")))
        self._server.connections.add(self)
        self._place.displace = self._turn_away

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        if not self._greeted:
            data = self._after_greeting(data)
            if not data:
                return
        try:
            self._arrived.extend(self._decoder.feed(data))
        except TaoError as error:
            self._fatal(error)
            return
        if not self._is_resting:
            self._serve_arrived()

    def _serve_arrived(self) -> bool:
        """Handle the frames received so far, until the turn is over or the peer leaves too much unread. Returns whether
        more may be read."""
        # Answers given at once are flushed below, without another turn of the loop.
        self._flush_due = True
        arrived = self._arrived
        until = monotonic() + TURN_SECONDS if len(arrived) > 1 else inf
        try:
            while arrived and self._blocked_since is None and not self._closing:
                kind, payload = arrived.popleft()
                if kind == framing.REQUEST and not self._answers_at_once(payload):
                    self.receive(session_pb2.Request.FromString(payload))
                elif kind != framing.REQUEST:
                    self._control_arrived(kind, payload)
                if arrived and monotonic() >= until:
                    break
        except DecodeError as error:
            self._fatal(ProtocolError(f"a message cannot be decoded: {error}"))
        except TaoError as error:
            self._fatal(error)
        finally:
            self._flush()
        if arrived and self._blocked_since is None and not self._closing:
            self._rest()
        return not arrived and self._blocked_since is None

    def _answers_at_once(self, request: bytes) -> bool:
        """Answer what is in memory of a request without making messages, and the rest as usual. Returns False when the
        whole request is for the usual way."""
        answer_at_once, settings = self._server.answer_at_once, self._settings
        if answer_at_once is None or self.unanswered + self.series >= self._max_unanswered:
            return False
        try:
            found = answer_at_once(request, self.peer)
        except Exception:
            _logger.exception("a request of %s cannot be answered at once, and is handled as others are", self.peer)
            return False
        room = min(settings.max_message_bytes, settings.max_unsent_bytes // 2 - self.unsent_bytes)
        if found is None or len(found.encoded) > room:
            return False
        if found.encoded:
            self._queue(framing.ANSWER, found.encoded)
        if found.answer_rest is not None:
            self.receive_rest(session_pb2.Request.FromString(request), found.answer_rest)
        return True

    def _rest(self) -> None:
        """Go on in the next turn of the loop, and read nothing more until then."""
        if not self._is_resting:
            self._is_resting = True
            if not self._transport.is_closing():
                self._transport.pause_reading()
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._is_resting = False
        if self._serve_arrived() and not self._transport.is_closing():
            self._transport.resume_reading()

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
        self._leave_doorstep()
        if self._greeted:
            self._server.greeted.leave(self._counted)
            self._server.handshakes.left(self._place.address)
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
        """Disconnect a peer that does not read or is silent; the doorstep does so before the greeting."""
        settings = self._settings
        if not self._greeted:
            return
        if self._blocked_since is not None:
            late = now - self._blocked_since > settings.blocked_timeout_seconds
        else:
            silent_seconds = now - self._last_heard
            late = silent_seconds > settings.silence_timeout_seconds
            # A client pings only when it hears nothing, and it hears something while an answer comes in parts.
            if silent_seconds > settings.silence_timeout_seconds / 2 and self._pinged_silence_of != self._last_heard:
                self._pinged_silence_of = self._last_heard
                self._queue(framing.PING, b"")
        if late:
            _logger.warning("%s does not read, or is silent; its connection is dropped", self.peer)
            self.abort()

    @property
    def admission_is_current(self) -> bool:
        """Whether `check_admission` has nothing to do."""
        return (
            self._admission is None or self._closing or self._admission.is_current or self.is_leaving(self._loop.time())
        )

    def check_admission(self) -> None:
        """Send a peer away whose credential is no longer accepted, and close its connection in time: see `dismiss`."""
        refusal = None if self._admission is None else self._admission.refusal()
        if self.dismiss(refusal, self._loop.time()) and refusal is not None:
            self._fatal(refusal)

    async def until_idle(self) -> None:
        while not self.closed:
            await super().until_idle()
            if not self._is_resting:
                return
            await asyncio.sleep(0)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def transmit(self, answer: session_pb2.Answer) -> None:
        for message in self.fitting(answer):
            self._queue(framing.ANSWER, message)

    @property
    def unsent_bytes(self) -> int:
        # The transport holds less than the high-water mark while it is not blocked; reading its size costs more than
        # this.
        return self._out_bytes + (self._transport.get_write_buffer_size() if self._blocked_since is not None else 0)

    @property
    def has_unanswered(self) -> bool:
        return self.unanswered > 0 or bool(self._arrived)

    def _queue(self, kind: int, payload: bytes) -> None:
        self._out.append(pack_header(len(payload), kind))
        self._out.append(payload)
        self._out_bytes += len(payload)
        if self._out_bytes >= framing.GATHERED_BYTES:
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

    def _turn_away(self, reason: str) -> None:
        """Drop the connection of a peer that has lost its place at the doorstep."""
        if self._server.doorstep.turn_away(reason):
            _logger.warning("%s is turned away before its greeting: %s", self.peer, reason)
        self.abort()

    def _leave_doorstep(self) -> None:
        self._server.doorstep.pending.leave(self._place)

    def _after_greeting(self, data: bytes) -> bytes:
        """Read the greeting, or what a gRPC client sends in its place. Returns the bytes that follow the greeting."""
        if self._closing:
            return b""
        received = self._before_greeting = self._before_greeting + data
        if self._refusal is not None or received.startswith(PREFACE):
            self._before_greeting = b""
            self._refuse_grpc(received)
            return b""
        try:
            split = framing.split_hello(received)
            if split is None:
                return b""
            greeting, rest = split
            self._greet(frames_pb2.Hello.FromString(greeting))
        except DecodeError as error:
            self._fatal(ProtocolError(f"the greeting cannot be decoded: {error}"))
            return b""
        except TaoError as error:
            self._fatal(error)
            return b""
        self._before_greeting = b""
        return rest

    def _control_arrived(self, kind: int, payload: bytes) -> None:
        if kind == framing.PING:
            self._queue(framing.PONG, payload)
        elif kind != framing.PONG:
            raise ProtocolError(f"a frame of kind {kind} is not expected here")

    def _greet(self, hello: frames_pb2.Hello) -> None:
        if hello.protocol_version != framing.PROTOCOL_VERSION:
            raise ProtocolError(
                f"{self._server.name} speaks version {framing.PROTOCOL_VERSION} of the frame protocol, not "
                f"{hello.protocol_version}; use gRPC or a matching release"
            )
        stated = Credentials(hello.name, hello.role, hello.token)
        shown = ShownCredentials(stated, uris_of(self._transport), self.peer.address)
        try:
            self._admission = self._settings.authenticator.admit(shown)
        except TaoError as error:
            self._settings.on_refused(PeerIdentity(hello.name, hello.role, self.peer.address), error)
            raise
        # Enter after the greeting was read: closing a socket with an unread one would lose the answer with the reason.
        self._counted = self._server.greeted.enter(self._admission.peer)
        self.peer = self._admission.peer
        self._greeted = True
        self._leave_doorstep()
        self._server.handshakes.greeted(self._place.address)
        if self._handshake is not None:
            self._handshake.greeted()
            self._handshake = None
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
            if self._server.doorstep.turn_away("wrong_port"):
                _logger.warning("%s is a gRPC client at the frames port of %s; %s", self.peer, name, where)
            self._transport.write(self._refusal.greeting)
            data = data.removeprefix(PREFACE)
        self._transport.write(self._refusal.feed(data))

    def _fatal(self, error: TaoError) -> None:
        """Send the reason to the peer, and close."""
        if self._greeted or self._server.doorstep.turn_away(error.reason.lower()):
            _logger.warning("the connection of %s is closed: %s", self.peer, error)
        self._queue(framing.ERROR, error_to_pb(error).SerializeToString())
        self.shut()
