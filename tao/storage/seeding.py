# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""The statements of seeding: a server is closed to everybody, emptied, and told which transactions it has been given.

Between the first and the last it has a part of the data, and a reader would take what is missing for absent. So the
server itself carries the mark of its state, a table in the schema that is not replicated, which whoever may promote or
attach it looks for; and the accounts of services are locked, so that no cache server can read it, whatever document
that goes by. Both outlive a crash of the server and of whoever seeds it. Everything is safe to repeat (DESIGN.md §9).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tao.model.errors import DeadlineExceeded, InternalError, ShardBlocked
from tao.storage.accounts import SERVICES
from tao.storage.dialect import Dialect
from tao.storage.gtid import binlog_state_at
from tao.storage.names import schema_name, shard_of_schema
from tao.storage.processes import server_processes
from tao.storage.replication import detach, set_read_only
from tao.storage.session import Session

UNDER_WAY: Final = (
    "EXISTS (SELECT 1 FROM information_schema.tables WHERE (table_schema, table_name) = ('tao', 'seeding'))"
)
"""As SQL: whether the server is being seeded, or was when that ended halfway."""

_PAUSE_SECONDS: Final = 0.05
_RESET_WORDS_SINCE: Final = (8, 2)
"""MySQL's version that has RESET BINARY LOGS AND GTIDS; 8.4 has RESET MASTER no more."""


@dataclass(frozen=True, slots=True)
class ServerContents:
    """What a server holds. ``data_bytes`` as the server estimates it."""

    shards: list[int]
    data_bytes: int
    server_id: int
    binlog_state: str
    """Its binlog's, of MariaDB; of MySQL the GTIDs executed."""


async def contents(session: Session, *, deadline: float) -> ServerContents:
    """Look at a server."""
    state = "gtid_binlog_state" if session.dialect is Dialect.MARIADB else "gtid_executed"
    names, ((bytes_,),), ((server_id, found),), _ = await session.run(
        "SELECT schema_name FROM information_schema.schemata WHERE schema_name LIKE 'tao\\_%%'; "
        "SELECT COALESCE(SUM(data_length), 0) FROM information_schema.tables WHERE table_schema LIKE 'tao\\_%%'; "
        f"SELECT @@GLOBAL.server_id, @@GLOBAL.{state}; ROLLBACK",
        deadline=deadline,
    )
    shards = [shard for (name,) in names if (shard := shard_of_schema(str(name))) is not None]
    return ServerContents(sorted(shards), int(bytes_), int(server_id), str(found).replace("\n", ""))


async def begin_seeding(session: Session, *, deadline: float) -> None:
    """Mark the server, have it follow nobody, and let no service in: those that are connected are cut off."""
    await detach(session, deadline=deadline)
    await _let_administrator_write(session, deadline)
    await session.run(
        "CREATE SCHEMA IF NOT EXISTS tao; "
        "CREATE TABLE IF NOT EXISTS tao.seeding (since TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP) ENGINE = InnoDB",
        deadline=deadline,
    )
    users = await _lock_accounts(session, "LOCK", deadline)
    await _cut_off(session, users, deadline)


async def drop_everything(session: Session, *, deadline: float) -> None:
    """Drop all shards and forget every transaction, so that nobody takes the server for one that has any."""
    await _let_administrator_write(session, deadline)
    await _forget_transactions(session, deadline)
    for shard in (await contents(session, deadline=deadline)).shards:
        await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=deadline)


async def note_position(session: Session, master_state: str, position: str, *, deadline: float) -> None:
    """Have the server go on from ``position``, the one of the copy. ``master_state``: the master's binlog state from
    before it was copied."""
    await _forget_transactions(session, deadline)
    if session.dialect is Dialect.MYSQL:
        await session.run("SET GLOBAL gtid_purged = %s", (position,), deadline=deadline)
        return
    # Not only the last transaction of each domain: servers are compared by what they have of every committing server.
    state = binlog_state_at(master_state, position)
    await session.run("SET GLOBAL gtid_binlog_state = %s", (state,), deadline=deadline)
    await session.run("SET GLOBAL gtid_slave_pos = %s", (position,), deadline=deadline)


async def end_seeding(session: Session, *, deadline: float) -> None:
    """Let services in again, and take the mark away: the server is what its master was, whole."""
    await _let_administrator_write(session, deadline)
    await _lock_accounts(session, "UNLOCK", deadline)
    await session.run("DROP TABLE IF EXISTS tao.seeding", deadline=deadline)
    await set_read_only(session, True, deadline=deadline)


async def _let_administrator_write(session: Session, deadline: float) -> None:
    """On a server that is closed to everybody else; nothing of it in the binlog."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL read_only = 1; SET GLOBAL super_read_only = 0", deadline=deadline)
    # Statements that were cut off may hold their tables for a moment.
    await session.run("ROLLBACK; SET SESSION sql_log_bin = 0, lock_wait_timeout = 60", deadline=deadline)


async def _lock_accounts(session: Session, word: str, deadline: float) -> list[str]:
    """``LOCK`` or ``UNLOCK`` those of services; returns the users whose sessions may be at the data."""
    names = ", ".join(["%s"] * len(SERVICES))
    accounts, ((own,),), _ = await session.run(
        f"SELECT user, host FROM mysql.user WHERE user IN ({names}); SELECT SUBSTRING_INDEX(USER(), '@', 1); ROLLBACK",
        SERVICES,
        deadline=deadline,
    )
    for user, host in accounts:
        await session.run(f"ALTER USER %s@%s ACCOUNT {word}", (_text(user), _text(host)), deadline=deadline)
    return [*SERVICES, _text(own)]


async def _cut_off(session: Session, users: Sequence[str], deadline: float) -> None:
    """End the connections that these users have now, the loader of an attempt that was ended among them."""
    met = await _connections(session, users, deadline)
    left = met
    while left:
        for thread in left:
            with suppress(InternalError):  # which is what "no such thread" becomes: it has ended by itself
                await session.run("KILL CONNECTION %s", (thread,), deadline=deadline)
        if asyncio.get_running_loop().time() >= deadline:
            raise DeadlineExceeded(f"{len(left)} connections at the server do not end; repeat the command")
        await asyncio.sleep(_PAUSE_SECONDS)
        left = met & await _connections(session, users, deadline)


async def _connections(session: Session, users: Sequence[str], deadline: float) -> set[int]:
    found = {each.thread for each in await server_processes(session, deadline=deadline) if each.user in users}
    return found - {session.thread_id}


async def _forget_transactions(session: Session, deadline: float) -> None:
    if session.dialect is Dialect.MARIADB:
        # Until a reader of the binlog that was cut off has gone, it may be refused.
        await _patiently(session, "RESET MASTER", deadline)
        await session.run("SET GLOBAL gtid_slave_pos = ''", deadline=deadline)
        return
    (((version,),),) = await session.run("SELECT VERSION()", deadline=deadline)
    numbers = tuple(int(part) for part in str(version).split("-")[0].split(".")[:2])
    await _patiently(
        session, "RESET BINARY LOGS AND GTIDS" if numbers >= _RESET_WORDS_SINCE else "RESET MASTER", deadline
    )


async def _patiently(session: Session, statement: str, deadline: float) -> None:
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
