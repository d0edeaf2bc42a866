"""Costly work starts in its caller's share: what does not fit waits with its caller, and delays no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from tao.model.errors import DeadlineExceeded, InvalidArgument, NotMine, Overloaded, TaoError
from tao.routing.fair_shares import ShareSettings
from tao.serving.shares import STARTS_OF_A_TURN, ShareOfWork, WorkShares, sharer_of
from tao.wire.identity import PeerIdentity
from tao.wire.session import Reply
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.pacing import until

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


def read_of(caller: str = "", *, critical: bool = True) -> pb.Request:
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
        shares.end_read(work, 5 * 4_096)
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
