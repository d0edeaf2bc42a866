"""`SyncGraph`: the operations of `Graph` without ``await``, for Django, Flask and scripts.

Each operation runs on an event loop in a thread of its own, which starts on first use *in this process*. Any number of
threads may use one `SyncGraph`; their queries of the same tick travel in one message.

After ``os.fork`` (pre-fork servers) the child starts a loop of its own. It leaves the inherited one untouched and
unclosed: loop and sockets are shared with the parent, and closing them in the child would disturb the parent.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack

import uvloop

from tao.client.consistency import Freshness
from tao.client.diagnostics import ClientStats, Trace
from tao.client.graph import Graph, connect
from tao.client.own_writes import OwnWrites, Recording, recording_of
from tao.client.reads import PAGE_EDGES
from tao.client.settings import ClientSettings
from tao.client.values import Assoc
from tao.model.errors import Unavailable
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.schema.registry import Schema
from tao.wire.identity import Credentials

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Opener = Callable[[], Coroutine[Any, Any, Graph]]


@dataclass(frozen=True, slots=True)
class _RunningGraph:
    """A graph, its loop and the thread that runs it."""

    graph: Graph
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


_graph_threads: weakref.WeakSet[GraphThread] = weakref.WeakSet()
_inherited: list[_RunningGraph] = []
# The graphs of the parent process. They are kept for ever, so that no finalizer closes their sockets.


def _after_fork_in_child() -> None:
    for each in _graph_threads:
        each._forget_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


class GraphThread:
    """A thread with an event loop that opens a graph on first use, runs its operations, and closes it, at exit at the
    latest."""

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
        """Take the arguments of `tao.client.connect`. ``opener`` opens the graph in another way, for tests."""

        async def open_graph() -> Graph:
            return await connect(target, region=region, tier=tier, settings=settings, credentials=credentials)

        self._opener = opener or open_graph
        self._lock = threading.Lock()
        self._running: _RunningGraph | None = None
        self._closed = False
        _graph_threads.add(self)
        atexit.register(self.close)

    def close(self) -> None:
        """Close the graph and stop its thread. Closing again, or closing a graph that was never used, does nothing."""
        with self._lock:
            self._closed = True
            running, self._running = self._running, None
        atexit.unregister(self.close)
        if running is not None:
            asyncio.run_coroutine_threadsafe(running.graph.close(), running.loop).result()
            _stop(running.loop, running.thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> Graph | None:
        running = self._running
        return None if running is None else running.graph

    def _own_writes(self) -> OwnWrites | None:
        graph = self._opened()
        return None if graph is None else graph._own_writes

    def _forget_parent(self) -> None:
        self._lock = threading.Lock()  # a thread of the parent may hold the old one for ever
        if self._running is not None:
            _inherited.append(self._running)
            self._running = None

    def _open(self) -> _RunningGraph:
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
                self._running = _RunningGraph(graph, loop, thread)
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


def blocking(
    operation: Callable[Concatenate[Graph, Arguments], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[GraphThread, Arguments], Result]:
    """Return the operation of a graph as a method that blocks until it is done, with its signature and docstring."""

    @wraps(operation)
    def run(self: GraphThread, /, *given: Arguments.args, **named: Arguments.kwargs) -> Result:
        return self._run(lambda graph: operation(graph, *given, **named))

    return run


class SyncGraph(GraphThread):
    """All methods of `Graph`, blocking; `Graph` documents them. It is opened on first use. Call `close`, or use it as a
    context manager; a graph that is left open is closed at exit.

    gRPC does not survive a fork that happens while it is in use. A program that forks should use the graph first in the
    child, or connect over frames."""

    def servers(self) -> dict[str, dict[str, object]]:
        async def look(graph: Graph) -> dict[str, dict[str, object]]:
            return graph.servers()

        return self._run(look)

    @property
    def schema(self) -> Schema:
        return self._open().graph.schema

    @property
    def topology(self) -> Topology:
        return self._open().graph.topology

    @property
    def region(self) -> str:
        return self._open().graph.region

    @property
    def stats(self) -> ClientStats:
        return self._open().graph.stats

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        with self._open().graph.trace() as trace:
            yield trace

    @property
    def token(self) -> WriteToken:
        async def read(graph: Graph) -> WriteToken:
            return graph.token  # on the loop's thread, which is the only one that changes it

        return self._run(read)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        # An operation runs in a copy of the calling thread's context, so the loop's thread finds the recording there.
        # The graph may be opened within the block.
        with recording_of(self._own_writes) as recording:
            yield recording

    obj_get = blocking(Graph.obj_get)
    obj_get_many = blocking(Graph.obj_get_many)
    assoc_get = blocking(Graph.assoc_get)
    assoc_get_many = blocking(Graph.assoc_get_many)
    assoc_count = blocking(Graph.assoc_count)
    assoc_count_many = blocking(Graph.assoc_count_many)
    assoc_range = blocking(Graph.assoc_range)
    assoc_range_many = blocking(Graph.assoc_range_many)
    assoc_time_range = blocking(Graph.assoc_time_range)
    assoc_time_range_many = blocking(Graph.assoc_time_range_many)
    assoc_page = blocking(Graph.assoc_page)
    obj_add = blocking(Graph.obj_add)
    obj_add_many = blocking(Graph.obj_add_many)
    obj_update = blocking(Graph.obj_update)
    obj_update_many = blocking(Graph.obj_update_many)
    obj_delete = blocking(Graph.obj_delete)
    obj_delete_many = blocking(Graph.obj_delete_many)
    assoc_add = blocking(Graph.assoc_add)
    assoc_add_many = blocking(Graph.assoc_add_many)
    assoc_delete = blocking(Graph.assoc_delete)
    assoc_delete_many = blocking(Graph.assoc_delete_many)
    assoc_change_type = blocking(Graph.assoc_change_type)
    assoc_change_type_many = blocking(Graph.assoc_change_type_many)
    reserve_ids = blocking(Graph.reserve_ids)

    def assoc_iter(
        self,
        id1: int,
        atype: str,
        *,
        high: int | None = None,
        low: int | None = None,
        page: int = PAGE_EDGES,
        **freshness: Unpack[Freshness],
    ) -> Iterator[Assoc]:
        cursor: str | None = None
        while True:
            result = self.assoc_page(id1, atype, page, cursor, high, low, **freshness)
            yield from result.edges
            cursor = result.cursor
            if cursor is None:
                return
