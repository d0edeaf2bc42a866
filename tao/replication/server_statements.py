# ruff: noqa: S608 - schema names come from tao.storage.names, values are bound
"""The SQL of replication at one server: attach, detach, status, semi-sync, fence, and opening a new master.

Positions are GTIDs throughout, so a replica can continue at any server of its set. MariaDB and MySQL name everything
differently and mean the same. Every function uses an administrator's session, and all are safe to repeat, because an
interrupted promotion starts again from the first step. A replica commits in its master's order (the option files of the
development cluster show the settings), so every state that a reader sees on it was once the master's.

Semi-synchronous replication has three traps. A commit that waits for a replica holds the lock that ``SET GLOBAL
read_only`` needs, so a fence has to end such waiters; their clients have received no success. A replica acknowledges
what it has *received*, not executed, so only receiving may be stopped before everything received is applied. And a
replica says when it connects that it acknowledges, which both servers count whether or not the master waits at that
time (measured on MariaDB 10.11 and MySQL 9.7). So a master is made to wait only when a replica already acknowledges,
and no commit waits for a replica that may never come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from tao.model.errors import DeadlineExceeded, InternalError, OperatorError
from tao.model.ids import RESERVED_AHEAD_MS, WINDOW_MS, LostTimes
from tao.replication.gtid import GtidSet
from tao.storage.dialect import SEMI_SYNC_PREFIXES, SEMI_SYNC_STATUS, Dialect, semi_sync_state
from tao.storage.names import schema_name
from tao.storage.result_packets import Columns, Row
from tao.storage.session import DatabaseSession
from tao.storage.tls import DatabaseTls

RETRY_SECONDS: Final = 1
"""Pause between a replica's attempts to connect. Short, so that replication resumes as soon as an outage between
regions ends."""
HEARTBEAT_SECONDS: Final = 1
"""Interval at which an idle master sends heartbeats. A replica that receives nothing for its server's
``replica_net_timeout``, a multiple of this, reconnects, so that a dead connection is not mistaken for an idle one."""
_Named = list[dict[str, Any]]
"""Rows of a result by column name. `Any`: columns of SHOW."""
_RUNNING: Final = "Yes"
_STOPPED: Final = "No"
_CONNECTION_ERRORS: Final = range(2000, 3000)
"""The numbers of errors that a client finds by itself: of a connection that is refused, lost or times out."""


class SourceTls(StrEnum):
    """How a replica connects to its master. Over TLS it shows its server's own certificate."""

    NONE = "none"
    """In plain text, unless an administrator has set something else; the present options stay."""
    AUTHORITY = "authority"
    """Over TLS; the master's certificate must be signed by an authority of the replica's ``ssl_ca``."""
    HOST = "host"
    """As `AUTHORITY`, and the certificate must name the host by which the replica reaches the master."""

    @classmethod
    def of(cls, tls: DatabaseTls | None) -> Self:
        """Return the same for a replica as a process of ours has for its own connections."""
        if tls is None:
            return cls("none")
        return cls("host" if tls.files.verify_host else "authority")


@dataclass(frozen=True, slots=True)
class ReplicationSource:
    """The address and account by which a replica reaches its master."""

    host: str
    port: int
    user: str
    """An account that may only read the binlog (`ServiceAccounts.replicator`)."""
    password: str = field(repr=False)
    tls: SourceTls = SourceTls.NONE


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """The replication state of a replica."""

    source: str
    """``host:port`` of the master as the replica reaches it."""
    receiving: bool
    """The replica is connected and copies the master's binlog."""
    applying: bool
    """The replica executes what it received. When False, ``error`` says why, unless an operator stopped it."""
    stopped: bool
    """Receiving or applying has stopped and does not resume by itself, as it does after a lost connection."""
    lag_seconds: int | None
    """Age in whole seconds of what it executes now, or None while unknown. It is 0 on an idle, connected replica. The
    heartbeat rows give finer values."""
    received: str
    """GTIDs received, which a promotion compares."""
    executed: str
    """GTIDs executed."""
    error: str
    """The last error of receiving or applying, or an empty string."""
    receiving_stopped: bool = False
    """Receiving has stopped and does not resume by itself."""
    receiving_failed: bool = False
    """The last error of receiving is not one of the connection, so it would come again: the master has purged what the
    replica lacks, for example. An error of the connection is still reported when receiving is stopped by a command."""
    heard: str | None = None
    """A text that changes with everything that comes from the master, heartbeats too. None on MySQL, which shows
    heartbeats in the performance schema only, where a watcher may not look."""


async def attach(session: DatabaseSession, source: ReplicationSource, *, deadline: float) -> None:
    """Make the server a read-only replica of ``source`` from its current position, whatever it followed before.

    Returns before it has connected; `replication_status` reports the outcome. Raises a `TaoError` when refused.
    """
    where = (source.host, source.port, source.user, source.password)
    timing = (RETRY_SECONDS, HEARTBEAT_SECONDS)
    mariadb = session.dialect is Dialect.MARIADB
    encryption = await _encryption(session, source.tls, "master" if mariadb else "source", deadline)
    await set_read_only(session, True, deadline=deadline)
    if mariadb:
        # The replica's position does not include what the server wrote while it was a master.
        statements = (
            "STOP SLAVE; SET GLOBAL gtid_slave_pos = @@GLOBAL.gtid_current_pos; "
            "CHANGE MASTER TO master_host = %s, master_port = %s, master_user = %s, master_password = %s, "
            "master_use_gtid = slave_pos, master_connect_retry = %s, "
            f"master_heartbeat_period = %s{encryption.sql}; START SLAVE"
        )
    else:
        # Retry without a limit (0): the default of 10 would give up during any real outage. The public key lets the
        # password pass without TLS.
        statements = (
            "STOP REPLICA; CHANGE REPLICATION SOURCE TO "
            "source_host = %s, source_port = %s, source_user = %s, source_password = %s, "
            "source_auto_position = 1, source_connect_retry = %s, source_heartbeat_period = %s, "
            f"source_retry_count = 0, get_source_public_key = 1{encryption.sql}; START REPLICA"
        )
    await session.run(statements, (*where, *timing, *encryption.files), deadline=deadline)


class _Encryption(NamedTuple):
    sql: str
    files: tuple[str, ...] = ()


async def _encryption(session: DatabaseSession, tls: SourceTls, source: str, deadline: float) -> _Encryption:
    """Return the options of CHANGE MASTER for ``tls``. The files are those of the replica's own server, on its machine,
    whose certificate is also that of a client. Raises `OperatorError` for a replica without them."""
    if tls is SourceTls.NONE:
        return _Encryption("")
    files = "SELECT @@GLOBAL.ssl_ca, @@GLOBAL.ssl_cert, @@GLOBAL.ssl_key"
    ((row,),) = await session.run(files, deadline=deadline)
    if not all(row):
        raise OperatorError(
            "the server has no ssl_ca, ssl_cert and ssl_key, with which it would follow its master over TLS: set them "
            "in its options"
        )
    named = ", ".join(f"{source}_ssl_{file} = %s" for file in ("ca", "cert", "key"))
    verifies = f"{source}_ssl_verify_server_cert = {tls is SourceTls.HOST:d}"
    return _Encryption(f", {source}_ssl = 1, {verifies}, {named}", tuple(str(file) for file in row))


async def detach(session: DatabaseSession, *, deadline: float) -> None:
    """Detach the server from its master for good. It stays read-only or not, as it was. Idempotent."""
    replica = "SLAVE" if session.dialect is Dialect.MARIADB else "REPLICA"
    await session.run(f"STOP {replica}; RESET {replica} ALL", deadline=deadline)


async def set_read_only(session: DatabaseSession, read_only: bool, *, deadline: float) -> None:
    """Close the server to writes, or open it. MySQL then also refuses administrators; MariaDB lets them write."""
    await session.run(_read_only_setting(session.dialect, read_only), deadline=deadline)


def _read_only_setting(dialect: Dialect, read_only: bool) -> str:
    name = "read_only" if dialect is Dialect.MARIADB else "super_read_only"
    # Clearing MySQL's super_read_only leaves read_only set.
    also = "" if read_only or dialect is Dialect.MARIADB else "; SET GLOBAL read_only = 0"
    # MySQL refuses this within a transaction, which reading any table has begun.
    return f"ROLLBACK; SET GLOBAL {name} = {read_only:d}{also}"


async def replication_status(session: DatabaseSession, *, deadline: float) -> ReplicationStatus | None:
    """Return the replication state of the server, or None when it follows no master."""
    # In one packet: between distant regions the round trips decide how long a promotion takes.
    found, executed = await session.named_results(
        f"{_show_status(session.dialect)}; {_select_executed(session.dialect)}", deadline=deadline
    )
    return _status_of(session.dialect, found, executed)


_HEARTBEATS: Final = "Slave_received_heartbeats"


def _show_status(dialect: Dialect) -> str:
    return "SHOW SLAVE STATUS" if dialect is Dialect.MARIADB else "SHOW REPLICA STATUS"


def _select_executed(dialect: Dialect) -> str:
    return f"SELECT @@GLOBAL.{'gtid_current_pos' if dialect is Dialect.MARIADB else 'gtid_executed'} AS position"


def _status_of(
    dialect: Dialect, found: _Named, executed: _Named, heartbeats: str | None = None
) -> ReplicationStatus | None:
    """Parse the results of `_show_status` and `_select_executed`. ``heartbeats``: how many were received."""
    if not found:
        return None
    row = found[0]
    mariadb = dialect is Dialect.MARIADB
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
        executed=_one_line(executed[0]["position"]),
        error="; ".join(_one_line(text) for text in complaints if text),
        receiving_stopped=halves[0] == _STOPPED,
        receiving_failed=bool(errno := int(row["Last_IO_Errno"])) and errno not in _CONNECTION_ERRORS,
        heard=None if heartbeats is None else f"{heartbeats} {row['Master_Log_File']}:{row['Read_Master_Log_Pos']}",
    )


async def executed_position(session: DatabaseSession, *, deadline: float) -> str:
    """Return the GTIDs of every transaction that the server has committed, its own and those of its masters."""
    (((position,),),) = await session.run(_select_executed(session.dialect), deadline=deadline)
    return _one_line(position)


async def wait_for_position(session: DatabaseSession, position: str, *, deadline: float) -> None:
    """Wait until the replica has executed everything up to ``position``, which `executed_position` returned at its
    master.

    Raises `DeadlineExceeded` at ``deadline`` (at most a second later), and `OperatorError` as soon as replication has
    stopped on an error, with that error.
    """
    loop = asyncio.get_running_loop()
    mariadb = session.dialect is Dialect.MARIADB
    wait = "MASTER_GTID_WAIT(%s, 1)" if mariadb else "WAIT_FOR_EXECUTED_GTID_SET(%s, 1)"
    # each statement waits up to a second at the server, and its answer is worth the extra time
    patience = deadline + 2.0
    # Wait one second at a time, because neither server ends the wait when replication stops.
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


async def set_semi_sync(session: DatabaseSession, *, waits: bool, deadline: float) -> None:
    """Set whether commits of this server wait for a replica. A server without semi-synchronous replication stays
    without; there ``waits`` raises `OperatorError`."""
    if await _can_wait(session, waits, deadline):
        await session.run(_semi_sync_settings(session.dialect, waits=waits), deadline=deadline)


async def _can_wait(session: DatabaseSession, waits: bool, deadline: float) -> bool:
    """Return whether commits could wait for a replica. Raises `OperatorError` when they should and cannot."""
    can_wait = await _has_semi_sync(session, SEMI_SYNC_PREFIXES[session.dialect][0], deadline=deadline)
    if waits and not can_wait:
        raise OperatorError("no semi-synchronous replication here: load the plugins (docs/how-to/deploy.md)")
    return can_wait


def _semi_sync_settings(dialect: Dialect, *, waits: bool) -> str:
    master, _ = SEMI_SYNC_PREFIXES[dialect]
    before = ""
    if waits:
        # The default timeout of ten seconds silently falls back to asynchronous replication. With AFTER_SYNC nobody
        # sees a row before a replica has received it.
        no_replica = "no_slave" if dialect is Dialect.MARIADB else "no_replica"
        before = (
            f"SET GLOBAL {master}_wait_point = 'AFTER_SYNC'; SET GLOBAL {master}_timeout = 4294967295; "
            f"SET GLOBAL {master}_wait_{no_replica} = 1; "
        )
    return f"{before}SET GLOBAL {master}_enabled = {waits:d}"


async def acknowledge_as_replica(session: DatabaseSession, *, deadline: float) -> None:
    """Make a server acknowledge to its master what it receives, from its next connection on. Its own commits wait for
    no replica."""
    master, replica = SEMI_SYNC_PREFIXES[session.dialect]
    if not await _has_semi_sync(session, replica, deadline=deadline):
        raise OperatorError("no semi-synchronous replication here: load the plugins (docs/how-to/deploy.md)")
    await session.run(f"SET GLOBAL {master}_enabled = 0; SET GLOBAL {replica}_enabled = 1", deadline=deadline)


async def acknowledging_replicas(session: DatabaseSession, *, deadline: float) -> int:
    """Return the number of connected replicas that acknowledge."""
    name = f"{SEMI_SYNC_PREFIXES[session.dialect][0]}_clients"
    rows = await session.named(f"SHOW GLOBAL STATUS LIKE '{name}'", deadline=deadline)
    return int(rows[0]["Value"]) if rows else 0


async def _has_semi_sync(session: DatabaseSession, prefix: str, *, deadline: float) -> bool:
    """Return whether the server can be a master or replica (``prefix``) of semi-synchronous replication."""
    if session.dialect is Dialect.MARIADB:
        return True  # it has both built in; MySQL needs plugins
    return bool(await session.named(f"SHOW GLOBAL VARIABLES LIKE '{prefix}_enabled'", deadline=deadline))


_SHOWN: Final = ("Id", "User", "Host", "db", "Command", "Time", "State", "Info")
_ALSO_SHOWN: Final = {Dialect.MARIADB: ("Progress",), Dialect.MYSQL: ()}


class DatabaseProcess(NamedTuple):
    """A connection to a database server. ``state``: the server's description of the running statement, or "" for
    none."""

    thread: int
    user: str
    command: str
    state: str


async def server_processes(session: DatabaseSession, *, deadline: float) -> list[DatabaseProcess]:
    """Return all connections, including this session's. Raises as `DatabaseSession.stream`."""
    names = _SHOWN + _ALSO_SHOWN[session.dialect]
    rows: list[Row] = []
    # Read the columns as bytes: a running statement may contain stored data that is valid in no character set. The
    # tables of information_schema compute that column, and fail, even when it is not selected.
    undecoded = Columns(names, (None,) * len(names))
    await session.stream("SHOW FULL PROCESSLIST", (), rows.extend, deadline=deadline, columns=undecoded)
    return [
        DatabaseProcess(int(thread), user.decode(), command.decode(), (state or b"").decode())
        for thread, user, _, _, command, _, state, *_ in rows
    ]


IS_BEING_SEEDED: Final = (
    "EXISTS (SELECT 1 FROM information_schema.tables WHERE (table_schema, table_name) = ('tao', 'seeding'))"
)
"""SQL condition: the server is being seeded, or its seeding was interrupted."""

_SHARDS_PER_TRANSACTION: Final = 64
"""Shard rows per transaction. Each takes milliseconds, and is little for a replica to apply at once."""

_SEMI_SYNC_WAIT_SECONDS: Final = 0.5
"""Time that commits may still wait for a replica when their server is being closed: several round trips between
regions."""

_END_CONNECTION_SECONDS: Final = 1
"""How long a replica tries to end its connection at its master: the shortest time that MariaDB takes."""

_CLOSING_SECONDS: Final = 60
"""How long the server itself waits for locks while it closes: longer than any deadline here."""


@dataclass(frozen=True, slots=True)
class MemberState:
    """The observed state of a server of a replication set."""

    read_only: bool
    following: ReplicationStatus | None
    """None when it follows no master."""
    executed: GtidSet
    """Every transaction that the server has committed."""
    received: GtidSet
    """The executed transactions and those in its relay log: all that it can have without its master."""
    seeding: bool = False
    """It is being seeded, or its seeding was interrupted, so it has only a part of its master's data."""
    waits_for_replica: bool = False
    """As a master, each of its commits waits until a replica has received it."""
    acknowledges: bool = False
    """As a replica, it acknowledges to its master what it has received, while it is connected."""
    waiting_commits: int = 0
    """As a master, groups of commits that are in its binlog and wait for a replica now. 0 on MySQL, where a statement
    has no id by which its wait could be ended."""
    acknowledging_clients: int = 0
    """As a master, the connected replicas that acknowledge to it, those outside the topology too."""

    @property
    def has_applied_all(self) -> bool:
        """Return whether a replica certainly has executed everything that is in its relay log. On MySQL that is not
        seen once the relay log does not go back to the first transaction."""
        return self.following is not None and self.following.executed == self.following.received


async def member_state(session: DatabaseSession, *, deadline: float) -> MemberState:
    """Read which transactions the server has and which master it follows, in one round trip."""
    return await _state_after(session, "", deadline)


async def _state_after(session: DatabaseSession, statements: str, deadline: float) -> MemberState:
    """Run statements, and return the state of the server then, in one round trip."""
    dialect = session.dialect
    *_, found, executed_here, (values,), figures, _ = await session.named_results(
        f"{statements}{_show_status(dialect)}; {_select_executed(dialect)}; {_select_state(dialect)}; "
        f"{SEMI_SYNC_STATUS} OR Variable_name = '{_HEARTBEATS}'; ROLLBACK",
        deadline=deadline,
    )
    by_name = [tuple(each.values()) for each in figures]
    heartbeats = next((str(value) for name, value in by_name if str(name) == _HEARTBEATS), None)
    status = _status_of(dialect, found, executed_here, heartbeats)
    semi_sync = semi_sync_state(dialect, by_name)
    executed = _one_line(values["executed"])
    received = [executed] if status is None else [executed, status.received]
    return MemberState(
        read_only=bool(values["read_only"]),
        following=status,
        executed=GtidSet(dialect, executed),
        received=GtidSet(dialect, *received),
        seeding=bool(values["seeding"]),
        waits_for_replica=semi_sync.waits,
        acknowledges=semi_sync.acknowledges,
        waiting_commits=semi_sync.waiting if dialect is Dialect.MARIADB else 0,
        acknowledging_clients=semi_sync.clients,
    )


def _select_state(dialect: Dialect) -> str:
    # MariaDB's positions name one transaction per domain; the binlog state names the last one of each committing
    # server.
    name = "gtid_binlog_state" if dialect is Dialect.MARIADB else "gtid_executed"
    return f"SELECT @@GLOBAL.read_only AS read_only, @@GLOBAL.{name} AS executed, {IS_BEING_SEEDED} AS seeding"


async def fence(session: DatabaseSession, other: DatabaseSession, *, deadline: float) -> int:
    """Close the server to writes and end the commits that wait for a replica. Returns how many were ended.

    When this returns, no uncommitted transaction can commit any more. ``other``: a second session at the server,
    because the one that closes it waits for such commits. Raises `DeadlineExceeded`.
    """
    closing = asyncio.ensure_future(_close(session, deadline))
    ended: set[int] = set()
    try:
        while not closing.done():
            await asyncio.wait((closing,), timeout=_SEMI_SYNC_WAIT_SECONDS)
            if not closing.done():
                ended |= await _end_waiting(other, deadline)
        await closing
    finally:
        closing.cancel()
    return len(ended)


async def _close(session: DatabaseSession, deadline: float) -> None:
    # A single long attempt: between two attempts another commit could begin to wait unnoticed.
    await session.run("SET SESSION lock_wait_timeout = %s", (_CLOSING_SECONDS,), deadline=deadline)
    await set_read_only(session, True, deadline=deadline)
    await session.run("SET SESSION lock_wait_timeout = 1", deadline=deadline)


async def _end_waiting(session: DatabaseSession, deadline: float) -> set[int]:
    """End the connections whose commits wait for a replica, and return their threads. While the server is being closed
    no further commit can begin to wait."""
    processes = await server_processes(session, deadline=deadline)
    waiting = {each.thread: each.command for each in processes if "semi-sync ACK" in each.state}
    for thread in waiting:
        with suppress(InternalError):  # "no such thread": the connection has ended by itself
            await session.run("KILL CONNECTION %s", (thread,), deadline=deadline)
    if session.dialect is Dialect.MYSQL and waiting and set(waiting.values()) == {"Killed"}:
        # On MySQL the wait outlives its client. No client is left to which its end could report a success.
        await set_semi_sync(session, waits=False, deadline=deadline)
    return set(waiting)


async def waiting_statements(session: DatabaseSession, *, deadline: float) -> list[int]:
    """Return the statements of a MariaDB server that wait for a replica's acknowledgement, by their query ids."""
    waiting = "SELECT QUERY_ID FROM information_schema.PROCESSLIST WHERE STATE LIKE '%%semi-sync ACK%%'; ROLLBACK"
    rows, *_ = await session.run(waiting, deadline=deadline)
    return [int(row[0]) for row in rows]


async def end_wait(session: DatabaseSession, statement: int, *, deadline: float) -> None:
    """End the wait of one statement of a MariaDB server for an acknowledgement: its group of commits then succeeds.

    Only for commits that a replica has. A thread's next statement, which may wait for an acknowledgement that it needs,
    has another query id and is never touched.
    """
    with suppress(InternalError):  # "no such query": it has ended by itself
        await session.run("KILL QUERY ID %s", (statement,), deadline=deadline)


async def roll_back(session: DatabaseSession, *, deadline: float) -> None:
    """Show the server that a session is in use, and end its transaction, if there is one."""
    await session.run("ROLLBACK", deadline=deadline)


async def stop_receiving(session: DatabaseSession, *, deadline: float) -> MemberState:
    """Stop receiving from the master; what was received is still applied. Returns the state then. Idempotent.

    A semi-synchronous replica of MariaDB then connects to its master to end its connection there. With the server's own
    limit it would wait for two seconds for a master that hangs, and the promotion with it."""
    statement = "STOP REPLICA IO_THREAD"
    if session.dialect is Dialect.MARIADB:
        limit = f"SET GLOBAL rpl_semi_sync_slave_kill_conn_timeout = {_END_CONNECTION_SECONDS}"
        statement = f"{limit}; STOP SLAVE IO_THREAD"
    return await _state_after(session, f"{statement}; ", deadline)


async def receive_again(session: DatabaseSession, *, deadline: float) -> None:
    """Undo `stop_receiving` at a server that is still a replica. Idempotent."""
    await session.run("START SLAVE" if session.dialect is Dialect.MARIADB else "START REPLICA", deadline=deadline)


async def apply_received(session: DatabaseSession, *, deadline: float) -> None:
    """Wait until the relay log is fully executed. Raises as `wait_for_position`."""
    status = await replication_status(session, deadline=deadline)
    if status is None or not status.received:
        return
    mariadb = session.dialect is Dialect.MARIADB
    if mariadb and status.executed == status.received:
        return  # MySQL's positions name also what the server had before
    if not status.applying:
        await session.run("START SLAVE SQL_THREAD" if mariadb else "START REPLICA SQL_THREAD", deadline=deadline)
    await wait_for_position(session, status.received, deadline=deadline)


async def highest_epoch(
    session: DatabaseSession, shards: Sequence[int], *, master: str = "", taken: bool = False, deadline: float
) -> int:
    """Return the highest version epoch in the shards' rows; with ``master``, in those that name this server as
    master; with ``taken``, in those that a leader has taken since their epoch was raised."""
    highest = 0
    where = (" AND master_server = %s" if master else "") + (" AND owner <> ''" if taken else "")
    for some in _groups(shards):
        union = " UNION ALL ".join(
            f"(SELECT version_epoch FROM {schema_name(s)}.shard WHERE only_row = 1{where})" for s in some
        )
        (((epoch,),), _) = await session.run(
            f"SELECT MAX(version_epoch) FROM ({union}) e; COMMIT",
            [master] * len(some) if master else (),
            deadline=deadline,
        )
        highest = max(highest, int(epoch or 0))
    return highest


class LostIds(NamedTuple):
    """Ids that a server may not know to be reserved, because it takes the place of a lost one and lacks commits.

    ``known_epoch``: the highest version epoch under which ids may have been given out. A shard's row below it lacks
    more than the last commits: where the ids of that epoch began. ``reserving``: the schemas that have the table for
    them (`schemas_with_reserved_ids`). A shard without it (its master was lost before or during a migration) is left
    out: it begins a minute above the clock. So for 80 s after the migration of the lost master, when a leader can have
    reserved more there, ids can be given out again."""

    times: LostTimes
    known_epoch: int
    reserving: Collection[str]


async def raise_epoch(
    session: DatabaseSession,
    shards: Sequence[int],
    master: str,
    version_epoch: int,
    *,
    other_servers: Collection[str] = (),
    lost_ids: LostIds | None = None,
    deadline: float,
) -> None:
    """Write the master, the version epoch and a new generation without an owner into the shards' rows, in batches.

    This fences off the former owners of the shards, and all later versions are above any that were ever assigned. Rows
    that are up to date are left alone. The server stays closed to leaders, so a row without an owner also says that
    nothing was written under its epoch.

    ``other_servers``: the servers of other databases. A row that names one of them is the fence of a move
    (`tao.replication.shard_move`), and is left to those who undo the move.

    ``lost_ids``: the ids that the server may lack. The shards whose rows change then begin above them, by the rule of
    `LostTimes.begin`.
    """
    if session.dialect is Dialect.MYSQL:
        await session.run("ROLLBACK; SET GLOBAL super_read_only = 0", deadline=deadline)
    outdated = "only_row = 1 AND (master_server <> %s OR version_epoch < %s)"
    fences = list(other_servers)
    is_fence = "master_server IN %s" if fences else "FALSE"
    fence = [fences] if fences else []
    for some in _groups(shards):
        statements: list[str] = []
        values: list[object] = []
        for shard in some:
            schema = schema_name(shard)
            if lost_ids is not None and schema in lost_ids.reserving:
                # Before the row changes, because only rows that are out of date count. Those of a move are among them:
                # the lost master may have undone it, and have gone on under any epoch. An epoch above the known one
                # comes from an interrupted promotion of this server, and hides what the row had before.
                known = lost_ids.known_epoch
                is_hidden = f"version_epoch > {known} AND master_server = %s"
                lacks_epoch = f"(version_epoch < {known} OR {is_hidden} OR {is_fence})"
                absent, present = _begin_of_ids(lost_ids.times, lacks_epoch)
                statements.append(
                    f"INSERT INTO {schema}.reserved_ids (only_row, reserved_unix_ms) "
                    f"SELECT 1, {absent} FROM {schema}.shard WHERE {outdated} "
                    f"ON DUPLICATE KEY UPDATE reserved_unix_ms = {present}"
                )
                values += [master, *fence, master, version_epoch, master, *fence]
            statements.append(
                f"UPDATE {schema}.shard SET master_server = %s, version_epoch = GREATEST(version_epoch, %s), "
                f"owner = '', generation = generation + 1 WHERE {outdated} AND NOT ({is_fence})"
            )
            values += [master, version_epoch, master, version_epoch, *fence]
        await session.run(f"START TRANSACTION; {'; '.join(statements)}; COMMIT", values, deadline=deadline)


def _begin_of_ids(times: LostTimes, lacks_epoch: str) -> tuple[str, str]:
    """Return `LostTimes.begin` as expressions in SQL: for a shard without a reserved time, and for one with one.
    ``lacks_epoch``: a condition on its row."""
    stored, normal, farthest = "reserved_unix_ms", times.normal_unix_ms, times.farthest_unix_ms
    absent = f"IF({lacks_epoch}, {farthest}, {normal})"
    bounded = f"IF({lacks_epoch}, {farthest}, LEAST(GREATEST({normal}, {_next_window(stored)}), {farthest}))"
    is_wrong = f"{stored} > {times.right_until_unix_ms}"
    beyond = _next_window(f"({stored} + {RESERVED_AHEAD_MS})")
    return absent, f"IF({is_wrong}, {beyond}, GREATEST({stored}, {bounded}))"


def _next_window(unix_ms: str) -> str:
    return f"({unix_ms} DIV {WINDOW_MS} + 1) * {WINDOW_MS}"


async def schemas_with_reserved_ids(session: DatabaseSession, *, deadline: float) -> frozenset[str]:
    """Return the schemas of the shards that have a table of reserved ids."""
    rows, _ = await session.run(
        "SELECT table_schema FROM information_schema.tables WHERE table_name = 'reserved_ids'; ROLLBACK",
        deadline=deadline,
    )
    return frozenset(schema for (schema,) in rows)


async def open_to_writes(session: DatabaseSession, *, semi_sync: bool, deadline: float) -> None:
    """Let leaders write. ``semi_sync``: from now on each commit waits without limit until a replica has received it."""
    can_wait = await _can_wait(session, semi_sync, deadline)
    before = f"{_semi_sync_settings(session.dialect, waits=semi_sync)}; " if can_wait else ""
    await session.run(f"{before}{_read_only_setting(session.dialect, False)}", deadline=deadline)


def _groups(shards: Sequence[int]) -> list[Sequence[int]]:
    return [shards[at : at + _SHARDS_PER_TRANSACTION] for at in range(0, len(shards), _SHARDS_PER_TRANSACTION)]
