"""`tao schema`: check whether a schema may replace another one, and show a schema."""

from __future__ import annotations

from pathlib import Path

import click

from tao.cli.connection import graph_of
from tao.cli.frame import run
from tao.cli.options import connect_option, json_option, region_option
from tao.terminal import counted, print_json, print_table

_file = click.Path(path_type=Path)


@click.group()
def schema() -> None:
    """Check and show schemas."""


@schema.command()
@click.argument("old", type=_file)
@click.argument("new", type=_file)
@json_option
def check(old: Path, new: Path, as_json: bool) -> int:
    """Check whether schema NEW may replace OLD while servers run on stored data. Exit status 1 when it may not."""
    from tao.admin.documents import read_schema
    from tao.schema.compatibility import compare

    changes = compare(read_schema(old)[0], read_schema(new)[0])
    compatible = all(change.compatible for change in changes)
    if as_json:
        print_json(
            {
                "compatible": compatible,
                "changes": [
                    {
                        "path": change.path,
                        "kind": change.kind.value,
                        "compatible": change.compatible,
                        "warns": change.warns,
                        "why": change.why,
                    }
                    for change in changes
                ],
            }
        )
        return 0 if compatible else 1
    if changes:
        rows = [
            (
                "breaks" if not change.compatible else "note" if change.warns else "ok",
                change.path,
                change.kind,
                change.why,
            )
            for change in changes
        ]
        print_table(("", "path", "change", "why"), rows)
    broken = sum(not change.compatible for change in changes)
    breaking = f"{counted(broken, 'change')} {'breaks' if broken == 1 else 'break'} data"
    click.echo(f"compatible: {counted(len(changes), 'change')}" if compatible else f"not compatible: {breaking}")
    return 0 if compatible else 1


@schema.command()
@click.argument("file", type=_file, required=False)
@connect_option
@region_option
@json_option
def show(file: Path | None, connect: str | None, as_json: bool) -> None:
    """Show the types of a schema FILE, or without one those of the cluster."""
    import json

    from tao.admin.documents import read_schema
    from tao.schema.registry import Schema

    async def of_cluster() -> Schema:
        async with graph_of(connect) as graph:
            return graph.schema

    found = read_schema(file)[0] if file else run(of_cluster())
    if as_json:
        print_json(json.loads(found.to_json()))
        return
    print_table(
        ("object type", "number", "fields"),
        [
            (otype.name, otype.number, ", ".join(f"{field.name}: {field.kind}" for field in otype.fields) or None)
            for otype in found.objects
        ],
        right=("number",),
    )
    click.echo()
    rows = []
    for atype in found.assocs:
        inverse = found.inverse_of(atype)
        fields = ", ".join(f"{field.name}: {field.kind}" for field in atype.fields) or None
        rows.append((atype.name, atype.number, inverse.name if inverse else None, atype.limit, atype.table, fields))
    print_table(("association type", "number", "inverse", "limit", "table", "fields"), rows, right=("number", "limit"))
