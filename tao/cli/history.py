"""`tao history`: what happened to one key at every server, in one timeline."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from tao.admin.connection import current_schema, current_topology
from tao.admin.key_history import WORDS, Event, KeyTimeline, key_timeline, version_text
from tao.cli.connection import links_of_command, target_of
from tao.cli.frame import run, show
from tao.cli.options import global_options, token_option
from tao.routing.routes import Routes
from tao.terminal import fields_of, print_records


@click.command()
@click.argument("key", metavar="ID", type=click.IntRange(min=0))
@click.argument("atype", required=False)
@token_option
@global_options
def history(key: int, atype: str | None) -> int:
    """Show what happened to an object (ID) or an association list (ID ATYPE) at every server.

    Shows the version in the database, the version that every server holds, and the events of the key at each server:
    fills, messages, evictions, invalidations, with versions as EPOCH.CHANGES and their causes. Hits are not recorded.
    Times are those of the servers' clocks, in UTC.

    Exit status 1 when a server holds an older version than the database, and still does a second later, or could not be
    asked.
    """
    found = run(_collect(key, atype))
    stale = [held.server for held in found.stale]
    show({**fields_of(found), "stale_servers": stale}, lambda: _print(found, stale))
    return int(bool(stale or found.unreachable))


def _story(**options: Any) -> int:  # Any: those of `tao history`
    click.echo("tao: `tao story` is now called `tao history`; the old name will be removed", err=True)
    assert history.callback is not None
    status: int = history.callback(**options)
    return status


story = click.Command("story", params=history.params, callback=_story, help=history.help, hidden=True)


async def _collect(key: int, atype: str | None) -> KeyTimeline:
    target = target_of()
    routes = Routes(await current_topology(target))
    number = 0
    if atype is not None:
        number = int(atype) if atype.isdecimal() else (await current_schema(target)).atype(atype).number
    async with links_of_command() as links:
        return await key_timeline(routes, links, key, number)


def _print(found: KeyTimeline, stale: list[str]) -> None:
    stored = f"unknown: {found.stored_error}" if found.stored_error else version_text(found.stored_version)
    click.echo(f"version in the master database: {stored}")
    print_records(
        {
            "server": held.server,
            "role": held.role,
            "region": held.region,
            "holds": version_text(held.cached_version),
            "has seen": version_text(held.floor),
            "recorded since": _time(held.since_unix_ms),
            "error": held.error,
        }
        for held in found.servers
    )
    click.echo()
    print_records(
        {
            "time": _time(each.unix_ms),
            "server": each.server,
            "what happened": WORDS.get(each.event, each.event),
            "version": _version(each),
            "by": each.cause,
        }
        for each in found.events
    )
    if stale:
        click.echo()
        click.echo(f"older than the database: {', '.join(stale)}")


def _version(event: Event) -> str:
    """Return the version of an event; of a shard's event its version epoch."""
    if event.of_shard:
        return f"epoch {event.version}" if event.version else "-"
    return version_text(event.version)


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3] if unix_ms else ""
