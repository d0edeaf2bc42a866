"""Makes a backup of all databases (`tao backup create`), and keeps their binlogs since (`tao backup binlogs`).

Each database is dumped from one snapshot of one server, a replica where there is one. The dumps run at the same time,
but their snapshots are not one: what is written to two databases meanwhile may be in one of them alone. A restore
repairs such pairs. A replica is dumped once it has everything that its master had when the backup began, so that every
write that was acknowledged before is in the backup.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from tao import __version__
from tao.admin.backup_files import (
    BINLOG_INDEX,
    MANIFEST,
    BackupUnusable,
    BinlogCopy,
    BinlogIndex,
    DatabaseDump,
    FileEntry,
    FileFault,
    GzipWriter,
    Manifest,
    entries,
    entry_of,
    fault_of,
    make_folder,
    read_index,
    read_manifest,
    sync_folder,
    write_document,
    write_file,
    writing,
)
from tao.admin.replication import administrator_session
from tao.model.errors import OperatorError
from tao.model.topology import Database, DatabaseServer, Topology, region_of_place
from tao.replication.accounts import Account
from tao.replication.binlog_copy import BinlogsMissing, close_binlog, copy_files, files_since, next_file
from tao.replication.database_copy import CopyProgress, dump_schemas
from tao.replication.database_tools import DatabaseTools, find_binlog_reader, find_tools
from tao.replication.replica_seed import read_contents
from tao.replication.server_statements import executed_position, wait_for_position
from tao.storage.dialect import Dialect

STALL_SECONDS: Final = 300.0
"""Longest time without a byte moving, as when a replica is seeded."""
CATCH_UP_SECONDS: Final = 60.0
"""Longest wait for a replica to have what its master had at first."""
_STATEMENT_SECONDS: Final = 30.0

OnProgress = Callable[[str, str], None]
"""Receives the name of a database, and what was done so far."""


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Source:
    """The server that a database is backed up from."""

    database: Database
    place: str

    @property
    def server(self) -> DatabaseServer:
        """The server."""
        return self.database.places[self.place]

    @property
    def master(self) -> DatabaseServer:
        """The master of its database."""
        return self.database.servers[self.database.master_region]


def choose_sources(topology: Topology, region: str | None = None) -> list[Source]:
    """Choose for each database a replica that is in use, or else the master. A standby comes after other replicas: one
    that lags behind a dump would be promoted later. ``region``: choose that region's servers.

    Raises `OperatorError` when the region has no server of a database that is in use."""
    return [Source(database, _choose_place(database, region)) for database in topology.databases]


def _choose_place(database: Database, wanted: str | None) -> str:
    places = [place for place in database.places if wanted in (None, region_of_place(place))]
    if not places:
        raise OperatorError(f"{database.name} has no server in {wanted!r}; there are {', '.join(database.servers)}")
    in_use = [place for place in places if not database.places[place].down]
    replicas = [place for place in in_use if place != database.master_region]
    if replicas or wanted is None:
        return replicas[0] if replicas else database.master_region
    if not in_use:
        raise OperatorError(f"{database.servers[wanted].name} is marked down: name another region")
    return in_use[0]


async def create_backup(
    folder: Path,
    topology: Topology,
    documents: Mapping[str, bytes],
    administrator: Account,
    *,
    region: str | None = None,
    on_progress: OnProgress,
) -> Manifest:
    """Back all databases up into a new folder.

    ``documents``: the files to keep by name, such as the topology. The manifest is written last: a folder without one
    is no backup. Raises `OperatorError`, `CopyFailed`, and what the servers raise."""
    sources = choose_sources(topology, region)
    with writing(folder):
        await asyncio.to_thread(make_folder, folder)
        begun = unix_ms()
        kept = tuple(write_file(folder / name, text) for name, text in documents.items())
        dumps = await together(_dump(each, folder, administrator, on_progress) for each in sources)
        manifest = Manifest(
            tao_version=__version__,
            begun_unix_ms=begun,
            ended_unix_ms=unix_ms(),
            shards=topology.shards,
            documents=kept,
            databases=tuple(dumps),
        )
        sync_folder(folder)
        write_document(folder / MANIFEST, manifest)
    return manifest


async def _dump(source: Source, folder: Path, administrator: Account, on_progress: OnProgress) -> DatabaseDump:
    database = source.database
    dialect = await _catch_up(source, administrator)
    tools = await find_tools(dialect, os.environ)
    schemas = sorted(await _schemas(source, administrator))
    with GzipWriter(folder / f"{database.name}.sql.gz") as file:
        if schemas:
            copied, snapshot_unix_ms = await _dump_schemas(source, schemas, tools, administrator, file, on_progress)
        else:  # The tools dump no empty list of schemas.
            async with administrator_session(source.server, administrator) as session:
                copied = CopyProgress(0, 0, await executed_position(session, deadline=soon()))
            snapshot_unix_ms = unix_ms()
        entry = file.entry
    return DatabaseDump(
        name=database.name,
        server=source.server.name,
        region=region_of_place(source.place),
        dialect=dialect.value,
        position=copied.position,
        version_epoch=database.version_epoch,
        shards=database.shards,
        snapshot_unix_ms=snapshot_unix_ms,
        statement_bytes=copied.statement_bytes,
        file=entry,
    )


async def _dump_schemas(
    source: Source,
    schemas: Sequence[str],
    tools: DatabaseTools,
    administrator: Account,
    file: GzipWriter,
    on_progress: OnProgress,
) -> tuple[CopyProgress, int]:
    """Write a dump to a file. Returns what it has, and when its snapshot was taken."""
    snapshot_unix_ms = 0
    seen: asyncio.Task[set[str]] | None = None

    def progress(copied: CopyProgress) -> None:
        nonlocal snapshot_unix_ms, seen
        if copied.schemas and seen is None:
            snapshot_unix_ms = unix_ms()  # The dump takes its snapshot before its first schema.
            seen = asyncio.create_task(_schemas(source, administrator), name="schemas after the snapshot")
        on_progress(source.database.name, dump_progress(copied, len(schemas)))

    async def write(chunk: bytes) -> None:
        await asyncio.to_thread(file.write, chunk)

    try:
        copied = await dump_schemas(
            tools, administrator.at(source.server), schemas, write, stall_seconds=STALL_SECONDS, on_progress=progress
        )
        if seen is not None and (new := await seen - set(schemas)):
            raise OperatorError(
                f"{', '.join(sorted(new))} came into being when the dump of {source.server.name} began, and may be "
                "missing in it: delete the folder, and make the backup again"
            )
    finally:
        if seen is not None:
            seen.cancel()
    return copied, snapshot_unix_ms


async def _schemas(source: Source, administrator: Account) -> set[str]:
    """Return the schemas of shards on a server, with the copies of moves and what shards have left behind: the binlog
    goes on to change these, too."""
    async with administrator_session(source.server, administrator) as session:
        return set((await read_contents(session, deadline=soon())).schemas)


async def _catch_up(source: Source, administrator: Account) -> Dialect:
    """Return the dialect of the server, once it has everything that its master has now."""
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(administrator_session(source.server, administrator))
        if source.server is not source.master:
            master = await stack.enter_async_context(administrator_session(source.master, administrator))
            position = await executed_position(master, deadline=soon())
            await wait_for_position(session, position, deadline=soon(CATCH_UP_SECONDS))
        return session.dialect


async def archive_binlogs(
    folder: Path,
    load_topology: Callable[[], Awaitable[Topology]],
    administrator: Account,
    *,
    region: str | None = None,
    on_progress: OnProgress,
) -> BinlogIndex:
    """Copy the binlog files since the backup, or since the last copy, that are closed now.

    A database's binlog is taken from the server that it was taken from before, or was dumped from, while that is in
    use; another server's is copied from the dump's position on. Once a database has got or lost shards, by a move or
    because shards were added, its dump and its binlog make no whole database any more: then `BinlogsMissing` is raised,
    and the backup reaches as far as the copy before. Raises `BackupUnusable`, `CopyFailed` and what the servers raise,
    too. The topology is read again at the end: what a shard was written at its new database is in no database's part
    of the backup."""
    manifest, index = read_manifest(folder), read_index(folder)
    topology = await load_topology()
    databases = {database.name: database for database in topology.databases}
    missing = [dump.name for dump in manifest.databases if dump.name not in databases]
    if missing:
        raise OperatorError(f"the topology has no {', '.join(missing)}: is it that of the cluster of this backup?")
    _check_shards(manifest, topology)
    sources = [_continued(databases[dump.name], dump, index, region) for dump in manifest.databases]
    with writing(folder):
        new = await together(
            _archive(source, dump, index, folder, administrator, on_progress)
            for source, dump in zip(sources, manifest.databases, strict=True)
        )
        _check_shards(manifest, await load_topology())
        replaced = {(each.database, each.server) for each in new}
        kept = [each for each in index.copies if (each.database, each.server) not in replaced]
        index = BinlogIndex(copies=(*kept, *new))
        write_document(folder / BINLOG_INDEX, index)
    return index


def _check_shards(manifest: Manifest, topology: Topology) -> None:
    held = {database.name: shards_of(database) for database in topology.databases}
    changed = [dump.name for dump in manifest.databases if held.get(dump.name) != shards_in(dump.shards)]
    if changed:
        raise BinlogsMissing(
            f"shards were moved or added at {', '.join(changed)} since the backup, so its binlogs do not continue it: "
            "make a new backup"
        )


def _continued(database: Database, dump: DatabaseDump, index: BinlogIndex, region: str | None) -> Source:
    """Choose the server whose binlog continues the backup of a database."""
    before = index.of(database.name)
    wanted = dump.server if before is None else before.server
    for place, server in database.places.items():
        if region is None and server.name == wanted and not server.down:
            return Source(database, place)
    return Source(database, _choose_place(database, region))


async def _archive(
    source: Source,
    dump: DatabaseDump,
    index: BinlogIndex,
    folder: Path,
    administrator: Account,
    on_progress: OnProgress,
) -> BinlogCopy:
    name, server = source.database.name, source.server.name
    known = next((each for each in index.copies if (each.database, each.server) == (name, server)), None)
    before = known.files if known is not None else ()
    covers_until = unix_ms()
    dialect = await _catch_up(source, administrator)
    reader = await find_binlog_reader(dialect, os.environ)
    async with administrator_session(source.server, administrator) as session:
        closed = await close_binlog(session, deadline=soon())
        if before:
            wanted = names_after(before[-1], closed, server)
        else:
            wanted = list(await files_since(session, list(closed), dump.position, deadline=soon()))
    place = folder / "binlogs" / name / server
    incoming = place / ".incoming"
    shutil.rmtree(incoming, ignore_errors=True)
    incoming.mkdir(parents=True, mode=0o700)
    on_progress(name, f"copying {len(wanted)} binlog files of {server}")
    sizes = {each: closed[each] for each in wanted}
    login = administrator.at(source.server)
    await copy_files(reader, dialect, login, sizes, incoming, stall_seconds=STALL_SECONDS)
    added = [await asyncio.to_thread(_admit, incoming / each, place, folder) for each in wanted]
    incoming.rmdir()
    sync_folder(place)
    return BinlogCopy(database=name, server=server, covers_until_unix_ms=covers_until, files=(*before, *added))


def names_after(last: FileEntry, closed: Mapping[str, int], server: str) -> list[str]:
    """Return the closed files behind the last one that was copied. Raises `BinlogsMissing` when there is a gap."""
    name, names = Path(last.name).name, list(closed)
    if name in closed and closed[name] == last.size_bytes:
        return names[names.index(name) + 1 :]
    if name not in closed and next_file(name) in closed:
        return names[names.index(next_file(name)) :]
    raise BinlogsMissing(
        f"{server} has removed binlog files behind {name}, or begun new ones: make a new backup, and copy its binlogs "
        "more often than the server removes them"
    )


def _admit(path: Path, place: Path, folder: Path) -> FileEntry:
    """Make a copied file durable, and move it to its place."""
    path.chmod(0o600)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return entry_of(path.rename(place / path.name), folder)


class BackupReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of checking a backup. ``restorable``: from when to when it can be restored, by database."""

    files: int
    size_bytes: int
    faults: tuple[FileFault, ...]
    begun_unix_ms: int
    from_unix_ms: int
    until_unix_ms: int


async def verify_backup(folder: Path, on_progress: OnProgress = lambda _name, _done: None) -> BackupReport:
    """Compare every file of a backup with the size and the hash that it was written with. Raises `BackupUnusable` when
    there is no manifest to compare with."""
    manifest, index = read_manifest(folder), read_index(folder)
    found = list(entries(manifest, index))
    faults = []
    for entry in found:
        on_progress(entry.name, "being read")
        fault = await asyncio.to_thread(fault_of, entry, folder)
        if fault is not None:
            faults.append(fault)
    first, last = restorable(manifest, index)
    return BackupReport(
        files=len(found),
        size_bytes=sum(entry.size_bytes for entry in found),
        faults=tuple(faults),
        begun_unix_ms=manifest.begun_unix_ms,
        from_unix_ms=first,
        until_unix_ms=last,
    )


async def check_backup(folder: Path) -> None:
    """Raise `BackupUnusable` unless every file of the backup is as it was written."""
    report = await verify_backup(folder)
    if report.faults:
        faults = "; ".join(f"{each.file}: {each.fault}" for each in report.faults)
        raise BackupUnusable(f"{folder} is damaged: {faults}")


def restorable(manifest: Manifest, index: BinlogIndex) -> tuple[int, int]:
    """Return the times between which every database can be restored to one moment, in milliseconds since 1970; both
    are the time of the backup when no binlog was copied."""
    first = max(dump.snapshot_unix_ms for dump in manifest.databases)
    copies = [index.of(dump.name) for dump in manifest.databases]
    return first, max(first, min(first if each is None else each.covers_until_unix_ms for each in copies))


async def together(jobs: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Do jobs side by side and return their results in order. The first that fails ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def shards_of(database: Database) -> list[int]:
    """Return all shards of a database."""
    return shards_in(database.shards)


def shards_in(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Return all shards of some ranges, each with its last shard."""
    return [shard for first, last in ranges for shard in range(first, last + 1)]


def dump_progress(copied: CopyProgress, schemas: int) -> str:
    """Return the progress of a dump as text for people."""
    return f"{copied.statement_bytes / 1e6:,.0f} MB of statements, schema {copied.schemas:,} of {schemas:,}"


def unix_ms() -> int:
    """Return the time in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def soon(seconds: float = _STATEMENT_SECONDS) -> float:
    """Return a deadline in the loop's time."""
    return asyncio.get_running_loop().time() + seconds
