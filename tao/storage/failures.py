"""Translates the driver's errors and the servers' error numbers into errors of `tao.model.errors`."""

from __future__ import annotations

from typing import Final

import pymysql.err
from pymysql.constants import CR, ER

from tao.model.errors import (
    DatabaseFull,
    DeadlineExceeded,
    InternalError,
    MasterReadOnly,
    OperatorError,
    ShardBlocked,
    TaoError,
    TooLarge,
    Unavailable,
)

_STATEMENT_TIMEOUT_MARIADB: Final = 1969
_STATEMENT_TIMEOUT_MYSQL: Final = 3024
_LOCK_NOWAIT_MYSQL: Final = 3572
_READ_ONLY_MODE: Final = 1836
_READ_ONLY_SESSION: Final = 1792
_SERVER_SHUTDOWN: Final = 1053
_CONNECTION_KILLED: Final = 1927
_IDLE_TOO_LONG_MYSQL: Final = 4031
_TLS_REQUIRED: Final = 3159
_NO_PASSWORD: Final = 1698
_MUST_CHANGE_PASSWORD: Final = 1820
_PASSWORD_EXPIRED_MYSQL: Final = 1862
_ACCOUNT_LOCKED_MYSQL: Final = 3118
_ACCOUNT_LOCKED_MARIADB: Final = 4151

_LOST: Final = frozenset(
    {
        0, CR.CR_SERVER_GONE_ERROR, CR.CR_SERVER_LOST, CR.CR_CONN_HOST_ERROR, CR.CR_CONNECTION_ERROR,
        CR.CR_SSL_CONNECTION_ERROR,
        _SERVER_SHUTDOWN, _CONNECTION_KILLED, _IDLE_TOO_LONG_MYSQL,
    }
)  # fmt: skip
_STATEMENT_ENDED: Final = frozenset({_STATEMENT_TIMEOUT_MARIADB, _STATEMENT_TIMEOUT_MYSQL, ER.QUERY_INTERRUPTED})
_BLOCKED: Final = frozenset({ER.LOCK_WAIT_TIMEOUT, ER.LOCK_DEADLOCK, _LOCK_NOWAIT_MYSQL})
_NOT_MASTER: Final = frozenset({ER.OPTION_PREVENTS_STATEMENT, _READ_ONLY_MODE, _READ_ONLY_SESSION})
_REFUSED: Final = frozenset(
    {
        ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.SPECIFIC_ACCESS_DENIED_ERROR,
        ER.BAD_FIELD_ERROR, _TLS_REQUIRED,
    }
)  # fmt: skip
_LOGIN_REFUSED: Final = frozenset(
    {
        ER.ACCESS_DENIED_ERROR, ER.DBACCESS_DENIED_ERROR, ER.TABLEACCESS_DENIED_ERROR, ER.SPECIFIC_ACCESS_DENIED_ERROR,
        ER.HOST_NOT_PRIVILEGED, _NO_PASSWORD, _MUST_CHANGE_PASSWORD, _PASSWORD_EXPIRED_MYSQL,
        _ACCOUNT_LOCKED_MYSQL, _ACCOUNT_LOCKED_MARIADB, _TLS_REQUIRED, CR.CR_SSL_CONNECTION_ERROR,
    }
)  # fmt: skip
"""The server answers, and does not let this process in, or not as far as it needs to see; or TLS has failed. A
blocked host is another thing: its connections broke too often, which says nothing of what it shows."""
_MISSING: Final = frozenset({ER.BAD_DB_ERROR, ER.NO_SUCH_TABLE})
_DISK_FULL: Final = frozenset({ER.DISK_FULL, ER.ERROR_ON_WRITE, ER.RECORD_FILE_FULL})
_TOO_LARGE: Final = frozenset({ER.DATA_TOO_LONG, ER.NET_PACKET_TOO_LARGE})


class ConnectionLost(Unavailable):
    """The connection broke or could not be made. Outside of COMMIT nothing was written."""


class NotListening(ConnectionLost):
    """Nothing listens at the address: the server's machine answers, and its process does not run."""


class TablesMissing(OperatorError):
    """A shard's schema or one of its tables is missing: no migration has run, or the server is being seeded."""


def number_of(error: Exception) -> int:
    """Return the server's or driver's error number, or 0 when there is none."""
    first = error.args[0] if error.args else 0
    return first if isinstance(first, int) else 0


def translate(error: Exception, server: str, *, locking: bool) -> TaoError:
    """Translate a driver's error. ``locking``: the statement belongs to a write transaction, so a statement that ran
    out of time was waiting for a lock."""
    found = _translate(error, number_of(error), server, locking=locking)
    found.is_refusal = isinstance(error, pymysql.err.MySQLError) and number_of(error) in _LOGIN_REFUSED
    return found


def _translate(error: Exception, number: int, server: str, *, locking: bool) -> TaoError:
    if not isinstance(error, (pymysql.err.MySQLError, OSError)):
        return ConnectionLost(f"database server {server}: the connection failed in the driver: {error!r}")
    text = f"database server {server}: {error.args[-1] if error.args else error!r} (error {number})"
    if number in _BLOCKED or (locking and number in _STATEMENT_ENDED):
        return ShardBlocked(f"{text}; a lock was not acquired in time, nothing was written")
    if number in _STATEMENT_ENDED:
        return DeadlineExceeded(text)
    if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):  # of TCP, and of a socket's file
        return NotListening(text)
    if number in _LOST or not isinstance(error, pymysql.err.MySQLError):
        return ConnectionLost(text)
    if number in _NOT_MASTER:
        return MasterReadOnly(f"{text}; the server takes no writes now: another may be about to become master")
    if number in (ER.CON_COUNT_ERROR, ER.TOO_MANY_USER_CONNECTIONS):
        return Unavailable(f"{text}; raise its max_connections or make the pools smaller")
    if number in _DISK_FULL:
        return DatabaseFull(f"the disk of database server {server} is full, or fails: make room there ({text})")
    if number == ER.ACCESS_DENIED_ERROR:
        return OperatorError(
            f"{text}; check that the account exists there with the password that this process has, and that the "
            "process shows a certificate if the account demands one (`tao accounts`)"
        )
    if number in _REFUSED or number in _MISSING:
        kind = TablesMissing if number in _MISSING else OperatorError
        return kind(f"{text}; check that the shard's migrations have run and what the account may do")
    if number in _TOO_LARGE:
        return TooLarge(text)
    return InternalError(text)
