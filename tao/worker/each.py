"""The kinds of jobs that call a function of the application for each edge, or each object.

A function is an entry point of the group `tao.jobs`: an installed package names it, and a job names the entry point. It
is called with the graph and a page of edges or of ids, so that it can use the many-forms of the SDK. It is called again
with the same page when the worker dies before the page is reported.

An application that walks over something else has kinds of its own: entry points of the group `tao.job_kinds`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any, Final, TypeVar

import msgspec

from tao.client import Consistency, Graph
from tao.client.validation import check_state
from tao.model.errors import InvalidArgument, SettingsError
from tao.model.graph import EdgeKey
from tao.model.jobs import EACH_EDGE_KIND, EACH_OBJECT_KIND, check_kind
from tao.worker.kinds import JobKind, Page
from tao.worker.leaders import FIRST_ROW, JobLeaders, ScannedEdge

ENTRY_POINTS: Final = "tao.jobs"
KIND_ENTRY_POINTS: Final = "tao.job_kinds"

_Loaded = TypeVar("_Loaded")

EdgeFunction = Callable[[Graph, Sequence[ScannedEdge]], Awaitable[None]]
ObjectFunction = Callable[[Graph, Sequence[int]], Awaitable[None]]


class EachEdgeBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an ``each_edge`` job: the edges of one list, or with ``id1`` 0 those of all lists of a shard.
    ``state``: of edges of a type with states, by its name; empty: normal."""

    function: str
    atype: str
    id1: int = 0
    shard: int = 0
    state: str = ""


class EachObjectBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of an ``each_object`` job: the objects of a shard. ``otype``: of this type; empty: of every type."""

    function: str
    shard: int
    otype: str = ""


def load_functions() -> dict[str, Callable[..., Awaitable[None]]]:
    """Load the functions that installed packages offer, by the names of their entry points. Raises `SettingsError`."""
    return _load(ENTRY_POINTS, lambda name, found: found)


def load_kinds() -> list[JobKind]:
    """Make the kinds of jobs that installed packages offer: each entry point is a class without parameters, and has the
    name of its kind. Raises `SettingsError`."""

    def made(name: str, found: Callable[[], JobKind]) -> JobKind:
        kind = found()
        check_kind(kind.name)
        if kind.name != name:
            raise ValueError(f"its kind has the name {kind.name!r}")
        return kind

    return list(_load(KIND_ENTRY_POINTS, made).values())


def _load(group: str, made: Callable[[str, Any], _Loaded]) -> dict[str, _Loaded]:
    """Load a group of entry points. Raises `SettingsError` for one that cannot be loaded: a worker without it would
    fail its jobs one by one, or leave them waiting."""
    loaded: dict[str, _Loaded] = {}
    for point in entry_points(group=group):
        try:
            loaded[point.name] = made(point.name, point.load())
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise SettingsError(f"the entry point {point.name} = {point.value} of {group}: {why}") from error
    return loaded


class EachEdge:
    """Calls a function for every page of edges."""

    name: Final = EACH_EDGE_KIND

    def __init__(self, functions: Mapping[str, EdgeFunction], leaders: JobLeaders) -> None:
        self._functions: Final = functions
        self._leaders: Final = leaders

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`."""
        job = decoded(body, EachEdgeBody)
        function = _function(self._functions, job.function)
        if job.id1:
            return await self._page_of_list(graph, job, function, cursor.decode() or None, limit)
        return await self._page_of_shard(graph, job, function, cursor, limit)

    async def _page_of_list(
        self, graph: Graph, job: EachEdgeBody, function: EdgeFunction, cursor: str | None, limit: int
    ) -> Page:
        # A cache may lack edges that were committed before the job was added.
        master = Consistency.master()
        page = await graph.assoc_page(job.id1, job.atype, limit, cursor, state=job.state or None, consistency=master)
        edges = [ScannedEdge(job.id1, edge.id2, edge.time) for edge in page.edges]
        if edges:
            await function(graph, edges)
        return Page((page.cursor or "").encode(), len(edges), done=page.cursor is None)

    async def _page_of_shard(
        self, graph: Graph, job: EachEdgeBody, function: EdgeFunction, cursor: bytes, limit: int
    ) -> Page:
        atype = graph.schema.atype(job.atype)
        if job.state:
            atype = graph.schema.state_type(atype, check_state(job.state))
        page = await self._leaders.scan(job.shard, atype.number, 0, row_of(cursor), limit)
        if page.edges:
            await function(graph, page.edges)
        return Page(cursor_at(page.last), len(page.edges), page.done)


class EachObject:
    """Calls a function for every page of objects."""

    name: Final = EACH_OBJECT_KIND

    def __init__(self, functions: Mapping[str, ObjectFunction], leaders: JobLeaders) -> None:
        self._functions: Final = functions
        self._leaders: Final = leaders

    async def page(self, graph: Graph, body: bytes, cursor: bytes, limit: int) -> Page:
        """See `tao.worker.kinds.JobKind`."""
        job = decoded(body, EachObjectBody)
        function = _function(self._functions, job.function)
        otype = graph.schema.otype(job.otype).number if job.otype else 0
        page = await self._leaders.scan(job.shard, 0, otype, row_of(cursor), limit)
        if page.objects:
            await function(graph, page.objects)
        return Page(cursor_at(page.last), len(page.objects), page.done)


def row_of(cursor: bytes) -> EdgeKey:
    """Return the row after which a page begins."""
    return msgspec.msgpack.decode(cursor, type=EdgeKey) if cursor else FIRST_ROW


def cursor_at(row: EdgeKey) -> bytes:
    """Return the cursor of the page after a row."""
    return msgspec.msgpack.encode(row)


_Body = TypeVar("_Body", bound=msgspec.Struct)
_Function = TypeVar("_Function")


def decoded(body: bytes, kind: type[_Body]) -> _Body:
    """Return the body of a job. Raises `InvalidArgument` for one that is not of its kind."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise InvalidArgument(f"the body of the job is not that of its kind: {error}") from error


def _function(functions: Mapping[str, _Function], name: str) -> _Function:
    found = functions.get(name)
    if found is None:
        known = ", ".join(sorted(functions)) or "none"
        raise InvalidArgument(f"this worker has no function {name!r} (entry points of {ENTRY_POINTS}); it has: {known}")
    return found
