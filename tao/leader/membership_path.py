"""When and how the filters of long lists are built: in the background, where misses pay for it (DESIGN.md §10).

The leader is where they help: a follower's miss costs a message, the leader's a query of the database, which is what is
dear. A list is scanned when several questions after its edges have gone to the database in vain, page by page, with
pauses that leave the database to its callers; one list at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tao.cache import GraphCache
from tao.cache.filters import FilterBuild
from tao.cache.shard import CachedShard
from tao.model.edge_block import header
from tao.model.errors import TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock, MemberScans
from tao.model.queries import EdgesQuery, Fetched, Query
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.serving.fill_source import FillSource, Take

_MAX_COUNTED_LISTS: Final = 10_000  # whose misses are counted; then counting begins anew
_CATCH_UP_SECONDS: Final = 0.1  # between two looks for messages about what a page has shown already


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Filters that answer "no such edge" for lists too long to be cached whole."""

    least_edges: int = 20_000
    """Lists this long get one: some times what is cached of a list, so that most questions miss. 0: none."""

    misses_before_build: int = 8
    """Questions of a list that the database denied before it is scanned: a scan of a million edges costs it about a
    second, as much as thousands of them."""

    page_edges: int = 2_000
    """Ids in one statement: a few milliseconds of the database, and two of this server's loop."""

    edges_per_second: int = 100_000
    """Of all scans. A million edges take ten seconds, and a tenth of a core here."""

    build_seconds: float = 300.0
    """For one scan, with what came meanwhile; what takes longer is begun anew when it is asked for."""


class MembershipFilters:
    """A `FillSource` in front of a leader's own, which watches what it answers in vain."""

    def __init__(
        self,
        source: FillSource,
        cache: GraphCache,
        scans: MemberScans,
        clock: Clock,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: MembershipSettings,
        log: Logger,
    ) -> None:
        self._source: Final = source
        self._cache: Final = cache
        self._scans: Final = scans
        self._clock: Final = clock
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._log: Final = log
        self._misses: dict[tuple[int, int], int] = {}
        self._building = False
        self.built = 0
        self.voided = 0

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """As `tao.serving.fill_source.FillSource`."""
        if isinstance(query, EdgesQuery) and not critical:
            take = partial(self._take_edges, query, take)
        self._source.fetch(query, minimum, take, critical=critical, timeout_seconds=timeout_seconds)

    def _take_edges(self, query: EdgesQuery, take: Take, answer: Fetched | TaoError) -> None:
        if not isinstance(answer, TaoError):
            self._note(query, answer.value)
        take(answer)

    def _note(self, query: EdgesQuery, block: bytes) -> None:
        _, count, found, _ = header(block)
        least = self._settings.least_edges
        if not least or count < least or found == len(query.id2s) or self._building:
            return
        shard = self._cache.filter_shard(query.id1 >> SHARD_SHIFT)
        if shard is None:
            return
        held = shard.filters.get(query.id1, query.atype)
        if held is not None and not held.is_loose:
            return
        key = (query.id1, query.atype)
        misses = self._misses.pop(key, 0) + 1
        if misses < self._settings.misses_before_build:
            if len(self._misses) >= _MAX_COUNTED_LISTS:
                self._misses.clear()
            self._misses[key] = misses
            return
        self._building = True
        try:
            self._spawn(self._build(shard, *key))
        except TaoError:
            self._building = False  # no task to be had now: counted anew

    async def _build(self, shard: CachedShard, id1: int, atype: int) -> None:
        started = self._clock.monotonic()
        build = shard.begin_filter(id1, atype)
        reason = "overtaken by what was heard"
        try:
            async with asyncio.timeout(self._settings.build_seconds):
                if await self._scan(build) and await self._catch_up(shard, build):
                    self.built += 1
                    assert build.filter is not None
                    self._log.info(
                        "membership_filter_built",
                        id1=id1,
                        atype=atype,
                        edges=build.filter.count,
                        bytes=build.filter.size_bytes,
                        seconds=round(self._clock.monotonic() - started, 1),
                    )
                    return
        except TimeoutError:
            reason = f"not done in {self._settings.build_seconds} s"
        except TaoError as error:
            reason = error.message
        finally:
            shard.filters.give_up(build)
            self._building = False
        self.voided += 1
        self._log.info("membership_filter_given_up", id1=id1, atype=atype, reason=reason)

    async def _scan(self, build: FilterBuild) -> bool:
        """Whether all pages are read."""
        limit = self._settings.page_edges
        pause = limit / self._settings.edges_per_second
        loop = asyncio.get_running_loop()
        after = 0
        while True:
            deadline = loop.time() + self._settings.build_seconds
            page = await self._scans.read_members(build.id1, build.atype, after, limit, deadline=deadline)
            if not build.take(page.version_epoch, page.version, page.count, page.id2s):
                return False
            if len(page.id2s) < limit:
                return True
            after = page.id2s[-1]
            await asyncio.sleep(pause)

    async def _catch_up(self, shard: CachedShard, build: FilterBuild) -> bool:
        """Whether the filter is held, once the messages about what the pages showed have come."""
        while not shard.finish_filter(build, self._clock.monotonic()):
            if build.is_void:
                return False
            await asyncio.sleep(_CATCH_UP_SECONDS)
        return True

    def register(self, metrics: Metrics) -> None:
        """Have the figures collected with each scrape."""
        metrics.gauge_family(
            "membership_filter_builds_total",
            "Filters of long lists: built, or given up because of what happened meanwhile.",
            "outcome",
            lambda: {"built": self.built, "given_up": self.voided},
        )
        metrics.gauge(
            "membership_filter_queries",
            "Queries for edges answered with the help of a filter, without the database.",
            lambda: self._cache.denials,
        )
        metrics.gauge("membership_filter_bytes", "Memory of filters, within the arenas.", lambda: self.held()[1])
        metrics.gauge("membership_filter_entries", "Filters held.", lambda: self.held()[0])

    def held(self) -> tuple[int, int]:
        """Filters held, and their bytes."""
        sizes = [
            each.size_bytes
            for number in self._cache.open_shards()
            if (shard := self._cache.filter_shard(number)) is not None
            for each in shard.filters.held()
        ]
        return len(sizes), sum(sizes)

    def summary(self) -> dict[str, int]:
        """For `/stats`."""
        number, size_bytes = self.held()
        return {
            "filters": number,
            "bytes": size_bytes,
            "denials": self._cache.denials,
            "built": self.built,
            "given_up": self.voided,
        }
