"""`tao export`: write objects, edges or states of nodes from the databases as CSV, as `tao load` reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TextIO

import click

from tao.admin.access import ReaderLogin
from tao.admin.export import export_edges, export_nodes, export_objects
from tao.cli.frame import CommandGroup, run
from tao.cli.logins import reader_login
from tao.cli.options import combined, reader_options
from tao.model.errors import OperatorError, unwritable
from tao.terminal import counted


@click.group(cls=CommandGroup)
def export() -> None:
    """Write objects, edges or states of nodes as CSV, in the formats that `tao load` reads.

    It reads the databases with the read-only account: those of the development cluster, or those in the topology file
    that --connect names, with --reader-user and the password in TAO_READER_PASSWORD.
    """


_output_options = combined(
    click.option(
        "--out", type=click.Path(path_type=Path, allow_dash=True), default="-", help="The file to write.  [default: -]"
    ),
    click.option(
        "--keys", type=click.Path(path_type=Path), help="Write the external keys of this key map instead of ids."
    ),
    reader_options,
)


@export.command()
@click.option("--otype", required=True, help="The type of the objects.")
@click.option("--key", "key_column", default="id", show_default=True, help="The name of the column with ids or keys.")
@_output_options
def objects(otype: str, key_column: str, out: Path, keys: Path | None) -> None:
    """Write all objects of a type: the id (or external key) and the fields of each."""
    _write(out, lambda file, login: export_objects(file, login, otype, key_column, keys))


@export.command()
@click.option("--atype", required=True, help="The type of the edges.")
@click.option("--from", "from_column", default="id1", show_default=True, help="The name of the column with id1.")
@click.option("--to", "to_column", default="id2", show_default=True, help="The name of the column with id2.")
@_output_options
def edges(atype: str, from_column: str, to_column: str, out: Path, keys: Path | None) -> None:
    """Write all edges of a type: both ids (or keys), the time and the fields; of a symmetric type each pair once.

    Edges of a type with states have a column "state", which `tao load edges --state state` reads. It is the
    state of the edge itself: `tao export nodes` writes those of nodes. Removed edges are left out."""
    _write(out, lambda file, login: export_edges(file, login, atype, (from_column, to_column), keys))


@export.command()
@click.option("--atype", required=True, help="The type of the nodes' edges, a type with states.")
@click.option("--key", "key_column", default="id", show_default=True, help="The name of the column with ids or keys.")
@_output_options
def nodes(atype: str, key_column: str, out: Path, keys: Path | None) -> None:
    """Write all nodes that are archived or removed for edges of a type, each with its state, as `tao load nodes` reads
    them."""
    _write(out, lambda file, login: export_nodes(file, login, atype, key_column, keys))


def _write(out: Path, work: Callable[[TextIO, ReaderLogin], Coroutine[Any, Any, int]]) -> None:
    login = reader_login()
    if str(out) == "-":
        count = run(work(sys.stdout, login))
    else:
        draft = out.with_name(f"{out.name}.draft")
        try:
            with draft.open("w", encoding="utf-8", newline="") as file:
                count = run(work(file, login))
            draft.replace(out)
        except OSError as error:
            raise OperatorError(unwritable(out, error)) from error
        finally:
            draft.unlink(missing_ok=True)
    click.echo(counted(count, "line"), err=True)
