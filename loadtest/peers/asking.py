"""How every contestant of `peers` is asked: the same requests, the same answers in full, and whether a cache had them.

A contestant returns what an application gets to see, payloads decoded; `ask` then looks at the payload of everything
that was returned and adds up the bytes, so that nobody is measured on answers that nobody has opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from loadtest.peers.how import How
from loadtest.peers.sampling import Sampling
from loadtest.published.contestant import LINK, Payloads, TaoContestant
from loadtest.published.requests import Request
from loadtest.published.workload import READS, Kind
from tao.client import AssocList, Graph

Edge = tuple[int, int, bytes]
"""``(id2, time, payload)``."""

Answer = bytes | int | list[Edge] | list[bytes | None] | None
"""An object's payload or None, a count, edges newest first, or objects in the order asked."""


class Peer(Protocol):
    """A contestant."""

    touched: int
    """Bytes of payload that were looked at so far."""

    async def ask(self, request: Request) -> How:
        """Have it answered and look at the answer. Raises what its client raises."""

    def sampled(self) -> AbstractContextManager[None]:
        """Within it the contestant says of some of its reads how they were answered, if it cannot of all."""

    async def answer(self, request: Request) -> Answer:
        """Of a read, as plain values, for comparison. Raises what its client raises."""


class TaoPeer(TaoContestant):
    """The SDK; what the follower had in memory it tells of a sample (`loadtest.peers.sampling`)."""

    def __init__(self, graph: Graph, ids: Sequence[int], payloads: Payloads) -> None:
        super().__init__(graph, ids, payloads)
        self.touched = 0
        self._sampling: Final = Sampling(graph)

    async def ask(self, request: Request) -> How:
        """See `Peer`."""
        if request.kind not in READS:
            await self._write(request)
            return How.UNKNOWN
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
            return How.UNKNOWN
        if request.kind is Kind.READ_MANY:
            return self._sampling.how(Kind.OBJ_GET, [self._ids[other] for other in request.others])
        return self._sampling.how(request.kind, (self._ids[request.node],))

    def sampled(self) -> AbstractContextManager[None]:
        """See `Peer`."""
        return self._sampling.going_on()

    async def answer(self, request: Request) -> Answer:
        """See `Peer`."""
        found = await self._read(request)
        if isinstance(found, AssocList):
            return [(edge.id2, edge.time, _bytes(edge.fields["payload"])) for edge in found]
        if isinstance(found, list):
            return [None if each is None else _bytes(each.fields["payload"]) for each in found]
        return found if isinstance(found, int) or found is None else _bytes(found.fields["payload"])

    async def _read(self, request: Request) -> Any:
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
"""Of the ranges that workloads ask for."""
