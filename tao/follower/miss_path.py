"""Where a follower's misses go: to the leader of the shard, and when it cannot serve to the database (DESIGN.md §9).

In the seconds between the death of a leader and the topology that names another one, nobody keeps this follower's cache
of its shards fresh, but reads must go on: what is cached is served, what is not is read from the region's own database,
as an account that can do nothing else. Such a read is held to everything that this follower has heard of, as one
through the leader would be. It is kept only while a leader says what changes: else it would be as old as the rest of
the shard before long, and asking again is what makes it fresh.

A master that is gone is replaced within seconds. Until then another region's leaders answer out of their replica what
this region has not cached, held to the same minimum.

What a critical read needs is the master database and not a leader: where the leader cannot serve, the read is made
here when the master is in this region, or by the leaders of the region where it is.

Not every failure leads there. A leader that is overloaded or finds its database slow has no use for followers that ask
the same database beside it, and of all followers together the database must bear as much as of one leader: few
connections each, few queries, no waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from tao.model.errors import DatabaseDown, DeadlineExceeded, NotMine, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.queries import Fetched, Query, shard_of
from tao.serving.databases import Databases
from tao.serving.fill_source import FillSource, Take, fetched, give, wait_for


@dataclass(frozen=True, slots=True)
class DirectReadSettings:
    """When and how much a follower reads the database itself."""

    leader_seconds: float = 0.5
    """How long a leader may take to answer before its database is asked. A miss takes milliseconds; of the second that
    a client gives its first follower this leaves as much again for the database."""

    critical_seconds: float = 1.0
    """The same for a critical read, which may have to go to another region and back before it is read."""

    database_seconds: float = 0.25
    """How long the region's database may take before another region is asked, where one has a copy. A leader may be
    late because its database hangs: another region has to be asked while the client still waits for this follower."""

    max_under_way: int = 256
    """Queries at a time; more are refused as overload. A few connections answer as many in some tens of
    milliseconds."""

    max_connections: int = 2
    """Connections to one database server. There are many followers, all of which come when a leader dies."""


class _Miss(msgspec.Struct):
    query: Query
    shard: int
    minimum: int
    critical: bool
    until: float
    take: Take


class MissPath:
    """The `FillSource` of a follower."""

    def __init__(
        self,
        leaders: FillSource,
        database: FillSource,
        other_region: FillSource,
        databases: Databases,
        leader_is_down: Callable[[int], bool],
        is_told: Callable[[int], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: DirectReadSettings,
    ) -> None:
        """``leaders``: the region's. ``database``: the region's own. ``other_region``: the leaders of
        `Databases.other_region`. ``leader_is_down``: shard → its leader has not answered of late. ``is_told``: shard →
        a leader has confirmed that it tells this follower of changes."""
        self._leaders: Final = leaders
        self._database: Final = database
        self._other_region: Final = other_region
        self._databases: Final = databases
        self._leader_is_down: Final = leader_is_down
        self._is_told: Final = is_told
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._now: Final = asyncio.get_running_loop().time
        self._under_way = 0
        self.direct_reads = 0
        """Queries that went past the leader."""

    def fetch(self, query: Query, minimum: int, take: Take, *, critical: bool, timeout_seconds: float) -> None:
        """As `tao.serving.fill_source.FillSource`. `StaleRead` when the database has not what this follower has heard
        of, `Unavailable` when it cannot serve either."""
        miss = _Miss(query, shard_of(query), minimum, critical, self._now() + timeout_seconds, take)
        if self._leader_is_down(miss.shard):
            self._go_past(miss, "it has not answered of late")
            return
        settings = self._settings
        patience_seconds = settings.critical_seconds if critical else settings.leader_seconds
        seconds = min(patience_seconds, timeout_seconds)
        take = partial(self._take_from_leader, miss)
        self._leaders.fetch(query, minimum, take, critical=critical, timeout_seconds=seconds)

    def _take_from_leader(self, miss: _Miss, answer: Fetched | TaoError) -> None:
        if not isinstance(answer, NotMine | Unavailable | DeadlineExceeded):
            miss.take(answer)
        elif miss.critical and isinstance(answer, DatabaseDown):
            miss.take(answer)  # it is the master that does not answer, and there is no other
        else:
            self._go_past(miss, answer.message)

    def _go_past(self, miss: _Miss, reason: str) -> None:
        if self._under_way >= self._settings.max_under_way:
            refused = Overloaded(
                f"the leader of shard {miss.shard} cannot serve ({reason}), and {self._under_way} queries are at the "
                "databases already, which is the bound; try again"
            )
            miss.take(refused)
            return
        self._under_way += 1
        self.direct_reads += 1
        left = miss.until - self._now()
        reading = self._read_critically(miss, left) if miss.critical else self._read_directly(miss, left, reason)
        wait_for(self._spawn, reading, partial(self._take_past_leader, miss))

    def _take_past_leader(self, miss: _Miss, answer: Fetched | TaoError) -> None:
        self._under_way -= 1
        give(miss.take, answer)

    async def _read_critically(self, miss: _Miss, timeout_seconds: float) -> Fetched:
        source = self._database if self._databases.is_mastered_here(miss.shard) else self._other_region
        return await fetched(source, miss.query, miss.minimum, critical=True, timeout_seconds=timeout_seconds)

    async def _read_directly(self, miss: _Miss, timeout_seconds: float, reason: str) -> Fetched:
        shard, began = miss.shard, self._now()
        is_mastered_here = self._databases.is_mastered_here(shard)
        has_other = self._databases.other_region(shard) is not None
        failure: TaoError = Unavailable("it is marked down")
        if not self._databases.local_is_down(shard):
            # Where there is another way, a database that hangs must leave time for it: of all there is, which a fill
            # has, and of what whoever waits for it has.
            most_seconds = min(self._settings.database_seconds, timeout_seconds / 2)
            local_seconds = most_seconds if has_other else timeout_seconds
            try:
                found = await fetched(
                    self._database, miss.query, miss.minimum, critical=False, timeout_seconds=local_seconds
                )
            except (StaleRead, Unavailable, DeadlineExceeded, Overloaded) as error:
                if isinstance(error, Overloaded) and not has_other:
                    raise
                failure = error  # also when its few connections are all held up, which is how one that hangs looks
            else:
                keep = self._is_told(shard) and not self._leader_is_down(shard)
                return found if keep else msgspec.structs.replace(found, keep=False)
        if is_mastered_here and isinstance(failure, StaleRead):
            raise failure  # what a master lacks nobody has
        if has_other:
            left = timeout_seconds - (self._now() - began)
            try:
                found = await fetched(
                    self._other_region, miss.query, miss.minimum, critical=False, timeout_seconds=left
                )
            except TaoError as error:
                if not is_mastered_here:
                    raise
                reason = f"{reason}; another region: {error.message}"
            else:
                return msgspec.structs.replace(found, keep=False)
        kind = DatabaseDown if isinstance(failure, DatabaseDown) else Unavailable
        raise kind(
            f"the leader of shard {shard} cannot serve ({reason}), nor can its database ({failure.message}); try again"
        ) from failure
