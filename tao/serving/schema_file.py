"""The schema file, watched: a changed file is in use within a second, without a restart (DESIGN.md §2)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tao.model.errors import SchemaError
from tao.schema.registry import Schema, load_schema

_logger = logging.getLogger(__name__)


class SchemaFile:
    """Reads the file in a thread: a slow disk must not hold up hits."""

    def __init__(self, path: Path, *, poll_seconds: float = 1.0) -> None:
        """``poll_seconds``: one ``stat`` a second costs nothing, and people wait longer than that for a roll-out."""
        self._path: Final = path
        self._poll_seconds: Final = poll_seconds
        self._text = ""

    async def load(self) -> Schema:
        """The schema as it is. Raises `SchemaError`."""
        self._text = await asyncio.to_thread(self._read)
        return load_schema(self._text, str(self._path))

    async def watch(self, on_change: Callable[[str, str], object]) -> None:
        """Call back with text and file name whenever the text changes, until cancelled."""
        while True:
            await asyncio.sleep(self._poll_seconds)
            try:
                await self.look(on_change)
            except Exception:
                # A listener's bug must not keep the next schema from being noticed.
                _logger.exception("a change of %s could not be followed; the file is watched on", self._path)

    async def look(self, on_change: Callable[[str, str], object]) -> None:
        """Look once. A file that is missing for a moment, as some editors make it, is looked for again later."""
        try:
            text = await asyncio.to_thread(self._read)
        except SchemaError:
            return
        if text != self._text:
            self._text = text
            on_change(text, str(self._path))

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8")
        except OSError as error:
            raise SchemaError(f"{self._path}: cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise SchemaError(f"{self._path}: is not UTF-8: {error.reason} at byte {error.start}") from error
