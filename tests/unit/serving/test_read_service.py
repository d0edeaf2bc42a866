"""Read batches: columns, slots, limits, minimum versions, and the parts in which answers leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tao.model.edge_block import LIMIT_CUT, decode_block, header
from tao.model.errors import AnswerFull, DeadlineExceeded, InvalidArgument, NotMine, Overloaded, TooLarge, UnknownType
from tao.model.graph import EXISTS, EXISTS_NOT, MAX_ID2_SET, MAX_TIME, Edge, EdgeKey, ListKey, encode_object
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, Query, RangeQuery, TimeRangeQuery, start_at
from tao.model.rows import ListRow, ObjectRow
from tao.runtime.clock import LoopClock
from tao.serving.miss_answers import BatchSettings
from tao.serving.misses import ReadPolicy
from tao.serving.read_service import ReadService, answer_hits, leave_out
from tao.serving.sources import FetchRequest
from tao.serving.traffic import Traffic
from tao.wire.read_batch import EXISTS as EXISTS_GROUP
from tao.wire.read_batch import BatchQueries, encode_queries, operation_sizes, shards_in
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, NOTE, SCHEMA, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until
from tests.rigs.versions import make_version

A, B = make_id(64), make_id(128)


@pytest.fixture
async def rig() -> LeaderRig:
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    await rig.take(0)
    return rig


class Asked:
    """One request at a `ReadService`; ``answers`` as they came."""

    def __init__(self, rig: LeaderRig, **columns: Any) -> None:
        """``deadline_ms`` may be among the columns."""
        self.answers: list[pb.Answer] = []
        deadline_ms = columns.pop("deadline_ms", 5_000)
        reads = columns.pop("reads", rig.reads)
        request = pb.Request(number=1, deadline_ms=deadline_ms, read=pb.ReadBatch(**columns))
        reads.handle(request, MemoryReply(self.answers.append))

    async def all(self) -> dict[int, bytes]:
        """Values by slot. Fails on errors."""
        await until(lambda: self.answers and not self.answers[-1].more)
        found: dict[int, bytes] = {}
        for answer in self.answers:
            assert not answer.read.errors, answer.read.errors
            slots = answer.read.slots or range(len(answer.read.values))
            for slot, value in zip(slots, answer.read.values, strict=True):
                assert slot not in found, "answered twice"
                found[slot] = value
        return found

    async def reasons(self) -> dict[int, str]:
        await until(lambda: self.answers and not self.answers[-1].more)
        return {
            slot: error.reason
            for answer in self.answers
            for slot, error in zip(answer.read.failed_slots, answer.read.errors, strict=True)
        }


def stored_list(rig: LeaderRig, length: int, atype: int = COMMENT) -> None:
    store = rig.store
    assert isinstance(store, MemoryStore)
    store.rows.lists[ListKey(A, atype)] = ListRow(length, make_version(1, 1))
    for time in range(1, length + 1):
        store.rows.edges[EdgeKey(A, atype, B + time)] = Edge(B + time, time)


QUERIES: list[Query] = [
    EdgesQuery(A, COMMENT, (B, B + 1), 50, 3),
    RangeQuery(A, COMMENT, 2, 9),
    ObjectQuery(A),
    TimeRangeQuery(A, NOTE, 70, 5, 4),
    TimeRangeQuery(A, NOTE, 70, 5, 4, B),
    TimeRangeQuery(A, NOTE, 70, 5, 4, start_at(3)),
    CountQuery(A, NOTE),
    ObjectQuery(B),
    EdgesQuery(B, NOTE, ()),
]


def test_queries_go_into_columns_and_come_out_the_same() -> None:
    batch = pb.ReadBatch()
    order = encode_queries([(query, 40 + at) for at, query in enumerate(QUERIES)], batch)
    found = BatchQueries(batch, operation_sizes(batch))
    for slot, index in enumerate(order):
        assert found.query(slot) == QUERIES[index]
        assert found.minimums[slot] == 40 + index
    assert shards_in(batch) == {0}


@pytest.mark.parametrize(
    "columns",
    [
        {"count_id1s": [A]},
        {"range_id1s": [A], "range_atypes": [1], "range_positions": [0]},
        {"time_range_id1s": [A], "time_range_atypes": [1], "time_range_highs": [1], "time_range_lows": [1]},
        {"time_range_starts": [B]},
        {
            "time_range_id1s": [A, B],
            "time_range_atypes": [1, 1],
            "time_range_highs": [1, 1],
            "time_range_lows": [1, 1],
            "time_range_limits": [1, 1],
            "time_range_starts": [B],
        },
        {"get_id1s": [A], "get_atypes": [1], "get_id2_counts": [2], "get_id2s": [B], "get_highs": [1], "get_lows": [0]},
        {"obj_ids": [A], "minimum_slots": [0]},
        {"exist_id1s": [A], "exist_atypes": [1]},
        {"exist_id2s": [A]},
    ],
)
async def test_columns_of_unequal_length_are_refused(rig: LeaderRig, columns: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="columns"):
        Asked(rig, **columns)


async def test_hits_leave_at_once_and_misses_follow_under_their_slots(rig: LeaderRig) -> None:
    ticket = rig.cache.object_ticket(B, 0.0)
    rig.cache.store_object(ticket, encode_object(make_version(1, 1), 1, b"x"), 1, 0.0)
    asked = Asked(rig, obj_ids=[A, B])
    assert [list(answer.read.slots) for answer in asked.answers] == [[1]]
    assert set(await asked.all()) == {0, 1}
    assert list(asked.answers[-1].read.missed_slots) == [0]
    assert asked.answers[-1].read.served_by == "database"
    again = Asked(rig, obj_ids=[A, B])
    assert len(again.answers) == 1
    assert not again.answers[0].more
    assert list(again.answers[0].read.slots) == [], "all hits: values in order need no slots"


@pytest.mark.parametrize("warm", [False, True])
async def test_a_limit_above_the_type_s_bound_is_cut_and_the_answer_says_so(rig: LeaderRig, warm: bool) -> None:
    stored_list(rig, 600, NOTE)
    wide = {"range_id1s": [A], "range_atypes": [NOTE], "range_positions": [0], "range_limits": [10_000]}
    window = {
        "time_range_id1s": [A],
        "time_range_atypes": [NOTE],
        "time_range_highs": [MAX_TIME],
        "time_range_lows": [0],
        "time_range_limits": [10_000],
    }
    if warm:
        await Asked(rig, **wide).all()
    for value in (await Asked(rig, **wide, **window).all()).values():
        assert header(value)[2] == 500
        assert header(value)[3] & LIMIT_CUT
    exact = {**wide, "range_limits": [500]}
    assert not header((await Asked(rig, **exact).all())[0])[3] & LIMIT_CUT


async def test_an_entry_below_the_minimum_version_is_no_hit(rig: LeaderRig) -> None:
    stored_list(rig, 1)
    await Asked(rig, count_id1s=[A], count_atypes=[COMMENT]).all()
    store = rig.store
    assert isinstance(store, MemoryStore)
    store.rows.lists[ListKey(A, COMMENT)] = ListRow(1, make_version(1, 2))
    minimum = {"minimum_slots": [1], "minimum_versions": [make_version(1, 2)]}
    found = await Asked(rig, obj_ids=[A], count_id1s=[A], count_atypes=[COMMENT], **minimum).all()
    assert found[1][:8] == make_version(1, 2).to_bytes(8, "little")


async def test_each_invalid_query_fails_alone(rig: LeaderRig) -> None:
    asked = Asked(
        rig,
        obj_ids=[A, 0, 1 << 63, make_id(1, 3)],
        count_id1s=[A],
        count_atypes=[999],
        range_id1s=[A],
        range_atypes=[999],
        range_positions=[0],
        range_limits=[5],
        time_range_id1s=[A],
        time_range_atypes=[COMMENT],
        time_range_highs=[1 << 63],
        time_range_lows=[0],
        time_range_limits=[5],
        get_id1s=[A],
        get_atypes=[COMMENT],
        get_id2_counts=[MAX_ID2_SET + 1],
        get_id2s=range(1, MAX_ID2_SET + 2),
        get_highs=[MAX_TIME],
        get_lows=[0],
        exist_id1s=[A, A, 0],
        exist_atypes=[COMMENT, 999, COMMENT],
        exist_id2s=[0, B, B],
    )
    assert await asked.reasons() == {
        1: InvalidArgument.reason,
        2: InvalidArgument.reason,
        3: NotMine.reason,
        4: UnknownType.reason,
        5: UnknownType.reason,
        6: InvalidArgument.reason,
        7: TooLarge.reason,
        8: InvalidArgument.reason,
        9: UnknownType.reason,
        10: InvalidArgument.reason,
    }
    assert rig.reads.counters.failures == [3, 1, 1, 1, 1, 3]


async def test_a_check_is_answered_by_one_byte_missed_or_cached(rig: LeaderRig) -> None:
    stored_list(rig, 3)
    columns = {"exist_id1s": [A, A, B], "exist_atypes": [COMMENT] * 3, "exist_id2s": [B + 2, B + 4, B + 2]}
    for _ in range(2):
        assert await Asked(rig, **columns).all() == {0: EXISTS, 1: EXISTS_NOT, 2: EXISTS_NOT}
    assert (rig.reads.counters.misses[EXISTS_GROUP], rig.reads.counters.hits[EXISTS_GROUP]) == (3, 3)
    assert await Asked(rig, obj_ids=[A], critical=True, **columns).all() | {0: b""} == {
        0: b"",
        1: EXISTS,
        2: EXISTS_NOT,
        3: EXISTS_NOT,
    }


async def test_a_check_waits_for_the_version_that_it_asks_for(rig: LeaderRig) -> None:
    stored_list(rig, 3)
    check = {"exist_id1s": [A], "exist_atypes": [COMMENT], "exist_id2s": [B + 4]}
    assert await Asked(rig, **check).all() == {0: EXISTS_NOT}
    store = rig.store
    assert isinstance(store, MemoryStore)
    stored_list(rig, 4)
    store.rows.lists[ListKey(A, COMMENT)] = ListRow(4, make_version(1, 2))
    minimum = {"minimum_slots": [0], "minimum_versions": [make_version(1, 2)]}
    assert await Asked(rig, **check).all() == {0: EXISTS_NOT}
    assert await Asked(rig, **check, **minimum).all() == {0: EXISTS}


async def test_uncached_list_is_queried_and_not_denied(rig: LeaderRig) -> None:
    """Neither a list that nobody has read nor one longer than its cached prefix is taken for empty."""
    stored_list(rig, 2_000)
    check = {"exist_id1s": [A], "exist_atypes": [COMMENT], "exist_id2s": [B + 1]}
    for _ in range(2):
        assert await Asked(rig, **check).all() == {0: EXISTS}
    held = rig.cache.peek_list(A, COMMENT)
    assert held is not None
    assert header(held)[2] < 2_000


async def test_ids_asked_for_twice_are_answered_once(rig: LeaderRig) -> None:
    stored_list(rig, 3)
    get = {"get_id1s": [A], "get_atypes": [COMMENT], "get_highs": [MAX_TIME], "get_lows": [0]}
    for _ in range(2):
        found = await Asked(rig, get_id2_counts=[3], get_id2s=[B + 1, B + 2, B + 1], **get).all()
        assert [edge.id2 for edge in decode_block(found[0])] == [B + 2, B + 1]


async def test_a_deadline_of_zero_is_refused(rig: LeaderRig) -> None:
    with pytest.raises(DeadlineExceeded):
        Asked(rig, deadline_ms=0, obj_ids=[A])


async def test_a_critical_read_is_never_answered_from_memory(rig: LeaderRig) -> None:
    for _ in range(2):
        await Asked(rig, obj_ids=[A], critical=True).all()
    store = rig.store
    assert isinstance(store, MemoryStore)
    assert [critical for _, critical in store.reads] == [True, True]


def test_slots_are_left_out_of_every_column() -> None:
    here, there = make_id(64), make_id(64, 1)
    queries: list[Query] = [
        *(ObjectQuery(here), ObjectQuery(there), CountQuery(there, NOTE), CountQuery(here, NOTE)),
        *(RangeQuery(there, NOTE, 0, 5), TimeRangeQuery(here, NOTE, 9, 0, 5), EdgesQuery(there, NOTE, (1, 2), 9, 0)),
    ]
    batch = pb.ReadBatch()
    encode_queries([(query, 0) for query in queries], batch)
    values: list[bytes | None] = [b"value"] * len(queries)
    leave_out(batch, values, {1})
    assert [value is None for value in values] == [False, True, True, False, True, False, True]
    early: list[bytes | None] = [b"value"] * 2
    leave_out(batch, early, {1})
    assert early == [b"value", None]


async def test_misses_are_refused_when_no_task_can_be_started_for_the_database(rig: LeaderRig) -> None:
    rig.tasks.refuses = True
    assert await Asked(rig, obj_ids=[A]).reasons() == {0: Overloaded.reason}


async def test_an_answer_to_a_cache_carries_the_version_epochs_of_its_shards(rig: LeaderRig) -> None:
    for _ in range(2):
        asked = Asked(rig, obj_ids=[A], for_fill=True)
        await asked.all()
        assert list(asked.answers[-1].read.epoch_shards) == [0]
        assert list(asked.answers[-1].read.version_epochs) == [1]


def bounded(rig: LeaderRig, **bounds: int) -> ReadService:
    """A read service of the rig's parts with other bounds."""
    return ReadService(
        rig.cache,
        rig.single_flight,
        SCHEMA,
        ReadPolicy(lambda _: None, bounds=BatchSettings(**bounds)),
        traffic=Traffic(LoopClock()),
    )


def hold(rig: LeaderRig, object_id: int, size: int) -> None:
    """Have an object with so many bytes of data in the cache."""
    value = encode_object(make_version(1, 1), 1, b"x" * size)
    rig.cache.store_object(rig.cache.object_ticket(object_id, 0.0), value, 1, 0.0)


def sizes_of(asked: Asked) -> list[int]:
    return [sum(map(len, answer.read.values)) for answer in asked.answers]


async def test_more_queries_than_a_batch_may_have_are_refused(rig: LeaderRig) -> None:
    with pytest.raises(TooLarge, match="at most 10000 at a time"):
        Asked(rig, obj_ids=[A] * 10_001)
    assert not rig.tasks.running


async def test_hits_leave_in_parts_until_the_answer_is_full(rig: LeaderRig) -> None:
    hold(rig, A, 1_000)
    reads = bounded(rig, max_part_bytes=5_000, max_answer_bytes=20_000)
    asked = Asked(rig, reads=reads, obj_ids=[A] * 100)
    sizes = sizes_of(asked)
    assert max(sizes) <= 5_000
    assert 15_000 < sum(sizes) <= 20_000
    came = [slot for answer in asked.answers for slot in answer.read.slots]
    full = await asked.reasons()
    assert sorted([*came, *full]) == list(range(100))
    assert set(full.values()) == {AnswerFull.reason}
    assert [answer.more for answer in asked.answers] == [True] * (len(sizes) - 1) + [False]
    assert reads.counters.hits[0] == len(came)


async def test_parts_of_lists_are_not_copied_beyond_what_goes_into_the_answer(rig: LeaderRig) -> None:
    stored_list(rig, 400)
    await Asked(rig, range_id1s=[A], range_atypes=[COMMENT], range_positions=[0], range_limits=[400]).all()
    columns: dict[str, Any] = {
        "range_id1s": [A] * 1_000,
        "range_atypes": [COMMENT] * 1_000,
        "range_positions": [1] * 1_000,
        "range_limits": [300] * 1_000,
    }
    batch = pb.ReadBatch(**columns)
    copied = answer_hits(rig.cache, batch, operation_sizes(batch), {COMMENT: 10_000}, 50_000, {})
    assert 50_000 < sum(len(value or b"") for value in copied) < 60_000
    asked = Asked(rig, reads=bounded(rig, max_answer_bytes=50_000), **columns)
    assert sum(sizes_of(asked)) <= 50_000
    assert len(await asked.reasons()) > 980


async def test_misses_are_fetched_few_at_a_time_and_end_with_the_room_of_the_answer(rig: LeaderRig) -> None:
    store = rig.store
    assert isinstance(store, MemoryStore)
    for number in range(100):
        store.rows.objects[A + number] = ObjectRow(A + number, 1, make_version(1, 1), False, b"x" * 1_000)
    reads = bounded(rig, max_part_bytes=2_500, max_answer_bytes=20_000, max_misses_at_once=10)
    asked = Asked(rig, reads=reads, obj_ids=[A + number for number in range(100)])
    full = await asked.reasons()
    assert max(len(queries) for queries, _ in store.reads) <= 10
    assert sum(len(queries) for queries, _ in store.reads) <= 30
    assert max(sizes_of(asked)) <= 3_600
    assert 15_000 < sum(sizes_of(asked)) <= 20_000
    assert set(full.values()) == {AnswerFull.reason}
    assert sum(len(answer.read.values) for answer in asked.answers) + len(full) == 100


async def test_a_slow_miss_delays_no_other(rig: LeaderRig) -> None:
    held: list[Callable[[], None]] = []
    fetch = rig.source.fetch

    def fetch_later(asked: FetchRequest) -> None:
        if asked.query == ObjectQuery(A):
            held.append(partial(fetch, asked))
        else:
            fetch(asked)

    rig.source.fetch = fetch_later  # type: ignore[method-assign]
    asked = Asked(rig, reads=bounded(rig, max_misses_at_once=2), obj_ids=[A + number for number in range(20)])
    await until(lambda: sum(len(answer.read.values) for answer in asked.answers) == 19)
    held.pop()()
    assert len(await asked.all()) == 20


WRONG = MAX_TIME + 1
WRONG_QUERIES: list[dict[str, Any]] = [
    {"range_id1s": [A, A], "range_atypes": [COMMENT] * 2, "range_positions": [WRONG, 0], "range_limits": [5, 5]},
    *(
        {
            "time_range_id1s": [A, A],
            "time_range_atypes": [COMMENT] * 2,
            "time_range_highs": [high, 9],
            "time_range_lows": [low, 0],
            "time_range_limits": [5, 5],
        }
        for high, low in ((WRONG, 0), (WRONG, WRONG))
    ),
    *(
        {
            "get_id1s": [A, A],
            "get_atypes": [COMMENT] * 2,
            "get_id2_counts": [2, 1],
            "get_id2s": [B + 1, id2, B + 1],
            "get_highs": [high, 9],
            "get_lows": [0, 0],
        }
        for id2, high in ((0, 9), (1 << 63, 9), (B, WRONG))
    ),
]


@pytest.mark.parametrize("columns", WRONG_QUERIES)
@pytest.mark.parametrize("warm", [False, True])
async def test_an_invalid_query_is_refused_whatever_is_cached(
    rig: LeaderRig, columns: dict[str, Any], warm: bool
) -> None:
    stored_list(rig, 3)
    if warm:
        await Asked(rig, range_id1s=[A], range_atypes=[COMMENT], range_positions=[0], range_limits=[5]).all()
    asked = Asked(rig, **columns)
    assert await asked.reasons() == {0: InvalidArgument.reason}
    assert {slot for answer in asked.answers for slot in answer.read.slots} == {1}


async def test_an_answer_names_each_shard_s_version_epoch_once(rig: LeaderRig) -> None:
    for object_id in range(A, A + 50):
        hold(rig, object_id, 1)
    missing = range(B, B + 50)
    asked = Asked(rig, for_fill=True, obj_ids=[*range(A, A + 50), *missing])
    assert len(await asked.all()) == 100
    assert [list(answer.read.epoch_shards) for answer in asked.answers] == [[0]] * len(asked.answers)
    assert [list(answer.read.version_epochs) for answer in asked.answers] == [[1]] * len(asked.answers)
