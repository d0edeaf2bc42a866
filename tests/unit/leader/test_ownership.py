"""Ownership: taking, losing and retaking shards, and the database faults that it must survive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest

from tao.leader.ownership import OwnershipSettings
from tao.model.errors import (
    DatabaseFull,
    InternalError,
    MasterReadOnly,
    NotMine,
    OutcomeUnknown,
    Overloaded,
    TaoError,
    Unavailable,
)
from tao.model.rows import ShardRow
from tao.model.writes import AssocAdd
from tao.wire.convert import write_to_pb
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, LeaderRig, make_id
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


async def test_a_former_master_that_hangs_keeps_no_shard_from_being_taken_at_its_successor(
    store: MemoryStore, rig: LeaderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, resumed, take = asyncio.Event(), asyncio.Event(), store.take_ownership

    async def take_ownership(shards: Sequence[int], owner: str, *, timeout_seconds: float) -> dict[int, ShardRow]:
        if store.server_of(0) == "db-1":
            asked.set()
            await resumed.wait()
        return await take(shards, owner, timeout_seconds=timeout_seconds)

    rig.ownership.want((0, 1))
    await until(lambda: rig.ownership.complete)
    monkeypatch.setattr(store, "take_ownership", take_ownership)
    rig.ownership.retake(0)
    await asked.wait()
    monkeypatch.setattr(store, "server_of", lambda _: "db-1b")
    for shard in (0, 1):
        store.shards[shard] = msgspec.structs.replace(store.shards[shard], master_server="db-1b", version_epoch=2)
    rig.ownership.want((0, 1))
    assert rig.ownership.owned == {}, "its former master does not say that it has a successor"
    await until(lambda: rig.ownership.complete)
    assert {row.master_server for row in rig.ownership.owned.values()} == {"db-1b"}
    resumed.set()


async def test_nothing_is_asked_of_a_former_master_that_has_no_shard_any_more_when_its_takeover_has_its_turn(
    store: MemoryStore, rig: LeaderRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.ownership.want((0, 1))
    await until(lambda: rig.ownership.complete)
    store.takeovers.clear()
    monkeypatch.setattr(store, "server_of", lambda _: "db-1b")
    assert await rig.ownership._take("db-1", [0, 1], asyncio.Semaphore()) == []
    assert store.takeovers == []


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


@pytest.fixture
async def wide_store() -> MemoryStore:
    """200 shards of one database."""
    return MemoryStore(200)


@pytest.fixture
async def wide(wide_store: MemoryStore) -> AsyncIterator[LeaderRig]:
    rig = LeaderRig(wide_store, wide_store)
    rig.tasks(rig.ownership.take())
    rig.tasks(rig.ownership.check())
    yield rig
    assert rig.tasks.errors == []
    await rig.close()


async def test_many_shards_are_taken_in_few_transactions(wide_store: MemoryStore, wide: LeaderRig) -> None:
    wide.ownership.want(range(200))
    await until(lambda: wide.ownership.complete)
    assert [len(shards) for shards in wide_store.takeovers] == [64, 64, 64, 8]


async def test_a_locked_shard_is_taken_alone_and_delays_no_other(wide_store: MemoryStore, wide: LeaderRig) -> None:
    await wide_store.lock((5,))
    wide.ownership.want(range(100))
    await until(lambda: len(wide.ownership.owned) == 99)
    await until(lambda: len(wide_store.takeovers) == 3)
    assert wide_store.takeovers == [list(range(64)), list(range(64, 100)), [5]]
    await wide_store.unlock((5,))
    await until(lambda: wide.ownership.complete)


async def test_a_shard_that_the_database_rejects_keeps_no_other_from_being_taken(
    wide_store: MemoryStore, wide: LeaderRig
) -> None:
    wide_store.take_faults.extend([InternalError("table of shard 3 is empty"), InternalError("shard 0 too")])
    wide.ownership.want(range(10))
    await until(lambda: len(wide.ownership.owned) == 9)
    assert wide_store.takeovers == [list(range(10)), *([shard] for shard in range(10))]
    await until(lambda: wide.ownership.complete)


async def test_shards_of_a_database_that_is_away_are_tried_again_together(
    wide_store: MemoryStore, wide: LeaderRig
) -> None:
    wide_store.take_faults.append(Unavailable("away"))
    wide.ownership.want(range(10))
    await until(lambda: wide.ownership.complete)
    assert wide_store.takeovers == [list(range(10))] * 2


async def test_ownership_is_checked_a_bounded_number_of_shards_at_a_time(
    wide_store: MemoryStore, wide: LeaderRig
) -> None:
    wide.ownership.want(range(200))
    await until(lambda: wide.ownership.complete)
    wide_store.ownership_reads.clear()
    await until(lambda: len(wide_store.ownership_reads) >= 2)
    assert sorted(map(len, wide_store.ownership_reads[:2])) == [72, 128]


async def test_a_write_waits_for_the_takeover_of_its_shard_as_long_as_it_can(
    store: MemoryStore, rig: LeaderRig
) -> None:
    await store.lock((1,))
    rig.ownership.want((0, 1))
    late, patient = add_comment(rig, within_ms=50), add_comment(rig, within_ms=20_000)
    assert (await late).error.reason == NotMine.reason
    await store.unlock((1,))
    assert not (await patient).HasField("error")


async def test_a_bounded_number_of_writes_waits_for_one_takeover(store: MemoryStore) -> None:
    rig = LeaderRig(store, store, ownership=OwnershipSettings(max_waiting_per_shard=2))
    rig.ownership.want((1,))
    waiting = [add_comment(rig, within_ms=20_000) for _ in range(3)]
    assert (await waiting[2]).error.reason == Overloaded.reason
    rig.tasks(rig.ownership.take())
    for each in waiting[:2]:
        assert not (await each).HasField("error")
    await rig.close()


async def test_a_shard_that_cannot_be_checked_keeps_no_other_from_being_checked(
    wide_store: MemoryStore, wide: LeaderRig
) -> None:
    wide.ownership.want(range(200))
    await until(lambda: wide.ownership.complete)
    wide_store.unreadable.add(0)
    row = wide_store.shards[199]
    wide_store.shards[199] = row.taken_by("leader-2")
    wide_store.take_faults.extend([Unavailable("away")] * 1_000_000)
    await until(lambda: 199 not in wide.ownership.owned)


async def test_a_short_pool_is_not_asked_for_more_connections(wide_store: MemoryStore, wide: LeaderRig) -> None:
    wide_store.take_faults.append(Overloaded("no connection is free"))
    wide.ownership.want(range(10))
    await until(lambda: wide.ownership.complete)
    assert wide_store.takeovers == [list(range(10))] * 2


async def test_a_write_of_a_shard_that_moves_to_another_leader_waits_no_longer(
    store: MemoryStore, rig: LeaderRig
) -> None:
    await store.lock((1,))
    rig.ownership.want((1,))
    waiting = add_comment(rig, within_ms=20_000)
    await asyncio.sleep(0)
    rig.ownership.want((0,))
    assert (await waiting).error.reason == NotMine.reason
    await store.unlock((1,))


async def test_a_write_does_not_wait_for_a_shard_whose_disk_is_full(store: MemoryStore, rig: LeaderRig) -> None:
    store.take_faults.extend([DatabaseFull("the disk of db-1 is full")] * 1_000_000)
    rig.ownership.want((1,))
    assert (await add_comment(rig, within_ms=20_000)).error.reason == DatabaseFull.reason


def add_comment(rig: LeaderRig, within_ms: int) -> asyncio.Future[pb.WriteResult]:
    """Write an edge of shard 1."""
    result: asyncio.Future[pb.WriteResult] = asyncio.get_running_loop().create_future()
    write = write_to_pb(AssocAdd(make_id(64, 1), COMMENT, make_id(65, 1), 1, b""))
    request = pb.Request(number=1, deadline_ms=within_ms, write=pb.WriteBatch(writes=[write]))
    reply = MemoryReply(lambda answer: result.set_result(answer.write.results[0]), peer="near-1")
    rig.service.handle(request, reply)
    return result


async def test_a_takeover_that_ends_after_the_shard_moved_away_is_not_kept(store: MemoryStore, rig: LeaderRig) -> None:
    await store.lock((0,))
    rig.ownership.want((0,))
    await asyncio.sleep(0)
    rig.ownership.want(())
    await store.unlock((0,))
    await until(lambda: store.shards[0].generation == 1)
    await asyncio.sleep(0)
    assert rig.ownership.owned == {}
