"""The JSON files of a folder, one a scenario, as they were written; and numbers as a note has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tao.model.errors import OperatorError

EXPECTED: Final = ("run", "peers", "geo", "herd", "storm", "capacity", "locality", "whale", "recovery")
"""The scenarios that the note expects; others are added to it when their files exist."""
_MAX_BYTES: Final = 64 << 20
NOT_FIGURES: Final = ("machine", "command", "aims", "tables", "notes", "settings")
"""Keys of every scenario's file that hold no figures of its own."""


@dataclass(frozen=True, slots=True)
class Found:
    """The files by scenario. `Any`: each scenario has its own form, and files may be older than the code."""

    measured: Mapping[str, Mapping[str, Any]]

    @property
    def missing(self) -> list[str]:
        """The expected scenarios that were not measured."""
        return [name for name in EXPECTED if name not in self.measured]

    @property
    def others(self) -> list[str]:
        """The scenarios beyond the expected ones."""
        return [name for name in self.measured if name not in EXPECTED]

    def get(self, name: str) -> Mapping[str, Any] | None:
        """Return a scenario's file; None when it was not measured."""
        return self.measured.get(name)


def read_folder(folder: Path) -> Found:
    """Read every ``NAME.json``. Raises `OperatorError` for a file that is not what a scenario writes."""
    measured: dict[str, Mapping[str, Any]] = {}
    for file in sorted(folder.glob("*.json")):
        if file.stat().st_size > _MAX_BYTES:
            raise OperatorError(f"{file} is larger than any scenario's figures")
        try:
            value = msgspec.json.decode(file.read_bytes())
        except msgspec.DecodeError as error:
            raise OperatorError(f"{file} is not JSON: {error}") from error
        if not isinstance(value, dict) or "machine" not in value:
            raise OperatorError(f"{file} was not written by a scenario's own command (--json)")
        measured[file.stem] = value
    if not measured:
        raise OperatorError(f"{folder} has no JSON file: run some scenarios with --json {folder}/NAME.json")
    return Found(measured)


def number(value: Any, digits: int = 1) -> str:
    """Return the text of a number; a dash when there is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(value: Any, digits: int = 1) -> str:
    """Return the text of a share in percent; a dash when there is none."""
    return f"{100 * value:.{digits}f} %" if isinstance(value, (int, float)) else "–"


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return a Markdown table with the numbers to the right."""
    line = "|".join(("---", *("---:" for _ in columns[1:])))
    return [f"| {' | '.join(columns)} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield the numbers of nested figures with their dotted names; lists are left out."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in NOT_FIGURES:
                yield from leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value


def aims(found: Found) -> list[str]:
    """Return the table of all aims; the expected scenarios that are missing are named in it."""
    rows: list[tuple[str, ...]] = [
        (f"all of `{name}`", "–", "–", "not measured") for name in found.missing if name in _AIMED
    ]
    for name, measured in found.measured.items():
        for each in measured.get("aims", ()):
            where = ", ".join(filter(None, (f"`{name}`", each.get("shape", ""))))
            text = each.get("aim") or f"`{each['figure']}` {number(each['bound'])} at most"
            rows.append((text, where, _value(each["value"]), "met" if each["met"] else "not met"))
    met = sum(row[-1] == "met" for row in rows)
    return [f"{met} of {len(rows)} met.", "", *table(("aim", "in", "measured", "verdict"), rows)]


_AIMED: Final = ("run", "peers", "geo")
"""Scenarios that the table names when they are missing."""


def _value(value: Any) -> str:
    # Below 1 it is a share, of which two digits would say too little.
    return number(value, 3 if abs(value) < 1 else 2)
