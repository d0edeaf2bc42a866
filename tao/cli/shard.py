"""`tao shard`: show which shards and keys are read most, and have more servers serve such a shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import click

from tao.admin.connection import ClusterTarget, current_schema
from tao.admin.documents import find_tier, load_topology, topology_file
from tao.admin.server_stats import follower_traffic, merge_traffic
from tao.cli.connection import links_of_command, target_of, topology_path
from tao.cli.frame import CommandGroup, ask, run, show
from tao.cli.options import (
    Decorator,
    FloatRange,
    IntRange,
    changing_options,
    combined,
    given,
    global_options,
    tier_option,
)
from tao.etcd.location import Location
from tao.model.errors import OperatorError, TaoError
from tao.routing.cloning_policy import CloningPolicy
from tao.routing.read_rates import RateSettings
from tao.terminal import WaitDisplay, counted, print_records
from tao.topology.clones import Cloning, plan_copies
from tao.watcher.shard_clones import Cloner, CloningSettings, topology_version_of


def _clone_options(least: int, copies_help: str) -> Decorator:
    return combined(
        click.argument("shard", type=IntRange(min=0)),
        tier_option,
        click.option("--copies", type=IntRange(min=least), default=least, show_default=True, help=copies_help),
        click.option(
            "--wait-seconds",
            type=FloatRange(min=0.1),
            default=30.0,
            show_default=True,
            help="How long to wait until every server of the tier uses the change, in seconds.",
        ),
        changing_options,
    )


class _Plan(NamedTuple):
    file: Location
    version: int
    cloning: Cloning


@click.group(cls=CommandGroup)
def shard() -> None:
    """Show which shards are read most, and change how many servers of a tier serve a shard."""


@shard.command()
@_clone_options(1, "The number of servers beside its home.")
def clone(shard: int, tier: str, copies: int, wait_seconds: float) -> None:
    """Have COPIES servers beside its home serve SHARD of a follower tier. Reads spread over all of them.

    First all servers of the tier begin to send changes to the new ones, then these begin to answer: no read fails, and
    none misses a write. Repeat the command when it was interrupted.
    """
    _set_copies(_plan(shard, tier, copies, more=True), wait_seconds)


@shard.command()
@_clone_options(0, "The number of servers beside its home that remain.")
def unclone(shard: int, tier: str, copies: int, wait_seconds: float) -> None:
    """Have fewer servers serve SHARD of a follower tier: its home alone, or COPIES beside it.

    First these stop answering, then they get no more changes: clients with an older topology are sent to the others.
    """
    _set_copies(_plan(shard, tier, copies, more=False), wait_seconds)


def _plan(shard: int, tier: str, copies: int, *, more: bool) -> _Plan:
    """Plan the change. Raises `OperatorError` when the other command is meant."""
    path = topology_path()
    found = load_topology(path)
    cloning = plan_copies(found, *find_tier(found, tier), shard, copies)
    if more != (len(cloning.after) >= len(cloning.before)) and cloning.before != cloning.after:
        other = "unclone" if more else "clone"
        raise OperatorError(
            f"shard {shard} has {len(cloning.before) - 1} copies: `tao shard {other}` makes them {copies}"
        )
    return _Plan(path, found.version, cloning)


def _set_copies(plan: _Plan, wait_seconds: float) -> None:
    path, version, cloning = plan
    tier = f"{cloning.region}/{cloning.tier}"
    if not given("as_json"):
        click.echo(f"shard {cloning.shard} of {tier}:")
        print_records(
            {
                "server": name,
                "as": "home" if name == cloning.after[0] else "clone",
                "before": "serves" if name in cloning.before else "-",
                "after": "serves" if name in cloning.after else "-",
            }
            for name in dict.fromkeys((*cloning.before, *cloning.after, *cloning.extra_receivers))
        )
    if not cloning.is_nothing:
        ask(f"Do this in {path}?")
        version = run(_carry_out(path, cloning, wait_seconds))
    done = "nothing to change" if cloning.is_nothing else f"version {version} is in use everywhere in the tier"
    names = {"before": list(cloning.before), "after": list(cloning.after)}
    show({"shard": cloning.shard, "tier": tier, "version": version, **names}, lambda: click.echo(done))


async def _carry_out(path: Location, cloning: Cloning, wait_seconds: float) -> int:
    settings = CloningSettings(timeout_seconds=wait_seconds)
    with WaitDisplay() as display:
        async with links_of_command(load_topology(path)) as links:
            on_step = _show_nothing if given("as_json") else display.show
            cloner = Cloner(topology_file(path), topology_version_of(links, settings), settings, on_step)
            return (await cloner.run(cloning)).version


def _show_nothing(_: str) -> None:
    """Keep standard error empty, for ``--json``."""


@shard.command()
@click.option(
    "--limit",
    type=IntRange(1, 200),
    default=20,
    show_default=True,
    help="The largest number of shards, and of keys, to show.",
)
@click.option(
    "--tier", metavar="TIER", help="Show only this tier; REGION/TIER where several regions have a tier of that name."
)
@global_options
def hot(limit: int, tier: str | None) -> int:
    """Show which shards and keys are read most, in reads a second over about the last ten seconds, and whether that is
    much.

    Rates fade: a read counts half after five seconds. Every server counts all reads up to some 400 a second. Above, it
    samples them, and rates are estimates, within a few percent where they are high. Exit status 1 when a server does
    not answer.
    """
    found = merge_traffic(*run(follower_traffic(target_of(), limit, tier)), limit)

    def text() -> None:
        print_records(found["shards"])
        if found["keys"]:
            click.echo()
            names = run(_atype_names(target_of()))
            print_records({**key, "atype": names.get(key["atype"], key["atype"]) or None} for key in found["keys"])
            click.echo()
        for line in hot_lines(found):
            click.echo(line)
        for name, why in found["silent"].items():
            click.echo(f"{name}: {why}", err=True)

    show(found, text)
    return int(bool(found["silent"]))


async def _atype_names(target: ClusterTarget) -> dict[int, str]:
    """Return the names of the association types by their numbers; none when no follower says them."""
    try:
        return {atype.number: atype.label for atype in (await current_schema(target)).assocs}
    except TaoError:
        return {}


_HOT_SHARD: Final = CloningPolicy().clone_above
_HOT_KEY: Final = RateSettings().hot_reads_per_second


def hot_lines(found: Mapping[str, Any]) -> list[str]:  # Any: the JSON of `merge_traffic`
    """Return what the rates of `merge_traffic` mean: how much is read, and what is hot by the default settings."""
    if not found["tiers"]:
        return ["no follower has answered: nothing is known of what is read"]
    total = ", ".join(f"{rate:,.1f} in {tier}" for tier, rate in found["tiers"].items())
    lines = [f"reads a second over about the last ten seconds: {total}"]
    if not found["shards"]:
        return [*lines, "nothing is hot: no shard was read"]
    hot = [each for each in found["shards"] if each["reads_per_second"] >= _HOT_SHARD * len(each["servers"])]
    for shard in hot:
        servers = counted(len(shard["servers"]), "server")
        lines.append(
            f"shard {shard['shard']} of {shard['tier']} is hot: {shard['reads_per_second']:,.1f} reads/s at {servers}; "
            f"`tao shard clone {shard['shard']} --tier {shard['tier']} --copies {len(shard['servers'])}` adds one"
        )
    key = found["keys"][0] if found["keys"] else None
    if key is not None and key["reads_per_second"] >= _HOT_KEY:
        lines.append(
            f"keys are hot, with up to {key['reads_per_second']:,.1f} reads/s: SDKs keep a key from {_HOT_KEY:,.0f} "
            "reads/s at one server, and ask for it less"
        )
    elif not hot:
        shard = found["shards"][0]
        lines.append(
            f"nothing is hot: the busiest shard, {shard['shard']} of {shard['tier']}, has "
            f"{shard['reads_per_second']:,.1f} reads/s ({shard['share']:.0%} of its tier's); a clone pays off from "
            f"{_HOT_SHARD:,.0f} reads/s at one server"
        )
    return lines
