"""Frames as bytes: ``length u32 | kind u8 | payload``, little-endian; ``length`` counts the payload. Nothing here does
I/O.

Little-endian as every other integer of the system. A receiver passes in what the socket returns and gets whole frames
back. A frame larger than the bound is rejected when its header is seen, before memory is spent on it.
"""

from __future__ import annotations

import struct
from typing import Final

from tao.model.errors import ProtocolError

PROTOCOL_VERSION: Final = 1

HELLO: Final = 1
WELCOME: Final = 2
REQUEST: Final = 3
ANSWER: Final = 4
PING: Final = 5
PONG: Final = 6
GO_AWAY: Final = 7
ERROR: Final = 8

HEADER: Final = struct.Struct("<IB")
HEADER_BYTES: Final = HEADER.size
MAX_CONTROL_BYTES: Final = 4096
"""Bound of every payload except requests and answers."""
GATHERED_BYTES: Final = 4096
"""The bytes that wait for the end of the tick at most: 500 ids or 100 edges, some 0.1 ms of their receiver's work,
against 0.01 ms for a write."""

pack_header = HEADER.pack
_unpack_header = HEADER.unpack_from


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Return one whole frame."""
    return pack_header(len(payload), kind) + payload


def split_hello(received: bytes) -> tuple[bytes, bytes] | None:
    """Return the payload of the greeting that a connection begins with, and what follows it; None while the greeting is
    incomplete. Raises `ProtocolError` for anything else, as soon as its header is seen: a peer without a credential may
    send nothing larger."""
    if len(received) < HEADER_BYTES:
        return None
    length, kind = _unpack_header(received)
    if kind != HELLO:
        raise ProtocolError(f"a connection begins with a greeting, not with a frame of kind {kind}")
    if length > MAX_CONTROL_BYTES:
        raise ProtocolError(f"a greeting of {length} bytes; send at most {MAX_CONTROL_BYTES}")
    end = HEADER_BYTES + length
    return (received[HEADER_BYTES:end], received[end:]) if len(received) >= end else None


class FrameDecoder:
    """Splits a byte stream into ``(kind, payload)``, in order, regardless of how it was cut on the way."""

    __slots__ = ("_held", "_max_payload_bytes", "_needed")

    def __init__(self, max_payload_bytes: int) -> None:
        self._max_payload_bytes = max_payload_bytes
        self._held = bytearray()
        self._needed = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames that are complete with ``data``. Raises `ProtocolError` for an oversized frame; the stream
        cannot be read on after that."""
        source: bytes | bytearray = data
        if self._held:
            # A large frame arrives in hundreds of pieces: they are appended, and parsed once there are enough.
            self._held += data
            if len(self._held) < self._needed:
                return []
            source = self._held
        frames: list[tuple[int, bytes]] = []
        at, end = 0, len(source)
        self._needed = HEADER_BYTES
        while end - at >= HEADER_BYTES:
            length, kind = _unpack_header(source, at)
            if length > (self._max_payload_bytes if kind in (REQUEST, ANSWER) else MAX_CONTROL_BYTES):
                raise ProtocolError(f"a frame of kind {kind} announces {length} bytes, more than its bound")
            start = at + HEADER_BYTES
            if end - start < length:
                self._needed = HEADER_BYTES + length
                break
            at = start + length
            payload = source[start:at]
            frames.append((kind, payload if isinstance(payload, bytes) else bytes(payload)))
        if source is data:
            if at < end:
                self._held += data[at:]
        else:
            del self._held[:at]
        return frames
