"""Write tokens: read your writes anywhere (DESIGN.md §8).

A write returns one; a read that carries it never answers with something older, at any tier in any region. It names the
keys that the write changed with the versions that they have reached. Applications keep it, merge it, put it into a
cookie - and never look inside: the text form is versioned and carries a checksum, so that garbage is refused.

At most `MAX_KEYS` keys are named; beyond that the oldest become "critical for this shard": reads of the shard go to the
master database, which is always new enough.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable
from itertools import islice
from typing import Final, Self

import msgspec

from tao.model.errors import InvalidArgument
from tao.model.graph import ListKey
from tao.model.ids import MAX_ID, MAX_SHARDS, SHARD_SHIFT

MAX_KEYS: Final = 32
MAX_SHARDS_NAMED: Final = 32
MAX_TEXT_BYTES: Final = 2_048
"""Longest text accepted: a full token has about 1,400 bytes, and a cookie holds 4,096."""

_FORMAT: Final = 1
_CHECKSUM_BYTES: Final = 4


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    keys: list[tuple[int, int, int]]
    shards: list[int]


_decode = msgspec.msgpack.Decoder(_Packed).decode
_encode = msgspec.msgpack.Encoder().encode


class WriteToken:
    """Immutable. ``keys``: ``(id, atype) → version`` in the order in which they were written, atype 0 for objects;
    ``shards``: those that must be read critically."""

    __slots__ = ("_keys", "_shards")

    def __init__(self, keys: Iterable[tuple[int, int, int]] = (), shards: Iterable[int] = ()) -> None:
        """``keys``: ``(id, atype, version)``, oldest first. More than fit make their shards critical."""
        newest: dict[tuple[int, int], int] = {}
        for key_id, atype, version in keys:
            known = newest.pop((key_id, atype), 0)
            newest[key_id, atype] = max(known, version)
        critical = dict.fromkeys(shards)
        for oldest in list(islice(newest, max(0, len(newest) - MAX_KEYS))):
            del newest[oldest]
            critical[oldest[0] >> SHARD_SHIFT] = None
        self._keys = newest
        # One more than it can name says "all"; which they are does not matter then.
        self._shards = tuple(islice(critical, MAX_SHARDS_NAMED + 1))

    def __bool__(self) -> bool:
        return bool(self._keys or self._shards)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriteToken):
            return NotImplemented
        return self._keys == other._keys and set(self._shards) == set(other._shards)

    def __hash__(self) -> int:
        return hash((frozenset(self._keys.items()), frozenset(self._shards)))

    def __repr__(self) -> str:
        return f"WriteToken({len(self._keys)} keys, {len(self._shards)} shards)"

    def minimum_of_object(self, object_id: int) -> int:
        """The least version that may answer; 0 when the token says nothing of it."""
        return self._keys.get((object_id, 0), 0)

    def minimum_of_list(self, key: ListKey) -> int:
        """The least version of list and count that may answer."""
        return self._keys.get((key.id1, key.atype), 0)

    def is_critical(self, shard: int) -> bool:
        """Whether reads of the shard must be critical: the token holds more writes there than it can name, or more
        shards than it can."""
        return shard in self._shards or len(self._shards) > MAX_SHARDS_NAMED

    def merged(self, other: WriteToken) -> WriteToken:
        """Both: what ``other`` says counts as the newer."""
        return WriteToken([*self._triples(), *other._triples()], [*self._shards, *other._shards])

    def text(self) -> str:
        """The opaque form, for a cookie or header: letters, digits, ``-`` and ``_``."""
        body = bytes((_FORMAT,)) + _encode(_Packed(list(self._triples()), list(self._shards)))
        return base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Raises `InvalidArgument` for anything that `text` has not made."""
        if len(text) > MAX_TEXT_BYTES:
            raise InvalidArgument(f"a write token has at most {MAX_TEXT_BYTES} characters, this one {len(text)}")
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise InvalidArgument("this is no write token: pass on what a write returned, unchanged") from error
        body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
        if not body or checksum != _checksum(body):
            raise InvalidArgument("the write token is damaged: pass on what a write returned, unchanged")
        if body[0] != _FORMAT:
            raise InvalidArgument(f"the write token is of format {body[0]}, which this version does not know")
        try:
            packed = _decode(body[1:])
        except msgspec.MsgspecError as error:
            raise InvalidArgument("the write token is damaged: pass on what a write returned, unchanged") from error
        in_bounds = all(
            0 < key <= MAX_ID and 0 <= atype < 1 << 16 and version >= 0 for key, atype, version in packed.keys
        )
        if not in_bounds or not all(0 <= shard < MAX_SHARDS for shard in packed.shards):
            raise InvalidArgument("the write token names what no write can have changed")
        return cls(packed.keys, packed.shards)

    def _triples(self) -> Iterable[tuple[int, int, int]]:
        return ((key_id, atype, version) for (key_id, atype), version in self._keys.items())


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")
