"""The contract of every `WriteStore`: all or nothing, locks that end, ownership by generation."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest

from tao.model.edge_block import decode_block
from tao.model.edge_states import EdgeRegisters
from tao.model.errors import RetryableError, ShardBlocked
from tao.model.graph import Edge, EdgeKey, ListKey, decode_count
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import JobQuery, JobRow, JobState, PausedKind
from tao.model.queries import CountQuery, Query, RangeQuery
from tao.model.rows import ExistingRows, IntentKey, IntentRow, ListRow, ObjectRow, OldestEdges, RowChanges, WriteKeys
from tao.storage import writes
from tao.storage.names import schema_name
from tao.storage.result_packets import Row
from tao.storage.session import DatabaseSession
from tests.conformance.store.stores import (
    ARCHIVED,
    LIKES,
    LONG,
    NORMAL,
    SERVER,
    SHARDS,
    MakePools,
    Stores,
    list_of,
    new_id,
    version,
    write,
)
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = pytest.mark.database

HOSTILE = b"\x00'\"\\ %s \xff\xfe; --\n\x1a"


async def existing(stores: Stores, keys: WriteKeys) -> ExistingRows:
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
        _, rows = await transaction.lock_and_read(SHARDS, keys)
    return rows


async def test_what_was_committed_is_read_back_under_locks(stores: Stores) -> None:
    ids = [new_id(shard) for shard in SHARDS]
    changes = RowChanges()
    keys = WriteKeys()
    for id1 in ids:
        changes.put_objects.append(ObjectRow(id1, 3, version(1), False, HOSTILE))
        keys.objects.add(id1)
        for atype in (LIKES, LONG):
            changes.put_lists[ListKey(id1, atype)] = ListRow(2, version(1))
            for id2 in (7, 8):
                changes.put_edges[EdgeKey(id1, atype, id2)] = Edge(id2, 2**63 - 1, HOSTILE)
    intent = IntentRow(ids[0], ids[1], (LIKES, LONG), 4, 1234)
    changes.put_intents.append(intent)
    keys.edges |= set(changes.put_edges)
    keys.lists |= set(changes.put_lists)
    keys.intents.add(IntentKey(ids[0], ids[1]))
    assert await existing(stores, keys) == ExistingRows()
    await write(stores, changes, keys)
    assert await existing(stores, keys) == ExistingRows(
        objects={row.id: row for row in changes.put_objects},
        lists=changes.put_lists,
        edges=changes.put_edges,
        intents={IntentKey(ids[0], ids[1]): intent},
    )


async def test_registers_are_read_back_and_can_change_alone(stores: Stores) -> None:
    low = new_id()
    keys = WriteKeys(lists={ListKey(low, ARCHIVED), ListKey(low, LIKES)}, edges={EdgeKey(low, LIKES, 1)})
    keys.state_edges = {EdgeKey(low, NORMAL, id2): (NORMAL, ARCHIVED) for id2 in (1, 2)}
    first = list_of(low, ARCHIVED, [Edge(1, 1, HOSTILE), Edge(2, 2, b"")])
    first.put_registers = {
        EdgeKey(low, ARCHIVED, 1): EdgeRegisters(2, 2**63 - 1, 2**62, 1, HOSTILE),
        EdgeKey(low, ARCHIVED, 2): EdgeRegisters(2, 7, 0, 2, b""),
    }
    first.changed_unix_s = 1_700_000_000
    plain = list_of(low, LIKES, [Edge(1, 1, b",")])
    await write(stores, first)
    await write(stores, plain)
    lists = {**first.put_lists, **plain.put_lists}
    edges = {**first.put_edges, **plain.put_edges}
    assert await existing(stores, keys) == ExistingRows(lists=lists, edges=edges, registers=first.put_registers)
    second = RowChanges(
        put_registers={EdgeKey(low, ARCHIVED, 1): EdgeRegisters(2, 2**63 - 1, 2**63 - 1, 1, HOSTILE)},
        changed_unix_s=1_700_000_001,
    )
    await write(stores, second)
    registers = {**first.put_registers, **second.put_registers}
    assert await existing(stores, keys) == ExistingRows(lists=lists, edges=edges, registers=registers)
    await write(stores, RowChanges(delete_edges=[EdgeKey(low, ARCHIVED, 1)], put_lists=first.put_lists))
    assert set((await existing(stores, keys)).registers) == {EdgeKey(low, ARCHIVED, 2)}


async def test_rows_are_overwritten_and_deleted(stores: Stores) -> None:
    low, high = sorted((new_id(), new_id()))
    first = list_of(low, LIKES, [Edge(1, 1), Edge(2, 2)])
    first.put_intents.append(IntentRow(low, high, (LIKES,), 1, 1))
    await write(stores, first)
    second = RowChanges(
        put_lists={ListKey(low, LIKES): ListRow(1, version(2))},
        put_edges={EdgeKey(low, LIKES, 2): Edge(2, 5, b"new")},
        delete_edges=[EdgeKey(low, LIKES, 1)],
        delete_intents=[IntentKey(low, high)],
    )
    await write(stores, second)
    keys = WriteKeys(lists=set(first.put_lists), edges=set(first.put_edges), intents={IntentKey(low, high)})
    assert await existing(stores, keys) == ExistingRows(lists=second.put_lists, edges=second.put_edges)


async def test_without_commit_nothing_is_written_and_the_connection_comes_back_clean(stores: Stores) -> None:
    id1 = new_id()
    for fail in (False, True):
        try:
            async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
                await transaction.lock_and_read(SHARDS, WriteKeys())
                await transaction.apply(list_of(id1, LIKES, [Edge(1, 1)]))
                if fail:
                    raise LookupError
        except LookupError:
            assert fail
        assert await existing(stores, WriteKeys(lists={ListKey(id1, LIKES)})) == ExistingRows()


async def test_a_cancelled_transaction_writes_nothing_and_frees_its_locks(stores: Stores) -> None:
    id1 = new_id()
    keys = WriteKeys(edges={EdgeKey(id1, LIKES, 1)})
    applied = asyncio.Event()

    async def stop_half_way() -> None:
        async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
            await transaction.lock_and_read(SHARDS, keys)
            await transaction.apply(list_of(id1, LIKES, [Edge(1, 1)]))
            applied.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(stop_half_way())
    await applied.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(10):
        while True:
            try:
                rows = await existing(stores, keys)
                break
            except ShardBlocked:
                continue  # the server has yet to notice that the connection is closed
    assert rows == ExistingRows()


async def test_a_lock_that_another_holds_is_waited_for_in_bounds_and_names_its_shard(stores: Stores) -> None:
    held, free = new_id(SHARDS[1]), new_id(SHARDS[0])
    await write(stores, list_of(held, LIKES, [Edge(1, 1)]))
    keys = WriteKeys(edges={EdgeKey(held, LIKES, 1)})
    async with stores.write.transaction(SERVER, timeout_seconds=60) as holder:
        await holder.lock_and_read([SHARDS[1]], keys)
        async with stores.write.transaction(SERVER, timeout_seconds=60) as other:
            both = WriteKeys(objects={free}, edges=set(keys.edges))
            with pytest.raises(ShardBlocked) as caught:
                await other.lock_and_read(SHARDS, both)
        assert caught.value.shard == SHARDS[1]
        # The batch is planned again without the shard that blocks.
        async with stores.write.transaction(SERVER, timeout_seconds=60) as other:
            await other.lock_and_read([SHARDS[0]], WriteKeys(objects={free}))
    assert (await existing(stores, keys)).edges == {EdgeKey(held, LIKES, 1): Edge(1, 1)}


async def test_lanes_with_different_keys_do_not_wait_for_each_other(stores: Stores) -> None:
    """Neither neighbours in a nearly empty table nor rows that do not exist yet block each other."""
    here, there = new_id(), new_id()
    async with (
        stores.write.transaction(SERVER, timeout_seconds=10) as one,
        stores.write.transaction(SERVER, timeout_seconds=10) as two,
    ):
        for transaction, id1 in ((one, here), (two, there)):
            changes = list_of(id1, LIKES, [Edge(1, 1), Edge(2, 1)])
            changes.put_objects.append(ObjectRow(id1, 3, version(1), False, b""))
            await transaction.lock_and_read(SHARDS, WriteKeys(objects={id1}, edges=set(changes.put_edges)))
            await transaction.apply(changes)
        await two.commit()
        await one.commit()
    for id1 in (here, there):
        assert (
            len((await existing(stores, WriteKeys(edges={EdgeKey(id1, LIKES, 1), EdgeKey(id1, LIKES, 2)}))).edges) == 2
        )


async def test_a_transaction_of_very_many_keys_waits_for_none_of_the_other_rows(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long lists of keys may tempt a server to read the whole table, with a lock on each row."""
    monkeypatch.setattr(writes, "LOCK_WAIT_MILLISECONDS", 60_000)  # a lock is waited for up to a second all the same
    held, first = new_id(), new_id()
    of_held = EdgeKey(held, LIKES, 1)
    rows = list_of(held, LIKES, [Edge(1, 1)])
    rows.put_objects.append(ObjectRow(held, 3, version(1), False, b""))
    rows.put_intents.append(IntentRow(held, first, (LIKES,), 1, 1))
    await write(stores, rows)
    await write(stores, list_of(held, ARCHIVED, [Edge(1, 1)]))
    await write(stores, list_of(first, LIKES, [Edge(id2, 1) for id2 in range(1, 11)]))
    ids = range(first + 1, first + 1_002)
    many = WriteKeys(
        objects=set(ids),
        lists={ListKey(first, LIKES)},
        edges={EdgeKey(first, LIKES, id2) for id2 in range(1, 335)},
        intents={IntentKey(each, each + 1) for each in ids[:501]},
        recounts={ListKey(each, LIKES) for each in ids[:501]},
        state_edges={EdgeKey(each, NORMAL, 1): (NORMAL, ARCHIVED) for each in ids[:384]},
    )
    keys = WriteKeys(objects={held}, edges={of_held}, intents={IntentKey(held, first)})
    keys.state_edges = {EdgeKey(held, NORMAL, 1): (NORMAL, ARCHIVED)}
    async with stores.write.transaction(SERVER, timeout_seconds=60) as holder:
        await holder.lock_and_read(SHARDS[:1], keys)
        async with stores.write.transaction(SERVER, timeout_seconds=60) as other:
            _, found = await other.lock_and_read(SHARDS[:1], many)
    assert sorted(found.edges) == [EdgeKey(first, LIKES, id2) for id2 in range(1, 11)]
    assert found.lists == {ListKey(first, LIKES): ListRow(10, version(1))}
    assert (found.objects, found.intents, found.recounted) == ({}, {}, {})


async def test_more_lists_are_locked_and_read_by_a_transaction(stores: Stores) -> None:
    ids = [new_id(shard) for shard in SHARDS]
    for id1 in ids[1:]:
        await write(stores, list_of(id1, LIKES, [Edge(7, 1)]))
    lists = {ListKey(id1, LIKES) for id1 in ids}
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
        await transaction.lock_and_read(SHARDS, WriteKeys())
        found = await transaction.lock_lists(lists)
        with pytest.raises(ShardBlocked) as blocked:
            await existing(stores, WriteKeys(lists={ListKey(ids[1], LIKES)}))
    assert found == {ListKey(id1, LIKES): ListRow(1, version(1)) for id1 in ids[1:]}
    assert blocked.value.shard == ids[1] >> SHARD_SHIFT


async def test_writers_of_one_list_in_parallel_lose_nothing(stores: Stores) -> None:
    id1 = new_id()
    key = ListKey(id1, LIKES)

    async def add(id2: int) -> None:
        while True:
            try:
                async with stores.write.transaction(SERVER, timeout_seconds=10) as transaction:
                    keys = WriteKeys(lists={key}, edges={EdgeKey(id1, LIKES, id2)})
                    _, rows = await transaction.lock_and_read(SHARDS, keys)
                    before = rows.lists[key]
                    changes = RowChanges(
                        put_lists={key: ListRow(before.count + 1, before.version + 1)},
                        put_edges={EdgeKey(id1, LIKES, id2): Edge(id2, id2)},
                    )
                    await transaction.apply(changes)
                    await transaction.commit()
                return
            except RetryableError:
                continue

    await write(stores, RowChanges(put_lists={key: ListRow(0, version(1))}))
    await asyncio.gather(*(add(id2) for id2 in range(1, 13)))
    queries: list[Query] = [CountQuery(id1, LIKES), RangeQuery(id1, LIKES, 0, 100)]
    count, block = (await stores.read.read(queries, critical=True, timeout_seconds=5)).values
    assert decode_count(count) == (version(13), 12)
    assert [edge.id2 for edge in decode_block(block)] == list(range(12, 0, -1))


async def test_taking_ownership_raises_the_generation_each_time(stores: Stores) -> None:
    shard = SHARDS[2]
    before = (await stores.write.read_ownership([shard], timeout_seconds=5))[shard]
    first = (await stores.write.take_ownership([shard], "leader-a", timeout_seconds=5))[shard]
    again = (await stores.write.take_ownership([shard], "leader-a", timeout_seconds=5))[shard]
    other = (await stores.write.take_ownership([shard], "leader-b", timeout_seconds=5))[shard]
    rows = (before, first, again, other)
    assert [row.generation - before.generation for row in rows] == [0, 1, 2, 3]
    assert (first.owner, other.owner, other.master_server, other.shard) == ("leader-a", "leader-b", SERVER, shard)
    assert (await stores.write.read_ownership(SHARDS, timeout_seconds=5))[shard] == other
    assert (await write(stores, RowChanges()))[shard] == other


async def test_the_reserved_time_of_a_shard_is_read_under_a_lock_and_replaced(stores: Stores) -> None:
    _, reserving, other = SHARDS
    keys = WriteKeys(reserved_times={reserving, other})
    assert (await existing(stores, keys)).reserved_times == {}
    for until in (2**41 - 1, 2**41 + 5):
        await write(stores, RowChanges(put_reserved_times={reserving: until}), keys)
        assert await existing(stores, keys) == ExistingRows(reserved_times={reserving: until})
    id1 = new_id(other)
    keys.objects.add(id1)
    await write(stores, RowChanges(put_objects=[ObjectRow(id1, 3, version(1), False, b"d")]), keys)
    read = await existing(stores, keys)
    assert (list(read.objects), read.reserved_times) == ([id1], {reserving: until}), "with other rows in one answer"


async def test_two_owners_of_one_shard_a_takeover_waits_for_open_transactions_and_is_seen_by_later_ones(
    stores: Stores,
) -> None:
    shard = SHARDS[0]
    async with stores.write.transaction(SERVER, timeout_seconds=10) as transaction:
        seen, _ = await transaction.lock_and_read([shard], WriteKeys())
        with pytest.raises(ShardBlocked) as caught:
            await stores.write.take_ownership([shard], "usurper", timeout_seconds=10)
        assert caught.value.shard == shard
        await transaction.commit()
    taken = await stores.write.take_ownership([shard], "usurper", timeout_seconds=10)
    assert taken[shard].generation == seen[shard].generation + 1
    assert (await write(stores, RowChanges()))[shard] == taken[shard]


async def test_shards_taken_together_are_one_commit_which_leaves_out_those_that_are_locked(stores: Stores) -> None:
    before = await stores.write.read_ownership(SHARDS, timeout_seconds=5)
    locked, *free = SHARDS
    async with stores.write.transaction(SERVER, timeout_seconds=10) as transaction:
        await transaction.lock_and_read([locked], WriteKeys())
        taken = await stores.write.take_ownership(SHARDS, "usurper", timeout_seconds=10)
        await transaction.commit()
    assert taken == {shard: before[shard].taken_by("usurper") for shard in free}
    assert await stores.write.read_ownership(SHARDS, timeout_seconds=5) == {locked: before[locked], **taken}


async def test_ownership_and_intents_are_read_a_bounded_number_of_shards_at_a_time(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = await stores.write.read_ownership(SHARDS, timeout_seconds=5)
    statements: list[str] = []
    run = DatabaseSession.run

    async def recorded(session: DatabaseSession, sql: str, *args: Any, **keywords: Any) -> list[list[Row]]:
        statements.append(sql)
        return await run(session, sql, *args, **keywords)

    monkeypatch.setattr(DatabaseSession, "run", recorded)
    monkeypatch.setattr(writes, "SHARDS_PER_STATEMENT", 2)
    assert await stores.write.read_ownership(SHARDS, timeout_seconds=5) == rows
    assert [sql.count("only_row") for sql in statements] == [2, 1]
    statements.clear()
    await stores.write.old_intents(SHARDS, before_unix_ms=1, limit=1)
    assert [sql.count("inverse_intents") for sql in statements] == [2, 1]


async def test_old_intents_are_found_the_oldest_first_and_in_bounds(stores: Stores) -> None:
    pairs = [(new_id(shard), new_id(SHARDS[2])) for shard in (SHARDS[1], SHARDS[0], SHARDS[0])]
    intents = [IntentRow(low, high, (LIKES,), 1, 50 + at) for at, (low, high) in enumerate(pairs)]
    await write(stores, RowChanges(put_intents=intents))
    found = await stores.write.old_intents(SHARDS, before_unix_ms=52, limit=100)
    assert [intent for intent in found if intent in intents] == intents[:2]
    assert len(await stores.write.old_intents(SHARDS, before_unix_ms=53, limit=1)) == 1
    await write(stores, RowChanges(delete_intents=[IntentKey(low, high) for low, high in pairs]))


async def test_a_heartbeat_is_one_row_a_writer_and_waits_for_no_lock(stores: Stores, make_pools: MakePools) -> None:
    shard = SHARDS[0]
    async with stores.write.transaction(SERVER, timeout_seconds=10) as transaction:
        await transaction.lock_and_read([shard], WriteKeys())
        for written in (1_700_000_000_000, 1_700_000_001_000):
            waits = await stores.write.write_heartbeat(shard, "leader-1", written, timeout_seconds=10)
            assert not waits, "the server has no replica, and was not configured to wait for one"
        await stores.write.write_heartbeat(shard, "leader-2", 1_700_000_000_500, timeout_seconds=10)
    deadline = asyncio.get_running_loop().time() + 10
    async with make_pools(writes=False).of(SERVER).session(deadline=deadline) as session:
        (rows,) = await session.run(
            f"SELECT writer, written_unix_ms FROM {schema_name(shard)}.heartbeat", deadline=deadline
        )
    assert dict(rows) == {b"leader-1": 1_700_000_001_000, b"leader-2": 1_700_000_000_500}


async def test_more_data_than_a_packet_holds_is_one_transaction_all_the_same(stores: Stores) -> None:
    ids = [new_id(SHARDS[n % 3]) for n in range(24)]
    await write(stores, RowChanges(put_objects=[ObjectRow(id1, 3, version(1), False, b"\x00" * 2**20) for id1 in ids]))
    found = await existing(stores, WriteKeys(objects=set(ids)))
    assert {row.id: len(row.data) for row in found.objects.values()} == dict.fromkeys(ids, 2**20)


async def test_lists_are_counted_whatever_their_rows_say(stores: Stores) -> None:
    ids = [new_id(shard) for shard in SHARDS]
    wrong, gone, empty = ListKey(ids[0], LIKES), ListKey(ids[0], LONG), ListKey(ids[1], LIKES)
    edges = {EdgeKey(key.id1, key.atype, id2): Edge(id2, 1) for key in (wrong, gone) for id2 in (7, 8, 9)}
    lists = {wrong: ListRow(1, version(4)), gone: ListRow(3, version(6)), empty: ListRow(5, version(2))}
    await write(stores, RowChanges(put_lists=lists, put_edges=edges))
    keys = WriteKeys(lists={wrong, empty}, recounts={wrong, gone, empty})
    found = await existing(stores, keys)
    assert found == ExistingRows(lists=lists, recounted={wrong: ListRow(3, version(4)), gone: ListRow(3, version(6))})
    # An equal value is not enough: a cache entry cannot hold a decimal.
    numbers = [each for row in (*found.lists.values(), *found.recounted.values()) for each in (row.count, row.version)]
    assert {type(each) for each in numbers} == {int}


async def test_a_count_waits_for_edges_that_someone_has_changed_and_not_committed(stores: Stores) -> None:
    key = ListKey(new_id(), LIKES)
    await write(stores, list_of(key.id1, LIKES, [Edge(7, 1), Edge(8, 1)]))
    async with stores.write.transaction(SERVER, timeout_seconds=5) as other:
        await other.lock_and_read(SHARDS, WriteKeys(edges={EdgeKey(key.id1, LIKES, 7)}))
        await other.apply(RowChanges(delete_edges=[EdgeKey(key.id1, LIKES, 7)]))
        with pytest.raises(ShardBlocked):
            await existing(stores, WriteKeys(recounts={key}))
        await other.commit()
    counted = (await existing(stores, WriteKeys(recounts={key}))).recounted
    assert {key: row.count for key, row in counted.items()} == {key: 1}


@pytest.mark.parametrize("atype", [LIKES, LONG, NORMAL])
@pytest.mark.parametrize("deleted", [1, 2, 8, 64, 1_000])
async def test_a_deletion_of_edges_waits_for_no_other_row(stores: Stores, atype: int, deleted: int) -> None:
    """The table has few rows, and a scan of it would be cheap, if nobody else wrote there."""
    locked, keys = EdgeKey(new_id(), atype, 7), [EdgeKey(new_id(), atype, 1) for _ in range(deleted)]
    kept = EdgeKey(keys[0].id1, atype, 2**40)
    await write(stores, list_of(locked.id1, atype, [Edge(locked.id2, 1)]))
    await write(stores, list_of(kept.id1, atype, [Edge(1, 1), Edge(kept.id2, 1)]))
    async with stores.write.transaction(SERVER, timeout_seconds=PATIENT_SECONDS) as other:
        await other.lock_and_read(SHARDS, WriteKeys(edges={locked}))
        await other.apply(RowChanges(delete_edges=[locked]))
        await write(stores, RowChanges(delete_edges=keys))
    remain = await existing(stores, WriteKeys(edges={locked, kept, *keys}))
    assert set(remain.edges) == {locked, kept}


@pytest.mark.parametrize("atype", [LIKES, LONG])
async def test_the_oldest_edges_of_lists_are_locked_and_read_oldest_first(stores: Stores, atype: int) -> None:
    first, second, empty = new_id(), new_id(SHARDS[1]), new_id()
    edges = [Edge(7, 30, b"d"), Edge(8, 10), Edge(9, 10), Edge(6, 20)]
    for id1 in (first, second):
        await write(stores, list_of(id1, atype, edges))
    keys = [ListKey(id1, atype) for id1 in (first, second, empty)]
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
        await transaction.lock_and_read(SHARDS, WriteKeys(lists=set(keys)))
        found = await transaction.lock_oldest(dict(zip(keys, (3, 5, 1), strict=True)))
        await transaction.apply(list_of(first, atype, [Edge(1, 1)], counter=2))
        await transaction.commit()
    by_age = (Edge(8, 10), Edge(9, 10), Edge(6, 20), Edge(7, 30, b"d"))
    assert found == {
        keys[0]: OldestEdges(by_age[:3], are_all=False),
        keys[1]: OldestEdges(by_age, are_all=True),
        keys[2]: OldestEdges((), are_all=True),
    }


def job(job_id: int, **changes: Any) -> JobRow:
    row = JobRow(job_id, "walk", 1, 0, 50, 3, 7, "worker-1", HOSTILE, HOSTILE, 2**40, "it's, broken", 1_700, 60)
    return msgspec.structs.replace(row, **changes)


async def test_jobs_and_pauses_are_read_back_changed_and_removed(stores: Stores) -> None:
    shard = SHARDS[0]
    first, second = job(new_id(shard)), job(new_id(shard), kind="purge", body=b"", cursor=b"", error="", worker="")
    walk = PausedKind(shard, "walk")
    keys = WriteKeys(jobs={first.id, second.id}, paused_jobs={walk, PausedKind(shard, "purge")})
    await write(stores, RowChanges(put_jobs={first.id: first, second.id: second}, put_paused_jobs={walk: True}), keys)
    found = {first.id: first, second.id: second}
    assert await existing(stores, keys) == ExistingRows(jobs=found, paused_jobs={walk})
    assert await stores.write.paused_jobs([shard], timeout_seconds=5) == [walk]
    changed = job(first.id, state=JobState.DONE, worker="", leases=8)
    later = RowChanges(put_jobs={first.id: changed}, delete_jobs=[second.id], put_paused_jobs={walk: False})
    await write(stores, later, keys)
    assert await existing(stores, keys) == ExistingRows(jobs={first.id: changed})


@pytest.mark.parametrize("is_pause", [False, True])
async def test_a_locked_row_of_a_job_or_pause_names_its_shard(stores: Stores, is_pause: bool) -> None:
    free, held = SHARDS[0], SHARDS[1]
    waiting, walk = job(new_id(held)), PausedKind(held, "walk")
    await write(stores, RowChanges(put_jobs={waiting.id: waiting}, put_paused_jobs={walk: True}))
    keys = WriteKeys(paused_jobs={walk}) if is_pause else WriteKeys(jobs={waiting.id})
    both = WriteKeys(objects={new_id(free)}, jobs=set(keys.jobs), paused_jobs=set(keys.paused_jobs))
    async with stores.write.transaction(SERVER, timeout_seconds=60) as holder:
        await holder.lock_and_read([], keys)
        async with stores.write.transaction(SERVER, timeout_seconds=60) as other:
            with pytest.raises(ShardBlocked) as caught:
                await other.lock_and_read([free, held], both)
        assert caught.value.shard == held
    await write(stores, RowChanges(delete_jobs=[waiting.id], put_paused_jobs={walk: False}))


async def test_jobs_are_counted_by_state_lease_and_failures(stores: Stores) -> None:
    here, there = SHARDS[1:3]

    async def counts() -> Counter[tuple[int, bool, bool]]:
        found: Counter[tuple[int, bool, bool]] = Counter()
        for each in await stores.write.count_jobs([here, there], timeout_seconds=5):
            found[each.state, each.is_leased, each.is_failing] += each.jobs
        return found

    before = await counts()
    kept = [
        *(job(new_id(shard), worker="", attempts=0) for shard in (here, here, there)),
        *(job(new_id(there), worker="w", attempts=attempts) for attempts in (0, 2)),
        job(new_id(here), state=JobState.PARKED, worker="", attempts=100),
        job(new_id(here), state=JobState.DONE, worker="", attempts=0),
    ]
    await write(stores, RowChanges(put_jobs={row.id: row for row in kept}))
    assert await counts() - before == {
        (0, False, False): 3,
        (0, True, False): 1,
        (0, True, True): 1,
        (2, False, True): 1,
    }


async def test_jobs_are_found_by_state_priority_kind_and_time_and_not_of_paused_kinds(stores: Stores) -> None:
    here, there = SHARDS[:2]
    kept = [
        job(new_id(here), kind="found_a", due_unix_ms=30, attempts=0),
        job(new_id(here), kind="found_b", due_unix_ms=20, attempts=0),
        job(new_id(there), kind="found_a", due_unix_ms=10, priority=0),
        job(new_id(there), kind="found_a", due_unix_ms=10, state=JobState.PARKED, attempts=0),
        job(new_id(here), kind="found_a", due_unix_ms=90, attempts=2, worker=""),
        job(new_id(here), kind="found_a", due_unix_ms=95, attempts=2, worker="worker-1"),
    ]
    await write(stores, RowChanges(put_jobs={row.id: row for row in kept}))
    listed = [msgspec.structs.replace(row, body=b"") for row in kept]

    async def found(**query: Any) -> list[int]:
        wanted = JobQuery(10, kinds=("found_a", "found_b"), **query)
        rows = await stores.write.read_jobs(SHARDS, wanted, timeout_seconds=5)
        assert all(row in listed for row in rows), "the bodies are left out"
        return [row.id for row in rows]

    assert sorted(await found()) == sorted(row.id for row in kept)
    assert await found(states=(JobState.PARKED,)) == [kept[3].id]
    assert await found(states=(JobState.WAITING,), is_failing=True) == [kept[4].id]
    assert await found(states=(JobState.WAITING,), priorities=(0,)) == [kept[2].id]
    assert sorted(await found(priorities=(1,), due_by_unix_ms=20)) == sorted([kept[1].id, kept[3].id])
    paused = PausedKind(kept[0].id >> SHARD_SHIFT, "found_a")
    await write(stores, RowChanges(put_paused_jobs={paused: True}))
    assert kept[0].id not in await found(is_running=True)
    assert kept[2].id in await found(is_running=True)
    assert sorted(await found(routine_kinds=("found_a",))) == sorted(row.id for row in kept[1:])
    await write(stores, RowChanges(put_paused_jobs={paused: False}))
