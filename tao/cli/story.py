"""`tao story`: what happened to one key at every server, in one timeline."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from tao.cli.frame import connect_option, json_option, run
from tao.cli.output import print_json, print_table

if TYPE_CHECKING:
    from tao.cli.storytelling import Event, Tale


@click.command()
@click.argument("key", metavar="ID", type=click.IntRange(min=0))
@click.argument("atype", required=False)
@click.option("--token", envvar="TAO_TOKEN", default="", help="The cluster's shared secret, if it has one.")
@connect_option
@json_option
def story(key: int, atype: str | None, token: str, connect: str | None, as_json: bool) -> int:
    """Tell why an object (ID) or an association list (ID ATYPE) is as it is.

    Shows which version the database has, which every server holds, and what happened to the key at each of them: fills,
    messages, evictions, invalidations, with versions as EPOCH.CHANGES and who brought them. Hits are not remembered.
    Times are those of the servers' clocks, in UTC.

    Exit status 1 when a server holds less than the database, a second later, too, or could not be asked.
    """
    import dataclasses

    from tao.cli.storytelling import version_text

    tale = run(_tell(connect, token, key, atype))
    if as_json:
        found = dataclasses.asdict(tale)
        print_json({**found, "stale_servers": [held.server for held in tale.stale]})
    else:
        stored = f"unknown: {tale.stored_error}" if tale.stored_error else version_text(tale.stored_version)
        click.echo(f"version in the master database: {stored}")
        print_table(
            ("server", "role", "region", "holds", "has heard of", "remembers since", "error"),
            [
                (
                    *(held.server, held.role, held.region),
                    *(version_text(held.cached_version), version_text(held.floor)),
                    _time(held.since_unix_ms) if held.since_unix_ms else None,
                    held.error or None,
                )
                for held in tale.servers
            ],
        )
        click.echo()
        print_table(
            ("time", "server", "what happened", "version", "by"),
            [
                (_time(event.unix_ms), event.server, _words(event), _version(event), event.cause or None)
                for event in tale.events
            ],
        )
        if tale.stale:
            click.echo()
            behind = ", ".join(held.server for held in tale.stale)
            click.echo(f"older than the database: {behind}")
    return int(bool(tale.stale or tale.unreachable))


async def _tell(connect: str | None, token: str, key: int, atype: str | None) -> Tale:
    from tao.cli.reaching import operator_links, schema_of, topology_of
    from tao.cli.storytelling import tell
    from tao.routing.routes import Routes

    routes = Routes(await topology_of(connect))
    number = 0
    if atype is not None:
        number = int(atype) if atype.isdecimal() else (await schema_of(connect)).atype(atype).number
    async with operator_links(token) as links:
        return await tell(routes, links, key, number)


def _words(event: Event) -> str:
    from tao.cli.storytelling import WORDS

    return WORDS.get(event.event, event.event)


def _version(event: Event) -> str:
    """Of a shard its version epoch."""
    from tao.cli.storytelling import version_text

    if event.of_shard:
        return f"epoch {event.version}" if event.version else "-"
    return version_text(event.version)


def _time(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%H:%M:%S.%f")[:-3]
