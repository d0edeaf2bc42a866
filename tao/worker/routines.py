"""The kinds of jobs that every shard has: one purges removed edges of types with states, one folds counters.

The shard's leader decides under lock which rows change (`tao.planning.edge_states.purge_edge`,
`tao.planning.counters.fold_counter`); these only ask it page by page, at the pace of the worker. The two ends of an
edge are purged independently."""

from __future__ import annotations

from typing import Final

import msgspec

from tao.client import Graph
from tao.model.jobs import FOLD_KIND, PURGE_KIND
from tao.worker.each import cursor_at, decoded, row_of
from tao.worker.kinds import Page
from tao.worker.leaders import JobLeaders


class ShardBody(msgspec.Struct, frozen=True):
    """The body of such a job."""

    shard: int


class Purge:
    """Purges the removed edges of a shard."""

    name: Final = PURGE_KIND

    def __init__(self, leaders: JobLeaders) -> None:
        self._leaders: Final = leaders

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`."""
        job = decoded(body, ShardBody)
        page = await self._leaders.purge(job.shard, row_of(cursor), limit)
        return Page(cursor_at(page.last), page.purged, page.done)


class Fold:
    """Folds the counters of a shard."""

    name: Final = FOLD_KIND

    def __init__(self, leaders: JobLeaders) -> None:
        self._leaders: Final = leaders

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`."""
        job = decoded(body, ShardBody)
        page = await self._leaders.fold(job.shard, row_of(cursor), limit)
        return Page(cursor_at(page.last), page.folded, page.done)
