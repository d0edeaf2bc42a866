"""Write tokens: read your writes anywhere.

A write returns a token; a read that carries it never answers with an older state, at any tier in any region. The token
names the keys that the write changed with the versions that they have reached. Applications keep it, merge it, put it
into a cookie, and never look inside: the text form is versioned and carries a checksum, so that garbage is rejected.

At most `MAX_KEYS` keys are named. Beyond that the oldest become "critical for this shard": reads of the shard go to the
master database, which is always new enough.

A write may be acknowledged while its inverse edge is pending. No version of the list that lacks the edge is known then,
so the token names the list and the edge's other end, whose leader settles the pair. A read of the list with the token
has the pair settled first. At most `MAX_PENDING` of these are named. Of older ones the token names the shards of both
ends, and a read of any list there has all pairs between the two shards settled first. What is settled, the token of the
next request need not name any more (`WriteToken.settled`).
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, NamedTuple, Self

import msgspec

from tao.model.errors import InvalidArgument, StaleRead
from tao.model.graph import ListKey
from tao.model.ids import MAX_ID, MAX_SHARDS, SHARD_SHIFT

MAX_KEYS: Final = 32
MAX_SHARDS_NAMED: Final = 32
MAX_PENDING: Final = 16
MAX_PENDING_SHARDS: Final = 32
MAX_COORDINATORS_ASKED: Final = 256
"""Most shards whose leaders are asked before a read when the token cannot say which of them owe an edge."""
ANY_SHARD: Final = MAX_SHARDS
"""Stands for every shard that may coordinate a pair."""
MAX_TEXT_BYTES: Final = 3_072
"""Longest text accepted: a full token has about 2,300 bytes, and a cookie holds 4,096."""

_FORMAT: Final = 1
_CHECKSUM_BYTES: Final = 4


class PendingInverse(NamedTuple):
    """A list that lacks the inverse edge of an acknowledged write, and the id at the edge's other end, whose shard's
    leader settles the pair."""

    id1: int
    atype: int
    coordinator_id: int


class PendingShard(NamedTuple):
    """A shard with lists that lack inverse edges which a token does not name, and the shard whose leader settles those
    pairs, or `ANY_SHARD`."""

    shard: int
    coordinator_shard: int

    def coordinator_shards(self) -> Sequence[int]:
        """Return the shards whose leaders may have to settle a pair. Raises `StaleRead` when they are too many to
        ask."""
        if self.coordinator_shard != ANY_SHARD:
            return (self.coordinator_shard,)
        if self.shard >= MAX_COORDINATORS_ASKED:
            raise StaleRead(
                f"the token stands for more writes with a pending inverse than it can name, and lists of shard "
                f"{self.shard} may lack one of any of {self.shard} shards; use a token of fewer writes"
            )
        return range(self.shard + 1)  # the smaller id of a pair is that of its coordinator


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    keys: list[tuple[int, int, int]]
    shards: list[int]


class _PackedWithPending(_Packed, frozen=True, array_like=True):
    """Written only where an inverse is pending, so that earlier versions read most tokens of this one."""

    pending: list[tuple[int, int, int]] = []
    # All shards of `pending_shards`, for earlier versions, which fail the reads of lists there.
    unnamed_shards: list[int] = []
    pending_shards: list[tuple[int, int]] | None = None


_decode = msgspec.msgpack.Decoder(_PackedWithPending).decode
_encode = msgspec.msgpack.Encoder().encode


class WriteToken:
    """An immutable token. ``keys``: ``(id, atype) → version`` in the order of the writes, atype 0 for objects;
    ``shards``: shards that must be read critically; ``pending``: lists that lack inverse edges; ``pending_shards``:
    shards of lists that lack further ones."""

    __slots__ = ("_keys", "_pending", "_pending_shards", "_shards")

    def __init__(
        self,
        keys: Iterable[tuple[int, int, int]] = (),
        shards: Iterable[int] = (),
        pending: Iterable[tuple[int, int, int]] = (),
        pending_shards: Iterable[tuple[int, int]] = (),
    ) -> None:
        """``keys``: ``(id, atype, version)``, oldest first. Keys beyond the limit make their shards critical.
        ``pending``: pending inverses, oldest first. Of those beyond the limit only the shards of both ends are kept,
        and beyond the limit of those only the shard of the list."""
        newest: dict[tuple[int, int], int] = {}
        for key_id, atype, version in keys:
            known = newest.pop((key_id, atype), 0)
            newest[key_id, atype] = max(known, version)
        critical = dict.fromkeys(shards)
        for oldest in list(islice(newest, max(0, len(newest) - MAX_KEYS))):
            del newest[oldest]
            critical[oldest[0] >> SHARD_SHIFT] = None
        self._keys = newest
        # One shard more than a token can name means "all"; which shards they are does not matter then.
        self._shards = tuple(islice(critical, MAX_SHARDS_NAMED + 1))
        every = dict.fromkeys(map(PendingInverse._make, pending))
        between = dict.fromkeys(map(PendingShard._make, pending_shards))
        for inverse in list(islice(every, max(0, len(every) - MAX_PENDING))):
            del every[inverse]
            between[PendingShard(inverse.id1 >> SHARD_SHIFT, inverse.coordinator_id >> SHARD_SHIFT)] = None
        self._pending = tuple(every)
        self._pending_shards = _bounded(between) if between else ()

    def __bool__(self) -> bool:
        return bool(self._keys or self._shards or self.has_pending)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WriteToken):
            return NotImplemented
        return self._keys == other._keys and self._sets() == other._sets()

    def __hash__(self) -> int:
        return hash((frozenset(self._keys.items()), self._sets()))

    def _sets(self) -> tuple[frozenset[object], ...]:
        return tuple(map(frozenset, (self._shards, self._pending, self._pending_shards)))

    def __repr__(self) -> str:
        pending = f", {len(self._pending)} pending inverses" if self._pending else ""
        return f"WriteToken({len(self._keys)} keys, {len(self._shards)} shards{pending})"

    @property
    def has_pending(self) -> bool:
        """Return whether any list lacks the inverse edge of one of the writes."""
        return bool(self._pending or self._pending_shards)

    @property
    def named_pending(self) -> tuple[PendingInverse, ...]:
        """Return the pending inverses that the token names, oldest first."""
        return self._pending

    @property
    def _has_all_pending(self) -> bool:
        """Return whether lists of any shard may lack inverse edges, because the shards are more than can be named."""
        return sum(each.coordinator_shard == ANY_SHARD for each in self._pending_shards) > MAX_SHARDS_NAMED

    def pending_in(self, key: ListKey) -> list[PendingInverse]:
        """Return the named pending inverses to settle before the list is read."""
        return [each for each in self._pending if each[:2] == (key.id1, key.atype)]

    def pending_at(self, shard: int) -> list[PendingShard]:
        """Return the pairs of shards between which everything is to be settled before a list of ``shard`` is read."""
        if self._has_all_pending:
            return [PendingShard(shard, ANY_SHARD)]
        return [each for each in self._pending_shards if each.shard == shard]

    def settled(self, inverses: Mapping[PendingInverse, int], shards: Collection[PendingShard] = ()) -> WriteToken:
        """Return the token of the same writes once these pending inverses are settled, and everything between these
        pairs of shards. ``inverses`` maps to the version of the list that has the edge, 0 where that is not known.
        Where no version is known, the shard is to be read critically. A token that stands for all shards goes on doing
        so, since it does not know which of them are left."""
        done = [each for each in self._pending if each in inverses]
        done_between = [each for each in self._pending_shards if each in shards]
        if self._has_all_pending:
            done_between = [each for each in done_between if each.coordinator_shard != ANY_SHARD]
        if not done and not done_between:
            return self
        reached = [(each.id1, each.atype, inverses[each]) for each in done if inverses[each]]
        critical = [each.id1 >> SHARD_SHIFT for each in done if not inverses[each]]
        return WriteToken(
            [*self._triples(), *reached],
            [*self._shards, *critical, *(each.shard for each in done_between)],
            [each for each in self._pending if each not in inverses],
            [each for each in self._pending_shards if each not in done_between],
        )

    def minimum_of_object(self, object_id: int) -> int:
        """Return the lowest version that may answer a read of the object; 0 when the token does not name it."""
        return self._keys.get((object_id, 0), 0)

    def minimum_of_list(self, key: ListKey) -> int:
        """Return the lowest version that may answer a read of the list or its count; 0 when the token does not name
        it."""
        return self._keys.get((key.id1, key.atype), 0)

    def is_critical(self, shard: int) -> bool:
        """Return whether reads of the shard must be critical: the token stands for more writes there than it can name,
        or for more shards than it can name."""
        return shard in self._shards or len(self._shards) > MAX_SHARDS_NAMED

    def merged(self, other: WriteToken) -> WriteToken:
        """Return a token for both; the keys of ``other`` count as the newer ones."""
        return WriteToken(
            [*self._triples(), *other._triples()],
            [*self._shards, *other._shards],
            [*self._pending, *other._pending],
            [*self._pending_shards, *other._pending_shards],
        )

    def text(self) -> str:
        """Return the opaque form, for a cookie or header: letters, digits, ``-`` and ``_``."""
        packed = _Packed(list(self._triples()), list(self._shards))
        if self.has_pending:
            shards = list(dict.fromkeys(each.shard for each in self._pending_shards))
            packed = _PackedWithPending(
                packed.keys, packed.shards, list(self._pending), shards, list(self._pending_shards)
            )
        body = bytes((_FORMAT,)) + _encode(packed)
        return base64.urlsafe_b64encode(body + _checksum(body)).decode().rstrip("=")

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the form that `text` returns. Raises `InvalidArgument` for any other text."""
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
        ) and all(
            0 < key <= MAX_ID and 0 < atype < 1 << 16 and 0 < coordinator < key
            for key, atype, coordinator in packed.pending
        )
        between = packed.pending_shards
        if between is None:  # made by an earlier version, which did not name the coordinators' shards
            between = [(shard, ANY_SHARD) for shard in packed.unnamed_shards]
        in_bounds = in_bounds and all(0 <= other <= shard or other == ANY_SHARD for shard, other in between)
        shards = (*packed.shards, *(shard for shard, _ in between))
        if not in_bounds or not all(0 <= shard < MAX_SHARDS for shard in shards):
            raise InvalidArgument("the write token names what no write can have changed")
        return cls(packed.keys, packed.shards, packed.pending, between)

    def _triples(self) -> Iterable[tuple[int, int, int]]:
        return ((key_id, atype, version) for (key_id, atype), version in self._keys.items())


def _bounded(between: dict[PendingShard, None]) -> tuple[PendingShard, ...]:
    """Return pairs of shards, of which the oldest beyond the bound become those with any coordinator."""
    of_any = {each.shard: None for each in between if each.coordinator_shard == ANY_SHARD}
    exact = [each for each in between if each.shard not in of_any]
    of_any |= {each.shard: None for each in exact[: max(0, len(exact) - MAX_PENDING_SHARDS)]}
    # One shard more than a token can name means "all"; which shards they are does not matter then.
    named = islice(of_any, MAX_SHARDS_NAMED + 1)
    return (*(PendingShard(each, ANY_SHARD) for each in named), *(each for each in exact if each.shard not in of_any))


def _checksum(body: bytes) -> bytes:
    return zlib.crc32(body).to_bytes(_CHECKSUM_BYTES, "little")
