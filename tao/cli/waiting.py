"""Says what a command waits for: a spinner on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from rich.status import Status


LINE_SECONDS: Final = 5.0
"""Between two lines of progress in a log file."""


class WaitDisplay:
    """A context manager; writes to standard error."""

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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """What it waits for from now on."""
        if self._status is not None:
            self._status.update(text)
        else:
            sys.stderr.write(f"[{time.monotonic() - self._began:5.1f} s] {text}\n")
            sys.stderr.flush()


class Counting:
    """How far a long pass has come: on a terminal always, elsewhere a line every few seconds."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._display = WaitDisplay()
        self._due = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Self:
        self._display.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._display.__exit__(kind, error, at)

    def show(self, where: str, count: int) -> None:
        """``count`` of them so far, now at ``where``."""
        if sys.stderr.isatty() or time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            self._display.show(f"{count:,} {self._what} ({where})")
