"""Tables: made of rows and templates, printed for people in a terminal, and kept in each scenario's JSON.

A table is a mapping of column names to templates of `str.format`, which are filled with each row's values. A value that
is None, or part of one, leaves its place empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from loadtest.results import GoalVerdict, Listing, Machine, Measure, Report, ScenarioResult

_MEASURES: Final = {Measure.P50: "p50 ", Measure.P99: "p99 ", Measure.SERVER_CPU: "server "}
_FIGURES: Final = {
    "shape of load": "{shape}",
    "contestant": "{contestant}",
    "queries/s": "{per_second:,.0f}",
    "× yardstick": "{rate_ratio:.2f}",
    "p50 µs": "{p50_us:,.0f}",
    "× yardstick ": "{p50_ratio:.2f}",
    "p99 µs": "{p99_us:,.0f}",
    "server µs": "{server_cpu_us:,.2f}",
    "client µs": "{client_cpu_us:,.2f}",
    "aim": "{aim}",
}
_TEXTS: Final = ("contestant", "aim", "unit", "verdict")
"""The columns that are no numbers, beside the first one."""


class _Template(Formatter):
    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        name = re.split(r"[.\[]", field_name, maxsplit=1)[0]
        return (None, name) if kwargs.get(name, name) is None else super().get_field(field_name, args, kwargs)

    def format_field(self, value: Any, format_spec: str) -> str:
        return "" if value is None else str(super().format_field(value, format_spec))


def listing(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]], title: str = "") -> Listing:
    """Return the table of these rows; ``columns`` are templates by column name, which a trailing space may distinguish
    from another of the same text. `Any`: what a template can show."""
    template = _Template()
    cells = [tuple(template.format(column, **row) for column in columns.values()) for row in rows]
    return Listing(title=title, columns=tuple(name.rstrip() for name in columns), rows=cells)


def tables_of(result: ScenarioResult) -> list[Listing]:
    """Return all tables of a scenario: its figures, quantities and listings, and its aims."""
    figures = [{**_values(each), "aim": "; ".join(map(_verdict, each.verdicts))} for each in result.figures]
    quantities = [{**_values(each), "unit": each.unit.replace("_", " ")} for each in result.quantities]
    tables = [
        listing(_FIGURES, figures),
        listing({"figure": "{name}", "value": "{value:,.1f}", "unit": "{unit}"}, quantities),
        *result.listings,
    ]
    if not result.figures and not any("verdict" in each.columns for each in result.listings):
        aims = [
            {**_values(each), "shape": f" ({each.shape})" if each.shape else "", "met": met(each.met)}
            for each in result.aims
        ]
        tables.append(listing({"aim": "{aim}{shape}", "measured": "{value:,.2f}", "verdict": "{met}"}, aims))
    return [each for each in tables if each.rows]


def _values(row: msgspec.Struct) -> dict[str, Any]:
    return msgspec.structs.asdict(row)


def met(is_met: bool) -> str:
    """Return the verdict in words."""
    return "met" if is_met else "not met"


def _verdict(verdict: GoalVerdict) -> str:
    measured = f" ({verdict.value:.2f})" if verdict.aim.against else ""
    return f"{_MEASURES.get(verdict.aim.measure, '')}{verdict.aim.describe()}{measured}: {met(verdict.met)}"


def print_report(report: Report, console: Console) -> None:
    """Print the machine, and the tables of each scenario."""
    console.print(_machine_line(report.machine), highlight=False)
    for name, result in report.scenarios.items():
        console.print()
        console.print(Text(f"{name}: {result.summary}", style="bold"))
        console.print(", ".join(f"{key} {value}" for key, value in result.conditions.items()), highlight=False)
        for each in tables_of(result):
            console.print(_table(each))
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


def _table(shown: Listing) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title=shown.title, title_justify="left")
    for number, column in enumerate(shown.columns):
        is_text = not number or column in _TEXTS
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    for row in shown.rows:
        table.add_row(*(Text(cell, style="red" if "not met" in cell else "") for cell in row))
    return table
