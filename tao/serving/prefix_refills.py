"""Refill cached prefixes that deletions have made short, before a reader misses.

Of a list longer than its limit a prefix is cached. Every deletion within the prefix removes an edge, and none moves up
from behind, because what lies beyond the prefix is not cached. Sooner or later a page that was a hit is a miss, and its
reader waits for the database. So a prefix that falls below a share of what a fetch brings is queued here and fetched in
the background: once each time it falls, one list at a time, after a pause that lets a series of deletions end and a
replica catch up, and not while many fetches for readers are under way. A prefix that was short from the start stays as
it is, because no reader has asked for more.

To the cache a refill is a fill like any other, under a ticket from before the read: what a change or a bulk
invalidation has overtaken is not stored. But no reader joins it, because none should wait for more edges than it asked
for; and a refill that was overtaken is not repeated at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final, NamedTuple

from tao.cache import Stored
from tao.model.edge_block import COMPLETE, header
from tao.model.errors import SettingsError, TaoError
from tao.model.graph import decode_count
from tao.model.queries import RangeQuery
from tao.model.settings import renamed
from tao.serving.configuration import Spawn
from tao.serving.single_flight import SingleFlight
from tao.serving.sources import fetch_and_wait


@dataclass(frozen=True, slots=True)
class RefillSettings:
    """Bounds of refilling short prefixes in the background. Raises `SettingsError` for values that cannot work."""

    min_share: float = renamed(0.5, formerly="least_share")
    """A prefix that deletions take below this share of what a fetch brings (the type's limit, or the shortest prefix
    fetched) is refilled to that length. So each edge that is read again is paid for by at least one deletion. 0: no
    prefix is refilled."""

    pause_seconds: float = 0.5
    """Pause before each refill: at most two lists a second, with 6,000 edges each a hundredth of a database's time.
    Deletions seldom come alone, and a healthy replica has applied them by then."""

    max_reader_fills: int = 64
    """Refills wait while so many fetches for readers are under way, because readers wait for those."""

    max_lists: int = 1_000
    """Most lists in the queue: minutes of work. Further lists are left to the next reader that misses."""

    max_attempts: int = 4
    """Most attempts for one list. A list that is overtaken that often changes faster than it can be read; its readers'
    misses fill it."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_share < 1 or self.pause_seconds <= 0:
            raise SettingsError("min_share must be at least 0 and below 1, pause_seconds above 0")
        if min(self.max_reader_fills, self.max_lists, self.max_attempts) < 1:
            raise SettingsError("max_reader_fills, max_lists and max_attempts must be at least 1")


class _List(NamedTuple):
    id1: int
    atype: int


class _Wanted(NamedTuple):
    edges: int
    attempts: int


_OUTCOMES: Final = {Stored.STORED: "kept", Stored.BELOW_FLOOR: "overtaken", Stored.NOT_KEPT: "not_kept"}


class PrefixRefills:
    """The queue of short prefixes, fed by the cache, and the task that refills them."""

    def __init__(self, single_flight: SingleFlight, spawn: Spawn, settings: RefillSettings) -> None:
        self._single_flight: Final = single_flight
        self._cache: Final = single_flight.cache
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._queue: dict[_List, _Wanted] = {}
        self._is_running = False
        self.outcomes: Final = dict.fromkeys((*_OUTCOMES.values(), "failed"), 0)
        """Number of refills, by outcome."""
        self._cache.on_shrunk(self._note)

    def _note(self, id1: int, atype: int, before: int, left: int) -> None:
        """Queue a list if a change took its prefix from ``before`` edges to fewer than the share that is refilled. The
        cache calls this when the change did not reach the end of the list."""
        limit = self._single_flight.list_limit(atype)
        for full in (limit, min(limit, self._single_flight.settings.min_prefix_edges + 1)):
            if before >= self._settings.min_share * full > left:
                break
        else:
            return
        key = _List(id1, atype)
        if key not in self._queue:
            if len(self._queue) >= self._settings.max_lists:
                return
            self._queue[key] = _Wanted(full, 0)
        if not self._is_running:
            self._is_running = True
            try:
                self._spawn(self._run())
            except TaoError:  # no task is to be had: the next note tries again
                self._is_running = False

    async def _run(self) -> None:
        settings = self._settings
        try:
            while self._queue:
                await asyncio.sleep(settings.pause_seconds)
                if self._single_flight.under_way >= settings.max_reader_fills:
                    continue
                key = next(iter(self._queue))
                edges, attempts = self._queue[key]
                # The list stays in the queue while it is read, so that one that falls further is not queued twice.
                done = not self._is_short(key, edges) or await self._refill(RangeQuery(*key, 0, edges))
                del self._queue[key]
                if not done and attempts + 1 < settings.max_attempts:
                    self._queue[key] = _Wanted(edges, attempts + 1)  # behind the others
        finally:
            self._is_running = False

    def _is_short(self, key: _List, edges: int) -> bool:
        """Return whether the list is still cached, and no reader's miss has filled it by now."""
        block = self._cache.peek_list(*key)
        if block is None:  # of a prefix that lost its last edge the count remains, and so it does of an empty list
            count = self._cache.peek_count(*key)
            return count is not None and decode_count(count)[1] > 0
        _, _, held, flags = header(block)
        return not flags & COMPLETE and held < self._settings.min_share * edges

    async def _refill(self, prefix: RangeQuery) -> bool:
        """Fetch a prefix and store it unless something newer is known by then. Returns whether there is nothing to try
        again."""
        single_flight = self._single_flight
        ticket = single_flight.ticket(prefix)
        seconds = single_flight.settings.timeout_seconds
        try:
            found = await fetch_and_wait(
                single_flight.source, prefix, ticket.floor, critical=False, timeout_seconds=seconds
            )
        except TaoError:
            self.outcomes["failed"] += 1
            return False
        stored = single_flight.store(ticket, prefix, found)
        self.outcomes[_OUTCOMES[stored]] += 1
        return stored is not Stored.BELOW_FLOOR
