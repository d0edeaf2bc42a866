"""The progress bar of a load, on a terminal; nothing elsewhere, where the summary at the end says it."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from tao.cli.loading.key_map import Progress
from tao.cli.output import counted


class LoadDisplay:
    """A context manager; writes to standard error."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._first_lines = 0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: Progress, size: int) -> None:
        """How far the load is, of ``size`` bytes (0: unknown)."""
        if self._bars is None:
            return
        if self._task is None:
            self._task = self._bars.add_task("load", total=size or None, lines="", rate="")
            self._first_lines = progress.lines
        task = next(task for task in self._bars.tasks if task.id == self._task)
        rate = (progress.lines - self._first_lines) / task.elapsed if task.elapsed else 0.0
        rejected = f", {progress.rejected:,} rejected" if progress.rejected else ""
        self._bars.update(
            self._task,
            completed=progress.offset,
            lines=f"{counted(progress.lines, 'line')}{rejected}",
            rate=f"{rate:,.0f}/s" if rate else "",
        )
