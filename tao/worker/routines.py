"""The kinds of jobs that every shard has: one purges removed edges of types with states, one folds counters.

The shard's leader decides under lock which rows change (`tao.planning.edge_states.purge_edge`,
`tao.planning.counters.fold_counter`); these only ask it page by page, at the pace of the worker. The two ends of an
edge are purged independently."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from tao.client import Graph
from tao.model.graph import EdgeKey
from tao.model.jobs import FOLD_KIND, PURGE_KIND
from tao.worker.each import cursor_at, decoded, row_of
from tao.worker.kinds import Page
from tao.worker.leaders import JobLeaders, RoutinePage

PageOf = Callable[[int, EdgeKey, int], Awaitable[RoutinePage]]
"""Does a page of a shard: its number, the row after which the page begins, and the rows to examine at most."""


class ShardBody(msgspec.Struct, frozen=True):
    """The body of such a job."""

    shard: int


class Routine:
    """Has the leader of a shard do the pages of a routine job: `JobLeaders.purge` or `JobLeaders.fold`."""

    def __init__(self, name: str, page_of: PageOf) -> None:
        self.name: Final = name
        self._page_of: Final = page_of

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`."""
        job = decoded(body, ShardBody)
        page = await self._page_of(job.shard, row_of(cursor), limit)
        return Page(cursor_at(page.last), page.changed, page.done)


def routines(leaders: JobLeaders) -> list[Routine]:
    """Return the kinds of jobs that every shard has."""
    return [Routine(PURGE_KIND, leaders.purge), Routine(FOLD_KIND, leaders.fold)]
