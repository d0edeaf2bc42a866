"""The settings file of a follower. Its addresses, region and tier are in the topology document, under its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.follower.miss_path import DirectReadSettings
from tao.follower.subscriptions import SubscriptionSettings
from tao.follower.unary_path import UnarySettings
from tao.model.settings import renamed
from tao.observability.key_history import KeyHistorySettings
from tao.routing.budgets import RetrySettings
from tao.routing.read_rates import RateSettings
from tao.serving.database_source import DatabaseReadSettings
from tao.serving.forward_path import ForwardSettings, SiblingInvalidationSettings
from tao.serving.pause_detection import PauseSettings
from tao.serving.prefix_refills import RefillSettings
from tao.serving.remote_source import RemoteSettings
from tao.serving.single_flight import FillSettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerSettings:
    """The settings of one follower process."""

    name: str
    """The server's name in the topology."""

    topology_file: Path
    """The topology document, which is watched for changes."""

    schema_file: Path
    """The schema file, which is watched: a compatible change is in use within a second."""

    reader_user: str = ""
    """Database account that may only read, for misses and critical reads that no leader can serve. Empty: they
    fail."""

    reader_password: str = field(default="", repr=False)

    cache_mb: float = 256
    """Memory for the default arena, in MiB; fractions are allowed. Give it as much as the machine can spare."""

    arena_mb: Mapping[str, int] = field(default_factory=dict)
    """Further arenas by name, in MiB, for the types whose schema entry names them."""

    token: str = field(default="", repr=False)
    """Shared secret of the servers: sent to leaders and siblings, and required of every peer. Empty: no secret, which
    suits loopback."""

    client_token: str = field(default="", repr=False)
    """Another secret, for clients: a peer that sends it can read and write the graph but cannot act as a server or
    operator. Empty: clients send ``token``."""

    tls: TlsFiles = TlsFiles()
    """Certificates for all connections, with clients and among servers. None: plain connections."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """Format of the log: ``json`` for machines, ``console`` for a person at a terminal."""

    fills: FillSettings = FillSettings()
    refills: RefillSettings = RefillSettings()
    misses: RemoteSettings = RemoteSettings()
    direct_reads: DirectReadSettings = DirectReadSettings()
    database: DatabaseReadSettings = DatabaseReadSettings(max_rereads=3)
    """Few rereads: a database that is behind catches up within milliseconds, or the master region is asked."""

    forwarding: ForwardSettings = ForwardSettings()
    sibling_invalidation: SiblingInvalidationSettings = renamed(SiblingInvalidationSettings(), formerly="amends")
    rates: RateSettings = RateSettings()
    retries: RetrySettings = RetrySettings()
    subscriptions: SubscriptionSettings = SubscriptionSettings()
    pause_detection: PauseSettings = renamed(PauseSettings(), formerly="stalls")
    unary: UnarySettings = UnarySettings()
    key_history: KeyHistorySettings = renamed(KeyHistorySettings(), formerly="story")
