"""The settings that followers and leaders have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.etcd.location import EtcdSettings, Location
from tao.model.settings import renamed
from tao.observability.audit_log import AuditSettings
from tao.observability.key_history import KeyHistorySettings
from tao.routing.budgets import RetrySettings
from tao.routing.fair_shares import ShareSettings
from tao.runtime.signed_tokens import JwtSettings
from tao.serving.forward_path import ForwardSettings
from tao.serving.prefix_refills import RefillSettings
from tao.serving.registration import RegistrationSettings
from tao.serving.requests import PauseSettings
from tao.storage.tls import DatabaseTlsFiles
from tao.wire.settings import DoorstepSettings
from tao.wire.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheServerSettings:
    """Settings of every cache server."""

    name: str
    """The server's name in the topology."""

    topology_file: Location
    """The topology document: a file, or ``etcd://HOST:PORT,…/PREFIX`` (``etcds://`` with TLS). Changes are applied
    while serving."""

    schema_file: Location
    """The schema: a file, or the URL of etcd as in ``topology_file``. A compatible change is in use within a second."""

    access_file: Location | None = None
    """The access document, which says what callers may do: a file, or the URL of etcd as in ``topology_file``. A change
    is in use within a second. None: ``access.yaml`` beside the topology file, or what etcd has beside the topology;
    without such a document every caller may do everything."""

    etcd: EtcdSettings = EtcdSettings()

    cache_mb: float = 256
    """Memory for the default arena, in MiB; fractions are allowed. Give it as much as the machine can spare."""

    arena_mb: Mapping[str, int] = field(default_factory=dict)
    """Further arenas by name, in MiB, for the types whose schema entry names them."""

    accepted_tokens_file: Path | None = None
    """The tokens that peers may show, as digests with the role that each vouches for; `tao token` makes them. A change
    is in use within a second. None: tokens are not accepted; without other credentials either, every peer is
    believed, which suits loopback and closed networks."""

    token_file: Path | None = None
    """File of the token that this server shows to other servers, readable by its account only. It is read for each
    connection."""

    token: str = field(default="", repr=False)
    """The token itself, in place of ``token_file``. Either needs ``accepted_tokens_file``. Empty: none, where servers
    have certificates, or ask for no credentials."""

    tls: TlsFiles = TlsFiles()
    """Certificates for all connections, with clients and among servers. None: plain connections."""

    database_tls: DatabaseTlsFiles = DatabaseTlsFiles()
    jwt: JwtSettings = JwtSettings()

    insecure: bool = False
    """Serve also where other machines reach the server without TLS, or without credentials. Otherwise it does not
    start there. Only for networks that nobody else can reach, or that encrypt and authenticate by themselves."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """Format of the log: ``json`` for machines, ``console`` for a person at a terminal."""

    registration: RegistrationSettings = RegistrationSettings()
    doorstep: DoorstepSettings = DoorstepSettings()
    shares: ShareSettings = ShareSettings()
    audit: AuditSettings = AuditSettings()
    refills: RefillSettings = RefillSettings()
    forwarding: ForwardSettings = ForwardSettings()
    retries: RetrySettings = RetrySettings()
    pause_detection: PauseSettings = renamed(PauseSettings(), formerly="stalls")
    key_history: KeyHistorySettings = renamed(KeyHistorySettings(), formerly="story")
