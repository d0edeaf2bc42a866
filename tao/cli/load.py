"""`tao load`: load CSV files into the graph; a load can be interrupted, resumed and repeated."""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tao.admin.load.key_map import LoadProgress
from tao.admin.load.pipeline import PipelineSettings
from tao.admin.load.session import (
    STANDARD_INPUT,
    EdgeInput,
    LoadInput,
    NodeInput,
    ObjectInput,
    OnProgress,
    Summary,
    load_edges,
    load_nodes,
    load_objects,
)
from tao.cli.connection import target_of
from tao.cli.frame import INTERRUPTED_STATUS, CommandGroup, begin, fail, run, show
from tao.cli.options import IntRange, combined, region_options
from tao.model.errors import OutcomeUnknown, RetryableError, Unavailable
from tao.terminal import LoadDisplay, counted, print_pairs

REJECTED_STATUS = 1


@click.group(cls=CommandGroup)
def load() -> None:
    """Load objects, edges and states of nodes from CSV files.

    The first line names the columns; a column with the name of a field of the type is loaded into it. A column that is
    no field, and that no option names, is an error before anything is written, unless --skip-columns is given. Progress
    goes to standard error: a bar on a terminal, without one a line now and then.

    Ctrl-C and SIGTERM end a load after the batches that it has begun, and say where; the exit status is 130. The same
    command continues from there; repeated, it changes nothing. Rejected lines go to FILE.rejected.csv, with reasons;
    the exit status is 1 when there are any.
    """


_input_options = combined(
    click.argument("file", type=click.Path(path_type=Path, allow_dash=True)),
    click.option(
        "--skip-columns",
        is_flag=True,
        help="Leave out columns that are no fields of the type and that no option names. The summary names them.",
    ),
    click.option(
        "--keys",
        type=click.Path(path_type=Path),
        help="The key map, which notes ids of external keys.  [default: FILE.keys.sqlite]",
    ),
    click.option("--ids", "raw_ids", is_flag=True, help="The columns hold ids of the graph, not external keys."),
    click.option("--name", help="With - (standard input): the name of the key map and of the rejected lines."),
    click.option("--delimiter", default=",", show_default=True, help="The character between two cells."),
    click.option(
        "--batch",
        "batch_records",
        type=IntRange(1, 6000),
        default=512,
        show_default=True,
        help="The number of records in a batch.",
    ),
    click.option(
        "--in-flight",
        "batches_in_flight",
        type=IntRange(1, 64),
        default=4,
        show_default=True,
        help="The number of batches that are written at once.",
    ),
    region_options,
)
_map_option = click.option(
    "--map",
    "renamed",
    multiple=True,
    metavar="COLUMN=FIELD",
    help="Load this column into a field with another name. May be repeated.",
)


@load.command()
@click.option("--otype", required=True, help="The type of the objects.")
@click.option("--key", "key_column", required=True, metavar="COLUMN", help="The column with the external key.")
@_map_option
@_input_options
def objects(otype: str, key_column: str, **inputs: Any) -> int:  # Any: the input options
    """Load objects, one from each line of FILE ("-" reads standard input).

    An object that was loaded before with the same fields stays as it is; with other fields its line is rejected.
    """
    source, settings = _inputs(**inputs)
    objects = ObjectInput(otype, key_column)
    return _load(source, lambda on_progress: load_objects(target_of(), source, objects, settings, on_progress))


@load.command()
@click.option("--atype", required=True, help="The type of the edges.")
@click.option("--from", "from_column", required=True, metavar="COLUMN", help="The column with the key of id1.")
@click.option("--to", "to_column", required=True, metavar="COLUMN", help="The column with the key of id2.")
@click.option(
    "--from-otype", help="The object type of the keys in the --from column.  [default: the only one in the key map]"
)
@click.option(
    "--to-otype", help="The object type of the keys in the --to column.  [default: the only one in the key map]"
)
@click.option(
    "--time",
    "edge_time",
    metavar="COLUMN|NUMBER",
    help="The time of the edges: a column, or one number for all.  "
    "[default: the Unix second in which the first run began]",
)
@click.option(
    "--state",
    metavar="COLUMN|STATE",
    help="Of a type with states, the state of the edges: a column, or one state for all.  [default: normal]",
)
@_map_option
@_input_options
def edges(  # Any: the input options
    atype: str,
    from_column: str,
    to_column: str,
    from_otype: str | None,
    to_otype: str | None,
    edge_time: str | None,
    state: str | None,
    **inputs: Any,
) -> int:
    """Load edges with their inverses, one from each line of FILE ("-" reads standard input).

    An edge is loaded when it is stored at both ends. A batch waits up to 15 s for the ends that lie at a leader which
    does not answer. Edges that are then still "pending" are stored at one end; the leaders write the other one as soon
    as it can be reached, and nothing has to be repeated. Only edges whose --from id is the smaller one can be pending.
    Other edges that need that leader fail: they are tried again, and the load ends if they keep failing.
    """
    source, settings = _inputs(**inputs)
    edges = EdgeInput(atype, (from_column, to_column), (from_otype, to_otype), edge_time, state)
    return _load(source, lambda on_progress: load_edges(target_of(), source, edges, settings, on_progress))


@load.command()
@click.option("--atype", required=True, help="The type of the nodes' edges, a type with states.")
@click.option("--key", "key_column", required=True, metavar="COLUMN", help="The column with the key of the node.")
@click.option(
    "--state", "state_column", default="state", metavar="COLUMN", show_default=True, help="The column with the state."
)
@click.option("--otype", help="The object type of the keys.  [default: the only one in the key map]")
@_input_options
def nodes(atype: str, key_column: str, state_column: str, otype: str | None, **inputs: Any) -> int:  # Any: see above
    """Set the states of nodes, one from each line of FILE ("-" reads standard input).

    Background jobs move the edges that the nodes have by then: load the edges first. A load that is repeated begins at
    the first line, and changes nothing.
    """
    source, settings = _inputs(**inputs)
    nodes = NodeInput(atype, key_column, state_column, otype)
    return _load(source, lambda on_progress: load_nodes(target_of(), source, nodes, settings, on_progress))


def _inputs(
    file: Path,
    keys: Path | None,
    raw_ids: bool,
    name: str | None,
    delimiter: str,
    skip_columns: bool,
    renamed: tuple[str, ...] = (),
    **pipeline: int,
) -> tuple[LoadInput, PipelineSettings]:
    if len(delimiter) != 1:
        raise click.UsageError(f"--delimiter {delimiter!r} must be one character")
    mapping = {}
    for each in renamed:
        column, equals, field = each.partition("=")
        if not (column and equals and field):
            raise click.UsageError(f"--map {each!r} must have the form COLUMN=FIELD")
        mapping[column] = field
    found = LoadInput(file, name, keys, delimiter, mapping, raw_ids, skip_columns)
    found.check()
    return found, PipelineSettings(**pipeline)


def _load(source: LoadInput, work: Callable[[OnProgress], Coroutine[Any, Any, Summary]]) -> int:
    begin()
    with LoadDisplay() as display:
        try:
            with _terminated_as_interrupted():
                summary = run(work(display.show))
        except KeyboardInterrupt:
            fail(_stopped_text("interrupted", source.file, display.progress), INTERRUPTED_STATUS)
        except (RetryableError, OutcomeUnknown) as error:
            when = " when `tao status` names no server that does not answer" if isinstance(error, Unavailable) else ""
            error.add_note(_stopped_text("the load stopped", source.file, display.progress) + when)
            raise
    show(summary, lambda: _print(summary))
    return REJECTED_STATUS if summary.rejected else 0


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Have SIGTERM, which service managers and schedulers send, end the block as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped_text(what: str, file: Path, progress: LoadProgress | None) -> str:
    """Say where a load has stopped, and how to go on. ``what``: "interrupted", or what else has ended it."""
    if progress is None or not progress.lines:
        return f"{what} before anything was loaded: repeat the same command"
    rejected = f", {progress.rejected:,} rejected" if progress.rejected else ""
    where = f"{what} after line {progress.lines:,} ({progress.loaded:,} loaded{rejected})"
    if file == STANDARD_INPUT:
        return f"{where}: repeat the same command with the whole input; what is loaded already stays as it is"
    return f"{where}: repeat the same command to continue from there"


def _print(summary: Summary) -> None:
    pending = (
        f"{counted(summary.inverse_pending, 'edge')} stored at one end: a leader writes the other end as soon as it "
        "can be reached (`tao status` names what cannot)"
    )
    source = "standard input" if summary.file == str(STANDARD_INPUT) else summary.file
    print_pairs(
        {
            "loaded": f"{counted(summary.loaded, 'line')} of {source}",
            "rejected": f"{summary.rejected:,}" + (f", see {summary.rejects}" if summary.rejects else ""),
            "resumed": f"after line {summary.resumed_after_line:,}" if summary.resumed_after_line else "no",
            "time": f"{summary.seconds:.1f} s, {summary.per_second:,.0f} lines/s",
            "key map": summary.key_map,
            **({"left out": ", ".join(summary.skipped_columns)} if summary.skipped_columns else {}),
            **({"pending": pending} if summary.inverse_pending else {}),
        }
    )
