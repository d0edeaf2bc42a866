"""Finds out why two processes do not understand each other: one of them speaks TLS, and the other does not, or does not
show the certificate that is demanded.

A port of frames that has TLS answers a connection without it by an alert, which says so. Other ends of a connection say
nothing: many a TLS server drops one without TLS as a server that goes away does. So after such an end the server is
spoken to in the other way over another connection: it gets the beginning of a handshake, or of HTTP/2, to which a port
of either transport answers without TLS. Its first bytes say what it speaks. Of one that says nothing, or is gone,
nothing is known; nor of one that answers anything else, as a load balancer that ends TLS does, which refuses plain text
in plain text.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final, cast

from tao.model.errors import TaoError, TlsMismatch, Unavailable
from tao.wire.address import TcpAddress, parse_address
from tao.wire.http2_refusal import PREFACE

_MOST_SECONDS: Final = 1.0
"""The time for the second connection. The failure is reported that much later where its server is silent."""
_HEAD_BYTES: Final = 4
_HTTP2_CLIENT: Final = PREFACE + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""The beginning of a client of HTTP/2: its preface, and empty settings."""
_RECORD_KINDS: Final = (0x15, 0x16)
"""TLS records that a server answers a handshake with: an alert, or its own part of the handshake."""
_SETTINGS: Final = 4
"""The kind of the frame with which a server of HTTP/2 begins."""
_MAJOR: Final = 3
_MINORS: Final = range(1, 5)
"""The version in the head of a record: 3.1 to 3.4, whichever version of TLS is spoken."""


async def explained(failure: TaoError, address: str, *, with_tls: bool, within_seconds: float) -> TaoError:
    """Return the error to raise after a server has ended a connection before its greeting: `TlsMismatch` when it
    certainly speaks TLS and this process does not (``with_tls``), or the other way round; else the failure.

    ``within_seconds``: the time for a whole attempt to connect, which bounds this one as well."""
    sent = _HTTP2_CLIENT if with_tls else _client_hello()
    answer = await _answer_to(sent, address, min(within_seconds, _MOST_SECONDS))
    if not (is_http2(answer) if with_tls else is_tls_record(answer)):
        return failure
    if with_tls:
        return TlsMismatch(
            f"{address} answers without TLS, and this process connects with it: leave out `ClientSettings.tls` (SDK) "
            "or --ca and TAO_CA (commands), or give the server `tls` in its settings"
        )
    return speaks_tls(address)


def speaks_tls(address: str) -> TlsMismatch:
    """Return the error to raise when the server has shown that it speaks TLS, and this process does not."""
    return TlsMismatch(
        f"{address} speaks TLS, and this process connects without it: give it `ClientSettings.tls` (SDK), --ca or "
        "TAO_CA (commands) or `tls` in its settings (servers), with a certificate where the server demands one"
    )


def certificate_refused(address: str) -> TaoError:
    """Return the error to raise after a server has ended a connection when TLS was established."""
    refused = Unavailable(
        f"{address} has ended the connection when TLS was established, as a server does that demands a certificate: "
        "show it one that its authorities have signed, by `ClientSettings.tls` (SDK), --certificate and --private-key "
        "(commands) or `tls` in its settings (servers). One that stops, or whose newcomers displace one another, does "
        "so, too; its log says why"
    )
    refused.is_refusal = True
    return refused


def is_broken_handshake(error: OSError) -> bool:
    """Return whether a handshake has ended in a way that a server without TLS may cause: not at a certificate that is
    not believed, and not before a connection was made."""
    broken = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)
    return isinstance(error, broken) and not isinstance(error, ssl.SSLCertVerificationError)


def is_tls_record(head: bytes) -> bool:
    """Return whether an answer begins with the head of a TLS record, given its first four bytes. A frame of this
    system that is as long as a record's first bytes say has 0 for the third one, and so has HTTP/2."""
    return len(head) >= _HEAD_BYTES and head[0] in _RECORD_KINDS and head[1] == _MAJOR and head[2] in _MINORS


def is_http2(head: bytes) -> bool:
    """Return whether an answer begins as a server of HTTP/2 does without TLS, given its first four bytes: with settings
    of fewer than 65,536 bytes."""
    return len(head) >= _HEAD_BYTES and head[0] == 0 and head[3] == _SETTINGS


class _Answer(asyncio.Protocol):
    """Sends a few bytes, and keeps the beginning of what comes back until the connection ends."""

    def __init__(self, sent: bytes) -> None:
        self.received = b""
        self.is_over: Final = asyncio.Event()
        self._sent: Final = sent

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._sent)

    def data_received(self, data: bytes) -> None:
        self.received += data[:_HEAD_BYTES]
        if len(self.received) >= _HEAD_BYTES:
            self.is_over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_over.set()


async def _answer_to(sent: bytes, address: str, within_seconds: float) -> bytes:
    """Return the first bytes of the answer to what is sent over a connection of its own; none if none come in time."""
    loop, where, answer = asyncio.get_running_loop(), parse_address(address), _Answer(sent)
    with suppress(TimeoutError, OSError):
        async with asyncio.timeout(within_seconds):
            if isinstance(where, TcpAddress):
                transport, _ = await loop.create_connection(lambda: answer, where.host, where.port)
            else:
                transport, _ = await loop.create_unix_connection(lambda: answer, where.path)
            try:
                await answer.is_over.wait()
            finally:
                transport.abort()
    return answer.received


def _client_hello() -> bytes:
    """Return the first message of a handshake, which is never finished: nothing is trusted, and nothing is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()
