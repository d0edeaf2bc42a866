"""`SyncGraph`: the operations of `Graph` without ``await``, for Django, Flask and scripts (DESIGN.md §12).

Each runs on the loop of a `tao.client.graph_thread.GraphThread`. Any number of threads may use one `SyncGraph`; what
they ask in the same instant travels together.
"""

# ruff: noqa: A002 - `id` is what an object's id is called in the paper, the design and every other client
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tao.client.graph import Graph
from tao.client.graph_thread import GraphThread
from tao.client.own_writes import After, Recording
from tao.client.paging import PAGE_EDGES, AssocPage
from tao.client.stats import ClientStats
from tao.client.trace import Trace
from tao.client.values import Assoc, AssocList, Object
from tao.model.tokens import WriteToken
from tao.model.topology import Topology
from tao.schema.registry import Schema

Fields = Mapping[str, object]


class SyncGraph(GraphThread):
    """All methods of `Graph`, blocking. Opened when first used; `close` it, or use it as a context manager; what is
    left open is closed at exit. Each method has its text at `Graph`.

    gRPC does not outlive a fork that happens while it is in use: programs that fork use the graph first in the child,
    or connect over frames."""

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

    def assoc_page(
        self,
        id1: int,
        atype: str,
        limit: int,
        cursor: str | None = None,
        high: int | None = None,
        low: int | None = None,
        *,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> AssocPage:
        return self._run(
            lambda graph: graph.assoc_page(
                id1, atype, limit, cursor, high, low, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
        )

    def assoc_iter(
        self,
        id1: int,
        atype: str,
        *,
        high: int | None = None,
        low: int | None = None,
        page: int = PAGE_EDGES,
        critical: bool = False,
        after: After = None,
        max_staleness_ms: int | None = None,
    ) -> Iterator[Assoc]:
        cursor: str | None = None
        while True:
            found = self.assoc_page(
                id1, atype, page, cursor, high, low, critical=critical, after=after, max_staleness_ms=max_staleness_ms
            )
            yield from found.edges
            cursor = found.cursor
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
