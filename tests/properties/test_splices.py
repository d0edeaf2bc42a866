"""A new edge in front of a list is put there directly, with the same bytes as by the pieces of any other change."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tao.cache.splices import _splice, splice
from tao.model.changes import GoneEdge, ListChange, sort_edges
from tao.model.edge_block import COMPLETE, PREFIX, encode_block, header
from tao.model.graph import Edge
from tests.rigs.effort import examples

FEW = st.integers(0, 4)
edges = st.builds(Edge, id2=FEW, time=FEW, data=st.sampled_from([b"", b"", b"", b"x"]))
plain_edges = st.builds(Edge, id2=FEW, time=FEW)
newer_edges = st.builds(Edge, id2=FEW, time=st.integers(3, 6))
gone_edges = st.builds(GoneEdge, id2=FEW, time=FEW)


def lists_of(some: st.SearchStrategy[Edge], least: int, most: int) -> st.SearchStrategy[list[Edge]]:
    return st.lists(some, min_size=least, max_size=most, unique_by=lambda edge: edge.id2)


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
    held: list[Edge], put: list[Edge], gone: list[GoneEdge], more: int, growth: int, limit: int
) -> None:
    before = len(held) + more
    block = encode_block(7, before, sort_edges(held), PREFIX | (0 if more else COMPLETE))
    change = ListChange(1, 1, 7, 8, max(0, before + growth), tuple(gone), tuple(put))
    assert splice(block, change, limit) == _splice(block, *header(block)[2:], change, limit)
