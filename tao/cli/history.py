"""`tao history`: what happened to one key at every server, in one timeline."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click

from tao.admin.connection import current_schema, current_topology
from tao.admin.key_history import Event, KeyTimeline, key_timeline, sentence_of, state_of, version_text
from tao.cli.connection import links_of_command, target_of
from tao.cli.frame import run, show
from tao.cli.options import IntRange, global_options
from tao.model.versions import counter_of, epoch_of
from tao.routing.routes import Routes
from tao.terminal import counted, fields_of, print_records


@click.command()
@click.argument("key", metavar="ID", type=IntRange(min=0))
@click.argument("atype", required=False)
@global_options
def history(key: int, atype: str | None) -> int:
    """Show what happened to an object (ID) or an association list (ID ATYPE) at every server.

    Shows the version in the database, the version that every server holds and whether it is up to date, and a timeline
    of what happened to the key at each server: fills, changes, evictions, invalidations. Reads that the cache answered
    are not recorded. Times are those of the servers' clocks, in UTC.

    A version is EPOCH.CHANGES: 1.5 is the fifth change of the key, made in version epoch 1. A promotion of the shard's
    master raises the epoch. A deletion is a change, too.

    Exit status 1 when a server holds an older version than the database, and still does a second later, or could not be
    asked.
    """
    found = run(_collect(key, atype))
    stale = [held.server for held in found.stale]
    name = f"object {key}" if atype is None else f"list ({key}, {atype})"
    show({**fields_of(found), "stale_servers": stale}, lambda: _print(name, found, stale))
    return int(bool(stale or found.unreachable))


def _story(**options: Any) -> int:  # Any: those of `tao history`
    click.echo("tao: `tao story` is now called `tao history`; the old name will be removed", err=True)
    assert history.callback is not None
    status: int = history.callback(**options)
    return status


story = click.Command("story", params=history.params, callback=_story, help=history.help, hidden=True)


async def _collect(key: int, atype: str | None) -> KeyTimeline:
    target = target_of()
    topology = await current_topology(target)
    number = 0
    if atype is not None:
        number = int(atype) if atype.isdecimal() else (await current_schema(target)).atype(atype).number
    async with links_of_command(topology) as links:
        return await key_timeline(Routes(topology), links, key, number)


def _print(name: str, found: KeyTimeline, stale: list[str]) -> None:
    click.echo(_stored_text(name, found))
    click.echo()
    print_records(
        {
            "server": held.server,
            "role": held.role,
            "region": held.region,
            "holds": version_text(held.cached_version),
            "has seen": version_text(held.floor),
            "what it means": state_of(held, found.stored_version),
        }
        for held in found.servers
    )
    if not found.servers:
        click.echo("No server holds it, or has recorded anything of it.")
    click.echo()
    print_records(
        {
            "time (UTC)": _time(each.unix_ms),
            "server": each.server,
            "version": _version(each),
            "what happened": sentence_of(each),
        }
        for each in found.events
    )
    since = max((held.since_unix_ms for held in found.servers), default=0)
    if since:
        click.echo()
        click.echo(f"The servers' records go back to {_time(since)} at least; what happened before may be missing.")
    if stale:
        click.echo()
        click.echo(f"Stale: {', '.join(stale)}. docs/how-to/debug-a-stale-read.md says where to look.")


def _stored_text(name: str, found: KeyTimeline) -> str:
    """Return what the master database has, and what its version means."""
    if found.stored_version is None:
        return f"The master database could not be asked about {name}: {found.stored_error}"
    if not found.stored_version:
        return f"The master database has no {name}, and never had."
    changes, epoch = counter_of(found.stored_version), epoch_of(found.stored_version)
    return (
        f"In the master database, {name} has version {version_text(found.stored_version)}: "
        f"changed {counted(changes, 'time')}, last in version epoch {epoch}."
    )


def _version(event: Event) -> str:
    """Return the version of an event; of a shard's event its version epoch."""
    if event.of_shard:
        return f"epoch {event.version}" if event.version else "-"
    return version_text(event.version)


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%m-%d %H:%M:%S.%f")[:-3] if unix_ms else ""
