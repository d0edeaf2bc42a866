"""Read queries, as the store answers them for fills (DESIGN.md §2, §3). Answers are the encoded values of
`tao.model.graph` and `tao.model.edge_block`."""

from __future__ import annotations

import msgspec

from tao.model.graph import MAX_TIME
from tao.model.ids import SHARD_SHIFT


class ObjectQuery(msgspec.Struct, frozen=True, tag="object"):
    """→ object value."""

    id: int


class CountQuery(msgspec.Struct, frozen=True, tag="count"):
    """→ count value; version 0, count 0 for a list that was never written."""

    id1: int
    atype: int


class RangeQuery(msgspec.Struct, frozen=True, tag="range"):
    """→ edge block of positions ``pos … pos+limit-1``; with ``pos=0`` a prefix that may be cached."""

    id1: int
    atype: int
    pos: int
    limit: int


class TimeRangeQuery(msgspec.Struct, frozen=True, tag="time_range"):
    """→ edge block of at most ``limit`` edges with ``high ≥ time ≥ low``, newest first; of those at ``high`` only the
    ones to ids below ``below_id2``, when it is not 0: what comes after the edge ``(high, below_id2)``."""

    id1: int
    atype: int
    high: int
    low: int
    limit: int
    below_id2: int = 0


class EdgesQuery(msgspec.Struct, frozen=True, tag="edges"):
    """→ edge block, in list order, of the edges to ``id2s`` with ``high ≥ time ≥ low``."""

    id1: int
    atype: int
    id2s: tuple[int, ...]
    high: int = MAX_TIME
    low: int = 0


Query = ObjectQuery | CountQuery | RangeQuery | TimeRangeQuery | EdgesQuery


def shard_of(query: Query) -> int:
    """Where what it asks for lies."""
    return (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT


class MemberPage(msgspec.Struct, frozen=True):
    """Some id2s of a list, ascending, and what shard and list were in the snapshot that they are of."""

    version_epoch: int
    version: int
    count: int
    id2s: list[int]


class FillRead(msgspec.Struct, frozen=True):
    """Answers to queries, one encoded value each, and the version epoch of every shard asked."""

    values: list[bytes]
    version_epochs: dict[int, int]


class Fetched(msgspec.Struct, frozen=True):
    """One answer from further up, the version epoch that its shard had no later than the answer was read, and which
    tier answered (``leader``, ``database``), for people. ``keep``: whether it may be cached where it was asked for."""

    value: bytes
    version_epoch: int
    origin: str
    keep: bool = True
