"""What a tailer asks of its database server before it reads the binlog, and what the server's refusals mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pymysql
import pymysql.err

from tao.model.errors import OperatorError, TaoError, Unavailable
from tao.storage.dialect import Dialect
from tao.storage.failures import number_of, translate
from tao.storage.session import ServerAccount
from tao.tailer.binlog import BinlogLost, BinlogUnusable, ServerIdTaken
from tao.tailer.settings import ReaderSettings

_CANNOT_READ: Final = 1236
"""ER_MASTER_FATAL_ERROR_READING_BINLOG: of many causes, told apart by their text."""
_KILLED_BY_NAMESAKE: Final = 4052
"""MariaDB, to the older of two readers under one server_id. (MySQL says it under 1236.)"""
_NO_PRIVILEGE: Final = frozenset({1045, 1227})

_NEEDED: Final[Mapping[str, str]] = {
    "log_bin": "ON",
    "binlog_format": "ROW",
    "binlog_row_image": "FULL",
    "binlog_row_metadata": "FULL",
    # Where the server has these:
    "gtid_mode": "ON",
    "log_slave_updates": "ON",
    "log_replica_updates": "ON",
    "binlog_transaction_compression": "OFF",
    "log_bin_compress": "OFF",
}
"""What the binlog must be like: whole rows with their columns' names, of replicated transactions, too."""


def connection_settings(account: ServerAccount, settings: ReaderSettings) -> dict[str, Any]:
    """For pymysql. Reading blocks no longer than the silence that is borne."""
    return {
        "host": account.host,
        "port": account.port,
        "unix_socket": account.socket or None,
        "user": account.user,
        "password": account.password,
        "charset": "utf8mb4",
        "connect_timeout": settings.connect_seconds,
        "read_timeout": settings.silence_seconds,
        "write_timeout": settings.silence_seconds,
        "program_name": "tao tailer",
    }


def connect(account: ServerAccount, settings: ReaderSettings) -> Any:
    """A connection for questions. Raises `pymysql.err.MySQLError`."""
    return pymysql.connect(autocommit=True, **connection_settings(account, settings))


def current_gtids(connection: Any, dialect: Dialect) -> str:
    """Every transaction in the server's binlog, as the server writes positions. Raises `BinlogUnusable` when the
    binlog is not what a tailer can read."""
    with connection.cursor() as cursor:
        names = ", ".join(["%s"] * len(_NEEDED))
        cursor.execute(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})", tuple(_NEEDED))
        wrong = [
            f"{name} = {value} (needed: {_NEEDED[name.lower()]})"
            for name, value in cursor.fetchall()
            if value.upper() != _NEEDED[name.lower()]
        ]
        if wrong:
            raise BinlogUnusable(f"the binlog cannot be followed with {', '.join(sorted(wrong))}; change the server")
        # MariaDB: of this server's own binlog, which on a replica is what it has applied, not what it has received.
        cursor.execute(
            "SELECT @@global.gtid_binlog_pos" if dialect is Dialect.MARIADB else "SELECT @@global.gtid_executed"
        )
        return str(cursor.fetchone()[0])


def reading_error(error: Exception, server: str, server_id: int) -> TaoError:
    """Our error for the driver's: `BinlogLost`, an `OperatorError`, or one that trying again may mend."""
    number = number_of(error)
    text = str(error.args[-1]) if error.args else repr(error)
    if number == _KILLED_BY_NAMESAKE or (number == _CANNOT_READ and _speaks_of_namesake(text)):
        return ServerIdTaken(
            f"{server}: another replica or tailer has connected with server_id {server_id}, and the server keeps only "
            f"one; give each its own (server_id in the tailer's settings). The server says: {text}"
        )
    if number == _CANNOT_READ:
        return BinlogLost(f"{server}: the binlog cannot be continued from where this tailer is: {text}")
    if number in _NO_PRIVILEGE:
        return BinlogUnusable(
            f"{server}: the tailer's account needs REPLICATION SLAVE and REPLICATION CLIENT on *.*: {text}"
        )
    found = translate(error, server, locking=False)
    # A statement's own faults do not occur here: what is unknown is taken for a server in trouble.
    return found if found.retryable or isinstance(found, OperatorError) else Unavailable(found.message)


def _speaks_of_namesake(text: str) -> bool:
    lower = text.lower()
    return "same server_uuid/server_id" in lower or "same server_id" in lower or "same server-id" in lower
