"""Mirrors at a leader that is just taking, or handing over, the shard (DESIGN §6, §9)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tao.leader import settling
from tao.leader.inverse_path import InversePath
from tao.leader.other_leaders import Deposed, Undecided, unknown_of
from tao.leader.ownership import Ownership
from tao.leader.settling import SettlingLeaders
from tao.leader.write_path import Written
from tao.model.changes import ShardMessages
from tao.model.errors import DatabaseDown, Fenced, NotMine, OutcomeUnknown, TaoError, Unavailable
from tao.model.rows import IntentRow, ShardRow
from tao.model.writes import Coordinator, SettleEdge, WriteOutcome
from tao.peers.links import Links
from tao.routing.retry_budget import RetryBudget, RetrySettings
from tao.serving.configuration import Configuration
from tao.wire.convert import error_to_pb, shard_messages_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, make_id
from tests.rigs.pacing import ManualClock

SETTLE = SettleEdge(make_id(64, 1), FRIEND, make_id(64, 0), present=True, time=7)
CHANGES = ShardMessages(1, 1, ())


class FakeLeaders:
    """The configuration and the links of a leader whose neighbour is ``undecided`` so often, and then fails so."""

    def __init__(self, faults: Sequence[TaoError]) -> None:
        self.faults = list(faults)
        self.asked = self.refreshed = 0
        self.routes = SimpleNamespace(
            version=1,
            leaders=lambda _: SimpleNamespace(home=lambda _: SimpleNamespace(name="leader-2")),
            master_region=lambda _: "east",
        )
        self.owned = {0: ShardRow(0, "db", 1, "leader-1", 1)}
        self.gives_up_at = 0
        self.undecided = 0

    async def refresh(self) -> None:
        self.refreshed += 1
        if self.refreshed == self.gives_up_at:
            self.owned.clear()

    def to(self, _: object) -> FakeLeaders:
        return self

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        assert timeout_seconds > 0
        self.asked += 1
        if self.undecided:
            self.undecided -= 1
            error = error_to_pb(OutcomeUnknown("in COMMIT"))
            return pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(error=error)]))
        if self.faults:
            raise self.faults.pop(0)
        if request.HasField("settle_pairs"):
            return pb.Answer(settled_pairs=pb.SettledPairs(settled=1, changes=[shard_messages_to_pb(CHANGES)]))
        return pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(found=True)]))


async def settle(faults: Sequence[TaoError], timeout_seconds: float = 5.0) -> FakeLeaders:
    fakes = FakeLeaders(faults)
    await leaders_of(fakes).settle(1, (SETTLE,), Coordinator(0, 1), timeout_seconds)
    return fakes


def leaders_of(fakes: FakeLeaders, retries: RetrySettings | None = None) -> SettlingLeaders:
    ownership = cast(Ownership, SimpleNamespace(owned=fakes.owned, name="leader-1"))
    clock = ManualClock()
    budget = RetryBudget(retries or RetrySettings(), clock.monotonic())
    return SettlingLeaders(cast(Configuration, fakes), cast(Links, fakes), ownership, clock, budget)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_FIRST_PAUSE_SECONDS", 0.0)


async def test_a_shard_that_changes_hands_is_asked_for_again_by_a_fresh_topology() -> None:
    fakes = await settle([NotMine("moving"), Unavailable("restarting")])
    assert (fakes.asked, fakes.refreshed) == (3, 2)


@pytest.mark.parametrize("fault", [DatabaseDown("db-1"), OutcomeUnknown("the connection broke")])
async def test_what_asking_again_cannot_mend_is_told_at_once(fault: TaoError) -> None:
    with pytest.raises(type(fault)):
        await settle([fault])


async def test_a_leader_that_cannot_tell_what_became_of_its_commit_is_asked_again() -> None:
    """It takes the shard anew before anything else, so that its next answer is about both copies. Silence is not."""
    fakes = FakeLeaders([])
    fakes.undecided = 2
    await leaders_of(fakes).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert fakes.asked == 3


async def test_what_ends_the_asking_does_not_hide_that_an_earlier_copy_may_have_been_written() -> None:
    fakes = FakeLeaders([Unavailable("away")])
    fakes.undecided = 1
    with pytest.raises(Unavailable) as caught:
        await leaders_of(fakes, RetrySettings(burst=1, per_second=0)).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert isinstance(unknown_of(caught.value), Undecided)


async def test_a_shard_of_ones_own_is_settled_once_more_too_after_a_commit_of_unknown_outcome() -> None:
    fakes = FakeLeaders([])
    fakes.owned[1] = ShardRow(1, "db-2", 1, "leader-1", 1)
    leaders, faults = leaders_of(fakes), [OutcomeUnknown("in COMMIT")]

    async def write(settle: SettleEdge, deadline: float, *, sub_write: bool) -> tuple[Written, bool]:
        if faults:
            raise faults.pop()
        return Written(WriteOutcome(found=True), [CHANGES]), False

    leaders.here = cast(InversePath, SimpleNamespace(write=write))
    assert await leaders.settle(1, (SETTLE,), Coordinator(0, 1), 5.0) == [CHANGES]
    assert (fakes.asked, faults) == (0, [])


async def test_what_is_asked_again_is_paid_for_and_a_shard_that_changes_hands_is_not() -> None:
    fakes = FakeLeaders([Unavailable("away")] * 10)
    with pytest.raises(Unavailable):
        await leaders_of(fakes, RetrySettings(burst=2, per_second=0)).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert fakes.asked == 1 + 2
    moving = FakeLeaders([NotMine("moving")] * 10)
    await leaders_of(moving, RetrySettings(burst=2, per_second=0)).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert moving.asked == 1 + 10


async def test_the_copy_is_given_up_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_FIRST_PAUSE_SECONDS", 1.0)
    with pytest.raises(NotMine):
        await settle([NotMine("moving")], 0.5)


async def test_a_coordinator_that_finds_itself_deposed_by_a_fresh_topology_asks_no_further() -> None:
    fakes = FakeLeaders([Fenced("a higher generation"), Fenced("a higher generation")])
    fakes.gives_up_at = 2
    with pytest.raises(Deposed):
        await leaders_of(fakes).settle(1, (SETTLE,), Coordinator(0, 1), 5.0)
    assert (fakes.asked, fakes.refreshed) == (2, 2)


async def test_a_pair_is_handed_to_whoever_has_taken_its_shard_as_soon_as_he_has() -> None:
    fakes = FakeLeaders([NotMine("taking it"), Unavailable("restarting")])
    intent = IntentRow(SETTLE.id2, SETTLE.id1, (FRIEND,), 7, 0)
    assert await leaders_of(fakes).hand_over(intent, 5.0) == [CHANGES]
    assert fakes.asked == 3
    fakes.routes.leaders = lambda _: SimpleNamespace(home=lambda _: SimpleNamespace(name="leader-1"))
    with pytest.raises(Deposed):
        await leaders_of(fakes).hand_over(intent, 5.0)
