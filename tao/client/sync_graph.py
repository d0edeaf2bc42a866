"""`SyncGraph`: the operations of `Graph` without ``await``, for Django, Flask and scripts.

Each operation runs on an event loop in a thread of its own, which starts on first use *in this process*. Any number of
threads may use one `SyncGraph`; their queries of the same tick travel in one message.

After ``os.fork`` (pre-fork servers) the child starts a loop of its own. It leaves the inherited one untouched and
unclosed: loop and sockets are shared with the parent, and closing them in the child would disturb the parent.
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import uvloop

from tao.client.consistency import After, Consistency, from_keywords
from tao.client.diagnostics import ClientStats, Trace
from tao.client.graph import Graph, connect
from tao.client.own_writes import Recording
from tao.client.reads import PAGE_EDGES, AssocPage
from tao.client.settings import ClientSettings
from tao.client.values import Assoc, AssocList, EdgeWrite, Object
from tao.model.errors import Unavailable
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.schema.registry import Schema
from tao.wire.identity import Credentials

Result = TypeVar("Result")
Opener = Callable[[], Coroutine[Any, Any, Graph]]
Fields = Mapping[str, object]


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
        with self._open().graph.recording() as recording:
            yield recording

    def obj_get(
        self,
        id: int,
        otype: str | None = None,
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> Object | None:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.obj_get(id, otype, consistency=demand))

    def obj_get_many(
        self,
        ids: Iterable[int],
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[Object | None]:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.obj_get_many(ids, consistency=demand))

    def assoc_get(
        self,
        id1: int,
        atype: str,
        id2s: Iterable[int],
        high: int | None = None,
        low: int | None = None,
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_get(id1, atype, id2s, high, low, consistency=demand))

    def assoc_get_many(
        self,
        queries: Iterable[Sequence[Any]],
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_get_many(queries, consistency=demand))

    def assoc_count(
        self,
        id1: int,
        atype: str,
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> int:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_count(id1, atype, consistency=demand))

    def assoc_count_many(
        self,
        lists: Iterable[tuple[int, str]],
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[int]:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_count_many(lists, consistency=demand))

    def assoc_range(
        self,
        id1: int,
        atype: str,
        pos: int,
        limit: int,
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_range(id1, atype, pos, limit, consistency=demand))

    def assoc_range_many(
        self,
        queries: Iterable[tuple[int, str, int, int]],
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_range_many(queries, consistency=demand))

    def assoc_time_range(
        self,
        id1: int,
        atype: str,
        high: int | None,
        low: int | None,
        limit: int,
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_time_range(id1, atype, high, low, limit, consistency=demand))

    def assoc_time_range_many(
        self,
        queries: Iterable[tuple[int, str, int | None, int | None, int]],
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_time_range_many(queries, consistency=demand))

    def assoc_page(
        self,
        id1: int,
        atype: str,
        limit: int,
        cursor: str | None = None,
        high: int | None = None,
        low: int | None = None,
        *,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocPage:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        return self._run(lambda graph: graph.assoc_page(id1, atype, limit, cursor, high, low, consistency=demand))

    def assoc_iter(
        self,
        id1: int,
        atype: str,
        *,
        high: int | None = None,
        low: int | None = None,
        page: int = PAGE_EDGES,
        consistency: Consistency | None = None,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> Iterator[Assoc]:
        demand = from_keywords(consistency, critical, after, max_staleness_ms)
        cursor: str | None = None
        while True:
            result = self.assoc_page(id1, atype, page, cursor, high, low, consistency=demand)
            yield from result.edges
            cursor = result.cursor
            if cursor is None:
                return

    def obj_add(self, otype: str, fields: Fields | None = None, near: int | None = None, id: int | None = None) -> int:
        return self._run(lambda graph: graph.obj_add(otype, fields, near, id))

    def obj_add_many(self, objects: Iterable[Sequence[Any]]) -> list[int]:
        return self._run(lambda graph: graph.obj_add_many(objects))

    def obj_update(self, id: int, fields: Fields, otype: str | None = None) -> bool:
        return self._run(lambda graph: graph.obj_update(id, fields, otype))

    def obj_update_many(self, updates: Iterable[Sequence[Any]]) -> list[bool]:
        return self._run(lambda graph: graph.obj_update_many(updates))

    def obj_delete(self, id: int) -> bool:
        return self._run(lambda graph: graph.obj_delete(id))

    def obj_delete_many(self, ids: Iterable[int]) -> list[bool]:
        return self._run(lambda graph: graph.obj_delete_many(ids))

    def assoc_add(
        self, id1: int, atype: str, id2: int, time: int | None = None, fields: Fields | None = None
    ) -> EdgeWrite:
        return self._run(lambda graph: graph.assoc_add(id1, atype, id2, time, fields))

    def assoc_add_many(self, edges: Iterable[Sequence[Any]]) -> list[EdgeWrite]:
        return self._run(lambda graph: graph.assoc_add_many(edges))

    def assoc_delete(self, id1: int, atype: str, id2: int) -> EdgeWrite:
        return self._run(lambda graph: graph.assoc_delete(id1, atype, id2))

    def assoc_delete_many(self, edges: Iterable[tuple[int, str, int]]) -> list[EdgeWrite]:
        return self._run(lambda graph: graph.assoc_delete_many(edges))

    def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> EdgeWrite:
        return self._run(lambda graph: graph.assoc_change_type(id1, atype, id2, new_atype))

    def assoc_change_type_many(self, edges: Iterable[tuple[int, str, int, str]]) -> list[EdgeWrite]:
        return self._run(lambda graph: graph.assoc_change_type_many(edges))

    def reserve_ids(self, count: int, near: int | None = None, shard: int | None = None) -> list[int]:
        return self._run(lambda graph: graph.reserve_ids(count, near, shard))
