"""A versioned document in a file of one machine, read and watched.

A watcher compares the file's identity, size and times at an interval. It polls, because that works on every file system
and costs one ``stat``. A document that is missing, half written or wrong (edited by hand) is reported, and the last
good one stays in force.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Final, Generic, TypeVar

from tao.model.errors import OperatorError
from tao.model.ports import Versioned

_logger = logging.getLogger(__name__)

_Signature = tuple[int, int, int]
Document = TypeVar("Document", bound=Versioned)
Failure = TypeVar("Failure", bound=OperatorError)


class NoDocument(Exception):
    """There is no document, and there need not be one."""


class DocumentFile(ABC, Generic[Document, Failure]):
    """The `DocumentStore` port over a file. Reads run in a thread, because a slow disk must not hold up hits."""

    failure: type[Failure]
    """What is raised, and reported, for a document that cannot be used."""

    what: ClassVar[str]
    """The document in log messages."""

    def __init__(self, path: Path, poll_seconds: float, on_error: Callable[[Failure], None]) -> None:
        """``poll_seconds`` bounds how stale a watcher may be; half a second is far below the time that people and
        probes take to decide a change. ``on_error`` is called with each different problem of a watched document
        once."""
        self._path: Final = path
        self._poll_seconds: Final = poll_seconds
        self._on_error: Final = on_error
        self._loaded_version = 0
        self._watchers: dict[object, tuple[Callable[[Document], None], int]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._signature: _Signature | None = None
        self._seen: Document | None = None
        self._parsed: tuple[_Signature, Document] | None = None
        self._last_problem = ""

    @abstractmethod
    def _parse(self, text: bytes) -> Document:
        """Return the document of a text. Raises the failure."""

    async def load(self) -> Document:
        """Return the document. Raises the failure when there is none or it is wrong."""
        document = await asyncio.to_thread(self._read_if_changed)
        self._loaded_version = max(self._loaded_version, document.version)
        self._seen = self._seen or document
        return document

    def watch(self, on_change: Callable[[Document], None]) -> Callable[[], None]:
        """Call back, in the loop, on every document newer than the one that `load` returned last (or on the first, when
        none was loaded) until the returned function is called."""
        token = object()
        self._watchers[token] = (on_change, self._loaded_version)
        self._signature = None  # read again: this watcher may know less than the others
        if self._watching is None:
            self._watching = asyncio.get_running_loop().create_task(self._poll(), name=f"watch {self._path}")

        def stop() -> None:
            self._watchers.pop(token, None)
            if not self._watchers and self._watching is not None:
                self._watching.cancel()
                self._watching = None

        return stop

    async def _poll(self) -> None:
        while True:
            try:
                signature = await asyncio.to_thread(self._look)
                if signature != self._signature:
                    document = await asyncio.to_thread(self._read_if_changed)
                    # Only now: a document that could not be used is tried again each time, in case the writer is still
                    # at it and the file's times are too coarse to show it.
                    self._signature = signature
                    self._check_succession(document)
                    self._last_problem = ""
                    self._tell(document)
            except NoDocument:
                pass
            except self.failure as error:
                self._report(error)
            except Exception as error:  # noqa: BLE001 - a server must not stop following a document for one bad look
                self._report(self.failure(f"{self._path}: looking at it failed: {error!r}"))
            await asyncio.sleep(self._poll_seconds)

    def _report(self, error: Failure) -> None:
        """Report each different problem once. A listener that fails at it must not end the watch."""
        if error.message == self._last_problem:
            return
        self._last_problem = error.message
        try:
            self._on_error(error)
        except Exception:
            _logger.exception("whoever hears of an unusable %s failed; the watch goes on: %s", self.what, error.message)

    def _check_succession(self, document: Document) -> None:
        """Return whether a document is newer than the watcher's; a document of the same or a lower version is never
        used."""
        seen = self._seen
        if seen is not None and document.version <= seen.version and document != seen:
            raise self.failure(
                f"{self._path}: changed, but its version {document.version} is not above {seen.version}; "
                "servers keep the former document until the version is raised"
            )
        self._seen = document

    def _tell(self, document: Document) -> None:
        for token, (on_change, known) in tuple(self._watchers.items()):
            if token in self._watchers and document.version > known:
                self._watchers[token] = (on_change, document.version)
                try:
                    on_change(document)
                except Exception as error:
                    # A fault of one watcher must not keep the document from the others.
                    _logger.exception("a watcher failed on %s version %d", self.what, document.version)
                    told = f"a watcher failed on {self.what} version {document.version}: {error!r}"
                    self._report(self.failure(told))

    def _look(self) -> _Signature:
        try:
            found = self._path.stat()
        except OSError as error:
            raise self.failure(f"{self._path}: cannot be read: {error.strerror}") from error
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
            raise self.failure(f"{self._path}: cannot be read: {error.strerror}") from error
        return self._parse(text)
