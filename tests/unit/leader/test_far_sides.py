"""The other side of a pair, written in the region that masters it: this region's caches of it hear of it before its
writer does, without waiting for replication (DESIGN §6, §8)."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tao.leader.ownership import Ownership, OwnershipSettings
from tao.leader.settling import SettlingLeaders
from tao.model.errors import ShardBlocked
from tao.model.graph import encode_object
from tao.model.rows import ShardRow
from tao.model.writes import Coordinator, SettleEdge
from tao.observability.logs import logger
from tao.routing.retry_budget import RetryBudget, RetrySettings
from tests.rigs.leader_rig import FRIEND, USER
from tests.rigs.memory_store import MemoryStore
from tests.unit.leader.test_elsewhere import CHANGES, ELSEWHERE, HERE, V1, Rig

COPY = SettleEdge(ELSEWHERE, FRIEND, HERE, present=True, time=1)


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    assert rig.tasks.errors == []
    await rig.tasks.close()


def settling(rig: Rig) -> SettlingLeaders:
    ownership = Ownership(
        "leader-east",
        MemoryStore(2),
        OwnershipSettings(),
        logger("test"),
        opened=lambda _: None,
        closed=lambda _: None,
        topology_version=lambda: 1,
        spawn=rig.tasks,
    )
    ownership.owned[0] = ShardRow(0, "db", 1, "leader-east", 1)
    budget = RetryBudget(RetrySettings(), rig.clock.monotonic())
    others = SettlingLeaders(rig.configuration, rig.links.as_links(), ownership, rig.clock, budget)
    others.elsewhere = rig.elsewhere
    return others


async def test_a_copy_made_in_another_region_is_in_this_one_s_leader_and_told_when_it_is_answered(rig: Rig) -> None:
    told = await settling(rig).settle(1, [COPY], Coordinator(0, 1), 5.0)
    assert told == [CHANGES]
    assert rig.west.writes == ["settle_edge"]
    assert rig.cache.object(ELSEWHERE) == encode_object(V1, USER, b"new")
    assert [part.messages for delivery in rig.told for part in delivery.shards] == [CHANGES]


async def test_a_copy_made_in_this_region_has_been_told_by_its_owner(rig: Rig) -> None:
    everything = Rig(shard_1_in="east")
    everything.links["leader-east"].handler = everything.west
    assert await settling(everything).settle(1, [COPY], Coordinator(0, 1), 5.0) == [CHANGES]
    assert everything.told == []


async def test_a_copy_that_was_refused_changes_nothing_here(rig: Rig) -> None:
    rig.west.fault = ShardBlocked("locked")
    with pytest.raises(ShardBlocked):
        await settling(rig).settle(1, [COPY], Coordinator(0, 1), 5.0)
    assert rig.cache.object(ELSEWHERE) is None
    assert rig.told == []
