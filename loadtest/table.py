"""A report as tables: for people in a terminal, and in each scenario's JSON for the note of results."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.results import Figure, GoalVerdict, Listing, Machine, Measure, Report, ScenarioResult

_MEASURES = {Measure.P50: "p50 ", Measure.P99: "p99 ", Measure.SERVER_CPU: "server "}
_FIGURE_COLUMNS = (
    *("shape of load", "contestant", "queries/s", "× yardstick", "p50 µs", "× yardstick", "p99 µs", "server µs"),
    *("client µs", "aim"),
)


def print_report(report: Report, console: Console) -> None:
    """Print the machine, and the tables of each scenario."""
    console.print(_machine_line(report.machine), highlight=False)
    for name, result in report.scenarios.items():
        console.print()
        console.print(Text(f"{name}: {result.summary}", style="bold"))
        console.print(", ".join(f"{key} {value}" for key, value in result.conditions.items()), highlight=False)
        for listing in tables_of(result):
            console.print(_table(listing))
        for note in result.notes:
            console.print(note, style="dim", highlight=False)
        for fault in result.faults:
            console.print(Text(fault, style="red"))
    for name, message in report.failures.items():
        console.print()
        console.print(Text(f"{name} failed: {message}", style="red"))
    if report.interrupted:
        console.print("interrupted: what had been measured stands above", style="yellow")


def tables_of(result: ScenarioResult) -> list[Listing]:
    """Return all tables of a scenario: its figures, quantities and listings, and its aims."""
    tables: list[Listing] = []
    if result.figures:
        tables.append(Listing(title="", columns=_FIGURE_COLUMNS, rows=[_figure_row(each) for each in result.figures]))
    if result.quantities:
        rows: list[tuple[str, ...]] = [
            (each.name, f"{each.value:,.1f}", each.unit.replace("_", " ")) for each in result.quantities
        ]
        tables.append(Listing(title="", columns=("figure", "value", "unit"), rows=rows))
    tables += result.listings
    if result.aims and not result.figures:
        rows = [
            (f"{each.aim}{f' ({each.shape})' if each.shape else ''}", f"{each.value:,.2f}", _met(each.met))
            for each in result.aims
        ]
        tables.append(Listing(title="", columns=("aim", "measured", "verdict"), rows=rows))
    return tables


def _machine_line(machine: Machine) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return f"{machine.cpus} × {machine.cpu}, {machine.memory_mb:,} MB, {machine.kernel}, {machine.python}; {versions}"


def _figure_row(figure: Figure) -> tuple[str, ...]:
    return (
        figure.shape,
        figure.contestant,
        f"{figure.per_second:,.0f}",
        _ratio(figure.rate_ratio),
        f"{figure.p50_us:,.0f}",
        _ratio(figure.p50_ratio),
        f"{figure.p99_us:,.0f}",
        f"{figure.server_cpu_us:,.2f}",
        f"{figure.client_cpu_us:,.2f}",
        "; ".join(map(_verdict, figure.verdicts)),
    )


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _verdict(verdict: GoalVerdict) -> str:
    measured = f" ({verdict.value:.2f})" if verdict.aim.against else ""
    return f"{_MEASURES.get(verdict.aim.measure, '')}{verdict.aim.describe()}{measured}: {_met(verdict.met)}"


def _met(met: bool) -> str:
    return "met" if met else "not met"


def _table(listing: Listing) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=listing.title, title_justify="left")
    for number, column in enumerate(listing.columns):
        is_text = not number or column in ("contestant", "aim", "unit", "verdict")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in listing.rows:
        table.add_row(*(Text(cell, style="red" if "not met" in cell else "") for cell in row))
    return table
