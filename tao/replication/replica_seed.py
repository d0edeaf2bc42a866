# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""Rebuild a server of a replication set from its master: empty it, copy the master, set its position, attach it.

This is for a former master that has diverged, an empty server, and a server whose seeding was interrupted. The process
may end after any step, and the next run starts again. Between the first step and the last the server has only a part of
the data, and a reader would take what is missing for absent. So the server itself carries a mark, a table in a schema
that is not replicated, and nothing promotes or attaches a server with that mark. The accounts of services are locked,
so no cache server can read it, whatever topology document that server uses. Both outlive a crash of the server and of
the process that seeds it. Every statement is safe to repeat.

The mastership lock is held only while the server is taken out of use, so that no promotion chooses it just then.
Renewals of the master's lease need that lock too, and a copy can take hours. A promotion during the copy is detected at
the end, when the copy is compared with the master of that time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from tao.model.errors import (
    DeadlineExceeded,
    InternalError,
    OperatorError,
    ShardBlocked,
    TopologyConflict,
    TopologyError,
)
from tao.model.ports import TopologyStore
from tao.model.topology import Database, Topology
from tao.replication.accounts import SERVICES
from tao.replication.database_copy import CopyProgress, copy_schemas
from tao.replication.database_tools import DatabaseTools, find_tools
from tao.replication.gtid import binlog_state_at
from tao.replication.locks import Locks, hold_exclusively, mastership_lock
from tao.replication.move_statements import binlog_position
from tao.replication.promotion import Promoter, PromotionSettings
from tao.replication.promotion_plan import discarded_transactions
from tao.replication.replication_set import ReplicationSet, SetAccounts
from tao.replication.server_statements import detach, server_processes, set_read_only
from tao.storage.dialect import Dialect
from tao.storage.failures import TablesMissing
from tao.storage.names import shard_of_incoming_schema, shard_of_schema
from tao.storage.session import DatabaseSession
from tao.topology import edits

_STALL_SECONDS: Final = 300.0
"""Longest time without a byte of a copy moving. Exceeding it means a lock on the master's tables or a lost network, not
a slow disk."""

_EMPTYING_SECONDS: Final = 600.0
"""Time limit of the statements that drop the old data. The files of a large table take a while to delete."""


class SeedingRefused(OperatorError):
    """Seeding that server now could lose data that no other server has. Nothing was changed; the message says why."""

    reason = "SEEDING_REFUSED"


class SeedStep(StrEnum):
    """The steps of a seeding, in order."""

    MARK = "marking it down: its region reads other servers"
    CLOSE = "closing it to everybody"
    EMPTY = "dropping what it has"
    COPY = "copying the master"
    POSITION = "noting which transactions it has"
    ADMIT = "letting servers in again"
    FOLLOW = "having it follow the master, and catch up"


class SeedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that a seeding would have. ``discards``: transactions that only this server has and that are lost.
    ``drops``, ``copies``: numbers of shards. ``about_bytes``: the master's estimate of its data."""

    server: str
    region: str
    database: str
    master: str
    half_seeded: bool
    discards: str
    drops: int
    copies: int
    about_bytes: int


class SeedResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a seeding. ``position``: GTIDs of the copy. ``statement_bytes``: size of the statements of the
    copy."""

    server: str
    follows: str
    shards: int
    statement_bytes: int
    position: str


class Reseeder:
    """Rebuilds servers from their masters. At most one run works on a server at a time."""

    def __init__(
        self,
        store: TopologyStore,
        locks: Locks,
        accounts: SetAccounts,
        settings: PromotionSettings,
        promoter: Promoter,
        *,
        on_step: Callable[[SeedStep], Awaitable[None]] | None = None,
        on_copied: Callable[[CopyProgress, int], None] | None = None,
    ) -> None:
        """``on_step`` is called before each step, and ``on_copied`` with the progress and the number of shards to
        copy."""
        self._store: Final = store
        self._locks: Final = locks
        self._accounts: Final = accounts
        self._settings: Final = settings
        self._promoter: Final = promoter
        self._on_step: Final = on_step
        self._on_copied: Final = on_copied

    async def plan(self, server: str) -> SeedPlan:
        """Return what `seed` would do, without changing anything. Raises `SeedingRefused`, or `TopologyError` when
        there is no such server."""
        return await self._plan(await self._set(server), server)

    async def seed(self, server: str) -> SeedResult:
        """Rebuild a server.

        Raises `SeedingRefused` with nothing changed, or another `TaoError` when a step failed: the server is then out
        of use, and the next run starts again. Raises `LockTaken` while another run is under way.
        """
        async with self._locks.held(f"seeding-of-{server}", exclusive=True):
            replicas = await self._set(server)
            async with replicas.session(replicas.database.master_region) as session:
                tools = await find_tools(session.dialect, os.environ)
            await self._begin(SeedStep.MARK)
            await self._plan(replicas, server)
            await self._mark(server)
            await self._begin(SeedStep.CLOSE)
            region = replicas.region_of(server)
            async with hold_exclusively(
                self._locks, mastership_lock(replicas.database.name), self._settings.lock_seconds
            ):
                replicas = await self._set(server)
                await self._plan(replicas, server)  # check again: from now on nobody else can change the master
                await replicas.let_master_go()
                async with replicas.session(region) as session:
                    await close_for_seeding(
                        session, deadline=replicas.statement_deadline() + self._settings.catch_up_seconds
                    )
            await self._begin(SeedStep.EMPTY)
            async with replicas.session(region) as session:
                await drop_shards(session, deadline=replicas.statement_deadline() + _EMPTYING_SECONDS)
            await self._begin(SeedStep.COPY)
            master, copied = await self._copy(replicas, region, tools)
            await self._begin(SeedStep.POSITION)
            async with replicas.session(region) as session:
                await set_position(
                    session, master.binlog_state, copied.position, deadline=replicas.statement_deadline()
                )
            await self._begin(SeedStep.ADMIT)
            async with replicas.session(region) as session:
                await reopen_after_seeding(session, deadline=replicas.statement_deadline())
        await self._begin(SeedStep.FOLLOW)
        await self._promoter.rejoin(replicas.database.name, server)
        follows = (await self._set(server)).master.name
        return SeedResult(
            server=server,
            follows=follows,
            shards=len(master.shards),
            statement_bytes=copied.statement_bytes,
            position=copied.position,
        )

    async def _plan(self, replicas: ReplicationSet, server: str) -> SeedPlan:
        database, region = replicas.database, replicas.region_of(server)
        if region == database.master_region:
            raise SeedingRefused(f"{server} is the master of {database.name} by the topology: there is nobody above it")
        member, master = await replicas.beside_master(region)
        for each in (member, master):
            if each.state is None:
                raise SeedingRefused(f"{each.name} does not answer: {each.error}")
        if master.state is not None and master.state.following is not None:
            raise SeedingRefused(
                f"{master.name} is the master by the topology, and follows {master.state.following.source}: which of "
                "them has the truth? `tao promote` settles it"
            )
        theirs, own = await self._contents(replicas, database.master_region), await self._contents(replicas, region)
        if theirs.server_id == own.server_id:
            raise SeedingRefused(
                f"{server} and {master.name} have one server_id: are they one server by two addresses?"
            )
        if replicas.shards and not theirs.shards:
            raise SeedingRefused(f"{master.name} has no shard: is it the right master? `tao migrate` makes them")
        epoch = 0
        with suppress(TablesMissing):  # the server is empty or partly seeded
            epoch = await replicas.epoch_as_master(region)
        if epoch > database.version_epoch:
            raise SeedingRefused(
                f"a promotion of {server} was interrupted when it could not be undone any more: "
                f"tao promote {database.name} --to {region} ends it"
            )
        return SeedPlan(
            server=server,
            region=region,
            database=database.name,
            master=master.name,
            half_seeded=member.state is not None and member.state.seeding,
            discards=discarded_transactions(member, master),
            drops=len(own.shards),
            copies=len(theirs.shards),
            about_bytes=theirs.data_bytes,
        )

    async def _mark(self, server: str) -> None:
        """Mark the server down as an operator does, so that no watcher removes the mark when it sees the server
        follow."""
        while True:
            topology = await self._store.load()
            marked = edits.mark_database_server(topology, server, down=True)
            if msgspec.structs.replace(marked, version=topology.version) == topology:
                return
            try:
                await self._store.change(topology.version, marked)
            except TopologyConflict:
                continue  # a watcher changed the document at the same time
            await asyncio.sleep(self._settings.settle_seconds)  # until all servers use the new document
            return

    async def _copy(
        self, replicas: ReplicationSet, region: str, tools: DatabaseTools
    ) -> tuple[ServerContents, CopyProgress]:
        region_of_master = replicas.database.master_region
        master = await self._contents(replicas, region_of_master)
        while not master.schemas:  # the database has no shards, so a position is all there is to copy
            async with replicas.session(region_of_master) as session:
                position = await binlog_position(session, deadline=replicas.statement_deadline())
            now = await self._contents(replicas, region_of_master)
            if not now.schemas:
                return master, CopyProgress(0, 0, position)
            master = now

        def progress(copied: CopyProgress) -> None:
            if self._on_copied is not None:
                self._on_copied(copied, len(master.shards))

        copied = await copy_schemas(
            tools,
            replicas.login(region_of_master),
            replicas.login(region),
            master.schemas,
            stall_seconds=_STALL_SECONDS,
            on_progress=progress,
        )
        return master, copied

    async def _contents(self, replicas: ReplicationSet, region: str) -> ServerContents:
        async with replicas.session(region) as session:
            return await read_contents(
                session, deadline=replicas.statement_deadline() + self._settings.catch_up_seconds
            )

    async def _set(self, server: str) -> ReplicationSet:
        return ReplicationSet(
            database_with(await self._store.load(), server),
            self._accounts,
            seen_from="",
            statement_seconds=self._settings.statement_seconds,
        )

    async def _begin(self, step: SeedStep) -> None:
        if self._on_step is not None:
            await self._on_step(step)


def database_with(topology: Topology, server: str) -> Database:
    """Return the database that a server belongs to. Raises `TopologyError` when there is none."""
    for database in topology.databases:
        if any(each.name == server for each in database.places.values()):
            return database
    raise TopologyError(f"there is no database server {server!r}")


_PAUSE_SECONDS: Final = 0.05
_RESET_WORDS_SINCE: Final = (8, 2)
"""The MySQL version that introduced RESET BINARY LOGS AND GTIDS. MySQL 8.4 has no RESET MASTER."""


@dataclass(frozen=True, slots=True)
class ServerContents:
    """The data on a server. ``data_bytes`` is the server's estimate. ``schemas``: those of the shards, and of copies of
    shards that move here, which the server's replicas have too."""

    shards: list[int]
    schemas: list[str]
    data_bytes: int
    server_id: int
    binlog_state: str
    """MariaDB's ``gtid_binlog_state``, or MySQL's ``gtid_executed``."""


async def read_contents(session: DatabaseSession, *, deadline: float) -> ServerContents:
    """Read which shards a server has, their size and its binlog state."""
    state = "gtid_binlog_state" if session.dialect is Dialect.MARIADB else "gtid_executed"
    names, ((bytes_,),), ((server_id, found),), _ = await session.run(
        "SELECT schema_name FROM information_schema.schemata WHERE schema_name LIKE 'tao\\_%%'; "
        "SELECT COALESCE(SUM(data_length), 0) FROM information_schema.tables WHERE table_schema LIKE 'tao\\_%%'; "
        f"SELECT @@GLOBAL.server_id, @@GLOBAL.{state}; ROLLBACK",
        deadline=deadline,
    )
    held = sorted(str(name) for (name,) in names)
    shards = [shard for name in held if (shard := shard_of_schema(name)) is not None]
    schemas = [name for name in held if shard_of_schema(name) is not None or shard_of_incoming_schema(name) is not None]
    return ServerContents(shards, schemas, int(bytes_), int(server_id), str(found).replace("\n", ""))


async def close_for_seeding(session: DatabaseSession, *, deadline: float) -> None:
    """Mark the server as being seeded, detach it from its master, lock out all services and end their connections."""
    await detach(session, deadline=deadline)
    await _let_administrator_write(session, deadline)
    await session.run(
        "CREATE SCHEMA IF NOT EXISTS tao; "
        "CREATE TABLE IF NOT EXISTS tao.seeding (since TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP) ENGINE = InnoDB",
        deadline=deadline,
    )
    users = await _lock_accounts(session, "LOCK", deadline)
    await _end_connections(session, users, deadline)


async def drop_shards(session: DatabaseSession, *, deadline: float) -> None:
    """Drop all shards and reset the binlog, so that the server does not claim to have any transaction."""
    await _let_administrator_write(session, deadline)
    await _reset_binlog(session, deadline)
    for schema in (await read_contents(session, deadline=deadline)).schemas:
        await session.run(f"DROP DATABASE {schema}", deadline=deadline)


async def set_position(session: DatabaseSession, master_state: str, position: str, *, deadline: float) -> None:
    """Set the position of the copy, from which the server continues. ``master_state``: the master's binlog state from
    before the copy."""
    await _reset_binlog(session, deadline)
    if session.dialect is Dialect.MYSQL:
        await session.run("SET GLOBAL gtid_purged = %s", (position,), deadline=deadline)
        return
    # The last transaction of each domain is not enough: servers are compared by what they have of every committing
    # server.
    state = binlog_state_at(master_state, position)
    await session.run("SET GLOBAL gtid_binlog_state = %s", (state,), deadline=deadline)
    await session.run("SET GLOBAL gtid_slave_pos = %s", (position,), deadline=deadline)


async def reopen_after_seeding(session: DatabaseSession, *, deadline: float) -> None:
    """Unlock the services' accounts and remove the mark: the server has everything that its master had."""
    await _let_administrator_write(session, deadline)
    await _lock_accounts(session, "UNLOCK", deadline)
    await session.run("DROP TABLE IF EXISTS tao.seeding", deadline=deadline)
    await set_read_only(session, True, deadline=deadline)


async def _let_administrator_write(session: DatabaseSession, deadline: float) -> None:
    """Let administrators write to a server that is closed to everybody else, without writing to its binlog."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL read_only = 1; SET GLOBAL super_read_only = 0", deadline=deadline)
    # Statements of ended connections may hold their tables for a moment.
    await session.run("ROLLBACK; SET SESSION sql_log_bin = 0, lock_wait_timeout = 60", deadline=deadline)


async def _lock_accounts(session: DatabaseSession, word: str, deadline: float) -> list[str]:
    """Run ``LOCK`` or ``UNLOCK`` for the services' accounts. Returns the users whose sessions may be using the data."""
    names = ", ".join(["%s"] * len(SERVICES))
    accounts, ((own,),), _ = await session.run(
        f"SELECT user, host FROM mysql.user WHERE user IN ({names}); SELECT SUBSTRING_INDEX(USER(), '@', 1); ROLLBACK",
        SERVICES,
        deadline=deadline,
    )
    for user, host in accounts:
        await session.run(f"ALTER USER %s@%s ACCOUNT {word}", (_text(user), _text(host)), deadline=deadline)
    return [*SERVICES, _text(own)]


async def _end_connections(session: DatabaseSession, users: Sequence[str], deadline: float) -> None:
    """End the current connections of these users, including the client program of an interrupted attempt."""
    met = await _connections(session, users, deadline)
    left = met
    while left:
        for thread in left:
            with suppress(InternalError):  # "no such thread": the connection has ended by itself
                await session.run("KILL CONNECTION %s", (thread,), deadline=deadline)
        if asyncio.get_running_loop().time() >= deadline:
            raise DeadlineExceeded(f"{len(left)} connections at the server do not end; repeat the command")
        await asyncio.sleep(_PAUSE_SECONDS)
        left = met & await _connections(session, users, deadline)


async def _connections(session: DatabaseSession, users: Sequence[str], deadline: float) -> set[int]:
    found = {each.thread for each in await server_processes(session, deadline=deadline) if each.user in users}
    return found - {session.thread_id}


async def _reset_binlog(session: DatabaseSession, deadline: float) -> None:
    if session.dialect is Dialect.MARIADB:
        # The server may refuse until a reader of the binlog that was disconnected has gone.
        await _retry_while_blocked(session, "RESET MASTER", deadline)
        await session.run("SET GLOBAL gtid_slave_pos = ''", deadline=deadline)
        return
    (((version,),),) = await session.run("SELECT VERSION()", deadline=deadline)
    numbers = tuple(int(part) for part in str(version).split("-")[0].split(".")[:2])
    await _retry_while_blocked(
        session, "RESET BINARY LOGS AND GTIDS" if numbers >= _RESET_WORDS_SINCE else "RESET MASTER", deadline
    )


async def _retry_while_blocked(session: DatabaseSession, statement: str, deadline: float) -> None:
    while True:
        try:
            await session.run(statement, deadline=deadline)
            return
        except ShardBlocked:
            if asyncio.get_running_loop().time() >= deadline:
                raise
            await asyncio.sleep(_PAUSE_SECONDS)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
