"""`tao status`: the whole cluster on one screen, its problems first, from the servers' admin ports."""

from __future__ import annotations

import click

from tao.admin.connection import current_topology
from tao.admin.status import View, cluster_view
from tao.cli.connection import target_of
from tao.cli.frame import run, show
from tao.cli.options import FloatRange, region_options
from tao.terminal import counted, fields_of, print_records, text_of


@click.command()
@region_options
@click.option(
    "--max-staleness",
    "max_staleness_seconds",
    type=FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Report a region that may be further behind its masters than this, in seconds.",
)
def status(max_staleness_seconds: float) -> int:
    """Show what is wrong with the cluster, then all regions, servers and databases.

    It asks every server's admin port, and no database. Exit status 1 when something is wrong.
    """
    found = run(_view(max_staleness_seconds))
    show(found, lambda: _print(found))
    return int(bool(found.problems))


async def _view(max_staleness_seconds: float) -> View:
    return await cluster_view(await current_topology(target_of()), max_staleness_seconds)


def _print(found: View) -> None:
    click.echo(f"topology {found.topology_version}")
    click.echo(f"{counted(len(found.problems), 'problem')}:" if found.problems else "nothing is wrong")
    for problem in found.problems:
        click.echo(f"  {text_of(problem)}")
    for role, servers in (
        ("leader", found.leaders),
        ("follower", found.followers),
        ("tailer", found.tailers),
        ("watcher", found.watchers),
        ("worker", found.workers),
    ):
        if servers:
            click.echo()
            rows = [fields_of(server) for server in servers]
            print_records({role: row.pop("name"), **row} for row in rows)
    click.echo()
    if not found.watchers:
        click.echo("the topology lists no watcher: if none runs, nobody replaces a leader that fails\n")
    if not found.workers:
        click.echo(
            "no worker has asked for jobs or reported within the last minute: jobs wait, and removed edges are not "
            "purged\n"
        )
    print_records(
        {"database": database.name, "master region": database.master_region, "server": server, "state": state}
        for database in found.databases
        for server, state in database.servers.items()
    )
