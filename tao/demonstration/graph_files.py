"""The social graph of the demonstration: generated or given as files, loaded as `tao load` does, and expected back.

A generated graph is seeded and has a heavy tail: by preferential attachment (Barabási and Albert) each new page is
joined to ends of existing edges, drawn evenly, so a page is drawn in proportion to the edges that it has, and few pages
get very many. That tail makes the caching of lists interesting.

The files are read here a second time, by code that shares nothing with the loader: answers of the cluster are compared
with the files, and not with what the loader understood of them.
"""

from __future__ import annotations

import csv
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tao.admin.connection import ClusterTarget
from tao.admin.load.key_map import KeyMap, LoadProgress
from tao.admin.load.pipeline import PipelineSettings
from tao.admin.load.session import EdgeInput, LoadInput, ObjectInput, Summary, load_edges, load_objects
from tao.demonstration.figures import DemonstrationFailed
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
KEY: Final = "id"
ENDS: Final = ("id_1", "id_2")
FIELDS: Final = {"page_name": "name", "page_type": "kind", "facebook_id": "external_id"}
"""The field of a page for each column of the objects' file."""
_KEY_MAP: Final = "keys.sqlite"


@dataclass(frozen=True, slots=True)
class PageGraph:
    """The expected graph by id: the fields of each page, and its neighbours."""

    pages: dict[int, dict[str, object]]
    neighbours: dict[int, set[int]]


@dataclass(frozen=True, slots=True)
class FileGraph:
    """The graph in the files, by their keys."""

    pages: dict[str, dict[str, object]]
    pairs: list[tuple[str, str]]

    def by_id(self, ids: dict[str, int]) -> PageGraph:
        """Return the graph by the ids that the load has given. Raises `DemonstrationFailed` when a page has none."""
        if len(ids) != len(self.pages):
            raise DemonstrationFailed(f"{len(self.pages):,} pages are in the file, {len(ids):,} have an id")
        neighbours: dict[int, set[int]] = {each: set() for each in ids.values()}
        for one, other in self.pairs:
            neighbours[ids[one]].add(ids[other])
            neighbours[ids[other]].add(ids[one])
        return PageGraph({ids[key]: fields for key, fields in self.pages.items()}, neighbours)


def read_files(files: GraphFiles) -> FileGraph:
    """Read both files. Raises `OperatorError` when one cannot be read or has another form."""
    pages: dict[str, dict[str, object]] = {}
    for row in _rows(files.objects, (KEY, *FIELDS)):
        external_id = row["facebook_id"]
        if not (external_id.isascii() and external_id.isdigit()):
            raise OperatorError(f"{files.objects}: facebook_id {external_id!r} is no number")
        pages[row[KEY]] = {"name": row["page_name"], "kind": row["page_type"], "external_id": int(external_id)}
    pairs = [(row[ENDS[0]], row[ENDS[1]]) for row in _rows(files.edges, ENDS)]
    unknown = next((end for pair in pairs for end in pair if end not in pages), None)
    if unknown is not None:
        raise OperatorError(f"{files.edges}: {unknown!r} is the id of no page in {files.objects}")
    if not pairs:
        raise OperatorError(f"{files.edges} has no edges")
    return FileGraph(pages, pairs)


async def load_graph(
    target: str, files: GraphFiles, folder: Path, settings: PipelineSettings
) -> tuple[Summary, Summary]:
    """Load pages, then edges, through the followers of ``target``.

    Key map and rejected lines go to ``folder``, and not beside the files. Raises `OperatorError`, and
    `DemonstrationFailed` when a line was rejected."""
    keys = folder / _KEY_MAP
    pages = LoadInput(_linked(files.objects, folder), keys=keys, renamed=FIELDS)
    edges = LoadInput(_linked(files.edges, folder), keys=keys)
    with _shown_progress("pages") as show:
        pages_loaded = await load_objects(ClusterTarget(target), pages, ObjectInput(OTYPE, KEY), settings, show)
    _require_all(pages_loaded)
    with _shown_progress("edges") as show:
        kind = EdgeInput(ATYPE, ENDS, (OTYPE, OTYPE))
        edges_loaded = await load_edges(ClusterTarget(target), edges, kind, settings, show)
    _require_all(edges_loaded)
    return pages_loaded, edges_loaded


def ids_given(folder: Path, graph: FileGraph) -> dict[str, int]:
    """Return the ids that the load gave to the pages, by their keys."""
    with KeyMap(folder / _KEY_MAP, must_exist=True) as key_map:
        return key_map.ids_of(OTYPE, graph.pages)


def _require_all(summary: Summary) -> None:
    if summary.rejected:
        first = Path(summary.rejects or "").read_text(errors="replace").splitlines()[1]
        raise DemonstrationFailed(f"{summary.rejected:,} lines of {summary.file} were rejected, the first: {first}")


def _linked(file: Path, folder: Path) -> Path:
    """Link the file into ``folder``: a load writes rejected lines beside its input."""
    link = folder / f"input-{file.name}"
    link.symlink_to(file.absolute())
    return link


def _rows(path: Path, columns: tuple[str, ...]) -> Iterator[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [column for column in columns if column not in (reader.fieldnames or ())]
            if missing:
                raise OperatorError(f"{path} has no column {', '.join(missing)}: it needs {', '.join(columns)}")
            for row in reader:
                if any(row[column] is None for column in columns):
                    raise OperatorError(f"{path}, line {reader.line_num}: a cell is missing")
                yield row
    except OSError as error:
        raise OperatorError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise OperatorError(f"{path} is no CSV file in UTF-8: {error}") from error


@contextmanager
def _shown_progress(what: str) -> Iterator[Callable[[LoadProgress, int], None]]:
    """Show a progress bar on a terminal, and a line every few seconds elsewhere."""
    if sys.stderr.isatty():
        from tao.terminal import LoadDisplay

        with LoadDisplay() as display:
            yield display.show
    else:
        with Counting(f"{what} loaded") as counting:
            yield lambda progress, _size: counting.show(f"line {progress.lines:,}", progress.loaded)
