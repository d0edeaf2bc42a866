# ruff: noqa: S608 - schema and table names come from tao.storage.names, values are bound
"""Where MySQL and MariaDB want different words for one thing.

Locks. Both bound waits for row and metadata locks in whole seconds only, and both settings are one second here, as a
backstop. The bound in milliseconds that DESIGN.md §3 asks for is a limit on the *locking statement*: MariaDB's
``SET STATEMENT max_statement_time``, MySQL's hint ``MAX_EXECUTION_TIME``. The statement is killed, the session lives
and rolls back, and its locks are free at once; closing the connection instead would hold them until the server
notices.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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

    def upsert(self, table: str, key: tuple[str, ...], values: tuple[str, ...], rows: int) -> str:
        """A multi-row upsert of ``rows`` rows, with a placeholder for each value of ``key + values``."""
        row = f"({', '.join(['%s'] * len(key + values))})"
        into = f"INSERT INTO {table} ({', '.join(key + values)}) VALUES {', '.join([row] * rows)}"
        if self is Dialect.MARIADB:
            updates = ", ".join(f"{name} = VALUES({name})" for name in values)
        else:
            # VALUES() is deprecated there since 8.0.20; MariaDB has no row alias.
            into += " AS incoming"
            updates = ", ".join(f"{name} = incoming.{name}" for name in values)
        return f"{into} ON DUPLICATE KEY UPDATE {updates}"


@dataclass(frozen=True, slots=True)
class SessionSetup:
    """What a new connection is told first."""

    writes: bool
    """Write sessions: autocommit off, READ COMMITTED (gap locks would make different keys deadlock). Read sessions:
    autocommit on, so that no pooled connection answers from an old snapshot, and REPEATABLE READ, whose snapshot is
    the one statement."""
    statement_seconds: float = 10.0
    """The server ends a SELECT of a read session after this long, whose asker has gone long before."""
    net_seconds: int = 10
    """A peer that stalls within a packet for so long is gone; the default of 60 holds a server thread for nothing."""

    idle_transaction_seconds: int = 2
    """A leader that stands still in the middle of a transaction holds locks that its successor waits for; the server
    ends it. Between its statements a leader is never idle for longer than a busy loop keeps it."""
    idle_session_seconds: int = 10
    """The same for MySQL, which knows no bound but on idle sessions: longer, since idle ones of the pool go, too."""
    under_lock_seconds: int = 0
    """How long a session may be idle whose user acts under a lock that others take over when he hangs; 0: there is no
    such lock."""

    def statements(self, dialect: Dialect) -> str:
        """One packet of SET statements. The sql_mode is fixed because escaping depends on it."""
        level = "READ COMMITTED, READ WRITE" if self.writes else "REPEATABLE READ, READ ONLY"
        match dialect, self.writes:
            case Dialect.MARIADB, False:
                limit = f"max_statement_time = {self.statement_seconds:.3f}"
            case Dialect.MYSQL, False:
                limit = f"max_execution_time = {int(self.statement_seconds * 1000)}"
            case Dialect.MARIADB, True:
                limit = f"idle_transaction_timeout = {self.idle_transaction_seconds:d}"
            case _:
                limit = f"wait_timeout = {self.idle_session_seconds:d}"
        if self.under_lock_seconds:
            limit += f", wait_timeout = {self.under_lock_seconds:d}"
        return (
            f"SET SESSION TRANSACTION ISOLATION LEVEL {level}; "
            f"SET SESSION sql_mode = '{_SQL_MODE}', autocommit = {0 if self.writes else 1}, "
            "innodb_lock_wait_timeout = 1, lock_wait_timeout = 1, "
            f"net_read_timeout = {self.net_seconds:d}, net_write_timeout = {self.net_seconds:d}, {limit}"
        )


def dialect_of(server_info: str) -> Dialect:
    """Which server this is, from the version in its greeting."""
    return Dialect.MARIADB if "mariadb" in server_info.lower() else Dialect.MYSQL
