"""Misses: the queries of a batch that the cache could not answer, from the batch to the answers.

The story of a miss, from top to bottom of this module:

1. `Misses.answer` is given the missed slots of a batch, and sets one timer for all of them.
2. `_MissedBatch` begins a few of them at a time, each as a `Miss`, within its caller's share (`tao.serving.shares`). It
   stops when the request's time is over or its caller is gone.
3. A `Miss` decides what to fetch: the query itself, or a prefix of its list that also answers later readers. It waits
   for that as `tao.serving.single_flight` describes, and fetches the rest if the prefix does not decide the query.
4. `tao.serving.miss_answers` collects what is ready within one tick of the loop, and sends it.

A caller may be gone before its misses are answered: then nothing more is begun for it, and the fetches under way are
left to the other queries that joined them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from math import inf
from typing import ClassVar, Final, NamedTuple, Protocol

from tao.cache.answers import edges_answer, merged_block, prefix_answer, range_answer
from tao.model.edge_block import header, mark_cut
from tao.model.errors import (
    AnswerFull,
    BudgetExceeded,
    DeadlineExceeded,
    InternalError,
    Overloaded,
    PermissionDenied,
    StaleRead,
    TaoError,
    Unavailable,
    WriteLost,
)
from tao.model.graph import EXISTS, EXISTS_NOT, version_of
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import CountQuery, EdgesQuery, Fetched, ObjectQuery, Query, RangeQuery, TimeRangeQuery, shard_of
from tao.model.versions import answers
from tao.routing.budgets import work_seconds
from tao.schema.registry import Schema
from tao.serving.access import AccessControl, ReadCheck, caller_of
from tao.serving.miss_answers import TOO_MANY_BYTES, BatchSettings, MissAnswers
from tao.serving.shares import WorkShares
from tao.serving.single_flight import FetchWaiter, LoneFetch, SingleFlight
from tao.serving.sources import FetchRequest, deliver, not_there_yet
from tao.wire.identity import PeerIdentity
from tao.wire.read_batch import MissedQueries, OperationSizes, id1s_of, operation_at
from tao.wire.session import Reply, failure
from tao.wire.v1 import session_pb2 as pb

_logger = logging.getLogger(__name__)

_WRITE_LOST: Final = (
    "the write that the token stands for was lost with the master database that had acknowledged it, before a replica "
    "had it: do it again, or read without the token"
)


def _unknown_staleness(_: int) -> float:
    return inf


def _pass_everything_on(_: int, __: PeerIdentity) -> TaoError | None:
    return None


def _always(_: int) -> bool:
    return True


class ReadPolicy(NamedTuple):
    """The reads that a server serves, by its role."""

    admit: Callable[[int], TaoError | None]
    """Return why this server does not serve a shard, or None."""

    staleness_ms: Callable[[int], float] = _unknown_staleness
    """Return how far a shard is behind its master here at most; infinite when that is unknown."""

    pass_on: Callable[[int, PeerIdentity], TaoError | None] = _pass_everything_on
    """Return why a critical read of a shard that this peer has sent is not passed on to another region, or None."""

    is_mastered_here: Callable[[int], bool] = _always
    """Return whether the master of a shard is in this region."""

    past_floors: bool = False
    """The callers keep nothing: when no copy has what is known here, they get what is committed."""

    access: AccessControl | None = None
    """What callers may read. None: everything."""

    bounds: BatchSettings = BatchSettings()


class Misses:
    """Answers the missed queries of all batches of a server."""

    def __init__(
        self,
        single_flight: SingleFlight,
        schema: Schema,
        policy: ReadPolicy,
        shares: WorkShares,
    ) -> None:
        self.shares: Final = shares
        self.single_flight: Final = single_flight
        self.schema = schema
        self.admit: Final = policy.admit
        self.staleness_ms: Final = policy.staleness_ms
        self.pass_on: Final = policy.pass_on
        self.is_mastered_here: Final = policy.is_mastered_here
        self.settings: Final = policy.bounds
        self.past_floors: Final = policy.past_floors
        self.failures = [0] * len(OperationSizes._fields)
        """Number of failed queries, by operation."""
        self.too_stale = 0
        """Number of queries that asked for fresher data than this server can prove to have."""
        self.incomplete = 0
        """Number of queries for more of a list than the cached part of it."""
        self.read_past_floors = 0
        """Number of queries answered with what is committed, because no copy had what was known here."""

    def answer(
        self,
        request: pb.Request,
        sizes: OperationSizes,
        missed: MissedQueries,
        reply: Reply,
        room: int,
        check: ReadCheck | None = None,
    ) -> None:
        """Answer these queries of the batch, now or later. ``room`` is how many bytes of values still fit the answer.
        ``check`` says what the caller may read; None: everything."""
        slots = missed.slots
        answers = MissAnswers(reply, len(slots), request.read.for_fill, self.settings, room)
        try:
            seconds = work_seconds(request.deadline_ms)
        except DeadlineExceeded as refused:
            answers.fail_rest(slots, refused)
        else:
            _MissedBatch(self, request, sizes, missed, reply, answers, check).begin(seconds)


class MissReceiver(Protocol):
    """The object that a `Miss` reports its answer to."""

    @property
    def gone(self) -> bool:
        """True when the answer is not needed any more."""

    @property
    def caller(self) -> str | None:
        """The caller for whom the query is read; None: a cache, for itself."""

    def take(self, miss: Miss | LoneMiss, answer: Fetched | TaoError) -> None:
        """Take the answer. It is called at most once for each miss."""

    def put_aside(self) -> bool:
        """Give the place of a miss back, because it pauses before another attempt. Returns False when it may not."""


class _MissedBatch:
    """The missed queries of one batch: a `MissReceiver`."""

    __slots__ = (
        "_answers",
        "_bytes_per_unit",
        "_check",
        "_critical",
        "_ended",
        "_ended_units",
        "_first_exists",
        "_for_fill",
        "_granted",
        "_is_beginning",
        "_is_over",
        "_max_staleness_ms",
        "_minimums",
        "_misses",
        "_open",
        "_queries",
        "_reply",
        "_shares",
        "_sizes",
        "_slots",
        "_timer",
        "_unasked",
        "_waiting",
        "_work",
        "caller",
    )

    def __init__(
        self,
        misses: Misses,
        request: pb.Request,
        sizes: OperationSizes,
        missed: MissedQueries,
        reply: Reply,
        answers: MissAnswers,
        check: ReadCheck | None,
    ) -> None:
        batch, slots = request.read, missed.slots
        self._misses: Final = misses
        self._check: Final = check
        self._queries: Final = missed.queries
        self._minimums: Final = missed.minimums
        self._sizes: Final = sizes
        self._first_exists: Final = sum(sizes) - sizes.exists  # the slot: the group is the last one
        self._slots: Final = slots
        self._reply: Final = reply
        self._answers: Final = answers
        self._critical: Final = batch.critical
        self._max_staleness_ms: Final = batch.max_staleness_ms
        self._for_fill: Final = batch.for_fill
        self._waiting = iter(slots)
        self._open = len(slots)
        self._unasked = len(slots)  # those that no share was asked for yet
        self._granted = 0  # those that may begin now
        self._ended = 0  # those whose places were not given back yet
        self._ended_units = 0  # what they have cost
        self._is_beginning = False
        self._is_over = False
        self._timer: asyncio.TimerHandle
        self._shares: Final = misses.shares
        self._bytes_per_unit: Final = misses.shares.settings.bytes_per_unit
        reads_master = batch.critical and any(misses.is_mastered_here(id1 >> SHARD_SHIFT) for id1 in id1s_of(batch))
        self._work: Final = misses.shares.reads(request, reply.peer, self._begin_some, reads_master=reads_master)
        self.caller: Final = caller_of(request, reply.peer)

    @property
    def gone(self) -> bool:
        return self._is_over or self._reply.closed

    def begin(self, seconds: float) -> None:
        """Begin, and fail what is not answered after so many seconds."""
        self._timer = self._misses.single_flight.call_later(seconds, self._expire)
        try:
            self._ask(min(self._unasked, self._misses.settings.max_misses_at_once))
        except Overloaded as refused:
            if len(self._slots) < sum(self._sizes):
                self._end(refused)
                return
            # No part of the batch is answered: one error for the whole costs a flood's server a hundredth.
            self._is_over = True
            self._timer.cancel()
            self._work.release()
            self._reply.send(failure(refused))

    def _ask(self, items: int) -> None:
        """Ask to begin so many misses more. Raises `Overloaded` for the first ones only."""
        self._unasked -= items
        self._shares.ask(self._work, items)

    def _begin_some(self, items: int) -> None:
        """Begin so many misses. A miss that is answered at once only grants this loop another one, so that thousands of
        them do not recurse."""
        self._granted += items
        if self._is_beginning:
            return
        self._is_beginning = True
        try:
            # A peer does not leave while misses are begun: that is another event of the loop.
            is_closed = self._reply.closed
            while self._granted and not (self._is_over or is_closed):
                slot = next(self._waiting)
                try:
                    self._begin_slot(slot)
                except TaoError as refused:
                    self._finish_slot(slot, refused)
                    self._ask_for_next()
                    self._shares.end(self._work)
                self._granted -= 1  # a miss that has begun ends its item itself
        except Exception as error:
            self._end(InternalError(f"{type(error).__name__} while reading; see the server's log"))
            raise
        finally:
            self._is_beginning = False
            unused, self._granted = self._granted, 0
            if unused:
                # Its peer is gone. The misses that still wait must not take places in the next turns.
                self._shares.withdraw(self._work)
                self._shares.end(self._work, unused)

    def _ask_for_next(self) -> None:
        """Ask to begin another miss, before one is noted as ended: a batch that has begun keeps its place. When the
        caller has spent its budget meanwhile, the rest of the batch fails with `BudgetExceeded`."""
        if self._unasked and not self.gone:
            try:
                self._ask(1)
            except BudgetExceeded as refused:
                unasked, self._unasked = self._unasked + 1, 0
                for slot in self._slots[-unasked:]:
                    self._finish_slot(slot, refused)

    def _begin_slot(self, slot: int) -> None:
        misses, check = self._misses, self._check
        query = next(self._queries)
        if self._answers.room <= 0:
            raise AnswerFull(TOO_MANY_BYTES)
        is_cut = False
        shard = (query.id if isinstance(query, ObjectQuery) else query.id1) >> SHARD_SHIFT
        refusal = misses.admit(shard)
        if refusal is None and check is not None:
            refusal = check.refuse(query, critical=self._critical)
        if refusal is not None:
            raise refusal
        if not isinstance(query, ObjectQuery):
            if isinstance(query, EdgesQuery) and not query.id2s:
                query = RangeQuery(query.id1, query.atype, 0, 0)
            limit = misses.schema.atype(query.atype).limit
            if isinstance(query, RangeQuery | TimeRangeQuery) and query.limit > limit:
                query, is_cut = _cut(query, limit), True
        critical, staleness_ms, minimum = self._critical, 0.0, 0
        if critical or self._max_staleness_ms:
            critical, staleness_ms = self._criticality(query, shard)
        if self._minimums:
            minimum = self._minimums.get(slot, 0)
        if critical or minimum or is_cut or not LoneMiss.begins(misses, self, query, slot):
            miss = Miss(misses, self, query, minimum, slot, is_cut=is_cut, staleness_ms=staleness_ms)
            miss.begin(critical=critical)

    def _criticality(self, query: Query, shard: int) -> tuple[bool, float]:
        """Return whether a query is read critically, and how far its shard is behind its master when it is for that.
        Raises why it may not be."""
        misses, check = self._misses, self._check
        critical, staleness_ms = self._critical, 0.0
        if self._max_staleness_ms and not critical:
            staleness_ms = misses.staleness_ms(shard)
            if staleness_ms > self._max_staleness_ms:
                misses.too_stale += 1
                if check is not None and (denied := check.refuse(query, critical=True)) is not None:
                    raise self._too_stale(shard, staleness_ms, denied)
                critical = True
            else:
                staleness_ms = 0.0
        if critical and (refusal := misses.pass_on(shard, self._reply.peer)) is not None:
            raise refusal
        return critical, staleness_ms

    def put_aside(self) -> bool:
        if not self._shares.put_aside(self._work):
            return False
        self._ask_for_next()
        return True

    def take(self, miss: Miss | LoneMiss, answer: Fetched | TaoError) -> None:
        """Put the answer of one miss into the batch's answer."""
        try:
            if not self._is_over:
                self._put(miss, answer)
        finally:
            was_set_aside = miss.is_set_aside
            if self._unasked and not was_set_aside:
                self._ask_for_next()
            if not self._work.has_share:
                # Give its place back: those of one tick of the loop together, unless they are of a rare kind.
                units = 1 if isinstance(answer, TaoError) else 1 + len(answer.value) // self._bytes_per_unit
                critical = self._critical or miss.staleness_ms > 0
                if critical or was_set_aside:
                    self._shares.end_reads(self._work, 1, units, critical=critical, was_set_aside=was_set_aside)
                else:
                    if self._open and not self._ended:
                        asyncio.get_running_loop().call_soon(self._end_reads)
                    self._ended += 1
                    self._ended_units += units
                    if not self._open:
                        self._end_reads()

    def _end_reads(self) -> None:
        ended, self._ended = self._ended, 0
        units, self._ended_units = self._ended_units, 0
        if ended:
            self._shares.end_reads(self._work, ended, units)

    def _put(self, miss: Miss | LoneMiss, answer: Fetched | TaoError) -> None:
        if isinstance(answer, TaoError):
            if miss.staleness_ms and isinstance(answer, Unavailable | DeadlineExceeded | PermissionDenied):
                answer = self._too_stale(shard_of(miss.query), miss.staleness_ms, answer)
        else:
            try:
                if miss.is_cut or self._check is not None:
                    answer = self._shown(miss, answer)
                # Compared once it is hidden: what the caller may not see is older than any minimum, as if it never was.
                # A cache that asks checks what its own readers asked for: its minimum is not a reader's write token.
                if miss.minimum and not self._for_fill and (version := version_of(answer.value)) < miss.minimum:
                    if answers(version, miss.minimum, answer.version_epoch):
                        raise WriteLost(_WRITE_LOST)
                    raise not_there_yet(miss.query, miss.minimum)
                if miss.slot >= self._first_exists:  # its list was read, and the version of that was compared
                    value = EXISTS if header(answer.value)[2] else EXISTS_NOT
                    answer = Fetched(value, answer.version_epoch, answer.origin)
                self._answers.add(miss.slot, miss.query, answer)
            except TaoError as refused:
                answer = refused
        if isinstance(answer, TaoError):
            self._finish_slot(miss.slot, answer)
        else:
            self._open -= 1
            if not self._open:
                self._finish()

    def _shown(self, miss: Miss | LoneMiss, answer: Fetched) -> Fetched:
        """Return the answer of a miss as its caller gets it. Raises `PermissionDenied`."""
        value, check = answer.value, self._check
        if miss.is_cut:
            value = mark_cut(value)
        elif check is not None and isinstance(miss.query, ObjectQuery):
            shown = check.shown(miss.query.id, value, critical=self._critical or miss.staleness_ms > 0)
            if isinstance(shown, TaoError):
                raise shown if self._critical else self._too_stale(shard_of(miss.query), miss.staleness_ms, shown)
            value = shown
        return answer if value is answer.value else Fetched(value, answer.version_epoch, answer.origin)

    def _finish_slot(self, slot: int, error: TaoError) -> None:
        self._misses.failures[operation_at(self._sizes, slot)] += 1
        self._answers.fail(slot, error)
        self._open -= 1
        if not self._open:
            self._finish()

    def _finish(self) -> None:
        self._timer.cancel()
        self._work.release()

    def _expire(self) -> None:
        self._end(DeadlineExceeded("not answered within the time that the request had left"))

    def _end(self, error: TaoError) -> None:
        self._is_over = True
        self._timer.cancel()
        self._shares.withdraw(self._work)
        self._work.release()
        self._answers.fail_rest(self._slots, error)

    def _too_stale(self, shard: int, staleness_ms: float, error: TaoError) -> StaleRead:
        behind = "an unknown time" if staleness_ms == inf else f"up to {staleness_ms / 1000:.1f} s"
        return StaleRead(
            f"shard {shard} is behind its master by {behind} here, max_staleness_ms is "
            f"{self._max_staleness_ms}, and the master could not be read: {error.message}"
        )


def _cut(query: RangeQuery | TimeRangeQuery, limit: int) -> Query:
    if isinstance(query, RangeQuery):
        return RangeQuery(query.id1, query.atype, query.pos, limit)
    return TimeRangeQuery(query.id1, query.atype, query.high, query.low, limit, query.start)


class Miss(FetchWaiter):
    """One missed query on its way to its answer.

    The answer is at ``minimum`` version or later; it is older only when it was read under a later version epoch, so
    that nothing newer is left. The receiver bounds the time.
    """

    __slots__ = (
        "_attempts",
        "_is_reading",
        "_known_block",
        "_misses",
        "_receiver",
        "_shard_epoch",
        "_stale",
        "_then",
        "_wanted_edges",
        "is_cut",
        "is_set_aside",
        "query",
        "slot",
        "staleness_ms",
    )

    def __init__(
        self,
        misses: Misses,
        receiver: MissReceiver,
        query: Query,
        minimum: int,
        slot: int,
        *,
        is_cut: bool = False,
        staleness_ms: float = 0.0,
    ) -> None:
        """``slot`` is the query's place in its batch. ``is_cut``: the query's limit was above that of the type.
        ``staleness_ms``: how far the shard is behind its master, if that is more than the batch accepts; else 0."""
        super().__init__(misses.single_flight, minimum)
        self._misses = misses
        self._receiver: MissReceiver | None = receiver
        self.query: Final = query
        self.slot: Final = slot
        self.is_cut: Final = is_cut
        self.is_set_aside = False
        self.staleness_ms: Final = staleness_ms
        self._then: Callable[[Miss, Fetched], None] = Miss._answer  # takes what the next fetch brings
        self._attempts = 0
        self._is_reading = False  # critically
        self._stale: StaleRead | None = None  # why no copy had what is known here
        self._wanted_edges: int
        self._known_block: bytes
        self._shard_epoch: int

    def begin(self, *, critical: bool) -> None:
        """Begin to fetch. ``critical``: read the master database, by a read that begins after this call."""
        query = self.query
        if critical:
            self._read_critically()
        elif isinstance(query, RangeQuery):
            self._begin_range(query)
        elif isinstance(query, TimeRangeQuery):
            self._begin_time_range(query)
        elif isinstance(query, EdgesQuery):
            self._begin_edges(query)
        else:
            self._fetch_then(query, Miss._answer)

    @property
    def gone(self) -> bool:
        receiver = self._receiver
        return receiver is None or receiver.gone

    def put_aside(self) -> bool:
        """See `FetchWaiter.put_aside`."""
        if not self.is_set_aside and self._receiver is not None:
            self.is_set_aside = self._receiver.put_aside()
        return self.is_set_aside or self._receiver is None

    def take(self, answer: Fetched | TaoError) -> None:
        """Take what a fetch has brought."""
        if not isinstance(answer, TaoError):
            self._then(self, answer)
        elif isinstance(answer, StaleRead) and self._misses.past_floors:
            if self.gone:
                self.drop()
                return
            # No copy has what is known here or further up. That may be a commit which is in the binlog and waits for a
            # replica that is away. A reader that did not ask for that version gets what is committed, and nothing of
            # that is kept.
            self._stale = answer
            self._attempts = 0
            self._read_critically()
        else:
            self._answer(answer)

    def note_prefix_asked(self, asked: Query) -> None:
        """Note that the first fetch is under way, which for a range is the prefix that is ``asked``."""
        if isinstance(asked, RangeQuery):
            self._wanted_edges = asked.limit
            self._attempts = 1
            self._then = Miss._take_prefix

    def _answer(self, answer: Fetched | TaoError) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.take(self, answer)

    def _fetch_then(self, query: Query, then: Callable[[Miss, Fetched], None], *, alone: bool = False) -> None:
        self._then = then
        self.fetch(query, alone=alone)

    def _take_prefix(self, found: Fetched) -> None:
        query = self.query
        assert isinstance(query, RangeQuery | TimeRangeQuery | EdgesQuery), "other queries need no prefix"
        answer = prefix_answer(found.value, query)
        if answer is not None:
            self._answer(Fetched(answer, found.version_epoch, found.origin))
        elif self.gone:
            self.drop()
        elif isinstance(query, RangeQuery):
            self._fetch_range(query)  # the joined fetch was for a shorter prefix
        elif isinstance(query, TimeRangeQuery):
            self._fetch_then(query, Miss._answer)
        else:
            self._fetch_missing_edges(query, found.value, found.origin)

    # ---- ranges: fetch a prefix that is long enough ----------------------------------------------------------------

    def _begin_range(self, query: RangeQuery) -> None:
        wanted_edges = max(query.pos + query.limit, self.single_flight.settings.min_prefix_edges) + 1
        cached = self._cached_block(query)
        if cached is not None:
            self._misses.incomplete += 1
            wanted_edges = max(wanted_edges, 2 * int.from_bytes(cached[16:20], "little"))
        self._wanted_edges = wanted_edges
        self._fetch_range(query)

    def _fetch_range(self, query: RangeQuery) -> None:
        limit = self.single_flight.list_limit(query.atype)
        if query.pos + query.limit > limit or self._attempts == self.single_flight.settings.max_refetches:
            self._fetch_then(query, Miss._answer, alone=True)
        else:
            self._attempts += 1
            self._fetch_then(_prefix(query, min(self._wanted_edges, limit)), Miss._take_prefix)

    # ---- time windows: fetch a first prefix when nothing is cached, else exactly the window ------------------------

    def _begin_time_range(self, query: TimeRangeQuery) -> None:
        is_cached = self._cached_block(query) is not None
        self._misses.incomplete += is_cached
        limit = self.single_flight.list_limit(query.atype)
        if is_cached or query.pos + query.limit > limit:
            self._fetch_then(query, Miss._answer)
        else:
            wanted_edges = max(query.pos + query.limit, self.single_flight.settings.min_prefix_edges) + 1
            self._fetch_then(_prefix(query, min(wanted_edges, limit)), Miss._take_prefix)

    # ---- edges: fetch those that a prefix does not decide ----------------------------------------------------------

    def _begin_edges(self, query: EdgesQuery) -> None:
        self._shard_epoch = self.single_flight.cache.shard_epoch(shard_of(query))
        cached = self._cached_block(query)
        if cached is None:
            single_flight = self.single_flight
            wanted_edges = min(single_flight.settings.min_prefix_edges + 1, single_flight.list_limit(query.atype))
            self._fetch_then(_prefix(query, wanted_edges), Miss._take_prefix)
        else:
            self._misses.incomplete += 1
            self._fetch_missing_edges(query, cached, "memory")

    def _fetch_missing_edges(self, query: EdgesQuery, held: bytes, origin: str) -> None:
        cache = self.single_flight.cache
        known = cache.edges(query.id1, query.atype, query.id2s, query.high, query.low, self.minimum)
        if known is None or version_of(known.block) != version_of(held):
            known = edges_answer(held, query.id2s, query.high, query.low)
        elif not known.missing:  # a membership filter may exclude some
            self._answer_edges(Fetched(known.block, cache.version_epoch(shard_of(query)), origin))
            return
        if known is not None and len(known.missing) < len(query.id2s):
            self._known_block = known.block
            rest = EdgesQuery(query.id1, query.atype, known.missing, query.high, query.low)
            self._fetch_then(rest, Miss._take_missing_edges)
        else:
            self._fetch_then(query, Miss._answer_edges)

    def _take_missing_edges(self, found: Fetched) -> None:
        query = self.query
        assert isinstance(query, EdgesQuery)
        # No answer mixes two versions: the held block may have been behind, or the list may have changed in between.
        if version_of(found.value) == version_of(self._known_block):
            merged = merged_block(self._known_block, found.value)
            self._answer_edges(Fetched(merged, found.version_epoch, found.origin, found.keep))
        elif self.gone:
            self.drop()
        else:
            self._fetch_then(query, Miss._answer_edges)

    def _answer_edges(self, found: Fetched) -> None:
        """Answer, and keep the answer for those who ask the same."""
        query = self.query
        assert isinstance(query, EdgesQuery)
        if found.keep:
            self.single_flight.cache.keep_edges(query, found.value, self._shard_epoch)
        self._answer(found)

    def _cached_block(self, query: RangeQuery | TimeRangeQuery | EdgesQuery) -> bytes | None:
        block = self.single_flight.cache.peek_list(query.id1, query.atype)
        return block if block is not None and version_of(block) >= self.minimum else None

    # ---- critical reads --------------------------------------------------------------------------------------------

    def _read_critically(self) -> None:
        """Read without joining a fetch: the read must begin after this request arrived."""
        single_flight = self.single_flight
        try:
            single_flight.check_waiting()
        except Overloaded as refused:
            self._answer(refused)
            return
        single_flight.waiting += 1
        self._is_reading = True
        seconds = single_flight.settings.timeout_seconds
        # Without a copy that is new enough, the master is read for this server: the reader needs no right to do that.
        caller = None if self._receiver is None or self._stale is not None else self._receiver.caller
        try:
            query, shard = self.query, shard_of(self.query)

            def on_pause(_: TaoError) -> bool:
                return self.put_aside()

            single_flight.source.fetch(
                FetchRequest(query, shard, self.minimum, self._take_critically, seconds, True, caller, on_pause)
            )
        except Exception as error:
            # A bug must not leave a read that is counted for ever.
            _logger.exception("a critical read could not be started")
            self._take_critically(InternalError(f"{type(error).__name__} in a fetch; see the server's log"))

    def _take_critically(self, answer: Fetched | TaoError) -> None:
        single_flight = self.single_flight
        # Counted down once, also when something below raises and this method is called again with that error.
        single_flight.waiting -= self._is_reading
        self._is_reading = False
        if isinstance(answer, TaoError):
            away = self._stale is not None and isinstance(answer, Unavailable | DeadlineExceeded)
            self._answer(self._stale if away and self._stale is not None else answer)
        elif answer.version_epoch >= single_flight.cache.version_epoch(shard_of(self.query)):
            single_flight.raise_floor(self.query, version_of(answer.value))
            self._misses.read_past_floors += self._stale is not None
            self._answer(answer)
        else:
            single_flight.refetched += 1
            self._attempts += 1
            if self._attempts <= single_flight.settings.max_refetches and self.gone:
                self.drop()
            elif self._attempts > single_flight.settings.max_refetches or not self.put_aside():
                self._answer(StaleRead("the shard's master was replaced during the read; try again"))
            else:
                pause_seconds = single_flight.settings.refetch_pause_seconds * 2 ** (self._attempts - 1)
                single_flight.call_later(pause_seconds, self._read_critically)


class LoneMiss(LoneFetch, eq=False):
    """A missed query of the usual kind: it asks for no version, and one fetch is expected to decide it, which nobody
    else waits for. Whatever turns out otherwise makes a `Miss` of it."""

    # What a `Miss` has, as its receiver sees it.
    is_cut: ClassVar[bool] = False
    is_set_aside: ClassVar[bool] = False
    minimum: ClassVar[int] = 0
    staleness_ms: ClassVar[float] = 0.0

    misses: Misses
    receiver: MissReceiver
    query: ObjectQuery | CountQuery | RangeQuery
    slot: int
    is_answered: bool = False

    @classmethod
    def begins(cls, misses: Misses, receiver: MissReceiver, query: Query, slot: int) -> bool:
        """Begin to fetch a query of the usual kind. Returns False for any other."""
        single_flight = misses.single_flight
        key: Hashable = query
        fetch_query: Query = query
        if isinstance(query, RangeQuery):
            wanted_edges, limit = query.pos + query.limit, single_flight.list_limit(query.atype)
            if wanted_edges > limit or single_flight.cache.peek_list(query.id1, query.atype) is not None:
                return False
            wanted_edges = max(wanted_edges, single_flight.settings.min_prefix_edges) + 1
            key, fetch_query = (query.id1, query.atype), _prefix(query, min(wanted_edges, limit))
        elif isinstance(query, ObjectQuery):
            key = query.id
        elif not isinstance(query, CountQuery):
            return False
        ticket = single_flight.ticket_alone(key, fetch_query)
        if ticket is None:
            return False
        single_flight.begin_alone(cls(single_flight, key, fetch_query, ticket, misses, receiver, query, slot))
        return True

    def waiter(self) -> Miss:
        """See `LoneFetch.waiter`."""
        miss = Miss(self.misses, self.receiver, self.query, 0, self.slot)
        miss.note_prefix_asked(self.fetch_query)
        return miss

    def finish(self, fetched: Fetched | TaoError) -> None:
        """See `LoneFetch.finish`."""
        query = self.query
        if isinstance(query, RangeQuery) and not isinstance(fetched, TaoError):
            answer = range_answer(fetched.value, query.pos, query.limit)
            if answer is None:
                self.is_answered = True  # by the waiter, once
                deliver(self.waiter().take, fetched)
                return
            fetched = Fetched(answer, fetched.version_epoch, fetched.origin)
        if not self.is_answered:
            self.is_answered = True
            self.receiver.take(self, fetched)


def _prefix(query: RangeQuery | TimeRangeQuery | EdgesQuery, limit: int) -> RangeQuery:
    return RangeQuery(query.id1, query.atype, 0, limit)
