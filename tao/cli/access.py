"""`tao access`: check an access document, and explain what a caller may do."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from tao.access.decisions import Decisions, oddities
from tao.access.document import Operation
from tao.admin.documents import read_access, read_schema
from tao.cli.connection import state_folder
from tao.cli.frame import CommandGroup, show
from tao.cli.options import combined, given, json_option, shared, state_dir_option
from tao.schema.registry import Schema
from tao.terminal import counted, print_records

_path = click.Path(path_type=Path)
_schema_options = combined(
    shared(
        "--schema",
        "schema_file",
        type=_path,
        help="The schema file of the cluster.  [default: that of the development cluster in --state-dir]",
    ),
    state_dir_option,
    json_option,
)


@click.group(cls=CommandGroup)
def access() -> None:
    """Check an access document, and explain what a caller may do."""


@access.command()
@click.argument("file", type=_path)
@_schema_options
def check(file: Path) -> int:
    """Check the access document in FILE against the schema, and list what is odd about it.

    Odd are unknown types, callers without roles or without rights that the SDK asks for, roles without callers or
    rights, and rights without an effect. A document with faults is refused with exit status 2, one with oddities is
    usable and has exit status 1."""
    document = read_access(file)
    found = oddities(document, _schema())

    def text() -> None:
        print_records({"path": each.path, "odd": each.what} for each in found)
        size = f"{counted(len(document.callers), 'caller')}, {counted(len(document.roles), 'role')}"
        odd = f"{len(found)} odd" if found else "nothing odd"
        click.echo(f"usable: version {document.version}, mode {document.mode}, {size}, {odd}")

    show(
        {
            "version": document.version,
            "mode": document.mode,
            "callers": len(document.callers),
            "roles": len(document.roles),
            "odd": [each._asdict() for each in found],
        },
        text,
    )
    return int(bool(found))


@access.command()
@click.option("--caller", default="", help="The caller's name.  [default: a peer that names no caller]")
@click.option("--operation", type=click.Choice([each.value for each in Operation]), required=True, help="What it does.")
@click.option("--type", "type_name", required=True, help="The object or association type.")
@click.option(
    "--file",
    "access_file",
    type=_path,
    help="The access document.  [default: access.yaml of the development cluster in --state-dir]",
)
@_schema_options
def explain(caller: str, operation: str, type_name: str, access_file: Path | None) -> int:
    """Say whether a caller may do an operation with a type, and which role grants it or what is missing.

    Exit status 1 when it is denied."""
    document = read_access(access_file or state_folder().access)
    verdicts = Decisions(document, _schema()).explain(caller, Operation(operation), type_name)

    def text() -> None:
        for each in verdicts:
            why = each.why or f"granted by {', '.join(each.granted_by)}"
            click.echo(f"{'allowed' if each.allowed else 'denied'}: {operation} of the {each.kind} type {type_name!r}")
            click.echo(f"  {each.who}; {why}")
        if document.mode == "count":
            click.echo("  the document's mode is count: what it denies is counted, and done")

    show(
        {
            "version": document.version,
            "mode": document.mode,
            "caller": caller,
            "operation": operation,
            "verdicts": [asdict(each) for each in verdicts],
        },
        text,
    )
    return int(not all(each.allowed for each in verdicts))


def _schema() -> Schema:
    path: Path = given("schema_file") or state_folder().schema
    return read_schema(path)[0]
