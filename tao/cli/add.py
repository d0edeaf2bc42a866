"""`tao add` and `tao delete`: single writes by hand."""

from __future__ import annotations

import click

from tao.cli.connecting import graph_of
from tao.cli.field_text import fields_of
from tao.cli.frame import ask, connect_option, json_option, region_option, run
from tao.cli.output import print_json
from tao.model.graph import MAX_TIME

_assignments = click.argument("assignments", metavar="[FIELD=VALUE]...", nargs=-1)
_yes_option = click.option("--yes", is_flag=True, help="Do not ask.")
NOT_FOUND_STATUS = 1


@click.group()
def add() -> None:
    """Add an object or an edge."""


@add.command("object")
@click.argument("otype")
@_assignments
@click.option("--near", type=int, metavar="ID", help="Put it on the shard of this object.")
@connect_option
@region_option
@json_option
def add_object(otype: str, assignments: tuple[str, ...], near: int | None, connect: str | None, as_json: bool) -> None:
    """Add an object; prints its id."""

    async def work() -> int:
        async with graph_of(connect) as graph:
            return await graph.obj_add(otype, fields_of(graph.schema.otype(otype), assignments), near=near)

    object_id = run(work())
    if as_json:
        print_json({"id": object_id, "otype": otype})
    else:
        click.echo(object_id)


@add.command("edge")
@click.argument("id1", type=int)
@click.argument("atype")
@click.argument("id2", type=int)
@_assignments
@click.option(
    "--time", "edge_time", type=click.IntRange(0, MAX_TIME), help="Its time.  [default: now, in Unix seconds]"
)
@connect_option
@region_option
@json_option
def add_edge(
    id1: int,
    atype: str,
    id2: int,
    assignments: tuple[str, ...],
    edge_time: int | None,
    connect: str | None,
    as_json: bool,
) -> None:
    """Add an edge (and its inverse, when the type has one), or overwrite it."""

    async def work() -> None:
        async with graph_of(connect) as graph:
            fields = fields_of(graph.schema.atype(atype), assignments)
            await graph.assoc_add(id1, atype, id2, edge_time, fields)

    run(work())
    if as_json:
        print_json({"id1": id1, "atype": atype, "id2": id2})
    else:
        click.echo(f"{id1} {atype} {id2}")


@click.group()
def delete() -> None:
    """Delete an object or an edge."""


@delete.command("object")
@click.argument("object_id", metavar="ID", type=int)
@_yes_option
@connect_option
@region_option
@json_option
def delete_object(object_id: int, yes: bool, connect: str | None, as_json: bool) -> int:
    """Delete an object; its edges stay. Exit status 1 when there was none."""
    ask(f"Delete object {object_id}?", yes)

    async def work() -> bool:
        async with graph_of(connect) as graph:
            return await graph.obj_delete(object_id)

    return _tell_deleted(run(work()), {"id": object_id}, f"object {object_id}", as_json)


@delete.command("edge")
@click.argument("id1", type=int)
@click.argument("atype")
@click.argument("id2", type=int)
@_yes_option
@connect_option
@region_option
@json_option
def delete_edge(id1: int, atype: str, id2: int, yes: bool, connect: str | None, as_json: bool) -> int:
    """Delete an edge and its inverse. Exit status 1 when there was none."""
    ask(f"Delete the edge {id1} {atype} {id2}?", yes)

    async def work() -> bool:
        async with graph_of(connect) as graph:
            return await graph.assoc_delete(id1, atype, id2)

    what = {"id1": id1, "atype": atype, "id2": id2}
    return _tell_deleted(run(work()), what, f"edge {id1} {atype} {id2}", as_json)


def _tell_deleted(found: bool, what: dict[str, object], text: str, as_json: bool) -> int:
    if as_json:
        print_json({**what, "deleted": found})
    else:
        click.echo(f"deleted {text}" if found else f"there was no {text}")
    return 0 if found else NOT_FOUND_STATUS
