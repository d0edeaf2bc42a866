"""Where a leader's misses go when the shard is mastered in another region (DESIGN.md §8).

To the region's replica first: a read must not cross an ocean. But a cache may have heard of a version that the replica
does not have yet - from a write forwarded through here, from a message, from a reader's token - and then the replica's
answer would take a value back in time. What is known decides, and the master region is asked instead.

A critical read goes to the master region's leader, and where none is there to be asked, or it is silent, to its
database: what it needs is the master.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from tao.model.errors import (
    DatabaseDown,
    DeadlineExceeded,
    InternalError,
    NotMine,
    OperatorError,
    RetryableError,
    StaleRead,
    TaoError,
    Unavailable,
)
from tao.model.queries import Fetched, Query, shard_of
from tao.serving.database_source import DatabaseSource
from tao.serving.fill_source import Take, fetched, give, wait_for
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
        spawn: Callable[[Coroutine[Any, Any, None]], object],
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
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._now: Final = asyncio.get_running_loop().time
        self._spread = 0
        self.sent_away = 0

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """As `tao.serving.fill_source.FillSource`."""
        shard = shard_of(query)
        if self._is_mastered_here(shard):
            self._master.fetch(query, minimum, take, critical=critical, timeout_seconds=timeout_seconds)
            return
        until = self._now() + timeout_seconds
        if critical:
            wait_for(self._spawn, self._fetch_critically(query, minimum, until), take)
        elif self._replica_is_down(shard):
            wait_for(self._spawn, self._fetch_away(query, minimum, until), take)
        else:
            # Where there is another way, a replica that hangs must leave time for it.
            seconds = min(self._settings.patience_seconds, timeout_seconds)
            take_from_replica = partial(self._take_from_replica, query, minimum, until, take)
            self._replica.fetch(query, minimum, take_from_replica, critical=False, timeout_seconds=seconds)

    def _take_from_replica(
        self, query: Query, minimum: int, until: float, take: Take, answer: Fetched | TaoError
    ) -> None:
        if isinstance(answer, StaleRead | Unavailable | OperatorError | InternalError):
            # Behind what is known here, or away, or without its tables or rights, as one that is being seeded: the
            # master region has it.
            wait_for(self._spawn, self._fetch_away(query, minimum, until), take)
        elif isinstance(answer, DeadlineExceeded) and self._spread < self._settings.max_spread:
            # It hangs, or has more to do than it can: a little of that may go elsewhere, and not all of it.
            self._spread += 1
            wait_for(self._spawn, self._fetch_away(query, minimum, until), partial(self._take_spread, take))
        else:
            take(answer)

    def _take_spread(self, take: Take, answer: Fetched | TaoError) -> None:
        self._spread -= 1
        give(take, answer)

    async def _fetch_critically(self, query: Query, minimum: int, until: float) -> Fetched:
        # A leader that has stopped in the middle, or is starting, must leave time for the other way.
        seconds = min(self._settings.patience_seconds, until - self._now())
        try:
            return await fetched(self._master_region, query, minimum, critical=True, timeout_seconds=seconds)
        except DatabaseDown:
            raise
        except (NotMine, Unavailable, DeadlineExceeded) as away:
            is_late = isinstance(away, DeadlineExceeded)
            if is_late and self._spread >= self._settings.max_spread:
                raise
            self._spread += is_late
            try:
                left = until - self._now()
                return await fetched(self._master, query, minimum, critical=True, timeout_seconds=left)
            except (Unavailable, DeadlineExceeded):
                raise away from None
            finally:
                self._spread -= is_late

    async def _fetch_away(self, query: Query, minimum: int, until: float) -> Fetched:
        self.sent_away += 1
        left = until - self._now()
        try:
            return await fetched(self._master_region, query, minimum, critical=False, timeout_seconds=left)
        except (Unavailable, DeadlineExceeded) as cut:
            # The way there is cut; by now the replica may have what it lacked a moment ago, even one marked down.
            seconds = max(until - self._now(), self._settings.patience_seconds)
            try:
                return await fetched(self._replica, query, minimum, critical=False, timeout_seconds=seconds)
            except RetryableError:
                raise cut from None
