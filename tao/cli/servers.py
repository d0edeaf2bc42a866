"""`tao follower`, `leader`, `tailer` and `watcher`: run one server in the foreground, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path

import click

_settings_option = click.option(
    "--settings",
    "settings_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The server's settings, in YAML. Its addresses are in the topology file that they name.",
)


@click.command()
@_settings_option
def follower(settings_file: Path) -> int:
    """Run a follower: the cache server that clients talk to."""
    from tao.follower.server import run_follower
    from tao.follower.settings import FollowerSettings
    from tao.runtime.settings import load_settings

    return run_follower(load_settings(settings_file, FollowerSettings))


@click.command()
@_settings_option
def leader(settings_file: Path) -> int:
    """Run a leader: the cache server that talks to the databases and orders the writes."""
    from tao.leader.server import run_leader
    from tao.leader.settings import LeaderSettings
    from tao.runtime.settings import load_settings

    return run_leader(load_settings(settings_file, LeaderSettings))


@click.command()
@_settings_option
def tailer(settings_file: Path) -> int:
    """Run a tailer: it reads a database's binlog and tells the leaders what has changed."""
    from tao.runtime.settings import load_settings
    from tao.tailer.server import run_tailer
    from tao.tailer.settings import TailerSettings

    return run_tailer(load_settings(settings_file, TailerSettings))


@click.command()
@_settings_option
def watcher(settings_file: Path) -> int:
    """Run a watcher: it marks servers that are gone, renews the masters' leases, and replaces a lost master."""
    from tao.runtime.settings import load_settings
    from tao.watcher.server import run_watcher
    from tao.watcher.settings import WatcherSettings

    return run_watcher(load_settings(settings_file, WatcherSettings))
