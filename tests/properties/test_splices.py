"""A new edge in front of a list is put there directly, with the same bytes as by the pieces of any other change."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tao.cache.newest_edge_python import with_newest as specified
from tao.cache.splices import _splice, splice
from tao.model.changes import GoneEdge, ListChange, sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block, header
from tao.model.graph import Edge
from tests.rigs.effort import examples

COMPILED: Final = "tao.cache.newest_edge_core"
needs_compiled = pytest.mark.skipif(importlib.util.find_spec(COMPILED) is None, reason="no compiled core here")
WithNewest = Callable[[bytes, ListChange, int], bytes]

FEW = st.integers(0, 4)
edges = st.builds(Edge, id2=FEW, time=FEW, data=st.sampled_from([b"", b"", b"", b"x"]))
plain_edges = st.builds(Edge, id2=FEW, time=FEW)
newer_edges = st.builds(Edge, id2=FEW, time=st.integers(3, 6))
gone_edges = st.builds(GoneEdge, id2=FEW, time=FEW)


def lists_of(some: st.SearchStrategy[Edge], least: int, most: int) -> st.SearchStrategy[list[Edge]]:
    return st.lists(some, min_size=least, max_size=most, unique_by=lambda edge: edge.id2)


@pytest.fixture(scope="module", params=["tao.cache.newest_edge_python", pytest.param(COMPILED, marks=needs_compiled)])
def with_newest(request: pytest.FixtureRequest) -> WithNewest:
    found: WithNewest = importlib.import_module(request.param).with_newest
    return found


@settings(max_examples=examples(500))
@given(
    held=lists_of(plain_edges, 0, 3) | lists_of(edges, 0, 3),
    put=lists_of(newer_edges, 1, 1) | lists_of(edges, 1, 1) | lists_of(edges, 0, 2),
    gone=st.just([]) | st.lists(gone_edges, max_size=1),
    more=st.sampled_from([0, 0, 1, 2]),
    growth=st.sampled_from([1, 1, 0, -1, -2]),
    limit=st.just(9) | FEW,
)
def test_both_ways_to_apply_a_change_give_the_same_block(
    with_newest: WithNewest,
    held: list[Edge],
    put: list[Edge],
    gone: list[GoneEdge],
    more: int,
    growth: int,
    limit: int,
) -> None:
    before = len(held) + more
    block = encode_block(7, before, sort_edges(held), PREFIX | (0 if more else COMPLETE))
    change = ListChange(1, 1, 7, 8, max(0, before + growth), tuple(gone), tuple(put))
    expected = _splice(block, *header(block)[2:], change, limit)
    assert splice(block, change, limit) == expected
    newest = with_newest(block, change, limit)
    assert newest in (b"", expected)
    assert newest == specified(block, change, limit)


@given(
    numbers=st.tuples(*[st.integers(0, 2**64 - 1)] * 4),
    held=st.lists(st.builds(Edge, st.integers(0, 2**63), st.integers(0, 2**62), st.binary(max_size=300)), max_size=9),
    data=st.just(b"") | st.binary(max_size=300),
)
def test_numbers_and_data_of_any_size_are_put_alike(
    with_newest: WithNewest, numbers: tuple[int, int, int, int], held: list[Edge], data: bytes
) -> None:
    before, after, id2, time = numbers
    block = encode_block(before, len(held), sort_edges(held), PREFIX | COMPLETE)
    change = ListChange(1, 1, before, after, len(held) + 1, (), (Edge(id2, time, data),))
    assert with_newest(block, change, 99) == specified(block, change, 99)


def test_a_full_list_is_left_alone(with_newest: WithNewest) -> None:
    block = encode_block(7, 2, [Edge(1, 2, b"x"), Edge(2, 1, b"yz")], PREFIX | COMPLETE)
    change = ListChange(1, 1, 7, 8, 3, (), (Edge(3, 9, b""),))
    assert with_newest(block, change, 9)
    assert not with_newest(block, change, 2)
