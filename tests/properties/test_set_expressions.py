"""Every set expression gives what Python's own sets give, page by page, and misses no edge that stands still."""

from __future__ import annotations

from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.model.errors import InvalidArgument
from tao.sets.expression import (
    Combination,
    Expression,
    ListTerm,
    SetOperator,
    Term,
    UnionTerm,
    combine,
    from_terms,
    terms_of,
    union_of,
)
from tao.sets.steps import SetLimits
from tests.rigs.effort import examples
from tests.rigs.set_lists import ListContents, SetLists, places

LISTS = range(1, 7)


def contents_of(first: int, drawn: bytes) -> dict[int, int]:
    """Return a list: each byte says whether the next id is in it, and its time."""
    times = (byte % 26 - 13 for byte in drawn)
    return {id2: time for id2, time in enumerate(times, first) if time >= 0}


# A dictionary would take two draws for each entry, which cost more than the evaluation.
contents = st.binary(max_size=25).map(partial(contents_of, 1))
passing_contents = st.binary(max_size=20).map(partial(contents_of, 26))
lists = st.fixed_dictionaries(dict.fromkeys(LISTS, contents))
bounds = st.tuples(st.integers(0, 13), st.integers(0, 13)).map(lambda pair: (max(pair), min(pair)))
leaves: st.SearchStrategy[ListTerm | UnionTerm] = st.one_of(
    st.sampled_from(LISTS).map(lambda id1: ListTerm(id1, 1)),
    st.builds(lambda id1, pair: ListTerm(id1, 1, *pair), st.sampled_from(LISTS), bounds),
    st.sets(st.sampled_from(LISTS), min_size=1).map(lambda ids: union_of(ids, 1)),
)
operators = st.sampled_from(SetOperator)
expressions = st.recursive(leaves, lambda inner: st.builds(combine, operators, inner, inner), max_leaves=6)
limits = st.builds(
    SetLimits,
    materialize_edges=st.sampled_from([0, 1, 3, 10, 6_000]),
    max_examined=st.sampled_from([1, 5, 20_000]),
)


@settings(max_examples=examples(3_000), deadline=None)
@given(lists, expressions, st.integers(1, 40), limits, st.sampled_from([2, 7, 6_000]))
def test_every_set_expression_matches_python_sets(
    chosen: dict[int, ListContents], expression: Expression, limit: int, bounds: SetLimits, type_limit: int
) -> None:
    store = SetLists(chosen, type_limit)
    expected = store.expected(expression)
    pages = store.walk(expression, limit, bounds)
    assert all(len(page.edges) <= limit for page in pages)
    assert all(len(page.edges) == limit or page.cut_short for page in pages[:-1])
    assert [edge for page in pages for edge in page.edges] == expected
    kept, walked = store.evaluate(expression, limits=bounds), []
    while True:
        page = store.run(kept.page(limit))
        walked += page.edges
        if page.cursor is None:
            break
    assert walked == expected
    asked = list(range(1, 30))
    found = store.run(store.evaluate(expression).among(asked))
    assert found == {edge.id2: edge for edge in expected}
    counted = store.run(store.evaluate(expression, limits=bounds).count(limit))
    if counted.exact:
        assert counted.value == len(expected)
    else:
        assert counted.value <= min(limit, len(expected))


@settings(max_examples=examples(1_500), deadline=None)
@given(lists, expressions, st.integers(1, 9), limits, st.data())
def test_stable_edge_appears_once_while_lists_are_written(
    chosen: dict[int, ListContents], expression: Expression, limit: int, bounds: SetLimits, data: st.DataObject
) -> None:
    """Ids above 25 come and go in every list; the others stand still, and each comes just as often as before."""
    store = SetLists(chosen)
    expected = store.expected(expression)

    def write() -> None:
        id1 = data.draw(st.sampled_from(LISTS))
        passing = data.draw(passing_contents)
        steady = {id2: time for id2, time in store.lists[id1].items() if id2 <= 25}
        store.lists[id1] = steady | passing

    store.before_batch = write
    walked = [edge for page in store.walk(expression, limit, bounds) for edge in page.edges]
    assert places(walked) == sorted(set(places(walked)), reverse=True)
    assert [edge for edge in walked if edge.id2 <= 25] == expected


@given(expressions)
def test_the_postfix_form_gives_the_expression_back(expression: Expression) -> None:
    assert from_terms(terms_of(expression)) == expression


@given(st.lists(st.one_of(leaves, operators), max_size=8))
def test_every_list_of_terms_is_one_expression_or_refused(terms: list[Term]) -> None:
    try:
        expression = from_terms(terms)
    except InvalidArgument:
        return
    assert list(terms_of(expression)) == terms
    assert isinstance(expression, Combination) == (len(terms) > 1)
