"""A generated graph that need not be stored: every edge of every list follows from the seed, in constant time.

Nodes have numbers from 0; a driver maps them to ids. Node ``n`` links to ``n + k * stride(n)`` for ``k`` from 1, modulo
the number of nodes, with a stride that has no common factor with that number. Neighbours are therefore distinct and
spread over the whole graph, and arithmetic decides whether an edge exists. Load processes agree on the graph without
exchanging it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import count, islice
from math import gcd
from random import Random
from typing import Final, NamedTuple

from loadtest.published.workload import Workload

FIRST_TIME: Final = 1_300_000_000
_SIZES: Final = 4096
"""Number of sizes that are drawn once and then used in turn; more would change no figure."""


class PlannedEdge(NamedTuple):
    """One edge. ``index`` 0 is the newest; ``size`` is the payload's size in bytes, 0 for none."""

    other: int
    time: int
    size: int


class GraphPlan:
    """Nodes, lists and sizes of a workload's graph."""

    def __init__(self, workload: Workload, nodes: int, seed: int) -> None:
        """Raises `ValueError` for a graph that is too small to measure anything."""
        chance = Random(f"graph {seed}")
        if nodes < 3:
            raise ValueError("a graph to measure has at least 3 nodes")
        self.nodes: Final = nodes
        # A list cannot have more distinct neighbours than there are; half of them leaves room for edges to add.
        self._degrees: Final = array("I", (min(degree, nodes // 2) for degree in workload.degrees.drawn(nodes, chance)))
        self._object_sizes: Final = array("I", islice(workload.object_bytes.drawer(chance), _SIZES))
        link_sizes = islice(workload.link_bytes.drawer(chance), _SIZES)
        self._link_sizes: Final = array(
            "I", (0 if chance.random() < workload.link_without_data else size for size in link_sizes)
        )
        self.shuffled: Final = list(range(nodes))
        """The nodes in order of popularity: rank → node."""
        chance.shuffle(self.shuffled)

    @property
    def edges(self) -> int:
        """Edges of all lists together."""
        return sum(self._degrees)

    @property
    def payload_bytes(self) -> int:
        """Payload bytes of all objects and edges together, without any framing."""
        objects = sum(self.object_size(node) for node in range(self.nodes))
        return objects + sum(self.edge_sizes())

    def degree(self, node: int) -> int:
        """Return the number of edges of the node's list."""
        return self._degrees[node]

    def object_size(self, node: int) -> int:
        """Return the bytes of the node's payload."""
        return self._object_sizes[node % _SIZES]

    def edge_size(self, node: int, index: int) -> int:
        """Return the payload bytes of the node's edge ``index``, 0 for none."""
        return self._link_sizes[(node * 31 + index) % _SIZES]

    def edge_sizes(self) -> Iterator[int]:
        """Yield the payload sizes of all edges."""
        return (self.edge_size(node, index) for node in range(self.nodes) for index in range(self._degrees[node]))

    def neighbour(self, node: int, index: int) -> int:
        """Return the other end of the node's edge ``index``. An index from the degree up to `nodes` - 1 (excluded)
        gives the end of an edge that the list does not have."""
        return (node + (index + 1) * self._stride(node)) % self.nodes

    def edge(self, node: int, index: int) -> PlannedEdge:
        """Return edge ``index`` of the node's list."""
        return PlannedEdge(self.neighbour(node, index), self.newest_time(node) - index, self.edge_size(node, index))

    def list_of(self, node: int) -> Iterator[PlannedEdge]:
        """Yield the node's list, newest first."""
        return (self.edge(node, index) for index in range(self.degree(node)))

    def in_order_of_time(self) -> Iterator[tuple[int, PlannedEdge]]:
        """Yield all edges with their nodes, oldest first: as users make them, so that lists grow side by side."""
        growing: Sequence[int] = range(self.nodes)
        for age in count(1):
            growing = [node for node in growing if self._degrees[node] >= age]
            if not growing:
                return
            for node in growing:
                yield node, self.edge(node, self._degrees[node] - age)

    def newest_time(self, node: int) -> int:
        """Return the time of the node's newest edge; older ones are a second apart."""
        return FIRST_TIME + self._degrees[node]

    def _stride(self, node: int) -> int:
        # The start depends on the node, so that lists do not all hold the same few neighbours.
        stride = 1 + (node * 2_654_435_761) % (self.nodes - 1)
        while gcd(stride, self.nodes) != 1:
            stride += 1
        return stride
