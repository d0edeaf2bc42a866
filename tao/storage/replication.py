"""The statements of replication: a server is made a replica or a master, asked how it does, and waited for.

Positions are GTIDs throughout, so that a replica continues at any server of its set. MariaDB and MySQL have different
words for all of it and the same meaning. Every function works on an administrator's session and leaves data alone.
A replica commits in its master's order (`ServerOptions.replicated` of the development cluster has the options that see
to it), so what a reader sees there was once the master's state (DESIGN.md §8).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Final

from tao.model.errors import DeadlineExceeded, OperatorError
from tao.storage.dialect import Dialect
from tao.storage.session import Session

_RUNNING: Final = "Yes"
_STOPPED: Final = "No"


@dataclass(frozen=True, slots=True)
class ReplicationSource:
    """The master, as its replica reaches it."""

    host: str
    port: int
    user: str
    """An account that may read the binlog, and nothing else (`ServiceAccounts.replicator`)."""
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReplicationSettings:
    """How a replica holds on to its master."""

    retry_seconds: int = 1
    """Pause between attempts to connect: an outage between regions should not last a second longer than it does."""
    heartbeat_seconds: int = 1
    """The master says so often that it has nothing to say. A replica that hears nothing for its server's
    ``replica_net_timeout``, a multiple of this, connects anew: silence must not be taken for peace."""


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """How a replica does."""

    source: str
    """``host:port`` of the master as the replica reaches it."""
    receiving: bool
    """Connected, and copying the master's binlog."""
    applying: bool
    """Executing what was received; when False, ``error`` says why, unless an operator stopped it."""
    stopped: bool
    """One half has given up and does not go on by itself, as it does after a lost connection."""
    lag_seconds: int | None
    """How old what it executes now is, in whole seconds; None while it does not know. An idle replica that is
    connected knows of no lag: for finer figures read the heartbeat rows (DESIGN.md §8)."""
    received: str
    """GTIDs received; promotion compares these."""
    executed: str
    """GTIDs executed."""
    error: str
    """The last complaint of either half; empty when there is none."""


async def attach(
    session: Session, source: ReplicationSource, *, deadline: float, settings: ReplicationSettings | None = None
) -> None:
    """Make the server a read-only replica of ``source`` from where it stands, whatever it followed before.

    Returns before it has connected; `replication_status` says whether it could. Raises a `TaoError` when refused.
    """
    settings = settings or ReplicationSettings()
    where = (source.host, source.port, source.user, source.password)
    timing = (settings.retry_seconds, settings.heartbeat_seconds)
    await set_read_only(session, True, deadline=deadline)
    if session.dialect is Dialect.MARIADB:
        await session.run("STOP SLAVE", deadline=deadline)
        # Where a replica continues does not count what the server wrote while it was a master itself.
        await session.run("SET GLOBAL gtid_slave_pos = @@GLOBAL.gtid_current_pos", deadline=deadline)
        await session.run(
            "CHANGE MASTER TO master_host = %s, master_port = %s, master_user = %s, master_password = %s, "
            "master_use_gtid = slave_pos, master_connect_retry = %s, master_heartbeat_period = %s",
            (*where, *timing),
            deadline=deadline,
        )
        await session.run("START SLAVE", deadline=deadline)
        return
    await session.run("STOP REPLICA", deadline=deadline)
    # Retries without a bound of their own (0): the default of 10 would give up during any real outage. The public key
    # is what lets the password pass without TLS, which the network between the regions has to bring.
    await session.run(
        "CHANGE REPLICATION SOURCE TO source_host = %s, source_port = %s, source_user = %s, source_password = %s, "
        "source_auto_position = 1, source_connect_retry = %s, source_heartbeat_period = %s, source_retry_count = 0, "
        "get_source_public_key = 1",
        (*where, *timing),
        deadline=deadline,
    )
    await session.run("START REPLICA", deadline=deadline)


async def detach(session: Session, *, deadline: float) -> None:
    """Make the server follow nobody, for good. It stays read-only or not, as it was. Idempotent."""
    if session.dialect is Dialect.MARIADB:
        await session.run("STOP SLAVE", deadline=deadline)
        await session.run("RESET SLAVE ALL", deadline=deadline)
    else:
        await session.run("STOP REPLICA", deadline=deadline)
        await session.run("RESET REPLICA ALL", deadline=deadline)


async def set_read_only(session: Session, read_only: bool, *, deadline: float) -> None:
    """Close the server to writes, or open it. On MySQL even to administrators; MariaDB lets those write on."""
    name = "read_only" if session.dialect is Dialect.MARIADB else "super_read_only"
    # Not in a transaction, which a look at any table has begun: MySQL refuses then.
    await session.run(f"ROLLBACK; SET GLOBAL {name} = {read_only:d}", deadline=deadline)
    if not read_only:
        # MySQL's super_read_only, taken away, leaves read_only in place.
        await session.run("SET GLOBAL read_only = 0", deadline=deadline)


async def replication_status(session: Session, *, deadline: float) -> ReplicationStatus | None:
    """How the replica does; None for a server that follows nobody."""
    mariadb = session.dialect is Dialect.MARIADB
    found = await session.named("SHOW SLAVE STATUS" if mariadb else "SHOW REPLICA STATUS", deadline=deadline)
    if not found:
        return None
    row = found[0]
    source, replica = ("Master", "Slave") if mariadb else ("Source", "Replica")
    halves = (row[f"{replica}_IO_Running"], row[f"{replica}_SQL_Running"])
    complaints = (row["Last_IO_Error"], row["Last_SQL_Error"])
    return ReplicationStatus(
        source=f"{row[f'{source}_Host']}:{row[f'{source}_Port']}",
        receiving=halves[0] == _RUNNING,
        applying=halves[1] == _RUNNING,
        stopped=_STOPPED in halves,
        lag_seconds=row[f"Seconds_Behind_{source}"],
        received=_one_line(row["Gtid_IO_Pos" if mariadb else "Retrieved_Gtid_Set"]),
        executed=await executed_position(session, deadline=deadline),
        error="; ".join(_one_line(text) for text in complaints if text),
    )


async def executed_position(session: Session, *, deadline: float) -> str:
    """GTIDs of every transaction that the server has committed, its own and its masters'."""
    name = "gtid_current_pos" if session.dialect is Dialect.MARIADB else "gtid_executed"
    (((position,),),) = await session.run(f"SELECT @@GLOBAL.{name}", deadline=deadline)
    return _one_line(position)


async def wait_for_position(session: Session, position: str, *, deadline: float) -> None:
    """Return once the replica has executed everything up to ``position`` (of `executed_position` at its master).

    Raises `DeadlineExceeded` when that takes until ``deadline`` (a second later at most), and `OperatorError` at once
    when replication has stopped on an error, with that error.
    """
    loop = asyncio.get_running_loop()
    mariadb = session.dialect is Dialect.MARIADB
    wait = "MASTER_GTID_WAIT(%s, 1)" if mariadb else "WAIT_FOR_EXECUTED_GTID_SET(%s, 1)"
    patience = deadline + 2.0  # each statement waits a second at the server; its answer is worth waiting for
    # A second at a time, because neither server ends the wait when replication stops.
    while True:
        (((gave_up,),),) = await session.run(f"SELECT {wait}", (position,), deadline=patience)
        if not gave_up:
            return
        status = await replication_status(session, deadline=patience)
        if status is None:
            raise OperatorError("the server is no replica: attach it first")
        if status.stopped and status.error:
            raise OperatorError(f"replication from {status.source} has stopped: {status.error}")
        if loop.time() >= deadline:
            raise DeadlineExceeded(
                f"the replica of {status.source} has executed {status.executed or 'nothing'} and not yet {position}"
                + (f" ({status.error})" if status.error else "")
            )


def _one_line(text: Any) -> str:  # Any: a column of SHOW
    return str(text or "").replace("\n", " ")
