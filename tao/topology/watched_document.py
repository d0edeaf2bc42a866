"""A versioned document that listeners hear of, wherever it is kept.

A document that is missing, half written, wrong, or not newer than the one in use is reported, and the last good one
stays in force. `tao.topology.document_file` finds documents in a file, and `tao.topology.etcd_document` in etcd.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, Generic, TypeVar

from tao.model.errors import OperatorError
from tao.model.ports import Versioned

_logger = logging.getLogger(__name__)

Document = TypeVar("Document", bound=Versioned)
Failure = TypeVar("Failure", bound=OperatorError)


class NoDocument(Exception):
    """There is no document, and there need not be one."""


class WatchedDocument(ABC, Generic[Document, Failure]):
    """The `DocumentStore` port without the place of the document."""

    failure: type[Failure]
    """What is raised, and reported, for a document that cannot be used."""

    what: ClassVar[str]
    """The document in log messages."""

    advice: ClassVar[str] = "servers keep the former document until the version is raised"
    """What follows from a document that is not newer than the one in use."""

    def __init__(self, place: str, on_error: Callable[[Failure], None]) -> None:
        """``place`` names the document in errors. ``on_error`` is called with each different problem of a watched
        document once."""
        self._place: Final = place
        self._on_error: Final = on_error
        self._loaded_version = 0
        self._watchers: dict[object, tuple[Callable[[Document], None], int]] = {}
        self._following: asyncio.Task[None] | None = None
        self._seen: Document | None = None
        self._last_problem = ""

    @abstractmethod
    async def load(self) -> Document:
        """Return the document. Raises the failure when there is none or it is wrong."""

    @abstractmethod
    async def _follow(self) -> None:
        """Use each document and report each problem, until cancelled."""

    @abstractmethod
    def _look_again(self) -> None:
        """Use the present document again: a new watcher may know less than the others."""

    def watch(self, on_change: Callable[[Document], None]) -> Callable[[], None]:
        """Call back, in the loop, on every document newer than the one that `load` returned last (or on the first, when
        none was loaded) until the returned function is called."""
        token = object()
        self._watchers[token] = (on_change, self._loaded_version)
        self._look_again()
        if self._following is None:
            self._following = asyncio.get_running_loop().create_task(self._follow(), name=f"watch {self._place}")

        def stop() -> None:
            self._watchers.pop(token, None)
            if not self._watchers and self._following is not None:
                self._following.cancel()
                self._following = None

        return stop

    def _loaded(self, document: Document) -> Document:
        """Note that `load` returns this document."""
        self._loaded_version = max(self._loaded_version, document.version)
        self._seen = self._seen or document
        return document

    def _use(self, document: Document) -> None:
        """Call the watchers that do not have the document yet. Raises the failure when it is not newer than the one in
        use, and another one."""
        seen = self._seen
        if seen is not None and document.version <= seen.version and document != seen:
            raise self.failure(
                f"{self._place}: changed, but its version {document.version} is not above {seen.version}; {self.advice}"
            )
        self._seen = document
        self._last_problem = ""
        for token, (on_change, known) in tuple(self._watchers.items()):
            if token in self._watchers and document.version > known:
                self._watchers[token] = (on_change, document.version)
                try:
                    on_change(document)
                except Exception as error:
                    # A fault of one watcher must not keep the document from the others.
                    _logger.exception("a watcher failed on %s version %d", self.what, document.version)
                    text = f"a watcher failed on {self.what} version {document.version}: {error!r}"
                    self._report(self.failure(text))

    def _report(self, error: Failure) -> None:
        """Report each different problem once. A listener that fails at it must not end the watch."""
        if error.message == self._last_problem:
            return
        self._last_problem = error.message
        try:
            self._on_error(error)
        except Exception:
            _logger.exception("the listener for an unusable %s failed; the watch goes on: %s", self.what, error.message)
