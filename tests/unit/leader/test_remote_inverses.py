"""Inverse edges at a leader that is just taking or handing over the shard, or that is in another region."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest

from tao.leader import remote_inverses
from tao.leader.inverse_path import InversePath
from tao.leader.ownership import Ownership, OwnershipSettings
from tao.leader.remote_inverses import (
    Copied,
    Deposed,
    LocalInverses,
    RemoteLeaders,
    RemoteOutcomeUnknown,
    unknown_outcome_of,
)
from tao.leader.write_path import Written
from tao.model.changes import ShardMessages
from tao.model.errors import DatabaseDown, Fenced, NotMine, OutcomeUnknown, ShardBlocked, TaoError, Unavailable
from tao.model.graph import encode_object
from tao.model.rows import IntentRow, ShardRow
from tao.model.writes import Coordinator, SettleEdge, Write, WriteOutcome
from tao.routing.budgets import RetryBudget, RetrySettings
from tao.serving.configuration import Configuration
from tao.wire.convert import error_to_pb, shard_messages_to_pb
from tao.wire.links import Links
from tao.wire.session import failure
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, USER, make_id
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock, Tasks
from tests.rigs.server_context import make_context
from tests.unit.leader.test_forwarded_writes import CHANGES as FORWARDED_CHANGES
from tests.unit.leader.test_forwarded_writes import ELSEWHERE, HERE, V1, Rig


class Leader(NamedTuple):
    """What a request needs to know of the leader that it is sent to."""

    name: str


SETTLE = SettleEdge(make_id(64, 1), FRIEND, make_id(64, 0), present=True, time=7)
CHANGES = ShardMessages(1, 1, ())


class FakeLeaders:
    """The configuration and the links of a leader whose neighbour answers ``undecided`` requests with an
    unknown outcome, and then raises the faults, one per request."""

    def __init__(self, faults: Sequence[TaoError]) -> None:
        self.faults = list(faults)
        self.asked = self.refreshed = 0
        self.in_background: list[bool] = []
        self.routes = SimpleNamespace(
            version=1,
            leaders=lambda _: SimpleNamespace(home=lambda _: Leader("leader-2")),
            master_region=lambda _: "east",
        )
        self.owned = {0: ShardRow(0, "db", 1, "leader-1", 1)}
        self.gives_up_at = 0
        self.waits: list[float] = []
        """The longest wait for each look for a newer topology, in seconds."""
        self.undecided = 0
        self.tasks = Tasks()

    async def refresh(self, seconds: float) -> None:
        self.refreshed += 1
        self.waits.append(seconds)
        if self.refreshed == self.gives_up_at:
            self.owned.clear()

    def to(self, _: object) -> FakeLeaders:
        return self

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        assert timeout_seconds > 0
        self.asked += 1
        self.in_background.append(request.write.background)
        if self.undecided:
            self.undecided -= 1
            error = error_to_pb(OutcomeUnknown("in COMMIT"))
            return pb.Answer(write=pb.WriteAnswer(slots=[0], results=[pb.WriteResult(error=error)]))
        if self.faults:
            raise self.faults.pop(0)
        if request.HasField("settle_pairs"):
            return pb.Answer(settled_pairs=pb.SettledPairs(settled=1, changes=[shard_messages_to_pb(CHANGES)]))
        return pb.Answer(write=pb.WriteAnswer(slots=[0], results=[pb.WriteResult(found=True)]))

    def send(self, request: pb.Request, timeout_seconds: float, on_answer: Callable[[pb.Answer], None]) -> None:
        async def answer() -> None:
            try:
                answered = await self.ask(request, timeout_seconds)
            except TaoError as error:
                answered = failure(error)
            on_answer(answered)

        self.tasks(answer())


async def settle(faults: Sequence[TaoError], timeout_seconds: float = 5.0) -> FakeLeaders:
    fakes = FakeLeaders(faults)
    await leaders_of(fakes).settle(1, (SETTLE,), Coordinator(0, 1), timeout_seconds)
    return fakes


@pytest.mark.parametrize("background", [False, True])
async def test_copies_in_the_background_are_no_sub_writes(background: bool) -> None:
    """A page of a node has hundreds of copies. If they took the room of sub-writes, which go before callers' writes,
    callers' writes would be refused."""
    fakes = FakeLeaders([])
    leaders = leaders_of(fakes)
    sub_writes: list[bool] = []

    async def write(_: Write, __: float, *, sub_write: bool = False) -> tuple[Written, bool]:
        sub_writes.append(sub_write)
        return Written(WriteOutcome()), False

    await leaders.settle(1, (SETTLE,), Coordinator(0, 1), 5.0, background=background)
    leaders.local = cast(LocalInverses, SimpleNamespace(write=write))
    fakes.owned[1] = fakes.owned[0]
    await leaders.settle(1, (SETTLE,), Coordinator(0, 1), 5.0, background=background)
    assert (fakes.in_background, sub_writes) == ([background], [not background])


def leaders_of(fakes: FakeLeaders, retries: RetrySettings | None = None) -> RemoteLeaders:
    ownership = cast(Ownership, SimpleNamespace(owned=fakes.owned, name="leader-1"))
    clock = ManualClock()
    budget = RetryBudget(retries or RetrySettings(), clock.monotonic())
    context = make_context(cast(Configuration, fakes), cast(Links, fakes), Tasks(), clock=clock, budget=budget)

    async def apply_changes(_: list[ShardMessages]) -> None:
        """Apply nothing: no cache of this region has the shards."""

    return RemoteLeaders(context, ownership, apply_changes)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_inverses, "_FIRST_PAUSE_SECONDS", 0.0)


async def test_a_request_for_a_shard_that_changes_hands_is_retried_with_a_fresh_topology() -> None:
    fakes = await settle([NotMine("moving"), Unavailable("restarting")])
    assert (fakes.asked, fakes.refreshed) == (3, 2)


async def test_no_request_waits_longer_for_a_topology_than_its_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """While etcd is silent, the topology cannot be read, and the other leader may have the shard all the same."""
    monkeypatch.setattr(remote_inverses, "_FIRST_PAUSE_SECONDS", 0.001)
    fakes = await settle([NotMine("moving"), Unavailable("restarting"), NotMine("moving")])
    assert (fakes.asked, fakes.waits) == (4, [0.001, 0.002, 0.004])


async def test_the_pauses_between_requests_do_not_outgrow_a_takeover(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a cut takeovers wait for the database for a second or more. Pauses that double miss their end by as much;
    the last one here would last for four seconds."""
    monkeypatch.setattr(remote_inverses, "_FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(remote_inverses, "_LONGEST_PAUSE_SECONDS", 0.002)
    fakes = await settle([NotMine("moving") for _ in range(12)], timeout_seconds=1.0)
    assert fakes.asked == 13


@pytest.mark.parametrize("fault", [DatabaseDown("db-1"), OutcomeUnknown("the connection broke")])
async def test_an_error_that_a_retry_cannot_help_is_returned_at_once(fault: TaoError) -> None:
    with pytest.raises(type(fault)):
        await settle([fault])


async def test_a_leader_that_does_not_know_its_commits_outcome_is_asked_again() -> None:
    """Such a leader takes the shard again before anything else, so its next answer covers both copies. No answer
    covers neither."""
    fakes = FakeLeaders([])
    fakes.undecided = 2
    await leaders_of(fakes).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert fakes.asked == 3


async def test_the_last_error_does_not_hide_that_an_earlier_copy_may_have_been_written() -> None:
    fakes = FakeLeaders([Unavailable("away")])
    fakes.undecided = 1
    with pytest.raises(Unavailable) as caught:
        await leaders_of(fakes, RetrySettings(burst=1, per_second=0)).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert isinstance(unknown_outcome_of(caught.value), RemoteOutcomeUnknown)


async def test_a_local_shard_is_also_settled_again_after_a_commit_of_unknown_outcome() -> None:
    fakes = FakeLeaders([])
    fakes.owned[1] = ShardRow(1, "db-2", 1, "leader-1", 1)
    leaders, faults = leaders_of(fakes), [OutcomeUnknown("in COMMIT")]

    async def write(settle: SettleEdge, deadline: float, *, sub_write: bool) -> tuple[Written, bool]:
        if faults:
            raise faults.pop()
        return Written(WriteOutcome(found=True), [CHANGES]), False

    leaders.local = cast(InversePath, SimpleNamespace(write=write))
    assert await leaders.settle(1, (SETTLE,), Coordinator(0, 1), 5.0) == Copied([CHANGES], [])
    assert (fakes.asked, faults) == (0, [])


async def test_retries_use_the_budget_except_while_a_shard_changes_hands() -> None:
    fakes = FakeLeaders([Unavailable("away")] * 10)
    with pytest.raises(Unavailable):
        await leaders_of(fakes, RetrySettings(burst=2, per_second=0)).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert fakes.asked == 1 + 2
    moving = FakeLeaders([NotMine("moving")] * 10)
    await leaders_of(moving, RetrySettings(burst=2, per_second=0)).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert moving.asked == 1 + 10


async def test_a_copy_is_given_up_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_inverses, "_FIRST_PAUSE_SECONDS", 1.0)
    with pytest.raises(NotMine):
        await settle([NotMine("moving")], 0.5)


async def test_a_coordinator_that_finds_itself_deposed_by_a_fresh_topology_stops_retrying() -> None:
    fakes = FakeLeaders([Fenced("a higher generation"), Fenced("a higher generation")])
    fakes.gives_up_at = 2
    with pytest.raises(Deposed):
        await leaders_of(fakes).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert (fakes.asked, fakes.refreshed) == (2, 2)


async def test_a_pair_is_handed_over_as_soon_as_the_new_owner_has_taken_its_shard() -> None:
    fakes = FakeLeaders([NotMine("taking it"), Unavailable("restarting")])
    intent = IntentRow(SETTLE.id2, SETTLE.id1, (FRIEND,), 7, 0)
    assert await leaders_of(fakes).hand_over(intent, 5.0) == [CHANGES]
    assert fakes.asked == 3
    fakes.routes.leaders = lambda _: SimpleNamespace(home=lambda _: SimpleNamespace(name="leader-1"))
    with pytest.raises(Deposed):
        await leaders_of(fakes).hand_over(intent, 5.0)


COPY = SettleEdge(ELSEWHERE, FRIEND, HERE, present=True, time=1)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.tasks.errors == []
    await rig.tasks.close()


def remote_leaders(rig: Rig) -> RemoteLeaders:
    ownership = Ownership(
        rig.context, OwnershipSettings(), MemoryStore(2), on_taken=lambda _: None, on_given_up=lambda _: None
    )
    ownership.owned[0] = ShardRow(0, "db", 1, "leader-east", 1)
    return RemoteLeaders(rig.context, ownership, rig.forwarded.apply_remote_changes)


async def test_a_copy_written_in_another_region_is_applied_and_published_in_this_region_before_it_returns(
    rig: Rig,
) -> None:
    messages = (await remote_leaders(rig).settle(1, [COPY], Coordinator(0, 1), 5.0)).messages
    assert messages == [FORWARDED_CHANGES]
    assert rig.west.writes == ["settle_edge"]
    assert rig.cache.object(ELSEWHERE) == encode_object(V1, USER, b"new")
    assert [part.messages for delivery in rig.deliveries for part in delivery.shards] == [FORWARDED_CHANGES]


async def test_a_copy_written_in_this_region_is_published_by_its_owner(rig: Rig) -> None:
    everything = Rig(shard_1_in="east")
    everything.links["leader-east"].handler = everything.west
    assert await remote_leaders(everything).settle(1, [COPY], Coordinator(0, 1), 5.0) == Copied([FORWARDED_CHANGES], [])
    assert everything.deliveries == []


async def test_a_refused_copy_changes_nothing(rig: Rig) -> None:
    rig.west.fault = ShardBlocked("locked")
    with pytest.raises(ShardBlocked):
        await remote_leaders(rig).settle(1, [COPY], Coordinator(0, 1), 5.0)
    assert rig.cache.object(ELSEWHERE) is None
    assert rig.deliveries == []
