"""The kind of jobs that purges removed edges of types with states, shard by shard.

The shard's leader decides under lock which edges go (`tao.planning.edge_states.purge_edge`); this only asks it page by
page, at the pace of the worker. The two ends of an edge are purged independently."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.client import Graph
from tao.model.jobs import PURGE_KIND
from tao.worker.each import cursor_at, decoded, row_of
from tao.worker.kinds import Page
from tao.worker.leaders import JobLeaders


class PurgeBody(msgspec.Struct, frozen=True):
    """The body of a ``purge`` job."""

    shard: int


class Purge:
    """Purges the removed edges of a shard."""

    name: Final = PURGE_KIND

    def __init__(self, leaders: JobLeaders) -> None:
        self._leaders: Final = leaders

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`."""
        job = decoded(body, PurgeBody)
        page = await self._leaders.purge(job.shard, row_of(cursor), limit)
        return Page(cursor_at(page.last), page.purged, page.done)
