"""Makes replicas follow their masters, as the topology names them, and asks database servers how they replicate.

A replica reaches its master at the address that the topology gives for the replica's region. Attaching a replica again
is harmless. The topology alone decides which server is the master.

`plan_replication` never does two things, because they lose writes: it makes no server a master that follows another
one, which is a promotion, and it attaches no server that has transactions which its master lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from tao.model.errors import OperatorError, TaoError
from tao.model.ports import TopologyStore
from tao.model.topology import Database, DatabaseServer, Topology
from tao.replication.accounts import Account, ServiceAccounts
from tao.replication.lease import grant_lease, lease_terms, remove_lease, server_unix_ms
from tao.replication.locks import LockHold, Locks, hold_exclusively, mastership_lock
from tao.replication.server_statements import (
    MemberState,
    ReplicationSource,
    SourceTls,
    acknowledging_replicas,
    attach,
    detach,
    executed_position,
    member_state,
    replication_status,
    set_read_only,
    set_semi_sync,
    wait_for_position,
)
from tao.storage.dialect import SessionSetup
from tao.storage.session import DatabaseSession, open_session

_STATEMENT_SECONDS = 10.0
_LOCK_SECONDS = 10.0
"""Time limit for the lock of a database: longer than it takes until a holder that hangs can be taken over."""
_WATCHER_START_SECONDS = 60.0
_PAUSE_SECONDS = 0.05


class ReplicaState(msgspec.Struct, frozen=True, kw_only=True):
    """The replication state of a database server. ``part``: master, replica or unknown (it does not answer)."""

    part: str
    receiving: bool = False
    applying: bool = False
    lag_seconds: int | None = None
    position: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ReplicationAccounts:
    """The accounts that change replication."""

    administrator: Account
    replicator: Account
    """The account by which replicas read their masters' binlogs."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A database server that follows the master of its database."""

    server: DatabaseServer
    region: str
    master: DatabaseServer


def masters(topology: Topology) -> list[DatabaseServer]:
    """Return the master of each database."""
    return [each.server for each in topology.database_servers if each.is_master]


def replicas(topology: Topology) -> list[Replica]:
    """Return all database servers that are not masters."""
    return [
        Replica(each.server, each.region, each.database.servers[each.database.master_region])
        for each in topology.database_servers
        if not each.is_master
    ]


async def member(server: DatabaseServer, administrator: Account) -> MemberState:
    """Return which transactions a server has and which server it follows. Raises a `TaoError`."""
    async with administrator_session(server, administrator) as session:
        return await member_state(session, deadline=_soon())


async def lead(master: DatabaseServer, administrator: Account, *, keeps_lease: bool = True) -> None:
    """Make a server the master of its database: it follows no other server and accepts writes. Raises a `TaoError`.

    ``keeps_lease``: a server that needs a lease gets one that is long enough for a watcher to start and renew it; False
    removes the lease."""
    async with administrator_session(master, administrator) as session:
        await detach(session, deadline=_soon())
        if not keeps_lease:
            await remove_lease(session, deadline=_soon())
        elif (await lease_terms(session, deadline=_soon())).seconds:
            start = await server_unix_ms(session, deadline=_soon()) + int(1_000 * _WATCHER_START_SECONDS)
            await grant_lease(session, start, deadline=_soon())
        await set_read_only(session, False, deadline=_soon())


async def resume(topology: Topology, name: str, accounts: ServiceAccounts, *, watched: bool) -> None:
    """Let a server that was started again, which is closed to writes, take up its part. Raises a `TaoError`.

    The caller holds the mastership lock of its database, and has read ``topology`` under it.

    A master is opened here, unless the cluster is ``watched``: then a watcher opens it. A replica is attached to its
    master again. A former master stays as it is: it follows no server until `tao rejoin`."""
    for master in masters(topology):
        if master.name == name and not watched:
            await lead(master, accounts.administrator)
    for replica in replicas(topology):
        if replica.server.name == name and (await member(replica.server, accounts.administrator)).following:
            await follow(replica, accounts.administrator, accounts.replicator)


async def wait_for_replicas(master: DatabaseServer, administrator: Account) -> None:
    """Have each commit of the master wait for a replica. Raises `OperatorError` when no replica acknowledges."""
    deadline = _soon()
    async with administrator_session(master, administrator) as session:
        while not await acknowledging_replicas(session, deadline=deadline):
            if asyncio.get_running_loop().time() > deadline - 1.0:
                raise OperatorError(f"no replica of {master.name} acknowledges: is semi-synchronous replication on?")
            await asyncio.sleep(_PAUSE_SECONDS)
        await set_semi_sync(session, waits=True, deadline=deadline)


async def follow(replica: Replica, administrator: Account, replicator: Account) -> None:
    """Have a replica follow its master, at the master's address for the replica's region. Raises a `TaoError`."""
    there = replica.master.seen_from(replica.region)
    tls = SourceTls.of(replicator.tls)
    source = ReplicationSource(there.host, there.port, replicator.user, replicator.password, tls)
    async with administrator_session(replica.server, administrator) as session:
        await attach(session, source, deadline=_soon())


async def hold(replica: Replica, administrator: Account) -> None:
    """Stop a replica from following its master, until `follow` is called. Raises a `TaoError`."""
    async with administrator_session(replica.server, administrator) as session:
        await detach(session, deadline=_soon())


async def catch_up(replica: Replica, administrator: Account, timeout_seconds: float) -> None:
    """Return once the replica has every transaction that its master has now.

    Raises `OperatorError` when that takes longer than ``timeout_seconds``."""
    async with administrator_session(replica.master, administrator) as session:
        position = await executed_position(session, deadline=_soon())
    deadline = asyncio.get_running_loop().time() + timeout_seconds
    async with administrator_session(replica.server, administrator) as session:
        try:
            await wait_for_position(session, position, deadline=deadline)
        except TaoError as error:
            raise OperatorError(
                f"{replica.server.name} does not follow {replica.master.name}: {error.message}"
            ) from error


async def replication_states(topology: Topology, administrator: Account) -> dict[str, ReplicaState]:
    """Return the replication state of every database server by name; one that does not answer is ``unknown``."""

    async def one(server: DatabaseServer) -> ReplicaState:
        try:
            async with administrator_session(server, administrator) as session:
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

    servers = [each.server for each in topology.database_servers]
    states = await asyncio.gather(*map(one, servers))
    return {server.name: state for server, state in zip(servers, states, strict=True)}


NOTHING_TO_DO: Final = ""
OPEN: Final = "open to writes"
ATTACH: Final = "attach"


@dataclass(frozen=True, slots=True)
class ReplicationStep:
    """A database server and what `apply_replication` does to it."""

    database: str
    server: str
    follows: str
    """The name of its master; empty for a master."""
    action: str
    """`NOTHING_TO_DO`, `OPEN` or `ATTACH`."""


async def member_states(topology: Topology, administrator: Account) -> dict[str, MemberState]:
    """Return the state of every database server by name. Raises a `TaoError` when one does not answer.

    Masters are asked last, so that they have every transaction that their replicas were found to have."""
    servers = [*(replica.server for replica in replicas(topology)), *masters(topology)]
    return {server.name: await member(server, administrator) for server in servers}


def plan_replication(
    topology: Topology, members: Mapping[str, MemberState], *, anew: bool = False
) -> list[ReplicationStep]:
    """List what is to be done at each server, the master of each database first.

    ``anew`` attaches replicas that follow already, for a changed password or address. Raises `OperatorError` where a
    step would lose writes."""
    found = replicas(topology)
    steps: list[ReplicationStep] = []
    for database in topology.databases:
        steps.append(_at_master(database, members))
        servers = set(database.places.values())
        steps += [_at_replica(database, each, members, anew) for each in found if each.server in servers]
    return steps


async def apply_replication(
    store: TopologyStore, locks: Locks, steps: list[ReplicationStep], accounts: ReplicationAccounts, *, anew: bool
) -> None:
    """Do the steps, each under the mastership lock of its database. ``anew``: as they were planned.

    Raises `OperatorError`, with nothing changed, when they are not what is to be done any more: a promotion may have
    changed the master since they were planned. Raises `LockTaken` while a master is being changed, or another
    `TaoError`."""
    changed = {step.server for step in steps if step.action != NOTHING_TO_DO}
    async with AsyncExitStack() as stack:
        holds = [
            await stack.enter_async_context(hold_exclusively(locks, mastership_lock(database), _LOCK_SECONDS))
            for database in sorted({step.database for step in steps if step.server in changed})
        ]
        topology = await store.load()
        if plan_replication(topology, await member_states(topology, accounts.administrator), anew=anew) != steps:
            raise OperatorError("the topology or its database servers have changed meanwhile: repeat the command")
        for master in masters(topology):
            if master.name in changed:
                _check_all(holds)
                await lead(master, accounts.administrator)
        for replica in replicas(topology):
            if replica.server.name in changed:
                _check_all(holds)
                await follow(replica, accounts.administrator, accounts.replicator)


def _check_all(holds: Iterable[LockHold]) -> None:
    for hold in holds:
        hold.check()


async def catch_up_all(
    topology: Topology, administrator: Account, wait_seconds: float, show: Callable[[str], None]
) -> None:
    """Wait until every replica has what its master has now, at most ``wait_seconds`` for each. ``show`` receives what
    is waited for. Raises a `TaoError`."""
    for replica in replicas(topology):
        show(f"waiting for {replica.server.name}")
        await catch_up(replica, administrator, wait_seconds)


def _at_master(database: Database, members: Mapping[str, MemberState]) -> ReplicationStep:
    name = database.servers[database.master_region].name
    member = members[name]
    if member.following is not None:
        raise OperatorError(
            f"the topology names {name} as master of {database.name}, but it follows {member.following.source}: "
            "check that this is the right topology file; a promotion (`tao promote`) makes a replica the master"
        )
    return ReplicationStep(database.name, name, "", OPEN if member.read_only else NOTHING_TO_DO)


def _at_replica(
    database: Database, replica: Replica, members: Mapping[str, MemberState], anew: bool
) -> ReplicationStep:
    name, master = replica.server.name, replica.master.name
    member = members[name]
    if member.seeding:
        raise OperatorError(f"{name} is being seeded, or its seeding was interrupted: tao reseed {name}")
    astray = members[master].executed.lacks(member.executed)
    if astray:
        raise OperatorError(
            f"{name} has transactions that its master {master} lacks ({astray}): it cannot follow; "
            f"tao reseed {name} rebuilds it from the master"
        )
    there = replica.master.seen_from(replica.region)
    follows = member.following
    right = (
        follows is not None
        and (follows.source, follows.receiving, follows.applying) == (f"{there.host}:{there.port}", True, True)
        and member.read_only
    )
    return ReplicationStep(database.name, name, master, NOTHING_TO_DO if right and not anew else ATTACH)


def _soon() -> float:
    return asyncio.get_running_loop().time() + _STATEMENT_SECONDS


@asynccontextmanager
async def administrator_session(server: DatabaseServer, administrator: Account) -> AsyncIterator[DatabaseSession]:
    """Open an administrator's session at a server, and close it at the end. Raises a `TaoError`."""
    session = await open_session(administrator.at(server), server.name, SessionSetup(writes=True), deadline=_soon())
    try:
        yield session
    finally:
        session.quit()
