"""The refusal of a gRPC client at a port that does not speak gRPC: its call fails with a message that names the other.

A gRPC client begins with the preface of HTTP/2. It shows any answer that is not HTTP/2 as a parse error, and a closed
connection as "failed to connect to all addresses"; a GOAWAY with the code HTTP_1_1_REQUIRED aborts the process of a
client with gRPC's C core. Every client shows ``grpc-message``, so the first call gets an answer of gRPC: headers that
are trailers at once ("Trailers-Only"). A GOAWAY follows, so that the client sends no further calls here. The client
closes the connection; the port's own timeout ends one that stays open.

Nothing here does I/O, and nothing of a request is decoded but the kind and the length of its frames.
"""

from __future__ import annotations

import string
import struct
from typing import Final
from urllib.parse import quote

import grpc

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_FRAME_HEADER: Final = struct.Struct(">HBBBI")  # length (24 bits), kind, flags, stream
_HEADERS, _SETTINGS, _GO_AWAY, _CONTINUATION = 1, 4, 7, 9
_ACK = _END_STREAM = 0x1
_END_HEADERS = 0x4
_STATUS_200: Final = b"\x88"
"""``:status 200`` as HPACK has it in its static table (RFC 7541)."""
_UNESCAPED: Final = string.punctuation.replace("%", "") + " "


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _FRAME_HEADER.pack(len(payload) >> 8, len(payload) & 0xFF, kind, flags, stream) + payload


GO_AWAY_BEFORE_CALLS: Final = _frame(_GO_AWAY, 0, 0, bytes(8))
"""Ends a connection on which no call was handled: the last stream is 0, and the code NO_ERROR (RFC 9113, 6.8)."""


class Http2Refusal:
    """Answers a client that has sent `PREFACE`: pass in what it sends after that, and send it what is returned."""

    def __init__(self, message: str) -> None:
        """``message`` says which port this is, and which one the client should use."""
        self._message = message
        self._header = b""
        self._skip = 0
        self._refused = False

    @property
    def greeting(self) -> bytes:
        """The server's side of the preface: empty settings."""
        return _frame(_SETTINGS, 0, 0, b"")

    def feed(self, data: bytes) -> bytes:
        """Return what to answer to these bytes, possibly nothing. Only the first call is answered."""
        answer = b""
        while data and not self._refused:
            if self._skip:
                skipped = min(self._skip, len(data))
                self._skip, data = self._skip - skipped, data[skipped:]
                continue
            wanted = _FRAME_HEADER.size - len(self._header)
            self._header, data = self._header + data[:wanted], data[wanted:]
            if len(self._header) == _FRAME_HEADER.size:
                high, low, kind, flags, stream = _FRAME_HEADER.unpack(self._header)
                self._header, self._skip = b"", high << 8 | low
                answer += self._answer(kind, flags, stream & 0x7FFF_FFFF)
        return answer

    def _answer(self, kind: int, flags: int, stream: int) -> bytes:
        if kind == _SETTINGS and not flags & _ACK:
            return _frame(_SETTINGS, _ACK, 0, b"")
        if kind not in (_HEADERS, _CONTINUATION) or not flags & _END_HEADERS:
            return b""
        self._refused = True
        code, _ = grpc.StatusCode.UNIMPLEMENTED.value
        trailers = {
            "content-type": "application/grpc",
            "grpc-status": str(code),
            "grpc-message": quote(self._message, safe=_UNESCAPED),
        }
        block = _STATUS_200 + b"".join(_literal(name, value) for name, value in trailers.items())
        go_away = struct.pack(">II", stream, 0) + self._message.encode()
        return _frame(_HEADERS, _END_STREAM | _END_HEADERS, stream, block) + _frame(_GO_AWAY, 0, 0, go_away)


def _literal(name: str, value: str) -> bytes:
    """A header that no table has and that neither end is to remember (RFC 7541, 6.2.2)."""
    return b"\x00" + _text(name) + _text(value)


def _text(text: str) -> bytes:
    content, length = text.encode(), b""
    if len(content) < 0x7F:
        return bytes([len(content)]) + content
    rest = len(content) - 0x7F
    while rest >= 0x80:
        length += bytes([rest & 0x7F | 0x80])
        rest >>= 7
    return b"\x7f" + length + bytes([rest]) + content
