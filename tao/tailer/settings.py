"""A tailer's settings file, and the bounds of its parts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.etcd.location import EtcdSettings, Location
from tao.model.errors import SettingsError
from tao.model.settings import renamed
from tao.observability.audit_log import AuditSettings
from tao.planning.row_events import MAX_TOUCHES_PER_SHARD
from tao.routing.budgets import RetrySettings
from tao.storage.tls import DatabaseTlsFiles
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderSettings:
    """Settings of the binlog reader."""

    heartbeat_seconds: float = 0.5
    """Interval of the server's heartbeats when nothing happens. Also how soon the reader notices that it has to
    stop."""

    silence_seconds: float = 10.0
    """Time without any event after which the connection counts as dead: twenty missing heartbeats, longer than any
    pause of a healthy server."""

    connect_seconds: float = 5.0
    """Timeout for connecting to the server, which is in the same region and may be busy recovering."""

    read_ahead_bytes: int = renamed(32 << 20, formerly="hand_off_bytes")
    """Estimated size of the transactions read ahead of delivery: half a second of work for the event loop when rows are
    small."""

    max_transaction_bytes: int = 128 << 20
    """Estimated size up to which one transaction is kept: 150,000 small rows, or a leader's batch of the largest
    objects before and after. A larger one is a bulk import. Its shards are invalidated, which costs caches less than
    that many messages."""

    gather_seconds: float = 0.02
    """Behind a transaction whose rows are left undecoded, and while no more has arrived, the reader waits this long: to
    wake its thread and the event loop takes as long as all else about a small transaction. Such transactions wait
    for `OutboxSettings.gather_seconds` all the same; others that come behind one are read this much later. With 0 they
    are not."""

    backoff_first_seconds: float = 0.05
    """Pause before the first reconnection: a restarted server answers within a second."""

    backoff_max_seconds: float = 2.0
    """Longest pause between reconnections: one attempt every two seconds is no load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """Settings of the outboxes, which relay messages to leaders."""

    relay_bytes: int = 1 << 20
    """Estimated size of one relay: milliseconds of work for a leader, far below the largest message."""

    relay_parts: int = 2_000
    """Messages and touches in one relay. Applying them keeps a leader's event loop busy for about 10 ms."""

    large_message_bytes: int = 4 << 20
    """A message above this size is replaced by an invalidation, since no connection would carry it."""

    gather_seconds: float = 0.25
    """Messages that the region's leader published when it committed wait this long for more of their kind: a relay
    costs three processes and a sync of the spool, whatever its size. The pause also delays writes past the leaders, and
    by a leader that died or paused before it published them. No others wait. With 0 these do not wait either."""

    gather_parts: int = 512
    """Parts that are sent without waiting for more. A leader needs milliseconds for them; a larger relay would delay
    its writers."""

    unacknowledged_bytes: int = 16 << 20
    """Estimated size of the unacknowledged messages of all leaders together. Beyond it reading waits, and messages for
    a leader that is away or slow are replaced by invalidations of their shards; so are touches for one that is away, or
    of a shard that its leader does not accept."""

    leader_bytes: int = 4 << 20
    """Estimated size of the messages that wait for one leader: four relays. Beyond it reading waits for a leader that
    is about to take them. Messages for one that is away or slow are replaced by invalidations of their shards, so that
    it does not hold up the messages of the others. Touches do not count: they are writes, and are kept."""

    slow_seconds: float = 2.0
    """A leader is slow when it would take longer than this for the messages that wait for it, at the pace of its last
    relay or of the one under way. With `leader_bytes` waiting that is half a second for a relay, which takes a healthy
    leader some ten milliseconds; a reader that catches up waits for such a leader, and invalidates nothing."""

    timeout_seconds: float = 5.0
    """Time for a leader to apply and store a relay."""

    backoff_first_seconds: float = 0.05
    """Pause before the first retry: a leader that restarts is back within a second."""

    backoff_max_seconds: float = 1.0
    """Longest pause between retries; meanwhile the region's followers serve what they have."""

    retries: RetrySettings = RetrySettings(burst=100.0)
    """Budget for retries with short pauses. A tailer never gives up: beyond this budget it pauses the longest time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailSettings:
    """Settings of the loop from the reader to delivery."""

    max_touches_per_shard: int = MAX_TOUCHES_PER_SHARD
    """Keys of one shard that a transaction may change without versions. Beyond it the whole shard is invalidated, and
    its counts stay as they are. Each key takes about a hundred bytes here until the shard's owner has given it a
    version."""

    checkpoint_seconds: float = 0.2
    """Interval between two writes of the position. Messages that a restart repeats are harmless, but syncing the disk
    has a cost."""

    catch_up_seconds: float = renamed(10.0, formerly="behind_seconds")
    """Time for a server to reach the position, after another server's binlog was read in its place. A replica is marked
    up when it has almost caught up. After this time the region is invalidated instead, and reading continues from where
    the server is."""

    catch_up_poll_seconds: float = renamed(0.1, formerly="behind_poll_seconds")
    """Interval between two checks of the server's position, each of which opens a connection."""

    retry_seconds: float = 5.0
    """Pause after a fault that a person has to fix, such as a server_id in use: short enough to notice the fix soon."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindSettings:
    """Bounds for reading the binlog again for a leader that continues where another one ended."""

    seconds: float = 4.0
    """Time limit of one reading, less than subscribers wait before they start cold (leaders' ``continue_seconds``)."""

    max_transactions: int = 50_000
    """Transactions that a reader processes in that time; a subscriber that is further behind starts cold."""

    max_bytes: int = 16 << 20
    """Estimated size of the messages that are sent again: they stay in memory until they are acknowledged, as much as
    new messages may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TailerSettings:
    """The settings of one tailer process."""

    name: str
    """Name of the tailer in logs, metrics and at leaders, such as ``tailer-east-db1``."""

    region: str
    """The region whose leaders receive the messages."""

    database_server: str
    """The name in the topology of the database server whose binlog is read; it must be in the region."""

    topology_file: Location
    """The topology document: a file, or ``etcd://HOST:PORT,…/PREFIX`` (``etcds://`` with TLS). Changes are noticed."""

    schema_file: Location
    """The schema, which says which table holds the edges of a type: a file, or the URL of etcd as in ``topology_file``.
    Changes are noticed."""

    etcd: EtcdSettings = EtcdSettings()

    state_folder: Path
    """Folder for the position between runs, created when it is missing. It must be on a disk that survives a restart,
    or every start invalidates the region's caches of this database."""

    user: str = "tao_replicator"
    """A database account that may replicate and nothing else."""

    password: str = field(repr=False)
    """The account's password."""

    server_id: int = 0
    """The reader's server_id in replication, different from those of all servers and readers of the replication set.
    0: derived from ``name``, in the upper half of the range, which servers rarely use."""

    admin: str = "127.0.0.1:0"
    """``host:port`` of the metrics and health pages, as in the topology. Port 0: any free port."""

    accepted_tokens_file: Path | None = None
    """The tokens that watchers may show, as in the settings of leaders. None: tokens are not accepted."""

    token_file: Path | None = None
    """File of the token that this tailer shows to leaders, readable by its account only. It is read for each
    connection."""

    token: str = field(default="", repr=False)
    """The token itself, in place of ``token_file``. Either needs ``accepted_tokens_file``. Empty: none, where
    servers have certificates, or ask for no credentials."""

    tls: TlsFiles = TlsFiles()
    """Certificates for connections with leaders and watchers. None: connections are not encrypted."""

    database_tls: DatabaseTlsFiles = DatabaseTlsFiles()

    insecure: bool = False
    """Listen for watchers also where other machines reach this tailer without TLS, or without credentials. Otherwise it
    does not start there. Only for networks that nobody else can reach, or that encrypt and authenticate by
    themselves."""

    audit: AuditSettings = AuditSettings()

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    reader: ReaderSettings = ReaderSettings()
    delivery: OutboxSettings = OutboxSettings()
    tail: TailSettings = TailSettings()
    rewind: RewindSettings = RewindSettings()

    def __post_init__(self) -> None:
        if not 0 <= self.server_id < 1 << 32:
            raise SettingsError(f"server_id is {self.server_id}; it must be 0 or fit in 32 bits")
