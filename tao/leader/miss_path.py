"""Choose the source of a leader's misses by the region that masters the shard.

A shard mastered in another region is read from this region's replica first, so that a read need not cross an ocean. But
a cache may know of a version that the replica does not have yet, from a forwarded write, a message or a reader's token.
Then the replica's answer would take a value back in time, and the query goes to the master region instead.

A critical read goes to the master region's leader. If there is none to be asked, or it is silent, the read goes to
its database: a critical read needs the master."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

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
from tao.model.queries import Fetched
from tao.model.settings import renamed
from tao.serving.configuration import Spawn
from tao.serving.sources import (
    DatabaseSource,
    FetchRequest,
    RemoteSource,
    Take,
    deliver,
    deliver_from_task,
    fetch_and_wait,
)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How the region's replica is read."""

    fallback_seconds: float = renamed(1.0, formerly="patience_seconds")
    """How long the replica may take before the master region is asked, and the master region before a replica that is
    marked down. Also how long the master region's leader may take with a critical read before its database is asked.
    Misses take milliseconds, and the way to the master region a round trip. So a replica that hangs costs this delay,
    until it is marked down, and a master region that is cut off, until its leaders are known to be down."""

    max_fallbacks: int = renamed(64, formerly="max_spread")
    """Queries at a time that go to the master region because the replica was slow, or to its database because its
    leader was. An overloaded replica must not overload the master region."""


class RegionSource:
    """The `FetchSource` of a leader, for shards of every master region."""

    def __init__(
        self,
        master: DatabaseSource,
        replica: DatabaseSource,
        master_region: RemoteSource,
        is_mastered_here: Callable[[int], bool],
        replica_is_down: Callable[[int], bool],
        spawn: Spawn,
        settings: ReplicaSettings,
    ) -> None:
        """``master``: reads the region's own server, and for critical reads the server of any master region. It
        waits for rows that are about to become visible. ``replica``: reads the replica, which may be seconds behind,
        and waits only for its usual lag. ``replica_is_down``: returns whether the topology marks the shard's replica
        as down."""
        self._master: Final = master
        self._replica: Final = replica
        self._master_region: Final = master_region
        self._is_mastered_here: Final = is_mastered_here
        self._replica_is_down: Final = replica_is_down
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._now: Final = asyncio.get_running_loop().time
        self._diverted = 0
        self.sent_to_master_region = 0

    def fetch(self, asked: FetchRequest) -> None:
        """See `tao.serving.sources.FetchSource`."""
        if self._is_mastered_here(asked.shard):
            self._master.fetch(asked)
            return
        until = self._now() + asked.timeout_seconds
        if asked.critical:
            deliver_from_task(self._spawn, self._fetch_critical(asked, until), asked.take)
        elif self._replica_is_down(asked.shard):
            # The replica is the last resort, so a master region that is silent must leave time for it while the reader
            # waits: a server may be marked down by the region that was cut off from it.
            seconds = min(self._settings.fallback_seconds, asked.timeout_seconds)
            fetching = self._fetch_from_master_region(asked, until, seconds)
            deliver_from_task(self._spawn, fetching, asked.take)
        else:
            # The master region is an alternative, so a replica that hangs must leave time for it.
            asked.instead, asked.instead_until = self._fetch_elsewhere, until
            asked.timeout_seconds = min(self._settings.fallback_seconds, asked.timeout_seconds)
            self._replica.fetch(asked)

    def _fetch_elsewhere(self, asked: FetchRequest, error: TaoError) -> None:
        if isinstance(error, StaleRead | Unavailable | OperatorError | InternalError):
            # The replica is behind a known version, unavailable, or lacks tables or rights while it is being seeded.
            # Ask the master region.
            seconds = asked.instead_until - self._now()
            fetching = self._fetch_from_master_region(asked, asked.instead_until, seconds)
            deliver_from_task(self._spawn, fetching, asked.take)
        elif isinstance(error, DeadlineExceeded) and self._diverted < self._settings.max_fallbacks:
            # The replica hangs or is overloaded. Only a bounded share of its queries may go to the master region.
            self._diverted += 1
            seconds = asked.instead_until - self._now()
            fetching = self._fetch_from_master_region(asked, asked.instead_until, seconds)
            deliver_from_task(self._spawn, fetching, partial(self._take_diverted, asked.take))
        else:
            deliver(asked.take, error)

    def _take_diverted(self, take: Take, answer: Fetched | TaoError) -> None:
        self._diverted -= 1
        deliver(take, answer)

    async def _fetch_critical(self, asked: FetchRequest, until: float) -> Fetched:
        # A leader that has stopped in the middle, or is starting, must leave time for the database.
        seconds = min(self._settings.fallback_seconds, until - self._now())
        try:
            return await fetch_and_wait(
                self._master_region,
                asked.query,
                asked.minimum,
                critical=True,
                timeout_seconds=seconds,
                caller=asked.caller,
                on_pause=asked.on_pause,
            )
        except DatabaseDown:
            raise
        except (NotMine, Unavailable, DeadlineExceeded) as error:
            is_late = isinstance(error, DeadlineExceeded)
            if is_late and self._diverted >= self._settings.max_fallbacks:
                raise
            self._diverted += is_late
            try:
                left = until - self._now()
                return await fetch_and_wait(
                    self._master, asked.query, asked.minimum, critical=True, timeout_seconds=left
                )
            except (Unavailable, DeadlineExceeded):
                raise error from None
            finally:
                self._diverted -= is_late

    async def _fetch_from_master_region(self, asked: FetchRequest, until: float, seconds: float) -> Fetched:
        """Give the master region ``seconds``, and the replica what is left ``until`` the fetch must end."""
        self.sent_to_master_region += 1
        query, minimum, on_pause = asked.query, asked.minimum, asked.on_pause
        try:
            return await fetch_and_wait(
                self._master_region, query, minimum, critical=False, timeout_seconds=seconds, on_pause=on_pause
            )
        except (Unavailable, DeadlineExceeded) as error:
            # The master region cannot be reached. By now the replica may have the version that it lacked, even one
            # marked down.
            left = max(until - self._now(), self._settings.fallback_seconds)
            try:
                return await fetch_and_wait(self._replica, query, minimum, critical=False, timeout_seconds=left)
            except RetryableError:
                raise error from None
