"""`tao journal`: look at what followers have accepted and not made yet, and decide about what was given up."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import click

from tao.admin.connection import current_topology
from tao.admin.journal import (
    Report,
    discard,
    hand_over,
    inject,
    journal_followers,
    journal_reports,
    parked_in,
    split_id,
    wait_until_empty,
    waiting_in,
)
from tao.cli.connection import links_of_command, target_of
from tao.cli.frame import INCOMPLETE_STATUS, CommandGroup, ask, run, show
from tao.cli.options import FloatRange, IntRange, global_options, yes_option
from tao.model.errors import OperatorError, TaoError
from tao.model.topology import CacheServer, Topology
from tao.terminal import counted, print_records
from tao.wire.links import Links


@click.group(cls=CommandGroup)
def journal() -> None:
    """Show what followers have accepted and not made yet, and decide about what was given up."""


@journal.command()
@global_options
def status() -> int:
    """Show the journal of every follower: what waits and for how long, what is parked, what is wrong. `held
    copies` counts the copies it keeps of writes that other followers accepted.

    Exit status 1 when writes wait for too long (journal.alarm_seconds), are parked, or cannot be stored, and when a
    follower does not answer.
    """
    topology = run(current_topology(target_of()))
    reports = run(_reports(topology, 0))
    rows = [_row(name, report) for name, report in reports.items()]
    show(
        {name: _plain(report) for name, report in reports.items()},
        lambda: print_records(
            rows, "follower", "waiting", "oldest_seconds", "parked", "bytes", "held_copies", "trouble"
        ),
    )
    return int(any(row["trouble"] for row in rows))


@journal.command()
@click.option("--limit", type=IntRange(1, 1_000), default=100, show_default=True, help="Most writes of each follower.")
@global_options
def parked(limit: int) -> int:
    """Show the writes that were given up: rejected, or attempted a hundred times. The id is for inject and discard.

    Exit status 1 when a follower does not answer. Its writes are left out.
    """
    topology = run(current_topology(target_of()))
    found: list[dict[str, Any]] = []
    silent: dict[str, str] = {}
    for name, report in run(_reports(topology, limit)).items():
        if isinstance(report, TaoError):
            silent[name] = report.message
        else:
            found += [{"id": f"{name}/{each['number']}", **each} for each in (report or {}).get("writes", ())]

    def text() -> None:
        if found:
            print_records(found, "id", "priority", "attempts", "reason", "message", "write")
        else:
            click.echo("no write is parked" + (" at the followers that answer" if silent else ""))

    show(found, text)
    for name, why in silent.items():
        click.echo(f"{name} does not answer: {why}", err=True)
    return int(bool(silent))


@journal.command(name="inject")
@click.argument("parked_id", metavar="ID")
@yes_option
@global_options
def inject_(parked_id: str) -> None:
    """Attempt the parked write ID again, from the first attempt. Its reason should be gone.

    The write has a new id from then on, which is printed.
    """
    _change_parked(parked_id, "Attempt", inject)


@journal.command(name="discard")
@click.argument("parked_id", metavar="ID")
@yes_option
@global_options
def discard_(parked_id: str) -> None:
    """Forget the parked write ID: it is never made. The write is printed."""
    _change_parked(parked_id, "Forget", discard)


@journal.command()
@click.argument("follower")
@click.option("--to", metavar="FOLLOWER", help="Have this follower of the region accept what waits and is parked.")
@click.option(
    "--timeout",
    "timeout_seconds",
    type=FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait without --to, in seconds.",
)
@yes_option
@global_options
def drain(follower: str, to: str | None, timeout_seconds: float) -> int:
    """Wait until nothing waits in FOLLOWER's journal, or move what it holds with --to.

    Run `tao drain` first, so that nothing more is accepted there. Exit status 4: writes still wait or are parked.
    """
    topology = run(current_topology(target_of()))
    (server,) = journal_followers(topology, [follower])
    if to is None:
        report = run(_with_links(topology, lambda links: wait_until_empty(links, server, timeout_seconds)))
    else:
        journal_followers(topology, [to])
        ask(f"Move what the journal of {follower} holds to {to}?")
        report = run(_with_links(topology, lambda links: hand_over(links, server, to)))
    waiting, given_up = waiting_in(report), parked_in(report)

    def text() -> None:
        if to is not None:
            click.echo(f"{counted(report['moved'], 'write')} moved to {to}")
        if report["trouble"]:
            click.echo(report["trouble"], err=True)
        click.echo(f"{follower}: {counted(waiting, 'write')} waiting, {given_up:,} parked")

    show(report, text)
    return INCOMPLETE_STATUS if waiting or given_up else 0


def _change_parked(parked_id: str, verb: str, change: Callable[[Links, CacheServer, int], Awaitable[Report]]) -> None:
    topology = run(current_topology(target_of()))
    server, number = split_id(topology, parked_id)
    ask(f"{verb} the parked write {parked_id}?")
    report = run(_with_links(topology, lambda links: change(links, server, number)))

    def text() -> None:
        print_records([report["write"]], "number", "priority", "reason", "message", "write")
        if "new_number" in report:
            click.echo(f"it waits as {server.name}/{report['new_number']}; parked again, it has that id")
        else:
            click.echo("it is forgotten")

    show(report, text)


async def _with_links(topology: Topology, do: Callable[[Links], Awaitable[Report]]) -> Report:
    async with links_of_command(topology) as links:
        return await do(links)


async def _reports(topology: Topology, parked_limit: int) -> dict[str, Report | TaoError | None]:
    async with links_of_command(topology) as links:
        found = await journal_reports(links, journal_followers(topology), parked_limit)
    if all(report is None for report in found.values()):
        raise OperatorError("no follower keeps a journal: set journal.folder in the followers' settings")
    return found


def _row(name: str, report: Report | TaoError | None) -> dict[str, Any]:
    if report is None:
        return {"follower": name, "trouble": "keeps no journal"}
    if isinstance(report, TaoError):
        return {"follower": name, "trouble": report.message}
    faults = [
        (bool(report["trouble"]), report["trouble"]),
        (bool(report.get("sibling_trouble")), f"no other follower takes copies: {report.get('sibling_trouble')}"),
        (report["late"], "writes wait for too long"),
        (parked_in(report) > 0, "writes were given up: tao journal parked"),
        (report["set_aside_total"] + report["torn_rows"] > 0, "rows or files were set aside as unreadable"),
    ]
    return {
        "follower": name,
        "waiting": waiting_in(report),
        "oldest_seconds": round(max(report["oldest_seconds"].values()), 1),
        "parked": parked_in(report),
        "bytes": report["bytes"],
        "held_copies": report.get("held_copies", 0),  # a follower of an earlier version keeps none
        "trouble": "; ".join(text for is_so, text in faults if is_so),
    }


def _plain(report: Report | TaoError | None) -> object:
    return {"error": report.message} if isinstance(report, TaoError) else report
