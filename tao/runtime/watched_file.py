"""A small text file that a person edits while the server runs: read in a thread, and polled for changes.

A slow disk must not delay hits, and a file that is missing for a moment, as while some editors save it, must not stop
a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tao.model.errors import OperatorError, unreadable

_logger = logging.getLogger(__name__)


class WatchedFile:
    """Reads one file, and calls back when its text has changed."""

    def __init__(self, path: Path, error: type[OperatorError], *, poll_seconds: float = 1.0) -> None:
        """``error`` is raised when the file cannot be read. ``poll_seconds`` is the interval between two checks of the
        file. Reading it once a second costs nothing, and a person waits longer than that for a roll-out."""
        self.path: Final = path
        self._error: Final = error
        self._poll_seconds: Final = poll_seconds
        self._text = ""
        self._is_missing = False

    async def read(self) -> str:
        """Return the text of the file. Raises ``error``."""
        self._text = await asyncio.to_thread(self._read)
        return self._text

    async def watch(self, on_change: Callable[[str, str], object]) -> None:
        """Call back with the text and the file name whenever the text changes, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await self.look(on_change)
            except Exception:
                # A listener's bug must not keep the next change from being noticed.
                _logger.exception("a change of %s could not be applied; the file is still watched", self.path)

    async def look(self, on_change: Callable[[str, str], object]) -> None:
        """Check the file once. If it is missing for a moment, the next check finds it; until then the log has one
        line."""
        try:
            text = await asyncio.to_thread(self._read)
        except OperatorError as error:
            if not self._is_missing:
                _logger.warning("%s; what it said before stays in use", error.message)
            self._is_missing = True
            return
        self._is_missing = False
        if text != self._text:
            self._text = text
            on_change(text, str(self.path))

    def _read(self) -> str:
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(unreadable(self.path, error)) from error
