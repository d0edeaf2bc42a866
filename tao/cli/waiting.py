"""Says what a command waits for: a spinner on a terminal, a line for each step elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.status import Status


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
