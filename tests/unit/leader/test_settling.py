"""Mirrors at a leader that is just taking, or handing over, the shard (DESIGN §6, §9)."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from tao.leader import settling
from tao.leader.ownership import Ownership
from tao.leader.settling import SettlingLeaders
from tao.model.errors import DatabaseDown, NotMine, OutcomeUnknown, TaoError, Unavailable
from tao.model.writes import Coordinator, SettleEdge
from tao.peers.links import Links
from tao.serving.configuration import Configuration
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import FRIEND, make_id
from tests.rigs.pacing import ManualClock

SETTLE = SettleEdge(make_id(64, 1), FRIEND, make_id(64, 0), present=True, time=7)


class FakeLeaders:
    """The configuration and the links of a leader whose neighbour fails so often."""

    def __init__(self, faults: Sequence[TaoError]) -> None:
        self.faults = list(faults)
        self.asked = self.refreshed = 0
        self.routes = SimpleNamespace(
            version=1, leaders=lambda _: SimpleNamespace(home=lambda _: None), master_region=lambda _: "east"
        )

    async def refresh(self) -> None:
        self.refreshed += 1

    def to(self, _: object) -> FakeLeaders:
        return self

    async def ask(self, request: pb.Request, timeout_seconds: float) -> pb.Answer:
        assert timeout_seconds > 0
        self.asked += 1
        if self.faults:
            raise self.faults.pop(0)
        return pb.Answer(write=pb.WriteAnswer(results=[pb.WriteResult(found=True)]))


async def settle(faults: Sequence[TaoError], timeout_seconds: float = 5.0) -> FakeLeaders:
    fakes = FakeLeaders(faults)
    leaders = SettlingLeaders(
        cast(Configuration, fakes), cast(Links, fakes), cast(Ownership, SimpleNamespace(owned={})), ManualClock()
    )
    await leaders.settle(1, (SETTLE,), Coordinator(0, 1), timeout_seconds)
    return fakes


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


async def test_the_copy_is_given_up_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "_FIRST_PAUSE_SECONDS", 1.0)
    with pytest.raises(NotMine):
        await settle([NotMine("moving")], 0.5)
