"""Fetch a follower's misses: from the leader of the shard, and from the database when the leader cannot serve.

In the seconds between the failure of a leader and the topology that names another one, no leader keeps this follower's
cache of its shards fresh, but reads must go on: what is cached is served, and what is not is read from the region's own
database, with an account that may only read. Such a read must be as new as everything that this follower was sent,
like one through the leader. Its answer is cached only while a leader sends changes of the shard; otherwise it would
soon be as old as the rest of the shard, and only another read makes it fresh.

A failed master is replaced within seconds. Until then the leaders of another region answer from their replica what this
region has not cached, at the same minimum version.

A critical read needs the master database and not a leader: when the leader cannot serve, this follower reads the master
itself if it is in this region, and asks the leaders of the master's region if not.

Not every failure of a leader leads to the database. A leader that is overloaded or finds its database slow is not
helped by followers that ask the same database beside it. And all followers together must not load the database more
than one leader does: each has few connections, few queries and no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import msgspec

from tao.model.errors import DatabaseDown, DeadlineExceeded, NotMine, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.queries import Fetched
from tao.serving.configuration import Spawn
from tao.serving.sources import (
    Databases,
    FetchRequest,
    FetchSource,
    deliver,
    deliver_from_task,
    fetch_and_wait,
)


@dataclass(frozen=True, slots=True)
class DirectReadSettings:
    """Bounds on the reads that a follower makes past its leader."""

    leader_seconds: float = 0.5
    """Longest wait for a leader's answer before its database is asked. A miss takes milliseconds; of the second that a
    client gives its first follower, this leaves as much again for the database."""

    critical_seconds: float = 1.0
    """Time in which a leader must answer a critical read before the master is read without it. It is longer than for
    other misses, because the leader may have to ask another region."""

    database_seconds: float = 0.25
    """Longest wait for the region's database before another region that has a copy is asked, and for that region before
    a database that is marked down. A leader may be late because its database hangs or because the other region is cut
    off: the second place has to be asked while the client still waits for this follower."""

    max_under_way: int = 256
    """Most queries past the leader at a time; more are refused as overload. A few connections answer as many in some
    tens of milliseconds."""

    max_connections: int = 2
    """Most connections to one database server. There are many followers, and all of them come when a leader fails."""


_OF_ONE_PLACE: Final = (NotMine, StaleRead, Unavailable, DeadlineExceeded)
"""Errors of one place that another one may not have."""


class FollowerSources(NamedTuple):
    """The places that a follower can fetch from."""

    leaders: FetchSource
    """The leaders of its region."""

    database: FetchSource
    """The database servers of its region."""

    other_region: FetchSource
    """The leaders of `Databases.other_region`."""


class MissPath:
    """The `FetchSource` of a follower that may read databases."""

    def __init__(
        self,
        sources: FollowerSources,
        databases: Databases,
        leader_is_down: Callable[[int], bool],
        is_subscribed: Callable[[int], bool],
        spawn: Spawn,
        settings: DirectReadSettings,
    ) -> None:
        """``leader_is_down`` returns true for a shard whose leader has not answered recently. ``is_subscribed`` returns
        true for a shard whose leader has confirmed that it sends this follower its changes."""
        self._leaders: Final = sources.leaders
        self._database: Final = sources.database
        self._other_region: Final = sources.other_region
        self._databases: Final = databases
        self._leader_is_down: Final = leader_is_down
        self._is_subscribed: Final = is_subscribed
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._now: Final = asyncio.get_running_loop().time
        self._under_way = 0
        self.direct_reads = 0
        """Number of queries that went past the leader."""

    def fetch(self, asked: FetchRequest) -> None:
        """Fetch one query. The answer is `StaleRead` when the database lacks what this follower was sent, and
        `Unavailable` when the database cannot serve either. See `tao.serving.sources.FetchSource`."""
        asked.instead_until = self._now() + asked.timeout_seconds
        settings = self._settings
        fallback_seconds = settings.critical_seconds if asked.critical else settings.leader_seconds
        if fallback_seconds < asked.timeout_seconds:
            asked.timeout_seconds = fallback_seconds
        asked.instead = self._fetch_elsewhere
        self._leaders.fetch(asked)

    def _fetch_elsewhere(self, asked: FetchRequest, error: TaoError) -> None:
        if not isinstance(error, NotMine | Unavailable | DeadlineExceeded):
            deliver(asked.take, error)
        elif asked.critical and isinstance(error, DatabaseDown):
            deliver(asked.take, error)  # the master does not answer, and there is no other one
        else:
            self._go_past(asked, error.message)

    def _go_past(self, miss: FetchRequest, reason: str) -> None:
        if self._under_way >= self._settings.max_under_way:
            refused = Overloaded(
                f"the leader of shard {miss.shard} cannot serve ({reason}), and {self._under_way} queries are at the "
                "databases already, which is the bound; try again"
            )
            deliver(miss.take, refused)
            return
        self._under_way += 1
        self.direct_reads += 1
        left = miss.instead_until - self._now()
        reading = (
            self._read_critically(miss, left, reason) if miss.critical else self._read_directly(miss, left, reason)
        )
        deliver_from_task(self._spawn, reading, partial(self._take_past_leader, miss))

    def _take_past_leader(self, miss: FetchRequest, answer: Fetched | TaoError) -> None:
        self._under_way -= 1
        deliver(miss.take, answer)

    async def _read_critically(self, miss: FetchRequest, timeout_seconds: float, reason: str) -> Fetched:
        """Read the master without the leader, which cannot serve for ``reason``."""
        source = self._database if self._databases.is_mastered_here(miss.shard) else self._other_region
        try:
            return await fetch_and_wait(
                source,
                miss.query,
                miss.minimum,
                critical=True,
                timeout_seconds=timeout_seconds,
                caller=miss.caller,
                on_pause=miss.on_pause,
            )
        except Unavailable as failure:
            raise type(failure)(
                f"the leader of shard {miss.shard} cannot serve the critical read ({reason}), and its master cannot be "
                f"read without it ({failure.message}); try again"
            ) from failure

    async def _read_directly(self, miss: FetchRequest, timeout_seconds: float, reason: str) -> Fetched:
        """Read the region's database and another region without the leader, which cannot serve for ``reason``.

        A database that is marked down is the last resort: the servers that marked it may be those that cannot be
        reached, and the other region with them.
        """
        shard, until = miss.shard, self._now() + timeout_seconds
        is_mastered_here, is_down = self._databases.is_mastered_here(shard), self._databases.local_is_down(shard)
        has_other = self._databases.other_region(shard) is not None
        # If there are two places, the first one must leave time for the second: out of the fetch's own time, and out of
        # the time for which the client waits.
        most_seconds = min(self._settings.database_seconds, timeout_seconds / 2)
        first_seconds = most_seconds if has_other else timeout_seconds
        failure: TaoError = Unavailable("it is marked down")
        if not is_down:
            found = await _read(self._database, miss, first_seconds)
            if isinstance(found, Fetched):
                keep = self._is_subscribed(shard) and not self._leader_is_down(shard)
                return found if keep else msgspec.structs.replace(found, keep=False)
            failure = found
            # `Overloaded` goes elsewhere: a database that hangs shows in its few connections being busy.
            passes = has_other if isinstance(found, Overloaded) else isinstance(found, _OF_ONE_PLACE)
            if not passes or (is_mastered_here and isinstance(found, StaleRead)):
                raise found  # also because no other copy has what the master lacks
        if has_other:
            found = await _read(self._other_region, miss, first_seconds if is_down else until - self._now())
            if isinstance(found, Fetched):
                return msgspec.structs.replace(found, keep=False)
            elsewhere = found
            if is_down and isinstance(elsewhere, _OF_ONE_PLACE):
                found = await _read(self._database, miss, until - self._now())
                if isinstance(found, Fetched):
                    return msgspec.structs.replace(found, keep=False)
                failure = found
            if not is_mastered_here:
                raise elsewhere
            reason = f"{reason}; another region: {elsewhere.message}"
        kind = DatabaseDown if isinstance(failure, DatabaseDown) else Unavailable
        raise kind(
            f"the leader of shard {shard} cannot serve ({reason}), nor can its database ({failure.message}); try again"
        ) from failure


async def _read(source: FetchSource, miss: FetchRequest, timeout_seconds: float) -> Fetched | TaoError:
    """Return what the source has, or why it has nothing."""
    try:
        return await fetch_and_wait(
            source,
            miss.query,
            miss.minimum,
            critical=False,
            timeout_seconds=timeout_seconds,
            on_pause=miss.on_pause,
        )
    except TaoError as error:
        return error
