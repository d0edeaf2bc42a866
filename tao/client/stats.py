"""What a graph has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ClientStats:
    """Plain counters since the graph was opened; read them whenever you like."""

    queries: int = 0
    """Read queries sent, repeats included."""
    writes: int = 0
    """Writes sent, repeats included."""
    batches: int = 0
    """Messages that carried them."""
    retries: int = 0
    """Messages that repeated what another server, or the same one, could not answer."""
    failovers: int = 0
    """Of those, messages that went to another server than the first."""
    retries_refused: int = 0
    """Repeats that there was no budget for: too much has failed of late."""
    errors: int = 0
    """Queries and writes that failed in the end."""
    inverse_pending: int = 0
    """Writes committed whose inverse edge was left to repair."""
    hot_joined: int = 0
    """Reads of hot items that shared a query with others."""
    hot_unchanged: int = 0
    """Queries for hot items that were answered "unchanged"."""
    hot_unchecked: int = 0
    """Reads of hot items answered without asking (`ClientSettings.hot_unchecked_ms`)."""
    turned: int = 0
    """`assoc_get` queries of long lists that were asked at the inverse lists (`ClientSettings.turned_id2s`)."""
    turned_back: int = 0
    """Of those, queries that could not be answered there and were then asked at the list itself."""
    topology_version: int = 0
    """The document routed by."""
