# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""The statements of a promotion: a server is closed, compared, made to apply what it has, and opened (DESIGN.md §9).

Everything is safe to repeat, because a promotion that was interrupted is begun again from the start. The traps are
those of semi-synchronous replication: a commit that waits for a replica holds the lock that ``SET GLOBAL read_only``
wants, so a fence has to end such waiters, whose clients have heard of no success; and what a replica has acknowledged
it has *received*, not executed, so only receiving may be stopped before everything received is applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tao.model.errors import InternalError
from tao.storage.dialect import Dialect
from tao.storage.gtid import GtidSet
from tao.storage.names import schema_name
from tao.storage.processes import server_processes
from tao.storage.replication import ReplicationStatus, replication_status, set_read_only, wait_for_position
from tao.storage.seeding import UNDER_WAY
from tao.storage.semi_sync import SEMI_SYNC_FIGURES, semi_sync_state, set_semi_sync
from tao.storage.session import Session

_RAISED_AT_ONCE: Final = 64
"""Shard rows of one transaction: milliseconds, and little for a replica to apply at once."""

_PATIENCE_SECONDS: Final = 0.5
"""For commits that wait for a replica when their server is to be closed: several round trips between regions."""

_CLOSING_SECONDS: Final = 60
"""For which the server itself waits to be closed: beyond any deadline here."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """A server of a replication set, asked a moment ago."""

    read_only: bool
    following: ReplicationStatus | None
    """None: it follows nobody."""
    executed: GtidSet
    """Every transaction that it has committed."""
    received: GtidSet
    """Those, and what waits in its relay log: what it can have without asking anybody."""
    seeding: bool = False
    """It is being seeded, or was when that ended halfway: it has a part of what its master has."""
    waits_for_replica: bool = False
    """Each commit of it, as a master, waits until a replica has received it."""
    acknowledges: bool = False
    """As a replica it tells its master what it has received, while it is connected."""


async def member_state(session: Session, *, deadline: float) -> MemberState:
    """What the server has and whom it follows."""
    mariadb = session.dialect is Dialect.MARIADB
    status = await replication_status(session, deadline=deadline)
    # MariaDB: positions name one transaction of a domain, this names the last one of each server that has committed.
    name = "gtid_binlog_state" if mariadb else "gtid_executed"
    (((read_only, executed, seeding),), figures, _) = await session.run(
        f"SELECT @@GLOBAL.read_only, @@GLOBAL.{name}, {UNDER_WAY}; {SEMI_SYNC_FIGURES}; ROLLBACK", deadline=deadline
    )
    semi_sync = semi_sync_state(session.dialect, figures)
    executed = str(executed).replace("\n", "")
    received = [executed] if status is None else [executed, status.received]
    return MemberState(
        read_only=bool(read_only),
        following=status,
        executed=GtidSet(session.dialect, executed),
        received=GtidSet(session.dialect, *received),
        seeding=bool(seeding),
        waits_for_replica=semi_sync.waits,
        acknowledges=semi_sync.acknowledges,
    )


async def fence(session: Session, other: Session, *, deadline: float) -> int:
    """Close the server to writes and end the commits that wait for a replica; returns how many had to be ended. When
    this returns, nothing that is not committed will be. ``other``: a second session at the server, since the one that
    closes it waits for such commits. Raises `DeadlineExceeded`."""
    closing = asyncio.ensure_future(_close(session, deadline))
    ended: set[int] = set()
    try:
        while not closing.done():
            await asyncio.wait((closing,), timeout=_PATIENCE_SECONDS)
            if not closing.done():
                ended |= await _end_waiting(other, deadline)
        await closing
    finally:
        closing.cancel()
    return len(ended)


async def _close(session: Session, deadline: float) -> None:
    # In one go: between two attempts another commit could begin to wait, unseen.
    await session.run("SET SESSION lock_wait_timeout = %s", (_CLOSING_SECONDS,), deadline=deadline)
    await set_read_only(session, True, deadline=deadline)
    await session.run("SET SESSION lock_wait_timeout = 1", deadline=deadline)


async def _end_waiting(session: Session, deadline: float) -> set[int]:
    """Cut the clients of commits that wait for a replica off; returns the threads. While the server is being closed no
    further commit can begin to wait."""
    processes = await server_processes(session, deadline=deadline)
    waiting = {each.thread: each.command for each in processes if "semi-sync ACK" in each.state}
    for thread in waiting:
        with suppress(InternalError):  # which is what "no such thread" becomes: it has ended by itself
            await session.run("KILL CONNECTION %s", (thread,), deadline=deadline)
    if session.dialect is Dialect.MYSQL and waiting and set(waiting.values()) == {"Killed"}:
        # There the wait outlives its client. Nobody is left whom its end could tell of a success.
        await set_semi_sync(session, waits=False, deadline=deadline)
    return set(waiting)


async def stop_receiving(session: Session, *, deadline: float) -> None:
    """Take no more from the master; what was received goes on being applied. Idempotent."""
    await session.run(
        "STOP SLAVE IO_THREAD" if session.dialect is Dialect.MARIADB else "STOP REPLICA IO_THREAD", deadline=deadline
    )


async def receive_again(session: Session, *, deadline: float) -> None:
    """Undo `stop_receiving` at a server that is still a replica. Idempotent."""
    await session.run("START SLAVE" if session.dialect is Dialect.MARIADB else "START REPLICA", deadline=deadline)


async def apply_received(session: Session, *, deadline: float) -> None:
    """Return once the relay log is executed to its end. Raises as `wait_for_position`."""
    status = await replication_status(session, deadline=deadline)
    if status is None or not status.received:
        return
    mariadb = session.dialect is Dialect.MARIADB
    await session.run("START SLAVE SQL_THREAD" if mariadb else "START REPLICA SQL_THREAD", deadline=deadline)
    await wait_for_position(session, status.received, deadline=deadline)


async def highest_epoch(session: Session, shards: Sequence[int], *, deadline: float) -> int:
    """The highest version epoch in the shards' rows."""
    highest = 0
    for some in _some(shards):
        union = " UNION ALL ".join(
            f"(SELECT version_epoch FROM {schema_name(s)}.shard WHERE only_row = 1)" for s in some
        )
        (((epoch,),), _) = await session.run(f"SELECT MAX(version_epoch) FROM ({union}) e; COMMIT", deadline=deadline)
        highest = max(highest, int(epoch or 0))
    return highest


async def raise_epoch(
    session: Session, shards: Sequence[int], master: str, version_epoch: int, *, deadline: float
) -> None:
    """Write master, version epoch and a new generation into the rows of the shards, some at a time: whoever owned them
    is fenced off, and later versions are above all that were ever given out. Rows that have them are left alone. The
    server stays closed to leaders."""
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)
    for some in _some(shards):
        updates = "; ".join(
            f"UPDATE {schema_name(shard)}.shard SET master_server = %s, version_epoch = GREATEST(version_epoch, %s), "
            "generation = generation + 1 WHERE only_row = 1 AND (master_server <> %s OR version_epoch < %s)"
            for shard in some
        )
        values = [master, version_epoch, master, version_epoch] * len(some)
        await session.run(f"START TRANSACTION; {updates}; COMMIT", values, deadline=deadline)


async def open_to_writes(session: Session, *, semi_sync: bool, deadline: float) -> None:
    """Let leaders write. ``semi_sync``: from now on each commit waits, without end, for a replica that has received
    it."""
    await set_semi_sync(session, waits=semi_sync, deadline=deadline)
    await set_read_only(session, False, deadline=deadline)


def _some(shards: Sequence[int]) -> list[Sequence[int]]:
    return [shards[at : at + _RAISED_AT_ONCE] for at in range(0, len(shards), _RAISED_AT_ONCE)]
