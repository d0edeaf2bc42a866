"""The evaluation of sets: what is asked of which list, budgets, order, and lists that cannot be read."""

from __future__ import annotations

from functools import reduce

import pytest

from tao.model.errors import InvalidArgument, TooLarge, Unavailable
from tao.model.queries import CountQuery, EdgesQuery, TimeRangeQuery
from tao.sets.cursor import Place
from tao.sets.evaluation import FoundCount
from tao.sets.expression import Expression, ListTerm, SetOperator, combine, union_of
from tao.sets.steps import SetLimits
from tao.sets.streams import MIN_PAGE_EDGES
from tests.rigs.set_lists import SetLists, places

AND, OR, WITHOUT = SetOperator
A, B, C = ListTerm(1, 1), ListTerm(2, 1), ListTerm(3, 1)


def numbered(ids: range, shift: int = 0) -> dict[int, int]:
    """Return a list whose times ascend with its ids."""
    return {id2: id2 + shift for id2 in ids}


def ids_of(store: SetLists, expression: Expression, limit: int = 100) -> list[int]:
    return [edge.id2 for page in store.walk(expression, limit) for edge in page.edges]


def test_difference_continues_after_a_page_with_no_remaining_results() -> None:
    store = SetLists({1: numbered(range(1, 10_001)), 2: numbered(range(2, 10_000))}, limit=300)
    assert ids_of(store, combine(WITHOUT, A, B)) == [10_000, 1]


def test_difference_page_is_not_longer_than_requested() -> None:
    store = SetLists({1: numbered(range(1, 1_001)), 2: numbered(range(500, 600))})
    for page in store.walk(combine(WITHOUT, A, B), 7)[:-1]:
        assert len(page.edges) == 7


def test_intersection_does_not_readmit_an_excluded_id() -> None:
    store = SetLists({1: numbered(range(1, 20)), 2: numbered(range(1, 20)), 3: numbered(range(5, 10))})
    visible = combine(WITHOUT, A, C)
    for expression in (combine(AND, visible, B), combine(AND, B, visible), combine(AND, visible, visible)):
        assert set(ids_of(store, expression, 3)).isdisjoint(range(5, 10))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_id_in_both_union_operands_appears_once_at_its_newer_time(limit: int) -> None:
    store = SetLists({1: {7: 90, 8: 10, 9: 50}, 2: {7: 20, 8: 80, 9: 50}})
    pages = store.walk(combine(OR, A, B), limit)
    edges = [edge for page in pages for edge in page.edges]
    assert [(edge.id2, edge.time, edge.id1) for edge in edges] == [(7, 90, 1), (8, 80, 2), (9, 50, 1)]


@pytest.mark.parametrize("expression", [combine(AND, A, B), combine(AND, B, A)])
def test_short_list_is_read_and_long_list_is_probed_in_either_operand_order(expression: Expression) -> None:
    store = SetLists({1: numbered(range(1, 20_001)), 2: numbered(range(19_701, 20_301))}, limit=6_000)
    assert ids_of(store, expression, 300) == list(range(20_000, 19_700, -1))
    probed = {each.id1 for batch in store.batches for each in batch if isinstance(each, EdgesQuery)}
    assert probed == {1}


@pytest.mark.parametrize("most", [0, 10_000])
def test_result_order_follows_the_left_operand_for_every_plan(most: int) -> None:
    """The newest edges of one list are the oldest of the other."""
    store = SetLists({1: numbered(range(1, 200)), 2: {id2: 1_000 - id2 for id2 in range(1, 150)}})
    limits = SetLimits(materialize_edges=most)
    first = [edge for page in store.walk(combine(AND, A, B), 11, limits) for edge in page.edges]
    second = [edge for page in store.walk(combine(AND, B, A), 11, limits) for edge in page.edges]
    assert [edge.id2 for edge in first] == list(range(149, 0, -1))
    assert [edge.id2 for edge in second] == list(range(1, 150))
    assert {edge.id1 for edge in first} == {1}
    assert {edge.id1 for edge in second} == {2}


def test_stable_edge_appears_once_while_both_lists_are_written() -> None:
    store = SetLists({1: numbered(range(1, 101)), 2: numbered(range(1, 101), shift=-1)})
    turn = 0

    def write() -> None:
        nonlocal turn
        turn += 1
        for id1 in (1, 2):
            store.lists[id1] = numbered(range(1, 101), shift=1 - id1) | {1_000 + turn: 50, 2_000 - turn: 120}

    store.before_batch = write
    for expression in (combine(AND, A, B), combine(OR, A, B), combine(WITHOUT, A, C)):
        assert [each for each in ids_of(store, expression, 7) if each <= 100] == list(range(100, 0, -1))


def test_unions_side_by_side_share_the_budget_of_a_page() -> None:
    lists, parts = 60, 4
    store = SetLists({id1: numbered(range(id1, 400 * lists, lists)) for id1 in range(1, lists + 1)})
    unions: list[Expression] = [union_of(range(first, lists + 1, parts), 1) for first in range(1, parts + 1)]
    expression = reduce(lambda one, two: combine(SetOperator.OR, one, two), unions)
    for max_examined in (500, 3_000, 9_000):
        store.batches.clear()
        found = store.run(store.evaluate(expression, limits=SetLimits(max_examined=max_examined)).count(1_000_000))
        assert not found.exact
        asked = [each.limit for batch in store.batches for each in batch if isinstance(each, TimeRangeQuery)]
        assert sum(asked) <= max_examined + 3 * lists


def test_intersections_side_by_side_share_the_budget_of_a_page() -> None:
    lists, most = 14, 10_000
    store = SetLists({id1: numbered(range(id1, 4_000)) for id1 in range(1, lists + 1)})
    pairs = [combine(AND, ListTerm(id1, 1), ListTerm(id1 + 1, 1)) for id1 in range(1, lists, 2)]
    pages: Expression = reduce(lambda one, two: combine(SetOperator.OR, one, two), pairs[1:], pairs[0])
    for expression in (pages, combine(AND, A, pages), combine(AND, pages, A)):
        store.batches.clear()
        store.run(store.evaluate(expression, limits=SetLimits(max_examined=most)).page(1_000))
        first = [each.limit for each in store.batches[0] if isinstance(each, TimeRangeQuery)]
        assert sum(first) <= most + 4 * MIN_PAGE_EDGES  # no page is smaller than that


@pytest.mark.parametrize(("operator", "expected"), [(AND, 50), (WITHOUT, 150)])
def test_an_operand_with_large_fields_is_asked_for_ids_instead_of_read_whole(
    operator: SetOperator, expected: int
) -> None:
    store = SetLists({1: numbered(range(1, 201)), 2: numbered(range(151, 251 if operator is WITHOUT else 250))})
    whole = store.page(combine(operator, A, B), 1_000)
    assert "whole" in whole.plan
    store.data = b"x" * 255
    page = store.page(combine(operator, A, B), 1_000, limits=SetLimits(materialize_bytes=10_000))
    assert "whole" not in page.plan
    assert [edge[:2] for edge in page.edges] == [edge[:2] for edge in whole.edges]
    assert len(page.edges) == expected


@pytest.mark.parametrize("operator", SetOperator)
@pytest.mark.parametrize("broken", [1, 2])
def test_unreadable_list_fails_the_page_and_is_not_treated_as_empty(operator: SetOperator, broken: int) -> None:
    store = SetLists({1: numbered(range(1, 50)), 2: numbered(range(20, 40))})
    store.failing[broken] = Unavailable("down")
    for expression in (combine(operator, A, B), combine(operator, A, union_of([2, 3], 1))):
        evaluation = store.evaluate(expression)
        for steps in (evaluation.page(5), evaluation.count(5), evaluation.among([1, 30])):
            with pytest.raises(Unavailable):
                store.run(steps)


def test_a_union_that_may_skip_lists_names_the_ones_it_skipped() -> None:
    store = SetLists({1: {5: 5}, 2: {6: 6}, 3: {7: 7}})
    store.failing[2] = Unavailable("down")
    page = store.page(union_of([1, 2, 3], 1, skip_missing=True), 10)
    assert [edge.id2 for edge in page.edges] == [7, 5]
    assert page.missing == {B: store.failing[2]}


def test_a_count_without_skipped_lists_is_not_exact() -> None:
    store = SetLists({1: {5: 5}, 2: {6: 6}, 3: {7: 7}})
    expression = union_of([1, 2, 3], 1, skip_missing=True)
    assert store.run(store.evaluate(expression).count(10)) == FoundCount(3, exact=True)
    store.failing[2] = Unavailable("down")
    assert store.run(store.evaluate(expression).count(10)) == FoundCount(2, exact=False)


def test_exhausted_budget_returns_a_cursor_and_says_so() -> None:
    store = SetLists({1: numbered(range(1, 5_000)), 2: numbered(range(10_000, 20_000))})
    limits = SetLimits(materialize_edges=1_000, max_examined=1_500)
    page = store.page(combine(AND, A, B), 10, limits=limits)
    assert page.cut_short
    assert page.cursor is not None
    assert page.edges == []
    assert page.examined >= 1_500
    assert "budget" in page.plan
    assert [edge for each in store.walk(combine(AND, A, B), 10, limits) for edge in each.edges] == []


def test_a_page_moves_on_however_slow_its_lists_are() -> None:
    store = SetLists({1: numbered(range(1, 1_000)), 2: numbered(range(5_000, 9_000))})

    def pass_time() -> None:
        store.now += 10.0

    store.before_batch = pass_time
    limits = SetLimits(materialize_edges=0)
    pages = store.walk(combine(OR, combine(AND, A, B), combine(AND, A, C)), 10, limits)
    assert len(pages) > 3
    assert all(page.cut_short for page in pages[:-1])


def test_cursor_of_another_expression_is_rejected() -> None:
    store = SetLists({1: numbered(range(1, 9)), 2: numbered(range(1, 9))})
    cursor = store.page(combine(AND, A, B), 2).cursor
    with pytest.raises(InvalidArgument, match="another set expression"):
        store.page(combine(AND, B, A), 2, cursor)


def test_a_union_asks_again_only_lists_whose_last_edge_is_among_the_best() -> None:
    lists = {id1: {id1 * 100 + place: place for place in range(10)} for id1 in range(1, 101)}
    lists[1] = {id2: 1_000 + id2 for id2 in range(1, 201)}
    store = SetLists(lists)
    page = store.page(union_of(range(1, 101), 1), 50)
    assert [edge.id2 for edge in page.edges] == list(range(200, 150, -1))
    first, *later = store.batches
    assert len(first) == 100
    assert {each.id1 for batch in later for each in batch} == {1}


def test_the_first_page_of_a_union_asks_no_list_which_ids_it_has() -> None:
    store = SetLists({id1: numbered(range(id1, 200 + id1)) for id1 in range(1, 40)})
    first = store.page(union_of(range(1, 40), 1), 20)
    assert not any(isinstance(each, EdgesQuery) for batch in store.batches for each in batch)
    store.page(union_of(range(1, 40), 1), 20, first.cursor)
    lows = {each.low for batch in store.batches for each in batch if isinstance(each, EdgesQuery)}
    assert lows == {first.edges[-1].time}


def test_a_long_walk_over_a_union_forgets_ids_and_still_repeats_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tao.sets.merge._MAX_SEEN", 10)
    store = SetLists({1: numbered(range(1, 101)), 2: numbered(range(1, 101), shift=-7), 3: {1: 1, 2: 500}})
    kept = store.evaluate(union_of([1, 2, 3], 1))
    walked: list[Place] = []
    while True:
        page = store.run(kept.page(9))
        walked += places(page.edges)
        if page.cursor is None:
            break
    assert walked == places(store.expected(union_of([1, 2, 3], 1)))


def test_an_intersection_of_cached_lists_takes_two_round_trips() -> None:
    store = SetLists({1: numbered(range(1, 6_001)), 2: numbered(range(1, 12_000, 2))})
    assert len(store.page(combine(AND, A, B), 50).edges) == 50
    assert [[type(each) for each in batch] for batch in store.batches] == [[TimeRangeQuery] * 2, [EdgesQuery]]


def test_an_intersection_of_two_lists_that_the_first_page_holds_takes_one_round_trip() -> None:
    for first, second in ((range(1, 401), range(1, 800, 2)), (range(1, 401), range(300, 320))):
        store = SetLists({1: numbered(first), 2: numbered(second)})
        assert places(store.page(combine(AND, A, B), 50).edges) == places(store.expected(combine(AND, A, B)))[:50]
        assert len(store.batches) == 1


def test_a_union_of_many_lists_on_the_right_is_counted_and_not_read_at_first() -> None:
    store = SetLists({id1: numbered(range(id1, 300 + id1)) for id1 in range(1, 40)})
    store.page(combine(AND, A, union_of(range(2, 40), 1)), 20)
    assert [type(each) for each in store.batches[0]] == [TimeRangeQuery, *[CountQuery] * 38]


def test_an_operand_read_whole_is_read_once_for_all_pages_of_one_walk() -> None:
    store = SetLists({1: numbered(range(1, 2_001)), 2: numbered(range(100, 300))})
    kept = store.evaluate(combine(WITHOUT, A, B))
    store.run(kept.page(20))
    store.batches.clear()
    for _ in range(20):
        store.run(kept.page(20))
    assert {each.id1 for batch in store.batches for each in batch} == {1}


def test_an_operand_that_has_grown_since_it_was_counted_is_probed() -> None:
    store = SetLists({1: numbered(range(1, 1_001)), 2: numbered(range(301, 501))})

    def grow() -> None:
        if len(store.batches) == 1:
            store.lists[2] = numbered(range(1, 501))

    store.before_batch = grow
    page = store.page(combine(AND, A, B), 10, limits=SetLimits(materialize_edges=250))
    assert places(page.edges) == [Place(id2, id2) for id2 in range(500, 490, -1)]
    assert page.plan == "read 1.1 page by page and asked 2.1 for the ids"


def test_a_count_is_exact_for_a_list_and_for_what_was_counted_to_its_end() -> None:
    store = SetLists({1: numbered(range(1, 301)), 2: numbered(range(101, 401))})
    counts = {
        (expression, limit): store.run(store.evaluate(expression).count(limit))
        for expression in (A, combine(AND, A, B), combine(OR, A, B))
        for limit in (100, 200, 1_000)
    }
    assert [(each.value, each.exact) for each in counts.values()] == [
        *[(300, True)] * 3,
        *[(100, False), (200, True), (200, True)],
        *[(100, False), (200, False), (400, True)],
    ]


def test_two_parts_of_an_answer_share_each_round_trip() -> None:
    store = SetLists({1: numbered(range(1, 50)), 2: numbered(range(1, 50)), 3: numbered(range(1, 50))})
    found = store.run(store.evaluate(combine(WITHOUT, combine(AND, A, B), C)).among([1, 100]))
    assert found == {}
    assert len(store.batches) == 1


def test_a_round_of_a_count_reads_three_edges_of_each_list_beyond_the_budget_at_most() -> None:
    lists = 1_000
    store = SetLists({id1: numbered(range(id1, 100 * lists, lists)) for id1 in range(1, lists + 1)})
    for max_examined in (100, 5_000, 20_000):
        store.batches.clear()
        counted = store.evaluate(union_of(range(1, lists + 1), 1), limits=SetLimits(max_examined=max_examined))
        found = store.run(counted.count(1_000_000))
        assert not found.exact
        asked = [each.limit for batch in store.batches for each in batch if isinstance(each, TimeRangeQuery)]
        assert sum(asked) <= max_examined + 3 * lists


@pytest.mark.parametrize("operator", SetOperator)
def test_no_step_asks_a_large_union_for_more_ids_than_the_budget_has(operator: SetOperator) -> None:
    lists = range(1, 301)
    store = SetLists({id1: numbered(range(id1, 3_000, 300)) for id1 in lists} | {1_000: numbered(range(1, 2_000))})
    limits = SetLimits(max_probes=6_000)
    large, other = union_of(lists, 1), ListTerm(1_000, 1)
    for expression in (large, combine(operator, large, other), combine(operator, other, large)):
        first = store.page(expression, 10, limits=limits)
        second = store.page(expression, 1_000, first.cursor, limits)
        assert places(second.edges) == places(store.expected(expression)[10 : 10 + len(second.edges)])
        assert second.cut_short or expression is not large
    asked = [sum(len(each.id2s) for each in batch if isinstance(each, EdgesQuery)) for batch in store.batches]
    assert 0 < max(asked) <= 6_000 + 300


@pytest.mark.parametrize("operator", SetOperator)
def test_edges_with_much_data_come_in_smaller_answers(operator: SetOperator) -> None:
    store = SetLists({1: numbered(range(1, 2_001)), 2: numbered(range(1_001, 2_501))})
    store.most_edges = 130
    for expression in (combine(operator, A, B), combine(operator, A, union_of([2, 3], 1))):
        for most in (0, 6_000):
            edges = store.page(expression, 1_000, limits=SetLimits(materialize_edges=most)).edges
            assert places(edges) == places(store.expected(expression)[:1_000])


@pytest.mark.parametrize("operator", SetOperator)
def test_an_edge_that_fits_no_answer_fails_the_page(operator: SetOperator) -> None:
    store = SetLists({1: numbered(range(1, 2_001)), 2: numbered(range(1_001, 2_501))})
    store.most_edges = 0
    with pytest.raises(TooLarge):
        store.page(combine(operator, A, B), 100)


def test_ids_are_looked_for_in_a_large_union_a_few_at_a_time() -> None:
    store = SetLists({id1: {id1: 5} for id1 in range(1, 301)})
    evaluation = store.evaluate(union_of(range(1, 301), 1), limits=SetLimits(max_probes=6_000))
    assert list(store.run(evaluation.among(range(250, 350)))) == list(range(250, 301))
    assert len(store.batches) == 5
