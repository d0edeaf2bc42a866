"""`tao shard`: show which shards and keys are read most, and have more servers serve such a shard."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.connection import target_of, tls_of_command, topology_path
from tao.cli.frame import ask, run
from tao.cli.options import changing_options, connect_option, json_option, tier_option, token_option
from tao.terminal import print_json, print_table

if TYPE_CHECKING:
    from tao.topology.clones import Cloning

_wait_option = click.option(
    "--wait-seconds",
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    help="How long to wait until every server of the tier uses the change, in seconds.",
)


@click.group()
def shard() -> None:
    """Show which shards are read most, and change how many servers of a tier serve a shard."""


@shard.command()
@click.argument("shard", type=click.IntRange(min=0))
@tier_option
@click.option(
    "--copies", type=click.IntRange(min=1), default=1, show_default=True, help="The number of servers beside its home."
)
@token_option
@_wait_option
@changing_options
def clone(
    shard: int, tier: str, copies: int, token: str, wait_seconds: float, file: Path | None, yes: bool, as_json: bool
) -> None:
    """Have COPIES servers beside its home serve SHARD of a follower tier. Reads spread over all of them.

    First all servers of the tier begin to send changes to the new ones, then these begin to answer: no read fails, and
    none misses a write. Repeat the command when it was interrupted.
    """
    _set_copies(_plan(file, shard, tier, copies, more=True), token, wait_seconds, yes=yes, as_json=as_json)


@shard.command()
@click.argument("shard", type=click.IntRange(min=0))
@tier_option
@click.option(
    "--copies",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="The number of servers beside its home that remain.",
)
@token_option
@_wait_option
@changing_options
def unclone(
    shard: int, tier: str, copies: int, token: str, wait_seconds: float, file: Path | None, yes: bool, as_json: bool
) -> None:
    """Have fewer servers serve SHARD of a follower tier: its home alone, or COPIES beside it.

    First these stop answering, then they get no more changes: clients with an older topology are sent to the others.
    """
    _set_copies(_plan(file, shard, tier, copies, more=False), token, wait_seconds, yes=yes, as_json=as_json)


def _plan(file: Path | None, shard: int, tier: str, copies: int, *, more: bool) -> tuple[Path, int, Cloning]:
    """Return the topology file, its version and the plan. Raises `OperatorError` when the other command is meant."""
    from tao.admin.documents import find_tier, load_topology
    from tao.model.errors import OperatorError
    from tao.topology.clones import plan_copies

    path = topology_path(file)
    found = load_topology(path)
    cloning = plan_copies(found, *find_tier(found, tier), shard, copies)
    if more != (len(cloning.after) >= len(cloning.before)) and cloning.before != cloning.after:
        other = "unclone" if more else "clone"
        raise OperatorError(
            f"shard {shard} has {len(cloning.before) - 1} copies: `tao shard {other}` makes them {copies}"
        )
    return path, found.version, cloning


def _set_copies(plan: tuple[Path, int, Cloning], token: str, wait_seconds: float, *, yes: bool, as_json: bool) -> None:
    path, version, cloning = plan
    if not as_json:
        _show(cloning)
    if not cloning.is_nothing:
        ask(f"Do this in {path}?", yes)
        version = run(_carry_out(path, cloning, token, wait_seconds, as_json))
    if as_json:
        names = {"before": list(cloning.before), "after": list(cloning.after)}
        print_json({"shard": cloning.shard, "tier": f"{cloning.region}/{cloning.tier}", "version": version, **names})
    else:
        click.echo("nothing to change" if cloning.is_nothing else f"version {version} is in use everywhere in the tier")


def _show(cloning: Cloning) -> None:
    rows = [
        (name, place, "serves" if name in cloning.before else "-", "serves" if name in cloning.after else "-")
        for name in dict.fromkeys((*cloning.before, *cloning.after, *cloning.told))
        for place in ("home" if name == cloning.after[0] else "clone",)
    ]
    click.echo(f"shard {cloning.shard} of {cloning.region}/{cloning.tier}:")
    print_table(("server", "as", "before", "after"), rows)


async def _carry_out(path: Path, cloning: Cloning, token: str, wait_seconds: float, as_json: bool) -> int:
    from tao.admin.connection import operator_links
    from tao.admin.documents import topology_file
    from tao.terminal import WaitDisplay
    from tao.watcher.shard_clones import Cloner, CloningSettings, topology_version_of

    settings = CloningSettings(timeout_seconds=wait_seconds)
    with WaitDisplay() as display:
        async with operator_links(token, tls_of_command()) as links:
            show = _show_nothing if as_json else display.show
            cloner = Cloner(topology_file(path), topology_version_of(links, settings), settings, show)
            return (await cloner.run(cloning)).version


def _show_nothing(_: str) -> None:
    """Keep standard error empty, for ``--json``."""


@shard.command()
@click.option(
    "--limit",
    type=click.IntRange(1, 200),
    default=20,
    show_default=True,
    help="The largest number of shards, and of keys, to show.",
)
@click.option(
    "--tier", metavar="TIER", help="Show only this tier; REGION/TIER where several regions have a tier of that name."
)
@token_option
@connect_option
@json_option
def hot(limit: int, tier: str | None, token: str, connect: str | None, as_json: bool) -> int:
    """Show which shards and keys are read most, in reads a second over about the last ten seconds.

    Every server samples its requests: rates are estimates, within a few percent where they are high.
    Exit status 1 when a server does not answer.
    """
    from tao.admin.server_stats import follower_traffic, merge_traffic

    topology, answers = run(follower_traffic(target_of(connect, token), limit, tier))
    found = merge_traffic(topology, answers, limit)
    if as_json:
        print_json(found)
    else:
        _print_hot(found)
    return int(bool(found["silent"]))


def _print_hot(found: dict[str, Any]) -> None:  # Any: as printed by --json
    columns = ("tier", "shard", "reads/s", "share %", "servers", "busiest")
    shards = [
        (
            each["tier"],
            each["shard"],
            f"{each['reads_per_second']:,.0f}",
            f"{100 * each['share']:.1f}",
            ", ".join(each["servers"]),
            each["busiest"],
        )
        for each in found["shards"]
    ]
    print_table(columns, shards, right=columns[1:4])
    click.echo()
    keys = [
        (
            each["tier"],
            each["id"],
            each["atype"] or None,
            each["shard"],
            f"{each['reads_per_second']:,.0f}",
            f"{100 * each['share']:.1f}",
        )
        for each in found["keys"]
    ]
    key_columns = ("tier", "id", "atype", "shard", "reads/s", "share %")
    print_table(key_columns, keys, right=key_columns[1:])
    for name, why in found["silent"].items():
        click.echo(f"{name}: {why}", err=True)
