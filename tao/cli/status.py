"""`tao status`: the whole cluster on one screen, what is wrong with it first, from the servers' admin ports."""

from __future__ import annotations

import asyncio

import click

from tao.cli.frame import connect_option, json_option, region_option, run
from tao.cli.output import counted, print_json, print_table, text_of
from tao.cli.status_view import Answer, View, view_of
from tao.model.errors import TaoError

_HTTP_OK = 200


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
    help="A region that may be further behind its masters is a problem.",
)
def status(connect: str | None, as_json: bool, max_staleness_seconds: float) -> int:
    """Show what is wrong with the cluster, then all regions, servers and databases.

    Exit status 1 when something is wrong. It asks every server's admin port, and no database.
    """
    import msgspec

    found = run(_look(connect, max_staleness_seconds))
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _print(found)
    return int(bool(found.problems))


async def _look(connect: str | None, max_staleness_seconds: float) -> View:
    from tao.cli.reaching import topology_of

    topology = await topology_of(connect)
    addresses: dict[str, str] = {}
    for region in topology.regions:
        for tier in (region.leaders, *region.followers):
            addresses.update({server.name: server.admin for server in tier.servers})
        addresses.update({tailer.name: tailer.admin for tailer in region.tailers})
    answers = await asyncio.gather(*map(_ask, addresses.values()))
    return view_of(topology, dict(zip(addresses, answers, strict=True)), max_staleness_seconds)


async def _ask(admin: str) -> Answer:
    from tao.devcluster.readiness import server_stats
    from tao.runtime.admin_client import admin_get

    if not admin:
        return Answer({}, "it has no admin address in the topology")
    try:
        stats = await server_stats(admin)
        ready, body = await admin_get(admin, "/ready")
    except TaoError as error:
        return Answer({}, error.message)
    return Answer(stats, "" if ready == _HTTP_OK else body.decode(errors="replace").strip())


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
    print_table(
        ("database", "master region", "server", "state"),
        [
            (database.name, database.master_region, server, state)
            for database in found.databases
            for server, state in database.servers.items()
        ],
    )
