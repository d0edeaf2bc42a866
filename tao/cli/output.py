"""Tables for people, JSON for scripts.

rich leaves colours and borders out when the output is no terminal or NO_COLOR is set.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence

_PIPE_WIDTH = 1000


def print_json(value: object) -> None:
    """One JSON document; bytes are written as base64 text, as in schema files."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2, default=_plain) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """A table; the columns named in ``right`` hold numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        number = column in right
        table.add_column(column, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for row in rows:
        # Text, not markup: what users typed into their fields may look like it.
        table.add_row(*(Text(text_of(cell)) for cell in row))
    # A pipe has no width: a file of folded cells is no use to grep.
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(table)


def print_pairs(pairs: Mapping[str, object]) -> None:
    """Name and value, a line each."""
    width = max(map(len, pairs), default=0)
    for name, value in pairs.items():
        sys.stdout.write(f"{name:<{width}}  {text_of(value)}\n")


def text_of(value: object) -> str:
    """A value as people read it; control characters are escaped, so that data cannot command the terminal."""
    if value is None:
        return "-"
    text = f"{value:,.1f}" if isinstance(value, float) else str(value)
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def counted(number: int, one: str, many: str = "") -> str:
    """A number and what it counts: "1 line", "2 lines"; ``many`` for plurals that do not end in s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _plain(value: object) -> object:
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
