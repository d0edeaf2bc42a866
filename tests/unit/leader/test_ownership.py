"""Ownership: taking, losing and retaking shards, and the database faults that it must survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.model.errors import DatabaseFull, InternalError, MasterReadOnly, NotMine, OutcomeUnknown, TaoError, Unavailable
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


async def test_wanted_shards_are_taken_and_others_given_up(rig: LeaderRig) -> None:
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
async def test_a_takeover_is_tried_again_after_any_failure(store: MemoryStore, rig: LeaderRig, fault: TaoError) -> None:
    store.take_faults.extend([fault] * 3)
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    assert not store.take_faults


async def test_a_shard_that_a_full_disk_keeps_from_being_taken_says_so_until_it_is_taken(
    store: MemoryStore, rig: LeaderRig
) -> None:
    store.take_faults.extend([DatabaseFull("the disk of db-1 is full")] * 3)
    rig.ownership.want((0,))
    await until(lambda: len(store.take_faults) < 3)
    with pytest.raises(DatabaseFull, match="db-1"):
        rig.ownership.row(0)
    await until(lambda: rig.ownership.complete)
    rig.ownership.lost(0)
    with pytest.raises(NotMine):
        rig.ownership.row(0)


async def test_a_shard_taken_by_another_is_noticed_without_a_write(store: MemoryStore, rig: LeaderRig) -> None:
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    store.take_faults.extend([Unavailable("away")] * 3)
    row = store.shards[0]
    store.shards[0] = type(row)(0, row.master_server, 1, "leader-2", row.generation + 1)
    await until(lambda: 0 not in rig.ownership.owned)
    assert not rig.cache.is_open(0)


async def test_an_unavailable_database_does_not_hide_the_answer_of_another(store: MemoryStore, rig: LeaderRig) -> None:
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


async def test_until_a_shard_is_taken_it_is_read_from_the_database_without_caching(
    store: MemoryStore, rig: LeaderRig
) -> None:
    """A new master accepts no takeover before it is opened, and the region that lost the old one has no other leader
    to ask."""
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


async def test_while_a_takeover_waits_for_a_replica_the_shard_is_read_from_the_database_without_caching(
    store: MemoryStore, rig: LeaderRig
) -> None:
    """A takeover is a commit, which waits for a replica to acknowledge it. While the only replica is unavailable, no
    region has another leader to ask."""
    rig.ownership.want((0,))
    await until(lambda: rig.ownership.complete)
    store.take_faults.extend([OutcomeUnknown("in COMMIT")] * 1_000_000)
    rig.ownership.retake(0)
    for _ in range(2):
        assert (await read(rig)).reason == ""
    assert len(store.reads) == 2, "each from the database"
    with pytest.raises(NotMine):
        rig.ownership.row(0)


async def test_a_shard_taken_by_another_leader_is_read_from_the_database_and_one_moved_by_the_topology_is_refused(
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
    """Return the reason of a read's error on shard 0, empty when it was answered."""
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
