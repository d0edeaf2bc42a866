"""`tao history`: what happened to one key at every server, in one timeline."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from tao.cli.connection import target_of
from tao.cli.frame import run
from tao.cli.options import connect_option, json_option, token_option
from tao.terminal import print_json, print_table

if TYPE_CHECKING:
    from tao.admin.connection import ClusterTarget
    from tao.admin.key_history import Event, KeyTimeline


@click.command()
@click.argument("key", metavar="ID", type=click.IntRange(min=0))
@click.argument("atype", required=False)
@token_option
@connect_option
@json_option
def history(key: int, atype: str | None, token: str, connect: str | None, as_json: bool) -> int:
    """Show what happened to an object (ID) or an association list (ID ATYPE) at every server.

    Shows the version in the database, the version that every server holds, and the events of the key at each server:
    fills, messages, evictions, invalidations, with versions as EPOCH.CHANGES and their causes. Hits are not recorded.
    Times are those of the servers' clocks, in UTC.

    Exit status 1 when a server holds an older version than the database, and still does a second later, or could not be
    asked.
    """
    import dataclasses

    from tao.admin.key_history import version_text

    found = run(_collect(target_of(connect, token), key, atype))
    if as_json:
        print_json({**dataclasses.asdict(found), "stale_servers": [held.server for held in found.stale]})
        return int(bool(found.stale or found.unreachable))
    stored = f"unknown: {found.stored_error}" if found.stored_error else version_text(found.stored_version)
    click.echo(f"version in the master database: {stored}")
    print_table(
        ("server", "role", "region", "holds", "has seen", "recorded since", "error"),
        [
            (
                *(held.server, held.role, held.region),
                *(version_text(held.cached_version), version_text(held.floor)),
                _time(held.since_unix_ms) if held.since_unix_ms else None,
                held.error or None,
            )
            for held in found.servers
        ],
    )
    click.echo()
    print_table(
        ("time", "server", "what happened", "version", "by"),
        [
            (_time(event.unix_ms), event.server, _words(event), _version(event), event.cause or None)
            for event in found.events
        ],
    )
    if found.stale:
        click.echo()
        click.echo(f"older than the database: {', '.join(held.server for held in found.stale)}")
    return int(bool(found.stale or found.unreachable))


def _story(**given: Any) -> int:
    click.echo("tao: `tao story` is now called `tao history`; the old name will be removed", err=True)
    assert history.callback is not None
    status: int = history.callback(**given)
    return status


story = click.Command("story", params=history.params, callback=_story, help=history.help, hidden=True)


async def _collect(target: ClusterTarget, key: int, atype: str | None) -> KeyTimeline:
    from tao.admin.connection import current_schema, current_topology, operator_links
    from tao.admin.key_history import key_timeline
    from tao.routing.routes import Routes

    routes = Routes(await current_topology(target))
    number = 0
    if atype is not None:
        number = int(atype) if atype.isdecimal() else (await current_schema(target)).atype(atype).number
    async with operator_links(target.secret, target.tls) as links:
        return await key_timeline(routes, links, key, number)


def _words(event: Event) -> str:
    from tao.admin.key_history import WORDS

    return WORDS.get(event.event, event.event)


def _version(event: Event) -> str:
    """Return the version of an event; of a shard's event its version epoch."""
    from tao.admin.key_history import version_text

    if event.of_shard:
        return f"epoch {event.version}" if event.version else "-"
    return version_text(event.version)


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
