"""The client's end of a connection of frames.

All requests of one loop tick leave in one write: the requests of dozens of tasks cost one system call. Only a large
amount (`framing.GATHERED_BYTES`) leaves sooner, so that the server works on the first part while the rest is still
being queued. A silent connection is pinged; one that stays silent is given up, since a dead peer behind a dropped route
looks exactly like an idle one.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from typing import Final, cast

from google.protobuf.message import DecodeError

from tao.model.errors import Overloaded, ProtocolError, TaoError, Unavailable, is_tls_refusal
from tao.wire import framing
from tao.wire.address import TcpAddress, parse_address
from tao.wire.client_session import NumberedSession
from tao.wire.convert import error_from_pb
from tao.wire.framing import FrameDecoder, pack_header
from tao.wire.identity import Credentials
from tao.wire.session import Session
from tao.wire.settings import SessionSettings
from tao.wire.tls import ServerCheck
from tao.wire.tls_mismatch import certificate_refused, explained, is_broken_handshake, is_tls_record, speaks_tls
from tao.wire.v1 import frames_pb2, session_pb2

_MOST_ATTEMPTS: Final = 3
"""Connections that are tried while the server ends them without a word. A server that is gone does so as well."""
_MOST_PAUSE_SECONDS: Final = 0.02
"""The longest pause before another one: a crowd of clients that have displaced one another comes back spread out."""


async def connect_frames(
    address: str, settings: SessionSettings, credentials: Credentials, tls: ServerCheck | None = None
) -> Session:
    """Connect, check whose certificate the server shows, and exchange greetings.

    Raises `Unavailable` when no server can be reached in time, `TlsMismatch` when it speaks TLS and this process does
    not, or the other way round, `Unauthorized` when another one is at the address, and the server's answer to the
    greeting: `Unauthorized`, `Overloaded` or `ProtocolError`. Raises `SettingsError` when the file of the token cannot
    be read.
    """
    try:
        async with asyncio.timeout(settings.connect_timeout_seconds):
            return await _connect(address, settings, credentials.with_token(), tls)
    except TimeoutError:
        raise Unavailable(f"{address} did not answer within {settings.connect_timeout_seconds} s") from None
    except OSError as error:
        failure: TaoError = Unavailable(f"cannot connect to {address}: {error}")
        failure.is_refusal = is_tls_refusal(error)
        if tls is not None and is_broken_handshake(error):
            failure = await explained(failure, address, with_tls=True, within_seconds=settings.connect_timeout_seconds)
        raise failure from error
    except (Unavailable, ProtocolError) as ended:
        if tls is None and not ended.is_refusal:  # no server has said it in a frame
            seconds = settings.connect_timeout_seconds
            raise await explained(ended, address, with_tls=False, within_seconds=seconds) from None
        raise


async def _connect(
    address: str, settings: SessionSettings, credentials: Credentials, tls: ServerCheck | None
) -> Session:
    """Return a session that has been greeted. Connect again when the server ends the connection before it has said
    anything: a crowd at the same address may have taken its place at the server's doorstep."""
    attempts = 0
    while True:
        attempts += 1
        session = FrameSession(asyncio.get_running_loop(), address, settings, credentials, tls)
        try:
            await _open(session, address, tls)
            await session.greeted()
        except (ConnectionResetError, ConnectionAbortedError, Unavailable):
            session.abort()
            if attempts == _MOST_ATTEMPTS or session.has_heard:
                raise
        except BaseException:  # cancelled, or rejected by the server
            session.abort()
            raise
        else:
            return session
        await asyncio.sleep(random.uniform(0.0, _MOST_PAUSE_SECONDS))


async def _open(session: FrameSession, address: str, tls: ServerCheck | None) -> None:
    """Establish the connection of a session, and TLS."""
    loop, where = asyncio.get_running_loop(), parse_address(address)
    context = None if tls is None else tls.context
    if isinstance(where, TcpAddress):
        name = where.host if tls else None
        await loop.create_connection(lambda: session, where.host, where.port, ssl=context, server_hostname=name)
    else:
        name = "localhost" if tls else None
        await loop.create_unix_connection(lambda: session, where.path, ssl=context, server_hostname=name)


class FrameSession(NumberedSession, asyncio.Protocol):
    """A `Session` over frames; made by `connect_frames`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        address: str,
        settings: SessionSettings,
        credentials: Credentials,
        tls: ServerCheck | None = None,
    ) -> None:
        super().__init__(loop, address, settings)
        self._credentials = credentials
        self._tls = tls
        self._decoder = FrameDecoder(settings.max_message_bytes)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._flush_due = False
        self._last_heard = 0.0
        self._check_due = 0.0
        self._keep_alive: asyncio.TimerHandle | None = None
        self._failure: TaoError | None = None
        self._last_resort: asyncio.TimerHandle | None = None
        self._greeting: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()

    async def greeted(self) -> None:
        """Wait for the server's Welcome."""
        await self._greeting

    @property
    def has_heard(self) -> bool:
        """Whether the server has said anything, be it in a TLS handshake that has succeeded."""
        return self._last_heard > 0.0 or (self._tls is not None and self._transport is not None)

    async def close(self) -> None:
        """See `Session.close`."""
        if self._transport is None:
            return
        self._fail(Unavailable(f"the session with {self._address} was closed here"))
        await self._ended

    def abort(self) -> None:
        """Drop the connection at once."""
        self._greeting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the loop ----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # This class batches what is worth batching; the loop must not hold data back for the rest of its iteration.
        self._transport.set_write_buffer_limits(high=0)
        try:
            if self._tls is not None:
                self._tls.check(transport)
        except TaoError as error:
            self._fail(error)  # before the greeting, which has the token
            return
        shown = self._credentials
        hello = frames_pb2.Hello(
            protocol_version=framing.PROTOCOL_VERSION, name=shown.name, role=shown.role, token=shown.token
        )
        self._transport.write(framing.frame(framing.HELLO, hello.SerializeToString()))

    def data_received(self, data: bytes) -> None:
        self._last_heard = self._loop.time()
        try:
            for kind, payload in self._decoder.feed(data):
                if kind == framing.ANSWER and self._connected:
                    self._answer_arrived(session_pb2.Answer.FromString(payload))
                else:
                    self._control_arrived(kind, payload)
        except DecodeError as error:
            self._fail(ProtocolError(f"{self._address} sent a message that cannot be decoded: {error}"))
        except ProtocolError as error:
            is_alert = self._tls is None and not self._greeting.done() and is_tls_record(data)
            self._fail(speaks_tls(self._address) if is_alert else error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        why = f": {exc}" if exc else ""
        error = self._failure
        if error is None:
            error = Unavailable(f"the connection to {self._address} was lost{why}")
            # A server that does not believe a certificate finds out after the handshake of its client, and hangs up.
            # Its loop sends no alert, so the connection just ends. One whose greeting nobody has read is reset.
            is_ended = exc is None or isinstance(exc, ssl.SSLError)
            if is_ended and self._tls is not None and not self._greeting.done():
                error = certificate_refused(self._address)
        self._end(error)
        if self._last_resort is not None:
            self._last_resort.cancel()
        if not self._ended.done():
            self._ended.set_result(None)

    # ---- sending ---------------------------------------------------------------------------------------------------

    def _unsent_bytes(self) -> int:
        return self._out_bytes + (self._transport.get_write_buffer_size() if self._transport else 0)

    def _transmit(self, message: bytes, kind: int = framing.REQUEST) -> None:
        self._out.append(pack_header(len(message), kind))
        self._out.append(message)
        self._out_bytes += len(message)
        if self._out_bytes >= framing.GATHERED_BYTES:
            self._write()
        elif not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self.flush)

    def hold(self) -> None:
        """See `Session.hold`."""
        self._flush_due = True

    def flush(self) -> None:
        """See `Session.flush`."""
        self._flush_due = False
        self._write()

    def _write(self) -> None:
        # A connection that has just been lost reports so in a moment, and then all requests fail.
        if not self._out:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._out))
        self._out.clear()
        self._out_bytes = 0

    # ---- the rest of the protocol ----------------------------------------------------------------------------------

    def _control_arrived(self, kind: int, payload: bytes) -> None:
        if kind == framing.WELCOME and not self._greeting.done():
            self.server_name = frames_pb2.Welcome.FromString(payload).server_name
            self._opened()
            self._greeting.set_result(None)
            self._schedule_keep_alive(self._settings.ping_interval_seconds)
        elif kind == framing.ERROR:
            error = error_from_pb(session_pb2.Error.FromString(payload))
            # One that has no room refuses everybody.
            error.is_refusal = not (self._greeting.done() or isinstance(error, Overloaded))
            self._fail(error)
        elif kind == framing.PING and self._connected:
            self._transmit(payload, framing.PONG)
        elif kind == framing.GO_AWAY and self._connected:
            self._server_drains()
        elif kind != framing.PONG:
            self._fail(ProtocolError(f"{self._address} sent a frame of kind {kind}, which is not expected here"))

    def _schedule_keep_alive(self, seconds: float) -> None:
        self._check_due = self._loop.time() + seconds
        self._keep_alive = self._loop.call_later(seconds, self._check_alive)

    def _check_alive(self) -> None:
        settings = self._settings
        now = self._loop.time()
        silent_seconds = now - self._last_heard
        # A process that was paused runs its timers before it reads what has arrived: the silence is its own.
        paused = now - self._check_due > settings.pause_seconds
        if silent_seconds >= settings.ping_interval_seconds + settings.ping_timeout_seconds and not paused:
            self._fail(Unavailable(f"{self._address} has been silent for {silent_seconds:.1f} s"))
            self.abort()
            return
        if silent_seconds >= settings.ping_interval_seconds:
            self._transmit(b"", framing.PING)
            self._schedule_keep_alive(settings.ping_timeout_seconds)
        else:
            self._schedule_keep_alive(settings.ping_interval_seconds - silent_seconds)

    def _shut(self) -> None:
        self._fail(Unavailable(f"{self._address} is draining; connect again"))

    def _fail(self, error: TaoError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._end(error)
        if self._transport is not None:
            self.flush()
            self._transport.close()
            # A peer that does not read must not hold a closed connection open.
            self._last_resort = self._loop.call_later(self._settings.ping_timeout_seconds, self._transport.abort)

    def _end(self, error: TaoError) -> None:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            self._keep_alive = None
        if not self._greeting.done():
            self._greeting.set_exception(error)
        self._lost(error)
