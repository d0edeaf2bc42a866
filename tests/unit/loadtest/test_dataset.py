"""The benchmarks' queries are the paper's: shares, empty results, lengths of lists, limits."""

from collections import Counter
from random import Random

import pytest

from loadtest.dataset import (
    LARGE_LIMIT,
    LONGEST_LIST,
    NON_EMPTY_SHARES,
    READ_SHARES,
    Operation,
    Query,
    StoredList,
    list_length,
    range_limit,
    read_mix,
)

DRAWN = 40_000
OBJECTS = list(range(1, 1001))
LISTS = [StoredList(id1, tuple((id1 + i, 5000 - i) for i in range(1, 1 + id1 % 3 + 1))) for id1 in range(1, 100)]
EMPTY = list(range(500, 600))


@pytest.fixture(scope="module")
def mix() -> list[Query]:
    return read_mix(Random(7), DRAWN, OBJECTS, LISTS, EMPTY)


def test_the_shares_of_the_operations_are_those_of_figure_3(mix: list[Query]) -> None:
    counted = Counter(query.operation for query in mix)
    assert sum(READ_SHARES.values()) == pytest.approx(1.0)
    assert {each: counted[each] / DRAWN for each in READ_SHARES} == pytest.approx(READ_SHARES, abs=0.01)


@pytest.mark.parametrize("operation", list(NON_EMPTY_SHARES))
def test_most_edge_queries_find_nothing(mix: list[Query], operation: Operation) -> None:
    found = [query.expected > 0 for query in mix if query.operation is operation]
    assert sum(found) / len(found) == pytest.approx(NON_EMPTY_SHARES[operation], abs=0.03)


def test_a_query_expects_what_its_list_holds(mix: list[Query]) -> None:
    by_id = {stored.id1: stored for stored in LISTS}
    for query in mix:
        if query.operation in (Operation.ASSOC_RANGE, Operation.ASSOC_TIME_RANGE) and query.expected:
            assert query.expected == min(query.limit, len(by_id[query.id].edges))
        if query.operation is Operation.ASSOC_GET:
            held = {id2 for id2, _ in by_id[query.id].edges} if query.id in by_id else set()
            assert query.expected == (query.id2 in held)


def test_the_same_seed_draws_the_same_queries(mix: list[Query]) -> None:
    assert read_mix(Random(7), DRAWN, OBJECTS, LISTS, EMPTY) == mix


def test_two_thirds_of_the_lists_have_one_edge_and_none_is_longer_than_the_longest() -> None:
    chance = Random(3)
    lengths = [list_length(chance) for _ in range(10_000)]
    assert lengths.count(1) / len(lengths) == pytest.approx(0.64, abs=0.02)
    assert min(length for length in lengths if length > 1) == 2
    assert max(lengths) <= LONGEST_LIST


def test_most_limits_are_large_and_an_eighth_are_one() -> None:
    chance = Random(3)
    limits = Counter(range_limit(chance) for _ in range(10_000))
    assert limits[1] / 10_000 == pytest.approx(0.12, abs=0.02)
    assert limits[LARGE_LIMIT] / 10_000 == pytest.approx(0.88 * 0.95, abs=0.02)
