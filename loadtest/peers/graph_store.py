"""What the contestants over a database have in common: the operations on a graph, and the source of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec

from loadtest.published.contestant import Payloads
from loadtest.published.graph_plan import GraphPlan
from loadtest.rounds import Source

Edge = tuple[int, int, bytes]
"""``(id2, time, payload)``."""


class SqlAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A database server and the account to use there."""

    host: str
    port: int
    user: str
    password: str


class AnswerSource:
    """Collects the source of one request's answer while it is answered."""

    __slots__ = ("how",)

    def __init__(self) -> None:
        self.how = Source.HIT

    def at_least(self, how: Source) -> None:
        """Record a source if it is more expensive than those recorded before."""
        if how > self.how:
            self.how = how


def planned_rows(
    plan: GraphPlan, ids: Sequence[int], payloads: Payloads
) -> tuple[Iterator[tuple[int, bytes]], Iterator[tuple[int, int, int, bytes]]]:
    """Return the rows of the planned graph: ``(id, payload)`` of objects, ``(id1, id2, time, payload)`` of links,
    oldest first: tables that were filled list by list would have fewer and fuller pages than such that have grown.

    Payloads are drawn as rows are taken: take all objects first, so that every store gets the same ones."""
    nodes = ((ids[node], payloads.next(plan.object_size(node))) for node in range(plan.nodes))
    links = (
        (ids[node], ids[edge.other], edge.time, payloads.next(edge.size)) for node, edge in plan.in_order_of_time()
    )
    return nodes, links


class GraphStore(Protocol):
    """The graph in a database. Methods raise the errors of the database's client; reads record their source."""

    async def close(self) -> None:
        """Close all connections."""

    async def load(self, plan: GraphPlan, ids: Sequence[int], payloads: Payloads) -> None:
        """Create the tables anew and write the planned graph."""

    async def node(self, object_id: int, asked: AnswerSource) -> bytes | None:
        """Return an object's payload; None when it does not exist."""

    async def nodes(self, ids: Sequence[int], asked: AnswerSource) -> list[bytes | None]:
        """Return each object's payload."""

    async def count(self, id1: int, asked: AnswerSource) -> int:
        """Return the number of links."""

    async def newest(self, id1: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links."""

    async def between(self, id1: int, high: int, low: int, limit: int, asked: AnswerSource) -> list[Edge]:
        """Return the newest links of a time range."""

    async def among(self, id1: int, id2s: Sequence[int], asked: AnswerSource) -> list[Edge]:
        """Return the links to these nodes."""

    async def put_node(self, object_id: int, payload: bytes) -> None:
        """Add or overwrite an object."""

    async def add_node(self, payload: bytes) -> int:
        """Add an object whose id is the clock's nanoseconds, above every loaded id. Returns the id."""

    async def delete_node(self, object_id: int) -> None:
        """Delete an object."""

    async def put_links(self, links: Sequence[tuple[int, int, int, bytes]]) -> None:
        """Add or overwrite ``(id1, id2, time, payload)``, each with its inverse and the counter, in one transaction."""

    async def delete_link(self, id1: int, id2: int) -> None:
        """Delete a link with its inverse."""

    async def mark_link(self, id1: int, id2: int) -> None:
        """Turn a link into a mark."""
