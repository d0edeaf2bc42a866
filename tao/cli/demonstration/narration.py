"""How the demonstration speaks: chapters, short paragraphs, tables and pages, on standard output.

Plain lines that read the same on a terminal and in a CI log; only tables know of colours, where there are any.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Final

from tao.cli.output import print_table

_WIDTH: Final = 100
"""Of paragraphs: what an eye follows easily, and what a CI log shows without folding."""


def chapter(number: int, title: str) -> None:
    """A heading."""
    heading = f"Chapter {number}: {title}"
    _write(f"\n{heading}\n{'-' * len(heading)}\n\n")


def say(text: str) -> None:
    """A paragraph and an empty line."""
    _write(textwrap.fill(" ".join(text.split()), _WIDTH) + "\n\n")


def page(title: str, lines: Iterable[str]) -> None:
    """What an application would show somebody."""
    _write(f"  +-- {title}\n" + "".join(f"  |   {line}\n" for line in lines) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """A table and an empty line; the columns named in ``right`` hold numbers."""
    sys.stdout.flush()
    print_table(columns, rows, right=right)
    _write("\n")


def ms(value: float) -> str:
    """Milliseconds, as they stand in tables."""
    return f"{value:.2f} ms"


def _write(text: str) -> None:
    sys.stdout.write(text)
    # Progress goes to standard error: in a log that holds both, each stands where it belongs.
    sys.stdout.flush()
