"""The replication sets of a topology: replicas attached to their masters, waited for and asked.

Replicas reach masters at the address that the topology gives for their region: in a development cluster through the
delay line. Attaching again is harmless, so every start of one does it: ports may have changed, and mastership too.
A server never takes part in deciding who is master; the topology says it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from tao.model.errors import OperatorError, TaoError
from tao.model.topology import DatabaseServer, Topology
from tao.storage.accounts import Account, ServiceAccounts
from tao.storage.dialect import SessionSetup
from tao.storage.lease import grant_lease, lease_seconds, remove_lease, server_unix_ms
from tao.storage.promotion import MemberState, member_state
from tao.storage.replication import (
    ReplicationSource,
    attach,
    detach,
    executed_position,
    replication_status,
    set_read_only,
    wait_for_position,
)
from tao.storage.semi_sync import acknowledging_replicas, set_semi_sync
from tao.storage.session import ServerAccount, Session, open_session

_STATEMENT_SECONDS = 10.0
_WATCHER_START_SECONDS = 60.0
_PAUSE_SECONDS = 0.05


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """How a database server of a set does. ``part``: master, replica or unknown (it does not answer)."""

    part: str
    receiving: bool = False
    applying: bool = False
    lag_seconds: int | None = None
    position: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Replica:
    """A server that follows another one."""

    server: DatabaseServer
    region: str
    master: DatabaseServer


def masters(topology: Topology) -> list[DatabaseServer]:
    """The writable server of each set."""
    return [database.servers[database.master_region] for database in topology.databases]


def replicas(topology: Topology) -> list[Replica]:
    """The other servers."""
    return [
        Replica(server, region, database.servers[database.master_region])
        for database in topology.databases
        for region, server in database.servers.items()
        if region != database.master_region
    ]


async def member(server: DatabaseServer, administrator: Account) -> MemberState:
    """What a server has and whom it follows. Raises a `TaoError`."""
    async with _session(server, administrator) as session:
        return await member_state(session, deadline=_soon())


async def lead(master: DatabaseServer, administrator: Account, *, keeps_lease: bool = True) -> None:
    """Make a server the master of its set: it follows nobody and is open to writes. ``keeps_lease``: where it was made
    to keep a lease it does so still, with one that is long enough for a watcher to start. Raises a `TaoError`."""
    async with _session(master, administrator) as session:
        await detach(session, deadline=_soon())
        if not keeps_lease:
            await remove_lease(session, deadline=_soon())
        elif await lease_seconds(session, deadline=_soon()):
            start = await server_unix_ms(session, deadline=_soon()) + int(1_000 * _WATCHER_START_SECONDS)
            await grant_lease(session, start, deadline=_soon())
        await set_read_only(session, False, deadline=_soon())


async def resume(topology: Topology, name: str, accounts: ServiceAccounts, *, watched: bool) -> None:
    """A server of a set has been started again: it is closed to writes. A watcher opens a master, where there is one; a
    server that was master once follows nobody until it is told to rejoin. Raises a `TaoError`."""
    for master in masters(topology):
        if master.name == name and not watched:
            await lead(master, accounts.administrator)
    for replica in replicas(topology):
        if replica.server.name == name and (await member(replica.server, accounts.administrator)).following:
            await follow(replica, accounts.administrator, accounts.replicator)


async def wait_for_replicas(master: DatabaseServer, administrator: Account) -> None:
    """Have each commit of the master wait for a replica. Raises `OperatorError` when none acknowledges."""
    deadline = _soon()
    async with _session(master, administrator) as session:
        while not await acknowledging_replicas(session, deadline=deadline):
            if asyncio.get_running_loop().time() > deadline - 1.0:
                raise OperatorError(f"no replica of {master.name} acknowledges what it receives")
            await asyncio.sleep(_PAUSE_SECONDS)
        await set_semi_sync(session, waits=True, deadline=deadline)


async def follow(replica: Replica, administrator: Account, replicator: Account) -> None:
    """Have a replica follow its master as its region reaches it. Raises a `TaoError`."""
    there = replica.master.seen_from(replica.region)
    source = ReplicationSource(there.host, there.port, replicator.user, replicator.password)
    async with _session(replica.server, administrator) as session:
        await attach(session, source, deadline=_soon())


async def hold(replica: Replica, administrator: Account) -> None:
    """Have a replica stand still, until it is told to follow again. Raises a `TaoError`."""
    async with _session(replica.server, administrator) as session:
        await detach(session, deadline=_soon())


async def catch_up(replica: Replica, administrator: Account, timeout_seconds: float) -> None:
    """Return once the replica has everything that its master has now. Raises `OperatorError` when that fails."""
    async with _session(replica.master, administrator) as session:
        position = await executed_position(session, deadline=_soon())
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    async with _session(replica.server, administrator) as session:
        try:
            await wait_for_position(session, position, deadline=deadline)
        except TaoError as error:
            raise OperatorError(
                f"{replica.server.name} does not follow {replica.master.name}: {error.message}"
            ) from error


async def replication_states(topology: Topology, administrator: Account) -> dict[str, ReplicaState]:
    """How every database server does, by name; one that does not answer is ``unknown``, with the reason."""

    async def one(server: DatabaseServer) -> ReplicaState:
        try:
            async with _session(server, administrator) as session:
                status = await replication_status(session, deadline=_soon())
                if status is None:
                    return ReplicaState(part="master", position=await executed_position(session, deadline=_soon()))
        except TaoError as error:
            return ReplicaState(part="unknown", error=error.message)
        return ReplicaState(
            part="replica",
            receiving=status.receiving,
            applying=status.applying,
            lag_seconds=status.lag_seconds,
            position=status.executed,
            error=status.error,
        )

    servers = [server for database in topology.databases for server in database.servers.values()]
    states = await asyncio.gather(*map(one, servers))
    return {server.name: state for server, state in zip(servers, states, strict=True)}


def _soon() -> float:
    return asyncio.get_running_loop().time() + _STATEMENT_SECONDS


@asynccontextmanager
async def _session(server: DatabaseServer, administrator: Account) -> AsyncIterator[Session]:
    account = ServerAccount(server.host, server.port, administrator.user, administrator.password, server.socket)
    session = await open_session(account, server.name, SessionSetup(writes=True), deadline=_soon())
    try:
        yield session
    finally:
        await session.quit()
