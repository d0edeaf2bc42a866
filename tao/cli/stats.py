"""`tao stats` and `tao arenas`: hit rates and memory of every cache server, and better budgets for its arenas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from tao.cli.connection import target_of
from tao.cli.frame import run
from tao.cli.options import connect_option, json_option
from tao.model.errors import TaoError
from tao.terminal import print_json, print_table, text_of

if TYPE_CHECKING:
    from tao.admin.server_stats import Stats
    from tao.cache.memory_advice import Proposal
    from tao.model.topology import Topology

_SERVER_COLUMNS = ("server", "tier", "hits", "misses", "hit rate %", "entries", "MB", "evicted", "writes")
_ARENA_COLUMNS = ("server", "arena", "MB", "of MB", "objects", "lists", "counts", "evicted", "age s", "came back")
_PROPOSAL_COLUMNS = ("tier", "arena", "MB now", "MB proposed", "why")


@click.command()
@connect_option
@json_option
def stats(connect: str | None, as_json: bool) -> int:
    """Show hit rates, cache entries and bytes of every server and of its arenas, since it started.

    Exit status 1 when a server does not answer. --json prints all figures of each server.
    """
    from tao.admin.server_stats import servers_by_tier

    topology, answers = run(_ask_all(connect))
    found: dict[str, Mapping[str, Any]] = {
        name: {"error": answer.message} if isinstance(answer, TaoError) else answer for name, answer in answers.items()
    }
    if as_json:
        print_json(found)
    else:
        rows = [_server_row(tier, server.name, found[server.name]) for tier, server in servers_by_tier(topology)]
        print_table(_SERVER_COLUMNS, rows, right=_SERVER_COLUMNS[2:])
        _print_arenas({name: each for name, each in found.items() if "error" not in each})
        for name, each in found.items():
            if "error" in each:
                click.echo(f"{name}: {text_of(each['error'])}")
    return int(any("error" in each for each in found.values()))


@click.command()
@click.option(
    "--suggest", is_flag=True, help="Propose budgets in bytes, from how many entries came back after eviction."
)
@connect_option
@json_option
def arenas(connect: str | None, suggest: bool, as_json: bool) -> int:
    """Show the arenas of every server: their budgets, their content, and how long entries stay.

    --suggest proposes budgets for the servers of each tier, with the same sum, from what was seen since they started.
    It goes one step: look again after the servers have run with the new budgets for a while. Exit status 1 when a
    server does not answer.
    """
    topology, answers = run(_ask_all(connect))
    found = {name: answer for name, answer in answers.items() if not isinstance(answer, TaoError)}
    if suggest:
        _print_proposals(_proposals(topology, found), as_json)
    elif as_json:
        print_json({name: each["arenas"] for name, each in found.items()})
    else:
        _print_arenas(found)
    for name, answer in answers.items():
        if isinstance(answer, TaoError):
            click.echo(f"{name}: {answer.message}", err=True)
    return int(len(found) < len(answers))


async def _ask_all(connect: str | None) -> tuple[Topology, dict[str, Stats | TaoError]]:
    from tao.admin.connection import current_topology
    from tao.admin.server_stats import cache_server_stats

    topology = await current_topology(target_of(connect))
    return topology, await cache_server_stats(topology)


def _proposals(topology: Topology, found: Mapping[str, Stats]) -> dict[str, list[Proposal]]:
    from tao.admin.server_stats import mean_arena_use, servers_by_tier
    from tao.cache.memory_advice import propose

    tiers: dict[str, list[Stats]] = {}
    for tier, server in servers_by_tier(topology):
        if server.name in found:
            tiers.setdefault(tier, []).append(found[server.name])
    return {tier: propose(mean_arena_use(servers)) for tier, servers in tiers.items()}


def _print_proposals(proposals: Mapping[str, list[Proposal]], as_json: bool) -> None:
    if as_json:
        print_json(
            {
                tier: {
                    each.name: {
                        "budget_bytes": each.budget_bytes,
                        "proposed_bytes": each.proposed_bytes,
                        "reason": each.reason,
                    }
                    for each in lines
                }
                for tier, lines in proposals.items()
            }
        )
        return
    rows = [
        (tier, each.name, f"{each.budget_bytes / 1e6:,.1f}", f"{each.proposed_bytes / 1e6:,.1f}", each.reason)
        for tier, lines in proposals.items()
        for each in lines
    ]
    print_table(_PROPOSAL_COLUMNS, rows, right=_PROPOSAL_COLUMNS[2:4])


def _print_arenas(found: Mapping[str, Stats]) -> None:
    rows = [_arena_row(name, arena) for name, each in found.items() for arena in each["arenas"]]
    print_table(_ARENA_COLUMNS, rows, right=_ARENA_COLUMNS[2:])


def _arena_row(name: str, arena: Mapping[str, Any]) -> tuple[object, ...]:
    age = arena["eviction_age_seconds"]
    return (
        name,
        arena["name"],
        f"{arena['bytes'] / 1e6:,.1f}",
        f"{arena['budget_bytes'] / 1e6:,.1f}",
        *(f"{arena[kind]:,}" for kind in ("objects", "lists", "counts", "evictions")),
        None if age is None else f"{age:,.0f}",
        f"{sum(arena['returns']):,}",
    )


def _server_row(tier: str, name: str, found: Stats) -> tuple[object, ...]:
    if "error" in found:
        return (name, tier, *(None for _ in _SERVER_COLUMNS[2:]))
    writes, rate = found["writes"], found["hit_rate"]
    return (
        name,
        tier,
        *(f"{found[key]:,}" for key in ("hits", "misses")),
        None if rate is None else f"{100 * rate:.1f}",
        f"{sum(found['entries'].values()):,}",
        f"{found['bytes'] / 1e6:,.1f}",
        f"{found['evictions']:,}",
        f"{writes.get('committed', writes.get('forwarded', 0)):,}",
    )
