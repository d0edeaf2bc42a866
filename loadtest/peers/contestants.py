"""The interface of the contestants of `peers`: the same requests, answers in full, and the source of each answer.

A contestant returns what an application sees, with payloads decoded. `ask` then looks at the payload of everything that
was returned and adds up the bytes, so that no contestant is measured on answers that nobody opens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any, Final, Protocol

from loadtest.published.contestant import LINK, Payloads, TaoContestant
from loadtest.published.requests import WorkloadRequest
from loadtest.published.workload import READS, Kind
from tao.client import AssocList, Graph
from tao.client.diagnostics import MEMORY, Trace

_OPEN_SECONDS: Final = 0.005
_CLOSED_SECONDS: Final = 0.045
"""Share of the time that is sampled, a tenth: thousands of answers in a few seconds of load, hundreds of misses among
them."""


class Sampling:
    """Finds the sources of a sample of one client's reads, from the client's trace."""

    def __init__(self, graph: Graph) -> None:
        self._graph: Final = graph
        self._had: Final[dict[tuple[str, str], bool]] = {}
        """Operation and first id → whether the follower had the latest such answer in memory."""
        self._looked_at = 0
        self.trace: Trace | None = None
        """None while answers are no part of the sample."""

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
            await asyncio.sleep(_CLOSED_SECONDS)
            with self._graph.trace() as trace:
                self._had.clear()
                self._looked_at, self.trace = 0, trace
                await asyncio.sleep(_OPEN_SECONDS)
            # The task whose read was answered last has not run yet.
            await asyncio.sleep(0)
            self.trace = None


class Source(IntEnum):
    """The source of an answer; for several keys, the most expensive one."""

    HIT = 0
    """A cache had it; for tao, the follower's memory."""
    JOINED = 1
    """It waited for a fetch that had already begun."""
    MISS = 2
    """The database answered; for tao, the follower's leader."""
    UNKNOWN = 3
    """It is a write, or the source is unknown."""


class AnswerSource:
    """Collects the source of one request's answer while it is answered."""

    __slots__ = ("how",)

    def __init__(self) -> None:
        self.how = Source.HIT

    def at_least(self, how: Source) -> None:
        """Record a source if it is more expensive than those recorded before."""
        if how > self.how:
            self.how = how


Edge = tuple[int, int, bytes]
"""``(id2, time, payload)``."""

Answer = bytes | int | list[Edge] | list[bytes | None] | None
"""An object's payload or None, a count, edges newest first, or objects in the order asked."""


class Peer(Protocol):
    """A contestant."""

    touched: int
    """Bytes of payload that `ask` has looked at so far."""

    async def ask(self, request: WorkloadRequest) -> Source:
        """Answer a request and look at the answer. Returns its source. Raises what the client raises."""

    def sampled(self) -> AbstractContextManager[None]:
        """Sample the sources of reads while the context lasts, if the contestant cannot report all of them."""

    async def answer(self, request: WorkloadRequest) -> Answer:
        """Answer a read with plain values, for comparison. Raises what the client raises."""


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
                self.touched += _size(edge.fields["payload"])
        elif isinstance(found, list):
            for each in found:
                self.touched += 0 if each is None else _size(each.fields["payload"])
        elif not isinstance(found, int) and found is not None:
            self.touched += _size(found.fields["payload"])
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
            return [(edge.id2, edge.time, _bytes(edge.fields["payload"])) for edge in found]
        if isinstance(found, list):
            return [None if each is None else _bytes(each.fields["payload"]) for each in found]
        return found if isinstance(found, int) or found is None else _bytes(found.fields["payload"])

    async def _read(self, request: WorkloadRequest) -> Any:
        # Any: an object, a list of edges or of objects, a count.
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


def _size(payload: object) -> int:
    return len(payload) if isinstance(payload, bytes) else 0


def _bytes(payload: object) -> bytes:
    return payload if isinstance(payload, bytes) else b""


LARGEST_LIMIT: Final = 1_000
"""The largest limit of the ranges that workloads ask for."""
