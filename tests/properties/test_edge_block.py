"""Edge blocks against plain lists of edges."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tao.cache.splices import splice
from tao.model.changes import GoneEdge, ListChange, sort_edges
from tao.model.edge_block import (
    COMPLETE,
    PREFIX,
    check_block,
    data_at,
    decode_block,
    encode_block,
    first_not_newer,
    header,
    pick_edges,
    position_of,
    slice_block,
)
from tao.model.graph import Edge

ids = st.integers(1, 2**63 - 1) | st.sampled_from([0x0100000000000001, 0x0001000000000100, 256, 1, 65536])
times = st.integers(0, 2**63 - 1) | st.integers(0, 5)
blobs = st.binary(max_size=6)


@st.composite
def edge_lists(draw: st.DrawFn) -> list[Edge]:
    id2s = draw(st.lists(ids, unique=True, max_size=12))
    with_data = draw(st.booleans())
    return sort_edges(Edge(id2, draw(times), draw(blobs) if with_data else b"") for id2 in id2s)


@given(edge_lists(), st.integers(1, 2**62))
def test_a_block_decodes_to_the_edges_it_was_made_of(edges: list[Edge], version: int) -> None:
    block = check_block(encode_block(version, len(edges), edges, COMPLETE | PREFIX))
    assert decode_block(block) == edges
    assert header(block)[:3] == (version, len(edges), len(edges))
    assert [data_at(block, index) for index in range(len(edges))] == [edge.data for edge in edges]


@given(edge_lists(), st.integers(0, 14), st.integers(0, 14))
def test_a_slice_holds_the_edges_of_the_same_slice_of_the_list(edges: list[Edge], start: int, stop: int) -> None:
    block = encode_block(7, 99, edges, PREFIX)
    part = check_block(slice_block(block, start, max(start, stop), 0))
    assert decode_block(part) == edges[start : max(start, stop)]
    assert header(part)[:2] == (7, 99)


@given(edge_lists(), st.data())
def test_picked_edges_come_in_the_order_asked(edges: list[Edge], data: st.DataObject) -> None:
    indexes = data.draw(st.lists(st.integers(0, len(edges) - 1), unique=True)) if edges else []
    part = check_block(pick_edges(encode_block(7, 99, edges, 0), indexes, 0))
    assert decode_block(part) == [edges[index] for index in indexes]


@given(edge_lists(), ids)
def test_an_id2_is_found_where_it_is_and_nowhere_else(edges: list[Edge], other: int) -> None:
    block = encode_block(7, 99, edges, 0)
    for index, edge in enumerate(edges):
        assert position_of(block, edge.id2) == index
    if other not in {edge.id2 for edge in edges}:
        assert position_of(block, other) == -1


@given(edge_lists(), times)
def test_the_first_edge_not_newer_is_found_by_bisection(edges: list[Edge], time: int) -> None:
    expected = next((index for index, edge in enumerate(edges) if edge.time <= time), len(edges))
    assert first_not_newer(encode_block(7, 99, edges, 0), time) == expected


@given(st.integers(0, 200), st.integers(31, 33), st.sets(st.integers(0, 199)), st.booleans())
def test_a_page_of_edges_is_spliced_into_a_block_as_into_a_list(
    held: int, added: int, gone: set[int], puts_back: bool
) -> None:
    """31 edges are searched for one by one, and 33 in a table."""
    before = [Edge(number, held - number, b"") for number in range(1, held + 1)]
    removed = [edge for edge in before if edge.id2 in gone]
    put = [Edge(1000 + number, 3 * number, b"") for number in range(added)]
    if puts_back and removed:
        put[0] = msgspec.structs.replace(removed[0], time=held + 1)
    kept = [edge for edge in before if edge.id2 not in gone]
    after = sort_edges([*kept, *put])
    ends = tuple(GoneEdge(edge.id2, edge.time) for edge in removed)
    change = ListChange(1, 2, 7, 8, len(after), ends, tuple(put))
    block = encode_block(7, held, before, COMPLETE | PREFIX)
    spliced = splice(block, change, 1_000)
    assert spliced is not None
    assert decode_block(check_block(spliced)) == after
    if kept:
        twice = msgspec.structs.replace(kept[-1], time=held + 2)
        contradiction = ListChange(1, 2, 7, 8, len(after), ends, (twice, *put[1:]))
        assert splice(block, contradiction, 1_000) is None
