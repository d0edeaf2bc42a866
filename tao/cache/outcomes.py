"""The small values that go in and out of the cache: tickets, outcomes, partial answers, figures."""

from __future__ import annotations

import enum
from typing import Literal

import msgspec

EntryKind = Literal["object", "list", "count"]


class Applied(enum.StrEnum):
    """What a change or message did to the cache (DESIGN.md §6)."""

    APPLIED = "applied"
    """The entry is now at the version of the change."""
    IGNORED = "ignored"
    """The entry is at that version or a later one already."""
    DROPPED = "dropped"
    """What was held was too old to apply it to, or the new value was not carried: a read has to fill again."""
    NOT_CACHED = "not_cached"
    """Nothing was held; only the floor was raised (of an open shard)."""
    EPOCH_BUMPED = "epoch_bumped"
    """It voided the whole shard (and was then applied, if it was a change)."""


class Stored(enum.StrEnum):
    """What became of a fill (DESIGN.md §4)."""

    STORED = "stored"
    """Cached, or what is held is as good."""
    BELOW_FLOOR = "below_floor"
    """A later version is known: answer nobody with it. Look into the cache again, then fetch further up."""
    NOT_KEPT = "not_kept"
    """Good to answer with, but not cached: shard closed or bumped meanwhile, floors overflowed, ticket too old, entry
    too large, or a block that does not start at position 0."""


class Ticket(msgspec.Struct, frozen=True, gc=False):
    """Taken before a fill is read, shown when it is stored. ``generation`` names the shard's tables at that time
    (0: the shard was not open), ``floor`` the least version that a fill must have."""

    kind: Literal["object", "list"]
    id: int
    atype: int
    floor: int
    generation: int
    version_epoch: int
    started: float


class EdgesAnswer(msgspec.Struct, frozen=True, gc=False):
    """The edges found, in list order, each once; ``missing``: ids that the cache cannot decide, in the order asked.

    An answer completed from elsewhere must have the version of ``block``: else ask for all ids there."""

    block: bytes
    missing: tuple[int, ...] = ()


class CachedKey(msgspec.Struct, frozen=True, gc=False):
    """Names an entry; ``atype`` is 0 for objects."""

    kind: EntryKind
    id: int
    atype: int = 0


class KeySample(msgspec.Struct, frozen=True):
    """Some keys of a shard; ``after`` goes into the next call, and is None when there are no more. ``total``: how many
    there are."""

    keys: tuple[CachedKey, ...]
    after: int | None
    total: int


class ArenaFigures(msgspec.Struct, frozen=True):
    """One arena at one moment. ``bytes`` includes what dropped tables still hold; the entry counts do not.

    ``eviction_age_seconds``: how long what left the main queue last had not been used, None when nothing did yet;
    ``kept``: entries that the hand found used; ``returns``: keys that came back before an eighth, a quarter, half and
    all of the budget had left since they did; ``packed_bytes``: those of the blocks in which counts lie."""

    name: str
    bytes: int
    budget: int
    objects: int
    lists: int
    counts: int
    evictions: int
    eviction_age_seconds: float | None
    kept: int
    returns: tuple[int, ...]
    packed_bytes: int


class FloorFigures(msgspec.Struct, frozen=True):
    """Floors kept, over all open shards; how often one could not be kept; shards that keep no fills because of it."""

    floors: int
    overflows: int
    overflowed_shards: int
