"""Misses: single flight, fill tickets, prefixes that grow, minimum versions (DESIGN.md §4, §5).

Concurrent misses on a key are one *flight*: a task of the cache server, not of whoever missed first, so a caller that
gives up takes nothing from the others. A flight holds a fill ticket; what it brings is stored only when no message
that arrived meanwhile knows of something newer, and otherwise it is fetched again, from further up. Whoever waits for
a version joins a flight only for what it brings: too old an answer sends it on a flight of its own. So does a flight
that failed for a version which only somebody else asked for: a wrong write token must not fail everybody's reads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Final, Protocol

from tao.cache import GraphCache, Stored, Ticket
from tao.model.errors import DeadlineExceeded, InternalError, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock
from tao.model.queries import CountQuery, EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery, TimeRangeQuery
from tao.model.versions import answers, epoch_of
from tao.serving.block_answers import answer_from_block, merge_edges, missing_id2s

_ANY_VERSION: Final = 1 << 64
"""Above every version."""

_REFILLED: Final = {Stored.STORED: "kept", Stored.BELOW_FLOOR: "overtaken", Stored.NOT_KEPT: "not_kept"}


class FillSource(Protocol):
    """Where a cache's misses go: the leader tier for a follower, the region's database for a leader."""

    async def fetch(self, query: Query, minimum: int, *, critical: bool, timeout_seconds: float) -> Fetched:
        """Answer one query with at least version ``minimum``; queries of one tick travel together. ``critical``: from
        the master database, by a read that begins after this call. Raises `TaoError`."""


@dataclass(frozen=True, slots=True)
class FillSettings:
    """Bounds on misses."""

    timeout_seconds: float = 5.0
    """A fill's own deadline: it outlives its first caller, and must end well before floors are forgotten."""

    least_prefix_edges: int = 128
    """Edges asked for when fewer would do: most lists are shorter, so that one fill makes most lists complete."""

    max_refetches: int = 4
    """How often a fill below its floor is fetched again; a row is visible within milliseconds of its message."""

    refetch_pause_seconds: float = 0.1
    """Before the second of them; it doubles. While a master is replaced, for a second, rows may be of a version epoch
    that not every server goes by."""

    max_flights: int = 20_000
    """Fills under way at once; each holds a task and an answer in memory. More misses are refused as overload."""


class Flight:
    """One fetch under way, and what it will bring. ``minimum``: the version that whoever started it asked for.
    ``ticket`` is that of its latest attempt."""

    __slots__ = ("minimum", "query", "ticket", "waiters")

    def __init__(self, query: Query, minimum: int, ticket: Ticket) -> None:
        self.query = query
        self.minimum = minimum
        self.ticket = ticket
        self.waiters: list[asyncio.Future[Fetched]] = []
        """One for each caller: one that is cancelled leaves the flight to the others."""


class Fills:
    """Answers what the cache could not, and keeps what comes."""

    def __init__(
        self,
        cache: GraphCache,
        source: FillSource,
        clock: Clock,
        list_limit: Callable[[int], int],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        settings: FillSettings,
        *,
        past_floors: bool = False,
    ) -> None:
        """``list_limit``: association type → most edges cached and answered. ``spawn`` starts a task of the server.
        ``past_floors``: whoever asks here keeps nothing, and where nobody has what is known, gets what is committed."""
        self._cache: Final = cache
        self._source: Final = source
        self._clock: Final = clock
        self._list_limit: Final = list_limit
        self._spawn: Final = spawn
        self._settings: Final = settings
        self._past_floors: Final = past_floors
        self._flights: dict[Hashable, Flight] = {}
        self._under_way = 0
        self.started = 0
        self.refetched = 0
        self.joined = 0
        self.incomplete = 0
        """Queries for more of a list than the part of it that was cached."""
        self.read_past_floors = 0
        """Queries answered with what is committed, because nobody had what was known."""
        self.refills: Final = dict.fromkeys(("kept", "overtaken", "not_kept", "failed"), 0)
        """What became of refills."""

    @property
    def least_prefix_edges(self) -> int:
        """See `FillSettings`."""
        return self._settings.least_prefix_edges

    @property
    def under_way(self) -> int:
        """Flights now in the air, also those that nobody joins any more."""
        return self._under_way

    async def answer(self, query: Query, minimum: int, *, critical: bool) -> Fetched:
        """The encoded answer, at ``minimum`` version or later; older only when it was read under a later version epoch,
        so that nothing newer is left. The caller bounds the time. Raises `TaoError`."""
        if critical:
            return await self._answer_critically(query, minimum)
        try:
            return await self._answer_as_known(query, minimum)
        except StaleRead as stale:
            if not self._past_floors:
                raise
            # What is known here, or further up, nobody has: a commit, perhaps, that is in the binlog and waits for a
            # replica, which may be away. Who did not ask for it gets what is committed, and nothing of that is kept.
            try:
                fetched = await self._answer_critically(query, minimum)
            except (Unavailable, DeadlineExceeded):
                raise stale from None
            self.read_past_floors += 1
            return fetched

    async def _answer_as_known(self, query: Query, minimum: int) -> Fetched:
        match query:
            case ObjectQuery() | CountQuery():
                return await self._fly_for(query, minimum)
            case RangeQuery():
                return await self._answer_range(query, minimum)
            case TimeRangeQuery():
                return await self._answer_time_range(query, minimum)
            case EdgesQuery():
                return await self._answer_edges(query, minimum)

    async def refill(self, prefix: RangeQuery) -> bool:
        """Fetch a prefix for nobody, and keep it unless something newer is known by then. No flight: no reader joins it
        and waits for more edges than he asked for, and what was overtaken is not fetched again at once. Returns whether
        there is nothing to try again."""
        ticket = self._ticket(prefix)
        seconds = self._settings.timeout_seconds
        try:
            fetched = await self._source.fetch(prefix, ticket.floor, critical=False, timeout_seconds=seconds)
        except TaoError:
            self.refills["failed"] += 1
            return False
        stored = self._store(ticket, prefix, fetched)
        self.refills[_REFILLED[stored]] += 1
        return stored is not Stored.BELOW_FLOOR

    async def _answer_critically(self, query: Query, minimum: int) -> Fetched:
        # Joins no flight: the read must begin after this request arrived.
        for attempt in range(self._settings.max_refetches + 1):
            if attempt:
                await asyncio.sleep(self._settings.refetch_pause_seconds * 2 ** (attempt - 1))
            fetched = await self._source.fetch(
                query, minimum, critical=True, timeout_seconds=self._settings.timeout_seconds
            )
            if fetched.version_epoch >= self._cache.version_epoch(_shard(query)):
                self._learn(query, version_of(fetched.value))
                return fetched
            self.refetched += 1
        raise StaleRead("the shard has got another master while the last one was read; try again")

    async def _answer_range(self, query: RangeQuery, minimum: int) -> Fetched:
        bound = self._list_limit(query.atype)
        wanted = max(query.pos + query.limit, self._settings.least_prefix_edges) + 1
        held = self._held(query, minimum)
        if held is not None:
            self.incomplete += 1
            wanted = max(wanted, 2 * int.from_bytes(held[16:20], "little"))
        for _ in range(self._settings.max_refetches):
            if query.pos + query.limit > bound:
                break
            fetched = await self._fly_for(self._prefix(query, min(wanted, bound)), minimum)
            answer = answer_from_block(fetched.value, query)
            if answer is not None:
                return Fetched(answer, fetched.version_epoch, fetched.origin)
            # The flight joined was for a shorter prefix; the next one is for ours.
        return await self._fly_for(query, minimum, alone=True)

    async def _answer_time_range(self, query: TimeRangeQuery, minimum: int) -> Fetched:
        """By a first prefix when nothing is held, else by asking for exactly this."""
        if self._held(query, minimum) is None:
            wanted = max(query.limit, self._settings.least_prefix_edges) + 1
            prefix = self._prefix(query, min(wanted, self._list_limit(query.atype)))
            fetched = await self._fly_for(prefix, minimum)
            answer = answer_from_block(fetched.value, query)
            if answer is not None:
                return Fetched(answer, fetched.version_epoch, fetched.origin)
        else:
            self.incomplete += 1
        return await self._fly_for(query, minimum)

    async def _answer_edges(self, query: EdgesQuery, minimum: int) -> Fetched:
        held, origin = self._held(query, minimum), "memory"
        if held is None:
            wanted = min(self._settings.least_prefix_edges + 1, self._list_limit(query.atype))
            fetched = await self._fly_for(self._prefix(query, wanted), minimum)
            answer = answer_from_block(fetched.value, query)
            if answer is not None:
                return Fetched(answer, fetched.version_epoch, fetched.origin)
            held, origin = fetched.value, fetched.origin
        else:
            self.incomplete += 1
        missing = missing_id2s(held, query)
        known = self._cache.edges(query.id1, query.atype, query.id2s, query.high, query.low, minimum)
        if known is not None and version_of(known.block) == version_of(held):
            missing = known.missing  # a membership filter may have denied some
            if not missing:
                return Fetched(known.block, self._cache.version_epoch(_shard(query)), origin)
        if len(missing) < len(query.id2s):
            rest = EdgesQuery(query.id1, query.atype, missing, query.high, query.low)
            found = await self._fly_for(rest, minimum)
            # No answer mixes two versions: what is held may have been behind, or have moved on in between.
            if version_of(found.value) == version_of(held):
                merged = merge_edges(held, found.value, query)
                return Fetched(merged, found.version_epoch, found.origin)
        return await self._fly_for(query, minimum)

    def _held(self, query: RangeQuery | TimeRangeQuery | EdgesQuery, minimum: int) -> bytes | None:
        block = self._cache.peek_list(query.id1, query.atype)
        return block if block is not None and version_of(block) >= minimum else None

    @staticmethod
    def _prefix(query: RangeQuery | TimeRangeQuery | EdgesQuery, limit: int) -> RangeQuery:
        return RangeQuery(query.id1, query.atype, 0, limit)

    async def _fly_for(self, fill: Query, minimum: int, *, alone: bool = False) -> Fetched:
        """What a flight for ``fill`` brings. A prefix may come from a flight for another length of the same list,
        unless ``alone``."""
        key = fill if alone else self._flight_key(fill)
        if epoch_of(minimum) > self._cache.version_epoch(_shard(fill)):
            # Of a promotion that is not known here yet, or made up: nobody else should wait for it.
            key = (key, minimum)
        most_to_wait_for = _ANY_VERSION
        for _ in range(self._settings.max_refetches + 1):
            flight = self._flights.get(key)
            started = flight is None or flight.minimum > most_to_wait_for or not self._may_join(flight)
            if flight is None or started:
                flight = self._start(key, fill, minimum)
            else:
                self.joined += 1
            waiter: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
            flight.waiters.append(waiter)
            try:
                fetched = await waiter
            except StaleRead:
                if started or flight.minimum <= minimum:
                    raise
                most_to_wait_for = minimum
                continue
            if answers(version_of(fetched.value), minimum, fetched.version_epoch):
                return fetched
        raise StaleRead(f"no copy within reach has version {minimum}; try again, or read critically")

    def _may_join(self, flight: Flight) -> bool:
        """A flight that began before a bulk invalidation may bring what the invalidation was about; and of a shard
        that is not open no floors are kept, so nothing would tell that a write has overtaken the flight."""
        return flight.ticket.generation != 0 and not self._cache.is_void(flight.ticket)

    @staticmethod
    def _flight_key(fill: Query) -> Hashable:
        if isinstance(fill, RangeQuery) and fill.pos == 0:
            return (fill.id1, fill.atype)  # all prefixes of a list are one flight at a time, so that none overlap
        return fill

    def _start(self, key: Hashable, fill: Query, minimum: int) -> Flight:
        if self._under_way >= self._settings.max_flights:
            raise Overloaded(f"{self._under_way} fills are under way, which is the bound; try again later")
        flight = Flight(fill, minimum, self._ticket(fill))
        self._spawn(self._fly(key, flight))
        self._flights[key] = flight
        self._under_way += 1
        self.started += 1
        return flight

    async def _fly(self, key: Hashable, flight: Flight) -> None:
        try:
            fetched = await self._fetch_and_store(flight)
            for waiter in flight.waiters:
                if not waiter.done():
                    waiter.set_result(fetched)
        except TaoError as error:
            _fail(flight, error)
        except Exception as error:
            _fail(flight, InternalError(f"{type(error).__name__} in a fill; see the server's log"))
            raise
        finally:
            self._under_way -= 1
            for waiter in flight.waiters:
                waiter.cancel()  # those that have nothing yet
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def _fetch_and_store(self, flight: Flight) -> Fetched:
        fill = flight.query
        for attempt in range(self._settings.max_refetches + 1):
            if attempt > 1:
                await asyncio.sleep(self._settings.refetch_pause_seconds * 2 ** (attempt - 2))
            if attempt:
                flight.ticket = self._ticket(fill)
            is_last = attempt == self._settings.max_refetches
            try:
                fetched = await self._fetch(flight, critical=is_last)
            except Unavailable:
                if not (attempt and is_last):
                    raise
                # The master is gone, and its successor is not known everywhere yet: in a moment it is.
                await asyncio.sleep(self._settings.refetch_pause_seconds * 2**attempt)
                flight.ticket = self._ticket(fill)
                fetched = await self._fetch(flight, critical=False)
            if self._store(flight.ticket, fill, fetched) is not Stored.BELOW_FLOOR:
                return fetched
            self.refetched += 1
        raise StaleRead("the source keeps answering with less than is known here; try again, or read critically")

    async def _fetch(self, flight: Flight, *, critical: bool) -> Fetched:
        minimum = max(flight.minimum, flight.ticket.floor)
        seconds = self._settings.timeout_seconds
        return await self._source.fetch(flight.query, minimum, critical=critical, timeout_seconds=seconds)

    def _ticket(self, fill: Query) -> Ticket:
        now = self._clock.monotonic()
        if isinstance(fill, ObjectQuery):
            return self._cache.object_ticket(fill.id, now)
        return self._cache.list_ticket(fill.id1, fill.atype, now)

    def _store(self, ticket: Ticket, fill: Query, fetched: Fetched) -> Stored:
        with self._cache.witness.because(fetched.origin):
            return self._keep(ticket, fill, fetched)

    def _keep(self, ticket: Ticket, fill: Query, fetched: Fetched) -> Stored:
        now = self._clock.monotonic()
        if not fetched.keep:
            return self._cache.pass_over(ticket, fetched.value, fetched.version_epoch, now)
        match fill:
            case ObjectQuery():
                return self._cache.store_object(ticket, fetched.value, fetched.version_epoch, now)
            case CountQuery():
                return self._cache.store_count(ticket, fetched.value, fetched.version_epoch, now)
            case RangeQuery(pos=0) if fill.limit <= self._list_limit(fill.atype):
                return self._cache.store_list(ticket, fetched.value, fetched.version_epoch, now)
        # A part of the list that is not a prefix is answered and not kept, but it is held to all that is known, and
        # what it teaches of the version counts for the next reader.
        outcome = self._cache.pass_over(ticket, fetched.value, fetched.version_epoch, now)
        if outcome is not Stored.BELOW_FLOOR:
            self._learn(fill, version_of(fetched.value))
        return outcome

    def _learn(self, query: Query, version: int) -> None:
        now = self._clock.monotonic()
        if isinstance(query, ObjectQuery):
            self._cache.raise_object_floor(query.id, version, now)
        else:
            self._cache.raise_list_floor(query.id1, query.atype, version, now)


def _shard(query: Query) -> int:
    return (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT


def _fail(flight: Flight, error: TaoError) -> None:
    for waiter in flight.waiters:
        if not waiter.done():
            waiter.set_exception(error)
            waiter.exception()  # whoever waits may be cancelled before he looks
