"""Restores a backup into a new cluster (`tao backup restore`), to its end or to a moment in between.

The new cluster has a topology document with the same databases and shards, on servers of its own, which have accounts
and no shards. Each master is marked as half seeded and its services are locked out while it is filled, so nothing reads
or promotes it before it is whole, and an interrupted restore begins anew. Replicas get everything by replication.

What the lost cluster did after the last restored write is unknown here. So no number that it may have given out then is
given out again: the shards' version epochs rise above any that it can have had, and new ids begin above all that a
leader may have reserved by then, whatever the backup lacks. A token or a version of the lost time is then an older
epoch's, and its reader gets `WriteLost`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from tao.admin.access import ReaderLogin, access_of
from tao.admin.backup import (
    STALL_SECONDS,
    OnProgress,
    check_backup,
    dump_progress,
    restorable,
    shards_of,
    soon,
    together,
    unix_ms,
)
from tao.admin.backup_files import BinlogIndex, DatabaseDump, Manifest, open_dump
from tao.admin.documents import topology_file
from tao.admin.repair import find_faults, repair_faults, total_repaired
from tao.admin.replication import administrator_session
from tao.admin.server_stats import unreadiness, wait_until_ready
from tao.etcd.location import Location
from tao.model.errors import OperatorError, TaoError, TopologyConflict
from tao.model.ids import LostTimes
from tao.model.ports import TopologyStore
from tao.model.topology import Database, DatabaseServer, Topology, ranges_text
from tao.model.versions import MAX_EPOCH
from tao.replication.accounts import Account
from tao.replication.binlog_copy import replay
from tao.replication.database_copy import CopyProgress, load_dump
from tao.replication.database_copy import OnProgress as OnCopied
from tao.replication.database_tools import CHUNK_BYTES, DatabaseTools, find_binlog_reader, find_tools
from tao.replication.replica_seed import close_for_seeding, read_contents, reopen_after_seeding
from tao.replication.server_statements import (
    LostIds,
    highest_epoch,
    member_state,
    raise_epoch,
    schemas_with_reserved_ids,
    set_read_only,
)
from tao.storage.dialect import Dialect
from tao.storage.names import schema_name
from tao.topology import edits
from tao.wire.tls import TlsFiles

UNKNOWN_PROMOTIONS: Final = 1_000
"""Promotions that the lost cluster may have had after the backup, where its topology document is not known any more."""
UNKNOWN_MOVES: Final = 8
"""Moves that a shard may have had after the last promotion of its databases, where the topology document of the lost
cluster is known: a move raises the version epoch of the shard's row, and no document shows it. Caches keep a count in
few bytes when its version is less than 16 epochs behind the shard's (`tao.cache.packed`): that of the last promotion is
nine behind then, and the six epochs before have room as well."""
_MAX_CONFLICTS: Final = 20
"""Bound on conflicting changes of the topology; each takes milliseconds."""
_LONG_SECONDS: Final = 600.0
"""Time limit of statements that touch all shards, or wait for locks."""
_READY_SECONDS: Final = 60.0


class RestoreRefused(OperatorError):
    """The backup cannot be restored there. Nothing was changed; the message says why and what to do."""

    reason = "RESTORE_REFUSED"


@dataclass(frozen=True, slots=True)
class TargetState:
    """A database server of the new cluster, as it was found. ``half_restored``: a restore of it was interrupted."""

    server: DatabaseServer
    is_master: bool
    error: str = ""
    dialect: str = ""
    shards: int = 0
    half_restored: bool = False
    follows: str = ""


@dataclass(frozen=True, slots=True)
class DatabaseRestore:
    """How one database is restored. ``replaces``: what an interrupted restore left is dropped first. ``binlogs``:
    files within the folder of the backup. ``known_epoch``: the highest version epoch of the lost cluster that is known;
    the new one is above it by ``unknown_epochs`` and one."""

    database: Database
    dump: DatabaseDump
    replaces: bool
    binlogs: tuple[str, ...]
    until_unix_seconds: int | None
    known_epoch: int
    unknown_epochs: int

    @property
    def master(self) -> DatabaseServer:
        """The server that is filled."""
        return self.database.servers[self.database.master_region]


class RestoredDatabase(msgspec.Struct, frozen=True, kw_only=True):
    """A database that was restored. ``binlogs``: the number of binlog files that were run again."""

    database: str
    server: str
    shards: int
    statement_bytes: int
    binlogs: int
    version_epoch: int


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a restore. ``until_unix_ms``: the moment that was asked for; None: all that the backup has."""

    databases: tuple[RestoredDatabase, ...]
    topology_version: int
    until_unix_ms: int | None


def plan_restore(
    manifest: Manifest,
    index: BinlogIndex,
    topology: Topology,
    targets: Mapping[str, Sequence[TargetState]],
    *,
    until_unix_seconds: int | None = None,
    former: Topology | None = None,
) -> list[DatabaseRestore]:
    """Decide how each database is restored.

    ``targets``: the servers of each database. ``former``: the topology of the lost cluster as it was last, which says
    how often its masters were promoted, but not how often its shards were moved; None: it is not known. Raises
    `RestoreRefused`."""
    _check_shape(manifest, topology)
    if until_unix_seconds is not None:
        _check_moment(manifest, index, until_unix_seconds)
    return [
        _plan_database(manifest, index, topology, targets, dump, until_unix_seconds, former)
        for dump in manifest.databases
    ]


def _plan_database(
    manifest: Manifest,
    index: BinlogIndex,
    topology: Topology,
    targets: Mapping[str, Sequence[TargetState]],
    dump: DatabaseDump,
    until_unix_seconds: int | None,
    former: Topology | None,
) -> DatabaseRestore:
    database = next(each for each in topology.databases if each.name == dump.name)
    begun = any(target.is_master and target.half_restored for target in targets[dump.name])
    for target in targets[dump.name]:
        _check_target(target, dump, begun)
    copy = index.of(dump.name)
    # A shard that was moved here brought an epoch above that of the database that it came from.
    known = [each.version_epoch for each in former.databases] if former is not None else []
    return DatabaseRestore(
        database=database,
        dump=dump,
        replaces=begun,
        binlogs=tuple(file.name for file in copy.files) if copy is not None else (),
        until_unix_seconds=until_unix_seconds,
        known_epoch=max(dump.version_epoch, database.version_epoch, *known),
        unknown_epochs=UNKNOWN_PROMOTIONS if former is None else UNKNOWN_MOVES,
    )


def _check_shape(manifest: Manifest, topology: Topology) -> None:
    backed_up = {dump.name: dump.shards for dump in manifest.databases}
    there = {database.name: database.shards for database in topology.databases}
    if (manifest.shards, backed_up) == (topology.shards, there):
        return
    shape = "; ".join(f"{name} with the shards {ranges_text(shards)}" for name, shards in backed_up.items())
    raise RestoreRefused(
        f"the topology has not the databases of the backup: write one with {manifest.shards} shards and the databases "
        f"{shape}; servers and regions may differ"
    )


def _check_moment(manifest: Manifest, index: BinlogIndex, until_unix_seconds: int) -> None:
    first, last = restorable(manifest, index)
    missing = [dump.name for dump in manifest.databases if index.of(dump.name) is None]
    if missing:
        raise RestoreRefused(
            f"no binlog of {', '.join(missing)} was copied (`tao backup binlogs`): without --until the backup is "
            "restored as it was made"
        )
    if not first <= until_unix_seconds * 1_000 <= last:
        raise RestoreRefused(
            f"--until is outside of what the backup and its binlogs cover: {utc_text(first)} to {utc_text(last)}"
        )


def _check_target(target: TargetState, dump: DatabaseDump, begun: bool) -> None:
    """Check a server. ``begun``: a restore was interrupted, of which a replica may have received shards."""
    name = target.server.name
    if target.error:
        raise RestoreRefused(f"{name} does not answer, so it cannot be seen that it is empty: {target.error}")
    if target.shards and not (begun and (target.is_master or target.follows)):
        raise RestoreRefused(
            f"{name} has {target.shards} shards: a backup is restored to empty servers only. Set up new ones with `tao "
            "accounts`, and without `tao migrate`; or, if nobody needs what this one has, drop its schemas yourself"
        )
    if not target.is_master:
        return
    if target.follows:
        raise RestoreRefused(f"{name} is the master by the topology, and follows {target.follows}: detach it first")
    if target.dialect != dump.dialect:
        raise RestoreRefused(f"{name} is {target.dialect}, and the backup of {dump.name} is of {dump.dialect}")


async def observe_targets(topology: Topology, administrator: Account) -> dict[str, list[TargetState]]:
    """Return the state of all database servers of a new cluster."""
    found: dict[str, list[TargetState]] = {}
    for each in topology.database_servers:
        state = await _observe(each.server, each.is_master, administrator)
        found.setdefault(each.database.name, []).append(state)
    return found


async def _observe(server: DatabaseServer, is_master: bool, administrator: Account) -> TargetState:
    try:
        async with administrator_session(server, administrator) as session:
            state = await member_state(session, deadline=soon())
            contents = await read_contents(session, deadline=soon())
            return TargetState(
                server=server,
                is_master=is_master,
                dialect=session.dialect.value,
                shards=len(contents.shards),
                half_restored=state.seeding,
                follows=state.following.source if state.following is not None else "",
            )
    except TaoError as error:
        return TargetState(server=server, is_master=is_master, error=error.message)


async def restore_backup(
    folder: Path,
    topology_path: Location,
    plan: Sequence[DatabaseRestore],
    administrator: Account,
    on_progress: OnProgress,
) -> RestoreResult:
    """Carry out a plan.

    Raises `BackupUnusable` before anything is changed. When another error is raised, the masters stay closed to all
    services, and the next run begins anew."""
    await check_backup(folder)
    restored = await together(_fill(each, folder, administrator, on_progress) for each in plan)
    epochs = {each.database: each.version_epoch for each in restored}
    changed = await _store_epochs(topology_file(topology_path), epochs)
    for each in plan:
        await _open(each, administrator)
    until = plan[0].until_unix_seconds
    return RestoreResult(
        databases=tuple(restored),
        topology_version=changed.version,
        until_unix_ms=None if until is None else until * 1_000,
    )


async def _store_epochs(store: TopologyStore, epochs: Mapping[str, int]) -> Topology:
    """Raise the version epochs in the topology, and retry when something else in it changed at the same time."""
    for left in reversed(range(_MAX_CONFLICTS)):
        topology = await store.load()
        try:
            return await store.change(topology.version, edits.raise_epochs(topology, epochs))
        except TopologyConflict:
            if not left:
                raise
    raise AssertionError("the last attempt returns or raises")


async def _fill(
    plan: DatabaseRestore, folder: Path, administrator: Account, on_progress: OnProgress
) -> RestoredDatabase:
    name, master, shards = plan.database.name, plan.master, shards_of(plan.database)
    dialect = Dialect(plan.dump.dialect)
    tools = await find_tools(dialect, os.environ)
    async with administrator_session(master, administrator) as session:
        await close_for_seeding(session, deadline=soon(_LONG_SECONDS))
    if plan.replaces:
        on_progress(name, "dropping what an interrupted restore left")
        async with administrator_session(master, administrator) as session:
            # With the copies of moves: the binlog makes them again.
            for schema in (await read_contents(session, deadline=soon())).schemas:
                # Written to the binlog, as what a replica may have of it.
                await session.run(f"DROP DATABASE {schema}", deadline=soon(_LONG_SECONDS))

    def progress(loaded: CopyProgress) -> None:
        on_progress(name, dump_progress(loaded, len(shards)))

    if plan.dump.statement_bytes:  # a database may hold no shard
        await _load(plan, folder, administrator, tools, progress)
    if plan.binlogs:
        await replay(
            tools,
            await find_binlog_reader(dialect, os.environ),
            [folder / each for each in plan.binlogs],
            administrator.at(master),
            after=plan.dump.position,
            until_unix_seconds=plan.until_unix_seconds,
            stall_seconds=STALL_SECONDS,
            on_progress=lambda done: on_progress(name, f"{done / 1e6:,.0f} MB of the binlog's statements"),
        )
    async with administrator_session(master, administrator) as session:
        found = await read_contents(session, deadline=soon())
        # Copies of moves, and what shards have left behind. Binlogs are copied only while the topology names the same
        # databases, so the database that it names has every write of these shards.
        for schema in set(found.schemas) - set(map(schema_name, shards)):
            await session.run(f"DROP DATABASE {schema}", deadline=soon(_LONG_SECONDS))
        if missing := set(shards) - set(found.shards):
            raise OperatorError(f"{master.name} lacks {len(missing)} of {len(shards)} shards after the restore")
        epoch = epoch_after(plan, await highest_epoch(session, shards, deadline=soon(_LONG_SECONDS)))
        reserving = await schemas_with_reserved_ids(session, deadline=soon(_LONG_SECONDS))
        await raise_epoch(
            session,
            shards,
            master.name,
            epoch,
            # No row has the epoch of the lost time. The former cluster was stopped before, as the how-to page says.
            lost_ids=LostIds(LostTimes.at(unix_ms()), epoch, reserving),
            deadline=soon(_LONG_SECONDS),
        )
    return RestoredDatabase(
        database=name,
        server=master.name,
        shards=len(shards),
        statement_bytes=plan.dump.statement_bytes,
        binlogs=len(plan.binlogs),
        version_epoch=epoch,
    )


def epoch_after(plan: DatabaseRestore, found_epoch: int) -> int:
    """Return the version epoch that a restored database begins with, above each that the lost one may have had.

    ``found_epoch``: the highest in the rows of its shards, which come from promotions that the binlog has where they
    are above the documents. Raises `OperatorError`."""
    epoch = max(plan.known_epoch, found_epoch) + plan.unknown_epochs + 1
    if epoch > MAX_EPOCH:
        raise OperatorError(f"the version epoch {epoch} would be above {MAX_EPOCH}: name --former-topology")
    return epoch


async def _load(
    plan: DatabaseRestore, folder: Path, administrator: Account, tools: DatabaseTools, progress: OnCopied
) -> None:
    with open_dump(folder / plan.dump.file.name) as file:

        async def read() -> bytes:
            return await asyncio.to_thread(file.read, CHUNK_BYTES)

        await load_dump(tools, administrator.at(plan.master), read, stall_seconds=STALL_SECONDS, on_progress=progress)


async def _open(plan: DatabaseRestore, administrator: Account) -> None:
    """Let services in again. A master under leases stays closed to writes until a watcher opens it."""
    async with administrator_session(plan.master, administrator) as session:
        await reopen_after_seeding(session, deadline=soon(_LONG_SECONDS))
        if not plan.database.keeps_lease:
            await set_read_only(session, False, deadline=soon())


class RestoreRepair(msgspec.Struct, frozen=True, kw_only=True):
    """The repair after a restore: pairs of edges that the backup has half, and wrong counts. ``error``: why nothing was
    repaired."""

    pairs: int = 0
    counts: int = 0
    repaired: int = 0
    complete: bool = False
    error: str = ""


async def repair_restored(login: ReaderLogin, token: str, tls: TlsFiles | None) -> RestoreRepair:
    """Have the leaders repair what the cut between two databases left half, once they have taken their shards.

    Where a leader does not run, nothing is repaired: `tao repair` does it later."""
    leaders = [server.admin for region in login.topology.regions for server in region.leaders.servers]
    try:
        await asyncio.gather(*map(unreadiness, leaders))  # without a wait for leaders that do not run
        await asyncio.gather(*(wait_until_ready(leader, _READY_SECONDS) for leader in leaders))
        async with access_of(login, token, tls) as access:
            faults = await find_faults(access, login.schema, inverses=True, counts=True)
            repairs = await repair_faults(access, faults)
    except TaoError as error:
        return RestoreRepair(error=error.message)
    return RestoreRepair(
        pairs=len(faults.pairs),
        counts=len(faults.counts),
        repaired=total_repaired([*repairs.pairs, *repairs.counts]),
        complete=repairs.complete(faults),
    )


def utc_text(unix_ms_: int) -> str:
    """Return a time as text that `--until` takes."""
    return datetime.fromtimestamp(unix_ms_ / 1_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
