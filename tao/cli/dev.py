"""`tao dev`: run a whole cluster on this machine, for development.

In the foreground it ends with Ctrl-C, and every process that it started ends with it, even when it is killed. With
--detach the processes go on running, recorded in the state folder, and `tao dev down` stops them. `partition`, `heal`
and `rtt` change the delay line between the regions of a running cluster; the next start begins with open lines again.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tao.cli.frame import INTERRUPTED_STATUS, CommandGroup, ask, interrupt_quietly, run, show
from tao.cli.options import FloatRange, IntRange, combined, json_option, state_dir_option, yes_option
from tao.terminal import WaitDisplay, print_json, print_table

if TYPE_CHECKING:
    from tao.devcluster.cluster import DevCluster
    from tao.devcluster.inspection import ClusterStatus
    from tao.devcluster.layout import ClusterSettings, Shape, StartOptions
    from tao.devcluster.line_control import Command, LineStatus


_FOLLOW_PAUSE_SECONDS = 0.2
_WATCH_PAUSE_SECONDS = 0.5
_LOG_LINES_SHOWN = 20
_LEAVE_SECONDS = 120.0
_LOG_READ_BYTES = 64 * 1024


@click.group(cls=CommandGroup)
def dev() -> None:
    """Run a development cluster on this machine."""


_up_options = combined(
    click.option("--regions", type=int, help="The number of regions; fixed once there are data.  [default: 1]"),
    click.option(
        "--rtt-ms",
        type=FloatRange(0, 10_000),
        help="The round trip between regions, in milliseconds.  [default: 58.1]",
    ),
    click.option("--mixed-mastership", is_flag=True, help="Spread the masters of the databases over the regions."),
    click.option("--followers", type=int, help="The number of followers in each tier.  [default: 2]"),
    click.option("--tiers", type=int, help="The number of follower tiers in each region.  [default: 2]"),
    click.option("--leaders", type=int, help="The number of leaders in each region.  [default: 2]"),
    click.option(
        "--etcd",
        is_flag=True,
        default=None,
        help="Start an etcd, and keep the topology, the schema, the access document and the locks there; fixed once "
        "there are data.",
    ),
    click.option("--databases", type=int, help="The number of databases; fixed once there are data.  [default: 1]"),
    click.option(
        "--standby",
        is_flag=True,
        default=None,
        help="Give each database a second server in its master's region, which a watcher promotes first; fixed once "
        "there are data.",
    ),
    click.option("--shards", type=int, help="The number of shards; fixed once there are data.  [default: 16]"),
    click.option(
        "--buffer-pool-mb",
        type=IntRange(8),
        help="The buffer pool of each database server, in MiB.  [default: as at the last start; 64 at the first one]",
    ),
    click.option(
        "--cache-mb",
        type=IntRange(8),
        help="The cache of each follower and leader, in MiB.  [default: as at the last start; 256 at the first one]",
    ),
    click.option(
        "--durability",
        type=click.Choice(["full", "relaxed", "semi_sync"]),
        help="full: commits are synced to disk. semi_sync: they also wait for a replica. relaxed: a crash of the "
        "machine may lose the last second.  [default: as at the last start; at the first one full, and semi_sync with "
        "--standby]",
    ),
    click.option(
        "--watcher/--no-watcher",
        "watcher",
        default=None,
        help="Run a watcher in each region, which marks lost servers down, so that other leaders, or the next follower "
        "tier, take their work, and replaces a lost master.  [default: watcher]",
    ),
    click.option(
        "--worker/--no-worker",
        "worker",
        default=None,
        help="Run a worker in each region, which does background jobs.  [default: worker]",
    ),
    click.option(
        "--schema",
        "schema_file",
        type=click.Path(path_type=Path),
        help="The schema file, which is copied to the state folder.",
    ),
    click.option("--client-port", type=IntRange(1, 65535), help="The gRPC port of the first follower."),
    click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="The log level of the servers.  [default: as at the last start; info at the first one]",
    ),
    click.option(
        "--tls/--no-tls",
        "tls",
        default=None,
        help="Make certificates for every server, an operator and an application, and take only peers that have one.  "
        "[default: as at the last start; no-tls at the first one]",
    ),
    click.option("--detach", is_flag=True, help="Return when the cluster is ready, and leave it running."),
    state_dir_option,
)


@dev.command()
@_up_options
def up(  # Any: the other options, which are named like the fields of `Shape` and `ClusterSettings`
    mixed_mastership: bool,
    buffer_pool_mb: int | None,
    cache_mb: int | None,
    durability: str | None,
    log_level: str | None,
    watcher: bool | None,
    worker: bool | None,
    tls: bool | None,
    client_port: int | None,
    detach: bool,
    state_dir: Path,
    **others: Any,
) -> int:
    """Start the cluster, or start it again with the data that it has.

    It runs in the foreground until Ctrl-C, unless --detach is given. A cluster that was stopped keeps its options, but
    for those that are given anew. Of a cluster that runs already it starts the processes that do not run, if any, with
    the options of its start, and returns; other options are refused.
    """
    import msgspec

    from tao.devcluster.layout import ClusterSettings, Shape

    numbers = {name: others.pop(name) for name in Shape.__struct_fields__ if name in others}
    shape = _shape(state_dir, numbers, mixed_mastership, {"watchers": watcher, "workers": worker})
    given = {"buffer_pool_mb": buffer_pool_mb, "cache_mb": cache_mb, "log_level": log_level, "tls": tls}
    settings = ClusterSettings(
        state_dir=state_dir,
        shape=shape,
        client_port=client_port or 0,
        detached=detach,
        **msgspec.structs.asdict(_start_options(state_dir, shape, given, durability)),
        **others,
    )
    context = click.get_current_context()
    given_options = {
        name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    if _runs_already(settings):
        return run(_start_stopped(settings, given_options))
    _print_kept(settings, given_options)
    return run(_up(settings))


def _runs_already(settings: ClusterSettings) -> bool:
    """True when a cluster runs in the folder, whole or in part."""
    from tao.devcluster.state_folder import StateFolder

    folder = StateFolder(settings.state_dir)
    record = folder.read()
    if record is None or not record.ready or folder.is_orphaned:
        return False
    return bool(folder.running(record))


async def _start_stopped(settings: ClusterSettings, given_options: Collection[str]) -> int:
    from tao.devcluster.layout import dev_command
    from tao.devcluster.running_options import refused_options
    from tao.model.errors import OperatorError

    with WaitDisplay() as display, _attached(settings.state_dir, display.show) as cluster:
        refused = refused_options(settings, given_options, cluster.record, cluster.schema_path)
        if refused:
            raise OperatorError(
                f"a cluster with other options runs in {settings.state_dir}: {', '.join(refused)}; leave these out "
                f"to start what does not run, or {dev_command('down', settings.state_dir)} first"
            )
        started = await cluster.start_stopped()
        found = await cluster.status()
    _print_status(found)
    ran = f"started {', '.join(started)}; the others ran already" if started else "all processes run already"
    click.echo(f"{ran}; {dev_command('down', settings.state_dir)} stops them")
    return 0


def _shape(
    state_dir: Path, numbers: dict[str, int | None], mixed_mastership: bool, of_each_region: dict[str, bool | None]
) -> Shape:
    """Return the shape of the options; for options that are not given that of the folder, or the defaults.

    ``of_each_region``: the roles of which each region has one process, or none."""
    import msgspec

    from tao.devcluster.layout import Shape
    from tao.devcluster.state_folder import StateFolder

    record = StateFolder(state_dir).read()
    wanted = {name: number for name, number in numbers.items() if number is not None}
    for name, given_one in of_each_region.items():
        if given_one is not None or record is None:
            wanted[name] = 0 if given_one is False else 1
    if mixed_mastership:
        wanted["mixed_mastership"] = True
        if record is None and "regions" in wanted:
            wanted.setdefault("databases", wanted["regions"])  # one for each region
    return msgspec.structs.replace(record.shape if record else Shape(), **wanted)


def _start_options(
    state_dir: Path, shape: Shape, given: dict[str, int | str | bool | None], durability: str | None
) -> StartOptions:
    """Return the options of the start; for options that are not given those of the last start, or the defaults."""
    import msgspec

    from tao.devcluster.database_program import Durability
    from tao.devcluster.layout import StartOptions
    from tao.devcluster.state_folder import StateFolder

    record = StateFolder(state_dir).read()
    wanted: dict[str, object] = {name: value for name, value in given.items() if value is not None}
    if durability is None and record is None and shape.standby:
        durability = "semi_sync"
    if durability is not None:
        wanted["semi_sync"] = durability == "semi_sync"
        wanted["durability"] = Durability.FULL if durability == "semi_sync" else Durability(durability)
    return msgspec.structs.replace(record.options if record else StartOptions(), **wanted)


def _print_kept(settings: ClusterSettings, given_options: Collection[str]) -> None:
    """Print the options that a cluster which was stopped keeps."""
    from tao.devcluster.running_options import kept_options
    from tao.devcluster.state_folder import StateFolder

    record = StateFolder(settings.state_dir).read()
    if record is not None and (kept := kept_options(record, given_options)):
        click.echo(f"as at the last start: {', '.join(kept)}")


def at_first_signal(stop: Callable[[], object]) -> None:
    """Call ``stop`` on Ctrl-C or SIGTERM. A second signal ends the program at once, and the kernel its processes."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        interrupt_quietly(signal.default_int_handler)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


async def _up(settings: ClusterSettings) -> int:
    from tao.devcluster.cluster import DevCluster
    from tao.devcluster.layout import dev_command

    began = time.monotonic()
    task = asyncio.current_task()
    assert task is not None
    at_first_signal(task.cancel)
    display = WaitDisplay()
    cluster = DevCluster(settings, display.show)
    with display:
        try:
            await cluster.start()
        except asyncio.CancelledError:
            click.echo("tao: interrupted; nothing is left running", err=True)
            return INTERRUPTED_STATUS
    try:
        _print_status(await cluster.status())
        end = dev_command("down", settings.state_dir) if settings.detached else "Ctrl-C"
        click.echo(f"ready in {time.monotonic() - began:.1f} s; {end} stops it")
        if settings.detached:
            cluster.release()
            return 0
        sys.stdout.flush()
        await _watch(cluster, settings.state_dir)
    except asyncio.CancelledError:
        pass
    finally:
        with display:
            killed = await cluster.stop()
    _print_stopped(killed, err=True)
    return 0


async def _watch(cluster: DevCluster, state_dir: Path) -> None:
    """Report processes that end, until cancelled: developers kill one to see what the others do."""
    from tao.devcluster.layout import dev_command

    running = set(cluster.running)
    while True:
        await asyncio.sleep(_WATCH_PAUSE_SECONDS)
        now = set(cluster.running)
        for name in sorted(running - now):
            click.echo(
                f"tao: {name} has ended; {dev_command(f'logs {name}', state_dir)} may say why, "
                f"{dev_command(f'restart {name}', state_dir)} starts it",
                err=True,
            )
        for name in sorted(now - running):
            click.echo(f"tao: {name} runs again", err=True)
        running = now


def _print_stopped(killed: list[str], *, err: bool = False) -> None:
    click.echo("stopped" + (f"; had to kill {', '.join(killed)}" if killed else ""), err=err)


@dev.command()
@state_dir_option
@json_option
def status(state_dir: Path, as_json: bool) -> int:
    """Show every process with its role, ports and pid. Exit status 1 when none runs."""
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
    if found.certificates:
        click.echo(f"TLS       {found.certificates}: ca.pem, app.pem, app.key for applications")


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
    """Stop the cluster and keep its data."""
    from tao.devcluster.inspection import stop_cluster

    with WaitDisplay() as display:
        killed = run(stop_cluster(state_dir, display.show))
    _print_stopped(killed)


@contextmanager
def _attached(state_dir: Path, on_progress: Callable[[str], None]) -> Iterator[DevCluster]:
    """Give the cluster that runs in a folder; its processes go on running at the end."""
    from tao.devcluster.cluster import DevCluster

    cluster = DevCluster.attached(state_dir, on_progress)
    try:
        yield cluster
    finally:
        cluster.release()


@dev.command()
@click.argument("name")
@state_dir_option
def restart(name: str, state_dir: Path) -> None:
    """Stop process NAME of the running cluster, start it on the same ports, and return when it is ready.

    A process that does not run is started.
    """

    async def work() -> None:
        with WaitDisplay() as display, _attached(state_dir, display.show) as cluster:
            display.show(f"restarting {name}")
            await cluster.restart(name)

    run(work())
    click.echo(f"{name} is ready")


@dev.command()
@click.argument("name")
@state_dir_option
def kill(name: str, state_dir: Path) -> int:
    """Kill process NAME of the running cluster with SIGKILL, as a crash would. Exit status 1 when it does not run.

    `tao dev restart NAME` starts it again, and `tao dev up` everything that does not run.
    """

    async def work() -> bool:
        with _attached(state_dir, lambda _: None) as cluster:
            return await cluster.kill(name)

    ran = run(work())
    click.echo(f"killed {name}" if ran else f"{name} does not run")
    return 0 if ran else 1


@dev.command("add-follower")
@state_dir_option
def add_follower(state_dir: Path) -> None:
    """Start one more follower in the first tier of the running cluster, and return when it is ready.

    It registers itself and takes its part of the ring within 40 s; `tao status` shows how far it has come.
    """

    async def work() -> str:
        with WaitDisplay() as display, _attached(state_dir, display.show) as cluster:
            return await cluster.add_follower()

    name = run(work())
    click.echo(f"{name} is ready, and takes its part of the ring in steps; `tao dev remove-follower` removes it")


@dev.command("remove-follower")
@state_dir_option
def remove_follower(state_dir: Path) -> None:
    """Drain and stop the follower that `tao dev add-follower` has added last; that takes some 45 s."""

    async def work() -> str:
        with WaitDisplay() as display, _attached(state_dir, display.show) as cluster:
            return await cluster.remove_follower(_LEAVE_SECONDS)

    click.echo(f"removed {run(work())}")


@dev.command()
@yes_option
@state_dir_option
@json_option
def reset(state_dir: Path) -> None:
    """Remove all data of the cluster and start it again without them, where it runs.

    Its shape, ports, passwords and schema stay. Ids, cursors and write tokens of the removed data mean nothing
    afterwards.
    """
    from tao.devcluster.state_folder import StateFolder

    folder = StateFolder(state_dir)
    record = folder.require()
    ask(f"Remove all data in {folder.path}?")
    runs = bool(folder.running(record))
    if runs:
        run(_reset(state_dir))
    else:
        folder.lock()
        folder.remove_data(record)
    state = "the cluster runs without any" if runs else f"{folder.command('up')} starts the cluster without any"
    show({"state_dir": str(folder.path), "running": runs}, lambda: click.echo(f"removed the data; {state}"))


async def _reset(state_dir: Path) -> None:
    with WaitDisplay() as display, _attached(state_dir, display.show) as cluster:
        await cluster.reset()


@dev.command()
@click.argument("name", required=False)
@click.option("--follow", "-f", is_flag=True, help="Show new lines as they are written, until Ctrl-C.")
@state_dir_option
def logs(name: str | None, follow: bool, state_dir: Path) -> None:
    """Show the last lines of the log of process NAME, or of all logs."""
    from tao.devcluster.state_folder import StateFolder
    from tao.model.errors import OperatorError

    folder = StateFolder(state_dir)
    roles = folder.require().shape.server_names
    if name is not None and name not in roles:
        raise OperatorError(f"there is no {name} here: the processes are {', '.join(roles)}")
    paths = {each: folder.log(each, role) for each, role in roles.items() if name in (None, each)}
    ends = {}
    for each, path in paths.items():
        begin = max(0, (path.stat().st_size if path.exists() else 0) - _LOG_READ_BYTES)
        lines, ends[each] = _log_lines(path, begin)
        _print_log(each, lines[-_LOG_LINES_SHOWN:], prefixed=name is None)
    while follow:
        sys.stdout.flush()
        time.sleep(_FOLLOW_PAUSE_SECONDS)
        for each, path in paths.items():
            lines, ends[each] = _log_lines(path, ends[each])
            _print_log(each, lines, prefixed=name is None)


def _log_lines(path: Path, begin: int) -> tuple[list[str], int]:
    """Return the whole lines of a log from an offset, and where they end. A log that has become shorter is a new one.

    At most `_LOG_READ_BYTES` are read."""
    try:
        with path.open("rb") as log:
            log.seek(begin if begin <= path.stat().st_size else 0)
            block = log.read(_LOG_READ_BYTES)
            whole = block[: block.rfind(b"\n") + 1]
            return whole.decode(errors="replace").splitlines(), log.tell() - len(block) + len(whole)
    except FileNotFoundError:
        return [], 0


def _print_log(name: str, lines: list[str], *, prefixed: bool) -> None:
    for line in lines:
        click.echo(f"{name} | {line}" if prefixed else line)


@dev.command()
@click.argument("one", metavar="REGION")
@click.argument("other", metavar="REGION")
@click.option("--silent", is_flag=True, help="Drop every packet, instead of resetting and refusing connections.")
@state_dir_option
@json_option
def partition(one: str, other: str, silent: bool, state_dir: Path, as_json: bool) -> None:
    """Cut the line between two regions: gRPC, frames and replication."""
    from tao.devcluster.line_control import Cut

    _send(state_dir, Cut((one, other), silent), as_json)


@dev.command()
@click.argument("regions", metavar="[REGION REGION]", nargs=-1)
@state_dir_option
@json_option
def heal(regions: tuple[str, ...], state_dir: Path, as_json: bool) -> None:
    """Heal the line between two regions, or all lines."""
    from tao.devcluster.line_control import Heal

    match regions:
        case ():
            _send(state_dir, Heal(), as_json)
        case (one, other):
            _send(state_dir, Heal((one, other)), as_json)
        case _:
            raise click.UsageError("name two regions, or none to heal all lines")


@dev.command()
@click.argument("milliseconds", type=float)
@state_dir_option
@json_option
def rtt(milliseconds: float, state_dir: Path, as_json: bool) -> None:
    """Set the round trip between regions, in milliseconds, for bytes that are sent from now on."""
    from tao.devcluster.line_control import SetRoundTrip

    _send(state_dir, SetRoundTrip(milliseconds), as_json)


def _send(state_dir: Path, command: Command, as_json: bool) -> None:
    import msgspec

    from tao.devcluster.layout import LINE
    from tao.devcluster.line_control import ask_line
    from tao.devcluster.state_folder import StateFolder
    from tao.model.errors import OperatorError

    folder = StateFolder(state_dir)
    record = folder.require()
    if not record.shape.is_distributed:
        raise OperatorError(f"the cluster in {state_dir} has one region: start another one with --regions 2")
    if LINE not in folder.running(record):
        raise OperatorError(f"no cluster runs in {state_dir}: start it with {folder.command('up')}")
    status = run(ask_line(folder.line_control, command))
    if as_json:
        print_json(msgspec.to_builtins(status))
    else:
        print_line(status)


def print_line(status: LineStatus) -> None:
    """Print the state of the line between each two regions."""
    rows = [
        (" and ".join(pair.regions), pair.state, status.rtt_ms, pair.connections, pair.carried_bytes / 1e6)
        for pair in status.pairs
    ]
    numbers = ("round trip ms", "connections", "carried MB")
    print_table(("between", "line", *numbers), rows, right=numbers)
