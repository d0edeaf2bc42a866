"""Tables and progress for people, JSON for scripts: how commands write to a terminal or a pipe.

rich leaves colours and borders out when the output is not a terminal or NO_COLOR is set. Progress goes to standard
error.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID
    from rich.status import Status

    from tao.admin.load.key_map import LoadProgress

_PIPE_WIDTH: Final = 1000
_UNITS: Final = {"bytes": ("MB", 1e-6), "seconds": ("s", 1.0), "share": ("share %", 100.0), "rate": ("rate %", 100.0)}
"""By the last word of a number's name: the words of its column in a table, and the factor of the unit used there."""


def print_json(value: object) -> None:
    """Print one JSON document; bytes become base64 text, as in schema files, and records objects."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2, default=_plain) + "\n")


def fields_of(record: object) -> dict[str, object]:
    """Return the fields of a record by name: of a mapping, a dataclass, a `msgspec.Struct` or a named tuple."""
    if isinstance(record, Mapping):
        return dict(record)
    for names in ("__struct_fields__", "__dataclass_fields__", "_fields"):
        if hasattr(record, names):
            return {name: getattr(record, name) for name in getattr(record, names)}
    raise TypeError(f"{type(record).__name__} is not a record")


def print_records(records: Iterable[object], *names: str) -> None:
    """Print a table of records with these fields, or with all of them; nothing without a record.

    The columns are called like the fields, with a shorter unit: bytes are shown in MB, shares and rates in percent.
    A field with a plural name is a count. Numbers are aligned on the right."""
    rows = [fields_of(record) for record in records]
    columns = names or tuple(dict.fromkeys(name for row in rows for name in row))
    if rows:
        titles = {name: _title(name) for name in columns}
        cells = [[_cell(name, row.get(name)) for name in columns] for row in rows]
        numeric = [all(_is_number(cell) for cell in column) for column in zip(*cells, strict=True)]
        print_table([*titles.values()], cells, right=[*compress(titles.values(), numeric)])


def print_records_with_errors(records: Iterable[object], *names: str) -> None:
    """Print a table of records with these fields, and below it the ``error`` of each record that has one, behind the
    record's first field: in a column, the longest error would make every line as wide."""
    rows = [fields_of(record) for record in records]
    print_records(rows, *names)
    for row in rows:
        if row["error"]:
            sys.stdout.write(f"{text_of(row[names[0]])}: {text_of(row['error'])}\n")


def _title(name: str) -> str:
    *words, last = name.split("_")
    return " ".join((*words, _UNITS[last][0] if last in _UNITS else last))


def _cell(name: str, value: object) -> str:
    last = name.rpartition("_")[2]
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)) and last in _UNITS:
        return text_of(float(value * _UNITS[last][1]))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text_of, value)) or text_of(None)
    return f"{value:,}" if isinstance(value, int) and last.endswith("s") else text_of(None if value == "" else value)


def _is_number(cell: str) -> bool:
    return cell == text_of(None) or not cell.strip("0123456789,.")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table. The columns named in ``right`` hold numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        number = column in right
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        # Text, not markup: the data of users may look like markup.
        table.add_row(*(Text(text_of(cell)) for cell in row))
    # A pipe has no width, and folded cells would be no use to grep.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    with console.capture() as captured:
        console.print(table)
    # rich fills the last column up with spaces.
    sys.stdout.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Print each name with its value on a line."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        sys.stdout.write(f"{name:<{width}}  {text_of(value)}\n")


def text_of(value: object) -> str:
    """Return a value as text for people. Control characters are escaped, so that data cannot control the terminal."""
    if value is None:
        return "-"
    text = f"{value:,.1f}" if isinstance(value, float) else str(value)
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: "1 line", "2 lines". ``many``: the plural, when it is not formed with s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _plain(value: object) -> object:
    return base64.b64encode(value).decode() if isinstance(value, (bytes, bytearray, memoryview)) else fields_of(value)


LINE_SECONDS: Final = 5.0
"""The time until the first line of progress in a log file."""
_MOST_LINE_SECONDS: Final = 60.0


class WaitDisplay:
    """Shows what a command waits for: a spinner on a terminal, else a line for each step. A context manager."""

    def __init__(self) -> None:
        self._status: Status | None = None
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.status import Status

            self._status = Status("", console=Console(stderr=True))
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Show what the command waits for from now on."""
        if self._status is not None:
            self._status.update(text)
        else:
            sys.stderr.write(f"[{time.monotonic() - self._began:5.1f} s] {text}\n")
            sys.stderr.flush()


class LinePace:
    """Says when progress is due for another line of a log: after some seconds, and then ever less often, so that a pass
    of minutes has a few lines, and one of hours a line a minute."""

    def __init__(self) -> None:
        self._pause_seconds = LINE_SECONDS
        self._due_at = time.monotonic() + LINE_SECONDS

    def is_due(self) -> bool:
        """Return whether a line is due now; the next one is due after twice the time."""
        now = time.monotonic()
        if now < self._due_at:
            return False
        self._pause_seconds = min(2 * self._pause_seconds, _MOST_LINE_SECONDS)
        self._due_at = now + self._pause_seconds
        return True


class Counting:
    """Shows the progress of a long pass; outside a terminal a line now and then. A context manager."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._display = WaitDisplay()
        self._pace = LinePace()

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._display.__exit__()

    def show(self, where: str, count: int) -> None:
        """Show that ``count`` items have been handled so far, and where the pass is now."""
        if sys.stderr.isatty() or self._pace.is_due():
            self._display.show(f"{count:,} {self._what} ({where})")


class LoadDisplay:
    """Shows the progress of a load: a bar on a terminal, else a line now and then. A context manager.

    ``progress``: what was shown or would have been shown last; None before the first."""

    def __init__(self) -> None:
        self.progress: LoadProgress | None = None
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._first_lines = 0
        self._began = 0.0
        self._pace = LinePace()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bars

            self._bars = Bars(
                TextColumn("{task.fields[lines]}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: LoadProgress, size: int) -> None:
        """Show the progress of the load. ``size``: the size of its input in bytes, 0 when unknown."""
        now = time.monotonic()
        if self.progress is None:
            self._began, self._first_lines = now, progress.lines
            self._pace = LinePace()
        self.progress = progress
        rate = (progress.lines - self._first_lines) / max(now - self._began, 1e-3)
        lines = counted(progress.lines, "line") + (f", {progress.rejected:,} rejected" if progress.rejected else "")
        per_second = f"{rate:,.0f}/s" if rate else ""
        if self._bars is not None:
            if self._task is None:
                self._task = self._bars.add_task("load", total=size or None, lines="", rate="")
            self._bars.update(self._task, completed=progress.offset, lines=lines, rate=per_second)
        elif self._pace.is_due():
            share = f"{100 * progress.offset // size} %" if size else ""
            text = ", ".join(part for part in (lines, share, per_second) if part)
            sys.stderr.write(f"[{now - self._began:5.1f} s] {text}\n")
            sys.stderr.flush()
