"""`tao stats` and `tao arenas`: hit rates and memory of every cache server, and better budgets for its arenas."""

from __future__ import annotations

from collections.abc import Mapping

import click

from tao.admin.connection import current_topology
from tao.admin.server_stats import Stats, cache_server_stats, mean_arena_use
from tao.cache.memory_advice import Proposal, propose
from tao.cli.connection import target_of
from tao.cli.frame import run, show
from tao.cli.options import global_options
from tao.model.errors import TaoError
from tao.model.topology import Topology
from tao.terminal import fields_of, print_records, text_of

_SERVER_COLUMNS = ("server", "tier", "hits", "misses", "hit_rate", "entries", "bytes", "evictions", "writes")
_ARENA_COLUMNS = ("bytes", "budget_bytes", "objects", "lists", "counts", "evictions", "eviction_age_seconds")


@click.command()
@global_options
def stats() -> int:
    """Show hit rates, cache entries and bytes of every server and of its arenas, since it started.

    Exit status 1 when a server does not answer. --json prints all figures of each server.
    """
    topology, answers = run(_ask_all())
    found = {name: each for name, each in answers.items() if not isinstance(each, TaoError)}
    silent = {name: {"error": each.message} for name, each in answers.items() if isinstance(each, TaoError)}

    def text() -> None:
        rows = [
            {"tier": place.path, **_server_row(server.name, found.get(server.name))}
            for place, server in topology.cache_servers
        ]
        print_records(rows, *_SERVER_COLUMNS)
        _print_arenas(found)
        for name, each in silent.items():
            click.echo(f"{name}: {text_of(each['error'])}")

    show({name: found.get(name) or silent[name] for name in answers}, text)
    return int(bool(silent))


@click.command()
@click.option(
    "--suggest", is_flag=True, help="Propose budgets in bytes, from how many entries came back after eviction."
)
@global_options
def arenas(suggest: bool) -> int:
    """Show the arenas of every server: their budgets, their content, and how long entries stay.

    --suggest proposes budgets for the servers of each tier, with the same sum, from what was seen since they started.
    It goes one step: look again after the servers have run with the new budgets for a while. Exit status 1 when a
    server does not answer.
    """
    topology, answers = run(_ask_all())
    found = {name: answer for name, answer in answers.items() if not isinstance(answer, TaoError)}
    if suggest:
        rows = [(tier, each) for tier, lines in _proposals(topology, found).items() for each in lines]
        document: dict[str, dict[str, object]] = {tier: {} for tier, _ in rows}
        for tier, each in rows:
            changed = {"budget_bytes": each.budget_bytes, "proposed_bytes": each.proposed_bytes, "reason": each.reason}
            document[tier][each.name] = changed
        show(document, lambda: print_records({"tier": tier, **fields_of(each)} for tier, each in rows))
    else:
        show({name: each["arenas"] for name, each in found.items()}, lambda: _print_arenas(found))
    for name, answer in answers.items():
        if isinstance(answer, TaoError):
            click.echo(f"{name}: {answer.message}", err=True)
    return int(len(found) < len(answers))


async def _ask_all() -> tuple[Topology, dict[str, Stats | TaoError]]:
    topology = await current_topology(target_of())
    return topology, await cache_server_stats(topology)


def _proposals(topology: Topology, found: Mapping[str, Stats]) -> dict[str, list[Proposal]]:
    tiers: dict[str, list[Stats]] = {}
    for place, server in topology.cache_servers:
        if server.name in found:
            tiers.setdefault(place.path, []).append(found[server.name])
    return {tier: propose(mean_arena_use(servers)) for tier, servers in tiers.items()}


def _print_arenas(found: Mapping[str, Stats]) -> None:
    print_records(
        {
            "server": server,
            "arena": arena["name"],
            **{name: arena[name] for name in _ARENA_COLUMNS},
            "returns": sum(arena["returns"]),
        }
        for server, each in found.items()
        for arena in each["arenas"]
    )


def _server_row(name: str, found: Stats | None) -> dict[str, object]:
    if found is None:
        return {"server": name}
    writes = found["writes"]
    return {
        **found,
        "server": name,
        "entries": sum(found["entries"].values()),
        "writes": writes.get("committed", writes.get("forwarded", 0)),
    }
