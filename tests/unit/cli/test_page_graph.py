"""What the demonstration believes that its files say, and which files it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tao.cli.demonstration.figures import DemonstrationFailed, Latency, PassFigures
from tao.cli.demonstration.generated_graph import GraphFiles
from tao.cli.demonstration.page_graph import read_files
from tao.model.errors import OperatorError

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
