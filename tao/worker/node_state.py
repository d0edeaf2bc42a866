"""The kind of jobs that moves the edges of a node to the lists of their effective states.

The node's leader moves a page (`tao.leader.node_pages`), by the states that the nodes have then, so a page may be done
again. In a first round nobody else is asked: all near ends are moved, and the far ends that are beside them in the
database. So the lists of the node itself are right even while other regions are cut off. Then come the far ends that
are owed, and those of shards that do not answer once more, in rounds of their own.

The job of an operation that a newer one has overtaken ends, because the newer one has a job of its own."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.client import Graph
from tao.model.errors import Unavailable
from tao.model.jobs import NODE_STATE_KIND, NodeStateBody
from tao.model.writes import FAR_GROUPS, PlaceEdges
from tao.worker.kinds import Page, PageWaits

MAX_PAGE_EDGES: Final = 500
"""The largest page that a leader takes."""

_OWED_SECONDS: Final = 10.0
"""Pause between two rounds at far shards of which none answers."""


class _Cursor(msgspec.Struct, frozen=True, array_like=True):
    """Where a page begins: the index of its type in the body, and the ``id2`` above which its edges are.

    ``at_far_ends``: the near ends have all been moved. ``owed``: the groups of far shards of this round; none: all.
    ``failed``: those of them that are owed after it; later pages of the far ends leave them out."""

    index: int = 0
    after: int = 0
    at_far_ends: bool = False
    owed: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[int, ...]:
        """Return the groups of far shards whose ends are to be moved; none: all."""
        if not self.at_far_ends or not self.failed:
            return self.owed
        return tuple(group for group in self.owed or range(FAR_GROUPS) if group not in self.failed)

    def behind(self, after: int, types: int) -> _Cursor | None:
        """Return where the next page begins; None behind the last one. ``after``: 0 behind the last page of a type."""
        if after:
            return msgspec.structs.replace(self, after=after)
        if self.index + 1 < types:
            return msgspec.structs.replace(self, index=self.index + 1, after=0)
        return _Cursor(at_far_ends=True, owed=self.failed) if self.failed else None


class NodeStates:
    """Moves the edges of a node, one type after the other, in the order of ``id2``, which does not change as edges move
    from list to list."""

    name: Final = NODE_STATE_KIND

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`. The body is a `NodeStateBody`. A type that has left the schema has no
        edges to be moved. An edge is counted when its near end is moved."""
        job = msgspec.msgpack.decode(body, type=NodeStateBody)
        at = msgspec.msgpack.decode(cursor, type=_Cursor) if cursor else _Cursor()
        atype = job.atypes[at.index]
        edges, after = 0, 0
        if graph.schema.knows_atype(atype):
            limit = min(limit, MAX_PAGE_EDGES)
            write = PlaceEdges(job.id, atype, at.after, limit, not at.at_far_ends, at.groups)
            page, state_us = await graph._place_edges(write)
            at = msgspec.structs.replace(at, failed=tuple(sorted({*at.failed, *page.owed_groups})))
            if at.at_far_ends and len(at.failed) == len(at.owed or range(FAR_GROUPS)):
                again = _Cursor(at_far_ends=True, owed=at.failed)
                raise PageWaits("no shard answers that has far ends of edges", _OWED_SECONDS, _encoded(again))
            edges = 0 if at.at_far_ends else page.edges
            # The job of a newer operation moves the edges of this type.
            after = 0 if 0 < job.state_us < state_us else page.next_after
        elif atype not in graph.schema.reserved_atypes:
            raise Unavailable(f"this worker's schema does not know the type {atype} yet; give it the newest one")
        following = at.behind(after, len(job.atypes))
        return Page(_encoded(following or at), edges, following is None)


def _encoded(cursor: _Cursor) -> bytes:
    return msgspec.msgpack.encode(cursor)
