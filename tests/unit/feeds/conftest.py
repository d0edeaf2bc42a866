"""The fake cluster of the SDK's tests, and a graph connected to it."""

from tests.unit.client.conftest import cluster, graph

__all__ = ["cluster", "graph"]
