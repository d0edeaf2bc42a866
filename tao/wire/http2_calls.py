"""The places in a client's HTTP/2 bytes at which it asks for something: a call, or more of the server's attention than
comes with one.

A connection that has shown no credential may send what belongs to a call that it was let through with, and waits
before the next one. Calls begin with HEADERS frames. The other frames are counted, too, because small ones cost the
server more than the client, and large ones its memory. Nothing of a frame is decoded but its kind and length. Nothing
here does I/O.
"""

from __future__ import annotations

import struct
from typing import Final

from tao.model.errors import ProtocolError
from tao.wire.http2_refusal import PREFACE

FREE_FRAMES: Final = 256
"""Frames of other kinds that come with one turn: many times what an open call needs."""

FREE_BYTES: Final = 1 << 16
"""Bytes of other frames that come with one turn, and begin in it: as many as HTTP/2 allows a client to send before it
hears from the server. A call with a credential has been admitted by then."""

_HEAD: Final = struct.Struct(">HBB")  # length (24 bits) and kind
_HEAD_BYTES: Final = 9
_HEADERS: Final = 1


class TurnSplitter:
    """Splits what a client sends at the frames that need a turn."""

    def __init__(self) -> None:
        self.needs_turn = False
        """Whether the next frame waits for `grant`."""
        self._has_passed_call = False
        self._buffer = b""
        self._preface_left = PREFACE
        self._payload_left = 0
        self._granted = False
        self._frames = 0
        self._bytes = 0

    @property
    def is_before_calls(self) -> bool:
        """Whether the client speaks HTTP/2, and no call of it has passed."""
        return not self._preface_left and not self._has_passed_call

    def feed(self, data: bytes) -> None:
        """Add bytes of the client. While it waits for a turn, read no more from it."""
        self._buffer = self._buffer + data if self._buffer else data

    def grant(self) -> None:
        """Let the frame pass that needs a turn."""
        self._granted, self.needs_turn, self._frames, self._bytes = True, False, 0, 0

    def take(self) -> bytes:
        """Return the bytes that may pass now. Raises `ProtocolError` for a client that does not speak HTTP/2."""
        data, at, end = self._buffer, 0, len(self._buffer)
        if self._preface_left:
            at = min(len(self._preface_left), end)
            if data[:at] != self._preface_left[:at]:
                raise ProtocolError("the connection does not begin as one of HTTP/2; this is a gRPC port")
            self._preface_left = self._preface_left[at:]
        while True:
            passed = min(self._payload_left, end - at)
            at += passed
            self._payload_left -= passed
            if end - at < _HEAD_BYTES:
                break
            high, low, kind = _HEAD.unpack_from(data, at)
            is_beyond = self._frames >= FREE_FRAMES or self._bytes >= FREE_BYTES
            if not self._granted and (kind == _HEADERS or is_beyond):
                self.needs_turn = True
                break
            self._granted = False
            self._has_passed_call = self._has_passed_call or kind == _HEADERS
            self._frames += 1
            self._payload_left = high << 8 | low
            self._bytes += self._payload_left
            at += _HEAD_BYTES
        self._buffer = data[at:]
        return data[:at]

    def rest(self) -> bytes:
        """Return all that is left: the client needs no more turns."""
        rest, self._buffer, self.needs_turn = self._buffer, b"", False
        return rest
