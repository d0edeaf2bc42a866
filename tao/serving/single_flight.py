"""Single flight: concurrent misses of one key share one fetch.

The course of a miss, from top to bottom of this module:

1. A `FetchWaiter` asks for a query. It joins the fetch of that key which is under way, or starts one.
2. A `Fetch` takes a fill ticket from the cache, and then asks the source.
3. The source's answer is stored under the ticket (`GraphCache.store_object` and so on). When the cache has received
   something newer meanwhile, the store returns `Stored.BELOW_FLOOR`: the answer goes to nobody, and the fetch is
   tried again with a new ticket, at last critically.
4. The fetch finishes: every waiter is answered. A waiter for which the answer is too old, or which failed because
   another waiter asked for a version that no copy has, joins another fetch.

A fetch that pauses before another attempt keeps no place in the shares of its waiters' callers: each waiter gives its
place back, or takes the error of the attempt before, where too much of its caller is tried again already.

Nearly every fetch is for one query, has one attempt and succeeds. Such a fetch is a `LoneFetch`, which has no waiters
and asks for the answer of its query alone. It becomes a `Fetch`, as if it had been one from the start, when another
query joins it, or when its attempt does not bring what it needs.

A fetch belongs to the server and not to the request that missed first, so that a caller which gives up takes nothing
from the others. A wrong write token of one reader must not fail the reads of others: this is why a waiter that needs a
certain version joins a fetch only for what it brings, and goes on with a fetch of its own when that is too old.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import ClassVar, Final

import msgspec

from tao.cache import FillTicket, GraphCache, Stored
from tao.model.errors import InternalError, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import Clock
from tao.model.queries import CountQuery, Fetched, ObjectQuery, Query, RangeQuery, shard_of
from tao.model.settings import renamed
from tao.model.versions import answers, epoch_of
from tao.serving.sources import FetchRequest, FetchSource, deliver

_logger = logging.getLogger(__name__)

_ANY_VERSION: Final = 1 << 64
"""A number above every version."""

_RECOUNT_SECONDS: Final = 0.5
"""Shortest time between two counts of the gone waiters: at the bound, one count takes some ten milliseconds."""


@dataclass(frozen=True, slots=True)
class FillSettings:
    """Bounds on the fetches that answer misses."""

    timeout_seconds: float = 5.0
    """Longest time of one attempt. It exceeds the deadline of the request that started the fetch, and must end well
    before the cache forgets version floors."""

    min_prefix_edges: int = renamed(128, formerly="least_prefix_edges")
    """Fewest edges fetched of a list: most lists are shorter, so that one fetch makes most lists complete."""

    max_refetches: int = 4
    """Most repeats of a fetch whose answer is older than the cache's version floor; a row becomes visible within
    milliseconds of its message."""

    refetch_pause_seconds: float = 0.1
    """Pause before the second repeat; it doubles. While a master is replaced, for about a second, rows may carry a
    version epoch that not every server knows."""

    max_fetches: int = renamed(20_000, formerly="max_flights")
    """Most fetches under way at once. Further misses are refused as overload."""

    max_held_bytes: int = 256 << 20
    """Most bytes of rows that the reads of databases hold until their statement has ended, and of nothing else. A read
    that would exceed it is refused as overload. Eight connections to a server bring some 8,000 rows each at a time,
    which is 13 MB of rows without data; lists of long data are what the bound is for. Answers of other cache servers
    are passed on as they arrive. They are bounded by message (16 MiB) and by connection: one with more than 64 MiB of
    unread answers is closed."""

    max_waiting: int = 100_000
    """Most queries that wait for fetches, joined ones and critical reads included. Further misses are refused as
    overload."""


class FetchWaiter(ABC):
    """A query that waits for one fetch at a time."""

    __slots__ = ("_fetches_joined", "_joined_minimum", "fetch_key", "fetch_query", "max_joined_minimum", "minimum",
                 "single_flight")  # fmt: skip

    def __init__(self, single_flight: SingleFlight, minimum: int) -> None:
        self.single_flight: Final = single_flight
        self.minimum: Final = minimum
        """The version that the answer must have at least; 0 for any."""

        self.fetch_query: Query
        self.fetch_key: Hashable
        self.max_joined_minimum: int
        """The waiter joins no fetch that another started for a higher version than this."""

        self._fetches_joined: int
        self._joined_minimum: int

    @property
    @abstractmethod
    def gone(self) -> bool:
        """True when no waiter needs the answer any more, so that nothing further is started for it."""

    @abstractmethod
    def take(self, answer: Fetched | TaoError) -> None:
        """Take what was fetched, at ``minimum`` or later, or why it was not."""

    @abstractmethod
    def put_aside(self) -> bool:
        """Give the place in a caller's share back, because the fetch pauses before another attempt. Returns False when
        the waiter may not wait for that; it then takes the error of the attempt before."""

    def fetch(self, query: Query, *, alone: bool = False) -> None:
        """Have `take` called with the answer to ``query``. A prefix may come from a fetch of another length of the same
        list, unless ``alone``."""
        key: Hashable = query.id if isinstance(query, ObjectQuery) else query
        if not alone and isinstance(query, RangeQuery) and query.pos == 0:
            key = (query.id1, query.atype)  # all prefixes of a list share one fetch at a time, so that none overlap
        minimum = self.minimum
        if minimum and epoch_of(minimum) > self.single_flight.cache.version_epoch(shard_of(query)):
            # The version is of a promotion that is not known here yet, or made up: no other read should wait for it.
            key = (key, None, minimum)  # no key of a list, which is a pair
        self.fetch_key = key
        self.fetch_query = query
        self.max_joined_minimum = _ANY_VERSION
        self._fetches_joined = 0
        self._join()

    def note_joined(self, key: Hashable, query: Query) -> None:
        """Note that the waiter waits for a fetch of ``query``, which it has not joined by `fetch`."""
        self.fetch_key = key
        self.fetch_query = query
        self.max_joined_minimum = _ANY_VERSION
        self._fetches_joined = 1
        self._joined_minimum = 0

    def _join(self) -> None:
        single_flight = self.single_flight
        try:
            fetch = single_flight.fetch_for(self)
        except Overloaded as refused:
            self.take(refused)
            return
        if fetch.failure is not None and not self.put_aside():
            self.take(fetch.failure)
            return
        self._fetches_joined += 1
        self._joined_minimum = fetch.minimum
        single_flight.waiting += 1
        fetch.waiters.append(self)
        if not fetch.has_begun:
            fetch.begin()

    def drop(self) -> None:
        """End the wait, because nobody needs the answer any more."""
        self.take(Unavailable("nobody waits for this answer any more"))

    def finish(self, brought: Fetched | TaoError) -> None:
        """Take what the joined fetch brought, or join another one when it does not answer this query."""
        if isinstance(brought, TaoError):
            # No copy has the version that another waiter asked for; a fetch for this waiter's own version may succeed.
            if not isinstance(brought, StaleRead) or self._joined_minimum <= self.minimum:
                self.take(brought)
                return
            self.max_joined_minimum = self.minimum
        elif not self.minimum or answers(version_of(brought.value), self.minimum, brought.version_epoch):
            self.take(brought)
            return
        if self._fetches_joined > self.single_flight.settings.max_refetches:
            self.take(StaleRead(f"no copy within reach has version {self.minimum}; try again, or read critically"))
        elif self.gone:
            self.drop()
        else:
            self._join()


class SingleFlight:
    """The fetches under way for one cache, by key."""

    def __init__(
        self,
        cache: GraphCache,
        source: FetchSource,
        clock: Clock,
        list_limit: Callable[[int], int],
        settings: FillSettings,
    ) -> None:
        """``list_limit`` maps an association type to the most edges of a list that are cached and answered."""
        self.cache: Final = cache
        self.source: Final = source
        self.list_limit: Final = list_limit
        self.settings: Final = settings
        self.call_later: Final = asyncio.get_running_loop().call_later
        self._clock: Final = clock
        self._by_key: dict[Hashable, Fetch | LoneFetch] = {}
        self._all: set[Fetch | LoneFetch] = set()  # includes fetches that no further waiter joins
        self._recount_at = 0.0
        self.waiting = 0
        """Number of queries that wait for fetches, and of critical reads, which join none."""
        self.started = 0
        self.refetched = 0
        self.joined = 0

    @property
    def under_way(self) -> int:
        """Number of fetches under way, those included that no further waiter joins."""
        return len(self._all)

    def fetch_for(self, waiter: FetchWaiter) -> Fetch:
        """Return the fetch for the waiter to join, which may have yet to begin. Raises `Overloaded`."""
        if self.waiting >= self.settings.max_waiting:
            self.check_waiting()
        key = waiter.fetch_key
        fetch = self._by_key.get(key)
        if fetch is not None and fetch.minimum <= waiter.max_joined_minimum and self._may_join(fetch):
            self.joined += 1
            return fetch.opened() if isinstance(fetch, LoneFetch) else fetch
        if len(self._all) >= self.settings.max_fetches:
            raise Overloaded(f"{len(self._all)} fetches are under way, which is the bound; try again later")
        self._by_key[key] = fetch = Fetch(
            self, key, waiter.fetch_query, waiter.minimum, self.ticket(waiter.fetch_query)
        )
        self._all.add(fetch)
        self.started += 1
        return fetch

    def ticket_alone(self, key: Hashable, query: Query) -> FillTicket | None:
        """Return the ticket of a `LoneFetch`; None when there is another fetch of its key, or no room for one more."""
        settings = self.settings
        if key in self._by_key or self.waiting >= settings.max_waiting or len(self._all) >= settings.max_fetches:
            return None
        if isinstance(query, ObjectQuery):  # as `ticket`: most are, and each miss is one call less
            return self.cache.ticket("object", query.id, 0, self._clock.monotonic())
        return self.cache.ticket("list", query.id1, query.atype, self._clock.monotonic())

    def begin_alone(self, lone: LoneFetch) -> None:
        """Begin a fetch that has just been given its ticket, and ask the source."""
        self._by_key[lone.key] = lone
        self._all.add(lone)
        self.waiting += 1
        self.started += 1
        try:
            ticket, seconds = lone.ticket, self.settings.timeout_seconds
            shard = ticket.id >> SHARD_SHIFT
            # What fills the cache is nobody's: it has no caller.
            self.source.fetch(
                FetchRequest(lone.fetch_query, shard, ticket.floor, lone.take, seconds, False, None, lone.pause)
            )
        except Exception as error:
            # A bug must not leave a fetch that others join and that never finishes.
            _logger.exception("a fetch could not be started")
            lone.take(InternalError(f"{type(error).__name__} in a fetch; see the server's log"))

    def open(self, lone: LoneFetch, waiter: FetchWaiter) -> Fetch:
        """Return the fetch that a lone one becomes, for the waiter of its query."""
        fetch = Fetch(self, lone.key, lone.fetch_query, 0, lone.ticket)
        fetch.has_begun = True
        fetch.waiters.append(waiter)
        self._all.remove(lone)
        self._all.add(fetch)
        if self._by_key.get(lone.key) is lone:
            self._by_key[lone.key] = fetch
        return fetch

    def check_waiting(self) -> None:
        """Check that one more query may wait. Raises `Overloaded`."""
        if self.waiting >= self.settings.max_waiting:
            self._drop_gone_waiters()
        if self.waiting >= self.settings.max_waiting:
            raise Overloaded(f"{self.waiting} queries wait for fetches, which is the bound; try again later")

    def _drop_gone_waiters(self) -> None:
        """Forget the waiters that have given up on fetches which hang, so that they take no place from others."""
        now = self._clock.monotonic()
        if now < self._recount_at:
            return
        self._recount_at = now + _RECOUNT_SECONDS
        dropped: list[FetchWaiter] = []
        for fetch in [each.opened() if isinstance(each, LoneFetch) else each for each in [*self._all]]:
            left: list[FetchWaiter] = []
            for waiter in fetch.waiters:
                (dropped if waiter.gone else left).append(waiter)
            fetch.waiters = left
        self.waiting -= len(dropped)
        for waiter in dropped:
            waiter.drop()

    def _may_join(self, fetch: Fetch | LoneFetch) -> bool:
        """Return whether what the fetch brings may answer a query that missed after it began. A fetch from before a
        bulk invalidation may bring what was invalidated. Of a shard that is not open the cache keeps no version
        floors, so there each write that passes this server makes all earlier fetches invalid."""
        return not self.cache.is_invalid(fetch.ticket)

    def remove(self, fetch: Fetch | LoneFetch, waiters: int) -> None:
        """Forget a fetch that has ended, and that many waiters of it: no further waiter joins it."""
        self.waiting -= waiters
        self._all.remove(fetch)
        if self._by_key.get(fetch.key) is fetch:
            del self._by_key[fetch.key]

    def ticket(self, query: Query) -> FillTicket:
        """Return a fill ticket for the query. It must be taken before the source is asked."""
        now = self._clock.monotonic()
        if isinstance(query, ObjectQuery):
            return self.cache.ticket("object", query.id, 0, now)
        return self.cache.ticket("list", query.id1, query.atype, now)

    def store(self, ticket: FillTicket, query: Query, fetched: Fetched) -> Stored:
        """Store what was fetched under the ticket, if it may be kept."""
        # `caused_by` is not used: every fill comes by here, and its block would cost more than the events.
        recorder = self.cache.recorder
        before, recorder.cause = recorder.cause, fetched.origin
        try:
            cache, now = self.cache, self._clock.monotonic()
            if not fetched.keep:
                return cache.pass_over(ticket, fetched.value, fetched.version_epoch, now)
            if isinstance(query, ObjectQuery):
                return cache.store_object(ticket, fetched.value, fetched.version_epoch, now)
            if isinstance(query, CountQuery):
                return cache.store_count(ticket, fetched.value, fetched.version_epoch, now)
            if isinstance(query, RangeQuery) and not query.pos and query.limit <= self.list_limit(query.atype):
                return cache.store_list(ticket, fetched.value, fetched.version_epoch, now)
            return self._pass_over(ticket, query, fetched, now)
        finally:
            recorder.cause = before

    def _pass_over(self, ticket: FillTicket, query: Query, fetched: Fetched, now: float) -> Stored:
        # A part of a list that is not a prefix answers the query and is not kept. It is checked against the version
        # floor all the same, and its version raises the floor for the next reader.
        outcome = self.cache.pass_over(ticket, fetched.value, fetched.version_epoch, now)
        if outcome is not Stored.BELOW_FLOOR:
            self.raise_floor(query, version_of(fetched.value))
        return outcome

    def raise_floor(self, query: Query, version: int) -> None:
        """Record that the key has reached ``version``: an older entry is dropped."""
        now = self._clock.monotonic()
        if isinstance(query, ObjectQuery):
            self.cache.raise_object_floor(query.id, version, now)
        else:
            self.cache.raise_list_floor(query.id1, query.atype, version, now)


class Fetch:
    """One fetch of a key, over all of its attempts, and the waiters that it will answer."""

    __slots__ = ("_attempt", "_is_finished", "_single_flight", "failure", "has_begun", "key", "minimum", "query",
                 "ticket", "waiters")  # fmt: skip

    def __init__(
        self,
        single_flight: SingleFlight,
        key: Hashable,
        query: Query,
        minimum: int,
        ticket: FillTicket,
    ) -> None:
        self.key = key
        self.query = query
        self.minimum = minimum
        """The version that the waiter which started the fetch asked for."""
        self.ticket = ticket
        """The fill ticket of the latest attempt."""
        self.waiters: list[FetchWaiter] = []  # may become empty when all are gone
        self.has_begun = False
        self.failure: TaoError | None = None
        """Why the latest attempt failed that was followed by a pause; None: there was no pause."""
        self._is_finished = False
        self._single_flight = single_flight
        self._attempt = 0

    def begin(self) -> None:
        """Ask the source; in the last attempt critically."""
        self.has_begun = True
        single_flight = self._single_flight
        settings = single_flight.settings
        try:
            asked = FetchRequest(
                self.query,
                shard_of(self.query),
                max(self.minimum, self.ticket.floor),
                self.take,
                settings.timeout_seconds,
                self._attempt == settings.max_refetches,
                None,  # what fills the cache is nobody's
                self.pause,
            )
            single_flight.source.fetch(asked)
        except Exception as error:
            # A bug must not leave a fetch that others join and that never finishes.
            _logger.exception("a fetch could not be started")
            self._finish(InternalError(f"{type(error).__name__} in a fetch; see the server's log"))

    def pause(self, failure: TaoError) -> bool:
        """Put all waiters aside. Returns whether any is left to go on for."""
        self.failure = failure
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if waiter.put_aside():
                self.waiters.append(waiter)
            else:
                self._single_flight.waiting -= 1
                deliver(waiter.take, failure)
        return bool(self.waiters)

    def _begin_again(self) -> None:
        self.ticket = self._single_flight.ticket(self.query)
        self.begin()

    def take(self, fetched: Fetched | TaoError) -> None:
        """Take what an attempt has brought."""
        single_flight = self._single_flight
        pause_seconds, last = single_flight.settings.refetch_pause_seconds, single_flight.settings.max_refetches
        if isinstance(fetched, TaoError):
            if isinstance(fetched, Unavailable) and self._attempt == last > 0 and self.pause(fetched):
                # The master is gone, and not every server knows its successor yet: after a pause they do.
                single_flight.call_later(pause_seconds * 2**last, self._begin_again)
                self._attempt += 1
            else:
                self._finish(fetched)
        elif single_flight.store(self.ticket, self.query, fetched) is not Stored.BELOW_FLOOR:
            self._finish(fetched)
        else:
            single_flight.refetched += 1
            attempt = self._attempt = self._attempt + 1
            stale = StaleRead("the source keeps sending older data than is known here; try again, or read critically")
            if attempt == 1 <= last:
                self._begin_again()
            elif attempt > last or not self.pause(stale):
                self._finish(stale)
            else:
                single_flight.call_later(pause_seconds * 2 ** (attempt - 2), self._begin_again)

    def _finish(self, brought: Fetched | TaoError) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        waiters, self.waiters = self.waiters, []
        # Before any waiter is answered: one that needs another fetch must not join this one again.
        self._single_flight.remove(self, len(waiters))
        for waiter in waiters:
            deliver(waiter.finish, brought)


class _Course(msgspec.Struct, eq=False, kw_only=True):
    """How far a `LoneFetch` has come."""

    became: Fetch | None = None
    is_finished: bool = False


class LoneFetch(_Course, eq=False):
    """The first attempt of a fetch for one query, which asks for no version, while nobody else waits for it. It is a
    structure, which is made without a call of Python code. A structure cannot be an `ABC` as well; mypy checks all the
    same that each subclass which is made has the abstract methods."""

    minimum: ClassVar[int] = 0
    """As `Fetch.minimum`."""

    single_flight: SingleFlight
    key: Hashable
    fetch_query: Query
    ticket: FillTicket

    @abstractmethod
    def waiter(self) -> FetchWaiter:
        """Return the waiter of the query, as if it had joined a fetch from the start."""

    @abstractmethod
    def finish(self, fetched: Fetched | TaoError) -> None:
        """Take what was fetched and stored. It is called again, with an error, when it has raised."""

    def opened(self) -> Fetch:
        """Return the fetch that this one becomes or has become."""
        fetch = self.became
        if fetch is None:
            waiter = self.waiter()
            waiter.note_joined(self.key, self.fetch_query)
            fetch = self.became = self.single_flight.open(self, waiter)
        return fetch

    def pause(self, failure: TaoError) -> bool:
        """See `Fetch.pause`."""
        return self.opened().pause(failure)

    def take(self, fetched: Fetched | TaoError) -> None:
        """Take what the attempt has brought."""
        if self.is_finished:
            self.finish(fetched)  # the source calls once more, with an error, because the first call has raised
            return
        if self.became is None and not isinstance(fetched, TaoError):
            single_flight = self.single_flight
            if single_flight.store(self.ticket, self.fetch_query, fetched) is not Stored.BELOW_FLOOR:
                self.is_finished = True
                # Before the query is answered: when it needs another fetch, it must not join this one again.
                single_flight.remove(self, 1)
                self.finish(fetched)
                return
        self.opened().take(fetched)
