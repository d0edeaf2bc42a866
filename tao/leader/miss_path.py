"""Where a leader's misses go when the shard is mastered in another region (DESIGN.md §8).

To the region's replica first: a read must not cross an ocean. But a cache may have heard of a version that the replica
does not have yet - from a write forwarded through here, from a message, from a reader's token - and then the replica's
answer would take a value back in time. What is known decides, and the master region is asked instead.

A critical read goes to the master region's leader, and where none is there to be asked, or it is silent, to its
database: what it needs is the master.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    InternalError,
    NotMine,
    OperatorError,
    RetryableError,
    StaleRead,
    Unavailable,
)
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import Fetched, ObjectQuery, Query
from tao.serving.database_source import DatabaseSource
from tao.serving.remote_source import RemoteSource


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How the region's replica is read."""

    patience_seconds: float = 1.0
    """How long it may take before the master region is asked, and its leader by a critical read before its database is.
    Misses take milliseconds, and going there a round trip: a replica that hangs costs this, until it is marked down."""

    max_spread: int = 64
    """Queries at a time that go to the master region because the replica was slow, or to its database because its
    leader was. A replica that has more to do than it can must not take the master region with it."""


class RegionSource:
    """The `FillSource` of a leader, whatever the shard's master region is."""

    def __init__(
        self,
        master: DatabaseSource,
        replica: DatabaseSource,
        master_region: RemoteSource,
        is_mastered_here: Callable[[int], bool],
        replica_is_down: Callable[[int], bool],
        settings: ReplicaSettings,
    ) -> None:
        """``master`` reads the region's own server, critically that of any master region; it waits for rows that are
        about to become visible. ``replica``, which may be behind for seconds, only for as long as that commonly takes.
        ``replica_is_down``: shard → whether the topology says so."""
        self._master: Final = master
        self._replica: Final = replica
        self._master_region: Final = master_region
        self._is_mastered_here: Final = is_mastered_here
        self._replica_is_down: Final = replica_is_down
        self._settings: Final = settings
        self._spread = 0
        self.sent_away = 0

    async def fetch(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        """As `tao.serving.fills.FillSource`."""
        shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
        if self._is_mastered_here(shard):
            return await self._master.fetch(query, minimum, critical=critical, timeout_seconds=timeout_seconds)
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_seconds
        if critical:
            return await self._fetch_critically(query, minimum, until)
        if not self._replica_is_down(shard):
            # Where there is another way, a replica that hangs must leave time for it.
            seconds = min(self._settings.patience_seconds, timeout_seconds)
            try:
                return await self._replica.fetch(query, minimum, critical=False, timeout_seconds=seconds)
            except (StaleRead, Unavailable, OperatorError, InternalError):
                # Behind what is known here, or away, or without its tables or rights, as one that is being seeded: the
                # master region has it.
                pass
            except DeadlineExceeded:
                # It hangs, or has more to do than it can: a little of that may go elsewhere, and not all of it.
                if self._spread >= self._settings.max_spread:
                    raise
                self._spread += 1
                try:
                    return await self._fetch_away(query, minimum, until)
                finally:
                    self._spread -= 1
        return await self._fetch_away(query, minimum, until)

    async def _fetch_critically(self, query: Query, minimum: int, until: float) -> Fetched:
        loop = asyncio.get_running_loop()
        # A leader that has stopped in the middle, or is starting, must leave time for the other way.
        seconds = min(self._settings.patience_seconds, until - loop.time())
        try:
            return await self._master_region.fetch(query, minimum, critical=True, timeout_seconds=seconds)
        except DatabaseDown:
            raise
        except (NotMine, Unavailable, DeadlineExceeded) as away:
            is_late = isinstance(away, DeadlineExceeded)
            if is_late and self._spread >= self._settings.max_spread:
                raise
            self._spread += is_late
            try:
                left = until - loop.time()
                return await self._master.fetch(query, minimum, critical=True, timeout_seconds=left)
            except (Unavailable, DeadlineExceeded):
                raise away from None
            finally:
                self._spread -= is_late

    async def _fetch_away(self, query: Query, minimum: int, until: float) -> Fetched:
        loop = asyncio.get_running_loop()
        self.sent_away += 1
        left = until - loop.time()
        try:
            return await self._master_region.fetch(query, minimum, critical=False, timeout_seconds=left)
        except (Unavailable, DeadlineExceeded) as cut:
            # The way there is cut; by now the replica may have what it lacked a moment ago, even one marked down.
            seconds = max(until - loop.time(), self._settings.patience_seconds)
            try:
                return await self._replica.fetch(query, minimum, critical=False, timeout_seconds=seconds)
            except RetryableError:
                raise cut from None
