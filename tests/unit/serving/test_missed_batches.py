"""The misses of one batch: every one is answered once, whatever happens to its fetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from tao.cache import CacheSettings, GraphCache
from tao.model.errors import InvalidArgument, TaoError, Unavailable
from tao.model.queries import Fetched
from tao.routing.fair_shares import ShareSettings
from tao.serving.miss_answers import BatchSettings
from tao.serving.misses import Misses, ReadPolicy
from tao.serving.server import SchemaArenas
from tao.serving.shares import ShareOfWork, WorkShares
from tao.serving.single_flight import FillSettings, LoneFetch, SingleFlight
from tao.serving.sources import FetchRequest, OnPause, Take
from tao.wire.identity import PeerIdentity
from tao.wire.read_batch import OPERATIONS, OperationSizes, missed_queries
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.garbage import garbage_types
from tests.rigs.leader_rig import ARENAS, SCHEMA
from tests.rigs.pacing import ManualClock, until

VALUE = Fetched(b"\0" * 8 + b"value", 1, "database")


class Heard:
    """A `Reply` that keeps what is sent."""

    peer = PeerIdentity("", "")

    def __init__(self) -> None:
        self.answers: list[pb.Answer] = []
        self.closed = False

    def send(self, answer: pb.Answer) -> None:
        assert not self.is_whole, "an answer after the last one"
        self.answers.append(answer)

    def on_close(self, callback: object) -> None:
        """Nobody asks."""

    @property
    def is_whole(self) -> bool:
        return bool(self.answers) and not self.answers[-1].more

    @property
    def values(self) -> list[int]:
        return [slot for answer in self.answers for slot in answer.read.slots]

    @property
    def reasons(self) -> dict[int, str]:
        return {
            slot: error.reason
            for answer in self.answers
            for slot, error in zip(answer.read.failed_slots, answer.read.errors, strict=True)
        }


class CountingShares(WorkShares):
    """Shares that count the items that have ended without a read."""

    unused = 0

    def end(self, work: ShareOfWork, items: int = 1) -> None:
        self.unused += items
        super().end(work, items)


class EndedReads(WorkShares):
    """Shares that record how many reads have ended at a time, and what they have cost."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[tuple[int, int]] = []

    def end_reads(
        self, work: ShareOfWork, reads: int, units: int, *, critical: bool = False, was_set_aside: bool = False
    ) -> None:
        self.ended.append((reads, units))
        super().end_reads(work, reads, units, critical=critical, was_set_aside=was_set_aside)


class Asked:
    """A batch of so many objects, none of which is cached. ``now``: what is answered at once, others wait."""

    def __init__(
        self,
        slots: int,
        *,
        now: Callable[[int], Fetched | TaoError | None] = lambda slot: None,
        at_once: int = 512,
        deadline_ms: int = 60_000,
        admits: int = 10_000,
        shares: WorkShares | None = None,
        critical: bool = False,
        is_mastered_here: bool = True,
        caller: str = "",
    ) -> None:
        self.reply = Heard()
        self.reply.peer = PeerIdentity("client", "client", caller=caller)
        self._is_mastered_here = is_mastered_here
        self.waiting: dict[int, Take] = {}
        self.pauses: dict[int, OnPause] = {}
        self.begun: list[int] = []
        self.failures = [0] * len(OPERATIONS)
        self._slots = slots
        self._now = now
        self._admits, self._admitted = admits, 0
        self._settings = BatchSettings(max_misses_at_once=at_once)
        self.shares = shares or WorkShares()
        self._request = pb.Request(
            deadline_ms=deadline_ms, read=pb.ReadBatch(obj_ids=range(1, slots + 1), critical=critical)
        )

    def begin(self) -> Asked:
        settings = self._settings
        cache = GraphCache(CacheSettings(arena_bytes=ARENAS, credit_slots=1009), SchemaArenas(SCHEMA, ARENAS))
        single_flight = SingleFlight(cache, self, ManualClock(), lambda _: 100, FillSettings())
        policy = ReadPolicy(self._admit, is_mastered_here=lambda _: self._is_mastered_here, bounds=settings)
        misses = Misses(single_flight, SCHEMA, policy, self.shares)
        misses.failures = self.failures
        self.single_flight = single_flight
        sizes = OperationSizes(self._slots, 0, 0, 0, 0, 0)
        missed = missed_queries(self._request.read, sizes, range(self._slots))
        misses.answer(self._request, sizes, missed, cast(Reply, self.reply), settings.max_answer_bytes)
        return self

    def _admit(self, _: int) -> None:
        self._admitted += 1
        if self._admitted > self._admits:
            raise RuntimeError("nobody expects this")

    def has_given_up(self, slot: int) -> bool:
        """The miss in the slot waits for a fetch that it does not need any more."""
        fetch = self.single_flight._by_key[slot + 1]
        (waiter,) = (fetch.opened() if isinstance(fetch, LoneFetch) else fetch).waiters
        return waiter.gone

    def fetch(self, asked: FetchRequest) -> None:
        """See `FetchSource`."""
        slot = cast(Any, asked.query).id - 1
        self.begun.append(slot)
        self.pauses[slot] = asked.on_pause
        now = self._now(slot)
        if now is None:
            self.waiting[slot] = asked.take
        else:
            asked.take(now)


async def test_a_miss_that_is_not_answered_in_time_fails_and_is_given_up() -> None:
    asked = Asked(3, now=lambda slot: None if slot == 1 else VALUE, deadline_ms=20).begin()
    await until(lambda: asked.reply.is_whole)
    assert asked.reply.values == [0, 2]
    assert asked.reply.reasons == {1: "DEADLINE_EXCEEDED"}
    assert asked.has_given_up(1)
    asked.waiting[1](VALUE)
    assert asked.reply.values == [0, 2]


async def test_slots_that_were_not_started_fail_with_the_others() -> None:
    asked = Asked(3, at_once=1, deadline_ms=20).begin()
    await until(lambda: asked.reply.is_whole)
    assert asked.begun == [0]
    assert asked.reply.reasons == dict.fromkeys(range(3), "DEADLINE_EXCEEDED")


async def test_waiting_misses_are_started_after_the_answer_or_failure_of_another() -> None:
    asked = Asked(4, at_once=2).begin()
    assert asked.begun == [0, 1]
    asked.waiting[1](Unavailable("away"))
    assert asked.begun == [0, 1, 2]
    asked.waiting[2](VALUE)
    asked.waiting[0](VALUE)
    asked.waiting[3](VALUE)
    await until(lambda: asked.reply.is_whole)
    assert sorted(asked.reply.values) == [0, 2, 3]
    assert asked.reply.reasons == {1: "UNAVAILABLE"}
    assert asked.failures[0] == 1


@pytest.mark.parametrize("outcome", [VALUE, Unavailable("away")])
async def test_thousands_of_misses_that_are_answered_at_once_do_not_recurse(
    outcome: Fetched | TaoError,
) -> None:
    asked = Asked(5_000, now=lambda _: outcome, at_once=1).begin()
    await until(lambda: asked.reply.is_whole)
    assert len(asked.reply.values) + len(asked.reply.reasons) == 5_000


async def test_a_slot_is_answered_once_though_its_source_answers_twice() -> None:
    asked = Asked(3, at_once=1).begin()
    first = asked.waiting[0]
    first(VALUE)
    first(Unavailable("again"))
    assert asked.begun == [0, 1], "nor is another one begun in its place"
    asked.waiting[1](VALUE)
    asked.waiting[2](VALUE)
    await until(lambda: asked.reply.is_whole)
    assert asked.reply.values == [0, 1, 2]
    assert asked.reply.reasons == {}


async def test_no_further_miss_is_started_for_a_peer_that_is_gone() -> None:
    asked = Asked(3, at_once=1).begin()
    asked.reply.closed = True
    assert asked.has_given_up(0)
    asked.waiting[0](VALUE)
    assert asked.begun == [0]


async def test_the_waiting_misses_of_a_peer_that_is_gone_are_withdrawn_together() -> None:
    shares = CountingShares(ShareSettings(max_under_way_per_caller=2, max_waiting_per_caller=1_000))
    asked = Asked(500, shares=shares).begin()
    behind = Asked(1, shares=shares).begin()
    asked.reply.closed = True
    asked.waiting[0](VALUE)
    asked.waiting[1](VALUE)
    await until(lambda: behind.begun == [0])
    assert asked.begun == [0, 1]
    assert shares.unused <= 2
    behind.waiting[0](VALUE)
    assert behind.reply.values == [0]


async def test_an_unexpected_error_fails_the_whole_batch_and_is_raised() -> None:
    asked = Asked(4, admits=2)
    with pytest.raises(RuntimeError, match="nobody expects this"):
        asked.begin()
    assert asked.reply.is_whole
    assert asked.reply.reasons == dict.fromkeys(range(4), "INTERNAL")
    assert asked.has_given_up(0)


async def test_an_invalid_query_fails_alone() -> None:
    asked = Asked(2, now=lambda slot: VALUE if slot else InvalidArgument("no")).begin()
    await until(lambda: asked.reply.is_whole)
    assert asked.reply.values == [1]
    assert asked.reply.reasons == {0: "INVALID_ARGUMENT"}


async def test_misses_hold_their_share_until_their_fetch_has_ended_even_when_callers_are_gone() -> None:
    shares = WorkShares(ShareSettings(max_under_way_per_caller=3))
    first = Asked(3, deadline_ms=20, shares=shares).begin()
    await until(lambda: first.reply.is_whole)
    second = Asked(2, shares=shares).begin()
    assert second.begun == [], "the fetches of the first batch still hang"
    first.waiting[0](VALUE)
    await until(lambda: second.begun == [0])
    first.waiting[1](Unavailable("away"))
    first.waiting[2](VALUE)
    await until(lambda: second.begun == [0, 1])
    second.waiting[0](VALUE)
    second.waiting[1](VALUE)
    await until(lambda: second.reply.is_whole)
    third = Asked(3, now=lambda _: VALUE, shares=shares).begin()
    await until(lambda: third.reply.is_whole)


async def test_the_misses_of_one_turn_give_their_places_back_together_and_say_what_they_cost() -> None:
    shares = EndedReads()
    asked = Asked(4, shares=shares).begin()
    asked.waiting[0](Fetched(bytes(2 * shares.settings.bytes_per_unit), 1, "database"))
    asked.waiting[1](VALUE)
    assert shares.ended == []
    await until(lambda: shares.ended == [(2, 4)])
    asked.waiting[2](Unavailable("away"))
    asked.waiting[3](VALUE)
    assert shares.ended == [(2, 4), (2, 2)], "a batch that is answered waits for no further turn"


async def test_a_batch_beyond_what_its_caller_may_have_waiting_is_refused_as_a_whole() -> None:
    shares = WorkShares(ShareSettings(max_under_way_per_caller=2, max_waiting_per_caller=10))
    Asked(2, shares=shares).begin()
    refused = Asked(11, shares=shares).begin()
    (answer,) = refused.reply.answers
    assert (answer.more, answer.error.reason) == (False, "OVERLOADED")
    assert refused.begun == []


async def test_critical_reads_cost_more_than_misses() -> None:
    shares = WorkShares(ShareSettings(max_under_way_per_caller=6, critical_cost=2))
    critical = Asked(4, shares=shares, critical=True).begin()
    assert critical.begun == [0, 1, 2]
    critical.waiting[1](VALUE)
    assert critical.begun == [0, 1, 2, 3]


async def test_beside_others_few_critical_reads_of_masters_here_are_under_way_and_more_of_masters_elsewhere() -> None:
    shares = WorkShares(ShareSettings(critical_cost=2, max_master_reads_beside_others=4))
    Asked(1, shares=shares, caller="other").begin()
    here = Asked(9, shares=shares, critical=True, caller="hog").begin()
    assert here.begun == [0, 1]
    elsewhere = Asked(9, shares=shares, critical=True, is_mastered_here=False, caller="hog").begin()
    assert len(elsewhere.begun) == 9
    here.waiting[0](VALUE)
    assert here.begun == [0, 1, 2]


async def test_a_batch_that_has_begun_goes_on_though_its_caller_may_have_nothing_more_waiting() -> None:
    shares = WorkShares(ShareSettings(max_under_way_per_caller=2, max_waiting_per_caller=3))
    begun = Asked(5, at_once=2, shares=shares).begin()
    Asked(3, now=lambda _: VALUE, shares=shares).begin()
    refused = Asked(1, shares=shares).begin()
    assert refused.reply.answers[0].error.reason == "OVERLOADED"
    for slot in range(5):
        await until(lambda slot=slot: slot in begun.begun)  # type: ignore[misc]
        begun.waiting[slot](VALUE)
    await until(lambda: begun.reply.is_whole)
    assert begun.reply.reasons == {}


async def test_batches_that_end_leave_nothing_to_the_garbage_collector() -> None:
    shares = WorkShares(ShareSettings(max_under_way=20, max_under_way_per_caller=12, max_waiting_per_caller=24))
    answered, expires, refused = Asked(12, shares=shares), Asked(1, deadline_ms=100), Asked(30, shares=shares)
    with garbage_types() as found:
        answered.begin()
        refused.begin()
        for take in answered.waiting.values():
            take(VALUE)
        answered.waiting.clear()
        expires.begin()
        await until(lambda: expires.reply.is_whole)
        expires.waiting.pop(0)(VALUE)
    assert "OVERLOADED" in str(refused.reply.answers)
    assert answered.reply.is_whole
    assert not found.keys() & {"_MissedBatch", "ShareOfWork"}


@pytest.mark.parametrize("critical", [False, True])
async def test_misses_that_pause_leave_their_places_to_others_and_fail_at_once_when_they_are_too_many(
    critical: bool,
) -> None:
    shares = WorkShares(ShareSettings(critical_cost=1, max_under_way_per_caller=2, max_master_reads_beside_others=2))
    failing = Asked(4, at_once=2, shares=shares, critical=critical).begin()
    healthy = Asked(2, shares=shares).begin()
    assert (failing.begun, healthy.begun) == ([0, 1], [])
    away = Unavailable("away")
    assert failing.pauses[0](away)
    assert failing.pauses[0](away), "it has given its place back before"
    assert (failing.begun, healthy.begun) == ([0, 1], [0])
    assert failing.pauses[1](away)
    assert (failing.begun, healthy.begun) == ([0, 1], [0, 1])
    healthy.waiting[0](VALUE)
    healthy.waiting[1](VALUE)
    assert failing.begun == [0, 1, 2, 3]
    assert not failing.pauses[2](away), "as many are set aside as may be under way"
    brought: list[Fetched | TaoError] = [VALUE, VALUE, away, VALUE]
    for slot, answer in enumerate(brought):
        failing.waiting[slot](answer)
    await until(lambda: failing.reply.is_whole and healthy.reply.is_whole)
    assert sorted(failing.reply.values) == [0, 1, 3]
    assert failing.reply.reasons == {2: "UNAVAILABLE"}
    assert (shares._shares.under_way, shares._shares.set_aside, shares._shares.waiting) == (0, 0, 0)
