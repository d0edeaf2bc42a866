"""Single flight: concurrent misses on a key are one fetch, and what it brings is held to what is known (DESIGN.md §4).

A flight belongs to the server and not to whoever missed first, so a caller that gives up takes nothing from the others.
It holds a fill ticket; what it brings is stored only when no message that arrived meanwhile knows of something newer,
and otherwise it is fetched again, from further up. Whoever waits for a version joins a flight only for what it brings:
too old an answer sends it on a flight of its own. So does a flight that failed for a version which only somebody else
asked for: a wrong write token must not fail everybody's reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Protocol

from tao.cache import GraphCache, Stored, Ticket
from tao.model.errors import InternalError, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import version_of
from tao.model.ports import Clock
from tao.model.queries import CountQuery, Fetched, ObjectQuery, Query, RangeQuery, shard_of
from tao.model.versions import answers, epoch_of
from tao.serving.fill_source import FillSource, give

_logger = logging.getLogger(__name__)

_ANY_VERSION: Final = 1 << 64
"""Above every version."""

_COUNT_AGAIN_SECONDS: Final = 0.5
"""Between two looks for those who have gone: one at a full house takes some ten milliseconds."""


@dataclass(frozen=True, slots=True)
class FillSettings:
    """Bounds on misses."""

    timeout_seconds: float = 5.0
    """For each attempt of a fill. It outlives whoever asked first, and must end well before floors are forgotten."""

    least_prefix_edges: int = 128
    """Edges asked for when fewer would do: most lists are shorter, so that one fill makes most lists complete."""

    max_refetches: int = 4
    """How often a fill below its floor is fetched again; a row is visible within milliseconds of its message."""

    refetch_pause_seconds: float = 0.1
    """Before the second of them; it doubles. While a master is replaced, for a second, rows may be of a version epoch
    that not every server goes by."""

    max_flights: int = 20_000
    """Fills under way at once; each holds an answer in memory. More misses are refused as overload."""

    max_waiting: int = 100_000
    """Queries that wait for them, those that joined another's included, and critical reads. More are refused as
    overload."""


class Asker(Protocol):
    """Who waits for an answer."""

    @property
    def gone(self) -> bool:
        """Nobody waits any more: nothing further is begun for it."""

    def take(self, answer: Fetched | TaoError) -> None:
        """See `tao.serving.fill_source.Take`."""


class Flights:
    """Those of one cache."""

    def __init__(
        self,
        cache: GraphCache,
        source: FillSource,
        clock: Clock,
        list_limit: Callable[[int], int],
        settings: FillSettings,
    ) -> None:
        """As `Fills`."""
        self.cache: Final = cache
        self.source: Final = source
        self.settings: Final = settings
        self.call_later: Final = asyncio.get_running_loop().call_later
        self._clock: Final = clock
        self._list_limit: Final = list_limit
        self._flights: dict[Hashable, Flight] = {}
        self._in_air: set[Flight] = set()  # also those that nobody joins any more
        self._count_again_at = 0.0
        self.waiting = 0
        """Queries on board of them, and those that are read critically, which join none."""
        self.started = 0
        self.refetched = 0
        self.joined = 0

    @property
    def under_way(self) -> int:
        """Flights now in the air, also those that nobody joins any more."""
        return len(self._in_air)

    def take_along(self, asker: Asker, query: Query, minimum: int, *, alone: bool = False) -> None:
        """``asker`` gets what a flight for ``query`` brings, at ``minimum`` or later. A prefix may come from a flight
        for another length of the same list, unless ``alone``."""
        key: Hashable = query
        if not alone and isinstance(query, RangeQuery) and query.pos == 0:
            key = (query.id1, query.atype)  # all prefixes of a list are one flight at a time, so that none overlap
        if minimum and epoch_of(minimum) > self.cache.version_epoch(shard_of(query)):
            # Of a promotion that is not known here yet, or made up: nobody else should wait for it.
            key = (key, minimum)
        _Passenger(self, asker, key, query, minimum).board()

    def flight_for(self, passenger: _Passenger) -> Flight:
        """To board. Raises `Overloaded`."""
        self.check_waiting()
        key = passenger.key
        flight = self._flights.get(key)
        if flight is not None and flight.minimum <= passenger.most_to_wait_for and self._may_join(flight):
            self.joined += 1
            return flight
        if self.under_way >= self.settings.max_flights:
            raise Overloaded(f"{self.under_way} fills are under way, which is the bound; try again later")
        self._flights[key] = flight = Flight(self, key, passenger.query, passenger.minimum)
        self._in_air.add(flight)
        self.started += 1
        return flight

    def check_waiting(self) -> None:
        """Whether one more may wait. Raises `Overloaded`."""
        if self.waiting >= self.settings.max_waiting:
            self._leave_out_gone()
        if self.waiting >= self.settings.max_waiting:
            raise Overloaded(f"{self.waiting} queries wait for fills, which is the bound; try again later")

    def _leave_out_gone(self) -> None:
        """Those who have given up on fills that hang take nobody's place."""
        now = self._clock.monotonic()
        if now < self._count_again_at:
            return
        self._count_again_at = now + _COUNT_AGAIN_SECONDS
        for flight in self._in_air:
            left = [passenger for passenger in flight.passengers if not passenger.gone]
            self.waiting -= len(flight.passengers) - len(left)
            flight.passengers = left

    def _may_join(self, flight: Flight) -> bool:
        """A flight that began before a bulk invalidation may bring what the invalidation was about; and of a shard
        that is not open no floors are kept, so nothing would tell that a write has overtaken the flight."""
        return flight.ticket.generation != 0 and not self.cache.is_void(flight.ticket)

    def landed(self, flight: Flight, passengers: int) -> None:
        """Nobody joins it any more."""
        self.waiting -= passengers
        self._in_air.remove(flight)
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]

    def ticket(self, query: Query) -> Ticket:
        """To be taken before the source is asked."""
        now = self._clock.monotonic()
        if isinstance(query, ObjectQuery):
            return self.cache.object_ticket(query.id, now)
        return self.cache.list_ticket(query.id1, query.atype, now)

    def store(self, ticket: Ticket, query: Query, fetched: Fetched) -> Stored:
        """Keep what came under the ticket, where it may be kept."""
        with self.cache.witness.because(fetched.origin):
            return self._keep(ticket, query, fetched)

    def _keep(self, ticket: Ticket, query: Query, fetched: Fetched) -> Stored:
        now = self._clock.monotonic()
        if not fetched.keep:
            return self.cache.pass_over(ticket, fetched.value, fetched.version_epoch, now)
        match query:
            case ObjectQuery():
                return self.cache.store_object(ticket, fetched.value, fetched.version_epoch, now)
            case CountQuery():
                return self.cache.store_count(ticket, fetched.value, fetched.version_epoch, now)
            case RangeQuery(pos=0) if query.limit <= self._list_limit(query.atype):
                return self.cache.store_list(ticket, fetched.value, fetched.version_epoch, now)
        # A part of the list that is not a prefix is answered and not kept, but it is held to all that is known, and
        # what it teaches of the version counts for the next reader.
        outcome = self.cache.pass_over(ticket, fetched.value, fetched.version_epoch, now)
        if outcome is not Stored.BELOW_FLOOR:
            self.learn(query, version_of(fetched.value))
        return outcome

    def learn(self, query: Query, version: int) -> None:
        """The key has been at ``version``: what is held below it is dropped."""
        now = self._clock.monotonic()
        if isinstance(query, ObjectQuery):
            self.cache.raise_object_floor(query.id, version, now)
        else:
            self.cache.raise_list_floor(query.id1, query.atype, version, now)


class Flight:
    """One fetch under way. ``minimum``: the version that whoever started it asked for. ``ticket`` is that of its latest
    attempt."""

    __slots__ = ("_attempt", "_flights", "_has_landed", "has_begun", "key", "minimum", "passengers", "query", "ticket")

    def __init__(self, flights: Flights, key: Hashable, query: Query, minimum: int) -> None:
        self.key = key
        self.query = query
        self.minimum = minimum
        self.ticket = flights.ticket(query)
        self.passengers: list[_Passenger] = []  # none, too, when all have gone
        self.has_begun = False
        self._has_landed = False
        self._flights = flights
        self._attempt = 0

    def begin(self) -> None:
        """Fetch; the last time critically."""
        self.has_begun = True
        flights = self._flights
        settings = flights.settings
        try:
            flights.source.fetch(
                self.query,
                max(self.minimum, self.ticket.floor),
                self._take,
                critical=self._attempt == settings.max_refetches,
                timeout_seconds=settings.timeout_seconds,
            )
        except Exception as error:
            # A bug must not leave a flight that others join and that never lands.
            _logger.exception("a fill could not be begun")
            self._land(InternalError(f"{type(error).__name__} in a fill; see the server's log"))

    def _begin_anew(self) -> None:
        self.ticket = self._flights.ticket(self.query)
        self.begin()

    def _take(self, fetched: Fetched | TaoError) -> None:
        flights = self._flights
        pause_seconds, last = flights.settings.refetch_pause_seconds, flights.settings.max_refetches
        if isinstance(fetched, TaoError):
            if isinstance(fetched, Unavailable) and self._attempt == last > 0:
                # The master is gone, and its successor is not known everywhere yet: in a moment it is.
                flights.call_later(pause_seconds * 2**last, self._begin_anew)
                self._attempt += 1
            else:
                self._land(fetched)
        elif flights.store(self.ticket, self.query, fetched) is not Stored.BELOW_FLOOR:
            self._land(fetched)
        else:
            flights.refetched += 1
            attempt = self._attempt = self._attempt + 1
            if attempt > last:
                stale = "the source keeps answering with less than is known here; try again, or read critically"
                self._land(StaleRead(stale))
            elif attempt == 1:
                self._begin_anew()
            else:
                flights.call_later(pause_seconds * 2 ** (attempt - 2), self._begin_anew)

    def _land(self, brought: Fetched | TaoError) -> None:
        if self._has_landed:
            return
        self._has_landed = True
        passengers, self.passengers = self.passengers, []
        self._flights.landed(self, len(passengers))  # before anybody is told, who may need the next one
        for passenger in passengers:
            give(passenger.arrive, brought)


class _Passenger:
    """One asker on its way, by one flight or several."""

    __slots__ = ("_asker", "_boarded", "_flights", "_waits_for", "key", "minimum", "most_to_wait_for", "query")

    def __init__(self, flights: Flights, asker: Asker, key: Hashable, query: Query, minimum: int) -> None:
        self.key = key
        self.query = query
        self.minimum = minimum
        self.most_to_wait_for = _ANY_VERSION
        """No flight for a higher version is joined."""
        self._flights = flights
        self._asker = asker
        self._boarded = 0
        self._waits_for = minimum

    @property
    def gone(self) -> bool:
        return self._asker.gone

    def board(self) -> None:
        try:
            flight = self._flights.flight_for(self)
        except Overloaded as refused:
            self._asker.take(refused)
            return
        self._boarded += 1
        self._flights.waiting += 1
        self._waits_for = flight.minimum
        flight.passengers.append(self)
        if not flight.has_begun:
            flight.begin()

    def arrive(self, brought: Fetched | TaoError) -> None:
        if isinstance(brought, TaoError):
            # A version that somebody else asked for, nobody has; a flight of its own was for just its own.
            if not isinstance(brought, StaleRead) or self._waits_for <= self.minimum:
                self._asker.take(brought)
                return
            self.most_to_wait_for = self.minimum
        elif answers(version_of(brought.value), self.minimum, brought.version_epoch):
            self._asker.take(brought)
            return
        if self._boarded > self._flights.settings.max_refetches:
            message = f"no copy within reach has version {self.minimum}; try again, or read critically"
            self._asker.take(StaleRead(message))
        elif not self.gone:
            self.board()
