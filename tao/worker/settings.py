"""A worker's settings file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tao.etcd.location import EtcdSettings, Location
from tao.wire.tls import TlsFiles
from tao.worker.runner import RunnerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """The settings of one worker process."""

    name: str
    """Name of the worker in logs, metrics and the rows of its jobs, such as ``east-worker-1``. No other worker may have
    it."""

    region: str
    """The region whose leaders hand out jobs, and whose followers the worker asks. Each region that masters shards
    needs workers of its own."""

    topology_file: Location
    """The topology document: a file, or ``etcd://HOST:PORT,…/PREFIX`` (``etcds://`` with TLS). Changes are noticed."""

    etcd: EtcdSettings = EtcdSettings()

    admin: str = "127.0.0.1:0"
    """``host:port`` of the metrics and health pages. Port 0: any free port."""

    token_file: Path | None = None
    """File of the token that this worker shows to servers, readable by its account only. It is read for each
    connection."""

    token: str = field(default="", repr=False)
    """The token itself, in place of ``token_file``. Empty: none, for servers on loopback."""

    tls: TlsFiles = TlsFiles()
    """Certificates for connections to servers. None: connections are not encrypted."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged."""

    log_form: Literal["json", "console"] = "json"
    """``json`` for machines, ``console`` for a person at a terminal."""

    ask_seconds: float = 5.0
    """Timeout of one request to a leader."""

    runner: RunnerSettings = RunnerSettings()
