"""Contestants, which answer the requests of a workload; and the graph that they are asked for."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

from loadtest.published.graph_plan import GraphPlan
from loadtest.published.requests import WorkloadRequest
from loadtest.published.workload import READS, Kind
from tao.client import AssocList, Graph, Object, SomeFailed
from tao.client.diagnostics import MEMORY

NODE: Final = "node"
LINK: Final = "link"
MARK: Final = "mark"
_ADDED_BOUND: Final = 10_000
_BATCH: Final = 2000
_BLOCK_BYTES: Final = 1 << 20
_RESERVED_AT_ONCE: Final = 1000
_ATTEMPTS: Final = 5
"""Attempts to write a batch: on a busy machine some rows are not written in time, and all rows may be written again."""


class Payloads:
    """Payloads to write: slices of one random block, so that making them costs nothing and compressing them gains
    nothing."""

    def __init__(self, block: bytes) -> None:
        self._block: Final = block
        self._at = 0

    @classmethod
    def drawn(cls, seed: str) -> Payloads:
        """Return those of a block that follows from the seed."""
        return cls(Random(seed).randbytes(_BLOCK_BYTES))

    def next(self, size: int) -> bytes:
        """Return the next ``size`` bytes."""
        if self._at + size > len(self._block):
            self._at = 0
        found = self._block[self._at : self._at + size]
        self._at += size
        return found

    def fields(self, size: int) -> dict[str, bytes]:
        """Return the fields of an object or edge with a payload of ``size`` bytes, or without one for 0."""
        return {"payload": self.next(size)} if size else {}


class TaoContestant:
    """The SDK, as an application's process would use it."""

    def __init__(self, graph: Graph, ids: Sequence[int], payloads: Payloads) -> None:
        """``ids`` are the ids by node."""
        self._graph: Final = graph
        self._ids: Final = ids
        self._payloads: Final = payloads
        self._added: Final[deque[int]] = deque(maxlen=_ADDED_BOUND)

    async def ask(self, request: WorkloadRequest) -> int:
        """See `loadtest.published.driver.Contestant`. Raises a `TaoError`."""
        if request.kind not in READS:
            await self._write(request)
            return 0
        found = await self._read(request)
        if isinstance(found, list):
            return sum(each is not None for each in found)
        if isinstance(found, Object) or found is None:
            return int(found is not None)
        return found if isinstance(found, int) else len(found)

    async def traced(self, request: WorkloadRequest) -> tuple[int, bool]:
        """Send a read. Returns what it found, and whether all of it was in the follower's memory. Not for concurrent
        use."""
        with self._graph.trace() as trace:
            found = await self.ask(request)
        return found, all(each.answered_by == MEMORY for each in trace)

    async def _read(self, request: WorkloadRequest) -> Object | list[Object | None] | AssocList | int | None:
        graph, ids, kind = self._graph, self._ids, request.kind
        id1 = ids[request.node]
        if kind is Kind.OBJ_GET:
            return await graph.obj_get(id1)
        if kind is Kind.ASSOC_RANGE:
            return await graph.assoc_range(id1, LINK, 0, request.limit)
        if kind is Kind.ASSOC_COUNT:
            return await graph.assoc_count(id1, LINK)
        if kind is Kind.ASSOC_GET:
            return await graph.assoc_get(id1, LINK, [ids[other] for other in request.others])
        if kind is Kind.ASSOC_TIME_RANGE:
            return await graph.assoc_time_range(id1, LINK, request.high, request.low, request.limit)
        return await graph.obj_get_many([ids[other] for other in request.others])

    async def _write(self, request: WorkloadRequest) -> None:
        graph, id1 = self._graph, self._ids[request.node]
        match request.kind:
            case Kind.ASSOC_ADD | Kind.ASSOC_OVERWRITE:
                await graph.assoc_add(*self._edge(request))
            case Kind.ASSOC_DELETE:
                await graph.assoc_delete(id1, LINK, self._ids[request.others[0]])
            case Kind.ASSOC_CHANGE_TYPE:
                await graph.assoc_change_type(id1, LINK, self._ids[request.others[0]], MARK)
            case Kind.OBJ_UPDATE:
                await graph.obj_update(id1, self._payloads.fields(request.size), NODE)
            case Kind.OBJ_ADD:
                self._added.append(await graph.obj_add(NODE, self._payloads.fields(request.size)))
            case Kind.OBJ_DELETE:
                # Before anything was added, any deletion would remove something that reads expect to find.
                if self._added:
                    await graph.obj_delete(self._added.popleft())
            case Kind.WRITE_MANY:
                await graph.assoc_add_many([self._edge(part) for part in request.parts])
            case _:
                raise AssertionError(f"{request.kind} is no write")

    def _edge(self, request: WorkloadRequest) -> tuple[int, str, int, int, dict[str, bytes]]:
        ids, fields = self._ids, self._payloads.fields(request.size)
        return ids[request.node], LINK, ids[request.others[0]], request.time, fields


async def reserve_nodes(graph: Graph, nodes: int, shards: int) -> list[int]:
    """Reserve an id for each node; node ``n`` is on shard ``n % shards``. Raises a `TaoError`."""
    reserved: list[list[int]] = []
    for shard in range(shards):
        wanted = len(range(shard, nodes, shards))
        mine: list[int] = []
        while len(mine) < wanted:
            mine += await graph.reserve_ids(min(_RESERVED_AT_ONCE, wanted - len(mine)), shard=shard)
        reserved.append(mine)
    return [reserved[node % shards][node // shards] for node in range(nodes)]


async def load_graph(
    graph: Graph, plan: GraphPlan, payloads: Payloads, shards: int, report: Callable[[str, float], None]
) -> list[int]:
    """Write the planned graph, and return the ids by node. Node ``n`` is put on shard ``n % shards``. Raises a
    `TaoError`."""
    ids = await reserve_nodes(graph, plan.nodes, shards)
    objects = ((NODE, payloads.fields(plan.object_size(node)), None, ids[node]) for node in range(plan.nodes))
    edges = (
        (ids[node], LINK, ids[edge.other], edge.time, payloads.fields(edge.size))
        for node, edge in plan.in_order_of_time()
    )
    total = plan.nodes + plan.edges
    await write_all(graph.obj_add_many, objects, lambda done: report("writing objects", done / total))
    await write_all(graph.assoc_add_many, edges, lambda done: report("writing edges", (plan.nodes + done) / total))
    return ids


async def write_all(
    write_many: Callable[[Sequence[Any]], Awaitable[object]], rows: Iterable[Any], report: Callable[[int], None]
) -> None:
    """Write rows as `written` does, some thousands at a time, and report how many are done."""
    left, done = iter(rows), 0
    while batch := list(islice(left, _BATCH)):
        await written(write_many, batch)
        done += len(batch)
        report(done)


async def written(write_many: Callable[[Sequence[Any]], Awaitable[object]], rows: Sequence[Any]) -> None:
    """Write rows that may be written twice, and retry the ones that fail. `Any`: rows as the many-form takes them.

    Raises `SomeFailed` when some rows still fail, and what else the many-form raises.
    """
    for last in (False,) * (_ATTEMPTS - 1) + (True,):
        try:
            await write_many(rows)
        except SomeFailed as failure:
            if last:
                raise
            rows = [rows[index] for index in failure.errors]
        else:
            return


def read_ids(path: Path) -> Sequence[int]:
    """Read the ids that `write_ids` wrote."""
    ids = array("Q")
    ids.frombytes(path.read_bytes())
    return ids


def write_ids(path: Path, ids: Sequence[int]) -> None:
    """Write the ids by node to a file, for the load processes of a run."""
    path.write_bytes(array("Q", ids).tobytes())
