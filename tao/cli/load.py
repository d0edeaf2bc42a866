"""`tao load`: CSV files into the graph; can be cut off, resumed and repeated."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.frame import INTERRUPTED_STATUS, connect_option, fail, json_option, region_option, run
from tao.cli.output import counted, print_json, print_pairs

if TYPE_CHECKING:
    from tao.cli.loading.session import LoadInput, OnProgress, Summary

REJECTED_STATUS = 1


@click.group()
def load() -> None:
    """Load objects and edges from CSV files.

    The first line names the columns; a column named like a field of the type fills it. Interrupted, the same command
    goes on where it was; repeated, it changes nothing. Rejected lines go to FILE.rejected.csv, with reasons; the exit
    status is 1 when there are any.
    """


def _input_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.argument("file", type=click.Path(path_type=Path, allow_dash=True)),
        click.option(
            "--map", "renamed", multiple=True, metavar="COLUMN=FIELD", help="A column named unlike its field."
        ),
        click.option("--keys", type=click.Path(path_type=Path), help="Key map.  [default: FILE.keys.sqlite]"),
        click.option("--ids", "raw_ids", is_flag=True, help="The columns hold ids of the graph, not external keys."),
        click.option("--name", help="With - (standard input): what key map and rejected lines are named after."),
        click.option("--delimiter", default=",", show_default=True, help="Between cells."),
        click.option("--batch", type=click.IntRange(1, 6000), default=512, show_default=True, help="Records a batch."),
        click.option("--in-flight", type=click.IntRange(1, 64), default=4, show_default=True, help="Batches at once."),
        connect_option,
        region_option,
        json_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@load.command()
@click.option("--otype", required=True, help="Type of the objects.")
@click.option("--key", "key_column", required=True, metavar="COLUMN", help="Column of the external key.")
@_input_options
def objects(
    otype: str, key_column: str, batch: int, in_flight: int, connect: str | None, as_json: bool, **given: Any
) -> int:
    """Load objects: a line of FILE each ("-": standard input).

    An object that was loaded before, with the same fields, stays as it is; with others, its line is rejected.
    """
    from tao.cli.loading.pipeline import PipelineSettings
    from tao.cli.loading.session import load_objects

    settings = PipelineSettings(batch_records=batch, batches_in_flight=in_flight)
    source = _load_input(**given)
    return _show(lambda tell: load_objects(connect, source, otype, key_column, settings, tell), as_json)


@load.command()
@click.option("--atype", required=True, help="Type of the edges.")
@click.option("--from", "from_column", required=True, metavar="COLUMN", help="Column of the key of id1.")
@click.option("--to", "to_column", required=True, metavar="COLUMN", help="Column of the key of id2.")
@click.option("--from-otype", help="Type whose keys the column holds.  [default: the only one in the key map]")
@click.option("--to-otype", help="The same for id2.")
@click.option("--time", "edge_time", metavar="COLUMN|NUMBER", help="Edges' time.  [default: when the first run began]")
@_input_options
def edges(
    atype: str,
    from_column: str,
    to_column: str,
    from_otype: str | None,
    to_otype: str | None,
    edge_time: str | None,
    batch: int,
    in_flight: int,
    connect: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Load edges: a line of FILE each ("-": standard input), with their inverses."""
    from tao.cli.loading.pipeline import PipelineSettings
    from tao.cli.loading.session import load_edges

    settings = PipelineSettings(batch_records=batch, batches_in_flight=in_flight)
    source = _load_input(**given)
    columns, otypes = (from_column, to_column), (from_otype, to_otype)
    return _show(lambda tell: load_edges(connect, source, atype, columns, otypes, edge_time, settings, tell), as_json)


def _load_input(
    file: Path, renamed: tuple[str, ...], keys: Path | None, raw_ids: bool, name: str | None, delimiter: str
) -> LoadInput:
    from tao.cli.loading.session import LoadInput

    if len(delimiter) != 1:
        raise click.UsageError(f"--delimiter {delimiter!r} is not one character")
    mapping = {}
    for each in renamed:
        column, equals, field = each.partition("=")
        if not (column and equals and field):
            raise click.UsageError(f"--map {each!r} is no COLUMN=FIELD")
        mapping[column] = field
    return LoadInput(file, name, keys, delimiter, mapping, raw_ids)


def _show(work: Callable[[OnProgress], Coroutine[Any, Any, Summary]], as_json: bool) -> int:
    import msgspec

    from tao.cli.loading.display import LoadDisplay

    with LoadDisplay() as display:
        try:
            summary = run(work(display.show))
        except KeyboardInterrupt:
            fail("interrupted: the same command goes on from here", INTERRUPTED_STATUS)
    status = REJECTED_STATUS if summary.rejected else 0
    if as_json:
        print_json(msgspec.to_builtins(summary))
        return status
    pending = f"{counted(summary.inverse_pending, 'edge')}: their other ends follow within seconds"
    print_pairs(
        {
            "loaded": f"{counted(summary.loaded, 'line')} of {summary.file}",
            "rejected": f"{summary.rejected:,}" + (f", see {summary.rejects}" if summary.rejects else ""),
            "resumed": f"after line {summary.resumed_after_line:,}" if summary.resumed_after_line else "no",
            "time": f"{summary.seconds:.1f} s, {summary.per_second:,.0f} lines/s",
            "key map": summary.key_map,
            **({"pending": pending} if summary.inverse_pending else {}),
        }
    )
    return status
