"""Costly work starts in its caller's share: what does not fit waits with its caller, and delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tao.access.document import load_access
from tao.model.errors import BudgetExceeded, DeadlineExceeded, InvalidArgument, NotMine, Overloaded, TaoError
from tao.observability.logs import logger
from tao.routing.fair_shares import MAX_DEBT_SECONDS, ShareSettings
from tao.serving.access import AccessControl
from tao.serving.shares import STARTS_OF_A_TURN, ShareOfWork, WorkShares, sharer_of
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.garbage import garbage_types
from tests.rigs.leader_rig import SCHEMA
from tests.rigs.pacing import ManualClock, until

HOG, HONEST = PeerIdentity("hog", "client"), PeerIdentity("honest", "client")
LEADER = PeerIdentity("leader-2", "leader")
SETTINGS = ShareSettings(write_cost=4, max_under_way=20, max_under_way_per_caller=12, max_waiting_per_caller=24)
DONE = pb.Answer(write=pb.WriteAnswer())


@dataclass
class Heard:
    """A `Reply` that keeps what is sent."""

    peer: PeerIdentity
    answers: list[pb.Answer] = field(default_factory=list)
    closed: bool = False

    def send(self, answer: pb.Answer) -> None:
        self.answers.append(answer)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Nobody leaves."""

    @property
    def reasons(self) -> list[str]:
        return [answer.error.reason for answer in self.answers]


class Writes:
    """A path whose requests a test answers, in shares."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.shares = WorkShares(SETTINGS)
        self.begun: list[tuple[pb.Request, Reply]] = []
        self._failure = failure
        self._handle = self.shares.sharing(self._path)

    def _path(self, request: pb.Request, reply: Reply) -> None:
        if self._failure is not None:
            raise self._failure
        self.begun.append((request, reply))

    def send(self, peer: PeerIdentity, writes: int = 1, deadline_ms: int = 60_000) -> Heard:
        heard = Heard(peer)
        request = pb.Request(deadline_ms=deadline_ms, write=pb.WriteBatch(writes=[pb.Write()] * writes))
        self._handle(request, heard)
        return heard

    def begun_of(self, peer: PeerIdentity) -> int:
        return sum(reply.peer == peer for _, reply in self.begun)

    def answer_first(self, more: bool = False) -> None:
        reply = self.begun[0][1]
        reply.send(pb.Answer(write=pb.WriteAnswer(), more=more))
        if not more:
            del self.begun[0]


async def test_one_caller_s_writes_wait_for_each_other_and_delay_no_other_caller() -> None:
    writes = Writes()
    for _ in range(9):
        writes.send(HOG)
    assert writes.begun_of(HOG) == 3
    writes.send(HONEST)
    assert writes.begun_of(HONEST) == 1
    with pytest.raises(Overloaded):
        writes.send(HOG)
    assert writes.shares.outcomes == {"started": 4, "waited": 6, "refused": 1}


async def test_a_write_that_has_its_last_answer_makes_room_for_the_next() -> None:
    writes = Writes()
    replies = [writes.send(HOG) for _ in range(4)]
    assert len(writes.begun) == 3
    writes.answer_first(more=True)
    assert len(writes.begun) == 3
    writes.answer_first()
    assert len(writes.begun) == 3
    assert writes.begun[-1][0].deadline_ms <= 60_000
    while writes.begun:
        writes.answer_first()
    assert [len(each.answers) for each in replies] == [2, 1, 1, 1]


async def test_a_write_that_waits_until_its_deadline_fails_and_never_begins() -> None:
    writes = Writes()
    for _ in range(3):
        writes.send(HOG)
    late = writes.send(HOG, deadline_ms=20)
    await until(lambda: late.answers)
    assert late.reasons == [DeadlineExceeded.reason]
    with pytest.raises(DeadlineExceeded):
        writes.send(HOG, deadline_ms=1)
    while writes.begun:
        writes.answer_first()
    assert len(late.answers) == 1


async def test_a_batch_larger_than_the_share_of_a_caller_begins_when_nothing_else_of_it_is_under_way() -> None:
    writes = Writes()
    writes.send(HOG)
    writes.send(HOG, writes=50)
    assert len(writes.begun) == 1
    writes.answer_first()
    assert len(writes.begun) == 1
    writes.answer_first()
    assert writes.begun == []


async def test_a_caller_that_has_gone_while_it_waited_writes_nothing() -> None:
    writes = Writes()
    replies = [writes.send(HOG) for _ in range(5)]
    replies[3].closed = True
    while writes.begun:
        writes.answer_first()
    assert [len(each.answers) for each in replies] == [1, 1, 1, 0, 1]


@pytest.mark.parametrize("failure", [NotMine("elsewhere", 3), RuntimeError("a bug")])
async def test_a_path_that_raises_at_once_raises_to_its_caller_and_takes_no_share(failure: Exception) -> None:
    writes = Writes(failure)
    for _ in range(20):
        with pytest.raises(type(failure)):
            writes.send(HOG)


@pytest.mark.parametrize(
    ("failure", "reason"), [(InvalidArgument("no"), "INVALID_ARGUMENT"), (RuntimeError("a bug"), "INTERNAL")]
)
async def test_a_path_that_raises_after_a_wait_is_answered_by_its_error(failure: Exception, reason: str) -> None:
    writes = Writes()
    for _ in range(3):
        writes.send(HOG)
    waited = [writes.send(HOG), writes.send(HOG)]
    writes._failure = failure
    writes.answer_first()
    assert [each.reasons for each in waited] == [[reason], [reason]]


def read_of(caller: str | None = None, *, critical: bool = True) -> pb.Request:
    return pb.Request(read=pb.ReadBatch(obj_ids=[1], critical=critical), caller=caller)


def test_a_leader_shares_among_the_callers_that_followers_name_whichever_follower_they_ask() -> None:
    first, second = (PeerIdentity(name, "follower", caller=f"follower/{name}") for name in ("a", "b"))
    shares = WorkShares(SETTINGS)
    begun: list[str] = []

    def ask(peer: PeerIdentity, caller: str) -> None:
        work = shares.reads(read_of(caller), peer, lambda items: begun.extend([caller] * items))
        shares.ask(work, 3)

    for peer in (first, second, first):
        ask(peer, "hog")
    assert begun == ["hog"] * 6, "each read costs two, and one caller may have twelve"
    ask(second, "honest")
    assert begun[6:] == ["honest"] * 3
    assert sharer_of(read_of(), first) == "follower/a"
    assert sharer_of(read_of("another"), HOG) == "client/hog", "a client names nobody"


def test_reads_with_long_answers_take_more_of_the_share_of_their_caller() -> None:
    shares = WorkShares(SETTINGS)
    costs: list[int] = []
    for _ in range(200):
        work = shares.reads(read_of(critical=False), HOG, lambda _: None)
        shares.ask(work, 1)
        shares.end_reads(work, 1, 6)
        costs.append(work.cost)
    assert (costs[0], costs[-1]) == (1, 6)
    assert shares.reads(read_of(), HOG, lambda _: None).cost == 12
    assert shares.reads(read_of(critical=False), HONEST, lambda _: None).cost == 1


async def test_what_leaders_ask_of_each_other_never_waits() -> None:
    assert sharer_of(pb.Request(caller="web"), LEADER) is None
    writes = Writes()
    for _ in range(30):
        writes.send(LEADER)
    assert writes.begun_of(LEADER) == 30
    assert writes.shares.outcomes["started"] == 0


async def test_thousands_of_items_that_end_at_once_do_not_recurse() -> None:
    shares = WorkShares(SETTINGS)
    ended: list[int] = []

    def start(items: int) -> None:
        ended.append(items)
        shares.end(work, items)

    work = ShareOfWork("a", 1, start)
    blocking = ShareOfWork("a", 12, lambda _: None)
    shares.ask(blocking, 1)
    for _ in range(24):
        shares.ask(work, 1)
    assert ended == []
    shares.end(blocking)
    assert ended == [1] * 24
    for _ in range(5_000):
        shares.ask(work, 1)
    assert len(ended) == 5_024


async def test_waiting_work_starts_over_several_turns_of_the_loop() -> None:
    shares = WorkShares(ShareSettings(max_under_way_per_caller=200, max_under_way_beside_others=200))
    started: list[int] = []
    blocking = ShareOfWork("a", 200, lambda _: None)
    shares.ask(blocking, 1)
    shares.ask(ShareOfWork("a", 1, started.append), 200)
    shares.end(blocking)
    turns = 0
    while len(started) < 200:
        assert len(started) <= STARTS_OF_A_TURN * (turns + 1)
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 200 // STARTS_OF_A_TURN


def test_an_error_of_overload_says_what_to_do() -> None:
    shares = WorkShares(SETTINGS)
    shares.ask(ShareOfWork("a", 12, lambda _: None), 1)
    error: TaoError | None = None
    try:
        shares.ask(ShareOfWork("a", 1, lambda _: None), 25)
    except Overloaded as refused:
        error = refused
    assert error is not None
    assert error.message.endswith("the bound is 24: send less at a time")


async def test_a_caller_has_several_large_batches_under_way() -> None:
    writes = Writes()
    writes.shares = WorkShares(ShareSettings(max_request_cost=4, max_under_way_per_caller=12))
    writes._handle = writes.shares.sharing(writes._path)
    for _ in range(5):
        writes.send(HOG, writes=100)
    assert len(writes.begun) == 3


# ---- budgets -------------------------------------------------------------------------------------------------------

RULES = """
format: 1
version: 1
roles:
  batch: {write: all, budget: {units_per_second: 100}}
callers: {batch: [batch]}
anonymous: [batch]
"""
FOLLOWER = PeerIdentity("a", "follower", caller="follower/a")


class Budgeted:
    """The shares of a server whose caller ``batch`` may cost 100 units a second, as callers without a name may."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        access = AccessControl(SCHEMA, logger("test"))
        access.use_document(load_access(RULES, "access.yaml"))
        self.shares = WorkShares(budgets=access, now=self.clock.monotonic)

    def seconds_to_wait(self, request: pb.Request | None = None, peer: PeerIdentity = FOLLOWER) -> int:
        """Return the whole seconds after which the caller may spend again."""
        for seconds in range(100):
            work = self.shares.writes(request or pb.Request(caller="batch"), peer, lambda _: None)
            try:
                self.shares.ask(work, 1)
            except BudgetExceeded:
                self.clock.now += 1
            else:
                self.shares.end(work)
                return seconds
        raise AssertionError("the budget is never paid for")

    def write(self, request: pb.Request) -> None:
        request.caller = "batch"
        work = self.shares.writes(request, FOLLOWER, lambda _: None)
        self.shares.ask(work, 1)
        self.shares.end_write(work)


def test_a_budget_is_charged_for_every_write_of_a_batch_and_every_pair_to_settle() -> None:
    for request in (
        pb.Request(write=pb.WriteBatch(writes=[pb.Write()] * 500)),
        pb.Request(settle_pairs=pb.SettlePairs(pairs=[pb.Pair()] * 300, shards=[pb.ShardPair()] * 200)),
    ):
        budgeted = Budgeted()
        budgeted.write(request)
        assert budgeted.seconds_to_wait() == 500 * 4 / 100 - 1


def test_a_debt_is_paid_for_within_a_minute() -> None:
    budgeted = Budgeted()
    budgeted.write(pb.Request(write=pb.WriteBatch(writes=[pb.Write()] * 10_000)))
    assert budgeted.seconds_to_wait() == MAX_DEBT_SECONDS - 1


def test_what_was_asked_for_is_charged_before_it_has_ended_and_given_back_where_it_cost_nothing() -> None:
    budgeted = Budgeted()
    work = budgeted.shares.reads(read_of("batch", critical=False), FOLLOWER, lambda _: None)
    budgeted.shares.ask(work, 512)
    with pytest.raises(BudgetExceeded):
        budgeted.shares.ask(work, 1)
    assert work.under_way + work.waiting == 512
    budgeted.shares.withdraw(work)
    budgeted.shares.end(work, work.under_way)
    assert budgeted.seconds_to_wait() == 0


def test_what_is_given_back_of_a_capped_charge_is_what_was_charged() -> None:
    budgeted = Budgeted()
    work = budgeted.shares.writes(
        pb.Request(write=pb.WriteBatch(writes=[pb.Write()] * 2_000), caller="batch"), FOLLOWER, lambda _: None
    )
    budgeted.write(pb.Request(write=pb.WriteBatch(writes=[pb.Write()] * 24)))
    budgeted.shares.ask(work, 1)
    budgeted.shares.end(work)
    late = budgeted.shares.writes(pb.Request(caller="batch"), FOLLOWER, lambda _: None)
    budgeted.shares.ask(late, 1)
    budgeted.shares.end_write(late)
    assert budgeted.seconds_to_wait() == 0
    budgeted.write(pb.Request(write=pb.WriteBatch(writes=[pb.Write()] * 25)))
    assert budgeted.seconds_to_wait() == 1, "the earlier debts are still there"


@pytest.mark.parametrize("critical", [False, True])
def test_a_read_that_turned_out_to_be_critical_is_charged_as_one(critical: bool) -> None:
    budgeted = Budgeted()
    work = budgeted.shares.reads(read_of("batch", critical=False), FOLLOWER, lambda _: None)
    budgeted.shares.ask(work, 300)
    for _ in range(300):
        budgeted.shares.end_reads(work, 1, 1, critical=critical)
    assert budgeted.seconds_to_wait() == (5 if critical else 2)


def test_a_call_without_a_name_that_is_passed_on_spends_the_budget_of_callers_without_one() -> None:
    budgeted = Budgeted()
    request = pb.Request(caller="", write=pb.WriteBatch(writes=[pb.Write()] * 500))
    work = budgeted.shares.writes(request, FOLLOWER, lambda _: None)
    budgeted.shares.ask(work, 1)
    budgeted.shares.end_write(work)
    assert budgeted.seconds_to_wait(pb.Request()) == 0, "what a follower asks for itself has no budget"
    assert budgeted.seconds_to_wait(pb.Request(caller="")) == 19


async def test_requests_that_end_leave_nothing_to_the_garbage_collector() -> None:
    writes = Writes()
    with garbage_types() as found:
        for _ in range(5):
            writes.send(HOG)
        assert writes.begun_of(HOG) == 3
        while writes.begun:
            writes.answer_first()
    assert not found.keys() & {"_SharedRequest", "ShareOfWork"}
