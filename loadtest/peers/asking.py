"""How every contestant of `peers` is asked: the same requests, the same answers in full, and whether a cache had them.

A contestant returns what an application gets to see, payloads decoded; `ask` then looks at the payload of everything
that was returned and adds up the bytes, so that nobody is measured on answers that nobody has opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final, Protocol

from loadtest.published.contestant import LINK, Payloads, TaoContestant
from loadtest.published.requests import Request
from loadtest.published.workload import READS, Kind
from tao.client import AssocList, Graph
from tao.client.trace import MEMORY

Edge = tuple[int, int, bytes]
"""``(id2, time, payload)``."""

Answer = bytes | int | list[Edge] | list[bytes | None] | None
"""An object's payload or None, a count, edges newest first, or objects in the order asked."""


class How(IntEnum):
    """Where an answer came from; of several keys, the most expensive."""

    HIT = 0
    """Without the database."""
    JOINED = 1
    """Somebody else was fetching it already, and was waited for."""
    MISS = 2
    """The database was asked."""
    UNKNOWN = 3
    """A write, or nobody can tell."""


class Asked:
    """What becomes known of one request while it is answered."""

    __slots__ = ("how",)

    def __init__(self) -> None:
        self.how = How.HIT

    def at_least(self, how: How) -> None:
        """The request has needed this."""
        if how > self.how:
            self.how = how


class Peer(Protocol):
    """A contestant."""

    touched: int
    """Bytes of payload that were looked at so far."""

    async def ask(self, request: Request) -> How:
        """Have it answered and look at the answer. Raises what its client raises."""

    async def answer(self, request: Request) -> Answer:
        """Of a read, as plain values, for comparison. Raises what its client raises."""


class TaoPeer(TaoContestant):
    """The SDK; the follower alone knows what it had in memory, so a client that should tell asks one at a time."""

    def __init__(self, graph: Graph, ids: Sequence[int], payloads: Payloads) -> None:
        super().__init__(graph, ids, payloads)
        self.touched = 0

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
        return How.UNKNOWN

    async def ask_traced(self, request: Request) -> How:
        """As `ask`, and says of a read whether the follower had all of it. Not for several tasks at once."""
        with self._graph.trace() as trace:
            await self.ask(request)
        if request.kind not in READS:
            return How.UNKNOWN
        return How.HIT if all(each.answered_by == MEMORY for each in trace) else How.MISS

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
