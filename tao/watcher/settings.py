"""A watcher's settings file, and the bounds of a promotion."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.model.errors import SettingsError
from tao.routing.hot_shards import CloningPolicy
from tao.storage.lease import EVENT_SECONDS
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class PromotionSettings:
    """Bounds of a promotion, by hand or by the watcher."""

    statement_seconds: float = 4.0
    """For a connection, and for each statement: above the second for which a server waits for a lock."""

    lock_seconds: float = 10.0
    """For the lock of the database: renewals of its master's lease hold it for a few round trips each second, and from
    one that hangs it is taken over after eight."""

    catch_up_seconds: float = 30.0
    """For a replica to receive and apply what it lacks. Writes fail meanwhile, so a planned switch is given up and
    undone then; look at the lag before."""

    settle_seconds: float = 1.0
    """Between the new topology and the first write at the new master: twice what servers take to notice it. Whoever
    answers critical reads from the old master has stopped by then."""

    acknowledging_seconds: float = 3.0
    """For a replica to connect to the new master under semi-synchronous replication. Without any it is opened all the
    same, and waits for none until one is back: said loudly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """The masters' leases."""

    seconds: float = 5.0
    """How long a master takes writes after the last renewal (and a second more). Also how long a watcher may be away
    before writes stop: a restart takes two."""

    renew_seconds: float = 1.0
    """Between two renewals: four may fail."""

    @property
    def over_after_seconds(self) -> float:
        """From the last renewal until the server has closed itself for certain."""
        return self.seconds + 2 * EVENT_SECONDS

    def __post_init__(self) -> None:
        if self.seconds < 3 * self.renew_seconds or self.renew_seconds <= 0:
            raise SettingsError(f"a lease must outlast three renewals: {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How servers are asked, and when they are marked."""

    interval_seconds: float = 0.5
    """Between two questions to a server: a ping of a cache server, a status of a database server."""

    timeout_seconds: float = 1.0
    """For an answer: ten round trips between far regions."""

    cache_failures: int = 3
    """Failures in a row until a cache server is down: with the interval, some two seconds."""

    answers_until_up: int = 3
    """Answers in a row until the mark is taken away; of a database server, answers that find nothing amiss."""

    master_gone_seconds: float = 5.0
    """How long a master must be silent before another one is promoted. A restart of the server, or of a switch, is
    over sooner; a promotion costs every cache of the database."""

    lag_down_seconds: float = 30.0
    """A replica this far behind is marked down: nearly every read that knows anything goes elsewhere already."""

    lag_up_seconds: float = 5.0
    """It has to come this near before the mark is taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherSettings:
    """Everything that one watcher process is told."""

    name: str
    """For logs, metrics and locks, such as ``watcher-east``."""

    region: str
    """Where it stands: whose addresses of the servers it uses."""

    topology_file: Path
    """The topology document, watched and changed. Its folder holds the locks."""

    peers: dict[str, str] = field(default_factory=dict)
    """Region → ``host:port`` of its watcher's admin page, for the other regions that have one. Servers there are marked
    only when that watcher sees the same: what cannot be reached from here may be well."""

    administrator_user: str = "tao_admin"
    """A database account that may do everything."""

    administrator_password: str = field(repr=False)
    """Its password."""

    replicator_user: str = "tao_replicator"
    """As whom replicas come in at their master."""

    replicator_password: str = field(repr=False)
    """Its password."""

    auto_promote: bool = True
    """Whether a lost master is replaced without an operator."""

    auto_rejoin: bool = False
    """Whether a server that follows nobody is made a replica again without an operator, when it has nothing of its own.
    Off, because somebody may be at work on it."""

    leases: bool = True
    """Whether masters are writable only under leases. Without them a master that is cut off takes writes until somebody
    closes it, and nothing is promoted automatically unless the database is semi-synchronous."""

    clone_hot_shards: bool = False
    """Whether shards of follower tiers are cloned while they are read too much, and clones made so given
    back. Off, because a clone costs memory and messages, and an operator may know better what is hot, and why."""

    dry_run: bool = False
    """Log what would be done, do nothing."""

    admin: str = "127.0.0.1:0"
    """``host:port`` of the metrics and health pages."""

    token: str = field(default="", repr=False)
    """Shared secret of the servers, shown to those that are pinged. Empty: none, on loopback."""

    tls: TlsFiles = TlsFiles()
    """Certificates for its connections with cache servers. None: plain ones."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    cloning: CloningPolicy = CloningPolicy()
    probes: ProbeSettings = ProbeSettings()
    lease: LeaseSettings = LeaseSettings()
    promotion: PromotionSettings = PromotionSettings()
