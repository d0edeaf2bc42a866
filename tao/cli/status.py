"""`tao status`: the whole cluster on one screen, its problems first, from the servers' admin ports."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from tao.cli.connection import target_of
from tao.cli.frame import run
from tao.cli.options import connect_option, json_option, region_option
from tao.terminal import counted, print_json, print_table, text_of

if TYPE_CHECKING:
    from tao.admin.status import View


@click.command()
@connect_option
@region_option
@json_option
@click.option(
    "--max-staleness",
    "max_staleness_seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="Report a region that may be further behind its masters than this, in seconds.",
)
def status(connect: str | None, as_json: bool, max_staleness_seconds: float) -> int:
    """Show what is wrong with the cluster, then all regions, servers and databases.

    It asks every server's admin port, and no database. Exit status 1 when something is wrong.
    """
    import msgspec

    found = run(_view(connect, max_staleness_seconds))
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _print(found)
    return int(bool(found.problems))


async def _view(connect: str | None, max_staleness_seconds: float) -> View:
    from tao.admin.connection import current_topology
    from tao.admin.status import cluster_view

    return await cluster_view(await current_topology(target_of(connect)), max_staleness_seconds)


def _print(found: View) -> None:
    click.echo(f"topology {found.topology_version}")
    if found.problems:
        click.echo(f"{counted(len(found.problems), 'problem')}:")
        for problem in found.problems:
            click.echo(f"  {text_of(problem)}")
    else:
        click.echo("nothing is wrong")
    click.echo()
    numbers: tuple[str, ...] = ("owned", "hosted", "subscribers", "inconsistent", "behind s")
    print_table(
        ("leader", "region", "state", *numbers),
        [
            (
                *(each.name, each.region, each.state),
                *(each.owned_shards, each.hosted_shards, each.subscribers),
                *(each.inconsistencies, each.staleness_seconds),
            )
            for each in found.leaders
        ],
        right=numbers,
    )
    click.echo()
    numbers = ("hit rate %", "unsubscribed", "behind s")
    print_table(
        ("follower", "region", "tier", "state", *numbers),
        [
            (
                *(each.name, each.region, each.tier, each.state),
                None if each.hit_rate is None else 100 * each.hit_rate,
                *(each.unsubscribed_shards, each.staleness_seconds),
            )
            for each in found.followers
        ],
        right=numbers,
    )
    if found.tailers:
        click.echo()
        print_table(
            ("tailer", "region", "database", "state", "lag s", "position"),
            [
                (each.name, each.region, each.database, each.state, each.lag_seconds, each.position)
                for each in found.tailers
            ],
            right=("lag s",),
        )
    click.echo()
    if found.watchers:
        print_table(
            ("watcher", "region", "state", "acts"),
            [
                (each.name, each.region, each.state, None if each.acts is None else "yes" if each.acts else "no")
                for each in found.watchers
            ],
        )
    else:
        click.echo("the topology lists no watcher: if none runs, nobody replaces a leader that fails")
    click.echo()
    print_table(
        ("database", "master region", "server", "state"),
        [
            (database.name, database.master_region, server, state)
            for database in found.databases
            for server, state in database.servers.items()
        ],
    )
