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
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast, overload

import uvloop

from tao.client.consistency import Freshness, from_keywords
from tao.client.diagnostics import ClientStats, Trace
from tao.client.edge_sets import EdgeCount, EdgeSet, SetDescription, SetPage, expression_in
from tao.client.graph import Graph, connect
from tao.client.jobs import Job
from tao.client.journaled import Later, journaled_writes
from tao.client.own_writes import OwnWrites, Recording, recording_of
from tao.client.reads import PAGE_EDGES
from tao.client.settings import ClientSettings
from tao.client.two_hops import KeptTwoHops, TwoHops, Weigh
from tao.client.validation import check_number
from tao.client.values import Accepted, AddedObject, Assoc, EdgeWrite
from tao.model.errors import Unavailable
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.schema.registry import Schema
from tao.sets.evaluation import MAX_PAGE
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
                graph._make_receipt = partial(SyncAccepted, wait=graph.applied, graph=self)
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


def run_on(graph: GraphThread, operation: Callable[[Graph], Coroutine[Any, Any, Result]]) -> Result:
    """Run what is built on a graph on its event loop, and block until it is done. Raises what the operation raises."""
    return graph._run(operation)


class SyncEdgeSet(SetDescription):
    """A set of edges of a `SyncGraph`: the methods of `EdgeSet`, blocking, and ``for`` in place of ``async for``."""

    __slots__ = ()
    _graph: GraphThread

    def page(self, limit: int, cursor: str | None = None, **freshness: Unpack[Freshness]) -> SetPage:
        return self._graph._run(lambda graph: self._of(graph).page(limit, cursor, **freshness))

    def count(self, limit: int, **freshness: Unpack[Freshness]) -> EdgeCount:
        return self._graph._run(lambda graph: self._of(graph).count(limit, **freshness))

    def among(self, ids: Iterable[int], **freshness: Unpack[Freshness]) -> dict[int, Assoc]:
        return self._graph._run(lambda graph: self._of(graph).among(ids, **freshness))

    def walk(self, *, page: int = MAX_PAGE, **freshness: Unpack[Freshness]) -> Iterator[Assoc]:
        consistency = from_keywords(**freshness) if freshness else None
        check_number(page, "page", 1, MAX_PAGE)
        evaluation = self._graph._open().graph._evaluation(self._expression)
        while True:
            found = self._graph._run(lambda graph: graph._page_of(evaluation, page, consistency))
            yield from found.edges
            if found.cursor is None:
                return

    def __iter__(self) -> Iterator[Assoc]:
        return self.walk()

    def _of(self, graph: Graph) -> EdgeSet:
        return EdgeSet(graph, self._expression)


@dataclass(frozen=True, slots=True, repr=False)
class SyncAccepted(Accepted):
    """The receipt of a write that a `SyncGraph` had accepted: as `tao.client.Accepted`, blocking."""

    graph: GraphThread = field(compare=False)

    def applied(self, timeout: float | None = None) -> WriteToken:  # type: ignore[override]  # as `SyncGraph` blocks
        return self.graph._run(lambda graph: graph.applied(self, timeout))


@overload
def _blocking_write(
    operation: Callable[Concatenate[Graph, Arguments], Coroutine[Any, Any, AddedObject]],
) -> Callable[Concatenate[GraphThread, Arguments], AddedObject[SyncAccepted]]: ...
@overload
def _blocking_write(
    operation: Callable[Concatenate[Graph, Arguments], Coroutine[Any, Any, list[AddedObject]]],
) -> Callable[Concatenate[GraphThread, Arguments], list[AddedObject[SyncAccepted]]]: ...
@overload
def _blocking_write(
    operation: Callable[Concatenate[Graph, Arguments], Coroutine[Any, Any, EdgeWrite]],
) -> Callable[Concatenate[GraphThread, Arguments], EdgeWrite[SyncAccepted]]: ...
@overload
def _blocking_write(
    operation: Callable[Concatenate[Graph, Arguments], Coroutine[Any, Any, list[EdgeWrite]]],
) -> Callable[Concatenate[GraphThread, Arguments], list[EdgeWrite[SyncAccepted]]]: ...
def _blocking_write(
    operation: Callable[Concatenate[Graph, Arguments], Coroutine[Any, Any, object]],
) -> Callable[Concatenate[GraphThread, Arguments], object]:
    """Return a write as `blocking` does. The types say that its receipts block, which `GraphThread` has them do."""
    return blocking(operation)


class SyncJob:
    """A background job of a `SyncGraph`: as `tao.client.Job`, blocking."""

    def __init__(self, graph: GraphThread, job: Job) -> None:
        self._graph = graph
        self._job = job
        self.id = job.id

    @property
    def receipt(self) -> SyncAccepted | None:
        return cast(SyncAccepted | None, self._job.receipt)

    @property
    def state(self) -> str:
        return self._job.state

    @property
    def done(self) -> bool:
        return self._job.done

    @property
    def edges(self) -> int:
        return self._job.edges

    @property
    def error(self) -> str:
        return self._job.error

    def refresh(self) -> SyncJob:
        self._graph._run(lambda _: self._job.refresh())
        return self

    def wait(self, timeout: float | None = None) -> SyncJob:
        self._graph._run(lambda _: self._job.wait(timeout))
        return self

    def cancel(self) -> bool:
        return self._graph._run(lambda _: self._job.cancel())

    def __repr__(self) -> str:
        return f"<SyncJob {self.id}: {self.state}, {self.edges} edges>"


@overload
def _blocking_later(
    operation: Callable[Concatenate[Later, Arguments], Coroutine[Any, Any, Accepted]],
) -> Callable[Concatenate[SyncLater, Arguments], SyncAccepted]: ...
@overload
def _blocking_later(
    operation: Callable[Concatenate[Later, Arguments], Coroutine[Any, Any, list[Accepted]]],
) -> Callable[Concatenate[SyncLater, Arguments], list[SyncAccepted]]: ...
def _blocking_later(
    operation: Callable[Concatenate[Later, Arguments], Coroutine[Any, Any, object]],
) -> Callable[Concatenate[SyncLater, Arguments], object]:
    @wraps(operation)
    def run(self: SyncLater, /, *given: Arguments.args, **named: Arguments.kwargs) -> object:
        return self._graph._run(lambda graph: operation(graph.later, *given, **named))

    return run


class SyncLater:
    """The methods of `Later`, blocking, and so are their receipts."""

    def __init__(self, graph: GraphThread) -> None:
        self._graph = graph

    obj_add = _blocking_later(Later.obj_add)
    obj_add_many = _blocking_later(Later.obj_add_many)
    assoc_add = _blocking_later(Later.assoc_add)
    assoc_add_many = _blocking_later(Later.assoc_add_many)
    assoc_delete = _blocking_later(Later.assoc_delete)
    assoc_delete_many = _blocking_later(Later.assoc_delete_many)
    assoc_archive = _blocking_later(Later.assoc_archive)
    assoc_restore = _blocking_later(Later.assoc_restore)
    assoc_set_state = _blocking_later(Later.assoc_set_state)
    assoc_set_state_many = _blocking_later(Later.assoc_set_state_many)
    node_set_state = _blocking_later(Later.node_set_state)
    add_job = _blocking_later(Later.add_job)


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

    @property
    def later(self) -> SyncLater:
        return SyncLater(self)

    @contextmanager
    def journaled(self, priority: str = "normal") -> Iterator[None]:
        # As with `recording`, the loop's thread finds the priority in the copy of the calling thread's context.
        with journaled_writes(priority):
            yield

    applied = blocking(Graph.applied)
    obj_get = blocking(Graph.obj_get)
    obj_get_many = blocking(Graph.obj_get_many)
    assoc_get = blocking(Graph.assoc_get)
    assoc_get_many = blocking(Graph.assoc_get_many)
    assoc_exists = blocking(Graph.assoc_exists)
    assoc_exists_many = blocking(Graph.assoc_exists_many)
    assoc_count = blocking(Graph.assoc_count)
    assoc_count_many = blocking(Graph.assoc_count_many)
    assoc_range = blocking(Graph.assoc_range)
    assoc_range_many = blocking(Graph.assoc_range_many)
    assoc_time_range = blocking(Graph.assoc_time_range)
    assoc_time_range_many = blocking(Graph.assoc_time_range_many)
    assoc_page = blocking(Graph.assoc_page)
    obj_add = _blocking_write(Graph.obj_add)
    obj_add_many = _blocking_write(Graph.obj_add_many)
    obj_update = blocking(Graph.obj_update)
    obj_update_many = blocking(Graph.obj_update_many)
    obj_delete = blocking(Graph.obj_delete)
    obj_delete_many = blocking(Graph.obj_delete_many)
    assoc_add = _blocking_write(Graph.assoc_add)
    assoc_add_many = _blocking_write(Graph.assoc_add_many)
    assoc_delete = _blocking_write(Graph.assoc_delete)
    assoc_delete_many = _blocking_write(Graph.assoc_delete_many)
    assoc_archive = _blocking_write(Graph.assoc_archive)
    assoc_restore = _blocking_write(Graph.assoc_restore)
    assoc_set_state = _blocking_write(Graph.assoc_set_state)
    assoc_set_state_many = _blocking_write(Graph.assoc_set_state_many)
    assoc_state = blocking(Graph.assoc_state)
    assoc_change_type = _blocking_write(Graph.assoc_change_type)
    assoc_change_type_many = _blocking_write(Graph.assoc_change_type_many)
    reserve_ids = blocking(Graph.reserve_ids)
    counter_add = blocking(Graph.counter_add)
    counter_get = blocking(Graph.counter_get)
    counter_get_many = blocking(Graph.counter_get_many)
    mutual = blocking(Graph.mutual)

    def job(self, id: int) -> SyncJob:  # noqa: A002 - as in `Graph.job`
        return SyncJob(self, self._open().graph.job(id))

    def add_job(
        self,
        kind: str,
        body: Mapping[str, object],
        *,
        near: int,
        priority: str = "normal",
        id: int | None = None,  # noqa: A002 - as in `Graph.add_job`
    ) -> SyncJob:
        return SyncJob(self, self._run(lambda graph: graph.add_job(kind, body, near=near, priority=priority, id=id)))

    def node_set_state(
        self,
        id: int,  # noqa: A002 - as in `Graph.node_set_state`
        state: str,
        types: Iterable[str] | None = None,
        at: int | None = None,
    ) -> SyncJob:
        return SyncJob(self, self._run(lambda graph: graph.node_set_state(id, state, types, at)))

    def edge_set(
        self, id1: int, atype: str, *, high: int | None = None, low: int | None = None, state: str | None = None
    ) -> SyncEdgeSet:
        return SyncEdgeSet(self, self._open().graph._list_term(id1, atype, high, low, state))

    def edge_union(
        self, ids: Iterable[int], atype: str, *, missing: str = "fail", state: str | None = None
    ) -> SyncEdgeSet:
        return SyncEdgeSet(self, self._open().graph._union_term(ids, atype, missing, state))

    def two_hop(
        self,
        id1: int,
        atypes: str | Sequence[str],
        *,
        limit: int = 50,
        fan_out: int = 500,
        exclude: SetDescription | None = None,
        weigh: Weigh | None = None,
        **freshness: Unpack[Freshness],
    ) -> TwoHops:
        hidden = self._described(exclude)
        return self._run(
            lambda graph: graph.two_hop(
                id1, atypes, limit=limit, fan_out=fan_out, exclude=hidden(graph), weigh=weigh, **freshness
            )
        )

    def keep_two_hop(
        self,
        id1: int,
        atypes: str | Sequence[str],
        *,
        into: str,
        limit: int = 200,
        fan_out: int = 500,
        exclude: SetDescription | None = None,
        **freshness: Unpack[Freshness],
    ) -> KeptTwoHops:
        hidden = self._described(exclude)
        return self._run(
            lambda graph: graph.keep_two_hop(
                id1, atypes, into=into, limit=limit, fan_out=fan_out, exclude=hidden(graph), **freshness
            )
        )

    def _described(self, exclude: SetDescription | None) -> Callable[[Graph], EdgeSet | None]:
        """Return what makes the set of the running graph of a set of this one."""
        if exclude is None:
            return lambda _: None
        expression = expression_in(self, exclude)
        return lambda graph: EdgeSet(graph, expression)

    def assoc_iter(
        self,
        id1: int,
        atype: str,
        *,
        high: int | None = None,
        low: int | None = None,
        page: int = PAGE_EDGES,
        state: str | None = None,
        **freshness: Unpack[Freshness],
    ) -> Iterator[Assoc]:
        cursor: str | None = None
        while True:
            result = self.assoc_page(id1, atype, page, cursor, high, low, state, **freshness)
            yield from result.edges
            cursor = result.cursor
            if cursor is None:
                return
