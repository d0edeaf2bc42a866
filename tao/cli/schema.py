"""`tao schema`: check whether a schema may replace another one, and show a schema."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tao.admin.documents import read_schema
from tao.cli.connection import on_graph
from tao.cli.frame import CommandGroup, show
from tao.cli.options import json_option, region_options
from tao.client import Graph
from tao.model.edge_states import State
from tao.schema.compatibility import compare
from tao.schema.registry import Schema
from tao.schema.types import GraphType
from tao.terminal import counted, print_records

_file = click.Path(path_type=Path)


@click.group(cls=CommandGroup)
def schema() -> None:
    """Check and show schemas."""


@schema.command()
@click.argument("old", type=_file)
@click.argument("new", type=_file)
@json_option
def check(old: Path, new: Path) -> int:
    """Check whether schema NEW may replace OLD while servers run on stored data. Exit status 1 when it may not."""
    changes = compare(read_schema(old)[0], read_schema(new)[0])
    broken = sum(not change.compatible for change in changes)

    def text() -> None:
        print_records(
            {
                "": "breaks" if not change.compatible else "note" if change.warns else "ok",
                "path": change.path,
                "change": change.kind.value,
                "why": change.why,
            }
            for change in changes
        )
        breaking = f"{counted(broken, 'change')} {'breaks' if broken == 1 else 'break'} data"
        click.echo(f"not compatible: {breaking}" if broken else f"compatible: {counted(len(changes), 'change')}")

    document = [
        {
            "path": change.path,
            "kind": change.kind.value,
            "compatible": change.compatible,
            "warns": change.warns,
            "why": change.why,
        }
        for change in changes
    ]
    show({"compatible": not broken, "changes": document}, text)
    return int(bool(broken))


@schema.command("show")
@click.argument("file", type=_file, required=False)
@region_options
def show_schema(file: Path | None) -> None:
    """Show the types of a schema FILE, or without one those of the cluster."""

    async def of_cluster(graph: Graph) -> Schema:
        return graph.schema

    found = read_schema(file)[0] if file else on_graph(of_cluster)
    show(json.loads(found.to_json()), lambda: _print(found))


def _print(found: Schema) -> None:
    def fields_text(graph_type: GraphType) -> str:
        return ", ".join(
            f"{field.name}: {field.kind}{' (required)' if field.required else ''}" for field in graph_type.fields
        )

    print_records(
        {"object type": otype.name, "number": otype.number, "fields": fields_text(otype)} for otype in found.objects
    )
    click.echo()
    rows = []
    for atype in found.declared_assocs:
        inverse = found.inverse_of(atype)
        rows.append(
            {
                "association type": atype.name,
                "number": atype.number,
                "inverse": inverse.name if inverse else None,
                "limit": atype.limit,
                "table": atype.table,
                "states": ", ".join(
                    f"{state.label}: {number}"
                    for state, number in zip(State, atype.states, strict=False)
                    if state and number
                ),
                "fields": fields_text(atype),
            }
        )
    print_records(rows)
