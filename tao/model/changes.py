"""The changes of a committed write, and the maintenance messages made of them.

A *change* is the net effect of one transaction on one key, ``before → after``. A cache that holds ``before`` applies
it; one that holds ``after`` or later ignores it; one that holds something older drops its entry. So changes may arrive
twice, late or out of order. A *changeset* is the tuple of changes of one transaction. Leader and tailer produce the
same changeset: the leader from the rows it locked, the tailer from the row images in the binlog.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from tao.model.graph import ABSENT, Edge
from tao.model.ids import SHARD_SHIFT


class ObjectChange(msgspec.Struct, frozen=True, tag="object"):
    """The object is now ``(otype, data)`` at version ``after``; ``otype=ABSENT``: it does not exist any more, and the
    data is `tao.model.graph.deleted_data`.
    ``data=None`` says that the new value is not carried (too large to send along): drop the entry and read it again."""

    id: int
    before: int
    after: int
    otype: int
    data: bytes | None

    @property
    def shard(self) -> int:
        return self.id >> SHARD_SHIFT

    @property
    def deleted(self) -> bool:
        return self.otype == ABSENT


class GoneEdge(msgspec.Struct, frozen=True, gc=False):
    """The former place of an edge: its id2 and its *old* time, by which a cache finds it in the list."""

    id2: int
    time: int


class ListChange(msgspec.Struct, frozen=True, gc=False, tag="list"):
    """The list ``(id1, atype)`` lost ``gone``, gained ``put``, and has ``count`` edges at version ``after``.

    An edge whose time changed is in both, with its old time in ``gone``. An edge whose data alone changed is in ``put``
    only. Both are in list order (newest first).
    """

    id1: int
    atype: int
    before: int
    after: int
    count: int
    gone: tuple[GoneEdge, ...] = ()
    put: tuple[Edge, ...] = ()

    @property
    def shard(self) -> int:
        return self.id1 >> SHARD_SHIFT


class ObjectInvalidation(msgspec.Struct, frozen=True, tag="invalidate_object"):
    """Drop the object unless it is cached at ``version`` or later."""

    id: int
    version: int

    @property
    def shard(self) -> int:
        return self.id >> SHARD_SHIFT


class ListInvalidation(msgspec.Struct, frozen=True, tag="invalidate_list"):
    """Drop list and count unless they are cached at ``version`` or later."""

    id1: int
    atype: int
    version: int

    @property
    def shard(self) -> int:
        return self.id1 >> SHARD_SHIFT


class ShardInvalidation(msgspec.Struct, frozen=True, tag="invalidate_shard"):
    """Bulk invalidation: drop everything that is cached of the shard, or of the named types of the shard."""

    shard: int
    otypes: tuple[int, ...] = ()
    atypes: tuple[int, ...] = ()


Change = ObjectChange | ListChange
Message = ObjectChange | ListChange | ObjectInvalidation | ListInvalidation | ShardInvalidation


class ShardMessages(msgspec.Struct, frozen=True, gc=False):
    """Messages of one shard, with the version epoch of the shard when they were made."""

    shard: int
    version_epoch: int
    messages: tuple[Message, ...]


def sort_edges(edges: Iterable[Edge]) -> list[Edge]:
    """Sort into list order: time descending, ties by id2 descending."""
    return sorted(edges, key=lambda edge: (edge.time, edge.id2), reverse=True)
