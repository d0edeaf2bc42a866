"""`python -m loadtest bench` runs scenarios and prints a table; `python -m loadtest list` says which there are.

`geo`, `converge`, `whale`, `run` and `peers` run one scenario with options of its own."""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from loadtest import converge, geo, whale
from loadtest.catalogue import all_scenarios
from loadtest.collector import settle_collector
from loadtest.commands_capacity import capacity_commands, plain_topology_option, plot_option, topology_option
from loadtest.commands_failures import failure_commands
from loadtest.converge import DEFAULT_WRITES, ConvergeSettings
from loadtest.geo import DEFAULT_PHASE_SECONDS, GeoSettings
from loadtest.interruption import Interruption, interruptible
from loadtest.peers import scenario as peers
from loadtest.peers.names import CONTESTANTS, SHAPES
from loadtest.peers.scenario import PeersSettings
from loadtest.plotted import plotted
from loadtest.published.run import SUMMARY, RunSettings
from loadtest.published.run import run as run_published
from loadtest.published.workload import workload_names
from loadtest.results import Report, ScenarioResult, this_machine
from loadtest.scenario import BenchSettings, Registry, Scenario
from loadtest.table import print_report
from loadtest.whale import DEFAULT_EDGES, WhaleSettings
from tao.devcluster.layout import DEFAULT_RTT_MS
from tao.model.errors import OperatorError, TaoError

_TOY_SECONDS: Final = 0.1
DEFAULT_RUN: Final = RunSettings()
DEFAULT_PEERS: Final = PeersSettings()
_TOY_ROUNDS: Final = 3
_WIDTH_WITHOUT_TERMINAL: Final = 200
_INTERRUPTED_STATUS: Final = 130


class Bar:
    """Progress on standard error, so that standard output holds the result alone."""

    def __init__(self, scenarios: Sequence[Scenario]) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.fields[scenario]}"),
            BarColumn(bar_width=30),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._count = max(1, len(scenarios))
        self._finished = 0
        self._task: TaskID = self._progress.add_task("", total=1.0, scenario="")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, scenario: str) -> None:
        """The next scenario."""
        self._progress.update(self._task, scenario=scenario, completed=self._finished / self._count)

    def end(self) -> None:
        """The scenario is over."""
        self._finished += 1

    def step(self, text: str, done: float = 0.0) -> None:
        """See `loadtest.scenario.Progress`."""
        self._progress.update(self._task, description=text, completed=(self._finished + done) / self._count)


@click.group()
def main() -> None:
    """Benchmarks of tao: registered scenarios, measured beside a yardstick in the same run."""


@main.command(name="list")
def list_scenarios() -> None:
    """Say which scenarios there are."""
    for scenario in all_scenarios().values():
        print(f"{scenario.name:<14}{scenario.summary}")


_json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here, too."
)
_toy_option = click.option("--toy", is_flag=True, help="Little data, short rounds: does everything still work?")


@main.command()
@_json_option
@click.option("--only", "names", multiple=True, metavar="NAME", help="Run this scenario; may be repeated.")
@click.option("--seconds", type=float, help="Measured time of one contestant in one shape, all rounds together.")
@_toy_option
@click.option("--objects", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Objects for `load`.")
@click.option("--edges", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Edges for `load`.")
def bench(
    json_file: Path | None,
    names: tuple[str, ...],
    seconds: float | None,
    toy: bool,
    objects: Path | None,
    edges: Path | None,
) -> None:
    """Run scenarios, print a table. Ctrl-C stops the servers and prints the scenarios that were over by then.

    The exit status is 1 when a scenario failed or found something wrong, 130 when interrupted, and never says how
    fast anything was."""
    report = _run(all_scenarios(), names, seconds=seconds, toy=toy, objects=objects, edges=edges)
    _write_json(json_file, report)
    _finish(report)


@main.command("converge")
@click.option("--writes", type=int, default=DEFAULT_WRITES, show_default=True, help="Random writes.")
@click.option("--tailer-kills", type=int, default=0, show_default=True, help="Tailers killed and started again.")
@click.option("--link-cuts", type=int, default=0, show_default=True, help="Times that the line is cut and healed.")
@click.option("--rtt-ms", type=float, default=DEFAULT_RTT_MS, show_default=True, help="Between the regions.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of writes, faults and their moments.")
@_toy_option
@_json_option
def converge_command(
    writes: int, tailer_kills: int, link_cuts: int, rtt_ms: float, seed: int, toy: bool, json_file: Path | None
) -> None:
    """Random writes in two regions at once, with faults; afterwards nothing may differ from anything.

    The JSON holds what `measured` of the scenario holds in a report of `bench`, and the machine. The exit status is 1
    when anything differs."""
    with _mistakes_told():
        wanted = ConvergeSettings(writes, tailer_kills, link_cuts, rtt_ms, seed)
    _run_alone(Scenario("converge", converge.SUMMARY, partial(converge.run, converge=wanted)), toy, json_file)


@main.command("whale")
@click.option("--edges", type=int, default=DEFAULT_EDGES, show_default=True, help="Of the list.")
@plain_topology_option
@_toy_option
@_json_option
@plot_option
def whale_command(edges: int, topology: Path | None, toy: bool, json_file: Path | None, plot_file: Path | None) -> None:
    """One list that is too long for any cache, with and without a membership filter.

    The JSON holds what `measured` of the scenario holds in a report of `bench`, and the machine."""
    with _mistakes_told():
        wanted = WhaleSettings(edges, topology)
    job = plotted(partial(whale.run, whale=wanted), "whale", plot_file)
    _run_alone(Scenario("whale", whale.SUMMARY, job, whale.MOST_SECONDS), toy, json_file)


@main.command("geo")
@click.option("--rtt-ms", type=float, default=DEFAULT_RTT_MS, show_default=True, help="Between the regions.")
@click.option("--seconds", type=float, default=DEFAULT_PHASE_SECONDS, show_default=True, help="Of each phase.")
@plain_topology_option
@_toy_option
@_json_option
@plot_option
def geo_command(
    rtt_ms: float, seconds: float, topology: Path | None, toy: bool, json_file: Path | None, plot_file: Path | None
) -> None:
    """Latencies of two regions that lie a round trip apart. Of a running cluster --rtt-ms says how far that is.

    The JSON holds what `measured` of the scenario holds in a report of `bench`, and the machine."""
    with _mistakes_told():
        wanted = GeoSettings(rtt_ms, seconds, topology)
    job = plotted(partial(geo.run, geo=wanted), "geo", plot_file)
    _run_alone(Scenario("geo", geo.SUMMARY, job), toy, json_file)


@main.command("run")
@click.option("--workload", type=click.Choice(workload_names()), default="tao_atc13", show_default=True)
@click.option("--nodes", type=int, default=DEFAULT_RUN.nodes, show_default=True, help="Objects of the graph.")
@click.option("--cache-share", type=float, default=DEFAULT_RUN.cache_share, show_default=True, help="Of the data.")
@click.option("--followers", type=int, default=DEFAULT_RUN.followers, show_default=True, help="Of the tier asked.")
@click.option("--processes", type=int, default=DEFAULT_RUN.processes, show_default=True, help="That make the load.")
@click.option("--awaiters", type=int, default=DEFAULT_RUN.awaiters, show_default=True, help="Of each of them.")
@click.option("--rate", type=float, default=0.0, help="Requests a second, waiting for nobody (an open loop).")
@click.option("--warm-seconds", type=float, default=DEFAULT_RUN.warm_seconds, show_default=True)
@click.option("--seconds", type=float, default=DEFAULT_RUN.seconds, show_default=True, help="Measured.")
@click.option("--shards", type=int, default=DEFAULT_RUN.shards, show_default=True, help="Of its own cluster.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the graph and the requests.")
@topology_option
@_toy_option
@_json_option
@plot_option
def run_command(toy: bool, json_file: Path | None, plot_file: Path | None, **wanted: Any) -> None:
    """A published workload: throughput, hit rate, failures, and latencies of hits and misses.

    The JSON holds what `measured` of the scenario holds in a report of `bench`, and the machine."""
    # Any: click's values, which `RunSettings` checks.
    with _mistakes_told():
        run_settings = RunSettings(**wanted)
    job = partial(run_published, wanted=run_settings, plot_file=plot_file)
    _run_alone(Scenario("run", SUMMARY, job), toy, json_file)


@main.command("peers")
@click.option("--workload", type=click.Choice(workload_names()), default="tao_atc13", show_default=True)
@click.option("--nodes", type=int, default=DEFAULT_PEERS.nodes, show_default=True, help="Objects of the graph.")
@click.option("--cache-share", type=float, default=DEFAULT_PEERS.cache_share, show_default=True, help="Of the data.")
@click.option("--awaiters", type=int, default=DEFAULT_PEERS.awaiters, show_default=True)
@click.option("--rate", type=float, default=DEFAULT_PEERS.rate, show_default=True, help="Of the open loop, a second.")
@click.option(
    "--warm-requests", type=int, default=DEFAULT_PEERS.warm_requests, show_default=True, help="Of each cache at most."
)
@click.option(
    "--warm-seconds", type=float, default=DEFAULT_PEERS.warm_seconds, show_default=True, help="Of warming at most."
)
@click.option("--only", type=click.Choice(CONTESTANTS), multiple=True, help="This contestant; may be repeated.")
@click.option("--shape", "shapes", type=click.Choice(SHAPES), multiple=True, help="This load; may be repeated.")
@click.option("--stale/--no-stale", default=True, show_default=True, help="Look for stale reads afterwards.")
@click.option("--seconds", type=float, help="Measured time of one contestant in one shape, all rounds together.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the graph and the requests.")
@_toy_option
@_json_option
@plot_option
def peers_command(
    toy: bool, seconds: float | None, json_file: Path | None, plot_file: Path | None, **wanted: Any
) -> None:
    """A published workload beside Redis and memcached in front of MySQL, and beside MySQL alone.

    The JSON holds what `measured` of the scenario holds in a report of `bench`, and the machine."""
    # Any: click's values, which `PeersSettings` checks.
    with _mistakes_told():
        peers_settings = PeersSettings(**wanted)
    job = partial(peers.run, wanted=peers_settings, plot_file=plot_file)
    scenario = Scenario("peers", peers.SUMMARY, job, peers.MOST_SECONDS)
    _run_alone(scenario, toy, json_file, seconds)


def _run_alone(scenario: Scenario, toy: bool, json_file: Path | None, seconds: float | None = None) -> None:
    report = _run(Registry([scenario]), (), seconds=seconds, toy=toy)
    if scenario.name in report.scenarios:
        command = f"python -m loadtest {shlex.join(sys.argv[1:])}"
        measured = report.scenarios[scenario.name].measured
        _write_json(json_file, {**measured, "machine": report.machine, "command": command})
    elif report.interrupted:
        print(f"{scenario.name}: interrupted before it had figures; nothing was written", file=sys.stderr)
    _finish(report)


for _command in (*failure_commands(_run_alone), *capacity_commands(_run_alone)):
    main.add_command(_command)


def _run(
    registry: Registry,
    names: Sequence[str],
    *,
    seconds: float | None = None,
    toy: bool = False,
    objects: Path | None = None,
    edges: Path | None = None,
) -> Report:
    with interruptible() as interruption:
        work_dir = Path(tempfile.mkdtemp(prefix="tao-bench-"))
        try:
            with _mistakes_told():
                defaults = BenchSettings(work_dir)
                settings = BenchSettings(
                    work_dir,
                    seconds=seconds if seconds is not None else _TOY_SECONDS if toy else defaults.seconds,
                    rounds=_TOY_ROUNDS if toy else defaults.rounds,
                    toy=toy,
                    objects_file=objects,
                    edges_file=edges,
                )
                return asyncio.run(_bench(registry.choose(names), settings, interruption))
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)


@contextmanager
def _mistakes_told() -> Iterator[None]:
    try:
        yield
    except OperatorError as error:
        print(f"loadtest: {error.message}", file=sys.stderr)
        sys.exit(2)


def _write_json(json_file: Path | None, found: object) -> None:
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def _finish(report: Report) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH_WITHOUT_TERMINAL)
    print_report(report, console)
    if report.interrupted:
        sys.exit(_INTERRUPTED_STATUS)
    if report.failures or any(result.faults for result in report.scenarios.values()):
        sys.exit(1)


async def _bench(scenarios: Sequence[Scenario], settings: BenchSettings, interruption: Interruption) -> Report:
    results: dict[str, ScenarioResult] = {}
    failures: dict[str, str] = {}
    with Bar(scenarios) as bar:
        try:
            for scenario in scenarios:
                bar.begin(scenario.name)
                try:
                    with interruption.stopping_this_task():
                        async with asyncio.timeout(scenario.most_seconds or settings.scenario_seconds):
                            results[scenario.name] = await scenario.run(settings, bar)
                except TimeoutError:
                    most = scenario.most_seconds or settings.scenario_seconds
                    failures[scenario.name] = f"stopped after {most:g} s; is the machine busy?"
                except TaoError as error:
                    # What the others measure is worth having all the same.
                    failures[scenario.name] = error.message
                bar.end()
        except asyncio.CancelledError:
            if not interruption.happened:
                raise
    machine = this_machine(settings.versions)
    return Report(machine=machine, scenarios=results, failures=failures, interrupted=interruption.happened)


if __name__ == "__main__":
    # Some scenarios ask from this process, too.
    settle_collector()
    main()
