"""`tao stats`: what every server's cache holds and how often it hits, from the servers' admin ports."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from tao.cli.connecting import graph_of
from tao.cli.frame import connect_option, json_option, run
from tao.cli.output import print_json, print_table
from tao.model.errors import TaoError
from tao.model.topology import CacheServer, Topology

_REQUESTS = "tao_requests_total"
_HITS = "tao_cache_hits_total"
_MISSES = "tao_cache_misses_total"
_ENTRIES = "tao_cache_entries"
_BYTES = "tao_cache_bytes"
_COLUMNS = ("server", "tier", "requests", "hits", "misses", "hit rate %", "entries", "MB")


@click.command()
@connect_option
@json_option
def stats(connect: str | None, as_json: bool) -> int:
    """Show hit rates, entries and bytes of every server. Exit status 1 when one does not answer."""
    topology, answers = run(_ask_all(connect))
    found = {
        name: {"error": answer.message} if isinstance(answer, TaoError) else {**_summary(answer), "figures": answer}
        for name, answer in answers.items()
    }
    if as_json:
        print_json(found)
    else:
        rows = [_row(tier, server.name, found[server.name]) for tier, server in _servers(topology)]
        print_table(_COLUMNS, rows, right=_COLUMNS[2:])
    return int(any("error" in each for each in found.values()))


async def _ask_all(connect: str | None) -> tuple[Topology, dict[str, Mapping[str, Any] | TaoError]]:
    from tao.devcluster.readiness import server_stats

    async with graph_of(connect) as graph:
        topology = graph.topology

    async def ask(server: CacheServer) -> Mapping[str, Any] | TaoError:
        try:
            return await server_stats(server.admin)
        except TaoError as error:
            return error

    servers = [server for _, server in _servers(topology)]
    answers = await asyncio.gather(*map(ask, servers))
    return topology, {server.name: answer for server, answer in zip(servers, answers, strict=True)}


def _servers(topology: Topology) -> list[tuple[str, CacheServer]]:
    """Every cache server with its tier, as ``region/tier``."""
    return [
        (f"{region.name}/{tier.name}", server)
        for region in topology.regions
        for tier in (*region.followers, region.leaders)
        for server in tier.servers
    ]


def _summary(figures: Mapping[str, Any]) -> dict[str, float]:
    hits, misses = _sum(figures, _HITS), _sum(figures, _MISSES)
    return {
        "requests": _sum(figures, _REQUESTS),
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / (hits + misses) if hits + misses else 0.0,
        "entries": _sum(figures, _ENTRIES),
        "bytes": _sum(figures, _BYTES),
    }


def _sum(figures: Mapping[str, Any], name: str) -> float:
    """A metric over all its labels."""
    return float(sum(row["value"] for row in figures.get(name, ())))


def _row(tier: str, name: str, found: Mapping[str, Any]) -> tuple[object, ...]:
    if "error" in found:
        return (name, tier, found["error"], *[None] * 5)
    whole = (f"{found[key]:,.0f}" for key in ("requests", "hits", "misses"))
    asked = found["hits"] + found["misses"]
    rate = f"{100 * found['hit_rate']:.1f}" if asked else None
    return (name, tier, *whole, rate, f"{found['entries']:,.0f}", f"{found['bytes'] / 1e6:,.1f}")
