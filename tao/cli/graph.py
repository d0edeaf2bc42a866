"""`tao get`, `list`, `count`, `counter`, `add`, `delete`: read and write objects and edges, as any client does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import click

from tao.admin.field_text import fields_of
from tao.cli.connection import on_graph
from tao.cli.frame import CommandGroup, ask, begin, show
from tao.cli.options import IntRange, combined, region_options, yes_option
from tao.client import AssocList, EdgeWrite, Graph, Job
from tao.model.edge_states import NODE_STATES, STATES_BY_LABEL
from tao.model.graph import MAX_TIME
from tao.terminal import counted, print_pairs, print_table

NOT_FOUND_STATUS: Final = 1
_DATED_SECONDS: Final = (946_684_800, 4_102_444_800)
"""Times from 2000 to 2100 in Unix seconds are shown as dates too."""
_PENDING: Final = "the other end cannot be reached now: the edge appears there as soon as it can"
_assignments = click.argument("assignments", metavar="[FIELD=VALUE]...", nargs=-1)
_list_arguments = combined(click.argument("id1", type=int), click.argument("atype"))
_edge_arguments = combined(_list_arguments, click.argument("id2", type=int))
_time = IntRange(0, MAX_TIME)


@click.command()
@click.argument("object_id", metavar="ID", type=int)
@region_options
def get(object_id: int) -> int:
    """Show an object. Exit status 1 when there is none."""
    found = on_graph(lambda graph: graph.obj_get(object_id))
    if found is None:
        show(None, lambda: click.echo(f"there is no object {object_id}", err=True))
        return NOT_FOUND_STATUS
    head = {"id": found.id, "otype": found.otype}
    fields = dict(found.fields)
    show({**head, "fields": fields}, lambda: print_pairs({**head, **{f"  {each}": fields[each] for each in fields}}))
    return 0


_state_option = click.option(
    "--state",
    type=click.Choice(list(STATES_BY_LABEL)),
    help="Of a type with states, the state of the edges.  [default: normal]",
)


@click.command("list")
@_list_arguments
@click.option("--pos", type=IntRange(0), default=0, help="Edges to skip, counted from the newest.  [default: 0]")
@click.option("--limit", type=IntRange(0), default=50, show_default=True, help="The largest number of edges to show.")
@click.option("--high", type=_time, help="Show only edges with this time or an older one.")
@click.option("--low", type=_time, help="Show only edges with this time or a newer one.")
@_state_option
@region_options
def list_(id1: int, atype: str, pos: int, limit: int, high: int | None, low: int | None, state: str | None) -> None:
    """Show the edges of an association list, newest first."""
    by_time = high is not None or low is not None
    if by_time and pos:
        raise click.UsageError("--pos counts from the newest edge of the list: leave it out with --high and --low")

    async def work(graph: Graph) -> tuple[AssocList, int]:
        most = graph.schema.atype(atype).limit
        if by_time:
            top = MAX_TIME if high is None else high
            return await graph.assoc_time_range(id1, atype, top, low or 0, limit, state=state), most
        return await graph.assoc_range(id1, atype, pos, limit, state=state), most

    edges, most = on_graph(work)
    length = edges.list_count
    # The type's limit cut the answer only if the answer is full and the list goes on behind it.
    cut_off = edges.limit_cut and len(edges) >= most and (by_time or pos + len(edges) < length)

    def text() -> None:
        names = list(dict.fromkeys(name for edge in edges for name in edge.fields))
        rows = [(each.id2, each.time, _date(each.time), *map(each.fields.get, names)) for each in edges]
        print_table(("id2", "time", "", *names), rows, right=("id2", "time"))
        cut = ", which is as many as the type allows at once" if cut_off else ""
        click.echo(f"{len(edges):,} of {counted(length, 'edge')}{cut}")

    shown = [{"id2": each.id2, "time": each.time, "fields": dict(each.fields)} for each in edges]
    show({"id1": id1, "atype": atype, "count": length, "limit_cut": cut_off, "edges": shown}, text)


@click.command()
@_list_arguments
@_state_option
@region_options
def count(id1: int, atype: str, state: str | None) -> None:
    """Show how many edges an association list has."""
    length = on_graph(lambda graph: graph.assoc_count(id1, atype, state))
    show({"id1": id1, "atype": atype, "count": length}, lambda: click.echo(length))


@click.command()
@click.argument("object_id", metavar="ID", type=int)
@click.argument("name", metavar="COUNTER")
@region_options
def counter(object_id: int, name: str) -> None:
    """Show the value of a counter of an object. Its slots are the edges of the list TYPE.COUNTER."""
    found = on_graph(lambda graph: graph.counter_get(object_id, name))
    shown = {"id": object_id, "counter": name, "value": found.value, "max_behind_ms": found.max_behind_ms}
    show(shown, lambda: click.echo(found.value))


@click.group(cls=CommandGroup)
def add() -> None:
    """Add an object or an edge."""


@add.command("object")
@click.argument("otype")
@_assignments
@click.option("--near", type=int, metavar="ID", help="Put the object on the shard of this one.")
@region_options
def add_object(otype: str, assignments: tuple[str, ...], near: int | None) -> None:
    """Add an object; prints its id."""

    begin()

    async def work(graph: Graph) -> int:
        return await graph.obj_add(otype, fields_of(graph.schema.otype(otype), assignments), near=near)

    object_id = on_graph(work)
    show({"id": object_id, "otype": otype}, lambda: click.echo(object_id))


@add.command("edge")
@_edge_arguments
@_assignments
@click.option(
    "--time",
    "edge_time",
    type=_time,
    help="The edge's time, by which lists are ordered.  [default: now, in Unix seconds]",
)
@region_options
def add_edge(id1: int, atype: str, id2: int, assignments: tuple[str, ...], edge_time: int | None) -> None:
    """Add an edge, and its inverse when the type has one, or overwrite the edge that exists."""

    begin()

    async def work(graph: Graph) -> EdgeWrite:
        return await graph.assoc_add(id1, atype, id2, edge_time, fields_of(graph.schema.atype(atype), assignments))

    written = on_graph(work)
    text = f"{id1} {atype} {id2}" + (f"\n{_PENDING}" if written.inverse_pending else "")
    new = {"new": written.is_new, "inverse_pending": written.inverse_pending}
    show({"id1": id1, "atype": atype, "id2": id2, **new}, lambda: click.echo(text))


@click.command()
@click.argument("node_id", metavar="ID", type=int)
@click.argument("state", type=click.Choice([state.label for state in NODE_STATES]))
@click.option(
    "--type",
    "types",
    metavar="TYPE",
    multiple=True,
    help="Only edges of this type; may be repeated.  [default: all types with states]",
)
@click.option("--wait", is_flag=True, help="Wait until the edges that there are have been moved.")
@region_options
def node(node_id: int, state: str, types: tuple[str, ...], wait: bool) -> None:
    """Set the state of a node, which hides or restores its edges of types with states.

    Prints the id of the job that moves the edges that there are; `normal` restores what was there before."""

    begin()

    async def work(graph: Graph) -> Job:
        job = await graph.node_set_state(node_id, state, types or None)
        return await job.wait() if wait else job

    job = on_graph(work)
    moved = f", {counted(job.edges, 'edge')}" if wait else ""
    shown = {"id": node_id, "state": state, "job": job.id, "job_state": job.state, "edges": job.edges}
    show(shown, lambda: click.echo(f"{node_id} is {state}; job {job.id}: {job.state}{moved}"))


@click.group(cls=CommandGroup)
def delete() -> None:
    """Delete an object or an edge."""


@delete.command("object")
@click.argument("object_id", metavar="ID", type=int)
@click.option("--otype", metavar="TYPE", help="Delete the object only if it is of this type.")
@yes_option
@region_options
def delete_object(object_id: int, otype: str | None) -> int:
    """Delete an object; its edges stay. Exit status 1 when there was none."""
    return _delete(f"object {object_id}", {"id": object_id}, lambda graph: graph.obj_delete(object_id, otype))


@delete.command("edge")
@_edge_arguments
@yes_option
@region_options
def delete_edge(id1: int, atype: str, id2: int) -> int:
    """Delete an edge and its inverse. Exit status 1 when there was none."""
    what = {"id1": id1, "atype": atype, "id2": id2}

    async def work(graph: Graph) -> bool:
        return bool(await graph.assoc_delete(id1, atype, id2))

    return _delete(f"edge {id1} {atype} {id2}", what, work)


def _delete(name: str, what: dict[str, object], work: Callable[[Graph], Awaitable[bool]]) -> int:
    ask(f"Delete {name}?")
    found = on_graph(work)
    show({**what, "deleted": found}, lambda: click.echo(f"deleted {name}" if found else f"there was no {name}"))
    return 0 if found else NOT_FOUND_STATUS


def _date(time: int) -> str:
    earliest, latest = _DATED_SECONDS
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S") if earliest <= time < latest else ""
