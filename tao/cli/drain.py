"""`tao drain` and `tao undrain`: a server is taken out of use before it is stopped, and put back afterwards.

Nothing new happens to a server: it is marked by hand, as `tao topology mark-down` does, callers go elsewhere and other
leaders take shards over. What these commands add is the waiting: for everybody to have heard, for shards to have been
handed over, for the last request to have been answered. So a restart costs nobody anything (DESIGN.md §9, §13).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from tao.cli.frame import ask, json_option, run
from tao.cli.output import print_json
from tao.cli.promote import promoter_of, set_place
from tao.cli.topology import document_path
from tao.cli.waiting import WaitDisplay

if TYPE_CHECKING:
    from tao.cli.draining import Drained
    from tao.model.topology import Topology

_NOT_YET_STATUS: Final = 1


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    file = click.option(
        "--topology",
        "file",
        envvar="TAO_TOPOLOGY",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The document.  [default: that of the development cluster in ./.tao-dev]",
    )
    seconds = click.option(
        "--timeout",
        "timeout_seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait.",
    )
    yes = click.option("--yes", is_flag=True, help="Do it without asking.")
    for option in (json_option, yes, seconds, file):
        command = option(command)
    return command


@click.command()
@click.argument("server")
@_options
def drain(server: str, file: Path | None, timeout_seconds: float, yes: bool, as_json: bool) -> int:
    """Take SERVER out of use, and say when it is safe to stop it.

    A follower's callers go to the other tier, a leader's shards to other leaders, a replica's reads to the master
    region. A tailer needs none of it. A master is refused: `tao promote` another one first. Where commits wait for the
    one replica that is drained, they wait for none until `tao undrain`. Exit status 1: it is marked, and still in use
    after that time.
    """
    from tao.cli.draining import Drained, drain_cache_server

    found = _load(file)
    if server in {tailer.name for region in found.regions for tailer in region.tailers}:
        return _say(Drained(server=server, role="tailer", safe_to_stop=True, marked=False), as_json)
    ask(f"Take {server} out of use?", yes)
    with WaitDisplay() as display:
        if _is_database_server(found, server):
            from tao.cli.draining_databases import drain_replica

            path, accounts = set_place(file)
            return _say(run(drain_replica(path, accounts, server, timeout_seconds, display.show)), as_json)
        return _say(run(drain_cache_server(document_path(file), server, timeout_seconds, display.show)), as_json)


@click.command()
@click.argument("server")
@_options
def undrain(server: str, file: Path | None, timeout_seconds: float, yes: bool, as_json: bool) -> int:
    """Put SERVER, which runs again, back into use.

    Waits until it is ready before anybody is sent to it: a replica until it has caught up and, where commits wait for
    it, acknowledges again; a leader until it has taken its shards back. Exit status 1: not within that time.
    """
    from tao.cli.draining import Drained, undrain_cache_server

    found = _load(file)
    if server in {tailer.name for region in found.regions for tailer in region.tailers}:
        return _say(Drained(server=server, role="tailer", safe_to_stop=False, marked=False), as_json)
    ask(f"Put {server} back into use?", yes)
    if _is_database_server(found, server):
        from tao.cli.draining_databases import undrain_replica

        path, accounts = set_place(file)
        promoter = promoter_of(path, accounts, as_json, catch_up_seconds=timeout_seconds)
        return _say(run(undrain_replica(path, promoter, server)), as_json)
    with WaitDisplay() as display:
        return _say(run(undrain_cache_server(document_path(file), server, timeout_seconds, display.show)), as_json)


def _load(file: Path | None) -> Topology:
    from tao.cli.connecting import load_topology

    return load_topology(document_path(file))


def _is_database_server(found: Topology, name: str) -> bool:
    return any(name == server.name for database in found.databases for server in database.servers.values())


def _say(found: Drained, as_json: bool) -> int:
    import msgspec

    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        click.echo(found.describe())
        for note in found.notes:
            click.echo(note, err=True)
    return _NOT_YET_STATUS if found.waiting_for else 0
