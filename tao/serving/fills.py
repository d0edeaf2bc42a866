"""Misses: which flights answer a query, prefixes that grow, minimum versions (DESIGN.md §4, §5)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from tao.cache import GraphCache, Stored
from tao.model.errors import DeadlineExceeded, InternalError, Overloaded, StaleRead, TaoError, Unavailable
from tao.model.graph import version_of
from tao.model.ports import Clock
from tao.model.queries import EdgesQuery, Fetched, Query, RangeQuery, TimeRangeQuery, shard_of
from tao.serving.block_answers import answer_from_block, merge_edges, missing_id2s
from tao.serving.fill_source import FillSource, fetched
from tao.serving.flights import Asker, FillSettings, Flights

_logger = logging.getLogger(__name__)

_REFILLED: Final = {Stored.STORED: "kept", Stored.BELOW_FLOOR: "overtaken", Stored.NOT_KEPT: "not_kept"}


class Fills:
    """Answers what the cache could not, and keeps what comes."""

    def __init__(
        self,
        cache: GraphCache,
        source: FillSource,
        clock: Clock,
        list_limit: Callable[[int], int],
        settings: FillSettings,
        *,
        past_floors: bool = False,
    ) -> None:
        """``list_limit``: association type → most edges cached and answered. ``past_floors``: whoever asks here keeps
        nothing, and where nobody has what is known, gets what is committed."""
        self.flights: Final = Flights(cache, source, clock, list_limit, settings)
        self.list_limit: Final = list_limit
        self.past_floors: Final = past_floors
        self.incomplete = 0
        """Queries for more of a list than the part of it that was cached."""
        self.read_past_floors = 0
        """Queries answered with what is committed, because nobody had what was known."""
        self.refills: Final = dict.fromkeys(("kept", "overtaken", "not_kept", "failed"), 0)
        """What became of refills."""

    @property
    def least_prefix_edges(self) -> int:
        """See `FillSettings`."""
        return self.flights.settings.least_prefix_edges

    def answer(self, query: Query, minimum: int, asker: Asker, *, critical: bool) -> None:
        """``asker`` gets the encoded answer, at ``minimum`` version or later; older only when it was read under a later
        version epoch, so that nothing newer is left. Who asks bounds the time."""
        answering = _Answering(self, query, minimum, asker)
        if critical:
            answering.read_critically()
        else:
            answering.begin()

    async def refill(self, prefix: RangeQuery) -> bool:
        """Fetch a prefix for nobody, and keep it unless something newer is known by then. No flight: no reader joins it
        and waits for more edges than he asked for, and what was overtaken is not fetched again at once. Returns whether
        there is nothing to try again."""
        flights = self.flights
        ticket = flights.ticket(prefix)
        seconds = flights.settings.timeout_seconds
        try:
            found = await fetched(flights.source, prefix, ticket.floor, critical=False, timeout_seconds=seconds)
        except TaoError:
            self.refills["failed"] += 1
            return False
        stored = flights.store(ticket, prefix, found)
        self.refills[_REFILLED[stored]] += 1
        return stored is not Stored.BELOW_FLOOR


class _Answering:
    """One query on its way to its answer. ``_then``: what is done with the next thing that a flight brings."""

    __slots__ = (
        "_asker",
        "_attempts",
        "_fills",
        "_held",
        "_is_reading",
        "_minimum",
        "_query",
        "_stale",
        "_then",
        "_wanted_edges",
    )

    def __init__(self, fills: Fills, query: Query, minimum: int, asker: Asker) -> None:
        self._fills = fills
        self._query = query
        self._minimum = minimum
        self._asker = asker
        self._then: Callable[[_Answering, Fetched], None] = _Answering._give
        self._attempts = 0
        self._is_reading = False  # critically
        self._stale: StaleRead | None = None  # why what is known was not to be had

    @property
    def gone(self) -> bool:
        return self._asker.gone

    def begin(self) -> None:
        query = self._query
        if isinstance(query, RangeQuery):
            self._begin_range(query)
        elif isinstance(query, TimeRangeQuery):
            self._begin_time_range(query)
        elif isinstance(query, EdgesQuery):
            self._begin_edges(query)
        else:
            self._fly_for(query, _Answering._give)

    def take(self, answer: Fetched | TaoError) -> None:
        """What a flight has brought."""
        if not isinstance(answer, TaoError):
            self._then(self, answer)
        elif isinstance(answer, StaleRead) and self._fills.past_floors:
            if self._asker.gone:
                return
            # What is known here, or further up, nobody has: a commit, perhaps, that is in the binlog and waits for a
            # replica, which may be away. Who did not ask for it gets what is committed, and nothing of that is kept.
            self._stale = answer
            self._attempts = 0
            self.read_critically()
        else:
            self._asker.take(answer)

    def _fly_for(self, fill: Query, then: Callable[[_Answering, Fetched], None], *, alone: bool = False) -> None:
        self._then = then
        self._fills.flights.take_along(self, fill, self._minimum, alone=alone)

    def _take_prefix(self, found: Fetched) -> None:
        query = self._query
        assert isinstance(query, RangeQuery | TimeRangeQuery | EdgesQuery), "others need no prefix"
        answer = answer_from_block(found.value, query)
        if answer is not None:
            self._give_part(answer, found)
        elif self._asker.gone:
            return
        elif isinstance(query, RangeQuery):
            self._fly_for_range(query)  # the flight joined was for a shorter prefix; the next one is for ours
        elif isinstance(query, TimeRangeQuery):
            self._fly_for(query, _Answering._give)
        else:
            self._fly_for_rest(query, found.value, found.origin)

    def _give(self, found: Fetched) -> None:
        self._asker.take(found)

    def _give_part(self, part: bytes, of: Fetched) -> None:
        self._asker.take(Fetched(part, of.version_epoch, of.origin))

    # ---- critical reads --------------------------------------------------------------------------------------------

    def read_critically(self) -> None:
        """Joins no flight: the read must begin after this request arrived."""
        flights = self._fills.flights
        try:
            flights.check_waiting()
        except Overloaded as refused:
            self._asker.take(refused)
            return
        flights.waiting += 1
        self._is_reading = True
        seconds = flights.settings.timeout_seconds
        try:
            flights.source.fetch(self._query, self._minimum, self._take_read, critical=True, timeout_seconds=seconds)
        except Exception as error:
            # A bug must not leave a read that counts for ever.
            _logger.exception("a critical read could not be begun")
            self._take_read(InternalError(f"{type(error).__name__} in a fill; see the server's log"))

    def _take_read(self, answer: Fetched | TaoError) -> None:
        fills, flights = self._fills, self._fills.flights
        flights.waiting -= self._is_reading  # once, also when what follows breaks and this hears of that, too
        self._is_reading = False
        if isinstance(answer, TaoError):
            away = self._stale is not None and isinstance(answer, Unavailable | DeadlineExceeded)
            self._asker.take(self._stale if away and self._stale is not None else answer)
        elif answer.version_epoch >= flights.cache.version_epoch(shard_of(self._query)):
            flights.learn(self._query, version_of(answer.value))
            fills.read_past_floors += self._stale is not None
            self._asker.take(answer)
        else:
            flights.refetched += 1
            self._attempts += 1
            if self._attempts > flights.settings.max_refetches:
                message = "the shard has got another master while the last one was read; try again"
                self._asker.take(StaleRead(message))
            elif not self._asker.gone:
                pause_seconds = flights.settings.refetch_pause_seconds * 2 ** (self._attempts - 1)
                flights.call_later(pause_seconds, self.read_critically)

    # ---- ranges: by a prefix that is long enough -------------------------------------------------------------------

    def _begin_range(self, query: RangeQuery) -> None:
        wanted_edges = max(query.pos + query.limit, self._fills.least_prefix_edges) + 1
        held = self._held_block(query)
        if held is not None:
            self._fills.incomplete += 1
            wanted_edges = max(wanted_edges, 2 * int.from_bytes(held[16:20], "little"))
        self._wanted_edges = wanted_edges
        self._fly_for_range(query)

    def _fly_for_range(self, query: RangeQuery) -> None:
        bound = self._fills.list_limit(query.atype)
        if query.pos + query.limit > bound or self._attempts == self._fills.flights.settings.max_refetches:
            self._fly_for(query, _Answering._give, alone=True)
        else:
            self._attempts += 1
            self._fly_for(_prefix(query, min(self._wanted_edges, bound)), _Answering._take_prefix)

    # ---- time windows: by a first prefix when nothing is held, else by asking for exactly this ---------------------

    def _begin_time_range(self, query: TimeRangeQuery) -> None:
        if self._held_block(query) is None:
            wanted_edges = max(query.limit, self._fills.least_prefix_edges) + 1
            prefix = _prefix(query, min(wanted_edges, self._fills.list_limit(query.atype)))
            self._fly_for(prefix, _Answering._take_prefix)
        else:
            self._fills.incomplete += 1
            self._fly_for(query, _Answering._give)

    # ---- edges: those that a prefix cannot decide are asked for ----------------------------------------------------

    def _begin_edges(self, query: EdgesQuery) -> None:
        held = self._held_block(query)
        if held is None:
            wanted_edges = min(self._fills.least_prefix_edges + 1, self._fills.list_limit(query.atype))
            self._fly_for(_prefix(query, wanted_edges), _Answering._take_prefix)
        else:
            self._fills.incomplete += 1
            self._fly_for_rest(query, held, "memory")

    def _fly_for_rest(self, query: EdgesQuery, held: bytes, origin: str) -> None:
        cache = self._fills.flights.cache
        missing = missing_id2s(held, query)
        known = cache.edges(query.id1, query.atype, query.id2s, query.high, query.low, self._minimum)
        if known is not None and version_of(known.block) == version_of(held):
            missing = known.missing  # a membership filter may have denied some
            if not missing:
                self._asker.take(Fetched(known.block, cache.version_epoch(shard_of(query)), origin))
                return
        if len(missing) < len(query.id2s):
            self._held = held
            rest = EdgesQuery(query.id1, query.atype, missing, query.high, query.low)
            self._fly_for(rest, _Answering._take_rest)
        else:
            self._fly_for(query, _Answering._give)

    def _take_rest(self, found: Fetched) -> None:
        query = self._query
        assert isinstance(query, EdgesQuery)
        # No answer mixes two versions: what is held may have been behind, or have moved on in between.
        if version_of(found.value) == version_of(self._held):
            self._give_part(merge_edges(self._held, found.value, query), found)
        elif not self._asker.gone:
            self._fly_for(query, _Answering._give)

    def _held_block(self, query: RangeQuery | TimeRangeQuery | EdgesQuery) -> bytes | None:
        block = self._fills.flights.cache.peek_list(query.id1, query.atype)
        return block if block is not None and version_of(block) >= self._minimum else None


def _prefix(query: RangeQuery | TimeRangeQuery | EdgesQuery, limit: int) -> RangeQuery:
    return RangeQuery(query.id1, query.atype, 0, limit)
