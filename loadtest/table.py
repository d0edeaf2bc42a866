"""A report as tables for people; everything in them stands in the JSON too."""

from __future__ import annotations

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from loadtest.results import Figure, Listing, Machine, Measure, Report, ScenarioResult, Verdict

_MEASURES = {Measure.P50: "p50 ", Measure.P99: "p99 ", Measure.SERVER_CPU: "server "}


def print_report(report: Report, console: Console) -> None:
    """The machine, and a table per scenario."""
    console.print(_machine_line(report.machine), highlight=False)
    for name, result in report.scenarios.items():
        console.print()
        console.print(Text(f"{name}: {result.summary}", style="bold"))
        console.print(", ".join(f"{key} {value}" for key, value in result.conditions.items()), highlight=False)
        console.print(_result(result))
        for note in result.notes:
            console.print(note, style="dim", highlight=False)
        for fault in result.faults:
            console.print(Text(fault, style="red"))
    for name, message in report.failures.items():
        console.print()
        console.print(Text(f"{name} failed: {message}", style="red"))
    if report.interrupted:
        console.print("interrupted: what had been measured stands above", style="yellow")


def _machine_line(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"{machine.cpus} × {machine.cpu}, {machine.memory_mb:,} MB, {machine.kernel}, {machine.python}; {versions}"


def _result(result: ScenarioResult) -> Group:
    parts = []
    if result.figures:
        parts.append(_figures(result.figures))
    if result.quantities:
        parts.append(_quantities(result))
    parts += [_listing(each) for each in result.listings]
    return Group(*parts)


def _figures(figures: list[Figure]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("shape of load", overflow="fold")
    table.add_column("contestant")
    for heading in ("queries/s", "× yardstick", "p50 µs", "× yardstick", "p99 µs", "server µs", "client µs"):
        table.add_column(heading, justify="right")
    table.add_column("aim", overflow="fold")
    shape = None
    for figure in figures:
        if shape is not None and figure.shape != shape:
            table.add_section()
        table.add_row(
            figure.shape if figure.shape != shape else "",
            figure.contestant,
            f"{figure.per_second:,.0f}",
            _ratio(figure.rate_ratio),
            f"{figure.p50_us:,.0f}",
            _ratio(figure.p50_ratio),
            f"{figure.p99_us:,.0f}",
            f"{figure.server_cpu_us:,.2f}",
            f"{figure.client_cpu_us:,.2f}",
            Text("\n").join(map(_verdict, figure.verdicts)),
        )
        shape = figure.shape
    return table


def _quantities(result: ScenarioResult) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for quantity in result.quantities:
        table.add_row(quantity.name, f"{quantity.value:,.1f}", quantity.unit.replace("_", " "))
    return table


def _listing(listing: Listing) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=listing.title, title_justify="left")
    for number, column in enumerate(listing.columns):
        table.add_column(column, justify="right" if number else "left")
    for row in listing.rows:
        table.add_row(*row)
    return table


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _verdict(verdict: Verdict) -> Text:
    measured = f" ({verdict.value:.2f})" if verdict.aim.against else ""
    what = _MEASURES.get(verdict.aim.measure, "")
    text = f"{what}{verdict.aim.describe()}{measured}: {'met' if verdict.met else 'not met'}"
    return Text(text, style="green" if verdict.met else "red")
