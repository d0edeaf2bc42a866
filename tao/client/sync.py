"""`SyncGraph`: the operations of `Graph` without ``await``, for Django, Flask and scripts (DESIGN.md §12).

The one place of the client with a thread: an event loop of its own, started when first used *in this process*. After
``os.fork`` (pre-fork servers) the child starts its own and leaves what it inherited untouched, unclosed even: loop and
sockets are shared with the parent, and closing them here would disturb it there. Any number of threads may use one
`SyncGraph`; what they ask in the same instant travels together.
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

from tao.client.graph import Graph, connect
from tao.client.own_writes import After, Recording
from tao.client.settings import ClientSettings
from tao.client.stats import ClientStats
from tao.client.trace import Trace
from tao.client.values import AssocList, Object
from tao.model.errors import Unavailable
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.schema.registry import Schema
from tao.wire.identity import Credentials

Result = TypeVar("Result")
Fields = Mapping[str, object]
Opener = Callable[[], Coroutine[Any, Any, Graph]]


@dataclass(frozen=True, slots=True)
class _Running:
    """A graph, its loop and the thread that runs it."""

    graph: Graph
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread


_everyone: weakref.WeakSet[SyncGraph] = weakref.WeakSet()
_inherited: list[_Running] = []  # of the parent process: kept for ever, so that no finalizer closes its sockets


def _after_fork_in_child() -> None:
    for each in _everyone:
        each._forget_parent()


os.register_at_fork(after_in_child=_after_fork_in_child)


class SyncGraph:
    """All methods of `Graph`, blocking. Opened when first used; `close` it, or use it as a context manager; what is
    left open is closed at exit. Each method has its text at `Graph`.

    gRPC does not outlive a fork that happens while it is in use: programs that fork use the graph first in the child,
    or connect over frames."""

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
            return graph.token  # in the loop, where writes change it

        return self._run(read)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        # What this thread asks for runs in a copy of its context, so the loop's thread finds the recording there.
        with self._open().graph.recording() as recording:
            yield recording

    def obj_get(
        self,
        id: int,
        otype: str | None = None,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> Object | None:
        return self._run(
            lambda graph: graph.obj_get(id, otype, critical=critical, after=after, max_staleness_ms=max_staleness_ms)
        )

    def obj_get_many(
        self, ids: Iterable[int], *, critical: bool = False, after: After = None, max_staleness_ms: int | None = None
    ) -> list[Object | None]:
        return self._run(
            lambda graph: graph.obj_get_many(ids, critical=critical, after=after, max_staleness_ms=max_staleness_ms)
        )

    def assoc_get(
        self,
        id1: int,
        atype: str,
        id2s: Iterable[int],
        high: int | None = None,
        low: int | None = None,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        return self._run(
            lambda graph: graph.assoc_get(
                id1, atype, id2s, high, low, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_get_many(
        self,
        queries: Iterable[Sequence[Any]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        return self._run(
            lambda graph: graph.assoc_get_many(
                queries, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_count(
        self, id1: int, atype: str, *, critical: bool = False, after: After = None, max_staleness_ms: int | None = None
    ) -> int:
        return self._run(
            lambda graph: graph.assoc_count(
                id1, atype, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_count_many(
        self,
        lists: Iterable[tuple[int, str]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[int]:
        return self._run(
            lambda graph: graph.assoc_count_many(
                lists, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_range(
        self,
        id1: int,
        atype: str,
        pos: int,
        limit: int,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        return self._run(
            lambda graph: graph.assoc_range(
                id1, atype, pos, limit, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_range_many(
        self,
        queries: Iterable[tuple[int, str, int, int]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        return self._run(
            lambda graph: graph.assoc_range_many(
                queries, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_time_range(
        self,
        id1: int,
        atype: str,
        high: int | None,
        low: int | None,
        limit: int,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocList:
        return self._run(
            lambda graph: graph.assoc_time_range(
                id1, atype, high, low, limit, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_time_range_many(
        self,
        queries: Iterable[tuple[int, str, int | None, int | None, int]],
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> list[AssocList]:
        return self._run(
            lambda graph: graph.assoc_time_range_many(
                queries, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

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

    def assoc_add(self, id1: int, atype: str, id2: int, time: int | None = None, fields: Fields | None = None) -> None:
        return self._run(lambda graph: graph.assoc_add(id1, atype, id2, time, fields))

    def assoc_add_many(self, edges: Iterable[Sequence[Any]]) -> None:
        return self._run(lambda graph: graph.assoc_add_many(edges))

    def assoc_delete(self, id1: int, atype: str, id2: int) -> bool:
        return self._run(lambda graph: graph.assoc_delete(id1, atype, id2))

    def assoc_delete_many(self, edges: Iterable[tuple[int, str, int]]) -> list[bool]:
        return self._run(lambda graph: graph.assoc_delete_many(edges))

    def assoc_change_type(self, id1: int, atype: str, id2: int, new_atype: str) -> bool:
        return self._run(lambda graph: graph.assoc_change_type(id1, atype, id2, new_atype))

    def assoc_change_type_many(self, edges: Iterable[tuple[int, str, int, str]]) -> list[bool]:
        return self._run(lambda graph: graph.assoc_change_type_many(edges))

    def reserve_ids(self, count: int, near: int | None = None, shard: int | None = None) -> list[int]:
        return self._run(lambda graph: graph.reserve_ids(count, near, shard))


def _stop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
