"""One `tao load` from its options to its summary: the parts wired together, and where it resumes."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from tao.cli.connecting import graph_of
from tao.cli.loading import key_map as key_maps
from tao.cli.loading import rejects as reject_files
from tao.cli.loading.csv_source import CsvSource
from tao.cli.loading.edges import EdgeLoad, EndColumn, end_otype
from tao.cli.loading.key_map import KeyMap, Progress
from tao.cli.loading.objects import ObjectLoad
from tao.cli.loading.pipeline import Load, Pipeline, PipelineSettings
from tao.cli.loading.rejects import RejectFile
from tao.client import ClientSettings, Graph
from tao.model.errors import OperatorError

STANDARD_INPUT: Final = Path("-")
_TIMEOUT_SECONDS: Final = 30.0  # a load has time: a server that is busy must not look like one that is away


@dataclass(frozen=True, slots=True)
class LoadInput:
    """Where records come from, and where what belongs to them lies."""

    file: Path
    name: str | None = None
    """For standard input: what the key map and the rejected lines are named after."""
    keys: Path | None = None
    delimiter: str = ","
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Column → field, where they are called differently."""
    raw_ids: bool = False
    """The columns hold ids of the graph, not external keys."""

    @property
    def beside(self) -> Path:
        """The path that the other files' names start with. Raises `OperatorError` when there is none."""
        if self.file != STANDARD_INPUT:
            return self.file
        if not self.name:
            raise OperatorError("standard input has no name to keep keys and rejected lines under: give it one, --name")
        return Path(self.name)

    @property
    def key_map(self) -> Path:
        """The key map's file."""
        return self.keys or self.beside.with_name(self.beside.name + key_maps.SUFFIX)

    @property
    def rejects(self) -> Path:
        """The file of rejected lines."""
        return self.beside.with_name(self.beside.name + reject_files.SUFFIX)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What a load has done. ``loaded`` and ``rejected`` count from the file's beginning, ``seconds`` and ``rate`` are
    this run's."""

    file: str
    loaded: int
    rejected: int
    resumed_after_line: int
    seconds: float
    per_second: float
    key_map: str
    rejects: str | None
    inverse_pending: int = 0
    """Edges whose other end was not written at once: the leaders write it within seconds."""


OnProgress = Callable[[Progress, int], None]
"""Called with the progress and the size of the input in bytes (0: unknown)."""


async def load_objects(
    connect: str | None, given: LoadInput, otype: str, key_column: str, settings: PipelineSettings, tell: OnProgress
) -> Summary:
    """Load objects. Raises `OperatorError` for wrong options or files, before anything is written."""
    with _opened(given) as file, KeyMap(given.key_map) as key_map:
        async with _graph(connect) as graph:
            found = graph.schema.otype(otype)
            source = _source(file, given)
            keys = None if given.raw_ids else key_map
            load = ObjectLoad(graph, source, found, key_column, given.renamed, keys)
            options = {"otype": otype, "key": key_column, "map": sorted(given.renamed.items()), "raw": given.raw_ids}
            return await _run(load, source, key_map, given, "objects", options, settings, tell)


async def load_edges(
    connect: str | None,
    given: LoadInput,
    atype: str,
    columns: tuple[str, str],
    otypes: tuple[str | None, str | None],
    edge_time: str | None,
    settings: PipelineSettings,
    tell: OnProgress,
) -> Summary:
    """Load edges. ``edge_time``: a number for all, a column, or None for the second in which the first run began.

    Raises `OperatorError` for wrong options or files, before anything is written."""
    with _opened(given) as file, KeyMap(given.key_map, must_exist=not given.raw_ids) as key_map:
        async with _graph(connect) as graph:
            found = graph.schema.atype(atype)
            source = _source(file, given)
            ends = (
                EndColumn(columns[0], None if given.raw_ids else end_otype(key_map, otypes[0], "--from-otype")),
                EndColumn(columns[1], None if given.raw_ids else end_otype(key_map, otypes[1], "--to-otype")),
            )
            at: int | str
            if edge_time is None:
                before = key_map.progress(_name_of(given, "edges"))
                at = before.started_unix if before else int(time.time())
            else:
                at = int(edge_time) if edge_time.isascii() and edge_time.isdigit() else edge_time
            load = EdgeLoad(graph, source, found, ends, at, given.renamed, key_map)
            options = {
                "atype": atype,
                "ends": [(end.column, end.otype) for end in ends],
                "time": edge_time,
                "map": sorted(given.renamed.items()),
            }
            summary = await _run(load, source, key_map, given, "edges", options, settings, tell)
            return msgspec.structs.replace(summary, inverse_pending=graph.stats.inverse_pending)


async def _run(
    load: Load,  # type: ignore[type-arg]  # of whatever item: the pipeline keeps to one
    source: CsvSource,
    key_map: KeyMap,
    given: LoadInput,
    kind: str,
    options: Mapping[str, object],
    settings: PipelineSettings,
    tell: OnProgress,
) -> Summary:
    name = _name_of(given, kind)
    before = key_map.progress(name)
    # A stream cannot be known again, nor entered in its middle: it is loaded from its beginning, and what is there
    # already stays as it is.
    stream = given.file == STANDARD_INPUT
    fingerprint = "" if stream else source.fingerprint(given.file.stat().st_mtime_ns, options)
    began = int(time.time()) if before is None else before.started_unix
    progress = Progress(fingerprint=fingerprint, started_unix=began)
    if before is not None and not before.finished and fingerprint and before.fingerprint == fingerprint:
        # In a cluster that was made anew since, what the file says is done is not there.
        if before.witness and await load.holds(before.witness):
            progress = before
    else:
        key_map.note_progress(name, progress)
    rejects = RejectFile(given.rejects, source.columns, delimiter=given.delimiter, size=progress.rejects_bytes)
    resumed_after, done_before = progress.lines, progress.loaded + progress.rejected
    clock = time.monotonic()
    pipeline = Pipeline(load, source, key_map, name, rejects, settings, lambda reached: tell(reached, source.size))
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
    )


@asynccontextmanager
async def _graph(connect: str | None) -> AsyncIterator[Graph]:
    async with graph_of(connect, ClientSettings(timeout_seconds=_TIMEOUT_SECONDS)) as graph:
        yield graph


def _name_of(given: LoadInput, kind: str) -> str:
    """Under which a load's progress is noted: short, and the same wherever it is run from."""
    path = str(given.beside.absolute())
    return f"{kind} {hashlib.sha256(os.fsencode(path)).hexdigest()[:16]} {given.beside.name}"


def _opened(given: LoadInput) -> BinaryIO:
    if given.file == STANDARD_INPUT:
        _ = given.beside  # refuses a stream without a name
        return sys.stdin.buffer
    try:
        return given.file.open("rb")
    except OSError as error:
        raise OperatorError(f"cannot read {given.file}: {error.strerror}") from error


def _source(file: BinaryIO, given: LoadInput) -> CsvSource:
    size = 0 if given.file == STANDARD_INPUT else os.fstat(file.fileno()).st_size
    return CsvSource(file, str(given.file), delimiter=given.delimiter, size=size)
