"""Places in a set, and the cursor: a short text that holds the place of the last edge that was examined.

The place is that of the last edge *examined*, not of the last one found. A page whose edges all fall out still moves
on, and a page that a budget ends continues where it stopped.

A cursor is not signed and holds no secret: a caller with the right to read the lists may start anywhere in them. The
checksums find accidents: a text that was damaged, and the cursor of another expression.
"""

from __future__ import annotations

import struct
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as NotBase64
from typing import Final, NamedTuple
from zlib import crc32

from tao.model.errors import InvalidArgument
from tao.model.graph import MAX_TIME
from tao.model.ids import MAX_ID


class Place(NamedTuple):
    """The place of an edge in list order: newest first, so an edge comes earlier when its place is greater."""

    time: int
    id2: int


START: Final = Place(MAX_TIME, MAX_ID + 1)
"""The place before every edge."""

END: Final = Place(0, 0)
"""The place after every edge."""

_FORMAT: Final = 0x53  # not the format of a list's cursor (`tao.client.reads`)
_CURSOR: Final = struct.Struct("<BIQQ")  # format, checksum of the expression, time and id2 of the last edge examined
_CHECKSUM: Final = struct.Struct("<I")


def make_cursor(checksum: int, place: Place) -> str:
    """Return the cursor of a place in the expression with this checksum."""
    packed = _CURSOR.pack(_FORMAT, checksum, *place)
    return urlsafe_b64encode(packed + _CHECKSUM.pack(crc32(packed))).decode().rstrip("=")


def read_cursor(cursor: str, checksum: int, of: str = "set expression") -> Place:
    """Return the place that a cursor of the expression with this checksum holds. Raises `InvalidArgument`; ``of`` is
    what the message calls the expression."""
    refusal = f"cursor {cursor!r} is not valid: pass the cursor of a page of this {of} on unchanged"
    try:
        raw = urlsafe_b64decode(cursor.encode("ascii") + b"=" * (-len(cursor) % 4))
        packed, (crc,) = raw[: _CURSOR.size], _CHECKSUM.unpack(raw[_CURSOR.size :])
        kind, own_checksum, time, id2 = _CURSOR.unpack(packed)
    except (AttributeError, TypeError, UnicodeEncodeError, NotBase64, struct.error) as error:
        raise InvalidArgument(refusal) from error
    if kind != _FORMAT or crc != crc32(packed) or time > MAX_TIME or not 0 < id2 <= MAX_ID:
        raise InvalidArgument(refusal)
    if own_checksum != checksum:
        raise InvalidArgument(f"cursor {cursor!r} is of another {of}: start without a cursor")
    return Place(time, id2)
