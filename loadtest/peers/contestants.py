"""The contestants of `peers`: the same requests, answers in full, and the source of each answer.

A contestant returns what an application sees, with payloads decoded. `ask` then looks at the payload of everything that
was returned and adds up the bytes, so that no contestant is measured on answers that nobody opens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol

from loadtest.peers.graph_store import AnswerSource, Edge, GraphStore
from loadtest.peers.lookaside import Lookaside
from loadtest.published.contestant import LINK, NODE, Payloads, TaoContestant
from loadtest.published.requests import WorkloadRequest
from loadtest.published.workload import READS, Kind
from loadtest.rounds import Source
from tao.client import AssocList, Graph
from tao.client.diagnostics import MEMORY, Trace

TAO: Final = "tao"
MYSQL: Final = "mysql"
MYSQL_ASYNCMY: Final = "mysql_asyncmy"
POSTGRES: Final = "postgres"
ALONE: Final = (MYSQL, MYSQL_ASYNCMY, POSTGRES)
"""The databases without a cache in front of them."""
_OPEN_SECONDS: Final = 0.005
_CLOSED_SECONDS: Final = 0.045
"""Share of the time that is sampled, a tenth: thousands of answers in a few seconds of load, hundreds of misses among
them."""
_ADDED_BOUND: Final = 10_000

Answer = bytes | int | list[Edge] | list[bytes | None] | None
"""An object's payload or None, a count, edges newest first, or objects in the order asked."""


class Peer(Protocol):
    """A contestant. Its methods raise what its client raises."""

    touched: int
    """Bytes of payload that `ask` has looked at so far."""

    async def ask(self, request: WorkloadRequest) -> Source:
        """Answer a request and look at the answer. Returns its source."""

    def sampled(self) -> AbstractContextManager[None]:
        """Sample the sources of reads while the context lasts, if the contestant cannot report all of them."""

    async def answer(self, request: WorkloadRequest) -> Answer:
        """Answer a read with plain values, for comparison."""

    async def put_node(self, object_id: int, payload: bytes) -> None:
        """Write an object."""

    async def put_link(self, id1: int, id2: int, at: int) -> None:
        """Write a link without data."""


class Sampling:
    """Finds the sources of a sample of one client's reads, from the client's trace."""

    def __init__(self, graph: Graph) -> None:
        self._graph: Final = graph
        self._had: Final[dict[tuple[str, str], bool]] = {}
        """Operation and first id → whether the follower had the latest such answer in memory."""
        self._looked_at = 0
        self.trace: Trace | None = None
        """Records sampled answers; None while answers are not sampled."""

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Open and close the trace in turns until the end of this context."""
        task = asyncio.ensure_future(self._take_turns())
        try:
            yield
        finally:
            task.cancel()
            self.trace = None

    def how(self, operation: str, ids: Iterable[int]) -> Source:
        """Return the source of a read that has just been answered, of these objects or of the list of this id."""
        trace = self.trace
        if trace is None:
            return Source.UNKNOWN
        if len(trace) > self._looked_at:
            for served in trace[self._looked_at :]:
                self._had[served.operation, served.key.partition(" ")[0]] = served.answered_by == MEMORY
            self._looked_at = len(trace)
        had = [self._had.get((operation, str(each))) for each in ids]
        if None in had:
            return Source.UNKNOWN
        return Source.HIT if all(had) else Source.MISS

    async def _take_turns(self) -> None:
        while True:
            with self._graph.trace() as trace:
                self._had.clear()
                self._looked_at, self.trace = 0, trace
                await asyncio.sleep(_OPEN_SECONDS)
                # On a busy machine nothing may be answered in so short a time.
                while not trace:  # noqa: ASYNC110 - a trace sets no event
                    await asyncio.sleep(_OPEN_SECONDS)
            # The task whose read was answered last has not run yet.
            await asyncio.sleep(0)
            self.trace = None
            await asyncio.sleep(_CLOSED_SECONDS)


class TaoPeer(TaoContestant):
    """The SDK, which reports the sources of a sample of its reads (`Sampling`)."""

    def __init__(self, graph: Graph, ids: Sequence[int], payloads: Payloads) -> None:
        super().__init__(graph, ids, payloads)
        self.touched = 0
        self._sampling: Final = Sampling(graph)

    async def ask(self, request: WorkloadRequest) -> Source:
        if request.kind not in READS:
            await self._write(request)
            return Source.UNKNOWN
        found = await self._read(request)
        if isinstance(found, AssocList):
            for edge in found:
                self.touched += len(_payload(edge))
        elif isinstance(found, list):
            for each in found:
                self.touched += 0 if each is None else len(_payload(each))
        elif not isinstance(found, int) and found is not None:
            self.touched += len(_payload(found))
        if self._sampling.trace is None:
            return Source.UNKNOWN
        if request.kind is Kind.READ_MANY:
            return self._sampling.how(Kind.OBJ_GET, [self._ids[other] for other in request.others])
        return self._sampling.how(request.kind, (self._ids[request.node],))

    def sampled(self) -> AbstractContextManager[None]:
        return self._sampling.going_on()

    async def answer(self, request: WorkloadRequest) -> Answer:
        found = await self._read(request)
        if isinstance(found, AssocList):
            return [(edge.id2, edge.time, _payload(edge)) for edge in found]
        if isinstance(found, list):
            return [None if each is None else _payload(each) for each in found]
        return found if isinstance(found, int) or found is None else _payload(found)

    async def put_node(self, object_id: int, payload: bytes) -> None:
        await self._graph.obj_update(object_id, {"payload": payload}, NODE)

    async def put_link(self, id1: int, id2: int, at: int) -> None:
        await self._graph.assoc_add(id1, LINK, id2, at)


def _payload(found: Any) -> bytes:
    # Any: an object or an edge, whose fields have every type that a schema can have.
    payload = found.fields["payload"]
    return payload if isinstance(payload, bytes) else b""


class SqlPeer:
    """An application over a database, with or without a look-aside cache."""

    def __init__(self, store: GraphStore, ids: Sequence[int], payloads: Payloads) -> None:
        self._store: Final = store
        self._ids: Final = ids
        self._payloads: Final = payloads
        self._added: Final[deque[int]] = deque(maxlen=_ADDED_BOUND)
        self.touched = 0

    async def ask(self, request: WorkloadRequest) -> Source:
        if request.kind not in READS:
            await self._write(request)
            return Source.UNKNOWN
        asked = AnswerSource()
        found = await self._read(request, asked)
        if isinstance(found, bytes):
            self.touched += len(found)
        elif isinstance(found, list):
            for each in found:
                payload = each[2] if isinstance(each, tuple) else each
                self.touched += 0 if payload is None else len(payload)
        return asked.how

    async def ask_many(self, requests: Sequence[WorkloadRequest]) -> list[Source]:
        """Answer several requests, with the same effect on a look-aside's cache as `ask` of each, whose first keys are
        asked for at once (`Lookaside.begin`). A read that needs further keys asks for them by itself."""
        assert isinstance(self._store, Lookaside)
        reads = [request for request in requests if request.kind in READS]
        begun = [
            self._store.keys_of(
                request.kind,
                [self._ids[n] for n in (request.others if request.kind is Kind.READ_MANY else (request.node,))],
            )
            for request in reads
        ]
        missing, full = await self._store.begin({key for keys in begun for key in keys})
        hows = []
        for request, keys in zip(reads, begun, strict=True):
            asked = AnswerSource()
            if not missing.isdisjoint(keys):
                # A second request for a key finds it in the cache.
                missing.difference_update(keys)
                asked.how = Source.MISS
            if not full.isdisjoint(keys):
                await self._read(request, asked)
            hows.append(asked.how)
        return hows + [await self.ask(request) for request in requests if request.kind not in READS]

    def sampled(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def answer(self, request: WorkloadRequest) -> Answer:
        return await self._read(request, AnswerSource())

    async def put_node(self, object_id: int, payload: bytes) -> None:
        await self._store.put_node(object_id, payload)

    async def put_link(self, id1: int, id2: int, at: int) -> None:
        await self._store.put_links([(id1, id2, at, b"")])

    @property
    def is_lookaside(self) -> bool:
        """Whether there is a cache."""
        return isinstance(self._store, Lookaside)

    async def _read(self, request: WorkloadRequest, asked: AnswerSource) -> Answer:
        store, ids, kind = self._store, self._ids, request.kind
        id1 = ids[request.node]
        if kind is Kind.OBJ_GET:
            return await store.node(id1, asked)
        if kind is Kind.ASSOC_RANGE:
            return await store.newest(id1, request.limit, asked)
        if kind is Kind.ASSOC_COUNT:
            return await store.count(id1, asked)
        if kind is Kind.ASSOC_GET:
            return await store.among(id1, [ids[other] for other in request.others], asked)
        if kind is Kind.ASSOC_TIME_RANGE:
            return await store.between(id1, request.high, request.low, request.limit, asked)
        return await store.nodes([ids[other] for other in request.others], asked)

    async def _write(self, request: WorkloadRequest) -> None:
        store, ids, payloads = self._store, self._ids, self._payloads
        match request.kind:
            case Kind.ASSOC_ADD | Kind.ASSOC_OVERWRITE | Kind.WRITE_MANY:
                links = [
                    (ids[each.node], ids[each.others[0]], each.time, payloads.next(each.size))
                    for each in request.parts or (request,)
                ]
                await store.put_links(links)
            case Kind.ASSOC_DELETE:
                await store.delete_link(ids[request.node], ids[request.others[0]])
            case Kind.ASSOC_CHANGE_TYPE:
                await store.mark_link(ids[request.node], ids[request.others[0]])
            case Kind.OBJ_UPDATE:
                await store.put_node(ids[request.node], payloads.next(request.size))
            case Kind.OBJ_ADD:
                self._added.append(await store.add_node(payloads.next(request.size)))
            case Kind.OBJ_DELETE:
                if self._added:
                    await store.delete_node(self._added.popleft())
            case _:
                raise AssertionError(f"{request.kind} is no write")
