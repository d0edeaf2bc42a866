"""The files of the social graph: generated or given, loaded as `tao load` does, and read again as what is expected.

A generated graph is seeded and has a heavy tail: by preferential attachment (Barabási and Albert) each new page is
joined to ends of existing edges, drawn evenly, so a page is drawn in proportion to the edges that it has, and few pages
get very many. That tail makes the caching of lists interesting.

The files are read here a second time, by code that shares nothing with the loader: answers of the cluster are compared
with the files, and not with what the loader understood of them. The loader has found every mistake in them by then.
"""

from __future__ import annotations

import csv
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tao.admin.connection import ClusterTarget
from tao.admin.load.key_map import KeyMap, LoadProgress
from tao.admin.load.pipeline import PipelineSettings
from tao.admin.load.session import EdgeInput, LoadInput, ObjectInput, OnProgress, Summary, load_edges, load_objects
from tao.demonstration.narration import check
from tao.model.errors import OperatorError
from tao.terminal import Counting

KINDS: Final = ("company", "government", "politician", "tvshow")
_FIRST_EXTERNAL_ID: Final = 100_000_000_000


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """The files of a graph: undirected edges (``id_1,id_2``) and pages (``id,facebook_id,page_name,page_type``)."""

    edges: Path
    objects: Path


def generate_edges(nodes: int, edges: int, seed: int) -> list[tuple[int, int]]:
    """Return ``edges`` different undirected edges ``(smaller, larger)`` between nodes 0 … ``nodes - 1``.

    Every node has an edge, and the same arguments give the same edges. Raises `OperatorError` when there is no such
    graph, or when it is too dense to be drawn at random."""
    if nodes < 2:
        raise OperatorError(f"a graph of {nodes} nodes has no edges: at least 2 are needed")
    if not nodes - 1 <= edges <= nodes * (nodes - 1) // 4:
        raise OperatorError(
            f"{nodes:,} nodes can have {nodes - 1:,} (one for each new node) to {nodes * (nodes - 1) // 4:,} (half of "
            f"all pairs) edges, not {edges:,}"
        )
    chance = random.Random(seed)
    found = {(0, 1): None}
    ends = [0, 1]

    def join(one: int, other: int) -> None:
        pair = (min(one, other), max(one, other))
        if one != other and pair not in found:
            found[pair] = None
            ends.extend(pair)

    for node in range(2, nodes):
        # As many edges as even growth needs by now, but never more than there are other nodes.
        due = max(1, min(edges * node // (nodes - 1) - len(found), node // 2))
        before = len(found)
        while len(found) < before + min(due, edges - before):
            join(node, chance.choice(ends))
    while len(found) < edges:
        join(chance.choice(ends), chance.randrange(nodes))
    return list(found)


def write_graph(folder: Path, nodes: int, edges: int, seed: int) -> GraphFiles:
    """Generate a graph into two files of ``folder``. Raises what `generate_edges` raises."""
    files = GraphFiles(folder / "edges.csv", folder / "pages.csv")
    drawn = generate_edges(nodes, edges, seed)
    with files.edges.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id_1", "id_2"))
        writer.writerows(drawn)
    chance = random.Random(seed)
    with files.objects.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("id", "facebook_id", "page_name", "page_type"))
        for node in range(nodes):
            writer.writerow((node, _FIRST_EXTERNAL_ID + node, f"Page {node}", chance.choice(KINDS)))
    return files


OTYPE: Final = "page"
ATYPE: Final = "page_likes"
FIELDS: Final = {"page_name": "name", "page_type": "kind", "facebook_id": "external_id"}
"""The field of a page for each column of the objects' file."""
_KEY_MAP: Final = "keys.sqlite"


@dataclass(frozen=True, slots=True)
class PageGraph:
    """The expected graph by id: the fields of each page, and its neighbours."""

    pages: dict[int, dict[str, object]]
    neighbours: dict[int, set[int]]


async def load_graph(target: str, files: GraphFiles, folder: Path) -> tuple[Summary, Summary]:
    """Load pages, then edges, through the followers of ``target``.

    Key map and rejected lines go to ``folder``, and not beside the files. Raises `OperatorError`, and
    `DemonstrationFailed` when a line was rejected."""
    cluster, keys, settings = ClusterTarget(target), folder / _KEY_MAP, PipelineSettings()
    with Counting("pages loaded") as counting:
        given = LoadInput(_linked(files.objects, folder), keys=keys, renamed=FIELDS, skip_columns=True)
        pages = await load_objects(cluster, given, ObjectInput(OTYPE, "id"), settings, _shown_by(counting))
    _check_all(pages)
    with Counting("edges loaded") as counting:
        given = LoadInput(_linked(files.edges, folder), keys=keys, skip_columns=True)
        kind = EdgeInput(ATYPE, ("id_1", "id_2"), (OTYPE, OTYPE))
        edges = await load_edges(cluster, given, kind, settings, _shown_by(counting))
    _check_all(edges)
    return pages, edges


def expected_graph(files: GraphFiles, folder: Path) -> PageGraph:
    """Read files that were loaded, and return the graph by the ids that the load gave to its pages.

    Raises `DemonstrationFailed` when a page has no id, or there are no edges."""
    by_key = {
        row["id"]: {"name": row["page_name"], "kind": row["page_type"], "external_id": int(row["facebook_id"])}
        for row in _rows(files.objects)
    }
    with KeyMap(folder / _KEY_MAP, must_exist=True) as key_map:
        ids = key_map.ids_of(OTYPE, by_key)
    check(len(ids) == len(by_key), f"{len(by_key):,} pages are in the file, {len(ids):,} have an id")
    neighbours: dict[int, set[int]] = {each: set() for each in ids.values()}
    for row in _rows(files.edges):
        one, other = ids[row["id_1"]], ids[row["id_2"]]
        neighbours[one].add(other)
        neighbours[other].add(one)
    check(any(neighbours.values()), f"{files.edges} has no edges")
    return PageGraph({ids[key]: fields for key, fields in by_key.items()}, neighbours)


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def _check_all(summary: Summary) -> None:
    if summary.rejected:
        first = Path(summary.rejects or "").read_text(errors="replace").splitlines()[1]
        check(False, f"{summary.rejected:,} lines of {summary.file} were rejected, the first: {first}")


def _linked(file: Path, folder: Path) -> Path:
    """Link the file into ``folder``: a load writes rejected lines beside its input."""
    link = folder / f"input-{file.name}"
    link.symlink_to(file.absolute())
    return link


def _shown_by(counting: Counting) -> OnProgress:
    def show(progress: LoadProgress, size: int) -> None:
        counting.show(f"{100 * progress.offset // max(size, 1)} % of the file", progress.loaded)

    return show
