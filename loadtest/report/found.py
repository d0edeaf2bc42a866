"""The JSON files of a folder, one a scenario, as they were written; and numbers as a note has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from tao.model.errors import OperatorError

EXPECTED: Final = ("run", "peers", "geo", "herd", "storm", "capacity", "locality", "whale", "recovery")
"""What the note is about; others are added to it when their files are there."""
_MAX_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class Found:
    """By scenario. `Any`: each scenario has its own form, and files may be older than the code."""

    measured: Mapping[str, Mapping[str, Any]]

    @property
    def missing(self) -> list[str]:
        """What the note should have and nobody measured."""
        return [name for name in EXPECTED if name not in self.measured]

    @property
    def others(self) -> list[str]:
        """What is there beyond the expected."""
        return [name for name in self.measured if name not in EXPECTED]

    def get(self, name: str) -> Mapping[str, Any] | None:
        """None: not measured."""
        return self.measured.get(name)


def read_folder(folder: Path) -> Found:
    """Every ``NAME.json``. Raises `OperatorError` for a file that is not what a scenario writes."""
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
    """For a cell; a dash for what is not there."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.{digits}f}"


def percent(value: Any, digits: int = 1) -> str:
    """The same of a share."""
    return f"{100 * value:.{digits}f} %" if isinstance(value, (int, float)) else "–"


def table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Markdown; numbers to the right."""
    line = "|".join(("---", *("---:" for _ in columns[1:])))
    return [f"| {' | '.join(columns)} |", f"|{line}|", *(f"| {' | '.join(row)} |" for row in rows), ""]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """Numbers of nested figures with their dotted names; lists are left out."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in ("machine", "settings"):
                yield from leaves(each, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, value
