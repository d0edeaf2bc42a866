"""Cached prefixes that deletions have made short, filled up again before somebody misses (DESIGN.md §10; paper §5.4).

Of a list longer than its limit a prefix is cached. Every deletion within it takes an edge away, and none comes up from
behind: what lies beyond is not known here. Sooner or later a page that was a hit is a miss, and its reader waits for
the database. So a prefix that falls below a share of what a fill brings is noted here and filled in the background:
once per fall, one list at a time, after a pause that lets a run of deletions end and a replica follow, and not while
readers' own fills are many. A prefix that was short from the start is left as it is; nobody has asked for more.

A refill is a fill like any other to the cache, with a ticket from before it was read: what has been overtaken by a
change, or by a bulk invalidation, is not kept. But it is no flight, so that no reader waits for one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final

from tao.cache import GraphCache
from tao.model.edge_block import COMPLETE, header
from tao.model.errors import SettingsError, TaoError
from tao.model.graph import decode_count
from tao.model.queries import RangeQuery
from tao.serving.fills import Fills


@dataclass(frozen=True, slots=True)
class RefillSettings:
    """Filling short prefixes in the background. Raises `SettingsError` for values that cannot work."""

    least_share: float = 0.5
    """A prefix that deletions take below this share of what a fill brings - the type's limit, or the shortest prefix
    asked for - is filled up to that again. So each edge read anew is paid for by a deletion at least. 0: none is."""

    pause_seconds: float = 0.5
    """Before each: at most two lists a second, with 6,000 edges each a hundredth of a database's time. Deletions seldom
    come alone, and a replica that is well has seen them by then."""

    max_reader_fills: int = 64
    """While so many fills for readers are under way, refills wait: somebody waits for those."""

    max_lists: int = 1_000
    """Noted at once: minutes of work. Others are left to the next reader who misses."""

    max_attempts: int = 4
    """For one list. What is overtaken that often is deleted from faster than it is read; its readers see to it."""

    def __post_init__(self) -> None:
        if not 0 <= self.least_share < 1 or self.pause_seconds <= 0:
            raise SettingsError("least_share must be at least 0 and below 1, pause_seconds above 0")
        if min(self.max_reader_fills, self.max_lists, self.max_attempts) < 1:
            raise SettingsError("max_reader_fills, max_lists and max_attempts must be at least 1")


class PrefixRefills:
    """Follows what the cache tells of prefixes that shrink."""

    def __init__(
        self,
        cache: GraphCache,
        fills: Fills,
        list_limit: Callable[[int], int],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: RefillSettings,
    ) -> None:
        """As `Fills`. The cache holds on to what is made here."""
        self._cache: Final = cache
        self._fills: Final = fills
        self._list_limit: Final = list_limit
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._waiting: dict[tuple[int, int], tuple[int, int]] = {}  # list → edges wanted, attempts made
        self._is_running = False
        cache.on_shrunk(self._note)

    def _note(self, id1: int, atype: int, before: int, left: int) -> None:
        """A change took edges from a prefix of ``before``, without reaching the end of the list."""
        limit = self._list_limit(atype)
        for full in (limit, min(limit, self._fills.least_prefix_edges + 1)):
            if before >= self._settings.least_share * full > left:
                break
        else:
            return
        key = (id1, atype)
        if key not in self._waiting:
            if len(self._waiting) >= self._settings.max_lists:
                return
            self._waiting[key] = (full, 0)
        if not self._is_running:
            self._is_running = True
            try:
                self._spawn(self._run())
            except TaoError:  # no task to be had: with the next note
                self._is_running = False

    async def _run(self) -> None:
        settings = self._settings
        try:
            while self._waiting:
                await asyncio.sleep(settings.pause_seconds)
                if self._fills.flights.under_way >= settings.max_reader_fills:
                    continue
                key = next(iter(self._waiting))
                edges, attempts = self._waiting[key]
                # Still noted while it is read: a list that falls further meanwhile is not noted twice.
                done = not self._is_short(key, edges) or await self._fills.refill(RangeQuery(*key, 0, edges))
                del self._waiting[key]
                if not done and attempts + 1 < settings.max_attempts:
                    self._waiting[key] = (edges, attempts + 1)  # behind the others
        finally:
            self._is_running = False

    def _is_short(self, key: tuple[int, int], edges: int) -> bool:
        """Whether the list is still held, and no reader has had it filled by now."""
        block = self._cache.peek_list(*key)
        if block is None:  # of a prefix without an edge the count is left, and so it is of a list without one
            count = self._cache.peek_count(*key)
            return count is not None and decode_count(count)[1] > 0
        _, _, held, flags = header(block)
        return not flags & COMPLETE and held < self._settings.least_share * edges
