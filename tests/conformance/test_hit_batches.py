"""The answers that are made at once, from bytes to bytes, equal those of `ReadService.handle`, byte by byte."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from random import Random
from typing import Any, Final

import pytest

from tao.access.document import load_access
from tao.model.graph import MAX_TIME, Edge, EdgeKey, ListKey
from tao.model.queries import CountQuery, EdgesQuery, ObjectQuery, PairPage, Query, RangeQuery, TimeRangeQuery, start_at
from tao.model.rows import ListRow, ObjectRow
from tao.wire.frames_server import FrameServer
from tao.wire.identity import PeerIdentity
from tao.wire.read_batch import encode_queries, missed_queries, operation_sizes
from tao.wire.session import AnswerAtOnce, Reply
from tao.wire.settings import ServingSettings
from tao.wire.v1 import session_pb2 as pb
from tests.rigs.leader_rig import COMMENT, NOTE, USER, LeaderRig, make_id
from tests.rigs.links_rig import MemoryReply
from tests.rigs.memory_store import MemoryStore
from tests.rigs.pacing import until
from tests.rigs.versions import make_version

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tao.serving.hit_batches_core") is None, reason="no compiled core here"
)
CLIENT: Final = PeerIdentity("web", "client")
FULL, EMPTY, ABSENT, UNCACHED = make_id(64), make_id(65), make_id(66), make_id(67)
EDGES: Final = 30
UNSAMPLED: Final = 1 << 40
VERSION: Final = make_version(1, 5)


@pytest.fixture
async def rig() -> LeaderRig:
    return await warm_rig()


async def warm_rig() -> LeaderRig:
    """Return a leader that has cached an object, an absent one, a list and an empty one."""
    store = MemoryStore(4)
    rig = LeaderRig(store, store)
    await rig.take(0, 1)
    store.rows.objects[FULL] = ObjectRow(FULL, USER, VERSION, deleted=False, data=b"\x80" * 200)
    store.rows.lists[ListKey(FULL, COMMENT)] = ListRow(EDGES, VERSION)
    for time in range(1, EDGES + 1):
        store.rows.edges[EdgeKey(FULL, COMMENT, FULL + time)] = Edge(FULL + time, time, b"\x80" * (time % 3))
    warm: list[Query] = [ObjectQuery(FULL), ObjectQuery(ABSENT), RangeQuery(FULL, COMMENT, 0, 100)]
    warm += [CountQuery(EMPTY, COMMENT), RangeQuery(EMPTY, COMMENT, 0, 10)]
    await usual_answer(rig, request_of(warm))
    store.rows.objects[UNCACHED] = ObjectRow(UNCACHED, USER, VERSION, deleted=False, data=b"\x81" * 90)
    store.rows.lists[ListKey(UNCACHED, COMMENT)] = ListRow(1, VERSION)
    store.rows.edges[EdgeKey(UNCACHED, COMMENT, FULL)] = Edge(FULL, 1, b"")
    return rig


def request_of(queries: list[Query], minimums: dict[int, int] | None = None, **fields: Any) -> pb.Request:
    """Return a request of the usual form; ``minimums`` are by index of the query. `Any`: fields of `Request`."""
    request = pb.Request(**{"number": 7, "deadline_ms": 5_000, "topology_version": 1, **fields})
    encode_queries([(query, (minimums or {}).get(index, 0)) for index, query in enumerate(queries)], request.read)
    request.read.for_fill = False
    return request


async def usual_answer(rig: LeaderRig, request: pb.Request) -> list[bytes]:
    return await answers_of(rig.reads.handle, rig, request)


async def answers_of(
    handle: Callable[[pb.Request, Reply], None], rig: LeaderRig, request: pb.Request, caller: str = ""
) -> list[bytes]:
    answers: list[pb.Answer] = []

    def take(answer: pb.Answer) -> None:
        answers.append(pb.Answer())
        answers[-1].CopyFrom(answer)

    rig.reads.traffic.left = UNSAMPLED
    handle(request, MemoryReply(take, caller=caller))
    await until(lambda: answers and not answers[-1].more)
    for answer in answers:
        answer.number = request.number
    return [answer.SerializeToString() for answer in answers]


def at_once(rig: LeaderRig, request: pb.Request | bytes, version: int = 1) -> bytes | None:
    """Return the answer; None when it is not whole."""
    found = found_at_once(rig, request, version)
    return None if found is None or found.answer_rest else found.encoded


def found_at_once(
    rig: LeaderRig, request: pb.Request | bytes, version: int = 1, *, for_fill: bool = False
) -> AnswerAtOnce | None:
    rig.reads.traffic.left = UNSAMPLED
    encoded = request if isinstance(request, bytes) else request.SerializeToString()
    return rig.reads.fill_at_once(encoded, version) if for_fill else rig.reads.answer_at_once(encoded, "web", version)


async def answers_in_parts(rig: LeaderRig, request: pb.Request) -> list[bytes] | None:
    """Return what is found at once, and then the rest; None when the request is left to the usual way."""
    found = found_at_once(rig, request, for_fill=request.read.for_fill)
    if found is None:
        return None
    answers = [found.encoded] if found.encoded else []
    return answers + (await answers_of(found.answer_rest, rig, request) if found.answer_rest else [])


CACHED: Final[list[Query]] = [
    ObjectQuery(FULL),
    ObjectQuery(ABSENT),
    CountQuery(FULL, COMMENT),
    CountQuery(EMPTY, COMMENT),
    RangeQuery(FULL, COMMENT, 0, 10),
    RangeQuery(FULL, COMMENT, 5, 300),
    RangeQuery(FULL, COMMENT, 1 << 40, 3),
    RangeQuery(EMPTY, COMMENT, 0, 3),
    TimeRangeQuery(FULL, COMMENT, MAX_TIME, 0, 7),
    TimeRangeQuery(FULL, COMMENT, 20, 10, 100),
    TimeRangeQuery(FULL, COMMENT, 20, 10, 100, start_at(3)),
    TimeRangeQuery(FULL, COMMENT, 20, 10, 100, FULL + 20),
    EdgesQuery(FULL, COMMENT, (FULL + 4,)),
    EdgesQuery(FULL, COMMENT, (FULL + 4,), 3, 1),
    EdgesQuery(FULL, COMMENT, (FULL + 400,)),
    EdgesQuery(FULL, COMMENT, (FULL + 4, FULL + 400, FULL + 9, FULL + 4)),
    EdgesQuery(FULL, COMMENT, tuple(FULL + time for time in range(1, 6_001)), 20, 3),
    EdgesQuery(EMPTY, COMMENT, (FULL + 4, FULL + 5)),
]


@pytest.mark.parametrize("query", CACHED)
async def test_each_kind_of_query_is_answered_at_once(rig: LeaderRig, query: Query) -> None:
    request = request_of([query])
    assert [at_once(rig, request)] == await usual_answer(rig, request)


async def test_batches_of_all_kinds_are_answered_as_usual(rig: LeaderRig) -> None:
    chance = Random(4)
    answered = 0
    for size in (*range(1, 40), 300):
        queries = chance.choices(CACHED, k=size)
        minimums = {index: chance.choice((1, VERSION)) for index in range(size) if not chance.randrange(4)}
        request = request_of(queries, minimums if size % 2 else None, number=chance.randrange(1, 1 << 40))
        found = at_once(rig, request)
        if found is not None:
            assert [found] == await usual_answer(rig, request)
            answered += 1
    assert answered >= 20


MISSED: Final[list[Query]] = [
    ObjectQuery(UNCACHED),
    CountQuery(UNCACHED, COMMENT),
    CountQuery(UNCACHED, 1 << 20),
    RangeQuery(UNCACHED, COMMENT, 0, 10),
    TimeRangeQuery(UNCACHED, COMMENT, 20, 10, 100),
    EdgesQuery(UNCACHED, COMMENT, (FULL,)),
    EdgesQuery(UNCACHED, COMMENT, (FULL, FULL + 1)),
]


@pytest.mark.parametrize("query", MISSED)
@pytest.mark.parametrize("hits", [[], CACHED])
@pytest.mark.parametrize("for_fill", [False, True])
async def test_hits_are_answered_at_once_and_then_the_misses_as_usual(
    rig: LeaderRig, query: Query, hits: list[Query], for_fill: bool
) -> None:
    request, other = request_of([*hits, query]), await warm_rig()
    request.read.for_fill = for_fill
    assert await answers_in_parts(rig, request) == await usual_answer(other, request)
    for counted, usual in (
        (rig.reads.counters.hits, other.reads.counters.hits),
        (rig.reads.counters.misses, other.reads.counters.misses),
        (rig.reads.counters.failures, other.reads.counters.failures),
    ):
        assert counted == usual
    assert sum(rig.reads.counters.misses) == 6, "five have warmed the cache"


async def test_batches_with_several_misses_are_answered_as_usual(rig: LeaderRig) -> None:
    chance = Random(6)
    in_parts = 0
    for size in (*range(1, 40), 300):
        queries = chance.choices([*CACHED, *MISSED], k=size)
        minimums = {index: chance.choice((1, VERSION)) for index in range(size) if not chance.randrange(4)}
        request = request_of(queries, minimums if size % 2 else None, number=chance.randrange(1, 1 << 40))
        if size % 3:
            add_checks(request, *THERE, (UNCACHED, FULL))
        request.read.for_fill = size % 5 > 1
        rig, other = await warm_rig(), await warm_rig()
        answers = await answers_in_parts(rig, request)
        if answers is not None:
            assert answers == await usual_answer(other, request)
            assert rig.reads.counters.misses == other.reads.counters.misses
            in_parts += len(answers) > 1
    assert in_parts >= 20


@pytest.mark.parametrize("id_", [0, 1 << 63])
async def test_an_id_that_cannot_be_is_left_over(rig: LeaderRig, id_: int) -> None:
    request = pb.Request(number=1, deadline_ms=9_000, read=pb.ReadBatch(obj_ids=[FULL, id_]))
    assert found_at_once(rig, request) is None
    answers = await usual_answer(rig, request)
    assert pb.Answer.FromString(answers[-1]).read.errors[0].reason == "INVALID_ARGUMENT"


@pytest.mark.parametrize("for_fill", [False, True])
async def test_what_a_cache_asks_for_itself_is_answered_with_version_epochs(rig: LeaderRig, for_fill: bool) -> None:
    absent: Query = ObjectQuery(make_id(70, 1))
    await usual_answer(rig, request_of([absent]))
    request = request_of([*CACHED, absent])
    request.read.for_fill = for_fill
    found = found_at_once(rig, request, for_fill=for_fill)
    (usual,) = await usual_answer(rig, request)
    assert found == AnswerAtOnce(usual, None)
    assert len(pb.Answer.FromString(found.encoded).read.epoch_shards) == 2 * for_fill
    assert found_at_once(rig, request, for_fill=not for_fill) is None


async def test_a_leader_answers_caches_at_once_and_applications_as_usual(rig: LeaderRig) -> None:
    request = request_of([ObjectQuery(FULL)])
    request.read.for_fill = True
    encoded = request.SerializeToString()
    for role, may in (("follower", True), ("leader", True), ("operator", False), ("client", False)):
        found = rig.service.answer_at_once(encoded, PeerIdentity("x", role))
        assert (found is not None) == may


async def test_what_is_older_than_asked_for_is_missed(rig: LeaderRig) -> None:
    queries: list[Query] = [ObjectQuery(FULL), RangeQuery(FULL, COMMENT, 0, 10), CountQuery(FULL, COMMENT)]
    for older in range(3):
        found = found_at_once(rig, request_of(queries, {older: VERSION + 1}))
        assert found is not None
        assert found.answer_rest is not None
        assert len(pb.Answer.FromString(found.encoded).read.slots) == 2


async def test_edges_that_were_asked_of_a_long_list_before_are_hits(rig: LeaderRig) -> None:
    long, edges = make_id(68), 300
    rig.pairs.rows.lists[ListKey(long, COMMENT)] = ListRow(edges, VERSION)
    for time in range(1, edges + 1):
        rig.pairs.rows.edges[EdgeKey(long, COMMENT, long + time)] = Edge(long + time, time, b"\x80" * (time % 3))
    request = request_of([EdgesQuery(long, COMMENT, (long + 1, long + 280, long + 900, long + 2))])
    assert found_at_once(rig, request) is not None
    (first,) = await usual_answer(rig, request)
    hits = sum(rig.reads.counters.hits)
    assert [at_once(rig, request)] == await usual_answer(rig, request)
    assert sum(rig.reads.counters.hits) == hits + 2
    kept, fetched = pb.Answer.FromString(at_once(rig, request) or b""), pb.Answer.FromString(first)
    assert list(kept.read.values) == list(fetched.read.values)
    other = request_of([EdgesQuery(long, COMMENT, (long + 2, long + 1))])
    assert at_once(rig, other) is None
    newer = request_of([EdgesQuery(long, COMMENT, (long + 1, long + 280, long + 900, long + 2))], {0: VERSION + 1})
    assert at_once(rig, newer) is None


async def test_edges_that_only_a_membership_filter_decides_are_hits(rig: LeaderRig) -> None:
    request, other = request_of([EdgesQuery(UNCACHED, COMMENT, (FULL + 7,)), ObjectQuery(UNCACHED)]), await warm_rig()
    for each in (rig, other):
        install_membership_filter(each)
    found = found_at_once(rig, request)
    assert found is not None
    usual = await usual_answer(other, request)
    assert found.encoded == usual[0]
    assert list(pb.Answer.FromString(found.encoded).read.slots) == [1]
    assert rig.cache.denials == other.cache.denials == 1


def add_checks(request: pb.Request, *edges: tuple[int, int], minimum: int = 0) -> pb.Request:
    """Add the question whether each edge exists; ``minimum`` is for the last of them."""
    read = request.read
    for id1, id2 in edges:
        read.exist_id1s.append(id1)
        read.exist_atypes.append(COMMENT)
        read.exist_id2s.append(id2)
    if minimum:
        read.minimum_slots.append(sum(operation_sizes(read)) - 1)
        read.minimum_versions.append(minimum)
    return request


THERE: Final = (FULL, FULL + 4), (FULL, FULL + 400), (EMPTY, FULL)


@pytest.mark.parametrize("others", [[], [ObjectQuery(FULL), EdgesQuery(FULL, COMMENT, (FULL + 4,))]])
@pytest.mark.parametrize("minimum", [0, VERSION])
async def test_checks_are_answered_at_once(rig: LeaderRig, others: list[Query], minimum: int) -> None:
    for edges in (*((each,) for each in THERE[:2]), (THERE[0],) * 12, (*THERE[:2], THERE[0])):
        request = add_checks(request_of(others), *edges, minimum=minimum)
        before = rig.reads.counters.hits[-1]
        assert [at_once(rig, request)] == await usual_answer(rig, request)
        assert rig.reads.counters.hits[-1] == before + 2 * len(edges)
    assert at_once(rig, add_checks(request_of([]), THERE[2])) is not None


async def test_a_check_that_no_entry_decides_is_left_to_the_filters(rig: LeaderRig) -> None:
    request = add_checks(request_of([]), THERE[0], (UNCACHED, FULL))
    assert at_once(rig, request) is None
    shard = rig.cache.filter_shard(0)
    assert shard is not None
    build = shard.begin_pairs(COMMENT)
    assert build.take(PairPage(1, [FULL], [VERSION], [1], [FULL + 4]))
    assert shard.finish_pairs(build, 0.0)
    assert [at_once(rig, request)] == await usual_answer(rig, request)
    newer = add_checks(request_of([]), THERE[0], (UNCACHED, FULL), minimum=VERSION)
    assert at_once(rig, newer) is None


async def test_a_check_of_no_id_is_not_denied(rig: LeaderRig) -> None:
    install_empty_pair_filter(rig)
    request = add_checks(request_of([]), (0, FULL))
    assert at_once(rig, request) is None
    (answer,) = await usual_answer(rig, request)
    (error,) = pb.Answer.FromString(answer).read.errors
    assert error.reason == "INVALID_ARGUMENT"
    assert rig.cache.exist_all([0], [COMMENT], [FULL]) == [None]


async def test_denials_of_a_batch_are_counted_once_and_when_it_is_answered(rig: LeaderRig) -> None:
    install_empty_pair_filter(rig)
    checks = (UNCACHED, FULL), (UNCACHED, FULL + 1)
    left_over = add_checks(request_of([]), *checks)
    left_over.read.count_atypes.append(COMMENT)
    assert found_at_once(rig, left_over) is None
    assert rig.cache.pair_denials == 0
    assert at_once(rig, add_checks(request_of([]), *checks)) is not None
    assert rig.cache.pair_denials == 2
    assert found_at_once(rig, add_checks(request_of([ObjectQuery(UNCACHED)]), *checks)) is not None
    assert rig.cache.pair_denials == 4


def install_membership_filter(rig: LeaderRig) -> None:
    shard = rig.cache.filter_shard(0)
    assert shard is not None
    build = shard.filters.begin(UNCACHED, COMMENT, 0, 1)
    assert build.take(1, VERSION, 1, [FULL])
    assert shard.filters.put(build)


def install_empty_pair_filter(rig: LeaderRig) -> None:
    shard = rig.cache.filter_shard(0)
    assert shard is not None
    build = shard.begin_pairs(COMMENT)
    assert build.take(PairPage(1, [], [], [], []))
    assert shard.finish_pairs(build, 0.0)


async def test_the_queries_that_are_missed_are_those_of_the_usual_way(rig: LeaderRig) -> None:
    far = FULL + (1 << 62)
    asked: list[Query] = [ObjectQuery(UNCACHED), ObjectQuery(FULL), ObjectQuery(far)]
    asked += [CountQuery(UNCACHED, COMMENT), CountQuery(FULL, COMMENT), CountQuery(FULL, NOTE)]
    asked += [RangeQuery(UNCACHED, COMMENT, 0, 300), RangeQuery(FULL, COMMENT, 0, 3), RangeQuery(far, NOTE, 1 << 40, 7)]
    asked += [TimeRangeQuery(FULL, COMMENT, 20, 10, 9), TimeRangeQuery(UNCACHED, COMMENT, MAX_TIME, 3, 9)]
    asked += [TimeRangeQuery(far, NOTE, 9, 2, 8, FULL), EdgesQuery(FULL, COMMENT, (FULL + 4,))]
    asked += [EdgesQuery(UNCACHED, NOTE, (7, far, 7, 9), 1 << 40, 2), EdgesQuery(far, COMMENT, (5,), 200, 100)]
    request = add_checks(request_of(asked, {3: 200, 6: 1 << 50}), (FULL, FULL + 4), (UNCACHED, far), (far, 1))
    sizes, reads = operation_sizes(request.read), rig.reads
    found = reads._hit_batches.answer(request.SerializeToString(), 1, 100, reads.traffic.rates, None, False)
    assert found is not None
    _, by_operation, slots, queries, minimums, _ = found
    usual = missed_queries(request.read, sizes, slots)
    assert (by_operation, len(slots)) == (sizes, 12)
    assert (queries, minimums) == (list(usual.queries), usual.minimums)


async def test_what_is_answered_at_once_is_counted_and_marked_as_used(rig: LeaderRig) -> None:
    hits = rig.reads.counters.hits
    before = list(hits)
    assert at_once(rig, request_of([ObjectQuery(FULL), RangeQuery(FULL, COMMENT, 0, 3), ObjectQuery(FULL)])) is not None
    assert [now - then for now, then in zip(hits, before, strict=True)] == [2, 0, 1, 0, 0, 0]
    assert rig.reads.traffic.left == UNSAMPLED - 3


@pytest.mark.parametrize(
    "request_",
    [
        request_of([]),
        request_of([RangeQuery(FULL, COMMENT, 0, 10_000_000)]),
        request_of([EdgesQuery(FULL, COMMENT, tuple(range(FULL + 1, FULL + 6_002)))]),
        request_of([EdgesQuery(FULL, COMMENT, (FULL + 4, 0, FULL + 9))]),
        request_of([EdgesQuery(FULL, COMMENT, (FULL + 4, 1 << 63))]),
        pb.Request(
            number=1,
            deadline_ms=9,
            read=pb.ReadBatch(
                get_id1s=[FULL],
                get_atypes=[COMMENT],
                get_id2_counts=[3],
                get_id2s=[FULL + 1, FULL + 2],
                get_highs=[9],
                get_lows=[0],
            ),
        ),
        request_of([EdgesQuery(FULL, COMMENT, ())]),
        request_of([ObjectQuery(FULL)], deadline_ms=0),
        request_of([ObjectQuery(FULL)], deadline_ms=(1 << 32) - 1),
        request_of([ObjectQuery(FULL)], number=0),
        request_of([ObjectQuery(FULL)], topology_version=2),
        request_of([ObjectQuery(FULL)], traceparent="00-1-1-01"),
        request_of([ObjectQuery(FULL)], caller="web"),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(obj_ids=[FULL], critical=True)),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(obj_ids=[FULL], for_fill=True)),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(obj_ids=[FULL], max_staleness_ms=5)),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(obj_ids=[FULL], known_slots=[0])),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(count_id1s=[FULL])),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(obj_ids=[FULL], count_atypes=[COMMENT])),
        add_checks(request_of([]), (FULL, 0)),
        add_checks(request_of([]), (FULL, 1 << 63)),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(exist_id1s=[FULL], exist_id2s=[FULL])),
        pb.Request(number=1, deadline_ms=9, read=pb.ReadBatch(exist_id1s=[FULL], exist_atypes=[COMMENT])),
        pb.Request(number=1, deadline_ms=9, write=pb.WriteBatch()),
    ],
)
async def test_the_rest_is_left_to_the_usual_way_and_counts_for_nothing(rig: LeaderRig, request_: pb.Request) -> None:
    before = list(rig.reads.counters.hits)
    assert found_at_once(rig, request_) is None
    assert rig.reads.counters.hits == before
    assert rig.reads.traffic.left == UNSAMPLED


async def test_bytes_that_are_cut_or_changed_are_answered_as_usual_or_left_over(rig: LeaderRig) -> None:
    chance = Random(5)
    whole = add_checks(request_of(chance.choices(CACHED, k=12), {1: 1}), *THERE).SerializeToString()
    for end in range(len(whole)):
        assert found_at_once(rig, whole[:end]) is None
    for _ in range(3_000):
        changed = bytearray(whole)
        changed[chance.randrange(len(changed))] = chance.randrange(256)
        found = found_at_once(rig, bytes(changed))
        if found is not None:
            request = pb.Request.FromString(bytes(changed))
            usual = await usual_answer(await warm_rig() if found.answer_rest else rig, request)
            assert found.encoded in (usual[:1] if found.encoded else [b""])


@pytest.mark.parametrize("left", [1, 2])
async def test_a_query_that_is_due_to_be_sampled_is_answered_at_once_and_sampled_as_usual(
    rig: LeaderRig, left: int
) -> None:
    request = request_of([ObjectQuery(FULL), CountQuery(FULL, COMMENT)])
    (usual,) = await usual_answer(rig, request)
    traffic = rig.reads.traffic
    before = {item.key: item.per_second for item in traffic.rates.keys(10, rig.clock.monotonic())}
    traffic.left = left
    assert rig.reads.answer_at_once(request.SerializeToString(), "web", 1) == AnswerAtOnce(usual, None)
    assert traffic.left > 0
    after = {item.key: item.per_second for item in traffic.rates.keys(10, rig.clock.monotonic())}
    sampled = [key for key, rate in after.items() if rate > before.get(key, 0.0)]
    assert sampled[0] == ((FULL, 0), (FULL, COMMENT))[left - 1]


async def test_a_batch_that_leaves_the_next_sample_to_later_counts_its_queries(rig: LeaderRig) -> None:
    encoded = request_of([ObjectQuery(FULL), CountQuery(FULL, COMMENT)]).SerializeToString()
    traffic = rig.reads.traffic
    traffic.left = 3
    assert rig.reads.answer_at_once(encoded, "web", 1) is not None
    assert traffic.left == 1


HOT_KEYS: Final = [(id1, atype) for id1 in (FULL, EMPTY, ABSENT, UNCACHED) for atype in (0, COMMENT, NOTE)]


async def test_answers_mark_hot_keys_as_usual(rig: LeaderRig) -> None:
    chance = Random(8)
    marked = 0
    for size in (*range(1, 40), 300):
        queries = chance.choices([*CACHED, *MISSED] if size % 2 else CACHED, k=size)
        request = request_of(queries, number=chance.randrange(1, 1 << 40))
        if size % 3:
            add_checks(request, *THERE, (UNCACHED, FULL))
        hot = {key: chance.uniform(1_000, 90_000) for key in chance.sample(HOT_KEYS, chance.randrange(5))}
        rig, other = await warm_rig(), await warm_rig()
        rig.reads.traffic.rates.hot = hot
        other.reads.traffic.rates.hot = dict(hot)
        answers = await answers_in_parts(rig, request)
        if answers is not None:
            assert answers == await usual_answer(other, request)
            marked += any(pb.Answer.FromString(each).read.hot_slots for each in answers)
    assert marked >= 10


async def test_what_is_shown_to_nobody_is_not_marked_for_callers_with_rights(rig: LeaderRig) -> None:
    rules = """
format: 1
version: 1
mode: enforce
roles:
  readers: {read: {objects: [user], associations: [comment]}}
callers: {web: [readers]}
"""
    rig.configuration.access.use_document(load_access(rules, "access.yaml"))
    rig.reads.traffic.rates.hot = {(FULL, 0): 2_000.0, (FULL, COMMENT): 2_000.0, (UNCACHED, COMMENT): 2_000.0}
    request = request_of([ObjectQuery(FULL), CountQuery(FULL, COMMENT), CountQuery(UNCACHED, COMMENT)])
    found = found_at_once(rig, request)
    assert found is not None
    assert pb.Answer.FromString(found.encoded).read.hot_slots == [0, 1]
    answers = await answers_of(rig.reads.handle, rig, request, "web")
    assert answers[0] == found.encoded


async def test_what_a_cache_asks_for_itself_is_not_marked(rig: LeaderRig) -> None:
    request = request_of([ObjectQuery(FULL)])
    request.read.for_fill = True
    rig.reads.traffic.rates.hot = {(FULL, 0): 2_000.0}
    found = found_at_once(rig, request, for_fill=True)
    assert found is not None
    assert [found.encoded] == await usual_answer(rig, request)


async def test_a_type_that_the_caller_may_not_read_is_for_the_usual_way(rig: LeaderRig) -> None:
    rules = """
format: 1
version: 1
mode: enforce
roles:
  objects: {read: {objects: [user], associations: [note]}}
  lists: {read: {objects: [checkin], associations: [comment]}}
callers: {objects: [objects], lists: [lists]}
"""
    rig.configuration.access.use_document(load_access(rules, "access.yaml"))
    for caller, may_object, may_list in (("objects", True, False), ("lists", False, True), ("nobody", False, False)):
        for query, may in ((ObjectQuery(FULL), may_object), (CountQuery(FULL, COMMENT), may_list)):
            rig.reads.traffic.left = UNSAMPLED
            answer = rig.reads.answer_at_once(request_of([query]).SerializeToString(), caller, 1)
            assert (answer is not None) == may
        rig.reads.traffic.left = UNSAMPLED
        check = add_checks(request_of([]), THERE[0]).SerializeToString()
        assert (rig.reads.answer_at_once(check, caller, 1) is not None) == may_list


def test_only_a_handler_that_can_is_asked_to_answer_at_once() -> None:
    class Usual:
        def handle(self, request: pb.Request, reply: Reply) -> None:
            raise NotImplementedError

    class Quick(Usual):
        def answer_at_once(self, request: bytes, peer: PeerIdentity) -> AnswerAtOnce | None:
            return AnswerAtOnce(request, None)

    for handler, can in ((Usual(), False), (Quick(), True)):
        server = FrameServer(handler, ServingSettings(), name="x", topology_version=lambda: 1)
        assert (server.answer_at_once is not None) == can
