"""`tao get`, `list`, `count`, `add` and `delete`: read and write single objects and edges, as any client does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

import click

from tao.admin.field_text import fields_of
from tao.cli.connection import graph_of
from tao.cli.frame import ask, run
from tao.cli.options import connect_option, json_option, region_option, yes_option
from tao.client import EdgeWrite
from tao.model.graph import MAX_TIME
from tao.terminal import counted, print_json, print_pairs, print_table

NOT_FOUND_STATUS: Final = 1
_DATED_SECONDS: Final = (946_684_800, 4_102_444_800)
"""Times from 2000 to 2100 in Unix seconds are shown as dates too."""
_PENDING: Final = "the other end cannot be reached now: the edge appears there as soon as it can"
_assignments = click.argument("assignments", metavar="[FIELD=VALUE]...", nargs=-1)


@click.command()
@click.argument("object_id", metavar="ID", type=int)
@connect_option
@region_option
@json_option
def get(object_id: int, connect: str | None, as_json: bool) -> int:
    """Show an object. Exit status 1 when there is none."""

    async def work() -> dict[str, object] | None:
        async with graph_of(connect) as graph:
            found = await graph.obj_get(object_id)
            return None if found is None else {"id": found.id, "otype": found.otype, "fields": dict(found.fields)}

    found = run(work())
    if as_json:
        print_json(found)
    elif found is None:
        click.echo(f"there is no object {object_id}", err=True)
    else:
        fields = found.pop("fields")
        assert isinstance(fields, Mapping)
        print_pairs({**found, **{f"  {name}": value for name, value in fields.items()}})
    return 0 if found is not None else NOT_FOUND_STATUS


@click.command("list")
@click.argument("id1", type=int)
@click.argument("atype")
@click.option("--pos", type=click.IntRange(0), default=0, help="Edges to skip, counted from the newest.  [default: 0]")
@click.option(
    "--limit", type=click.IntRange(0), default=50, show_default=True, help="The largest number of edges to show."
)
@click.option("--high", type=click.IntRange(0, MAX_TIME), help="Show only edges with this time or an older one.")
@click.option("--low", type=click.IntRange(0, MAX_TIME), help="Show only edges with this time or a newer one.")
@connect_option
@region_option
@json_option
def list_(
    id1: int, atype: str, pos: int, limit: int, high: int | None, low: int | None, connect: str | None, as_json: bool
) -> None:
    """Show the edges of an association list, newest first."""
    by_time = high is not None or low is not None
    if by_time and pos:
        raise click.UsageError("--pos counts from the newest edge of the list: leave it out with --high and --low")

    async def work() -> tuple[int, bool, Sequence[dict[str, object]]]:
        async with graph_of(connect) as graph:
            if by_time:
                top = MAX_TIME if high is None else high
                edges = await graph.assoc_time_range(id1, atype, top, low or 0, limit)
            else:
                edges = await graph.assoc_range(id1, atype, pos, limit)
            shown = [{"id2": edge.id2, "time": edge.time, "fields": dict(edge.fields)} for edge in edges]
            # The type's limit cut the answer only if the answer is full and the list goes on behind it.
            full = edges.limit_cut and len(shown) >= graph.schema.atype(atype).limit
            return edges.list_count, full and (by_time or pos + len(shown) < edges.list_count), shown

    length, cut_off, edges = run(work())
    if as_json:
        print_json({"id1": id1, "atype": atype, "count": length, "limit_cut": cut_off, "edges": edges})
        return
    names = list(dict.fromkeys(name for edge in edges for name in _fields(edge)))
    rows = [
        (edge["id2"], edge["time"], _date(edge["time"]), *(_fields(edge).get(name) for name in names)) for edge in edges
    ]
    print_table(("id2", "time", "", *names), rows, right=("id2", "time"))
    cut = ", which is as many as the type allows at once" if cut_off else ""
    click.echo(f"{len(edges):,} of {counted(length, 'edge')}{cut}")


@click.command()
@click.argument("id1", type=int)
@click.argument("atype")
@connect_option
@region_option
@json_option
def count(id1: int, atype: str, connect: str | None, as_json: bool) -> None:
    """Show how many edges an association list has."""

    async def work() -> int:
        async with graph_of(connect) as graph:
            return await graph.assoc_count(id1, atype)

    length = run(work())
    if as_json:
        print_json({"id1": id1, "atype": atype, "count": length})
    else:
        click.echo(length)


@click.group()
def add() -> None:
    """Add an object or an edge."""


@add.command("object")
@click.argument("otype")
@_assignments
@click.option("--near", type=int, metavar="ID", help="Put the object on the shard of this one.")
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
    "--time",
    "edge_time",
    type=click.IntRange(0, MAX_TIME),
    help="The edge's time, by which lists are ordered.  [default: now, in Unix seconds]",
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
    """Add an edge, and its inverse when the type has one, or overwrite the edge that exists."""

    async def work() -> EdgeWrite:
        async with graph_of(connect) as graph:
            fields = fields_of(graph.schema.atype(atype), assignments)
            return await graph.assoc_add(id1, atype, id2, edge_time, fields)

    written = run(work())
    if as_json:
        new = {"new": written.is_new, "inverse_pending": written.inverse_pending}
        print_json({"id1": id1, "atype": atype, "id2": id2, **new})
    else:
        click.echo(f"{id1} {atype} {id2}")
        if written.inverse_pending:
            click.echo(_PENDING)


@click.group()
def delete() -> None:
    """Delete an object or an edge."""


@delete.command("object")
@click.argument("object_id", metavar="ID", type=int)
@yes_option
@connect_option
@region_option
@json_option
def delete_object(object_id: int, yes: bool, connect: str | None, as_json: bool) -> int:
    """Delete an object; its edges stay. Exit status 1 when there was none."""
    ask(f"Delete object {object_id}?", yes)

    async def work() -> bool:
        async with graph_of(connect) as graph:
            return await graph.obj_delete(object_id)

    return _print_deleted(run(work()), {"id": object_id}, f"object {object_id}", as_json)


@delete.command("edge")
@click.argument("id1", type=int)
@click.argument("atype")
@click.argument("id2", type=int)
@yes_option
@connect_option
@region_option
@json_option
def delete_edge(id1: int, atype: str, id2: int, yes: bool, connect: str | None, as_json: bool) -> int:
    """Delete an edge and its inverse. Exit status 1 when there was none."""
    ask(f"Delete the edge {id1} {atype} {id2}?", yes)

    async def work() -> bool:
        async with graph_of(connect) as graph:
            deleted = await graph.assoc_delete(id1, atype, id2)
            if deleted.inverse_pending and not as_json:
                click.echo(_PENDING)
            return deleted.existed

    what = {"id1": id1, "atype": atype, "id2": id2}
    return _print_deleted(run(work()), what, f"edge {id1} {atype} {id2}", as_json)


def _print_deleted(found: bool, what: dict[str, object], text: str, as_json: bool) -> int:
    if as_json:
        print_json({**what, "deleted": found})
    else:
        click.echo(f"deleted {text}" if found else f"there was no {text}")
    return 0 if found else NOT_FOUND_STATUS


def _fields(edge: Mapping[str, object]) -> Mapping[str, object]:
    fields = edge["fields"]
    assert isinstance(fields, Mapping)
    return fields


def _date(time: object) -> str:
    assert isinstance(time, int)
    earliest, latest = _DATED_SECONDS
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S") if earliest <= time < latest else ""
