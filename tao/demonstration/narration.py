"""How the chapters of the demonstration write and check.

Lines are plain, so that they read the same on a terminal and in a CI log; only tables use colours, where there are any.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tao.client import MEMORY
from tao.model.errors import TaoError
from tao.terminal import print_table

_WIDTH: Final = 100
"""The width of paragraphs: easy to read, and not folded in a CI log."""
Figures = dict[str, Any]
"""What a chapter has measured, as JSON. (`Any`: numbers, and figures of parts.)"""
_PLACES: Final = {MEMORY: "follower", "leader": "leader", "database": "database"}
"""The text in tables for the server that answered: follower and leader answered from memory."""


class DemonstrationFailed(TaoError):
    """A check failed. The message says what was expected and what was found."""

    reason = "DEMONSTRATION_FAILED"


def check(holds: object, otherwise: str) -> None:
    """Raise `DemonstrationFailed` with the message ``otherwise``, unless a claim holds."""
    if not holds:
        raise DemonstrationFailed(otherwise)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of at least one latency, in milliseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{percent}_ms": 1000 * ordered[last * percent // 100] for percent in (50, 99)}


def chapter(number: int, title: str) -> None:
    """Print a heading."""
    heading = f"Chapter {number}: {title}"
    _write(f"\n{heading}\n{'-' * len(heading)}\n\n")


def say(text: str) -> None:
    """Print a paragraph and an empty line."""
    _write(textwrap.fill(" ".join(text.split()), _WIDTH) + "\n\n")


def page(title: str, lines: Iterable[str]) -> None:
    """Print a page as an application would show it."""
    _write(f"  +-- {title}\n" + "".join(f"  |   {line}\n" for line in lines) + "\n")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """Print a table and an empty line. The columns named in ``right`` hold numbers."""
    print_table(columns, rows, right=right)
    _write("\n")


def ms(value: float) -> str:
    """Return milliseconds as text for tables."""
    return f"{value:.2f} ms"


def place(answered_by: str) -> str:
    """Return the text in tables for the server that answered."""
    return _PLACES.get(answered_by, answered_by)


def _write(text: str) -> None:
    sys.stdout.write(text)
    # Progress goes to standard error: flushing keeps the order in a log that holds both.
    sys.stdout.flush()
