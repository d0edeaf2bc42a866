"""Gathers the facts that `tao.admin.diagnosis` checks: from admin ports, databases and files of this machine."""

from __future__ import annotations

import asyncio
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from tao.admin.diagnosis import REQUIRED_OPTIONS, DatabaseFacts, Facts, FileFacts, JournalFacts, ServerFacts
from tao.admin.server_stats import server_stats
from tao.etcd.location import is_etcd_url
from tao.model.errors import TaoError
from tao.model.topology import PlacedDatabaseServer, Topology
from tao.replication import lease
from tao.replication.accounts import Account
from tao.storage.dialect import SessionSetup
from tao.storage.session import open_session

_SECONDS: Final = 5.0
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


async def gather_facts(topology: Topology, administrator: Account | None, settings_files: Sequence[Path]) -> Facts:
    """Ask every server and database, and look at the files that the settings files name.

    ``administrator``: None leaves the databases out."""
    found = await asyncio.gather(*(_server(*each) for each in _addresses(topology)))
    databases: list[DatabaseFacts] = []
    if administrator is not None:
        databases = await asyncio.gather(*(_database(each, administrator) for each in topology.database_servers))
    files = [file for settings in settings_files for file in await asyncio.to_thread(files_of, settings)]
    unique = {(file.path, file.kind): file for file in files}
    return Facts(topology.version, tuple(found), tuple(databases), tuple(unique.values()))


def _addresses(topology: Topology) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield name, role and ports of every server."""
    for place, server in topology.cache_servers:
        yield server.name, place.role, {"admin": server.admin, "grpc": server.grpc, "frames": server.frames}
    for region in topology.regions:
        for tailer in region.tailers:
            yield tailer.name, "tailer", {"admin": tailer.admin}
        for watcher in region.watchers:
            yield watcher.name, "watcher", {"admin": watcher.admin, "frames": watcher.frames}


async def _server(name: str, role: str, ports: Mapping[str, str]) -> ServerFacts:
    silent = [
        f"{kind} port {address} does not answer: {error}"
        for kind, address in ports.items()
        if address and (error := await _connect_error(address))
    ]
    stats: Mapping[str, Any] = {}  # Any: each role has its own figures
    began = time.time()
    if ports["admin"]:
        try:
            stats = await server_stats(ports["admin"])
        except TaoError:
            pass  # its admin port is among the silent ones, or `tao status` says more
    clock = stats.get("clock_unix_ms")
    return ServerFacts(
        name=name,
        role=role,
        silent_ports=tuple(silent),
        topology_version=stats.get("topology_version"),
        schema_hash=stats.get("schema_hash"),
        version=stats.get("version"),
        clock_ahead_seconds=None if clock is None else clock / 1000 - (began + time.time()) / 2,
        journal=_journal_facts(stats.get("journal")),
        is_heard=role != "watcher" or bool(ports["frames"]),
    )


def _journal_facts(figures: Mapping[str, Any] | None) -> JournalFacts | None:
    if figures is None:
        return None
    return JournalFacts(
        oldest_seconds=max(figures["oldest_seconds"].values()),
        is_late=figures["late"],
        parked=sum(figures["parked"].values()),
        lost=figures["torn_rows"] + figures["set_aside_total"],
        trouble=figures["trouble"],
        uncopied=figures.get("sibling_trouble", ""),  # a follower of an earlier version keeps no copies
    )


async def _connect_error(address: str) -> str:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.close()
    except (OSError, TimeoutError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


async def _database(placed: PlacedDatabaseServer, administrator: Account) -> DatabaseFacts:
    server, database = placed.server, placed.database.name
    deadline = asyncio.get_running_loop().time() + _SECONDS
    wanted = {"server_id", "version", *(name for table in REQUIRED_OPTIONS.values() for name in table)}
    names = ", ".join(f"'{name}'" for name in sorted(wanted))
    try:
        session = await open_session(
            administrator.at(server), server.name, SessionSetup(writes=False), deadline=deadline
        )
        try:
            rows = await session.named(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})", deadline=deadline)
            began = time.time()
            clock = await session.named("SELECT UNIX_TIMESTAMP(NOW(6)) AS seconds", deadline=deadline)
            ahead = float(clock[0]["seconds"]) - (began + time.time()) / 2
            has_abandoned_lease = await lease.has_abandoned_lease(session, deadline=deadline)
        finally:
            session.quit()
    except TaoError as error:
        return DatabaseFacts(server.name, database, error=error.message)
    options = {_text(row["Variable_name"]): _text(row["Value"]) for row in rows}
    version = _VERSION.search(options.pop("version", ""))
    return DatabaseFacts(
        server.name,
        database,
        flavour=session.dialect.value,
        version=tuple(map(int, version.groups())) if version else (),
        options=tuple(sorted(options.items())),
        clock_ahead_seconds=ahead,
        has_abandoned_lease=has_abandoned_lease,
    )


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def files_of(settings_file: Path) -> list[FileFacts]:
    """Look at a settings file, which holds passwords, and at the files and folders that it names."""
    own = look_at(settings_file, "secret")
    if own.error:
        return [own]
    try:
        found = yaml.safe_load(settings_file.read_bytes())
    except (OSError, yaml.YAMLError) as error:
        return [FileFacts(str(settings_file), "secret", f"it cannot be read: {str(error).splitlines()[0]}")]
    settings = found if isinstance(found, dict) else {}
    tls, spool, etcd = (_section(settings, name) for name in ("tls", "spool", "etcd"))
    documents = [settings.get("topology_file"), settings.get("schema_file")]
    named = [
        *((each, "document") for each in documents if not is_etcd_url(str(each))),
        (etcd.get("password_file"), "secret"),
        (etcd.get("private_key"), "secret"),
        (etcd.get("certificate"), "document"),
        (etcd.get("authorities"), "document"),
        (tls.get("private_key"), "secret"),
        (tls.get("certificate"), "document"),
        (tls.get("authorities"), "document"),
        (settings.get("state_folder"), "folder"),
        (spool.get("folder"), "folder"),
    ]
    return [own, *(look_at(settings_file.parent / path, kind) for path, kind in named if path)]


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of a settings file (`Any`: whatever the file has), empty when there is none."""
    found = settings.get(name)
    return found if isinstance(found, dict) else {}


def look_at(path: Path, kind: str) -> FileFacts:
    """Return the rights of a file, and the free disk of a folder."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        free_mb = shutil.disk_usage(path).free // 2**20 if kind == "folder" else None
    except OSError as error:
        return FileFacts(str(path), kind, f"it cannot be used: {error.strerror}")
    return FileFacts(str(path), kind, mode=mode, free_mb=free_mb)
