"""The graph that the demonstration generates: its size, its tail, its files, and what is refused."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from tao.cli.demonstration.generated_graph import generate_edges, write_graph
from tao.model.errors import OperatorError

NODES, EDGES = 2_000, 14_000


def degrees(edges: list[tuple[int, int]]) -> Counter[int]:
    return Counter(end for edge in edges for end in edge)


@pytest.mark.parametrize(("nodes", "edges"), [(NODES, EDGES), (NODES, NODES - 1), (40, 390), (300, 2_000)])
def test_a_graph_has_exactly_the_nodes_and_edges_asked_for_and_none_twice(nodes: int, edges: int) -> None:
    drawn = generate_edges(nodes, edges, seed=1)
    assert len(drawn) == len(set(drawn)) == edges
    assert all(0 <= one < other < nodes for one, other in drawn)
    assert len(degrees(drawn)) == nodes


def test_the_same_seed_gives_the_same_graph_and_another_one_another() -> None:
    assert generate_edges(NODES, EDGES, seed=7) == generate_edges(NODES, EDGES, seed=7)
    assert generate_edges(NODES, EDGES, seed=7) != generate_edges(NODES, EDGES, seed=8)


def test_few_nodes_have_very_many_edges() -> None:
    found = sorted(degrees(generate_edges(NODES, EDGES, seed=1)).values())
    mean = 2 * EDGES / NODES
    assert found[-1] > 8 * mean
    assert found[NODES // 2] < mean, "a heavy tail has its median below its mean"
    assert sum(found[-NODES // 100 :]) > 0.05 * 2 * EDGES, "the top hundredth has several times its share"


@pytest.mark.parametrize(("nodes", "edges"), [(1, 1), (100, 98), (100, 5_000)])
def test_a_size_that_cannot_be_is_refused_with_what_can(nodes: int, edges: int) -> None:
    with pytest.raises(OperatorError, match="nodes"):
        generate_edges(nodes, edges, seed=1)


def test_the_files_have_a_page_for_each_node_and_a_line_for_each_edge(tmp_path: Path) -> None:
    files = write_graph(tmp_path, nodes=50, edges=200, seed=3)
    with files.objects.open(newline="") as file:
        pages = list(csv.DictReader(file))
    with files.edges.open(newline="") as file:
        edges = [(int(row["id_1"]), int(row["id_2"])) for row in csv.DictReader(file)]
    assert [page["id"] for page in pages] == [str(number) for number in range(50)]
    assert len({page["facebook_id"] for page in pages}) == 50
    assert edges == generate_edges(50, 200, seed=3)
