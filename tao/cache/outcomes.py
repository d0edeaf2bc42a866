"""The values that go in and out of the cache: fill tickets, outcomes, partial answers and statistics."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

EntryKind = Literal["object", "list", "count"]


class Applied(enum.StrEnum):
    """The effect of a change or message on the cache."""

    APPLIED = "applied"
    """The entry now has the version of the change."""
    IGNORED = "ignored"
    """The entry has that version or a later one already."""
    DROPPED = "dropped"
    """The entry was dropped, because the change could not be applied to its version or did not carry the value. The
    next read fills it."""
    NOT_CACHED = "not_cached"
    """Nothing was cached; only the version floor was raised (of an open shard)."""
    EPOCH_BUMPED = "epoch_bumped"
    """The message raised the version epoch, which invalidated the whole shard. A change was applied afterwards."""


class Stored(enum.StrEnum):
    """The outcome of a fill."""

    STORED = "stored"
    """The value is cached, or the cached value is as good."""
    BELOW_FLOOR = "below_floor"
    """A later version is known: answer nobody with this value. Look into the cache again, then fetch from further
    up."""
    NOT_KEPT = "not_kept"
    """The value may be answered but was not cached: the shard was closed or invalidated meanwhile, its floors
    overflowed, the ticket is too old, the entry too large, or the block does not start at position 0."""


class Denial(enum.IntEnum):
    """The filter that says that there is no such edge."""

    NONE = 0
    BY_PAIR_FILTER = 1
    BY_MEMBERSHIP_FILTER = 2


class FillTicket(msgspec.Struct, frozen=True, gc=False):
    """A ticket that is taken before a value is read from its source, and shown when the value is stored.
    ``shard_epoch`` names the shard's tables at that time, or the last change that passed a shard which was not open;
    ``floor`` is the lowest version that the value must have."""

    kind: Literal["object", "list"]
    id: int
    atype: int
    floor: int
    shard_epoch: int
    version_epoch: int
    started: float


class EdgesAnswer(msgspec.Struct, frozen=True, gc=False):
    """The edges found, in list order, each once. ``missing`` lists the ids that the cache cannot decide, in the order
    of the query.

    An answer that is completed from another source must have the version of ``block``; otherwise ask that source for
    all ids.
    """

    block: bytes
    missing: tuple[int, ...] = ()


class CachedKey(msgspec.Struct, frozen=True, gc=False):
    """The name of an entry; ``atype`` is 0 for objects."""

    kind: EntryKind
    id: int
    atype: int = 0


class KeySample(msgspec.Struct, frozen=True):
    """Some keys of a shard. ``after`` is the argument of the next call, None when there are no more keys; ``total`` is
    the number of keys of the shard."""

    keys: tuple[CachedKey, ...]
    after: int | None
    total: int


class ArenaStatistics(msgspec.Struct, frozen=True):
    """Statistics of one arena at one moment.

    ``bytes`` includes what dropped tables still hold; the entry counts do not. ``eviction_age_seconds``: the time since
    the last use of the entry that last left the main queue, None when none did yet. ``kept``: entries that the eviction
    hand found used. ``returns``: keys that came back before an eighth, a quarter, half and all of the budget had been
    evicted since they left. ``packed_bytes``: the blocks of packed counts.
    """

    name: str
    bytes: int
    budget_bytes: int
    objects: int
    lists: int
    counts: int
    evictions: int
    eviction_age_seconds: float | None
    kept: int
    returns: tuple[int, ...]
    packed_bytes: int


class FloorStatistics(msgspec.Struct, frozen=True):
    """Statistics of the version floors of all open shards: floors held, floors that could not be kept, and shards that
    keep no fills because of that."""

    floors: int
    overflows: int
    overflowed_shards: int
