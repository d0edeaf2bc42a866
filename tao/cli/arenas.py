"""`tao arenas`: how the memory of the servers is divided, and with `--suggest` how it would be better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from tao.cache.advice import ArenaUse, Proposal, propose
from tao.cli.frame import connect_option, json_option, run
from tao.cli.output import print_json, print_table
from tao.cli.stats import ask_all, print_arenas, servers_of
from tao.model.errors import TaoError

_COLUMNS = ("tier", "arena", "MB now", "MB proposed", "why")


@click.command()
@click.option("--suggest", is_flag=True, help="Propose budgets, by what came back after it was evicted.")
@connect_option
@json_option
def arenas(connect: str | None, suggest: bool, as_json: bool) -> int:
    """Show the arenas of every server: budgets, what lies in them, how long it lasts.

    --suggest proposes budgets for the servers of each tier, with the same sum, from what was seen since they started:
    a step, after which it is worth looking again. Exit status 1 when a server does not answer.
    """
    topology, answers = run(ask_all(connect))
    found = {name: answer for name, answer in answers.items() if not isinstance(answer, TaoError)}
    if suggest:
        tiers: dict[str, list[Mapping[str, Any]]] = {}
        for tier, server in servers_of(topology):
            if server.name in found:
                tiers.setdefault(tier, []).append(found[server.name])
        proposals = {tier: propose(_use_per_server(servers)) for tier, servers in tiers.items()}
        if as_json:
            print_json({tier: {each.name: _as_json(each) for each in lines} for tier, lines in proposals.items()})
        else:
            rows = [_row(tier, each) for tier, lines in proposals.items() for each in lines]
            print_table(_COLUMNS, rows, right=_COLUMNS[2:4])
    elif as_json:
        print_json({name: each["arenas"] for name, each in found.items()})
    else:
        print_arenas(found)
    for name, answer in answers.items():
        if isinstance(answer, TaoError):
            click.echo(f"{name}: {answer.message}", err=True)
    return int(len(found) < len(answers))


def _use_per_server(servers: Sequence[Mapping[str, Any]]) -> list[ArenaUse]:
    """The mean of a tier's servers, which share one settings file."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for server in servers:
        for arena in server["arenas"]:
            by_name.setdefault(arena["name"], []).append(arena)

    def mean(arenas: Sequence[Mapping[str, Any]], key: str) -> int:
        return int(sum(arena[key] for arena in arenas) // len(arenas))

    return [
        ArenaUse(
            name,
            mean(same, "bytes"),
            mean(same, "budget_bytes"),
            mean(same, "evictions"),
            sum(arena["returns"][0] for arena in same) // len(same),
            mean(same, "kept"),
        )
        for name, same in by_name.items()
    ]


def _as_json(proposal: Proposal) -> dict[str, object]:
    return {
        "budget_bytes": proposal.budget_bytes,
        "proposed_bytes": proposal.proposed_bytes,
        "reason": proposal.reason,
    }


def _row(tier: str, proposal: Proposal) -> tuple[object, ...]:
    return (
        tier,
        proposal.name,
        f"{proposal.budget_bytes / 1e6:,.1f}",
        f"{proposal.proposed_bytes / 1e6:,.1f}",
        proposal.reason,
    )
