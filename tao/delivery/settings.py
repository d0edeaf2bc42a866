"""The bounds of delivery: how much a leader keeps for subscribers, and how much it sends without acknowledgement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """Bounds of the memory log and of subscriptions. A subscriber that falls behind a bound of the log has to drop its
    shards; writers are never delayed."""

    log_messages_per_shard: int = 4_096
    """Messages of one shard kept for subscribers that come back. At 100 writes a second on one shard this bridges 40 s,
    which covers a follower's restart; a colder shard keeps hours."""

    log_bytes_total: int = 64 << 20
    """Estimated memory of all messages together; the oldest are evicted first. That is 200,000 messages of 300 bytes,
    or half a minute at 6,000 writes a second, for a small part of a leader's memory."""

    window_unacknowledged_bytes: int = 4 << 20
    """Bytes sent to one subscriber and not acknowledged. Covers 100 ms of round trip at 40 MB/s; beyond it messages
    wait in the log, which holds them once for all subscribers."""

    max_delivery_messages: int = 512
    """Messages in one delivery. A follower applies a delivery without a pause, so this bounds how long hits wait."""

    max_delivery_bytes: int = 1 << 20
    """Estimated size of one delivery, well below the largest frame. A single larger message is delivered alone."""

    max_delivery_shards: int = 500
    """Shards that one delivery confirms or refuses; the next of a subscriber's shards follow at the next turn of the
    event loop. To confirm a shard takes a leader some 15 µs and its subscriber some 20 µs, which other requests wait
    for: 10 ms at most, however many shards a subscriber of an older release asks for at once."""

    max_subscribers: int = 1_024
    """Subscribers of one leader. A leader serves the followers of its own region: tens to hundreds of servers."""

    proofs_seconds: float = 1.0
    """Pause between two proofs to one subscriber, each of all databases: a subscriber of thirty leaders and thirty
    databases receives thirty deliveries a second, and not nine hundred. The known staleness grows by up to this when
    heartbeats of the databases do not arrive together."""

    gather_proofs_seconds: float = 0.2
    """Time from the first new proof to its delivery: heartbeats of all databases are written at the same time, and
    arrive within this, unless clocks or replication differ by more."""

    continue_seconds: float = 6.0
    """Time for the tailer to send what follows a subscriber's position, reading the binlog again if necessary. A tailer
    sends each leader a heartbeat once a second. While it waits the subscriber serves what it has; after this time it
    starts cold."""

    catching_up_shards: int = 8
    """Shards of one subscriber that are read from the spool concurrently, one delivery of each: bounds memory."""

    committed_bytes: int = 16 << 20
    """Estimated size of the messages of own commits that wait for the tailer to come to them: four times what a leader
    commits in the quarter of a second that they usually wait. The oldest make room, and the tailer decodes them."""

    committed_seconds: float = 30.0
    """Messages of own commits are dropped after this time. A tailer that is further behind is away or catches up, and
    decodes what it reads."""

    commit_seconds: float = 0.5
    """A relay that names a transaction unknown here waits this long for the commits under way: with semi-synchronous
    replication the tailer reads a transaction up to a round trip between regions before the commit is answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpoolSettings:
    """The messages that a leader keeps on disk for subscribers that come back, and for its own restart."""

    folder: Path | None = None
    """Folder on a disk that survives a restart. It is created when it is missing, and no two leaders may share one.
    None: keep messages in memory only; after a restart of the leader the tailer reads the binlog again."""

    max_bytes: int = 1 << 30
    """Encoded size of all messages, such as a million changes of 1 KB; the oldest are dropped first. The file takes up
    to half as much again, and its journal a few MB."""

    max_age_seconds: float = 86_400.0
    """Older messages are dropped: a subscriber that was away for a day is faster when it starts cold than when it
    replays a day's changes."""

    retry_seconds: float = 10.0
    """Pause before the disk is tried again after it was full or failed; until then messages stay in memory only."""
