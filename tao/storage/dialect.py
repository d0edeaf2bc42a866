# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""Differences between MySQL and MariaDB.

Both bound waits for row and metadata locks in whole seconds only. Both settings are one second here, as a backstop. The
actual bound, in milliseconds, is a limit on the *locking statement*: MariaDB's ``SET STATEMENT max_statement_time``,
MySQL's hint ``MAX_EXECUTION_TIME``. The server kills the statement, the session survives and rolls back, and its locks
are free at once. Closing the connection instead would hold the locks until the server notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Final

from tao.storage.result_packets import LAST_GTID, Row

_KEEP_LISTS = "in_predicate_conversion_threshold = 0"
_SQL_MODE = "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION"


class Dialect(Enum):
    """The two servers supported."""

    MARIADB = "mariadb"
    MYSQL = "mysql"

    def locking(self, select: str, milliseconds: int) -> str:
        """A locking SELECT (or UNION of them) that gives up after so many milliseconds."""
        if self is Dialect.MARIADB:
            return f"SET STATEMENT max_statement_time = {milliseconds / 1000:.3f} FOR {select}"
        head, word, tail = select.partition("SELECT ")
        return f"{head}{word}/*+ MAX_EXECUTION_TIME({milliseconds:d}) */ {tail}"

    @property
    def names_gtids(self) -> str:
        """The setting of a session that has the answer to COMMIT name the transaction's GTID."""
        if self is Dialect.MARIADB:
            return f"session_track_system_variables = '{LAST_GTID}'"
        return "session_track_gtids = OWN_GTID"

    def upsert(self, table: str, key: tuple[str, ...], values: tuple[str, ...], rows: int) -> str:
        """A multi-row upsert of ``rows`` rows, with a placeholder for each value of ``key + values``."""
        return self.upsert_rows(table, key, values, [f"({', '.join(['%s'] * len(key + values))})"] * rows)

    def upsert_rows(self, table: str, key: tuple[str, ...], values: tuple[str, ...], rows: Sequence[str]) -> str:
        """A multi-row upsert of these rows, each the text of all values of ``key + values`` in parentheses. A row that
        is all key is inserted where it is missing."""
        columns, updates = _around_rows(self is Dialect.MARIADB, key, values)
        return f"INSERT INTO {table} {columns} VALUES {', '.join(rows)}{updates}"


@cache
def _around_rows(is_mariadb: bool, key: tuple[str, ...], values: tuple[str, ...]) -> tuple[str, str]:
    """Return the columns of an upsert, and what follows its rows. There are a dozen kinds of upserts."""
    updated = values or key[:1]  # the column of a key is the same in both rows
    if is_mariadb:
        incoming, updates = "", [f"{name} = VALUES({name})" for name in updated]
    else:
        # VALUES() is deprecated there since 8.0.20; MariaDB has no row alias.
        incoming, updates = " AS incoming", [f"{name} = incoming.{name}" for name in updated]
    return f"({', '.join(key + values)})", f"{incoming} ON DUPLICATE KEY UPDATE {', '.join(updates)}"


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """The settings of a new connection."""

    writes: bool
    """Write sessions: autocommit off, READ COMMITTED (gap locks would make different keys deadlock). Read sessions:
    autocommit on, so that no pooled connection answers from an old snapshot, and REPEATABLE READ, whose snapshot is
    the one statement."""
    statement_seconds: float = 10.0
    """The server ends a SELECT of a read session after this many seconds. Its caller has given up long before."""
    net_seconds: int = 10
    """The server drops a peer that stalls within a packet for this long. The default of 60 would hold a server
    thread."""

    idle_transaction_seconds: int = 2
    """The server ends a session that is idle this long within a transaction, because a leader that hangs there holds
    locks that its successor waits for. A healthy leader is idle between statements only while its loop is busy."""
    idle_session_seconds: int = 10
    """The same for MySQL, which can only bound idle sessions. It is longer, because it also ends idle sessions of the
    pool."""
    under_lock_seconds: int = 0
    """How long a session may be idle whose user acts under a lock that others take over when that user hangs. 0: no
    such lock."""

    def statements(self, dialect: Dialect) -> str:
        """Return one packet of SET statements. The sql_mode is fixed because escaping depends on it."""
        level = "READ COMMITTED, READ WRITE" if self.writes else "REPEATABLE READ, READ ONLY"
        match dialect, self.writes:
            case Dialect.MARIADB, False:
                limit = f"max_statement_time = {self.statement_seconds:.3f}"
            case Dialect.MYSQL, False:
                limit = f"max_execution_time = {int(self.statement_seconds * 1000)}"
            case Dialect.MARIADB, True:
                # A long list of keys is not to become a table to be joined: the whole table would be read, and locked.
                limit = f"idle_transaction_timeout = {self.idle_transaction_seconds:d}, {_KEEP_LISTS}"
            case _:
                limit = f"wait_timeout = {self.idle_session_seconds:d}"
        if self.writes:
            limit += f", {dialect.names_gtids}"
        if self.under_lock_seconds:
            limit += f", wait_timeout = {self.under_lock_seconds:d}"
        return (
            f"SET SESSION TRANSACTION ISOLATION LEVEL {level}; "
            f"SET SESSION sql_mode = '{_SQL_MODE}', autocommit = {0 if self.writes else 1}, "
            "innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, "
            f"net_read_timeout = {self.net_seconds:d}, net_write_timeout = {self.net_seconds:d}, {limit}"
        )


def dialect_of(server_info: str) -> Dialect:
    """Return the kind of server from the version in its greeting."""
    return Dialect.MARIADB if "mariadb" in server_info.lower() else Dialect.MYSQL


SEMI_SYNC_PREFIXES: Final = {
    Dialect.MARIADB: ("rpl_semi_sync_master", "rpl_semi_sync_slave"),
    Dialect.MYSQL: ("rpl_semi_sync_source", "rpl_semi_sync_replica"),
}
"""Prefixes of the variables, and with a capital of the status values, for a server as master and as replica."""

SEMI_SYNC_STATUS: Final = (
    "SHOW GLOBAL STATUS WHERE Variable_name LIKE 'Rpl_semi_sync_%%_status' "
    "OR Variable_name LIKE 'Rpl_semi_sync_%%_wait_sessions' OR Variable_name LIKE 'Rpl_semi_sync_%%_clients'"
)
"""A statement whose rows `semi_sync_state` reads. It asks for status values and not settings, because only the status
shows a master that has given up waiting and a replica that is not connected."""


@dataclass(frozen=True, slots=True)
class SemiSyncState:
    """The semi-sync state of a server, as master and as replica. Without the plugins, which MySQL needs, both are
    False."""

    waits: bool
    """Whether its commits, as a master, wait for a replica."""
    acknowledges: bool
    """Whether it acknowledges, as a replica, what it receives. True for a moment after its master is gone."""
    waiting: int = 0
    """Groups of commits, of a master, that are in its binlog and wait for a replica now."""
    clients: int = 0
    """Connected replicas that acknowledge to it as their master, also those that the topology does not name."""


def semi_sync_state(dialect: Dialect, rows: Sequence[Row]) -> SemiSyncState:
    """Parse the rows of `SEMI_SYNC_STATUS`."""
    values = {str(name).lower(): str(value) for name, value in rows}
    as_master, as_replica = SEMI_SYNC_PREFIXES[dialect]
    return SemiSyncState(
        waits=values.get(f"{as_master}_status") == "ON",
        acknowledges=values.get(f"{as_replica}_status") == "ON",
        waiting=int(values.get(f"{as_master}_wait_sessions", 0)),
        clients=int(values.get(f"{as_master}_clients", 0)),
    )
