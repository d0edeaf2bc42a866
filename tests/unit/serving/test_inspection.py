"""What `tao verify` and `tao repair` report as wrong, and what only as late."""

from __future__ import annotations

import pytest

from tao.admin.repair import _fault
from tao.model.edge_block import COMPLETE, PREFIX, encode_block
from tao.model.graph import Edge, encode_count, encode_object
from tao.serving.inspection import Verdict, compare_list, compare_value

EDGES = [Edge(9, 9), Edge(8, 8, b"d"), Edge(7, 7)]


def block(version: int, n: int, count: int = 3, flags: int | None = None, edges: list[Edge] = EDGES) -> bytes:
    return encode_block(
        version, count, edges[:n], (PREFIX | (COMPLETE if n == count else 0)) if flags is None else flags
    )


@pytest.mark.parametrize(
    ("cached", "stored", "verdict"),
    [
        (encode_object(5, 1, b"x"), encode_object(5, 1, b"x"), Verdict.EQUAL),
        (encode_object(4, 1, b"x"), encode_object(5, 1, b"y"), Verdict.BEHIND),
        (encode_object(6, 1, b"x"), encode_object(5, 1, b"y"), Verdict.AHEAD),
        (encode_object(5, 1, b"x"), encode_object(5, 1, b"y"), Verdict.DIFFERENT),
        (encode_object(5, 2, b"x"), encode_object(5, 1, b"x"), Verdict.DIFFERENT),
        (encode_count(5, 1), encode_count(5, 2), Verdict.DIFFERENT),
    ],
)
def test_values_of_one_version_must_be_equal(cached: bytes, stored: bytes, verdict: Verdict) -> None:
    assert compare_value(cached, stored) is verdict


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [
        (block(5, 3), Verdict.EQUAL),
        (block(5, 2), Verdict.EQUAL),
        (block(4, 2), Verdict.BEHIND),
        (block(6, 2), Verdict.AHEAD),
        (block(5, 2, count=2), Verdict.DIFFERENT),
        (block(5, 2, flags=PREFIX | COMPLETE), Verdict.DIFFERENT),
        (block(5, 3, flags=PREFIX), Verdict.DIFFERENT),
        (block(5, 2, flags=0), Verdict.DIFFERENT),
        (block(5, 2, edges=[EDGES[0], EDGES[2]]), Verdict.DIFFERENT),
        (block(5, 2, edges=[EDGES[0], Edge(8, 8, b"e")]), Verdict.DIFFERENT),
    ],
)
def test_a_cached_list_is_a_prefix_of_the_stored_one_and_its_complete_flag_is_right(
    cached: bytes, verdict: Verdict
) -> None:
    assert compare_list(cached, block(5, 3)) is verdict


@pytest.mark.parametrize(
    ("mirror", "fault"),
    [
        (Edge(1, 5, b"d"), ""),
        (None, "no inverse"),
        (Edge(1, 6, b"d"), "inverse has another time"),
        (Edge(1, 5, b"e"), "inverse has other data"),
    ],
)
def test_an_edge_and_its_inverse_have_one_time_and_one_data(mirror: Edge | None, fault: str) -> None:
    assert _fault(Edge(2, 5, b"d"), mirror) == fault
