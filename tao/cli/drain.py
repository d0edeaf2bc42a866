"""`tao drain` and `tao undrain`: take a server out of use before it is stopped, and put it back afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from tao.cli.connection import mastership_login, topology_path
from tao.cli.frame import ask, run
from tao.cli.mastership import shown_promoter
from tao.cli.options import changing_options, combined
from tao.terminal import WaitDisplay, print_json

if TYPE_CHECKING:
    from tao.admin.drain import Drained
    from tao.model.topology import Topology

_NOT_YET_STATUS: Final = 1
_options = combined(
    click.option(
        "--timeout",
        "timeout_seconds",
        type=click.FloatRange(min=0, min_open=True),
        default=60.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait, in seconds.",
    ),
    changing_options,
)


@click.command()
@click.argument("server")
@_options
def drain(server: str, file: Path | None, timeout_seconds: float, yes: bool, as_json: bool) -> int:
    """Take SERVER out of use, and say when it is safe to stop it.

    A follower's callers go to the other tier, a leader's shards to other leaders, a replica's reads to the master
    region. A tailer needs none of it. A master is refused: `tao promote` another server first. Where commits wait for
    this one replica alone, they wait for none until `tao undrain`. Exit status 1: it is marked down, and still in use
    after the timeout.
    """
    from tao.admin.documents import is_database_server, load_topology
    from tao.admin.drain import Drained, drain_cache_server, drain_replica

    topology = load_topology(topology_path(file))
    if _is_tailer(topology, server):
        return _print(Drained(server=server, role="tailer", safe_to_stop=True, marked=False), as_json)
    ask(f"Take {server} out of use?", yes)
    with WaitDisplay() as display:
        if is_database_server(topology, server):
            path, accounts = mastership_login(file)
            return _print(run(drain_replica(path, accounts, server, timeout_seconds, display.show)), as_json)
        return _print(run(drain_cache_server(topology_path(file), server, timeout_seconds, display.show)), as_json)


@click.command()
@click.argument("server")
@_options
def undrain(server: str, file: Path | None, timeout_seconds: float, yes: bool, as_json: bool) -> int:
    """Put SERVER, which runs again, back into use.

    Waits until it is ready before it gets requests: a replica until it has caught up and, where commits wait for it,
    acknowledges again; a leader until it has taken its shards back. Exit status 1: not within the timeout.
    """
    from tao.admin.documents import is_database_server, load_topology
    from tao.admin.drain import Drained, undrain_cache_server, undrain_replica

    topology = load_topology(topology_path(file))
    if _is_tailer(topology, server):
        return _print(Drained(server=server, role="tailer", safe_to_stop=False, marked=False), as_json)
    ask(f"Put {server} back into use?", yes)
    if is_database_server(topology, server):
        path, accounts = mastership_login(file)
        promoter = shown_promoter(path, accounts, as_json, catch_up_seconds=timeout_seconds)
        return _print(run(undrain_replica(path, promoter, server)), as_json)
    with WaitDisplay() as display:
        return _print(run(undrain_cache_server(topology_path(file), server, timeout_seconds, display.show)), as_json)


def _is_tailer(topology: Topology, name: str) -> bool:
    return any(tailer.name == name for region in topology.regions for tailer in region.tailers)


def _print(found: Drained, as_json: bool) -> int:
    import msgspec

    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        click.echo(found.describe())
        for note in found.notes:
            click.echo(note, err=True)
    return _NOT_YET_STATUS if found.waiting_for else 0
