"""The database accounts of a server: each role gets what it needs and nothing else (DESIGN.md §3).

Accounts belong to a server and not to the data: they are made outside the binlog, because a replica of two masters
stops at the second ``CREATE USER`` of the same name. Making them again is harmless and sets the passwords anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import aiomysql
import pymysql.err

from tao.model.errors import OperatorError
from tao.storage.failures import translate
from tao.storage.session import ServerAccount

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1")
"""Whence the accounts may come in on a machine that keeps its database to itself."""

SERVICES: Final = ("tao_leader", "tao_reader")
"""The accounts that requests come in by: what replicas, tailers and administrators do, no request waits for."""

_CONNECT_SECONDS: Final = 5  # the server is expected to be up
_NAME = re.compile(r"[A-Za-z0-9_]{1,32}\Z")

SHARD_SCHEMAS = "tao\\_%"
"""The schemas of the shards, as GRANT writes a pattern: an unescaped underscore would match any character."""

_PRIVILEGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    # Migrations make schemas and tables, promotion changes replication: an operator's account, held by no server.
    "administrator": (("ALL PRIVILEGES", "*.*"),),
    "leader": (("SELECT, INSERT, UPDATE, DELETE", f"`{SHARD_SCHEMAS}`.*"),),
    "reader": (("SELECT", f"`{SHARD_SCHEMAS}`.*"),),
    # REPLICATION CLIENT is what MariaDB calls BINLOG MONITOR since 10.5, and accepts.
    "replicator": (("REPLICATION SLAVE, REPLICATION CLIENT", "*.*"),),
}


@dataclass(frozen=True, slots=True)
class Account:
    """A name and password at a database server; the password is kept out of ``repr``, hence out of logs."""

    user: str
    password: str = field(repr=False)

    def __post_init__(self) -> None:
        if not _NAME.match(self.user):
            raise OperatorError(f"{self.user!r} is no account name: use 1 to 32 letters, digits and underscores")
        if not self.password:
            raise OperatorError(f"the account {self.user} has no password: give it one")


@dataclass(frozen=True, slots=True)
class ServiceAccounts:
    """The accounts of one database server, by what they may do."""

    administrator: Account
    """Everything: migrations, replication, promotion."""
    leader: Account
    """Reads and writes the shards' rows."""
    reader: Account
    """Reads the shards' rows: followers whose leader is away."""
    replicator: Account
    """Reads the binlog: replicas and tailers."""


class Connection(Protocol):
    """What is used of an aiomysql connection."""

    def cursor(self) -> Any:
        """An async context manager that gives a cursor. `Any`: aiomysql has no types."""


async def create_accounts(
    connection: Connection, accounts: ServiceAccounts, hosts: Sequence[str] = LOOPBACK_HOSTS
) -> None:
    """Make the accounts on the server that ``connection`` (of an account that may) is open to. Idempotent.

    ``hosts``: whence they may come in, in the database's own notation (``10.0.%``, ``%`` for anywhere). The session's
    binlog stays off for these statements only. Raises `pymysql.err.MySQLError`.
    """
    async with connection.cursor() as cursor:
        # No diagnostics either: "it exists already" is what repeating this means, and MySQL warns about any account of
        # localhost on a server that resolves no names.
        await cursor.execute("SET SESSION sql_log_bin = 0, max_error_count = 0")
        try:
            for role, grants in _PRIVILEGES.items():
                account: Account = getattr(accounts, role)
                for host in hosts:
                    who = (account.user, host)
                    await cursor.execute("CREATE USER IF NOT EXISTS %s@%s IDENTIFIED BY %s", (*who, account.password))
                    await cursor.execute("ALTER USER %s@%s IDENTIFIED BY %s", (*who, account.password))
                    for privileges, target in grants:
                        # Both come from the table above; a percent sign is doubled for the driver.
                        await cursor.execute(f"GRANT {privileges} ON {target.replace('%', '%%')} TO %s@%s", who)
        finally:
            await cursor.execute("SET SESSION sql_log_bin = 1, max_error_count = DEFAULT")


async def ensure_accounts(
    login: ServerAccount, server: str, accounts: ServiceAccounts, hosts: Sequence[str] = LOOPBACK_HOSTS
) -> None:
    """`create_accounts` at a server that ``login`` may administer; ``server`` names it in errors.

    Raises `OperatorError` when it refuses, `Unavailable` when it cannot be reached.
    """
    try:
        connection = await aiomysql.connect(
            host=login.host,
            port=login.port,
            unix_socket=login.socket or None,
            user=login.user,
            password=login.password,
            connect_timeout=_CONNECT_SECONDS,
            charset="utf8mb4",
            program_name="tao",
        )
        try:
            await create_accounts(connection, accounts, hosts)
        finally:
            connection.close()
    except (pymysql.err.MySQLError, OSError) as error:
        raise translate(error, f"{server} at {login.address}", locking=False) from error


async def confine_root(connection: Connection) -> None:
    """Leave root only at ``localhost``, which on a server that resolves no names is the Unix socket.

    A fresh data directory may have root, without a password, at 127.0.0.1, ::1 and the host's name too. Idempotent; not
    in the binlog. Raises `pymysql.err.MySQLError`.
    """
    async with connection.cursor() as cursor:
        await cursor.execute("SET SESSION sql_log_bin = 0")
        try:
            await cursor.execute("SELECT host FROM mysql.user WHERE user = 'root' AND host <> 'localhost'")
            for (host,) in await cursor.fetchall():
                await cursor.execute("DROP USER %s@%s", ("root", host))
        finally:
            await cursor.execute("SET SESSION sql_log_bin = 1")
