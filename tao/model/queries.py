"""Read queries, as the store answers them for fills. Answers are the encoded values of `tao.model.graph` and
`tao.model.edge_block`."""

from __future__ import annotations

import msgspec

from tao.model.graph import MAX_TIME
from tao.model.ids import SHARD_SHIFT


class ObjectQuery(msgspec.Struct, frozen=True, tag="object"):
    """Asks for an object value."""

    id: int


class CountQuery(msgspec.Struct, frozen=True, tag="count"):
    """Asks for a count value; version 0, count 0 for a list that was never written."""

    id1: int
    atype: int


class RangeQuery(msgspec.Struct, frozen=True, tag="range"):
    """Asks for an edge block of positions ``pos`` to ``pos + limit - 1``; with ``pos=0`` it is a prefix that may be
    cached."""

    id1: int
    atype: int
    pos: int
    limit: int


class TimeRangeQuery(msgspec.Struct, frozen=True, tag="time_range"):
    """Asks for an edge block of at most ``limit`` edges with ``high >= time >= low``, newest first. When ``below_id2``
    is not 0, of the edges at ``high`` only those to lower ids: the edges after ``(high, below_id2)`` in list order."""

    id1: int
    atype: int
    high: int
    low: int
    limit: int
    below_id2: int = 0


class EdgesQuery(msgspec.Struct, frozen=True, tag="edges"):
    """Asks for an edge block, in list order, of the edges to ``id2s`` with ``high >= time >= low``."""

    id1: int
    atype: int
    id2s: tuple[int, ...]
    high: int = MAX_TIME
    low: int = 0


Query = ObjectQuery | CountQuery | RangeQuery | TimeRangeQuery | EdgesQuery


def shard_of(query: Query) -> int:
    """Return the shard of the query's object or list."""
    return (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT


class MemberPage(msgspec.Struct, frozen=True):
    """Some id2s of a list, ascending, with the versions of shard and list in their snapshot."""

    version_epoch: int
    version: int
    count: int
    id2s: list[int]


class FillRead(msgspec.Struct, frozen=True):
    """Answers to queries, one encoded value each, and the version epoch of every shard asked."""

    values: list[bytes]
    version_epochs: dict[int, int]


class Fetched(msgspec.Struct, frozen=True):
    """One answer from further up; the version epoch that its shard had before the answer was read or at that time; and
    the tier that answered (``leader``, ``database``), for people. ``keep``: whether the answer may be cached here."""

    value: bytes
    version_epoch: int
    origin: str
    keep: bool = True
