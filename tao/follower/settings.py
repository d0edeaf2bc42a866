"""A follower's settings file. Its addresses, region and tier are in the topology document, under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.follower.maintenance_path import SubscriptionSettings
from tao.follower.miss_path import DirectReadSettings
from tao.follower.unary_path import UnarySettings
from tao.observability.story import StorySettings
from tao.routing.read_rates import RateSettings
from tao.routing.retry_budget import RetrySettings
from tao.serving.amends import AmendsSettings
from tao.serving.database_source import MissSettings
from tao.serving.flights import FillSettings
from tao.serving.forward_path import ForwardSettings
from tao.serving.refills import RefillSettings
from tao.serving.remote_source import RemoteSettings
from tao.serving.stall_guard import StallSettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSettings:
    """Everything that one follower process is told."""

    name: str
    """As the topology calls it."""

    topology_file: Path
    """The topology document, watched."""

    schema_file: Path
    """The schema, watched; a compatible change is in use within a second."""

    reader_user: str = ""
    """Database account that only reads, for misses that no leader can serve. Empty: such misses fail."""

    reader_password: str = field(default="", repr=False)

    cache_mb: float = 256
    """Memory for the default arena, in MiB or parts of one: as much as the machine can spare."""

    arena_mb: Mapping[str, int] = field(default_factory=dict)
    """Further arenas by name, in MiB, for types whose schema entry names them."""

    token: str = field(default="", repr=False)
    """Shared secret of the servers: shown to leaders and siblings, asked of every peer. Empty: none, on loopback."""

    client_token: str = field(default="", repr=False)
    """Another one, for clients: who shows it can read and write the graph but cannot pose as a server or operator.
    Empty: clients show ``token``."""

    tls: TlsFiles = TlsFiles()
    """Certificates for all connections, of clients and among servers. None: plain ones."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    fills: FillSettings = FillSettings()
    refills: RefillSettings = RefillSettings()
    misses: RemoteSettings = RemoteSettings()
    direct_reads: DirectReadSettings = DirectReadSettings()
    database: MissSettings = MissSettings(max_rereads=3)
    """A database that is behind has caught up within milliseconds, or the master region is asked."""

    forwarding: ForwardSettings = ForwardSettings()
    amends: AmendsSettings = AmendsSettings()
    rates: RateSettings = RateSettings()
    retries: RetrySettings = RetrySettings()
    subscriptions: SubscriptionSettings = SubscriptionSettings()
    stalls: StallSettings = StallSettings()
    unary: UnarySettings = UnarySettings()
    story: StorySettings = StorySettings()
