"""A whole social graph: what the files say, and its way into the cluster by `tao load`.

The files are read here a second time, by code that shares nothing with the loader: what is read back from the cluster
is compared with them and not with what the loader believed them to say.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tao.cli.demonstration.figures import DemonstrationFailed
from tao.cli.demonstration.generated_graph import GraphFiles
from tao.cli.loading.key_map import KeyMap, Progress
from tao.cli.loading.pipeline import PipelineSettings
from tao.cli.loading.session import LoadInput, Summary, load_edges, load_objects
from tao.cli.waiting import Counting
from tao.model.errors import OperatorError

OTYPE: Final = "page"
ATYPE: Final = "page_likes"
KEY: Final = "id"
ENDS: Final = ("id_1", "id_2")
FIELDS: Final = {"page_name": "name", "page_type": "kind", "facebook_id": "external_id"}
"""Column of the objects' file → field of a page."""
_KEY_MAP: Final = "keys.sqlite"


@dataclass(frozen=True, slots=True)
class PageGraph:
    """What the cluster must hold: each page's fields, and the pages at the other end of its edges, by id."""

    pages: dict[int, dict[str, object]]
    neighbours: dict[int, set[int]]


@dataclass(frozen=True, slots=True)
class FileGraph:
    """What the files say, by the keys that they use."""

    pages: dict[str, dict[str, object]]
    pairs: list[tuple[str, str]]

    def by_id(self, ids: dict[str, int]) -> PageGraph:
        """The same with the ids that the load has given. Raises `DemonstrationFailed` when a page has none."""
        if len(ids) != len(self.pages):
            raise DemonstrationFailed(f"{len(self.pages):,} pages are in the file, {len(ids):,} have an id")
        neighbours: dict[int, set[int]] = {each: set() for each in ids.values()}
        for one, other in self.pairs:
            neighbours[ids[one]].add(ids[other])
            neighbours[ids[other]].add(ids[one])
        return PageGraph({ids[key]: fields for key, fields in self.pages.items()}, neighbours)


def read_files(files: GraphFiles) -> FileGraph:
    """Read both files. Raises `OperatorError` when one cannot be read, or is not of the form it should be."""
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
    """Load pages, then edges, through the followers of ``target``. Key map and rejected lines go to ``folder``; the
    files' own folder is left alone. Raises `OperatorError`, and `DemonstrationFailed` when a line was rejected."""
    keys = folder / _KEY_MAP
    pages = LoadInput(_linked(files.objects, folder), keys=keys, renamed=FIELDS)
    edges = LoadInput(_linked(files.edges, folder), keys=keys)
    with _progress("pages") as tell:
        pages_loaded = await load_objects(target, pages, OTYPE, KEY, settings, tell)
    _require_all(pages_loaded)
    with _progress("edges") as tell:
        edges_loaded = await load_edges(target, edges, ATYPE, ENDS, (OTYPE, OTYPE), None, settings, tell)
    _require_all(edges_loaded)
    return pages_loaded, edges_loaded


def ids_given(folder: Path, graph: FileGraph) -> dict[str, int]:
    """The ids that the load gave to the pages, by their keys."""
    with KeyMap(folder / _KEY_MAP, must_exist=True) as key_map:
        return key_map.ids_of(OTYPE, graph.pages)


def _require_all(summary: Summary) -> None:
    if summary.rejected:
        first = Path(summary.rejects or "").read_text(errors="replace").splitlines()[1]
        raise DemonstrationFailed(f"{summary.rejected:,} lines of {summary.file} were rejected, the first: {first}")


def _linked(file: Path, folder: Path) -> Path:
    """The file under a name in ``folder``: a load puts what it rejects beside its input."""
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
def _progress(what: str) -> Iterator[Callable[[Progress, int], None]]:
    """A bar with the rate on a terminal, a line every few seconds elsewhere."""
    if sys.stderr.isatty():
        from tao.cli.loading.display import LoadDisplay

        with LoadDisplay() as display:
            yield display.show
    else:
        with Counting(f"{what} loaded") as counting:
            yield lambda progress, _size: counting.show(f"line {progress.lines:,}", progress.loaded)
