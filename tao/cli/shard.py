"""`tao shard`: which shards and keys are read most, and more servers for a shard that is (DESIGN.md §10)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tao.cli.frame import ask, connect_option, json_option, run
from tao.cli.output import print_json, print_table
from tao.cli.topology import changing, document_path, place_of, tier_option

if TYPE_CHECKING:
    from tao.topology.cloning import Cloning

_token_option = click.option(
    "--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one."
)
_wait_option = click.option(
    "--wait-seconds", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="For every server to hear."
)


@click.group()
def shard() -> None:
    """Show which shards are read most, and have more or fewer servers of a tier serve one."""


@shard.command()
@click.argument("shard", type=click.IntRange(min=0))
@tier_option
@click.option("--copies", type=click.IntRange(min=1), default=1, show_default=True, help="Servers beside its home.")
@_token_option
@_wait_option
@changing
def clone(
    shard: int, tier: str, copies: int, token: str, wait_seconds: float, file: Path | None, yes: bool, as_json: bool
) -> None:
    """Have COPIES servers beside its home serve SHARD of a follower tier. Reads spread over all of them.

    First all servers of the tier learn to hand changes to the new ones, then these begin to answer: no read fails, and
    none misses what has been written. Repeat the command when it was interrupted.
    """
    _set_copies(shard, tier, copies, True, token, wait_seconds, file, yes, as_json)


@shard.command()
@click.argument("shard", type=click.IntRange(min=0))
@tier_option
@click.option("--copies", type=click.IntRange(min=0), default=0, show_default=True, help="How many are to be left.")
@_token_option
@_wait_option
@changing
def unclone(
    shard: int, tier: str, copies: int, token: str, wait_seconds: float, file: Path | None, yes: bool, as_json: bool
) -> None:
    """Have fewer servers serve SHARD of a follower tier: its home alone, or COPIES beside it.

    First these end to answer, then they are no longer told: clients that did not know are sent to the others.
    """
    _set_copies(shard, tier, copies, False, token, wait_seconds, file, yes, as_json)


def _set_copies(
    shard: int,
    tier: str,
    copies: int,
    more: bool,
    token: str,
    wait_seconds: float,
    file: Path | None,
    yes: bool,
    as_json: bool,
) -> None:
    from tao.cli.connecting import load_topology
    from tao.model.errors import OperatorError
    from tao.topology.cloning import plan_copies

    path = document_path(file)
    found = load_topology(path)
    cloning = plan_copies(found, *place_of(found, tier), shard, copies)
    if more != (len(cloning.after) >= len(cloning.before)) and cloning.before != cloning.after:
        other = "unclone" if more else "clone"
        raise OperatorError(
            f"shard {shard} has {len(cloning.before) - 1} copies: `tao shard {other}` makes them {copies}"
        )
    if not as_json:
        _show(cloning)
    version = found.version
    if not cloning.is_nothing:
        ask(f"Do this in {path}?", yes)
        version = run(_carry_out(path, cloning, token, wait_seconds, as_json))
    if as_json:
        names = {"before": list(cloning.before), "after": list(cloning.after)}
        print_json({"shard": shard, "tier": f"{cloning.region}/{cloning.tier}", "version": version, **names})
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
    from tao.cli.reaching import operator_links
    from tao.cli.waiting import WaitDisplay
    from tao.model.errors import TopologyError
    from tao.topology.file_store import TopologyFile
    from tao.watcher.cloning import Cloner, CloningSettings, asking_by

    def fail(error: TopologyError) -> None:
        raise error

    settings = CloningSettings(hear_seconds=wait_seconds)
    with WaitDisplay() as display:
        async with operator_links(token) as links:
            store = TopologyFile(path, on_error=fail)
            cloner = Cloner(store, asking_by(links, settings), settings, display.show if not as_json else _say_nothing)
            return (await cloner.run(cloning)).version


def _say_nothing(_: str) -> None:
    """With ``--json`` standard error stays empty."""


@shard.command()
@click.option("--limit", type=click.IntRange(1, 200), default=20, show_default=True, help="Shards, and keys, shown.")
@click.option("--tier", metavar="TIER", help="Only of this tier; REGION/TIER where several have one of that name.")
@_token_option
@connect_option
@json_option
def hot(limit: int, tier: str | None, token: str, connect: str | None, as_json: bool) -> int:
    """Show which shards and keys are read most, with reads a second over the last ten seconds or so.

    Every server takes samples of what it is asked: rates are estimates, good to a few percent where they are high.
    Exit status 1 when a server does not answer.
    """
    from tao.cli.heat import ask_all, merged

    topology, answers = run(ask_all(connect, token, limit, tier))
    found = merged(topology, answers, limit)
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
