"""The bounds of delivery: what a leader keeps for subscribers, and how much it sends ahead of them (DESIGN.md §7)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """Reaching any of the log's bounds costs laggards a bulk invalidation, never a writer its time."""

    log_messages_per_shard: int = 4_096
    """Messages of one shard kept for those who come back. At 100 writes a second on one shard this bridges 40 s, which
    covers a follower's restart; a colder shard keeps hours."""

    log_bytes_total: int = 64 << 20
    """Estimated memory of all logs together, oldest messages leave first. A 300-byte message: 200,000 of them, or
    half a minute at 6,000 writes a second, for a small part of a leader's memory."""

    window_unacknowledged_bytes: int = 4 << 20
    """Sent to one subscriber and not acknowledged. Covers 100 ms of round trip at 40 MB/s; beyond it the messages wait
    in the log, where they are held once for all subscribers."""

    max_delivery_messages: int = 512
    """Messages in one delivery, which a follower applies without a pause: bounds how long its hits wait for it."""

    max_delivery_bytes: int = 1 << 20
    """Estimated size of one delivery; well below the largest frame. A single larger message travels alone."""

    max_subscribers: int = 1_024
    """Subscribers of one leader. A leader serves the followers of its own region: tens to hundreds of servers."""

    continue_seconds: float = 6.0
    """For the tailer to say or to read again what came after a subscriber's position. A tailer speaks to each leader
    once a second, by heartbeats; meanwhile the subscriber serves what it has. After it, it starts cold."""

    catching_up_shards: int = 8
    """Shards of one subscriber that are read from the spool side by side, a delivery of each: bounds memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """What a leader keeps on disk for subscribers that come back, and for its own restart."""

    folder: Path | None = None
    """Where, on a disk that survives a restart; made when it is missing, and no other leader's. None: in memory only;
    then a leader that restarts has the tailer read the binlog again."""

    max_bytes: int = 1 << 30
    """Of messages, encoded; the oldest go first. A million changes of 1 KB. The file takes up to half as much again,
    and its journal some MB."""

    max_age_seconds: float = 86_400.0
    """Older ones go, too: who was away for a day starts cold sooner than it has heard a day's changes."""

    retry_seconds: float = 10.0
    """After the disk was full or failed, before it is tried again; until then messages are kept in memory only."""
