"""`python -m loadtest bench` runs scenarios and prints a table; `python -m loadtest list` names them.

A scenario with options has a command of its own name, made of its `Scenario.options`.
"""

from __future__ import annotations

import asyncio
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from loadtest.catalogue import bench_scenarios, every_scenario
from loadtest.interruption import Interruption, interruptible
from loadtest.options import Options, click_options
from loadtest.results import Report, ScenarioResult, this_machine
from loadtest.rounds import settle_collector
from loadtest.scenario import BenchSettings, PartOfProgress, Scenario
from loadtest.table import print_report, tables_of
from tao.model.errors import OperatorError, TaoError

_TOY_SECONDS: Final = 0.1
_TOY_ROUNDS: Final = 3
_WIDTH_WITHOUT_TERMINAL: Final = 200
_INTERRUPTED_STATUS: Final = 130


class Bar:
    """Progress on standard error, so that standard output holds the result alone."""

    def __init__(self, shown: Progress) -> None:
        self.scenario = ""
        """The name of the scenario that runs."""
        self._shown = shown
        self._task: TaskID = shown.add_task("", total=1.0)

    def step(self, text: str, done: float = 0.0) -> None:
        """Show a step: see `loadtest.scenario.Progress`."""
        self._shown.update(self._task, description=f"{self.scenario}  {text}", completed=done)


@click.group()
def main() -> None:
    """Benchmarks of tao: registered scenarios, measured beside a yardstick in the same run."""


@main.command(name="list")
def list_scenarios() -> None:
    """Print the names and summaries of the scenarios that `bench` runs."""
    for scenario in bench_scenarios().values():
        print(f"{scenario.name:<14}{scenario.summary}")


_json_option = click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures to this file, too."
)
_toy_option = click.option("--toy", is_flag=True, help="Run with little data and short rounds, to see that it works.")
_plot_option = click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw the figures into this PNG."
)


@main.command()
@_json_option
@click.option("--only", "names", multiple=True, metavar="NAME", help="Run only this scenario; may be repeated.")
@click.option("--seconds", type=float, help="Measured seconds of one contestant in one shape, all rounds together.")
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
    """Run scenarios and print a table. Ctrl-C stops the servers and prints the scenarios that were over by then.

    The exit status is 1 when a scenario failed or found something wrong, and 130 when interrupted. It never depends on
    speed."""
    scenarios = bench_scenarios()
    unknown = [name for name in names if name not in scenarios]
    chosen = {each: each.options for name, each in scenarios.items() if not names or name in names}
    wanted = {"objects_file": objects, "edges_file": edges, **({} if seconds is None else {"seconds": seconds})}
    with _session() as run_them:
        if unknown:
            raise OperatorError(f"there is no scenario {', '.join(unknown)}; there are {', '.join(scenarios)}")
        report = run_them(chosen, toy, **wanted)
    _write_json(json_file, report)
    _finish(report)


def _scenario_command(scenario: Scenario) -> click.Command:
    def command(toy: bool, json_file: Path | None, plot_file: Path | None = None, **options: Any) -> None:
        # Any: click's values, which the options check.
        with _session() as run_them:
            report = run_them({scenario: partial(scenario.options, **options)}, toy)
        result = report.scenarios.get(scenario.name)
        if result is not None:
            line = f"python -m loadtest {shlex.join(sys.argv[1:])}"
            shared = {"aims": result.aims, "tables": tables_of(result), "notes": result.notes}
            _write_json(json_file, {**shared, **result.measured, "machine": report.machine, "command": line})
            if plot_file is not None:
                # Imported here because it takes a second, which a run without a plot need not wait for.
                from loadtest.report.plots import draw

                draw(scenario.name, result.measured, plot_file)
        elif report.interrupted:
            print(f"{scenario.name}: interrupted before it had figures; nothing was written", file=sys.stderr)
        _finish(report)

    decorators = [click_options(scenario.options), _toy_option, _json_option]
    for decorate in decorators + ([_plot_option] if scenario.has_plot else []):
        command = decorate(command)
    return click.command(scenario.name, help=scenario.help)(command)


for _scenario in every_scenario().values():
    if _scenario.help:
        main.add_command(_scenario_command(_scenario))


@main.command("report")
@click.option(
    "--from",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of the scenarios' JSON files, each named after its scenario. Without it, the sections that are "
    "written by hand are copied to the existing file.",
)
@click.option(
    "--out", "file", type=click.Path(dir_okay=False, path_type=Path), required=True, help="Markdown file to write."
)
@click.option("--remark", default="", help="Remark on the machine or the occasion, for the head of the note.")
def report_command(folder: Path | None, file: Path, remark: str) -> None:
    """Write one note, with plots in a folder beside it, from the JSON files that the scenarios have written."""
    from loadtest.report.note import refresh_note, write_note  # drawing takes a second to import

    try:
        if folder is None:
            refresh_note(file)
            print(f"{file}: what is written by hand was copied")
            return
        missing = write_note(folder, file, remark)
    except OperatorError as error:
        raise click.ClickException(error.message) from error
    print(f"{file}: written" + (f"; not measured: {', '.join(missing)}" if missing else ""))


@contextmanager
def _session() -> Iterator[Callable[..., Report]]:
    """Yield what runs scenarios in a folder that is removed afterwards; exit with status 2 when an option is wrong.

    Signals are heard from before the folder exists until it is gone, so that none leaves it behind."""
    with interruptible() as interruption:
        folder = Path(tempfile.mkdtemp(prefix="tao-bench-"))

        def run(chosen: Mapping[Scenario, Callable[[], Options]], toy: bool, **wanted: Any) -> Report:
            # Any: fields of the settings.
            sizes = {"seconds": _TOY_SECONDS, "rounds": _TOY_ROUNDS, "toy": True} if toy else {}
            settings = BenchSettings(folder, **{**sizes, **wanted})
            options = {each: make().at_toy_size() if toy else make() for each, make in chosen.items()}
            return asyncio.run(_run(options, settings, interruption))

        try:
            yield run
        except OperatorError as error:
            print(f"loadtest: {error.message}", file=sys.stderr)
            sys.exit(2)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


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


async def _run(chosen: Mapping[Scenario, Options], settings: BenchSettings, interruption: Interruption) -> Report:
    results: dict[str, ScenarioResult] = {}
    failures: dict[str, str] = {}
    columns = (SpinnerColumn(), BarColumn(bar_width=30), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        bar = Bar(shown)
        try:
            for number, (scenario, options) in enumerate(chosen.items()):
                bound = scenario.seconds_bound(options) if scenario.seconds_bound else settings.scenario_seconds
                bar.scenario = scenario.name
                progress = PartOfProgress(bar, number / len(chosen), 1 / len(chosen))
                try:
                    with interruption.stopping_this_task():
                        async with asyncio.timeout(bound):
                            result = await scenario.run(settings, progress, options)
                    summary = result.summary or scenario.summary
                    results[scenario.name] = msgspec.structs.replace(result, summary=summary)
                except TimeoutError:
                    failures[scenario.name] = f"stopped after {bound:g} s; is the machine busy?"
                except TaoError as error:
                    # The results of the other scenarios are worth having all the same.
                    failures[scenario.name] = error.message
        except asyncio.CancelledError:
            if not interruption.happened:
                raise
    machine = this_machine(settings.versions)
    return Report(machine=machine, scenarios=results, failures=failures, interrupted=interruption.happened)


if __name__ == "__main__":
    # Some scenarios ask from this process, too.
    settle_collector()
    main()
