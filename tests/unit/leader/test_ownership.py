"""Ownership: taking, losing, taking anew, and what faults of the database must not end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.model.errors import InternalError, MasterReadOnly, NotMine, OutcomeUnknown, TaoError, Unavailable
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until


@pytest.fixture
async def store() -> MemoryStore:
    return MemoryStore(4, lambda shard: "db-1" if shard < 2 else "db-2")


@pytest.fixture
async def rig(store: MemoryStore) -> AsyncIterator[LeaderRig]:
    rig = LeaderRig(store, store)
    rig.tasks(rig.ownership.take())
    rig.tasks(rig.ownership.check())
    yield rig
    assert rig.tasks.errors == [], "the loop that takes shards must survive everything"
    await rig.close()


async def test_what_is_wanted_is_taken_and_what_is_not_is_given_up(rig: LeaderRig) -> None:
    rig.ownership.want((0, 1))
    assert not rig.ownership.complete
    await until(lambda: rig.ownership.complete)
    assert rig.ownership.row(0).generation == 1
    rig.ownership.want((1,))
    assert list(rig.ownership.owned) == [1]
    assert not rig.cache.is_open(0)
    with pytest.raises(NotMine):
        rig.ownership.row(0)


@pytest.mark.parametrize("fault", [Unavailable("away"), OutcomeUnknown("in COMMIT"), InternalError("no row")])
async def test_a_takeover_that_fails_in_whatever_way_is_tried_again(
    store: MemoryStore, rig: LeaderRig, fault: TaoError
) -> None:
    store.take_faults.extend([fault] * 3)
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    assert not store.take_faults


async def test_a_shard_taken_by_another_is_noticed_without_a_write(store: MemoryStore, rig: LeaderRig) -> None:
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    store.take_faults.extend([Unavailable("away")] * 3)
    row = store.shards[0]
    store.shards[0] = type(row)(0, row.master_server, 1, "leader-2", row.generation + 1)
    await until(lambda: 0 not in rig.ownership.owned)
    assert not rig.cache.is_open(0)


async def test_a_database_that_is_away_does_not_hide_what_another_has_to_say(
    store: MemoryStore, rig: LeaderRig
) -> None:
    rig.ownership.want((0, 3))
    await until(lambda: rig.ownership.complete)
    store.ownership_faults["db-1"] = Unavailable("away")
    store.take_faults.extend([Unavailable("away")] * 1_000_000)
    row = store.shards[3]
    store.shards[3] = type(row)(3, row.master_server, 1, "leader-2", row.generation + 1)
    await until(lambda: 3 not in rig.ownership.owned)
    assert 0 in rig.ownership.owned


async def test_a_shard_of_unknown_outcome_is_served_again_only_under_a_new_generation(rig: LeaderRig) -> None:
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    rig.ownership.retake(0)
    assert not rig.cache.is_open(0)
    await until(lambda: rig.ownership.complete)
    assert rig.ownership.row(0).generation == 2


async def test_until_a_shard_is_taken_its_database_is_read_and_nothing_cached(
    store: MemoryStore, rig: LeaderRig
) -> None:
    """A new master takes no takeover before it is opened, and the region that has lost the old one asks nobody else."""
    store.take_faults.extend([MasterReadOnly("not opened yet")] * 1_000_000)
    rig.ownership.want((0,))
    for _ in range(2):
        assert (await read(rig)).reason == ""
    assert len(store.reads) == 2, "each from the database"
    with pytest.raises(NotMine):
        rig.ownership.row(0)
    store.take_faults.clear()
    await until(lambda: rig.ownership.complete)
    for _ in range(2):
        assert (await read(rig)).reason == ""
    assert len(store.reads) == 3, "cached"


async def test_while_a_takeover_waits_for_a_replica_the_database_is_read_and_nothing_cached(
    store: MemoryStore, rig: LeaderRig
) -> None:
    """A takeover is a commit, which waits for a replica to acknowledge it: for as long as the only one is away, no
    region has anybody else to ask."""
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    store.take_faults.extend([OutcomeUnknown("in COMMIT")] * 1_000_000)
    rig.ownership.retake(0)
    for _ in range(2):
        assert (await read(rig)).reason == ""
    assert len(store.reads) == 2, "each from the database"
    with pytest.raises(NotMine):
        rig.ownership.row(0)


async def test_what_another_has_taken_is_read_from_the_database_and_what_has_moved_away_not_at_all(
    store: MemoryStore, rig: LeaderRig
) -> None:
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    assert (await read(rig)).reason == ""
    store.take_faults.extend([OutcomeUnknown("in COMMIT")] * 1_000_000)
    rig.ownership.lost(0)
    for _ in range(2):
        assert (await read(rig)).reason == ""
    assert len(store.reads) == 3, "what was cached is forgotten"
    rig.ownership.want(())
    assert (await read(rig)).reason == NotMine.reason


async def read(rig: LeaderRig) -> pb.Error:
    """The error of a read of shard 0; without a reason when it was answered."""
    answers: list[pb.Answer] = []
    request = pb.Request(number=1, deadline_ms=5_000, read=pb.ReadBatch(obj_ids=[make_id(64)]))
    rig.reads.handle(request, MemoryReply(answers.append))
    await until(lambda: bool(answers))
    return answers[0].read.errors[0] if answers[0].read.errors else pb.Error()


async def test_a_takeover_that_ends_after_the_shard_moved_away_is_not_kept(store: MemoryStore, rig: LeaderRig) -> None:
    await store.lock((0,))
    rig.ownership.want((0,))
    await asyncio.sleep(0)
    rig.ownership.want(())
    await store.unlock((0,))
    await until(lambda: store.shards[0].generation == 1)
    await asyncio.sleep(0)
    assert rig.ownership.owned == {}
