"""`tao drain` and `tao undrain`: take a server out of use before it is stopped, and put it back afterwards."""

from __future__ import annotations

from typing import Final

import click

from tao.admin.documents import is_database_server, load_topology
from tao.admin.drain import Drained, drain_cache_server, drain_replica, undrain_cache_server, undrain_replica
from tao.cli.connection import topology_path
from tao.cli.frame import ask, run, show
from tao.cli.logins import mastership_login
from tao.cli.mastership import shown_promoter
from tao.cli.options import FloatRange, changing_options, combined
from tao.model.topology import Topology
from tao.replication.promotion import PromotionSettings
from tao.terminal import WaitDisplay

_NOT_YET_STATUS: Final = 1
_options = combined(
    click.option(
        "--timeout",
        "timeout_seconds",
        type=FloatRange(min=0, min_open=True),
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
def drain(server: str, timeout_seconds: float) -> int:
    """Take SERVER out of use, and say when it is safe to stop it.

    A follower's callers go to the other tier, a leader's shards to other leaders, a replica's reads to the master
    region. A server that has registered itself leaves the ring, a follower within 40 s, and then the topology; it
    registers again when it starts. A tailer is stopped without a drain. A master is refused: `tao promote` another
    server first. Where commits wait for this one replica alone, they wait for none until `tao undrain`. Exit status 1:
    it is marked down, or leaving, and still in use after the timeout.
    """
    topology = load_topology(topology_path())
    if _is_tailer(topology, server):
        return _print(Drained(server=server, role="tailer", safe_to_stop=True, marked=False))
    ask(f"Take {server} out of use?")
    with WaitDisplay() as display:
        if is_database_server(topology, server):
            path, accounts = mastership_login()
            return _print(run(drain_replica(path, accounts, server, timeout_seconds, display.show)))
        return _print(run(drain_cache_server(topology_path(), server, timeout_seconds, display.show)))


@click.command()
@click.argument("server")
@_options
def undrain(server: str, timeout_seconds: float) -> int:
    """Put SERVER, which runs again, back into use.

    Waits until it is ready before it gets requests: a replica until it has caught up and, where commits wait for it,
    acknowledges again; a leader until it has taken its shards back. Exit status 1: not within the timeout.
    """
    topology = load_topology(topology_path())
    if _is_tailer(topology, server):
        return _print(Drained(server=server, role="tailer", safe_to_stop=False, marked=False))
    ask(f"Put {server} back into use?")
    if is_database_server(topology, server):
        path, accounts = mastership_login()
        promoter = shown_promoter(path, accounts, PromotionSettings(catch_up_seconds=timeout_seconds))
        return _print(run(undrain_replica(path, promoter, server)))
    with WaitDisplay() as display:
        return _print(run(undrain_cache_server(topology_path(), server, timeout_seconds, display.show)))


def _is_tailer(topology: Topology, name: str) -> bool:
    return any(tailer.name == name for region in topology.regions for tailer in region.tailers)


def _print(found: Drained) -> int:
    def text() -> None:
        click.echo(found.describe())
        for note in found.notes:
            click.echo(note, err=True)

    show(found, text)
    return _NOT_YET_STATUS if found.waiting_for else 0
