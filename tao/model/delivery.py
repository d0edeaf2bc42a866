"""Positions and deliveries: how maintenance messages reach the caches that subscribed (DESIGN.md §7).

The messages of a shard form a numbered *stream*, whose name changes whenever its numbering starts anew (another
leader, another generation of ownership). A subscriber remembers per shard the stream and the last sequence number it
applied; a leader that still has everything after that continues, one that has not says ``reset``.
"""

from __future__ import annotations

import msgspec

from tao.model.changes import ShardMessages


class Position(msgspec.Struct, frozen=True):
    """How far a subscriber has been told. ``stream=""``: it has nothing."""

    shard: int
    stream: str = ""
    sequence: int = 0


class ShardDelivery(msgspec.Struct, frozen=True):
    """Messages of one shard. ``position`` is the subscriber's once they are applied; with ``reset`` it first drops
    everything it holds of the shard."""

    position: Position
    reset: bool = False
    messages: ShardMessages | None = None


class Delivery(msgspec.Struct, frozen=True):
    """One acknowledged unit. ``refused``: shards that this leader does not own. ``proven``: ``(database, Unix
    milliseconds)``, every commit up to then has been told in this series once the messages here are applied."""

    number: int
    shards: tuple[ShardDelivery, ...] = ()
    refused: tuple[int, ...] = ()
    proven: tuple[tuple[str, int], ...] = ()
