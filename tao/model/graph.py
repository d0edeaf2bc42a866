"""The graph's values, and the encoded forms in which they are cached and sent.

A cache hit must cost a look-up and an append, so a value is held as the bytes that go on the wire:

* object value  ``version u64 | otype u32 | data``   - otype 0 says that the object does not exist
* count value   ``version u64 | count u64``
* edge block    see `tao.model.edge_block`; its first 16 bytes are a count value
* existence     one byte, `EXISTS` or `EXISTS_NOT`: an answer without a version, which no cache holds

All integers are little-endian. Versions are not shown to applications; they travel between tiers and to the SDK.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

MAX_TIME: Final = (1 << 63) - 1
MAX_OBJECT_DATA_BYTES: Final = 1 << 20
MAX_ASSOC_DATA_BYTES: Final = 1 << 16
MAX_ID2_SET: Final = 6000
ABSENT: Final = 0
"""The otype in the encoded value of an object that does not exist."""

_OBJECT_HEADER = struct.Struct("<QI")
_COUNT = struct.Struct("<QQ")
OBJECT_HEADER_BYTES: Final = _OBJECT_HEADER.size
COUNT_VALUE_BYTES: Final = _COUNT.size
EXISTS: Final = b"\x01"
EXISTS_NOT: Final = b"\x00"
"""The answers to `assoc_exists`."""


class Edge(msgspec.Struct, frozen=True, gc=False):
    """One association as an entry of its list: ``(id2, time, data)``. ``data`` is a msgpack map keyed by field number,
    or empty."""

    id2: int
    time: int
    data: bytes = b""


class ListKey(msgspec.Struct, frozen=True, gc=False, order=True):
    """The key of an association list."""

    id1: int
    atype: int


class EdgeKey(msgspec.Struct, frozen=True, gc=False, order=True):
    """The key of one association: at most one exists per triple."""

    id1: int
    atype: int
    id2: int


def encode_object(version: int, otype: int, data: bytes) -> bytes:
    """Return the value of an object, ready to send; ``otype=ABSENT`` with `deleted_data` for one that does not
    exist."""
    return _OBJECT_HEADER.pack(version, otype) + data


def deleted_data(otype: int) -> bytes:
    """Return the data in the value of a deleted object: the type that it had, by which servers decide who may know of
    it. Clients ignore it. Empty for `ABSENT`, the type of an object that never was."""
    return otype.to_bytes(2, "little") if otype else b""


def deleted_otype(value: bytes) -> int:
    """Return the type that the object had, of the value of one that does not exist; `ABSENT` for one that never was,
    and where a server of an earlier version made the value."""
    return int.from_bytes(value[OBJECT_HEADER_BYTES : OBJECT_HEADER_BYTES + 2], "little")


def decode_object(value: bytes) -> tuple[int, int, bytes]:
    """Return ``(version, otype, data)`` of an object value. Raises `struct.error` when it is shorter than its
    header."""
    version, otype = _OBJECT_HEADER.unpack_from(value)
    return version, otype, value[OBJECT_HEADER_BYTES:]


def encode_count(version: int, count: int) -> bytes:
    """Return the value of an association count, ready to send."""
    return _COUNT.pack(version, count)


def decode_count(value: bytes) -> tuple[int, int]:
    """Return ``(version, count)`` of a count value, or of an edge block's first 16 bytes."""
    return _COUNT.unpack_from(value)


def version_of(value: bytes) -> int:
    """Return the version in any encoded value: object, count or edge block."""
    return int.from_bytes(value[:8], "little")
