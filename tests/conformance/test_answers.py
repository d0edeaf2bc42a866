"""Answers from a cached list, in both implementations: each against plain lists of edges, and against each other."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Sequence
from random import Random
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tao.cache import answers_python
from tao.cache.bloom_filter import MASKS, BloomFilter
from tao.cache.eviction import MOST_CREDIT, USE_CREDIT
from tao.cache.outcomes import EdgesAnswer
from tao.model.changes import sort_edges
from tao.model.edge_block import COMPLETE, HAS_DATA, PREFIX, check_block, decode_block, encode_block, header
from tao.model.errors import ProtocolError
from tao.model.graph import EXISTS, EXISTS_NOT, MAX_TIME, Edge, encode_count, encode_object
from tao.model.ids import MAX_ID
from tao.model.queries import AT_POSITION, start_at

COMPILED = "tao.cache.answers_core"
HAS_COMPILED = importlib.util.find_spec(COMPILED) is not None
MOST = (1 << 64) - 1
needs_compiled = pytest.mark.skipif(not HAS_COMPILED, reason="no compiled core in this environment")


@pytest.fixture(scope="module", params=["tao.cache.answers_python", pytest.param(COMPILED, marks=needs_compiled)])
def core(request: pytest.FixtureRequest) -> ModuleType:
    return importlib.import_module(request.param)


def compiled() -> Any:  # `Any`: the compiled module has the twin's functions and no common type
    return importlib.import_module(COMPILED)


@pytest.mark.parametrize(
    ("values", "foreign"),
    [
        ([], False),
        ([None, b"", encode_object(7, 0, b""), encode_object(7, 1, b"data"), encode_object(7, 9, b"")], False),
        ([None, encode_object(7, 2, b"data")], True),
        ([encode_object(7, 1, b""), encode_object(7, 16, b"")], True),
        ([encode_object(7, (1 << 32) - 1, b"")], True),
    ],
)
def test_object_values_of_foreign_types_are_found(core: ModuleType, values: list[bytes | None], foreign: bool) -> None:
    otypes = (1 << 0 | 1 << 1 | 1 << 9).to_bytes(2, "little")
    assert core.has_foreign_type(values, otypes) is foreign


@pytest.mark.parametrize(
    ("numbers", "foreign"),
    [([], False), ([0, 1, 9, 1], False), ([1, 2], True), ([9, 16], True), ([(1 << 32) - 1], True)],
)
def test_foreign_numbers_are_found(core: ModuleType, numbers: list[int], foreign: bool) -> None:
    assert core.has_foreign_number(numbers, (1 << 0 | 1 << 1 | 1 << 9).to_bytes(2, "little")) is foreign


small = st.integers(0, 12)
numbers = small | st.integers(0, MOST) | st.sampled_from([MAX_TIME - 1, MAX_TIME, MAX_TIME + 1, MOST])
positions = (small | st.integers(0, MAX_TIME)).map(start_at)
id2s = st.integers(1, 12) | st.sampled_from([0x0100000000000001, 0x0001000000000100, 256, MAX_TIME])


@st.composite
def blocks(draw: st.DrawFn) -> bytes:
    """Prefixes of lists, whole ones among them, with and without data."""
    chosen = draw(st.lists(id2s, unique=True, max_size=10))
    data = st.binary(max_size=5) if draw(st.booleans()) else st.just(b"")
    times = st.integers(0, 8) | st.just(MAX_TIME)
    edges = sort_edges(Edge(id2, draw(times), draw(data)) for id2 in chosen)
    more = draw(st.integers(0, 3))
    flags = draw(st.sampled_from([PREFIX, 0])) | (
        0 if more else draw(st.sampled_from([COMPLETE, COMPLETE | PREFIX, 0]))
    )
    return check_block(encode_block(draw(st.integers(0, MOST)), len(edges) + more, edges, flags))


def block_of(*times: int, count: int | None = None, flags: int = PREFIX) -> bytes:
    edges = [Edge(100 + time, time, b"d%d" % time) for time in times]
    complete = COMPLETE if count is None else 0
    return encode_block(7, len(edges) if count is None else count, edges, flags | complete)


def times_in(block: bytes | None) -> list[int] | None:
    return None if block is None else [edge.time for edge in decode_block(check_block(block))]


class Shard:
    """The part of `tao.cache.shard.CachedShard` that answers use."""

    def __init__(self) -> None:
        self.objects = {5: b"12345678five", 6: b""}
        self.lists = {1: {5: block_of(3, 2)}}
        self.counts = {1: {7: encode_count(7, 2)}}
        self.other_objects = ({8: b"12345678eight"},)

    def held_object(self, key: int) -> bytes:
        return self.other_objects[0].get(key, b"")


def test_an_answer_credits_its_entry_with_a_use_and_a_miss_credits_no_entry(core: ModuleType) -> None:
    credits_of = bytearray(31)
    hits = core.Hits({0: Shard()}, credits_of)
    assert hits.objects([5, 6, 8, 9, 1 << 60]) == [b"12345678five", None, b"12345678eight", None, None]
    assert hits.object(5, MOST) is None
    assert hits.object(5, 1) == b"12345678five"
    assert hits.range(5, 1, 0, 1) is not None
    assert hits.range(5, 1, 2, 1) is not None
    assert hits.count(7, 1) == encode_count(7, 2)
    hits.use(30)
    assert {place: credit for place, credit in enumerate(credits_of) if credit} == {
        5: 2 * USE_CREDIT,
        6: 2 * USE_CREDIT,  # id 5 and type 1
        8: 2 * USE_CREDIT,  # object 8, and the count of id 7 and type 1
        30: USE_CREDIT,
    }
    for _ in range(MOST_CREDIT):
        hits.object(5)
    assert credits_of[5] == MOST_CREDIT


def test_a_range_is_answered_from_what_is_held(core: ModuleType) -> None:
    whole, prefix = block_of(50, 40, 30), block_of(50, 40, 30, count=9)
    assert core.range_answer(whole, 0, 3) is whole
    assert core.range_answer(whole, 0, 1000) is whole
    assert times_in(core.range_answer(whole, 1, 1)) == [40]
    assert times_in(core.range_answer(whole, 7, 1)) == []
    assert core.range_answer(prefix, 0, 3) is prefix
    assert core.range_answer(prefix, 0, 4) is None
    assert core.range_answer(prefix, 8, 1) is None
    assert times_in(core.range_answer(prefix, 9, MOST)) == []
    assert times_in(core.range_answer(whole, MOST, MOST)) == []


def test_a_page_starts_at_position_0_or_says_that_it_does_not(core: ModuleType) -> None:
    whole = block_of(50, 40, 30)
    for start, flags in ((0, PREFIX | HAS_DATA), (1, HAS_DATA)):
        page = core.range_answer(whole, start, 2)
        assert header(page) == (7, 3, 2, flags)
        assert [edge.data for edge in decode_block(page)] == [b"d50", b"d40", b"d30"][start : start + 2]


def test_a_time_range_is_answered_where_the_prefix_decides_it(core: ModuleType) -> None:
    whole, prefix = block_of(50, 40, 30), block_of(50, 40, 30, count=9)
    assert times_in(core.time_range_answer(whole, 45, 30, 9)) == [40, 30]
    assert times_in(core.time_range_answer(whole, 20, 30, 9)) == []
    assert core.time_range_answer(prefix, MAX_TIME, 30, 9) is None
    assert times_in(core.time_range_answer(prefix, MAX_TIME, 31, 9)) == [50, 40]
    assert times_in(core.time_range_answer(prefix, 40, 0, 2)) == [40, 30]
    assert times_in(core.time_range_answer(whole, 40, 0, 9, 140)) == [30]
    assert times_in(core.time_range_answer(whole, 40, 0, 9, 141)) == [40, 30]
    assert times_in(core.time_range_answer(whole, MOST, 0, MOST)) == [50, 40, 30]


def test_a_time_range_from_a_position_on_is_answered_where_the_prefix_decides_it(core: ModuleType) -> None:
    whole, prefix = block_of(50, 40, 30), block_of(50, 40, 30, count=9)
    assert times_in(core.time_range_answer(whole, 45, 0, 9, start_at(1))) == [30]
    assert times_in(core.time_range_answer(whole, MAX_TIME, 35, 9, start_at(1))) == [40]
    assert times_in(core.time_range_answer(whole, MAX_TIME, 35, 9, start_at(2))) == []
    assert times_in(core.time_range_answer(whole, MAX_TIME, 0, 9, start_at(MAX_TIME))) == []
    assert times_in(core.time_range_answer(prefix, MAX_TIME, 0, 2, start_at(1))) == [40, 30]
    assert core.time_range_answer(prefix, MAX_TIME, 0, 2, start_at(2)) is None
    assert times_in(core.time_range_answer(prefix, MAX_TIME, 31, 9, start_at(1))) == [40]
    assert core.time_range_answer(prefix, MAX_TIME, 0, 9, start_at(8)) is None
    assert times_in(core.time_range_answer(prefix, MAX_TIME, 0, 9, start_at(9))) == []
    assert not header(core.time_range_answer(whole, MAX_TIME, 0, 2, start_at(1)))[3] & PREFIX


def test_an_edge_is_found_denied_or_undecided(core: ModuleType) -> None:
    whole, prefix = block_of(50, 40, 30), block_of(50, 40, 30, count=9)
    assert times_in(core.edge_answer(whole, 140, MAX_TIME, 0)) == [40]
    assert times_in(core.edge_answer(whole, 140, 39, 0)) == []
    assert times_in(core.edge_answer(whole, 141, MAX_TIME, 0)) == []
    assert times_in(core.edge_answer(prefix, 140, MAX_TIME, 41)) == []
    assert core.edge_answer(prefix, 141, MAX_TIME, 0) is None
    assert times_in(core.edge_answer(prefix, 141, MAX_TIME, 31)) == []
    one = block_of(50)
    assert core.edge_answer(one, 150, MAX_TIME, 0) is one


def test_an_id_that_lies_across_two_is_not_found(core: ModuleType) -> None:
    block = encode_block(7, 2, [Edge(1 << 32, 2), Edge(2 << 32, 1)], COMPLETE | PREFIX)
    assert times_in(core.edge_answer(block, 1, MAX_TIME, 0)) == []
    assert times_in(core.edge_answer(block, 2 << 32, MAX_TIME, 0)) == [1]


def test_a_count_answers_ranges_that_begin_beyond_it(core: ModuleType) -> None:
    assert header(core.beyond_answer(encode_count(5, 0), 0)) == (5, 0, 0, COMPLETE | PREFIX)
    assert header(core.beyond_answer(encode_count(5, 3), 3)) == (5, 3, 0, 0)
    assert core.beyond_answer(encode_count(5, 3), 2) is None
    assert header(core.beyond_answer(encode_count(MOST, MOST), MOST)) == (MOST, MOST, 0, 0)


@needs_compiled
@given(blocks(), numbers, numbers)
@example(block_of(50, 40, 30, count=9), MOST, MOST)
def test_twins_answer_ranges_alike(block: bytes, pos: int, limit: int) -> None:
    assert compiled().range_answer(block, pos, limit) == answers_python.range_answer(block, pos, limit)


@needs_compiled
@given(blocks(), numbers, numbers, numbers, st.just(0) | id2s | numbers | positions)
def test_twins_answer_time_ranges_alike(block: bytes, high: int, low: int, limit: int, start: int) -> None:
    expected = answers_python.time_range_answer(block, high, low, limit, start)
    assert compiled().time_range_answer(block, high, low, limit, start) == expected


@needs_compiled
@given(blocks(), id2s | numbers, numbers, numbers)
def test_twins_find_edges_alike(block: bytes, id2: int, high: int, low: int) -> None:
    assert compiled().edge_answer(block, id2, high, low) == answers_python.edge_answer(block, id2, high, low)


@needs_compiled
@given(blocks(), st.lists(id2s | numbers, max_size=20).map(tuple) | st.lists(id2s), numbers, numbers)
def test_membership_probe_gives_the_same_answer_in_both_cores(
    block: bytes, wanted: Sequence[int], high: int, low: int
) -> None:
    expected = answers_python.edges_answer(block, wanted, high, low)
    answer = compiled().edges_answer(block, wanted, high, low)
    assert answer == expected
    assert answer is None or check_block(answer.block)


@needs_compiled
@given(st.integers(0, 400), st.integers(0, 400), st.randoms(use_true_random=False), st.data())
def test_twins_find_the_same_of_hundreds_of_ids(edges: int, asked: int, random: Random, data: st.DataObject) -> None:
    """More edges than ids and more ids than edges, since the shorter side is the one that is hashed."""
    known = random.sample(range(1, 900), edges)
    sizes = data.draw(st.sampled_from([(0,), (3,), (0, 0, 5)]))
    listed = sort_edges(Edge(id2, random.randrange(50), b"d" * random.choice(sizes)) for id2 in known)
    more = data.draw(st.integers(0, 1))
    block = encode_block(7, edges + more, listed, PREFIX | (0 if more else COMPLETE))
    wanted = random.choices(range(1, 900), k=asked)
    if data.draw(st.booleans()):
        wanted.sort()
    high, low = data.draw(st.sampled_from([(MAX_TIME, 0), (40, 0), (MAX_TIME, 10), (30, 20)]))
    expected = answers_python.edges_answer(block, wanted, high, low)
    assert compiled().edges_answer(block, wanted, high, low) == expected


@given(blocks(), blocks())
def test_twins_merge_parts_alike(one: bytes, other: bytes) -> None:
    merged = answers_python.merged_block(one, other)
    version, count, _, _ = header(other)
    assert merged == encode_block(version, count, sort_edges([*decode_block(one), *decode_block(other)]), 0)
    if HAS_COMPILED:
        assert compiled().merged_block(one, other) == merged


@given(st.lists(st.integers(1, MAX_ID), max_size=200), st.lists(st.integers(1, MAX_ID), max_size=50))
def test_a_filter_may_have_the_same_ids_in_both_cores(added: list[int], others: list[int]) -> None:
    bloom = BloomFilter(30)
    bloom.add(added)
    asked = [*others, *added]
    possible = answers_python.possible_ids(bloom.words, MASKS, asked)
    assert possible == tuple(id2 for id2 in asked if bloom.may_have(id2))
    assert set(added) <= set(possible)
    if HAS_COMPILED:
        assert compiled().possible_ids(bloom.words, MASKS, asked) == possible


def test_ids_are_found_denied_or_undecided(core: ModuleType) -> None:
    whole, prefix = block_of(50, 40, 30), block_of(50, 40, 30, count=9)
    for wanted in ([130, 141, 150], (150, 130, 141, 130)):
        answer = core.edges_answer(whole, wanted, MAX_TIME, 0)
        assert (times_in(answer.block), answer.missing) == ([50, 30], ())
        answer = core.edges_answer(prefix, wanted, MAX_TIME, 0)
        assert (times_in(answer.block), answer.missing) == ([50, 30], (141,))
        assert core.edges_answer(prefix, wanted, 49, 31).missing == ()
        assert times_in(core.edges_answer(whole, wanted, 49, 0).block) == [30]
    assert core.edges_answer(prefix, [131, 141, 131], MAX_TIME, 0) is None
    assert core.edges_answer(whole, [130, 140, 150, 160], MAX_TIME, 0).block is whole
    assert header(core.edges_answer(whole, [], MAX_TIME, 0).block) == (7, 3, 0, 0)


def test_an_edge_exists_or_not_or_the_prefix_cannot_decide(core: ModuleType) -> None:
    whole, prefix = block_of(50, 40, 30), block_of(50, 40, 30, count=9)
    assert (core.existence_answer(whole, 140), core.existence_answer(whole, 141)) == (EXISTS, EXISTS_NOT)
    assert (core.existence_answer(prefix, 140), core.existence_answer(prefix, 141)) == (EXISTS, None)


@given(blocks(), id2s | numbers)
def test_an_edge_exists_where_it_is_found(core: ModuleType, block: bytes, id2: int) -> None:
    edge = core.edge_answer(block, id2, MAX_TIME, 0)
    expected = None if edge is None else (EXISTS if header(edge)[2] else EXISTS_NOT)
    assert core.existence_answer(block, id2) == expected


class OneShard:
    """A shard with a whole list, a prefix and two counts, of which one is zero."""

    def __init__(self) -> None:
        edges = sort_edges(Edge(id2, id2) for id2 in range(1, 40, 2))
        self.lists = {
            1: {5: encode_block(7, 20, edges, COMPLETE | PREFIX), 6: encode_block(7, 30, edges, PREFIX)},
        }
        self.counts: dict[int, dict[int, bytes]] = {1: {7: encode_count(7, 0), 8: encode_count(7, 2)}}


@given(st.lists(st.tuples(st.sampled_from([5, 5, 6, 7, 8, 9, 1 << 60]), st.integers(1, 3), id2s, st.integers(1, 30))))
def test_checks_are_answered_alike_one_by_one_and_in_runs(
    core: ModuleType, runs: list[tuple[int, int, int, int]]
) -> None:
    checks = [(id1, 1 + atype // 3, id2 + step) for id1, atype, id2, length in runs for step in range(length)]
    alone, together = bytearray(31), bytearray(31)
    one_by_one = core.Hits({0: OneShard()}, alone)
    expected = [one_by_one.exists(*check) for check in checks]
    columns = map(column_of, zip(*checks, strict=True)) if checks else (b"", b"", b"")
    assert core.Hits({0: OneShard()}, together).exist_all(*columns) == expected
    assert alone == together


def column_of(numbers: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


def test_columns_of_checks_have_one_length(core: ModuleType) -> None:
    for columns in ((b"", b"", bytes(8)), (bytes(8), b"", bytes(8)), (bytes(16), bytes(16), bytes(8))):
        with pytest.raises(ValueError, match="differ in length"):
            core.Hits({}, bytearray(31)).exist_all(*columns)


@given(st.integers(0, 2_000), st.integers(8, 400), st.booleans(), st.randoms(use_true_random=False))
def test_a_run_of_checks_of_a_long_list_finds_what_is_there(
    core: ModuleType, edges: int, asked: int, is_whole: bool, random: Random
) -> None:
    known = random.sample(range(1, 3_000), edges)
    block = encode_block(7, edges + (not is_whole), sort_edges(Edge(id2, 1) for id2 in known), PREFIX | is_whole)
    wanted = random.choices(range(1, 3_000), k=asked)
    shard = OneShard()
    shard.lists[1][5] = block
    absent = EXISTS_NOT if is_whole else None
    there = frozenset(known)
    found = core.Hits({0: shard}, bytearray(31)).exist_all(*map(column_of, ([5] * asked, [1] * asked, wanted)))
    assert found == [EXISTS if id2 in there else absent for id2 in wanted]


@given(st.sampled_from([5, 6, 7, 8, 9, 1 << 60]), st.integers(1, 2), st.lists(id2s, max_size=50), numbers, numbers)
def test_ids_of_a_column_are_found_as_those_of_a_list(
    core: ModuleType, id1: int, atype: int, wanted: list[int], high: int, low: int
) -> None:
    column = struct.pack(f"<{len(wanted)}Q", *wanted)
    block = OneShard().lists[1].get(id1) if atype == 1 else None
    if block is not None:
        answer = core.edges_answer(block, wanted, high, low)
        expected = None if answer is None or answer.missing else answer.block
    else:
        expected = core.Hits({0: OneShard()}, bytearray(31)).edge(id1, atype, 1, high, low)  # answered by the count
    assert core.Hits({0: OneShard()}, bytearray(31)).edges(id1, atype, column, high, low) == expected
    minimum = core.Hits({0: OneShard()}, bytearray(31)).edges(id1, atype, column, high, low, 8)
    assert minimum is None


@pytest.mark.parametrize(
    ("ids", "foreign"),
    [([], False), ([1, MAX_ID], False), ([1, 0], True), ([MAX_ID + 1, 5], True), ([MOST], True)],
)
def test_numbers_that_are_no_ids_are_found(core: ModuleType, ids: list[int], foreign: bool) -> None:
    assert core.has_foreign_id(ids) is foreign


@needs_compiled
@given(numbers, numbers, numbers)
def test_twins_answer_beyond_a_count_alike(version: int, count: int, pos: int) -> None:
    value = encode_count(version, count)
    assert compiled().beyond_answer(value, pos) == answers_python.beyond_answer(value, pos)


@needs_compiled
@given(blocks(), st.data())
def test_a_damaged_block_is_never_read_beyond(block: bytes, data: st.DataObject) -> None:
    damaged = bytearray(block[: data.draw(st.integers(0, len(block)))])
    for place, byte in data.draw(st.lists(st.tuples(st.integers(0, len(block)), st.integers(0, 255)), max_size=4)):
        if place < len(damaged):
            damaged[place] = byte
    held = bytes(damaged)
    pos, high, low, limit = (data.draw(numbers) for _ in range(4))
    for question, arguments in (
        ("range_answer", (pos, limit)),
        ("time_range_answer", (high, low, limit, pos)),
        ("time_range_answer", (high, low, limit, AT_POSITION | pos)),
        ("edge_answer", (pos, high, low)),
        ("existence_answer", (pos,)),
        ("edges_answer", (data.draw(st.lists(id2s | numbers)), high, low)),
    ):
        answer = or_refused(question, held, arguments)
        # No more comes out than went in, wherever the columns claim to end.
        assert answer is None or len(answer) <= max(len(held), 24)
    try:
        check_block(held)
    except ProtocolError:
        return
    assert or_refused("range_answer", held, (pos, limit)) == answers_python.range_answer(held, pos, limit)


def or_refused(question: str, block: bytes, arguments: Sequence[object]) -> bytes | None:
    try:
        answer = getattr(compiled(), question)(block, *arguments)
    except ValueError:
        return None
    found: bytes | None = answer.block if isinstance(answer, EdgesAnswer) else answer
    return found
