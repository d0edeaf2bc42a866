"""`tao export`: what the databases hold, in the CSV formats that `tao load` reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from tao.cli.frame import document_option, run
from tao.cli.output import counted
from tao.model.errors import OperatorError

if TYPE_CHECKING:
    from tao.cli.export_scan import ReaderLogin


@click.group()
def export() -> None:
    """Write objects or edges as CSV, in the formats that `tao load` reads.

    Reads the databases by the read-only account: those of the development cluster, or of the topology file that
    --connect names, with --reader-user and the password in TAO_READER_PASSWORD.
    """


def _output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    options = (
        click.option("--out", type=click.Path(path_type=Path, allow_dash=True), default="-", help="File to write."),
        click.option("--keys", type=click.Path(path_type=Path), help="Write external keys, of this key map, for ids."),
        click.option("--schema", "schema_file", type=click.Path(path_type=Path), help="Schema file of the cluster."),
        click.option("--reader-user", default="tao_reader", show_default=True, help="Read-only database account."),
        click.option(
            "--reader-password", envvar="TAO_READER_PASSWORD", help="Its password; better in the environment."
        ),
        document_option,
    )
    for option in reversed(options):
        command = option(command)
    return command


@export.command()
@click.option("--otype", required=True, help="Type of the objects.")
@click.option("--key", "key_column", default="id", show_default=True, help="Name of the column of ids or keys.")
@_output_options
def objects(otype: str, key_column: str, out: Path, keys: Path | None, **login: Any) -> None:
    """Write all objects of a type: id (or external key) and fields."""
    from tao.cli.export_scan import export_objects

    _write(out, lambda file, found: export_objects(file, found, otype, key_column, keys), login)


@export.command()
@click.option("--atype", required=True, help="Type of the edges.")
@click.option("--from", "from_column", default="id1", show_default=True, help="Name of the column of id1.")
@click.option("--to", "to_column", default="id2", show_default=True, help="Name of the column of id2.")
@_output_options
def edges(atype: str, from_column: str, to_column: str, out: Path, keys: Path | None, **login: Any) -> None:
    """Write all edges of a type: both ids (or keys), time, fields. Of a symmetric type each pair once."""
    from tao.cli.export_scan import export_edges

    _write(out, lambda file, found: export_edges(file, found, atype, (from_column, to_column), keys), login)


def _write(out: Path, work: Callable[[TextIO, ReaderLogin], Coroutine[Any, Any, int]], login: dict[str, Any]) -> None:
    from tao.cli.export_scan import reader_login

    found = reader_login(**login)
    if str(out) == "-":
        count = run(work(sys.stdout, found))
    else:
        draft = out.with_name(f"{out.name}.draft")
        try:
            with draft.open("w", encoding="utf-8", newline="") as file:
                count = run(work(file, found))
            draft.replace(out)
        except OSError as error:
            raise OperatorError(f"cannot write {out}: {error.strerror}") from error
        finally:
            draft.unlink(missing_ok=True)
    click.echo(counted(count, "line"), err=True)
