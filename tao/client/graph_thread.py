"""The thread of a synchronous client: an event loop of its own, started when first used *in this process*.

The one place of the client with a thread. After ``os.fork`` (pre-fork servers) the child starts its own and leaves what
it inherited untouched, unclosed even: loop and sockets are shared with the parent, and closing them here would disturb
it there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from tao.client.graph import Graph, connect
from tao.client.settings import ClientSettings
from tao.model.errors import Unavailable
from tao.wire.identity import Credentials

Result = TypeVar("Result")
Opener = Callable[[], Coroutine[Any, Any, Graph]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A graph, its loop and the thread that runs it."""

    graph: Graph
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


_everyone: weakref.WeakSet[GraphThread] = weakref.WeakSet()
_inherited: list[_Running] = []  # of the parent process: kept for ever, so that no finalizer closes its sockets


def _after_fork_in_child() -> None:
    for each in _everyone:
        each._forget_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


class GraphThread:
    """Opens a graph when first used, runs its operations and closes it; what is left open is closed at exit."""

    def __init__(
        self,
        target: str,
        *,
        region: str | None = None,
        tier: str | None = None,
        settings: ClientSettings | None = None,
        credentials: Credentials | None = None,
        opener: Opener | None = None,
    ) -> None:
        """As `tao.client.connect`. ``opener``: opens the graph in another way, for tests."""

        async def open_graph() -> Graph:
            return await connect(target, region=region, tier=tier, settings=settings, credentials=credentials)

        self._opener = opener or open_graph
        self._lock = threading.Lock()
        self._running: _Running | None = None
        self._closed = False
        _everyone.add(self)
        atexit.register(self.close)

    def close(self) -> None:
        """Close; harmless to repeat. Raises nothing for a graph that was never used."""
        with self._lock:
            self._closed = True
            running, self._running = self._running, None
        atexit.unregister(self.close)
        if running is not None:
            asyncio.run_coroutine_threadsafe(running.graph.close(), running.loop).result()
            _stop(running.loop, running.thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _forget_parent(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held the old one
        if self._running is not None:
            _inherited.append(self._running)
            self._running = None

    def _open(self) -> _Running:
        running = self._running
        if running is not None:
            return running
        with self._lock:
            if self._closed:
                raise Unavailable("the graph is closed")
            if self._running is None:
                loop = uvloop.new_event_loop()
                thread = threading.Thread(target=loop.run_forever, name="tao-client", daemon=True)
                thread.start()
                try:
                    graph = asyncio.run_coroutine_threadsafe(self._opener(), loop).result()
                except BaseException:
                    _stop(loop, thread)
                    raise
                self._running = _Running(graph, loop, thread)
            return self._running

    def _run(self, operation: Callable[[Graph], Coroutine[Any, Any, Result]]) -> Result:
        running = self._open()
        future = asyncio.run_coroutine_threadsafe(operation(running.graph), running.loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # the caller was interrupted (Ctrl-C); harmless when the operation itself has failed
            raise


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
