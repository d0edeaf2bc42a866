"""The demonstration generates a graph of the wanted size with a heavy tail, and refuses impossible sizes."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from tao.demonstration.figures import DemonstrationFailed, Latency, PassFigures
from tao.demonstration.graph_files import GraphFiles, generate_edges, read_files, write_graph
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


def files(folder: Path, edges: str, pages: str = PAGES) -> GraphFiles:
    found = GraphFiles(folder / "edges.csv", folder / "pages.csv")
    found.edges.write_text(edges)
    found.objects.write_text(pages)
    return found


def test_an_edge_is_found_at_both_ends_once_however_often_and_in_whichever_way_it_is_named(tmp_path: Path) -> None:
    graph = read_files(files(tmp_path, "id_1,id_2\n0,1\n1,0\n0,1\n2,2\n")).by_id({"0": 100, "1": 101, "2": 102})
    assert graph.neighbours == {100: {101}, 101: {100}, 102: {102}}
    assert graph.pages[101] == {"name": "One", "kind": "tvshow", "external_id": 12}


def test_a_page_without_an_id_is_a_failure(tmp_path: Path) -> None:
    graph = read_files(files(tmp_path, "id_1,id_2\n0,1\n"))
    with pytest.raises(DemonstrationFailed, match="3 pages are in the file, 2 have an id"):
        graph.by_id({"0": 100, "1": 101})


@pytest.mark.parametrize(
    ("edges", "pages", "told"),
    [
        ("from,to\n0,1\n", PAGES, "no column id_1, id_2"),
        ("id_1,id_2\n0,9\n", PAGES, "'9' is the id of no page"),
        ("id_1,id_2\n0\n", PAGES, "line 2: a cell is missing"),
        ("id_1,id_2\n", PAGES, "has no edges"),
        ("id_1,id_2\n0,1\n", PAGES.replace("11", "eleven"), "'eleven' is no number"),
    ],
)
def test_files_that_cannot_be_used_are_refused_with_the_reason(
    tmp_path: Path, edges: str, pages: str, told: str
) -> None:
    with pytest.raises(OperatorError, match=told):
        read_files(files(tmp_path, edges, pages))


def test_percentiles_are_measurements_and_the_hit_rate_is_the_followers() -> None:
    latency = Latency.of([number / 1000 for number in range(101)])
    assert (latency.p50_ms, latency.p99_ms) == (50, 99)
    assert Latency.of([0.002]) == Latency(p50_ms=2, p99_ms=2)
    figures = PassFigures(
        name="cold",
        tier="tier-1",
        queries=8,
        by_follower=2,
        by_leader=1,
        by_database=5,
        seconds=2,
        objects=latency,
        lists=latency,
        counts=latency,
    )
    assert (figures.hit_rate, figures.per_second) == (0.25, 4)
