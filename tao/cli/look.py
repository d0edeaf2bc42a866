"""`tao get`, `tao list`, `tao count`: look at the graph, as any client does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import click

from tao.cli.connecting import graph_of
from tao.cli.frame import connect_option, json_option, region_option, run
from tao.cli.output import counted, print_json, print_pairs, print_table
from tao.model.graph import MAX_TIME

NOT_FOUND_STATUS = 1
_PLAUSIBLE_SECONDS = (946_684_800, 4_102_444_800)  # 2000 to 2100: times in this range are shown as dates too


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
@click.option("--pos", type=click.IntRange(0), default=0, help="Where to begin, from the newest.  [default: 0]")
@click.option("--limit", type=click.IntRange(0), default=50, show_default=True, help="How many edges at most.")
@click.option("--high", type=click.IntRange(0, MAX_TIME), help="Only edges of this time or older.")
@click.option("--low", type=click.IntRange(0, MAX_TIME), help="Only edges of this time or newer.")
@connect_option
@region_option
@json_option
def list_(
    id1: int, atype: str, pos: int, limit: int, high: int | None, low: int | None, connect: str | None, as_json: bool
) -> None:
    """Show edges of an association list, newest first."""
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
            # The type's limit cut the answer only if it is full, and the list goes on behind it.
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


def _fields(edge: Mapping[str, object]) -> Mapping[str, object]:
    fields = edge["fields"]
    assert isinstance(fields, Mapping)
    return fields


def _date(time: object) -> str:
    assert isinstance(time, int)
    earliest, latest = _PLAUSIBLE_SECONDS
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S") if earliest <= time < latest else ""
