"""A tailer's settings file, and the bounds of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.model.errors import SettingsError
from tao.planning.row_events import MAX_TOUCHES_PER_SHARD
from tao.routing.retry_budget import RetrySettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """How the binlog is read."""

    heartbeat_seconds: float = 0.5
    """The server says a word so often when nothing happens; also how soon the reader notices that it has to stop."""

    silence_seconds: float = 10.0
    """Twenty missing words: longer than any pause of a healthy server, and the connection is dead."""

    connect_seconds: float = 5.0
    """To a server of the same region; it may be busy recovering."""

    hand_off_bytes: int = 32 << 20
    """Read ahead of delivery, estimated: half a second of work for the loop when rows are small."""

    max_transaction_bytes: int = 128 << 20
    """Kept of one transaction, estimated: 150,000 small rows, or a leader's batch of the largest objects before and
    after. A larger one is a bulk import, and its shards are made void: cheaper for caches than as many messages."""

    backoff_first_seconds: float = 0.05
    """Before the first reconnection: a restarted server answers within a second."""

    backoff_max_seconds: float = 2.0
    """Between later ones: one connection attempt every two seconds is no load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """How leaders are told."""

    relay_bytes: int = 1 << 20
    """In one relay, estimated: milliseconds of work for a leader, far below the largest message."""

    relay_parts: int = 2_000
    """Messages and touches in one relay: as long as a leader's loop may be busy with applying them, some 10 ms."""

    large_message_bytes: int = 4 << 20
    """A message above this is replaced by an invalidation, since no connection would carry it."""

    gather_seconds: float = 0.1
    """What the region's leader has told already, when it committed, waits this long for more of the kind: a relay costs
    three processes and a sync of the spool, whatever it holds. It delays what was committed past the leaders, versions
    and all, or by one that died or stood still before it could tell. Nothing else waits; 0: neither does this."""

    gather_parts: int = 64
    """So many do not wait: half a millisecond of a leader's time, which its writers should not notice."""

    unacknowledged_bytes: int = 16 << 20
    """Of all leaders together, estimated. Beyond it reading waits, and of a leader that is away shards become void."""

    timeout_seconds: float = 5.0
    """For a leader to apply a relay and hear from its subscribers: the longest that those may take to answer."""

    backoff_first_seconds: float = 0.05
    """Before the first repetition: a leader that restarts is back within a second."""

    backoff_max_seconds: float = 1.0
    """Between later ones; until then the region's followers serve what they have."""

    retries: RetrySettings = RetrySettings(burst=100.0)
    """Repetitions that come as soon as that. A tailer gives nothing up: beyond its budget it pauses the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSettings:
    """The loop between them."""

    max_touches_per_shard: int = MAX_TOUCHES_PER_SHARD
    """Keys of one shard that a transaction may have changed without versions; more, and the whole shard is void, its
    counts as they are. Each takes some hundred bytes here until the owner of the shard has given it a version."""

    checkpoint_seconds: float = 0.2
    """Between two writes of the position. What a restart repeats is harmless, a sync of the disk is not free."""

    behind_seconds: float = 10.0
    """For a server to reach the position, after another one's binlog was read in its place. A replica is marked up when
    it has all but caught up; after so long the region is made void instead, and goes on from where the server is."""

    behind_poll_seconds: float = 0.1
    """Between two looks at how far it is, each of which is a connection."""

    retry_seconds: float = 5.0
    """After a fault that a person has to mend, such as a server_id in use: soon enough to notice that it is mended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindSettings:
    """How far the binlog is read again for a leader that goes on where another one ended."""

    seconds: float = 4.0
    """Less than subscribers wait before they start cold (``continue_seconds`` of leaders)."""

    max_transactions: int = 50_000
    """What a reader comes through in that time; a subscriber that is further behind starts cold."""

    max_bytes: int = 16 << 20
    """Of what is told again, estimated: held in memory until it is acknowledged, as much as of new messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailerSettings:
    """Everything that one tailer process is told."""

    name: str
    """For logs, metrics and leaders, such as ``tailer-east-db1``."""

    region: str
    """Whose leaders are told."""

    database_server: str
    """Whose binlog is read, as the topology calls it; one of the region."""

    topology_file: Path
    """The topology document, watched."""

    schema_file: Path
    """The schema, watched; which table holds the edges of a type."""

    state_folder: Path
    """Where the position is kept between runs; made when it is missing. On a disk that survives a restart, or every
    start makes the region's caches of this database void."""

    user: str = "tao_replicator"
    """A database account that may replicate and nothing else."""

    password: str = field(repr=False)
    """Its password."""

    server_id: int = 0
    """Replication's name for this reader, different from every server's and reader's of the replication set.
    0: made of ``name``, in the upper half of the numbers, where servers usually are not."""

    admin: str = "127.0.0.1:0"
    """``host:port`` of the metrics and health pages."""

    token: str = field(default="", repr=False)
    """Shared secret of the cluster, shown to leaders. Empty: none, on loopback."""

    tls: TlsFiles = TlsFiles()
    """Certificates for its connections with leaders. None: plain ones."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    reader: ReaderSettings = ReaderSettings()
    delivery: DeliverySettings = DeliverySettings()
    tail: TailSettings = TailSettings()
    rewind: RewindSettings = RewindSettings()

    def __post_init__(self) -> None:
        if not 0 <= self.server_id < 1 << 32:
            raise SettingsError(f"server_id is {self.server_id}; it must be 0, or fit in 32 bits")
