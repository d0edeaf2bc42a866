"""`tao dev`: a whole cluster on this machine, for development.

In the foreground it ends with Ctrl-C and everything it started ends with it, even when it is killed. With --detach the
processes stay, recorded in the state folder; `tao dev down` ends them.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tao.cli.connecting import state_dir_option
from tao.cli.frame import INTERRUPTED_STATUS, json_option, run
from tao.cli.output import print_json, print_table
from tao.cli.regions import heal, partition, print_line, rtt
from tao.cli.waiting import WaitDisplay

if TYPE_CHECKING:
    from tao.devcluster.cluster import DevCluster
    from tao.devcluster.inspection import ClusterStatus
    from tao.devcluster.layout import ClusterSettings

_FOLLOW_PAUSE_SECONDS = 0.2
_WATCH_PAUSE_SECONDS = 0.5
_LOG_LINES_SHOWN = 20
_LOG_READ_BYTES = 64 * 1024


@click.group()
def dev() -> None:
    """A development cluster on this machine."""


for _command in (partition, heal, rtt):
    dev.add_command(_command)


@dev.command()
@click.option("--regions", type=int, help="Regions; fixed once there are data.  [default: 1]")
@click.option("--rtt-ms", type=click.FloatRange(0, 10_000), help="Round trip between regions.  [default: 58.1]")
@click.option("--mixed-mastership", is_flag=True, help="Each region is master of one of the databases.")
@click.option("--followers", type=int, help="Followers in each tier.  [default: 2]")
@click.option("--tiers", type=int, help="Follower tiers in each region.  [default: 2]")
@click.option("--leaders", type=int, help="Leaders in each region.  [default: 2]")
@click.option("--databases", type=int, help="Databases; fixed once there are data.  [default: 1]")
@click.option("--shards", type=int, help="Logical shards; fixed once there are data.  [default: 16]")
@click.option(
    "--buffer-pool-mb", type=click.IntRange(8), default=64, show_default=True, help="Of each database server."
)
@click.option("--cache-mb", type=click.IntRange(8), default=256, show_default=True, help="Of each follower and leader.")
@click.option(
    "--durability",
    type=click.Choice(["full", "relaxed", "semi_sync"]),
    default="full",
    show_default=True,
    help="semi_sync: commits wait for another region's replica, too. relaxed: a crash of the machine may lose the last "
    "second.",
)
@click.option(
    "--watcher/--no-watcher",
    default=None,
    help="A watcher in each region: marks servers, replaces a lost master.  [default: with several regions]",
)
@click.option("--schema", "schema_file", type=click.Path(path_type=Path), help="Schema file; it is copied.")
@click.option("--client-port", type=click.IntRange(1, 65535), help="gRPC port of the first follower.")
@click.option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", show_default=True
)
@click.option("--detach", is_flag=True, help="Return when the cluster is ready, and leave it running.")
@state_dir_option
def up(
    regions: int | None,
    rtt_ms: float | None,
    mixed_mastership: bool,
    followers: int | None,
    tiers: int | None,
    leaders: int | None,
    databases: int | None,
    shards: int | None,
    buffer_pool_mb: int,
    cache_mb: int,
    durability: str,
    watcher: bool | None,
    schema_file: Path | None,
    client_port: int | None,
    log_level: str,
    detach: bool,
    state_dir: Path,
) -> int:
    """Start the cluster (or start it again: its data are kept)."""
    import msgspec

    from tao.devcluster.layout import ClusterSettings, Shape
    from tao.devcluster.server_options import Durability
    from tao.devcluster.state_folder import StateFolder

    record = StateFolder(state_dir).read()
    asked: dict[str, int | None] = {
        "regions": regions,
        "followers": followers,
        "tiers": tiers,
        "leaders": leaders,
        "databases": databases,
        "shards": shards,
    }
    if watcher is not None or (record is None and (regions or 1) > 1):
        asked["watchers"] = 0 if watcher is False else 1
    if mixed_mastership:
        asked["mixed_mastership"] = True
        if record is None and databases is None:
            asked["databases"] = regions  # a database each
    shape = record.shape if record else Shape()
    settings = ClusterSettings(
        state_dir=state_dir,
        shape=msgspec.structs.replace(shape, **{name: value for name, value in asked.items() if value is not None}),
        rtt_ms=rtt_ms,
        schema_file=schema_file,
        buffer_pool_mb=buffer_pool_mb,
        durability=Durability.FULL if durability == "semi_sync" else Durability(durability),
        semi_sync=durability == "semi_sync",
        cache_mb=cache_mb,
        client_port=client_port or 0,
        log_level=log_level,
        detached=detach,
    )
    return run(_up(settings))


async def _up(settings: ClusterSettings) -> int:
    from tao.devcluster.cluster import DevCluster

    began = time.monotonic()
    asked_to_stop = asyncio.Event()
    starting = asyncio.current_task()
    assert starting is not None
    loop = asyncio.get_running_loop()
    ready = False

    def on_signal() -> None:
        # The next one ends the program at once; the kernel then ends what it started.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        asked_to_stop.set()
        if not ready:
            starting.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    display = WaitDisplay()
    cluster = DevCluster(settings, display.show)
    with display:
        try:
            await cluster.start()
        except asyncio.CancelledError:
            click.echo("tao: interrupted; nothing is left running", err=True)
            return INTERRUPTED_STATUS
        ready = True
    if settings.detached:
        status = await cluster.status()
        cluster.release()
        _print_status(status)
        click.echo(f"ready in {time.monotonic() - began:.1f} s; `tao dev down` stops it")
        return 0
    try:
        _print_status(await cluster.status())
        click.echo(f"ready in {time.monotonic() - began:.1f} s; Ctrl-C stops it")
        sys.stdout.flush()
        await _watch(cluster, asked_to_stop)
    finally:
        with display:
            killed = await cluster.stop()
    click.echo("stopped" + (f"; had to kill {', '.join(killed)}" if killed else ""), err=True)
    return 0


async def _watch(cluster: DevCluster, asked_to_stop: asyncio.Event) -> None:
    """Tell when a process ends: killing one to see what the others do is what such a cluster is for."""
    running = set(cluster.running)
    while not asked_to_stop.is_set():
        try:
            await asyncio.wait_for(asked_to_stop.wait(), _WATCH_PAUSE_SECONDS)
        except TimeoutError:
            now = set(cluster.running)
            for name in sorted(running - now):
                click.echo(f"tao: {name} has ended; `tao dev logs {name}` may say why", err=True)
            running = now


@dev.command()
@state_dir_option
@json_option
def status(state_dir: Path, as_json: bool) -> int:
    """Show every process with role, ports and pid. Exit status 1 when none runs."""
    import msgspec

    from tao.devcluster.inspection import cluster_status

    found = run(cluster_status(state_dir))
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _print_status(found)
    return 0 if found.running else 1


def _print_status(found: ClusterStatus) -> None:
    distributed = len(found.clients) > 1
    rows = [
        (*((process.region or None,) if distributed else ()), process.name, process.role, process.state,
         process.pid or None, " ".join(f"{kind}:{port}" for kind, port in process.ports.items()))
        for process in found.processes
    ]  # fmt: skip
    columns = ("process", "role", "state", "pid", "ports on 127.0.0.1")
    print_table(("region", *columns) if distributed else columns, rows, right=("pid",))
    if distributed:
        _print_replication(found)
    clients = "\n".join(f"client    {address}  ({region})" for region, address in found.clients.items())
    click.echo(f"\n{clients if distributed else f'client    {found.client}'}")
    click.echo(f"topology  {found.topology}\nschema    {found.schema}")


def _print_replication(found: ClusterStatus) -> None:
    states = [(process.name, process.replication) for process in found.processes if process.replication is not None]
    rows = [
        (name, state.part, "yes" if state.receiving else "no", "yes" if state.applying else "no",
         state.lag_seconds, state.position, state.error or None)
        if state.part == "replica" else (name, state.part, None, None, None, state.position, state.error or None)
        for name, state in states
    ]  # fmt: skip
    click.echo()
    columns = ("database", "part", "receives", "applies", "lag s", "position", "error")
    print_table(columns, rows, right=("lag s",))
    if found.line is not None:
        click.echo()
        print_line(found.line)


@dev.command()
@state_dir_option
def down(state_dir: Path) -> None:
    """Stop the cluster; its data are kept."""
    from tao.devcluster.inspection import stop_cluster

    with WaitDisplay() as display:
        killed = run(stop_cluster(state_dir, display.show))
    click.echo("stopped" + (f"; had to kill {', '.join(killed)}" if killed else ""))


@dev.command()
@click.argument("name", required=False)
@click.option("--follow", "-f", is_flag=True, help="Go on showing what is added, until Ctrl-C.")
@state_dir_option
def logs(name: str | None, follow: bool, state_dir: Path) -> None:
    """Show the last lines of the log of NAME, or of all."""
    from tao.devcluster.state_folder import StateFolder
    from tao.model.errors import OperatorError

    folder = StateFolder(state_dir)
    roles = folder.require().shape.server_names
    if name is not None and name not in roles:
        raise OperatorError(f"there is no {name} here: the processes are {', '.join(roles)}")
    chosen = {name: roles[name]} if name else roles
    tails = [_LogTail(each, folder.log(each, role), len(chosen) > 1) for each, role in chosen.items()]
    for tail in tails:
        tail.print_last(_LOG_LINES_SHOWN)
    while follow:
        sys.stdout.flush()
        time.sleep(_FOLLOW_PAUSE_SECONDS)
        for tail in tails:
            tail.print_new()


class _LogTail:
    """Reads one log where it left off."""

    def __init__(self, name: str, path: Path, prefixed: bool) -> None:
        self._path = path
        self._prefix = f"{name} | " if prefixed else ""
        self._offset = 0

    def print_last(self, lines: int) -> None:
        """The last lines of what is there."""
        try:
            self._offset = max(0, self._path.stat().st_size - _LOG_READ_BYTES)
        except FileNotFoundError:
            return
        self._print(self._read()[-lines:])

    def print_new(self) -> None:
        """What was added since. A log that shrank was put aside for a new one."""
        if self._path.exists() and self._path.stat().st_size < self._offset:
            self._offset = 0
        self._print(self._read())

    def _read(self) -> list[str]:
        try:
            with self._path.open("rb") as log:
                log.seek(self._offset)
                block = log.read(_LOG_READ_BYTES)
        except FileNotFoundError:
            return []
        whole = block[: block.rfind(b"\n") + 1]
        self._offset += len(whole)
        return whole.decode(errors="replace").splitlines()

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            click.echo(self._prefix + line)
