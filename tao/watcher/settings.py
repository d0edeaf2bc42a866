"""The settings of a watcher process."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.etcd.location import EtcdSettings, Location
from tao.model.errors import SettingsError
from tao.observability.audit_log import AuditSettings
from tao.replication.lease import LeaseTerms
from tao.replication.promotion import PromotionSettings
from tao.replication.promotion_plan import SILENT_SECONDS
from tao.routing.cloning_policy import CloningPolicy
from tao.storage.tls import DatabaseTlsFiles
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The leases of masters."""

    seconds: float = 5.0
    """How long a master takes writes after the last renewal, plus a second. A watcher may be away this long before
    writes stop; its restart takes two seconds."""

    critical_seconds: float = 2.5
    """How long the master of a semi-synchronous database answers critical reads after the last renewal. Once its
    replicas have stopped receiving it acknowledges no write, so its successor has to wait only for this."""

    renew_seconds: float = 0.5
    """Interval between renewals. With the defaults, four in a row may fail."""

    def terms(self, *, semi_sync: bool) -> LeaseTerms:
        """Return the terms that the servers of a database keep."""
        reads = min(self.critical_seconds, self.seconds) if semi_sync else self.seconds
        return LeaseTerms(reads, self.seconds - reads)

    def __post_init__(self) -> None:
        if min(self.seconds, self.critical_seconds) < 3 * self.renew_seconds or self.renew_seconds <= 0:
            raise SettingsError(f"a lease must outlast three renewals: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How servers are probed, and when they are marked."""

    interval_seconds: float = 0.5
    """Interval between probes of a server: a ping of a cache server, a status query of a database server."""

    timeout_seconds: float = 1.0
    """Time limit for an answer: ten round trips between distant regions."""

    retry_seconds: float = 0.1
    """Interval until a cache server that has failed once is probed again; it doubles. A dead process refuses each probe
    at once, so it is marked within a second, and its shards are written at other servers within three."""

    cache_failures: int = 3
    """Consecutive failures until a cache server or tailer is down: one refused connection may be a restart."""

    answers_until_up: int = 3
    """Consecutive answers until the mark is taken away. A database server's answers must also show no fault."""

    master_gone_seconds: float = 5.0
    """How long a master must be silent before another one is promoted. Restarts of the server or of a switch take less,
    and a promotion costs every cache of the database."""

    master_hangs_seconds: float = 1.8
    """How long the master of a semi-synchronous database must be silent before another one is promoted, if nothing is
    lost with it, a watcher of its own region gets no answer either, and its replicas hear nothing from it. One that
    answers before its lease is over, 2.3 s later than its last answer at least, keeps its place. A longer pause costs
    every cache of the database. Values below ``interval_seconds`` and 1.3 count as that: a heartbeat must be missed."""

    master_refusals: int = 3
    """How many probes of the master of a semi-synchronous database must be refused in a row before another one is
    promoted: nothing listens at its address, so its process is dead. Where its region has a watcher, only the probes of
    that one count. With the defaults this takes up to a second and a half. No write is lost with it, but the time of a
    restart is not waited for."""

    lag_down_seconds: float = 30.0
    """A replica with at least this lag is marked down. Nearly every read that requires a version avoids it already."""

    lag_up_seconds: float = 5.0
    """The lag must fall to this value before the mark is taken away."""

    @property
    def hangs_after_seconds(self) -> float:
        """``master_hangs_seconds``, and at least the time in which a replica is seen to miss a heartbeat."""
        return max(self.master_hangs_seconds, self.interval_seconds + SILENT_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherSettings:
    """All settings of one watcher process."""

    name: str
    """The watcher's name in logs, metrics and locks, such as ``east-watcher-1``."""

    region: str
    """The watcher's region, whose addresses of the servers it uses."""

    topology_file: Location
    """The topology document, watched and changed: a file, or ``etcd://HOST:PORT,…/PREFIX`` (``etcds://`` with TLS). The
    locks are beside it."""

    etcd: EtcdSettings = EtcdSettings()

    peers: dict[str, str] = field(default_factory=dict)
    """Not used any more, and refused by the next release: the topology has the ``frames`` addresses of the watchers of
    other regions. Servers there are marked only when a watcher there agrees: one that cannot be reached from here may
    be healthy."""

    administrator_user: str
    """A database account that may renew leases and promote: ``tao_watcher`` of `tao accounts`, which may do that and
    little else. There is no default: earlier versions took ``tao_admin``, which may do everything."""

    administrator_password: str = field(repr=False)
    """Its password."""

    replicator_user: str = "tao_replicator"
    """The account that replicas use at their master."""

    replicator_password: str = field(repr=False)
    """Its password."""

    auto_promote: bool = True
    """Whether a lost master is replaced without an operator."""

    auto_rejoin: bool = False
    """Whether a server that follows no master is made a replica again without an operator, when it has no transactions
    of its own; one that has some is named in the log (`rejoin_withheld`). Off by default, because somebody may be
    working on it."""

    leases: bool = True
    """Whether masters are writable only under leases. Without them a master that is cut off takes writes until somebody
    closes it, and nothing is promoted automatically unless the database is semi-synchronous and the lost master was
    lately seen to wait for replicas, for none but servers of its database."""

    clone_hot_shards: bool = False
    """Whether shards of follower tiers are cloned while they are read too much, and such clones removed later. Off by
    default, because a clone costs memory and messages, and an operator may know better which shards are hot, and why.
    """

    remove_after_seconds: float = 3600.0
    """Time after which a leader or follower that has registered itself and is gone leaves the topology; 0: never. Long
    enough for a machine to start again: until then its shards come back to it, and it keeps its name. The last server
    of a tier stays, and so does any that an operator has added or marked down."""

    moves_check_seconds: float = 5.0
    """Interval between two looks for moves of shards that were interrupted while the writes of the shard waited. Each
    asks the master of every database which of its shards are fenced."""

    dry_run: bool = False
    """Log the actions that would be taken, and take none."""

    admin: str = "127.0.0.1:0"
    """``host:port`` of the metrics and health pages."""

    accepted_tokens_file: Path | None = None
    """The tokens that other watchers may show, as in the settings of leaders. None: tokens are not accepted."""

    token_file: Path | None = None
    """File of the token that this watcher shows to servers, readable by its account only. It is read for each
    connection."""

    token: str = field(default="", repr=False)
    """The token itself, in place of ``token_file``. Either needs ``accepted_tokens_file``. Empty: none, where
    servers have certificates, or ask for no credentials."""

    tls: TlsFiles = TlsFiles()
    """Certificates for connections to cache servers and with other watchers. Without them the connections are
    plain."""

    database_tls: DatabaseTlsFiles = DatabaseTlsFiles()

    insecure: bool = False
    """Listen for other watchers also where other machines reach this one without TLS, or without credentials. Otherwise
    it does not start there. Only for networks that nobody else can reach, or that encrypt and authenticate by
    themselves."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    audit: AuditSettings = AuditSettings()
    cloning: CloningPolicy = CloningPolicy()
    probes: ProbeSettings = ProbeSettings()
    lease: LeaseSettings = LeaseSettings()
    promotion: PromotionSettings = PromotionSettings()
