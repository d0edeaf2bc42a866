"""`tao stats`: what every server's cache holds and how often it hits, from the servers' admin ports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from tao.cli.connecting import graph_of
from tao.cli.frame import connect_option, json_option, run
from tao.cli.output import print_json, print_table, text_of
from tao.model.errors import OperatorError, TaoError
from tao.model.topology import CacheServer, Topology

_COLUMNS = ("server", "tier", "hits", "misses", "hit rate %", "entries", "MB", "evicted", "writes")

_ARENA_COLUMNS = (
    "server",
    "arena",
    "MB",
    "of MB",
    "objects",
    "lists",
    "counts",
    "evicted",
    "age s",
    "came back",
)


@click.command()
@connect_option
@json_option
def stats(connect: str | None, as_json: bool) -> int:
    """Show hit rates, cache entries and bytes of every server and of its arenas, since it started.

    Exit status 1 when one does not answer. --json gives all of its figures.
    """
    topology, answers = run(ask_all(connect))
    found = {
        name: {"error": answer.message} if isinstance(answer, TaoError) else answer for name, answer in answers.items()
    }
    if as_json:
        print_json(found)
    else:
        rows = [_row(tier, server.name, found[server.name]) for tier, server in servers_of(topology)]
        print_table(_COLUMNS, rows, right=_COLUMNS[2:])
        print_arenas({name: each for name, each in found.items() if "error" not in each})
        for name, each in found.items():
            if "error" in each:
                click.echo(f"{name}: {text_of(each['error'])}")
    return int(any("error" in each for each in found.values()))


async def ask_all(connect: str | None) -> tuple[Topology, dict[str, Mapping[str, Any] | TaoError]]:
    """The figures of every cache server, or why there are none, by its name."""
    from tao.devcluster.readiness import server_stats

    async with graph_of(connect) as graph:
        topology = graph.topology

    async def ask(server: CacheServer) -> Mapping[str, Any] | TaoError:
        if not server.admin:
            return OperatorError("has no admin address in the topology")
        try:
            return await server_stats(server.admin)
        except TaoError as error:
            return error

    servers = [server for _, server in servers_of(topology)]
    answers = await asyncio.gather(*map(ask, servers))
    return topology, {server.name: answer for server, answer in zip(servers, answers, strict=True)}


def print_arenas(found: Mapping[str, Mapping[str, Any]]) -> None:
    """One line for each arena of each server."""
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


def servers_of(topology: Topology) -> list[tuple[str, CacheServer]]:
    """Every cache server with its tier, as ``region/tier``."""
    return [
        (f"{region.name}/{tier.name}", server)
        for region in topology.regions
        for tier in (*region.followers, region.leaders)
        for server in tier.servers
    ]


def _row(tier: str, name: str, found: Mapping[str, Any]) -> tuple[object, ...]:
    if "error" in found:
        return (name, tier, *(None for _ in _COLUMNS[2:]))
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
