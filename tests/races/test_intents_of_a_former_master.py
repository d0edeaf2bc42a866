"""A reader's token stands for inverse edges that were pending; their coordinator asks a server that was the master.

    reader            coordinator (its topology is old)   server "one", master until now    its successor
                                                          (stands still, or is cut off)      promoted, opened
                                                                                             a write leaves an intent,
                                                                                             and is acknowledged
    settle them   →   reads the intents          →        none
                                                          its lease ends
                      the check, behind them     →        the lease has ended
                      reads the topology, asks the successor                          →      the intent
                      settles the pair
                  ←   settled

Without the check the coordinator would find nothing to settle, and the reader a list without the edge.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from tao.model.changes import ShardMessages
from tao.model.errors import MasterReadOnly
from tao.model.rows import IntentRow
from tests.rigs.former_master import SERVER, SHARDS, A, B, FormerMaster
from tests.rigs.leader_rig import FRIEND, LeaderRig

INTENT = IntentRow(A, B, (FRIEND,), 1, 1)
SUCCESSOR = "two"
SOME_ATTEMPTS = 0.15
"""Seconds for settling: enough for a second attempt."""

pytestmark = pytest.mark.database


@dataclass
class Coordinator:
    """A leader that is asked to settle what is pending between the shards, and reads them at the former master."""

    former: FormerMaster
    leader: LeaderRig
    settled: list[IntentRow] = field(default_factory=list)
    successor_is_known: bool = False

    async def settle(self, seconds: float) -> None:
        await self.leader.inverses.settle_between(*SHARDS, seconds)

    async def settle_pair(self, intent: IntentRow, _: float) -> list[ShardMessages]:
        """Replaces `InversePath.settle_pair`."""
        self.settled.append(intent)
        return []

    async def refresh(self, _: float) -> bool:
        """Replaces `Configuration.refresh`."""
        if self.successor_is_known:
            # The successor is the same process here: what it is asked for is what it has since it was promoted.
            await self.former.name_master(SUCCESSOR, 3)
            await self.former.renew_lease()
            await self.former.write_intent(INTENT)
            self.former.master = SUCCESSOR
        return self.successor_is_known


@pytest.fixture
async def coordinator(former: FormerMaster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Coordinator]:
    leader = LeaderRig(former.writes, former.reads)
    made = Coordinator(former, leader)
    monkeypatch.setattr(leader.inverses, "settle_pair", made.settle_pair)
    monkeypatch.setattr(leader.configuration, "refresh", made.refresh)
    yield made
    await leader.close()


async def test_the_intents_of_the_master_are_all_that_is_pending(coordinator: Coordinator) -> None:
    await coordinator.settle(5)
    assert coordinator.settled == []
    await coordinator.former.write_intent(INTENT)
    await coordinator.settle(5)
    assert coordinator.settled == [INTENT]


@pytest.mark.parametrize("replaced", ["its lease has ended", "its rows name another", "it is the master again"])
async def test_a_master_that_was_replaced_behind_its_intents_is_not_believed(
    coordinator: Coordinator, replaced: str
) -> None:
    """The lock on the lease holds the check up, as a server that stands still between two statements does."""
    former = coordinator.former
    coordinator.successor_is_known = True
    await former.run("LOCK TABLES tao.lease WRITE", session=former.locker)
    settling = asyncio.ensure_future(coordinator.settle(30))
    await former.hold_check(settling)
    if replaced == "its lease has ended":
        await former.end_lease(former.locker)
    else:
        await former.name_master(SUCCESSOR if replaced == "its rows name another" else SERVER, 2)
        await former.run("UNLOCK TABLES", session=former.locker)
    await settling
    assert coordinator.settled == [INTENT], "the intent that only the successor has"


@pytest.mark.parametrize("replaced", ["its lease has ended", "its rows name another", "it is closed"])
async def test_nothing_is_called_settled_while_no_successor_is_known(coordinator: Coordinator, replaced: str) -> None:
    former = coordinator.former
    if replaced == "its lease has ended":
        await former.end_lease()
    elif replaced == "its rows name another":
        await former.name_master(SUCCESSOR, 2)
    else:
        await former.run("SET GLOBAL read_only = 1")
    with pytest.raises(MasterReadOnly):
        await coordinator.settle(SOME_ATTEMPTS)
    assert coordinator.settled == []
