"""The demonstration generates a graph of the wanted size with a heavy tail, and refuses impossible sizes."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from tao.admin.load.key_map import KeyMap
from tao.demonstration.graph_files import GraphFiles, expected_graph, generate_edges, write_graph
from tao.demonstration.narration import DemonstrationFailed, percentiles
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
def test_an_impossible_size_is_refused_with_the_bounds(nodes: int, edges: int) -> None:
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


PAGES = "id,facebook_id,page_name,page_type\n0,11,Zero,company\n1,12,One,tvshow\n2,13,Two,tvshow\n"


def files(folder: Path, edges: str, ids: dict[str, int]) -> GraphFiles:
    """Write both files, and the ids that a load has given to their pages."""
    found = GraphFiles(folder / "edges.csv", folder / "pages.csv")
    found.edges.write_text(edges)
    found.objects.write_text(PAGES)
    with KeyMap(folder / "keys.sqlite") as keys:
        keys.note_ids("page", ids)
    return found


def test_an_edge_is_found_at_both_ends_once_however_often_and_in_whichever_way_it_is_named(tmp_path: Path) -> None:
    given = files(tmp_path, "id_1,id_2\n0,1\n1,0\n0,1\n2,2\n", {"0": 100, "1": 101, "2": 102})
    graph = expected_graph(given, tmp_path)
    assert graph.neighbours == {100: {101}, 101: {100}, 102: {102}}
    assert graph.pages[101] == {"name": "One", "kind": "tvshow", "external_id": 12}


@pytest.mark.parametrize(
    ("edges", "ids", "said"),
    [
        ("id_1,id_2\n0,1\n", {"0": 100, "1": 101}, "3 pages are in the file, 2 have an id"),
        ("id_1,id_2\n", {"0": 100, "1": 101, "2": 102}, "has no edges"),
    ],
)
def test_a_page_without_an_id_and_a_file_without_edges_are_failures(
    tmp_path: Path, edges: str, ids: dict[str, int], said: str
) -> None:
    with pytest.raises(DemonstrationFailed, match=said):
        expected_graph(files(tmp_path, edges, ids), tmp_path)


def test_percentiles_are_measurements_in_milliseconds() -> None:
    assert percentiles([number / 1000 for number in range(101)]) == {"p50_ms": 50, "p99_ms": 99}
    assert percentiles([0.002]) == {"p50_ms": 2, "p99_ms": 2}
