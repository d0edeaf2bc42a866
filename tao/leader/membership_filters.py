"""Build the filters of long lists in the background, for lists whose misses justify the cost.

Filters are worth most at the leader: a follower's miss costs a message, but the leader's miss costs a query of the
database, which is the scarce resource. A list is scanned when several queries for its edges went to the database in
vain. The scan runs page by page, with pauses that leave the database to other queries, and one list at a time."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from tao.cache import GraphCache
from tao.cache.filters import FilterBuild
from tao.cache.shard import CachedShard
from tao.model.edge_block import header
from tao.model.errors import TaoError
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock, MemberScans
from tao.model.queries import EdgesQuery, Fetched
from tao.model.settings import renamed
from tao.observability.logs import Logger
from tao.observability.metrics import Metrics
from tao.serving.configuration import Spawn
from tao.serving.sources import FetchRequest, FetchSource, Take

_MAX_COUNTED_LISTS: Final = 10_000
"""Lists whose misses are counted; above it, counting starts again."""
_CATCH_UP_SECONDS: Final = 0.1
"""Interval between two checks for messages about changes that a page has shown already."""


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Filters that answer "no such edge" for lists too long to be cached as a whole."""

    min_edges: int = renamed(20_000, formerly="least_edges")
    """Lists of at least this many edges get a filter. It is several times the cached part of a list, so that most
    queries miss. 0: no filters."""

    misses_before_build: int = 8
    """Queries for missing edges of a list before it is scanned. A scan of a million edges costs the database about a
    second, as much as thousands of queries."""

    page_edges: int = 2_000
    """Ids in one statement: a few milliseconds of the database, and two of this server's event loop."""

    edges_per_second: int = 100_000
    """Scan rate. A million edges take ten seconds, and a tenth of a core here."""

    build_seconds: float = 300.0
    """Time limit for one build, with the changes that arrive meanwhile. A slower build is given up, and starts again on
    demand."""


class HeldFilters(NamedTuple):
    """The number of filters, and their size in bytes."""

    number: int
    size_bytes: int


class MembershipFilters:
    """A `FetchSource` in front of the leader's own, which counts the queries that find no edge."""

    def __init__(
        self,
        source: FetchSource,
        cache: GraphCache,
        scans: MemberScans,
        clock: Clock,
        spawn: Spawn,
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
        self.given_up = 0

    def fetch(self, asked: FetchRequest) -> None:
        """See `tao.serving.sources.FetchSource`."""
        if isinstance(asked.query, EdgesQuery) and not asked.critical:
            asked.take = partial(self._take_edges, asked.query, asked.take)
        self._source.fetch(asked)

    def _take_edges(self, query: EdgesQuery, take: Take, answer: Fetched | TaoError) -> None:
        if not isinstance(answer, TaoError):
            self._note(query, answer.value)
        take(answer)

    def _note(self, query: EdgesQuery, block: bytes) -> None:
        _, count, found, _ = header(block)
        least = self._settings.min_edges
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
            self._building = False  # too many tasks just now: count again

    async def _build(self, shard: CachedShard, id1: int, atype: int) -> None:
        started = self._clock.monotonic()
        build = shard.begin_filter(id1, atype)
        reason = "invalidated by a change during the scan"
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
            reason = f"not finished in {self._settings.build_seconds} s"
        except TaoError as error:
            reason = error.message
        finally:
            shard.filters.give_up(build)
            self._building = False
        self.given_up += 1
        self._log.info("membership_filter_given_up", id1=id1, atype=atype, reason=reason)

    async def _scan(self, build: FilterBuild) -> bool:
        """Read all pages into the filter; return False when a change has invalidated the build."""
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
        """Install the filter once the messages about the scanned pages have arrived; return whether it is installed."""
        while not shard.finish_filter(build, self._clock.monotonic()):
            if build.is_abandoned:
                return False
            await asyncio.sleep(_CATCH_UP_SECONDS)
        return True

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "membership_filter_builds_total",
            "Builds of filters of long lists, by outcome: built, or given up because of a failure or a change.",
            "outcome",
            lambda: {"built": self.built, "given_up": self.given_up},
        )
        metrics.gauge(
            "membership_filter_queries",
            "Queries for edges that a filter answered without the database.",
            lambda: self._cache.denials,
        )
        metrics.gauge(
            "membership_filter_bytes", "Memory of filters in bytes, within the arenas.", lambda: self.held().size_bytes
        )
        metrics.gauge("membership_filter_entries", "Filters held.", lambda: self.held().number)

    def held(self) -> HeldFilters:
        """Return the number and the size of the filters."""
        sizes = [
            each.size_bytes
            for number in self._cache.open_shards()
            if (shard := self._cache.filter_shard(number)) is not None
            for each in shard.filters.held()
        ]
        return HeldFilters(len(sizes), sum(sizes))

    def summary(self) -> dict[str, int]:
        """Return the numbers for `/stats`."""
        number, size_bytes = self.held()
        return {
            "filters": number,
            "bytes": size_bytes,
            "denials": self._cache.denials,
            "built": self.built,
            "given_up": self.given_up,
        }
