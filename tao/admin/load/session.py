"""Runs one load of a CSV file from its options to its summary, and decides where it resumes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from tao.admin.connection import ClusterTarget, open_graph
from tao.admin.load.csv_files import REJECTS_SUFFIX, CsvSource, RejectFile
from tao.admin.load.key_map import KEY_MAP_SUFFIX, KeyMap, LoadProgress
from tao.admin.load.pipeline import Load, LoadFiles, Pipeline, PipelineSettings
from tao.admin.load.records import EdgeColumns, EdgeLoad, EndColumn, NodeLoad, ObjectLoad, end_otype
from tao.client import ClientSettings
from tao.model.errors import OperatorError, unreadable

STANDARD_INPUT: Final = Path("-")
_CLIENT: Final = ClientSettings(timeout_seconds=30.0, attach_own_writes=False)
"""A load can wait: a server that is busy must not look like one that does not answer. It reads what it has written from
the master database alone."""


@dataclass(frozen=True, slots=True)
class LoadInput:
    """The input of a load, and the files that belong to it."""

    file: Path
    name: str | None = None
    """The name of the key map and of the file of rejected records, for standard input."""
    keys: Path | None = None
    delimiter: str = ","
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The field of each column whose name differs from its field's."""
    raw_ids: bool = False
    """The columns hold ids of the graph, not external keys."""
    skip_columns: bool = False
    """Leave out columns that are no fields and that no option names. False: such a column is an error, since its name
    may be misspelt."""

    @property
    def beside(self) -> Path:
        """The path from which the other files' names are formed. Raises `OperatorError` when there is none."""
        if self.file != STANDARD_INPUT:
            return self.file
        if not self.name:
            raise OperatorError(
                "standard input has no name for the key map and the rejected lines: give one with --name"
            )
        return Path(self.name)

    def check(self) -> None:
        """Raise `OperatorError` when the input cannot be read, or has no name."""
        _ = self.beside
        if self.file != STANDARD_INPUT:
            _opened(self).close()

    @property
    def key_map(self) -> Path:
        """The path of the key map."""
        return self.keys or self.beside.with_name(self.beside.name + KEY_MAP_SUFFIX)

    @property
    def rejects(self) -> Path:
        """The path of the file of rejected records."""
        return self.beside.with_name(self.beside.name + REJECTS_SUFFIX)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a load.

    ``loaded`` and ``rejected`` count records from the beginning of the file; ``seconds`` and ``per_second`` are those
    of this run."""

    file: str
    loaded: int
    rejected: int
    resumed_after_line: int
    seconds: float
    per_second: float
    key_map: str
    rejects: str | None
    skipped_columns: tuple[str, ...] = ()
    """Columns that were left out (`LoadInput.skip_columns`)."""
    inverse_pending: int = 0
    """Edges whose inverse was still not written when the load stopped waiting for it. The leaders write it once the
    other end can be reached."""


OnProgress = Callable[[LoadProgress, int], None]
"""Receives the progress and the size of the input in bytes (0: unknown)."""


@dataclass(frozen=True, slots=True)
class ObjectInput:
    """The objects in a file: their type, and the column of their external keys."""

    otype: str
    key_column: str


@dataclass(frozen=True, slots=True)
class EdgeInput:
    """The edges in a file."""

    atype: str
    columns: tuple[str, str]
    """The columns of both ends."""
    otypes: tuple[str | None, str | None] = (None, None)
    """The object types of the keys in these columns; None: the only one in the key map."""
    time: str | None = None
    """One time for all edges, or the column of the time. None: the second in which the first run began."""
    state: str | None = None
    """One state for all edges, or the column of the state. None: they are normal."""


@dataclass(frozen=True, slots=True)
class NodeInput:
    """The nodes in a file: the type of their edges, and the columns of their keys and states."""

    atype: str
    key_column: str
    state_column: str
    otype: str | None = None
    """The object type of the keys; None: the only one in the key map."""


async def load_objects(
    target: ClusterTarget, given: LoadInput, objects: ObjectInput, settings: PipelineSettings, on_progress: OnProgress
) -> Summary:
    """Load objects. Raises `OperatorError` for wrong options, files or columns, before anything is written."""
    with _opened(given) as file, KeyMap(given.key_map) as key_map:
        async with open_graph(target, _CLIENT) as graph:
            otype = graph.schema.otype(objects.otype)
            source = _source(file, given)
            keys = None if given.raw_ids else key_map
            load = ObjectLoad(graph, source, otype, objects.key_column, given.renamed, keys)
            options = {
                "otype": objects.otype,
                "key": objects.key_column,
                "map": sorted(given.renamed.items()),
                "raw": given.raw_ids,
            }
            run = _Run(given, "objects", options, source, key_map)
            return await run.load(load, settings, on_progress)


async def load_edges(
    target: ClusterTarget, given: LoadInput, edges: EdgeInput, settings: PipelineSettings, on_progress: OnProgress
) -> Summary:
    """Load edges. Raises `OperatorError` for wrong options, files or columns, before anything is written."""
    with _opened(given) as file, KeyMap(given.key_map, must_exist=not given.raw_ids) as key_map:
        async with open_graph(target, _CLIENT) as graph:
            atype = graph.schema.atype(edges.atype)
            source = _source(file, given)
            ends = tuple(
                EndColumn(column, None if given.raw_ids else end_otype(key_map, otype, option))
                for column, otype, option in zip(
                    edges.columns, edges.otypes, ("--from-otype", "--to-otype"), strict=True
                )
            )
            options = {
                "atype": edges.atype,
                "ends": [(end.column, end.otype) for end in ends],
                "time": edges.time,
                "map": sorted(given.renamed.items()),
                **({"state": edges.state} if edges.state else {}),
            }
            run = _Run(given, "edges", options, source, key_map)
            columns = EdgeColumns((ends[0], ends[1]), run.edge_time(edges.time), edges.state)
            load = EdgeLoad(graph, source, atype, columns, given.renamed, key_map)
            summary = await run.load(load, settings, on_progress)
            return msgspec.structs.replace(summary, inverse_pending=load.inverse_pending)


async def load_nodes(
    target: ClusterTarget, given: LoadInput, nodes: NodeInput, settings: PipelineSettings, on_progress: OnProgress
) -> Summary:
    """Set states of nodes. Raises `OperatorError` for wrong options, files or columns, before anything is written."""
    with _opened(given) as file, KeyMap(given.key_map, must_exist=not given.raw_ids) as key_map:
        async with open_graph(target, _CLIENT) as graph:
            source = _source(file, given)
            otype = None if given.raw_ids else end_otype(key_map, nodes.otype, "--otype")
            columns = (EndColumn(nodes.key_column, otype), nodes.state_column)
            load = NodeLoad(graph, source, graph.schema.atype(nodes.atype), columns, key_map)
            options = {"atype": nodes.atype, "key": nodes.key_column, "otype": otype, "state": nodes.state_column}
            return await _Run(given, "nodes", options, source, key_map).load(load, settings, on_progress)


class _Run:
    """One run of a load: finds where it resumes, runs the pipeline and sums it up."""

    def __init__(
        self, given: LoadInput, kind: str, options: Mapping[str, object], source: CsvSource, key_map: KeyMap
    ) -> None:
        self._given: Final = given
        self._options: Final = options
        self._source: Final = source
        self._key_map: Final = key_map
        self._name: Final = _name_of(given, kind)
        self._before: Final = key_map.progress(self._name)
        self._began: Final = int(time.time()) if self._before is None else self._before.started_unix

    def edge_time(self, given: str | None) -> int | str:
        """Return the time of all edges, or the column of the time."""
        if given is None:
            return self._began
        return int(given) if given.isascii() and given.isdigit() else given

    # `Any`: objects or edges; the pipeline handles one kind.
    async def load(self, load: Load[Any], settings: PipelineSettings, on_progress: OnProgress) -> Summary:
        given, source = self._given, self._source
        skipped = source.unused_columns(load.used_columns)
        if skipped and not given.skip_columns:
            raise OperatorError(_unknown_columns_text(source.name, skipped, load.fields))
        progress = await self._resumed(load)
        rejects = RejectFile(given.rejects, source.columns, delimiter=given.delimiter, size=progress.rejects_bytes)
        resumed_after, done_before = progress.lines, progress.loaded + progress.rejected
        on_progress(progress, source.size)
        clock = time.monotonic()
        files = LoadFiles(source, self._key_map, rejects, self._name)
        pipeline = Pipeline(load, files, settings, lambda reached: on_progress(reached, source.size))
        progress = await pipeline.run(progress)
        seconds = time.monotonic() - clock
        return Summary(
            file=str(given.file),
            loaded=progress.loaded,
            rejected=progress.rejected,
            resumed_after_line=resumed_after,
            seconds=round(seconds, 3),
            per_second=round((progress.loaded + progress.rejected - done_before) / max(seconds, 1e-9), 1),
            key_map=str(given.key_map),
            rejects=str(given.rejects) if progress.rejected else None,
            skipped_columns=tuple(skipped),
        )

    async def _resumed(self, load: Load[Any]) -> LoadProgress:
        """Return the progress from which the load goes on: that of an earlier run, or none."""
        # A stream cannot be recognised, nor entered in its middle: it is loaded from its beginning, and what is there
        # already stays as it is.
        is_stream = self._given.file == STANDARD_INPUT
        fingerprint = "" if is_stream else self._source.fingerprint(self._given.file.stat().st_mtime_ns, self._options)
        fresh = LoadProgress(fingerprint=fingerprint, started_unix=self._began)
        before = self._before
        if before is not None and not before.finished and fingerprint and before.fingerprint == fingerprint:
            # In a cluster that was created anew since, what the progress covers does not exist.
            return before if before.witness and await load.holds(before.witness) else fresh
        self._key_map.note_progress(self._name, fresh)
        return fresh


def _unknown_columns_text(name: str, columns: Sequence[str], fields: Sequence[str]) -> str:
    one = len(columns) == 1
    what = f"the column{'s' * (not one)} {', '.join(map(repr, columns))}, which {'is' if one else 'are'}"
    leave_out = f"leave {'it' if one else 'them'} out with --skip-columns"
    if not fields:
        return f"{name} has {what} not loaded, as there are no fields: {leave_out}"
    return (
        f"{name} has {what} neither {'a field' if one else 'fields'} of the type ({', '.join(fields)}) nor named by an "
        f"option: correct the name, use --map COLUMN=FIELD, or {leave_out}"
    )


def _name_of(given: LoadInput, kind: str) -> str:
    """Return the name under which the progress is noted: short, and the same in whichever folder the load runs."""
    path = str(given.beside.absolute())
    return f"{kind} {hashlib.sha256(os.fsencode(path)).hexdigest()[:16]} {given.beside.name}"


def _opened(given: LoadInput) -> BinaryIO:
    if given.file == STANDARD_INPUT:
        return sys.stdin.buffer
    try:
        return given.file.open("rb")
    except OSError as error:
        raise OperatorError(unreadable(given.file, error)) from error


def _source(file: BinaryIO, given: LoadInput) -> CsvSource:
    size = 0 if given.file == STANDARD_INPUT else os.fstat(file.fileno()).st_size
    return CsvSource(file, str(given.file), delimiter=given.delimiter, size=size)
