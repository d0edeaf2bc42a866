"""A versioned document in a file of one machine, read and watched.

A watcher compares the file's identity, size and times at an interval. It polls, because that works on every file system
and costs one ``stat``.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tao.model.errors import unreadable
from tao.topology.watched_document import Document, Failure, NoDocument, WatchedDocument

_Signature = tuple[int, int, int]


class DocumentFile(WatchedDocument[Document, Failure]):
    """The `DocumentStore` port over a file. Reads run in a thread, because a slow disk must not hold up hits."""

    def __init__(self, path: Path, poll_seconds: float, on_error: Callable[[Failure], None]) -> None:
        """``poll_seconds`` bounds how stale a watcher may be; half a second is far below the time that people and
        probes take to decide a change. For ``on_error`` see `WatchedDocument`."""
        super().__init__(str(path), on_error)
        self._path: Final = path
        self._poll_seconds: Final = poll_seconds
        self._signature: _Signature | None = None
        self._parsed: tuple[_Signature, Document] | None = None

    @abstractmethod
    def _parse(self, text: bytes) -> Document:
        """Return the document of a text. Raises the failure."""

    async def load(self) -> Document:
        """Return the document. Raises the failure when there is none or it is wrong."""
        return self._loaded(await asyncio.to_thread(self._read_if_changed))

    def _look_again(self) -> None:
        self._signature = None

    async def _follow(self) -> None:
        while True:
            try:
                signature = await asyncio.to_thread(self._look)
                if signature != self._signature:
                    document = await asyncio.to_thread(self._read_if_changed)
                    # Only now: a document that could not be used is tried again each time, in case the writer is still
                    # at it and the file's times are too coarse to show it.
                    self._signature = signature
                    self._use(document)
            except NoDocument:
                pass
            except self.failure as error:
                self._report(error)
            except Exception as error:  # noqa: BLE001 - a server must not stop following a document for one bad look
                self._report(self.failure(f"{self._path}: looking at it failed: {error!r}"))
            await asyncio.sleep(self._poll_seconds)

    def _look(self) -> _Signature:
        try:
            found = self._path.stat()
        except OSError as error:
            raise self.failure(unreadable(self._path, error)) from error
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read_if_changed(self) -> Document:
        """Return the document, parsed again only when the file has changed: a server whose leader is gone looks for a
        newer one several times a second, and a large document takes a tenth of a second."""
        signature = self._look()
        parsed = self._parsed
        if parsed is not None and parsed[0] == signature:
            return parsed[1]
        document = self._read()
        self._parsed = signature, document
        return document

    def _read(self) -> Document:
        try:
            text = self._path.read_bytes()
        except OSError as error:
            raise self.failure(unreadable(self._path, error)) from error
        return self._parse(text)
