"""Ids are reserved from a leader, another one takes the shard over, and both give out ids.

leader 1                         database                  leader 2 (its clock is behind)
reserves 10,000 ids:
  raises the time  →             reserved until 61 s
  first … first + 9,999
(paused)
                                 generation 2          ←   takes the shard over
                                                           asked for ids:
                                 reserved until 62 s   ←     begins above 61 s
resumes, does not know:
  gives out what it has left,
  below 61 s
needs more time  →               generation 2: refused
gives the shard up
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from tao.model.errors import NotMine
from tao.model.ids import MAX_RESERVED_IDS, RESERVED_AHEAD_MS, unix_ms_of
from tests.rigs.leader_rig import LeaderRig
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import ManualClock

BEHIND_SECONDS = 5.0


@dataclass
class Leaders:
    """Two leaders of one store."""

    store: MemoryStore
    one: LeaderRig
    two: LeaderRig
    clock: ManualClock


@pytest.fixture
async def leaders() -> AsyncIterator[Leaders]:
    store, clock, behind = MemoryStore(4), ManualClock(), ManualClock()
    behind.now -= BEHIND_SECONDS
    one = LeaderRig(store, store, clock=clock)
    two = LeaderRig(store, store, name="leader-2", clock=behind)
    await one.take(0)
    yield Leaders(store, one, two, clock)
    for rig in (one, two):
        await rig.close()
        assert rig.tasks.errors == []


async def test_a_successor_gives_out_none_of_the_reserved_ids(leaders: Leaders) -> None:
    first = await leaders.one.allocate(0, MAX_RESERVED_IDS)
    reserved_until = leaders.store.rows.reserved_times[0]
    await leaders.two.take(0)
    following = await leaders.two.allocate(0, 2_000)
    assert following >= first + MAX_RESERVED_IDS
    assert unix_ms_of(following) > reserved_until


async def test_a_former_owner_gives_out_what_it_has_left_and_nothing_more(leaders: Leaders) -> None:
    one, two = leaders.one, leaders.two
    await one.allocate(0, MAX_RESERVED_IDS)
    await leaders.two.take(0)
    following = await two.allocate(0, MAX_RESERVED_IDS)
    late = await one.allocate(0, MAX_RESERVED_IDS)
    assert late + MAX_RESERVED_IDS <= following
    leaders.clock.now += 2 * RESERVED_AHEAD_MS / 1000
    with pytest.raises(NotMine):
        await one.allocate(0)
    assert 0 not in leaders.one.ownership.owned


async def test_a_successor_accepts_the_ids_that_its_predecessor_gave_out(leaders: Leaders) -> None:
    first = await leaders.one.allocate(0, MAX_RESERVED_IDS)
    await leaders.two.take(0)
    await leaders.two.admit_id(first + MAX_RESERVED_IDS - 1)


async def test_a_leader_that_takes_its_shard_again_begins_above_itself(leaders: Leaders) -> None:
    first = await leaders.one.allocate(0, MAX_RESERVED_IDS)
    await leaders.one.take(0)
    assert await leaders.one.allocate(0) >= first + MAX_RESERVED_IDS
