"""Reads files that the loop watches, together when they become readable often.

A turn of the loop for each connection that comes, or leaves, costs more than the connection. So as long as that happens
more often than once in a millisecond the files are looked at once in a millisecond, by a timer: the loop watches them
again when a look has found nothing.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Final, Generic, Protocol, TypeVar

TOGETHER_SECONDS: Final = 0.001
"""How often files are looked at that become readable more often than that."""


class _File(Protocol):
    def fileno(self) -> int: ...


F = TypeVar("F", bound=_File)


class PacedReader(Generic[F]):
    """Calls a function for files that can be read."""

    def __init__(self, files: Sequence[F], read: Callable[[F], int | None], now: Callable[[], float]) -> None:
        """``files`` may change between `stop` and `start`, and their order at any time. ``read`` handles what a file
        has, and returns how much that was, or None when there may be more, or the rest must not wait. ``now`` returns
        the time in seconds."""
        self._files: Final = files
        self._read: Final = read
        self._now: Final = now
        self._emptied_at = -math.inf
        """When a look has last found nothing more."""
        self._is_watching = False
        self._resuming: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Have the loop watch the files."""
        loop = asyncio.get_running_loop()
        self._is_watching = True
        for file in self._files:
            loop.add_reader(file, self._is_readable, file)

    def stop(self) -> None:
        """Look at them no more."""
        self._unwatch()
        if self._resuming is not None:
            self._resuming.cancel()
            self._resuming = None

    def pause_for(self, seconds: float) -> None:
        """Look at them after so many seconds, or when a pause that has begun before is over."""
        if self._resuming is None:
            self._unwatch()
            self._resuming = asyncio.get_running_loop().call_later(seconds, self._resume)

    def _is_readable(self, file: F) -> None:
        began = self._now()
        if self._read(file) is None:
            return
        is_fast = began - self._emptied_at < TOGETHER_SECONDS
        self._emptied_at = self._now()
        if is_fast:
            self.pause_for(TOGETHER_SECONDS)

    def _resume(self) -> None:
        self._resuming = None
        found = list[int | None]()
        for file in tuple(self._files):
            try:
                found.append(self._read(file))
            except Exception:
                # A bug in what handles one connection must not leave a port that nobody looks at.
                if not self._is_paused():
                    self.start()
                raise
            if self._is_paused():  # reading it has begun another pause
                return
        self._emptied_at = self._now()
        if None in found or not any(found):
            self.start()
        else:
            self.pause_for(TOGETHER_SECONDS)

    def _is_paused(self) -> bool:
        return self._resuming is not None

    def _unwatch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            loop = asyncio.get_running_loop()
            for file in self._files:
                loop.remove_reader(file)
