"""The settings file of a leader. Its addresses and its databases are in the topology document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.delivery.settings import DeliverySettings, SpoolSettings
from tao.leader.consistency_checker import CheckerSettings
from tao.leader.heartbeats import HeartbeatSettings
from tao.leader.inverse_path import InverseSettings
from tao.leader.membership_filters import MembershipSettings
from tao.leader.miss_path import ReplicaSettings
from tao.leader.ownership import OwnershipSettings
from tao.leader.relay_path import RelayPathSettings
from tao.leader.replica_shards import ReplicaShardSettings
from tao.leader.write_path import WritePathSettings
from tao.model.settings import renamed
from tao.observability.key_history import KeyHistorySettings
from tao.routing.budgets import RetrySettings
from tao.serving.database_source import DatabaseReadSettings
from tao.serving.forward_path import ForwardSettings
from tao.serving.pause_detection import PauseSettings
from tao.serving.prefix_refills import RefillSettings
from tao.serving.remote_source import RemoteSettings
from tao.serving.single_flight import FillSettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """The settings of one leader process."""

    name: str
    """The leader's name in the topology."""

    topology_file: Path
    """The topology document. Changes are applied while serving."""

    schema_file: Path
    """The schema. A compatible change is in use within a second."""

    leader_user: str
    """The database account that reads and writes."""

    leader_password: str = field(repr=False)

    reader_user: str
    """The database account that only reads, for fills."""

    reader_password: str = field(repr=False)

    cache_mb: float = 256
    """Memory of the default arena, in MiB; fractions are allowed."""

    arena_mb: Mapping[str, int] = field(default_factory=dict)
    """Memory of further arenas by name, in MiB."""

    token: str = field(default="", repr=False)
    """Shared secret of the servers, which this leader shows to other leaders and requires from every peer. Empty:
    no secret, which suits loopback and closed networks."""

    client_token: str = field(default="", repr=False)
    """Secret of clients, which get only topology and schema from a leader. Empty: clients show ``token``."""

    tls: TlsFiles = TlsFiles()
    """Certificates for all connections with followers and other leaders. None: connections without TLS."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of logged events."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    fills: FillSettings = FillSettings(max_refetches=2)
    """Bounds of fills. A leader refetches less often than a follower, because its source itself repeats a read that is
    behind."""

    refills: RefillSettings = RefillSettings()
    misses: DatabaseReadSettings = DatabaseReadSettings()
    replica: ReplicaSettings = ReplicaSettings()
    membership: MembershipSettings = MembershipSettings()
    ownership: OwnershipSettings = OwnershipSettings()
    writes: WritePathSettings = WritePathSettings()
    inverses: InverseSettings = InverseSettings()
    replica_shards: ReplicaShardSettings = renamed(ReplicaShardSettings(), formerly="hosting")
    pause_detection: PauseSettings = renamed(PauseSettings(), formerly="stalls")
    relays: RelayPathSettings = RelayPathSettings()
    heartbeats: HeartbeatSettings = HeartbeatSettings()
    forwarding: ForwardSettings = ForwardSettings()
    retries: RetrySettings = RetrySettings()
    master_region: RemoteSettings = RemoteSettings()
    delivery: DeliverySettings = DeliverySettings()
    spool: SpoolSettings = SpoolSettings()
    key_history: KeyHistorySettings = renamed(KeyHistorySettings(), formerly="story")
    checker: CheckerSettings = CheckerSettings()
