"""The contract of every `ReadStore`: exact answers, in list order, each of one snapshot, whatever bytes they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tao.model.edge_block import COMPLETE, PREFIX, check_block, decode_block, header
from tao.model.errors import TaoError
from tao.model.graph import ABSENT, MAX_ID2_SET, MAX_TIME, Edge, decode_count, decode_object, deleted_data
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import (
    CountQuery,
    EdgesQuery,
    FillRead,
    MemberPage,
    ObjectQuery,
    PairsQuery,
    Query,
    RangeQuery,
    TimeRangeQuery,
    start_at,
)
from tao.model.rows import IntentKey, IntentRow, ObjectRow, RowChanges
from tao.storage.read_plan import ReadPlan
from tao.storage.scans import MySqlMemberScans
from tests.conformance.store.stores import (
    LIKES,
    LONG,
    SERVER,
    SHARDS,
    MakePools,
    Stores,
    list_of,
    new_id,
    table_of,
    version,
    write,
)

pytestmark = pytest.mark.database

HOSTILE = [
    b"",
    b"\x00",
    b"a\x00\x00",
    b"'\"`\\",
    b"%s %d %%",
    b"\xff\xfe\xc3\x28",
    b"'; DROP TABLE x; -- ",
    b"\r\n\x1a",
]


async def ask(stores: Stores, *queries: Query) -> list[bytes]:
    """Return what both ways to read answer: with a task, and at once on the connection that the first has left idle."""
    answer = await stores.read.read(queries, critical=False, timeout_seconds=5)
    at_once = await ask_at_once(stores, *queries)
    if at_once is not None:
        assert (at_once.values, at_once.version_epochs) == (answer.values, answer.version_epochs)
    return answer.values


async def ask_at_once(stores: Stores, *queries: Query) -> FillRead | None:
    """Return the answer of a read without a task; None when such a read would have to wait."""
    found: list[tuple[int, bytes]] = []
    epochs: dict[int, int] = {}
    ended = asyncio.Event()

    def take(places: Sequence[int], read: FillRead | TaoError) -> None:
        assert isinstance(read, FillRead)
        found.extend(zip(places, read.values, strict=True))
        epochs.update(read.version_epochs)

    if not stores.read.read_at_once(queries, timeout_seconds=5, on_read=take, on_end=ended.set):
        return None
    await ended.wait()
    return FillRead([value for _, value in sorted(found)], epochs)


async def edges_of(stores: Stores, query: Query) -> list[Edge]:
    (block,) = await ask(stores, query)
    return decode_block(check_block(block))


@pytest.mark.parametrize("data", HOSTILE)
async def test_data_comes_back_byte_for_byte(stores: Stores, data: bytes) -> None:
    id1 = new_id()
    changes = list_of(id1, LIKES, [Edge(7, 1, data)])
    changes.put_objects.append(ObjectRow(id1, 3, version(1), False, data))
    await write(stores, changes)
    value, block = await ask(stores, ObjectQuery(id1), RangeQuery(id1, LIKES, 0, 10))
    assert decode_object(value) == (version(1), 3, data)
    assert decode_block(block) == [Edge(7, 1, data)]


async def test_what_was_never_written_is_absent_at_version_0(stores: Stores) -> None:
    id1 = new_id()
    value, count, block = await ask(stores, ObjectQuery(id1), CountQuery(id1, LIKES), RangeQuery(id1, LIKES, 0, 10))
    assert decode_object(value) == (0, ABSENT, b"")
    assert decode_count(count) == (0, 0)
    assert header(block) == (0, 0, 0, PREFIX | COMPLETE)


async def test_a_deleted_object_keeps_its_version_and_loses_its_data(stores: Stores) -> None:
    id1 = new_id()
    await write(stores, RowChanges(put_objects=[ObjectRow(id1, 3, version(2), True, b"gone")]))
    (value,) = await ask(stores, ObjectQuery(id1))
    assert decode_object(value) == (version(2), ABSENT, deleted_data(3))


async def test_an_object_or_count_by_itself_is_answered_as_among_others(stores: Stores) -> None:
    """The statement for one key differs from the one for many."""
    there, deleted, empty, absent = (new_id(SHARDS[1]) for _ in range(4))
    objects = [
        ObjectRow(there, 2**16 - 1, version(2**40), False, bytes(range(256)) * 300),
        ObjectRow(deleted, 3, version(2), True, b"gone"),
        ObjectRow(empty, 3, version(3), False, b""),
    ]
    lists = list_of(there, LIKES, [Edge(7, 1), Edge(8, 1)], 9)
    await write(stores, RowChanges(put_objects=objects, put_lists=lists.put_lists, put_edges=lists.put_edges))
    queries: list[Query] = [ObjectQuery(i) for i in (there, deleted, empty, absent)]
    queries += [CountQuery(there, LIKES), CountQuery(there, LIKES + 1), CountQuery(absent, LIKES)]
    together = await ask(stores, *queries)
    for query, value in zip(queries, together, strict=True):
        answer = await stores.read.read([query], critical=False, timeout_seconds=5)
        assert (answer.values, answer.version_epochs) == ([value], {SHARDS[1]: 1})


async def test_one_batch_asks_many_shards_and_answers_in_order(stores: Stores) -> None:
    ids = [new_id(shard) for shard in SHARDS * 3]
    await write(stores, RowChanges(put_objects=[ObjectRow(i, 3, version(1), False, str(i).encode()) for i in ids]))
    queries = [ObjectQuery(i) for i in reversed(ids)]
    answer = await stores.read.read(queries, critical=True, timeout_seconds=5)
    assert [decode_object(value)[2] for value in answer.values] == [str(i).encode() for i in reversed(ids)]
    assert answer.version_epochs == dict.fromkeys(SHARDS, 1)


async def test_the_same_query_twice_in_a_batch_is_answered_twice(stores: Stores) -> None:
    id1 = new_id()
    await write(stores, list_of(id1, LIKES, [Edge(7, 1)]))
    first, second = await ask(stores, RangeQuery(id1, LIKES, 0, 5), RangeQuery(id1, LIKES, 0, 5))
    assert first == second
    assert decode_block(first) == [Edge(7, 1)]


async def test_an_empty_batch_has_no_answers(stores: Stores) -> None:
    assert await ask(stores) == []


async def test_a_range_is_newest_first_with_ties_by_higher_id2(stores: Stores) -> None:
    id1 = new_id()
    await write(stores, list_of(id1, LIKES, [Edge(1, 5), Edge(3, 5), Edge(2, 9), Edge(MAX_TIME, MAX_TIME)]))
    in_order = [Edge(MAX_TIME, MAX_TIME), Edge(2, 9), Edge(3, 5), Edge(1, 5)]
    assert await edges_of(stores, RangeQuery(id1, LIKES, 0, 10)) == in_order
    assert await edges_of(stores, RangeQuery(id1, LIKES, 1, 2)) == in_order[1:3]


async def test_flags_say_what_may_be_cached(stores: Stores) -> None:
    id1 = new_id()
    await write(stores, list_of(id1, LIKES, [Edge(i, i) for i in range(1, 5)]))
    cases: dict[Query, tuple[int, int]] = {
        RangeQuery(id1, LIKES, 0, 4): (4, PREFIX | COMPLETE),
        RangeQuery(id1, LIKES, 0, 2): (2, PREFIX),
        RangeQuery(id1, LIKES, 0, 0): (0, PREFIX),
        RangeQuery(id1, LIKES, 1, 4): (3, 0),
        RangeQuery(id1, LIKES, 9, 4): (0, 0),
        TimeRangeQuery(id1, LIKES, MAX_TIME, 3, 9): (2, PREFIX),
        TimeRangeQuery(id1, LIKES, 3, 0, 9): (3, 0),
        TimeRangeQuery(id1, LIKES, MAX_TIME, 0, 9): (4, PREFIX | COMPLETE),
        EdgesQuery(id1, LIKES, (4,)): (1, 0),
        EdgesQuery(id1, LIKES, ()): (0, 0),
    }
    for (query, (n, flags)), block in zip(cases.items(), await ask(stores, *cases), strict=True):
        assert header(check_block(block)) == (version(1), 4, n, flags), query


async def test_time_bounds_are_inclusive(stores: Stores) -> None:
    id1 = new_id()
    await write(stores, list_of(id1, LIKES, [Edge(i, 10 * i) for i in range(1, 6)]))
    assert await edges_of(stores, TimeRangeQuery(id1, LIKES, 40, 20, 9)) == [Edge(4, 40), Edge(3, 30), Edge(2, 20)]
    assert await edges_of(stores, TimeRangeQuery(id1, LIKES, 40, 20, 2)) == [Edge(4, 40), Edge(3, 30)]
    assert await edges_of(stores, EdgesQuery(id1, LIKES, (1, 4, 4, 5, 99), 40, 10)) == [Edge(4, 40), Edge(1, 10)]


@pytest.mark.parametrize("pos", [0, 1, 2, 4, 5, 130, MAX_TIME])
async def test_a_time_range_begins_at_a_position_within_its_bounds(stores: Stores, pos: int) -> None:
    id1 = new_id()
    edges = [Edge(i, 10 * i) for i in range(1, 201)]
    await write(stores, list_of(id1, LIKES, edges))
    (block,) = await ask(stores, TimeRangeQuery(id1, LIKES, 1_900, 100, 4, start_at(pos)))
    within = [edge for edge in reversed(edges) if 1_900 >= edge.time >= 100]
    assert decode_block(block) == within[pos : pos + 4]
    (newest,) = await ask(stores, TimeRangeQuery(id1, LIKES, MAX_TIME, 0, 4, start_at(pos)))
    assert decode_block(newest) == edges[::-1][pos : pos + 4]
    assert bool(header(newest)[3] & PREFIX) <= (pos == 0)


async def test_the_next_page_begins_after_an_edge_even_among_edges_of_one_time(stores: Stores) -> None:
    id1 = new_id()
    edges = [Edge(i, 7 if i < 7 else 9) for i in range(1, 9)]
    await write(stores, list_of(id1, LIKES, edges))
    in_order = [Edge(8, 9), Edge(7, 9), *(Edge(i, 7) for i in range(6, 0, -1))]
    for place, last in enumerate(in_order, 1):
        page = TimeRangeQuery(id1, LIKES, last.time, 0, 3, last.id2)
        (block,) = await ask(stores, page)
        assert decode_block(block) == in_order[place : place + 3]
        assert not header(block)[3] & PREFIX
    assert await edges_of(stores, TimeRangeQuery(id1, LIKES, 9, 8, 5, 8)) == [Edge(7, 9)]
    assert await edges_of(stores, TimeRangeQuery(id1, LIKES, 7, 8, 5, 8)) == []
    assert await edges_of(stores, TimeRangeQuery(id1, LIKES, MAX_TIME, 0, 2, 1)) == in_order[:2]


async def test_a_long_list_is_read_whole_deep_and_by_a_full_id2_set(stores: Stores) -> None:
    id1 = new_id()
    edges = [Edge(i, 3 * i, b"x" * (i % 5)) for i in range(1, MAX_ID2_SET + 11)]
    await write(stores, list_of(id1, LONG, edges))
    edges.reverse()
    assert await edges_of(stores, RangeQuery(id1, LONG, 0, 10_000)) == edges
    assert await edges_of(stores, RangeQuery(id1, LONG, 5_000, 20)) == edges[5_000:5_020]
    wanted = tuple(edge.id2 for edge in edges[:MAX_ID2_SET])
    assert await edges_of(stores, EdgesQuery(id1, LONG, wanted)) == edges[:MAX_ID2_SET]


@pytest.mark.parametrize("recorded", [None, 1, 129, 130, 5_000])
@pytest.mark.parametrize("edges", [0, 1, 128, 129, 130, 300])
async def test_a_first_page_is_the_newest_edges_however_long_the_list_is_and_is_taken_for(
    stores: Stores, edges: int, recorded: int | None
) -> None:
    """``recorded`` is a count that disagrees with the rows, written by hand with the newest at the lowest ids."""
    id1 = new_id()
    newest_first = [Edge(i, 1_000 - i, b"x") for i in range(1, edges + 1)]
    changes = list_of(id1, LIKES, newest_first)
    if recorded is not None:
        for key, row in changes.put_lists.items():
            changes.put_lists[key] = type(row)(recorded, row.version)
    await write(stores, changes)
    (block, beside) = await ask(stores, RangeQuery(id1, LIKES, 0, 129), CountQuery(id1, LIKES))
    count = edges if recorded is None else recorded
    is_whole = edges == count and edges <= 129
    flags = PREFIX | COMPLETE if is_whole or min(edges, 129) == count else PREFIX
    assert header(check_block(block))[3] & (PREFIX | COMPLETE) == flags
    assert decode_block(block) == newest_first[:129]
    assert decode_count(beside) == (version(1), count)


async def test_a_custom_table_holds_long_data(stores: Stores) -> None:
    id1 = new_id()
    await write(stores, list_of(id1, LONG, [Edge(7, 1, bytes(range(256)) * 256)]))
    assert await edges_of(stores, RangeQuery(id1, LONG, 0, 1)) == [Edge(7, 1, bytes(range(256)) * 256)]


async def test_torn_fill_version_count_and_edges_are_of_one_moment_while_a_writer_commits(stores: Stores) -> None:
    id1 = new_id()
    rounds = 60

    async def grow() -> None:
        for n in range(1, rounds + 1):
            await write(stores, list_of(id1, LIKES, [Edge(i, i) for i in range(1, n + 1)], counter=n))

    writer = asyncio.create_task(grow())
    queries = (RangeQuery(id1, LIKES, 0, 1000), EdgesQuery(id1, LIKES, tuple(range(1, rounds + 1))))
    seen: set[int] = set()
    while not writer.done():
        answer = await stores.read.read(queries, critical=False, timeout_seconds=5)
        at_once = await ask_at_once(stores, *queries)
        assert at_once is not None
        for block in (*answer.values, *at_once.values):
            at_version, count, n, _ = header(block)
            assert count == n
            assert at_version == (version(n) if n else 0)
            seen.add(n)
    await writer
    assert len(seen) > 2


async def test_a_pooled_connection_does_not_answer_from_an_old_snapshot(stores: Stores) -> None:
    id1 = new_id()
    for n in range(1, 30):
        await write(stores, list_of(id1, LIKES, [Edge(i, i) for i in range(1, n + 1)], counter=n))
        answers = await asyncio.gather(*(ask(stores, CountQuery(id1, LIKES)) for _ in range(4)))
        assert {decode_count(value) for (value,) in answers} == {(version(n), n)}


async def test_rows_that_outnumber_the_recorded_count_still_make_a_sound_block(stores: Stores) -> None:
    id1 = new_id()
    changes = list_of(id1, LIKES, [Edge(1, 1), Edge(2, 2)])
    for key, row in changes.put_lists.items():
        changes.put_lists[key] = type(row)(1, row.version)  # as a hand-made INSERT would leave it
    await write(stores, changes)
    (block,) = await ask(stores, RangeQuery(id1, LIKES, 0, 10))
    assert header(check_block(block)) == (version(1), 2, 2, PREFIX)


async def test_the_ids_of_a_list_are_scanned_in_pages_with_the_version_of_each(
    stores: Stores, make_pools: MakePools
) -> None:
    id1, other = new_id(), new_id()
    scans = MySqlMemberScans(lambda _: SERVER, make_pools(writes=False), table_of)
    edges = [Edge(i, 1_000 - i, b"x") for i in range(1, 301)]
    await write(stores, list_of(id1, LONG, edges, 3))
    await write(stores, list_of(other, LONG, [Edge(i, 1) for i in range(500, 510)]))
    deadline = asyncio.get_running_loop().time() + 10
    first = await scans.read_members(id1, LONG, 0, 200, deadline=deadline)
    assert first == MemberPage(1, version(3), 300, list(range(1, 201)))
    last = await scans.read_members(id1, LONG, 200, 200, deadline=deadline)
    assert last == MemberPage(1, version(3), 300, list(range(201, 301)))
    assert await scans.read_members(new_id(), LIKES, 0, 9, deadline=deadline) == MemberPage(1, 0, 0, [])


@pytest.mark.parametrize("atype", [LIKES, LONG])
@pytest.mark.parametrize("limit", [1, 2, 7, 100])
async def test_all_edges_of_a_type_are_scanned_in_pages_with_the_versions_of_their_lists(
    stores: Stores, make_pools: MakePools, limit: int, atype: int
) -> None:
    """Lists begin, end and continue anywhere in a page; one is empty."""
    ids = [new_id() for _ in range(6)]
    sizes = dict(zip(ids, (5, 0, 12, 1, 3, 2), strict=True))
    for number, (id1, size) in enumerate(sizes.items(), 1):
        await write(stores, list_of(id1, atype, [Edge(i, 100 - i, b"x") for i in range(1, size + 1)], number))
        await write(stores, list_of(id1, LONG if atype == LIKES else LIKES, [Edge(77, 1)]))
    scans = MySqlMemberScans(lambda _: SERVER, make_pools(writes=False), table_of)
    deadline = asyncio.get_running_loop().time() + 20
    found: dict[int, list[int]] = {}
    versions: dict[int, int] = {}
    query = PairsQuery(SHARDS[0], atype, ids[0], 0, ids[-1], limit)
    while True:
        page = await scans.read_pairs(query, deadline=deadline)
        assert page.version_epoch == 1
        assert len(page.id1s) <= limit + 1
        assert sum(page.sizes) == len(page.id2s) <= limit
        start = 0
        for id1, seen, size in zip(page.id1s, page.versions, page.sizes, strict=True):
            found.setdefault(id1, []).extend(page.id2s[start : start + size])
            versions[id1] = seen
            start += size
        if not page.after_id1:
            break
        assert (page.after_id1, page.after_id2) > (query.after_id1, query.after_id2)
        query = msgspec.structs.replace(query, after_id1=page.after_id1, after_id2=page.after_id2)
    assert found == {id1: list(range(1, size + 1)) for id1, size in sizes.items()}
    assert versions == {id1: version(number) for number, id1 in enumerate(ids, 1)}


@pytest.mark.parametrize("rare", [LIKES - 1, LIKES + 1])
async def test_a_page_of_a_rare_type_reads_a_bounded_number_of_rows(
    stores: Stores, make_pools: MakePools, rare: int
) -> None:
    """Thousands of edges of another type lie between those of the type."""
    low, *others, high = [new_id() for _ in range(42)]
    for id1 in others:
        await write(stores, list_of(id1, LIKES, [Edge(i, 7) for i in range(1, 101)]))
    for id1 in (low, others[20], high):
        await write(stores, list_of(id1, rare, [Edge(5, 7)]))
    pools = make_pools(writes=False)
    scans = MySqlMemberScans(lambda _: SERVER, pools, table_of)
    deadline = asyncio.get_running_loop().time() + 20

    async def rows_read() -> int:
        async with pools.of(SERVER).session(deadline=deadline) as session:
            (rows,) = await session.run("SHOW SESSION STATUS LIKE 'Handler_read_next'", deadline=deadline)
        return int(rows[0][1])

    query, pages = PairsQuery(SHARDS[0], rare, low, 0, high, 100), 0
    most = 0
    found: list[tuple[int, int]] = []
    while True:
        before = await rows_read()
        page = await scans.read_pairs(query, deadline=deadline)
        most = max(most, await rows_read() - before)
        pages += 1
        found.extend(zip(page.id1s, page.sizes, strict=True))
        if not page.after_id1:
            break
        assert (page.after_id1, page.after_id2) > (query.after_id1, query.after_id2)
        query = msgspec.structs.replace(query, after_id1=page.after_id1, after_id2=page.after_id2)
    assert [(id1, size) for id1, size in found if size] == [(low, 1), (others[20], 1), (high, 1)]
    assert pages > 30
    assert query.limit < most < 4 * query.limit + 10


async def test_a_page_among_many_edges_of_one_time_reads_no_more_rows_than_it_has(
    stores: Stores, make_pools: MakePools
) -> None:
    id1 = new_id()
    await write(stores, list_of(id1, LIKES, [Edge(i, 7) for i in range(1, 3_001)]))
    deadline = asyncio.get_running_loop().time() + 10
    plan = ReadPlan([TimeRangeQuery(id1, LIKES, 7, 0, 20, 1_500)], table_of)
    async with make_pools(writes=False).of(SERVER).session(deadline=deadline) as session:

        async def rows_read() -> int:
            (rows,) = await session.run("SHOW SESSION STATUS LIKE 'Handler_read_%%'", deadline=deadline)
            return sum(int(value) for name, value in rows if name in ("Handler_read_next", "Handler_read_prev"))

        before = await rows_read()
        (statement,) = plan.statements
        await session.stream(statement.sql, statement.values, plan.receive, deadline=deadline)
        assert [edge.id2 for edge in decode_block(next(plan.answers()))] == list(range(1_499, 1_479, -1))
        assert 10 < await rows_read() - before < 100


async def test_the_intents_between_two_shards_are_read_as_they_are_now(stores: Stores) -> None:
    """Each read sees what was committed before it, also on the connection of the read before."""

    async def read(far_shard: int, limit: int = 100) -> list[IntentRow]:
        return await stores.read.read_intents(SHARDS[0], far_shard, limit=limit, timeout_seconds=5)

    for far_shard in SHARDS:
        assert await read(far_shard) == []
    far_ids = (SHARDS[1] << SHARD_SHIFT, (SHARDS[2] << SHARD_SHIFT) - 1, SHARDS[2] << SHARD_SHIFT)
    first, second, third = [IntentRow(new_id(), far_id, (LIKES, LONG), 3, 50) for far_id in far_ids]
    of_other = IntentRow(new_id(SHARDS[1]), new_id(SHARDS[2]), (LIKES,), 3, 50)
    for intent, expected in ((first, {first}), (second, {first, second}), (third, {first, second})):
        await write(stores, RowChanges(put_intents=[intent]))
        assert set(await read(SHARDS[1])) == expected
    await write(stores, RowChanges(put_intents=[of_other]))
    assert await read(SHARDS[0]) == []
    assert await read(SHARDS[2]) == [third]
    assert len(await read(SHARDS[1], limit=1)) == 1
    keys = [IntentKey(each.low_id, each.high_id) for each in (first, second, third, of_other)]
    await write(stores, RowChanges(delete_intents=keys))
    assert await read(SHARDS[1]) == []
