"""A leader's settings file. Its addresses and its databases are in the topology document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.delivery.settings import DeliverySettings, SpoolSettings
from tao.leader.consistency_checker import CheckerSettings
from tao.leader.heartbeats import HeartbeatSettings
from tao.leader.hosting import HostingSettings
from tao.leader.inverse_path import InverseSettings
from tao.leader.membership_path import MembershipSettings
from tao.leader.miss_path import ReplicaSettings
from tao.leader.ownership import OwnershipSettings
from tao.leader.relay_path import RelaySettings
from tao.leader.write_path import WriteSettings
from tao.observability.story import StorySettings
from tao.routing.retry_budget import RetrySettings
from tao.serving.database_source import MissSettings
from tao.serving.flights import FillSettings
from tao.serving.forward_path import ForwardSettings
from tao.serving.refills import RefillSettings
from tao.serving.remote_source import RemoteSettings
from tao.serving.stall_guard import StallSettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderSettings:
    """Everything that one leader process is told."""

    name: str
    """As the topology calls it."""

    topology_file: Path
    """The topology document, watched."""

    schema_file: Path
    """The schema, watched; a compatible change is in use within a second."""

    leader_user: str
    """Database account that reads and writes."""

    leader_password: str = field(repr=False)

    reader_user: str
    """Database account that only reads, for fills."""

    reader_password: str = field(repr=False)

    cache_mb: float = 256
    """Memory for the default arena, in MiB or parts of one."""

    arena_mb: Mapping[str, int] = field(default_factory=dict)
    """Further arenas by name, in MiB."""

    token: str = field(default="", repr=False)
    """Shared secret of the servers: shown to other leaders, asked of every peer. Empty: none, on loopback."""

    client_token: str = field(default="", repr=False)
    """That of clients, who get nothing from a leader but topology and schema. Empty: clients show ``token``."""

    tls: TlsFiles = TlsFiles()
    """Certificates for all connections with followers and other leaders. None: plain ones."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    fills: FillSettings = FillSettings(max_refetches=2)
    """A leader's source repeats a read that is behind by itself."""

    refills: RefillSettings = RefillSettings()
    misses: MissSettings = MissSettings()
    replica: ReplicaSettings = ReplicaSettings()
    membership: MembershipSettings = MembershipSettings()
    ownership: OwnershipSettings = OwnershipSettings()
    writes: WriteSettings = WriteSettings()
    inverses: InverseSettings = InverseSettings()
    hosting: HostingSettings = HostingSettings()
    stalls: StallSettings = StallSettings()
    relays: RelaySettings = RelaySettings()
    heartbeats: HeartbeatSettings = HeartbeatSettings()
    forwarding: ForwardSettings = ForwardSettings()
    retries: RetrySettings = RetrySettings()
    master_region: RemoteSettings = RemoteSettings()
    delivery: DeliverySettings = DeliverySettings()
    spool: SpoolSettings = SpoolSettings()
    story: StorySettings = StorySettings()
    checker: CheckerSettings = CheckerSettings()
