"""Counters in a follower: additions are counted in memory, flushed to the leaders, and part of what is read here.

A follower acknowledges an addition from memory, and flushes the totals of a counter at most once in its
``flush_seconds``, whatever the rate of additions. A crash loses what was not flushed. While a leader cannot be reached
its shards pause, longer with each failure, and the totals wait. A flush of unknown outcome is followed by one that says
the same and more, so nothing is counted twice (`tao.planning.counters`)."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from operator import itemgetter
from typing import Final

from tao.cache import GraphCache
from tao.follower.counter_totals import CounterKey, CounterTotals, Flush, Held, Looks
from tao.model.counters import (
    LIFE_HORIZON_SECONDS,
    MAX_BY,
    clamped,
    decode_totals,
    slot_of_life,
)
from tao.model.edge_block import columns_of, header
from tao.model.errors import (
    AnswerFull,
    InvalidArgument,
    OperationTooOld,
    OutcomeUnknown,
    SettingsError,
    TaoError,
    TooLarge,
    Unavailable,
    UnknownType,
)
from tao.model.graph import MAX_ID2_SET
from tao.model.ids import SHARD_SHIFT, check_id
from tao.model.writes import FlushCounter
from tao.observability.metrics import Metrics
from tao.routing.budgets import work_seconds
from tao.schema.registry import Schema
from tao.schema.types import MAX_FLUSH_SECONDS, AssocType, CounterOptions
from tao.serving.access import OnBehalfOf
from tao.serving.configuration import ServerContext
from tao.serving.forward_path import ForwardPath, WriteResults, admitted_writes
from tao.serving.own_writes import OwnWrites
from tao.wire.convert import error_to_pb, flush_to_pb
from tao.wire.session import PassedReply, Reply, RequestHandler
from tao.wire.v1 import session_pb2 as pb

MAX_READ: Final = MAX_ID2_SET
"""Counters that one request reads, at most."""
_MAX_DECODED: Final = 20_000
"""Slots that one request decodes, which takes some ten milliseconds; what is beyond is answered as `AnswerFull`."""
_LOOKS_AT_ONCE: Final = 5_000
"""Counters and slots that one look for what is due looks at: a few milliseconds."""
_NO_OPERATOR: Final = OnBehalfOf(None)
_COUNTED: Final = pb.WriteResult(found=True)
OwnTotals = Mapping[int, tuple[int, int]]
"""What this follower has added and taken away of a counter, by slot."""
Addition = tuple[int, int, int]
"""The id of an object, the number of one of its counters, and what is added to it."""
_NUMBER: Final = itemgetter(1)


@dataclass(frozen=True, slots=True)
class CounterSettings:
    """What is counted in memory, and how it is flushed. How often is an option of each counter in the schema."""

    max_counters: int = 1_000_000
    """Counters in memory, of which each takes some 250 bytes. One stays until it is written and its life is over; when
    three quarters are taken, those that are written and had no addition for longest leave earlier. Additions to further
    ones are refused as `Overloaded`."""

    life_seconds: int = 21_600
    """How long this follower writes a counter to the same slot. Each slot stays for a day, and a counter that left the
    memory begins another. At most half a day."""

    tick_seconds: float = 0.1
    """Interval between two looks for what is due."""

    attempt_seconds: float = 4.0
    """Time limit for one attempt of a flush."""

    max_batch_flushes: int = 192
    """Counters in one batch."""

    max_batches: int = 8
    """Batches under way at a time, if the counters that are due together have one leader. Those of each further leader
    travel apart from them."""

    retry_seconds: float = 1.0
    """Pause of a shard after a failed flush. It doubles with each further one that began after the pause. It does not
    double while this follower stops."""

    max_retry_seconds: float = 60.0
    """Longest such pause."""

    drain_seconds: float = 5.0
    """Longest wait, when this follower stops, until everything is flushed. It begins with the stop, beside the wait for
    requests under way. The process ends its whole drain after 10 s."""

    def __post_init__(self) -> None:
        if not 0 < self.life_seconds <= LIFE_HORIZON_SECONDS // 2:
            raise SettingsError(f"counters.life_seconds is {self.life_seconds}; give 1 to {LIFE_HORIZON_SECONDS // 2}")
        if self.max_counters < 1 or self.max_batches < 1 or self.max_batch_flushes < 1:
            raise SettingsError("counters.max_counters, max_batches and max_batch_flushes must be at least 1")


class Counters:
    """The counters of one follower."""

    def __init__(
        self,
        context: ServerContext,
        settings: CounterSettings,
        cache: GraphCache,
        reads: RequestHandler,
        writes: ForwardPath,
        admit: Callable[[int], TaoError | None],
        staleness_ms: Callable[[int], float],
    ) -> None:
        """``reads`` answers reads of lists. ``writes`` makes flushes, and the other writes of batches. ``admit``: the
        reason why this follower does not serve a shard, or None. ``staleness_ms``: how far it may be behind."""
        self._settings: Final = settings
        self._cache: Final = cache
        self._reads: Final = reads
        self._path: Final = writes
        self._writes: Final = OwnWrites(context.name, context.clock, writes, settings.attempt_seconds)
        self._admit: Final = admit
        self._staleness_ms: Final = staleness_ms
        self._configuration: Final = context.configuration
        self._region: Final = context.region
        self._clock: Final = context.clock
        self._log: Final = context.log
        self._spawn: Final = context.spawn_as("flush of counters")
        self._totals: Final = CounterTotals(
            settings.max_counters, settings.life_seconds, self._new_slot, context.clock.monotonic()
        )
        self._schema: Schema | None = None
        self._known: dict[int, AssocType] = {}
        self._paused: dict[int, tuple[float, float]] = {}
        """Shard → until when its flushes pause, and the length of the next pause, in seconds."""
        self._under_way: Final = Counter[str]()
        """Batches under way, by leader."""
        self._failing: Final = set[str]()
        """Leaders that took nothing of their last batch: they get one at a time, and leave the others to the rest."""
        self._drains = False
        self._logged_lost = 0
        self._why_lost = ""
        self.added = self.flushed = self.failed = 0

    def _new_slot(self) -> int:
        return slot_of_life(self._clock.unix_ms() // 1000, secrets.randbits(32))

    def _types(self) -> dict[int, AssocType]:
        """Return the counters of the schema by number."""
        schema = self._configuration.schema
        if schema is not self._schema:
            self._schema = schema
            self._known = {each.number: each for each in schema.counters}
        return self._known

    # ---- additions -------------------------------------------------------------------------------------------------

    def are_in(self, request: pb.Request) -> bool:
        """Return whether a batch of writes has additions."""
        return bool(self._types()) and any(each.HasField("counter_add") for each in request.write.writes)

    def write(self, request: pb.Request, reply: Reply) -> None:
        """Count the additions of a batch, and forward its other writes. Raises `DeadlineExceeded` and `TooLarge` before
        anything is counted."""
        writes = request.write.writes
        deadline = self._clock.monotonic() + work_seconds(request.deadline_ms)
        results = WriteResults(reply, len(writes), want_changes=False)
        admitted = admitted_writes(self._configuration.access, request, reply.peer, results)
        # Another write has an empty addition, which names no type.
        rows = [(asked.id, asked.atype, asked.by) for asked in [write.counter_add for write in writes]]
        if len(admitted) < len(writes):
            rows = [rows[slot] for slot in admitted]
        added: dict[CounterKey, int] = {}
        wrong: dict[Addition, TaoError] = {}
        for row, times in Counter(rows).items():
            counted_id, number, by = row
            if not -MAX_BY <= by <= MAX_BY:
                wrong[row] = InvalidArgument(f"by is {by}; it must be -2^62 to 2^62")
            elif number:
                key = counted_id, number
                added[key] = added.get(key, 0) + by * times
        failed = self._add(added)
        if len(rows) == len(writes) and not wrong and not failed and all(map(_NUMBER, rows)):
            self.added += len(rows)
            reply.send(pb.Answer(write=pb.WriteAnswer(all_counted=True)))
            return
        others: list[int] = []
        for slot, row in zip(admitted, rows, strict=True):
            error = wrong.get(row) or failed.get((row[0], row[1]))
            if not row[1]:
                others.append(slot)
            elif error is not None:
                results.fail(slot, error)
            else:
                self.added += 1
                results.add(slot, _COUNTED)
        if others:
            self._path.forward(request, others, results, deadline, reply.peer)

    def _add(self, added: Mapping[CounterKey, int]) -> dict[CounterKey, TaoError]:
        """Count what was added to each counter. Return the errors of those to which nothing is added."""
        if self._drains:
            return dict.fromkeys(added, Unavailable("this follower stops, and counts no more: add at another one"))
        errors: dict[CounterKey, TaoError] = {}
        known, add, now = self._types(), self._totals.add, self._clock.monotonic()
        served: set[int] = set()
        for key, by in added.items():
            counted_id, number = key
            try:
                shard = check_id(counted_id) >> SHARD_SHIFT
                if shard not in served:
                    refusal = self._admit(shard)
                    if refusal is not None:
                        raise refusal
                    served.add(shard)
                if number not in known:
                    raise UnknownType(f"{number} is no counter of the schema")
                if by:
                    add(key, by, now)
            except TaoError as error:
                errors[key] = error
        return errors

    # ---- reads -----------------------------------------------------------------------------------------------------

    def get(self, request: pb.Request, reply: Reply) -> None:
        """Answer with the values of counters. Raises `InvalidArgument`, `TooLarge` or `UnknownType`."""
        asked = request.get_counters
        if len(asked.ids) != len(asked.atypes):
            raise InvalidArgument(f"get_counters has {len(asked.ids)} ids and {len(asked.atypes)} atypes: give pairs")
        if len(asked.ids) > MAX_READ:
            raise TooLarge(f"{len(asked.ids)} counters in one request; ask for at most {MAX_READ} at a time")
        if not asked.ids:
            reply.send(pb.Answer(counter_values=pb.CounterValues()))
            return
        types = [self._configuration.schema.counter(number) for number in asked.atypes]
        read = pb.Request(
            deadline_ms=request.deadline_ms,
            topology_version=request.topology_version,
            traceparent=request.traceparent,
            operator=request.operator,
        )
        if request.HasField("caller"):
            read.caller = request.caller
        read.read.range_id1s.extend(asked.ids)
        read.read.range_atypes.extend(asked.atypes)
        read.read.range_positions.extend([0] * len(types))
        read.read.range_limits.extend([each.limit for each in types])
        read.read.critical = asked.critical
        read.read.max_staleness_ms = asked.max_staleness_ms
        keys = zip(asked.ids, asked.atypes, strict=True)
        own = {key: totals for key in keys if (totals := self._totals.by_slot(key))}
        answer = partial(self._values, asked, types, own)
        self._reads.handle(read, _CounterReply(reply, len(types), answer))

    def _values(
        self,
        asked: pb.GetCounters,
        types: Sequence[AssocType],
        own: Mapping[CounterKey, OwnTotals],
        blocks: dict[int, bytes | pb.Error],
    ) -> pb.Answer:
        """Return the values. ``own``: what this follower had counted when the lists were asked for."""
        found = pb.CounterValues()
        decoded = 0
        for slot, (counted_id, atype) in enumerate(zip(asked.ids, types, strict=True)):
            block = blocks.get(slot)
            value: int | pb.Error = _UNANSWERED
            if isinstance(block, bytes):
                slots = header(block)[2]
                if not decoded or decoded + slots <= _MAX_DECODED:
                    decoded += slots
                    value = self._value(counted_id, atype, block, own.get((counted_id, atype.number), {}))
            elif block is not None:
                value = block
            if isinstance(value, int):
                found.values.append(value)
                behind_ms = 0.0 if asked.critical else self._staleness_ms(counted_id >> SHARD_SHIFT)
                found.max_behind_ms.append(-1 if behind_ms == inf else round(behind_ms + self._held_back_ms(atype)))
            else:
                found.values.append(0)
                found.max_behind_ms.append(-1)
                found.failed_slots.append(slot)
                found.errors.append(value)
        return pb.Answer(counter_values=found)

    def _value(self, counted_id: int, atype: AssocType, block: bytes, before: OwnTotals) -> int | pb.Error:
        """Return the sum of the slots. What this follower has counted itself is taken from its memory: the rows of its
        slots may be older, and say how much of them is counted in slot 0. ``before``: what was in memory when the list
        was asked for. It may have been written and have left the memory since, and the list lack it."""
        _, count, n, _ = header(block)
        if n < count:
            why = f"the counter has {count} slots, and {n} of them are read at most: do workers fold it?"
            return error_to_pb(TooLarge(f"{atype.name!r} of {counted_id} cannot be read: {why}"))
        own = {**before, **self._totals.by_slot((counted_id, atype.number))}
        value = sum(plus - minus for plus, minus in own.values())
        slots, _, data = columns_of(block)
        for slot, encoded in zip(slots, data, strict=False):
            totals = decode_totals(encoded)
            value += totals.value
            if slot in own:
                # Both are in the sum. Totals only grow, so the lower ones are older, and are taken out again.
                plus, minus = min(own[slot], (totals.plus, totals.minus), key=sum)
                value -= plus - minus
        return clamped(value)

    def _held_back_ms(self, atype: AssocType) -> float:
        """Return for how long another follower may hold an addition back while it reaches the leader: until the round
        that takes it, and for the attempt."""
        held_back = MAX_FLUSH_SECONDS if atype.counter is None else atype.counter.max_flush_seconds
        return (held_back + self._settings.tick_seconds + self._settings.attempt_seconds) * 1000

    # ---- flushes ---------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Flush what is due, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.tick_seconds)
            self.tick()

    def tick(self) -> None:
        """Begin to flush what is due now. The counters of one leader travel together. A leader that stops answering
        holds up the others for one attempt at most: afterwards it gets one batch at a time."""
        now = self._clock.monotonic()
        self._totals.renew(now)
        settings = self._settings
        room = (settings.max_batches - self._under_way.total()) * settings.max_batch_flushes
        looks, retried = Looks(_LOOKS_AT_ONCE), Counter[str]()
        by_leader: dict[str, list[Flush]] = {}
        is_wanted = partial(self._is_wanted, now, looks, retried)
        for each in self._totals.take_due(self._options, is_wanted, now, room, looks):
            by_leader.setdefault(self._leader_of(each.held.key[0] >> SHARD_SHIFT), []).append(each)
        for leader, flushes in by_leader.items():
            for start in range(0, len(flushes), settings.max_batch_flushes):
                self._begin(leader, flushes[start : start + settings.max_batch_flushes])
        self._log_lost()

    def _leader_of(self, shard: int) -> str:
        try:
            return self._configuration.routes.leaders(self._region).home(shard).name
        except TaoError:
            return ""  # the write path says why

    def _log_lost(self) -> None:
        """Log what was given up since the last look, in one line."""
        counters = self._totals.lost_counters - self._logged_lost
        if counters:
            self._logged_lost += counters
            reason = self._why_lost or "it has left the schema"
            self._log.error("counter_lost", counters=counters, lost_in_all=self._totals.lost, reason=reason)
            self._why_lost = ""

    async def drain(self) -> None:
        """Flush everything, within the time for that. Additions are refused from now on: one that came after the last
        flush would be lost."""
        self._drains = True
        self._paused.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_seconds):
                while self._totals.queued or self._under_way.total():
                    self.tick()
                    await asyncio.sleep(self._settings.tick_seconds / 10)
        if self._totals.queued or self._under_way.total():
            self._log.error("counters_not_flushed", counters=self._totals.queued)

    def _options(self, number: int) -> CounterOptions | None:
        found = self._types().get(number)
        if found is None or found.counter is None:
            return None
        return CounterOptions(0.0) if self._drains else found.counter

    def _is_wanted(self, now: float, looks: Looks, retried: Counter[str], held: Held, options: CounterOptions) -> bool:
        """Return whether a counter is flushed in this round. ``retried``: counters taken for leaders that fail."""
        shard = held.key[0] >> SHARD_SHIFT
        until, _ = self._paused.get(shard, (0.0, 0.0))
        if now < until or not self._is_due(now, looks, held, options):
            return False
        if self._failing and (leader := self._leader_of(shard)) in self._failing:
            if self._under_way[leader] or retried[leader] >= self._settings.max_batch_flushes:
                return False
            retried[leader] += 1
        return True

    def _is_due(self, now: float, looks: Looks, held: Held, options: CounterOptions) -> bool:
        if options.publish_share is None or now - held.waits_since >= MAX_FLUSH_SECONDS:
            return True
        block = self._cache.peek_list(*held.key)
        value = held.flushed  # what is known of it where nobody reads it
        if block is not None:
            looks.left -= header(block)[2]
            value = sum(decode_totals(each).value for each in columns_of(block)[2])
        return abs(held.plus - held.minus - held.flushed) >= options.publish_share * abs(value)

    def _begin(self, leader: str, flushes: Sequence[Flush]) -> None:
        self._under_way[leader] += 1
        try:
            self._spawn(self._flush(leader, flushes))
        except TaoError as error:  # too many tasks
            self._finish(leader, flushes, [error] * len(flushes))

    async def _flush(self, leader: str, flushes: Sequence[Flush]) -> None:
        writes = [pb.Write(flush_counter=flush_to_pb(_write_of(each))) for each in flushes]
        outcomes: Sequence[pb.WriteResult | TaoError] = [OutcomeUnknown("the flush was cut off")] * len(flushes)
        try:
            outcomes = await self._writes.make(writes, _NO_OPERATOR)
        finally:
            self._finish(leader, flushes, outcomes)

    def _finish(self, leader: str, flushes: Sequence[Flush], outcomes: Sequence[pb.WriteResult | TaoError]) -> None:
        self._under_way[leader] -= 1
        now = self._clock.monotonic()
        failures: dict[int, tuple[float, TaoError]] = {}
        for flush, outcome in zip(flushes, outcomes, strict=True):
            shard = flush.held.key[0] >> SHARD_SHIFT
            if not isinstance(outcome, TaoError):
                self.flushed += 1
                self._paused.pop(shard, None)
                self._totals.done(flush, now)
            elif isinstance(outcome, OperationTooOld):
                self._why_lost = outcome.message
                self._totals.refused(flush, now)
            else:
                self.failed += 1
                failures[shard] = flush.taken_at, outcome  # those of a batch are taken together
                self._totals.failed(flush)
        if all(isinstance(each, TaoError) and not isinstance(each, OperationTooOld) for each in outcomes):
            self._failing.add(leader)
        else:
            self._failing.discard(leader)
        for shard, (taken_at, error) in failures.items():
            self._pause(shard, error, taken_at, now)

    def _pause(self, shard: int, error: TaoError, taken_at: float, now: float) -> None:
        """Pause a shard. Flushes that were taken before its last pause ended fail for the same reason as those that
        made it pause: they are one failure."""
        settings = self._settings
        until, seconds = self._paused.get(shard, (0.0, settings.retry_seconds))
        if taken_at < until:
            return
        longest = settings.retry_seconds if self._drains else settings.max_retry_seconds
        self._paused[shard] = now + seconds, min(2 * seconds, longest)
        self._log.warning("counters_wait", shard=shard, seconds=seconds, reason=error.message)

    # ---- metrics and /stats ----------------------------------------------------------------------------------------

    def summary(self) -> dict[str, int]:
        """Return the figures for `/stats`."""
        return {
            "held": self._totals.held,
            "queued": self._totals.queued,
            "batches_under_way": self._under_way.total(),
            "added": self.added,
            "flushed": self.flushed,
            "failed": self.failed,
            "lost": self._totals.lost,
        }

    def register(self, metrics: Metrics) -> None:
        """Register the metrics."""
        metrics.gauge_family(
            "held_counters",
            "Counters in this follower's memory: all that were added to, and those of them that wait for a flush.",
            "kind",
            lambda: {"held": self._totals.held, "queued": self._totals.queued},
        )
        metrics.gauge_family(
            "counter_events_total",
            "Additions to counters that were counted in memory, flushes of one counter that were written, and that "
            "failed and are repeated. What was lost: the sum of what leaders take no more, because their shard could "
            "not be written for most of a day, or because this follower's clock is wrong, and of what was counted of "
            "counters that have left the schema.",
            "event",
            lambda: {
                "added": self.added,
                "flushed": self.flushed,
                "flush_failed": self.failed,
                "lost": self._totals.lost,
            },
        )


_UNANSWERED: Final = error_to_pb(AnswerFull("the counter was not answered: ask for fewer at a time"))


def _write_of(flush: Flush) -> FlushCounter:
    counted_id, counter = flush.held.key
    return FlushCounter(counted_id, counter, flush.held.life.slot, flush.number, flush.plus, flush.minus)


class _CounterReply(PassedReply):
    """The `Reply` of the read of the lists: it collects them, and sends the values."""

    def __init__(
        self, reply: Reply, queries: int, answer_of: Callable[[dict[int, bytes | pb.Error]], pb.Answer]
    ) -> None:
        super().__init__(reply)
        self._queries: Final = queries
        self._answer_of: Final = answer_of
        self._found: Final[dict[int, bytes | pb.Error]] = {}

    def send(self, answer: pb.Answer) -> None:
        """See `Reply.send`."""
        if answer.HasField("error"):
            self._reply.send(answer)
            return
        read = answer.read
        slots = read.slots or range(len(read.values))
        self._found.update(zip(slots, read.values, strict=True))
        for slot, error in zip(read.failed_slots, read.errors, strict=True):
            kept = pb.Error()
            kept.CopyFrom(error)  # the sender may change and reuse the message
            self._found[slot] = kept
        if not answer.more:
            self._reply.send(self._answer_of(self._found))
