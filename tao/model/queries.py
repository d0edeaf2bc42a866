"""Read queries, as the store answers them for fills. Answers are the encoded values of `tao.model.graph` and
`tao.model.edge_block`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from tao.model.graph import MAX_TIME
from tao.model.ids import SHARD_SHIFT

AT_POSITION: Final = 1 << 63
"""Added to a position in `TimeRangeQuery.start`. No id is as large, so a server that does not know positions rejects
the query instead of ignoring its position."""


class ObjectQuery(msgspec.Struct, frozen=True, gc=False, tag="object"):
    """Asks for an object value."""

    id: int


class CountQuery(msgspec.Struct, frozen=True, gc=False, tag="count"):
    """Asks for a count value; version 0, count 0 for a list that was never written."""

    id1: int
    atype: int


class RangeQuery(msgspec.Struct, frozen=True, gc=False, tag="range"):
    """Asks for an edge block of positions ``pos`` to ``pos + limit - 1``; with ``pos=0`` it is a prefix that may be
    cached."""

    id1: int
    atype: int
    pos: int
    limit: int


class TimeRangeQuery(msgspec.Struct, frozen=True, gc=False, tag="time_range"):
    """Asks for an edge block of at most ``limit`` edges with ``high >= time >= low``, newest first.

    ``start`` says where the block begins. 0: at the first of these edges. An id: after the edge ``(high, id)`` in list
    order, so that of the edges at ``high`` only those to lower ids follow. `AT_POSITION` ``+ pos``: at position ``pos``
    among these edges."""

    id1: int
    atype: int
    high: int
    low: int
    limit: int
    start: int = 0

    @property
    def pos(self) -> int:
        """Return how many of the edges are skipped."""
        return self.start - AT_POSITION if self.start >= AT_POSITION else 0

    @property
    def below_id2(self) -> int:
        """Return the id that the ids of edges at ``high`` are below, 0 for no bound."""
        return self.start if self.start < AT_POSITION else 0


def start_at(pos: int) -> int:
    """Return the ``start`` of a time range query from position ``pos`` on."""
    return AT_POSITION + pos if pos else 0


class EdgesQuery(msgspec.Struct, frozen=True, gc=False, tag="edges"):
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


class PairsQuery(msgspec.Struct, frozen=True):
    """Asks for a page of all edges of one type in a shard: those of the list ``after_id1`` with higher id2s than
    ``after_id2``, and of the lists from there to ``last_id1``. At most ``limit`` edges and ``limit`` lists are read,
    those of other types between them included, so a page may be empty and not the last."""

    shard: int
    atype: int
    after_id1: int
    after_id2: int
    last_id1: int
    limit: int


class PairPage(msgspec.Struct, frozen=True):
    """Some edges of one association type in a shard, by id1 and id2, with the versions of shard and lists in their
    snapshot.

    ``sizes`` says how many of the ``id2s`` each list of ``id1s`` has; 0 for an empty one. ``known_id1s`` are lists
    in the page's range of which the server that answers knows, at ``known_versions``, which may be newer.
    ``after_id1`` and ``after_id2`` are where the next page begins; (0, 0): there is none."""

    version_epoch: int
    id1s: Sequence[int]
    versions: Sequence[int]
    sizes: Sequence[int]
    id2s: Sequence[int]
    after_id1: int = 0
    after_id2: int = 0
    known_id1s: Sequence[int] = ()
    known_versions: Sequence[int] = ()


class FillRead(msgspec.Struct, frozen=True):
    """Answers to queries, one encoded value each, and the version epoch of every shard asked."""

    values: list[bytes]
    version_epochs: dict[int, int]


class Fetched(msgspec.Struct, frozen=True, gc=False):
    """One answer from further up; the version epoch that its shard had before the answer was read or at that time; and
    the tier that answered (``leader``, ``database``), for people. ``keep``: whether the answer may be cached here."""

    value: bytes
    version_epoch: int
    origin: str
    keep: bool = True
