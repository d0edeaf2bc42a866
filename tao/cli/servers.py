"""`tao follower`, `leader`, `tailer`, `watcher`, `worker`: run one in the foreground; `tao ready`: ask if it is up."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from tao.cli.frame import fail, run
from tao.cli.options import AdminAddress
from tao.model.errors import Unavailable

NOT_READY_STATUS = 1
_settings_option = click.option(
    "--settings",
    "settings_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The server's settings file (YAML). It names the topology file, which has the server's addresses.",
)


@click.command()
@_settings_option
def follower(settings_file: Path) -> int:
    """Run a follower: the cache server that clients talk to."""
    from tao.follower.server import FollowerServer
    from tao.follower.settings import FollowerSettings
    from tao.runtime.settings import load_settings

    return FollowerServer.run(load_settings(settings_file, FollowerSettings))


@click.command()
@_settings_option
def leader(settings_file: Path) -> int:
    """Run a leader: the cache server that talks to the databases and orders the writes."""
    from tao.leader.server import LeaderServer
    from tao.leader.settings import LeaderSettings
    from tao.runtime.settings import load_settings

    return LeaderServer.run(load_settings(settings_file, LeaderSettings))


@click.command()
@_settings_option
def tailer(settings_file: Path) -> int:
    """Run a tailer: it reads a database's binlog and reports changes to the leaders."""
    from tao.runtime.settings import load_settings
    from tao.tailer.server import run_tailer
    from tao.tailer.settings import TailerSettings

    return run_tailer(load_settings(settings_file, TailerSettings))


@click.command()
@_settings_option
def watcher(settings_file: Path) -> int:
    """Run a watcher: it marks lost servers down, renews the masters' leases, and replaces a lost master."""
    from tao.runtime.settings import load_settings
    from tao.watcher.server import run_watcher
    from tao.watcher.settings import WatcherSettings

    return run_watcher(load_settings(settings_file, WatcherSettings))


@click.command()
@_settings_option
def worker(settings_file: Path) -> int:
    """Run a worker: it does background jobs, which leaders hand out."""
    from tao.runtime.settings import load_settings
    from tao.worker.server import run_worker
    from tao.worker.settings import WorkerSettings

    return run_worker(load_settings(settings_file, WorkerSettings))


def import_roles() -> None:
    """Import the servers of all roles, as their commands do."""
    for role in ("follower", "leader", "tailer", "watcher", "worker"):
        import_module(f"tao.{role}.server")


@click.command()
@click.option(
    "--admin",
    envvar="TAO_ADMIN",
    show_envvar=True,
    required=True,
    type=AdminAddress(),
    metavar="HOST:PORT",
    help="The server's admin address, as in the topology.",
)
def ready(admin: str) -> int:
    """Ask a server whether it is ready for traffic. Exit status 1 when it is not, or does not answer."""
    from tao.runtime.admin_client import admin_get

    try:
        status, body = run(admin_get(admin, "/ready"))
    except Unavailable as error:
        fail(f"{error.reason}: {error.message}", NOT_READY_STATUS)
    click.echo(body.decode(errors="replace").strip())
    return 0 if status == 200 else NOT_READY_STATUS
