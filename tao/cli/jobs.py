"""`tao jobs`: list background jobs, show one, pause and resume kinds, cancel, and add jobs over edges or objects."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime

import click

from tao.admin.connection import current_topology
from tao.admin.jobs import ChangedKind, FoundJobs, body_of, pause_kind
from tao.admin.jobs import list_jobs as list_all
from tao.cli.connection import links_of_command, on_graph, target_of
from tao.cli.frame import CommandGroup, begin, run, show
from tao.cli.options import IntRange, global_options
from tao.client import Graph, InvalidArgument, Job
from tao.client.validation import check_id, check_state
from tao.model.ids import SHARD_SHIFT
from tao.model.jobs import (
    EACH_EDGE_KIND,
    EACH_OBJECT_KIND,
    JOB_PRIORITIES,
    ROUTINE_KINDS,
    JobPriority,
    JobRow,
    JobState,
)
from tao.terminal import counted, print_pairs, print_records_with_errors

_STATES = {state.label: state for state in JobState}
_COLUMNS = ("id", "kind", "shard", "priority", "state", "edges", "attempts", "worker", "due")


@click.group(cls=CommandGroup)
def jobs() -> None:
    """List, pause, cancel and add background jobs, which workers do."""


@jobs.command("list")
@click.option("--kind", default="", help="List only the jobs of this kind.")
@click.option(
    "--state",
    "states",
    type=click.Choice(list(_STATES)),
    multiple=True,
    help="List only jobs in this state. May be repeated.",
)
@click.option("--all", "with_routine", is_flag=True, help="List also the jobs that the system adds for itself.")
@click.option("--limit", type=IntRange(1, 10_000), default=100, show_default=True, help="List this many jobs at most.")
@global_options
def list_jobs(kind: str, states: tuple[str, ...], with_routine: bool, limit: int) -> int:
    """List the jobs of all shards: those that wait first, by priority and time, then those that are done, parked and
    cancelled.

    Below the list are the errors of jobs that failed, the kinds that are paused, and those that no worker has asked for
    within the last minute. Jobs of the kinds purge and fold, which the system adds for itself, are left out while
    they wait without a failure; --all and --kind list them.

    Exit status 1 when a leader or a database does not answer. Its shards are left out.
    """
    routine_kinds = () if with_routine or kind in ROUTINE_KINDS else ROUTINE_KINDS
    found = run(_look(kind, [_STATES[each] for each in states], limit, routine_kinds))
    paused: dict[str, list[int]] = {}
    for each in found.paused:
        paused.setdefault(each.kind, []).append(each.shard)

    def text() -> None:
        print_records_with_errors(map(_line, found.jobs), *_COLUMNS)
        if not found.jobs:
            click.echo("no jobs")
        for name, shards in paused.items():
            click.echo(f"{name} is paused on {counted(len(shards), 'shard')}")
        waiting = {row.kind for row in found.jobs if row.state == JobState.WAITING}
        for name in sorted(waiting - found.kinds if not found.silent else ()):  # a silent leader may know more kinds
            click.echo(_without_worker(name, found.kinds))

    fields = {"jobs": [_fields(row) for row in found.jobs], "paused": paused, "silent": found.silent}
    show({**fields, "kinds_of_workers": sorted(found.kinds)}, text)
    return _report_silent(found.silent)


@jobs.command("show")
@click.argument("job_id", metavar="ID", type=int)
@global_options
def show_job(job_id: int) -> int:
    """Show one job. Exit status 1 when there is none with this id; one that ended is kept for a week."""
    row = on_graph(lambda graph: graph._read_job(check_id(job_id)))
    if row is None:
        click.echo(f"there is no job {job_id}", err=True)
        return 1
    body = body_of(row)
    pairs = {name: None if value == "" else value for name, value in _fields(row).items()}
    show({**_fields(row), "body": body}, lambda: print_pairs({**pairs, "body": json.dumps(body)}))
    return 0


@jobs.command()
@click.argument("kind")
@global_options
def pause(kind: str) -> int:
    """Pause the jobs of KIND on all shards, also of jobs that are added later, until `tao jobs resume`.

    Workers finish the pages that are under way. Exit status 1 when a leader does not answer; a kind that no worker
    has asked for within the last minute, and of which there is no job, is an error.
    """
    begin()
    return _show_change(kind, run(_change(kind, paused=True)), "paused")


@jobs.command()
@click.argument("kind")
@global_options
def resume(kind: str) -> int:
    """End a pause of KIND on all shards, make its jobs that are parked or wait after a failure due at once, and forget
    their failures.

    Exit status 1 when a leader does not answer.
    """
    begin()
    return _show_change(kind, run(_change(kind, paused=False)), "resumed")


@jobs.command()
@click.argument("job_id", metavar="ID", type=int)
@global_options
def cancel(job_id: int) -> int:
    """Cancel a job. What it has done stays done; its worker stops after the page that is under way.

    Exit status 1 when there is no such job, or it is done. Cancelling a job again changes nothing: exit status 0.
    """

    begin()

    async def end(graph: Graph) -> Job:
        job = graph.job(job_id)
        await job.cancel()
        return job

    job = on_graph(end)
    show({"id": job.id, "state": job.state}, lambda: click.echo(f"job {job.id}: {job.state}"))
    return int(job.state != JobState.CANCELLED.label)


@jobs.command()
@click.argument("kind", type=click.Choice([EACH_EDGE_KIND, EACH_OBJECT_KIND]))
@click.option("--function", required=True, help="The entry point of the group tao.jobs that workers call.")
@click.option(
    "--type", "type_name", default="", help="The type of the edges or objects. Objects: all types without it."
)
@click.option("--list", "id1", type=int, help="Only the edges of this id's list.")
@click.option("--state", default="", help="Edges in this state, of a type with states.  [default: normal]")
@click.option(
    "--shard", "shards", type=IntRange(min=0), multiple=True, help="Only this shard. May be repeated.  [default: all]"
)
@click.option(
    "--priority", type=click.Choice(list(JOB_PRIORITIES)), default="normal", show_default=True, help="The priority."
)
@global_options
def add(
    kind: str, function: str, type_name: str, id1: int | None, state: str, shards: tuple[int, ...], priority: str
) -> int:
    """Add jobs that call a function of the application for each edge, or each object: one job for each shard, or one
    for a list.

    The function comes from a package that is installed with the workers. It is called with pages of edges or ids, and
    again with the same page when a worker was lost: it has to be idempotent.
    """
    if kind == EACH_EDGE_KIND and not type_name:
        raise click.UsageError("each_edge needs --type")
    if kind == EACH_OBJECT_KIND and (id1 is not None or state):
        raise click.UsageError("each_object takes neither --list nor --state")
    if id1 is not None and shards:
        raise click.UsageError("give --list or --shard, not both: a list is on the shard of its id")

    begin()

    async def put(graph: Graph) -> list[Job]:
        _check_type(graph, kind, type_name, state)
        wanted = _shards(graph, shards)
        if id1 is not None:
            check_id(id1)
            edges = {"function": function, "atype": type_name, "id1": id1, "state": state}
            return [await graph.add_job(kind, edges, near=id1, priority=priority)]
        name = "atype" if kind == EACH_EDGE_KIND else "otype"
        found: list[Job] = []
        for shard in wanted:
            body = {"function": function, name: type_name, "shard": shard, **({"state": state} if state else {})}
            found.append(await graph.add_job(kind, body, near=shard << SHARD_SHIFT | 1, priority=priority))
        return found

    added = on_graph(put)
    show({"jobs": [job.id for job in added]}, lambda: click.echo("\n".join(f"job {job.id}" for job in added)))
    found = run(_look(kind, (), 1))
    if kind not in found.kinds and not found.silent:
        click.echo(_without_worker(kind, found.kinds), err=True)
    return 0


def _check_type(graph: Graph, kind: str, type_name: str, state: str) -> None:
    """Check that the schema has the type and the state. Raises `UnknownType` or `InvalidArgument`."""
    if kind == EACH_OBJECT_KIND:
        if type_name:
            graph.schema.otype(type_name)
        return
    atype = graph.schema.atype(type_name)
    if state:
        graph.schema.state_type(atype, check_state(state))


def _shards(graph: Graph, named: Sequence[int]) -> Sequence[int]:
    """Return the shards named, or all of the graph. Raises `InvalidArgument` for one that the graph does not have."""
    number = sum(last - first + 1 for each in graph.topology.databases for first, last in each.shards)
    for shard in named:
        if shard >= number:
            raise InvalidArgument(f"there is no shard {shard}: this graph has shards 0 to {number - 1}")
    return named or range(number)


def _without_worker(kind: str, kinds: Collection[str]) -> str:
    """Return why the jobs of a kind wait that no worker has asked for lately."""
    if not kinds:
        return f"no worker has asked for jobs within the last minute: jobs of {kind} wait until `tao worker` runs"
    return f"no worker knows the kind {kind}, so its jobs wait; workers know {', '.join(sorted(kinds))}"


async def _look(kind: str, states: Sequence[int], limit: int, routine_kinds: Sequence[str] = ()) -> FoundJobs:
    topology = await current_topology(target_of())
    async with links_of_command(topology) as links:
        return await list_all(topology, links, kind, states, limit, routine_kinds)


async def _change(kind: str, *, paused: bool) -> ChangedKind:
    topology = await current_topology(target_of())
    async with links_of_command(topology) as links:
        return await pause_kind(topology, links, kind, paused=paused)


def _show_change(kind: str, changed: ChangedKind, what: str) -> int:
    def text() -> None:
        again = f", {counted(changed.resumed, 'job')} that failed will be done now" if changed.resumed else ""
        click.echo(f"{kind} is {what} on {counted(changed.shards, 'shard')}{again}")

    show({"shards": changed.shards, "resumed": changed.resumed, "silent": changed.silent}, text)
    return _report_silent(changed.silent)


def _report_silent(silent: Mapping[str, str]) -> int:
    for name, why in silent.items():
        click.echo(f"{name}: {why}", err=True)
    return int(bool(silent))


def _line(row: JobRow) -> dict[str, object]:
    """Return the columns of a list."""
    return {
        "id": str(row.id),
        "kind": row.kind,
        "shard": str(row.id >> SHARD_SHIFT),
        "priority": JobPriority(row.priority).label,
        "state": _state(row),
        "edges": row.edges,
        "attempts": row.attempts,
        "worker": row.worker,
        "due": _time(row.due_unix_ms),
        "error": row.error,
    }


def _fields(row: JobRow) -> dict[str, object]:
    return {
        **_line(row),
        "id": row.id,
        "shard": row.id >> SHARD_SHIFT,
        "due": _time(row.due_unix_ms),
        "created": _time(row.created_unix_ms),
        "repeat_seconds": row.repeat_seconds,
        "cursor": row.cursor.hex(),
    }


def _state(row: JobRow) -> str:
    return "leased" if row.state == JobState.WAITING and row.worker else JobState(row.state).label


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="seconds")
