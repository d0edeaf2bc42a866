"""The database accounts of a server: each role gets the privileges it needs and no others.

Accounts belong to a server and not to the data. They are created outside the binlog, because a replica of two masters
stops at the second ``CREATE USER`` of the same name. Creating them again is harmless and sets the passwords anew.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

import pymysql.err
from pymysql.constants import ER

from tao.model.errors import OperatorError
from tao.model.topology import DatabaseServer
from tao.storage.dialect import Dialect, dialect_of
from tao.storage.failures import translate
from tao.storage.session import ServerAccount, connect
from tao.storage.tls import DatabaseTls

LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1")
"""The hosts that accounts may connect from on a machine whose database serves only local processes."""

SERVICES: Final = ("tao_leader", "tao_reader")
"""The accounts that serve requests. No request waits for replicas, tailers or administrators."""

_CONNECT_SECONDS: Final = 5  # the server is expected to be up
_NAME = re.compile(r"[A-Za-z0-9_]{1,32}\Z")

SHARD_SCHEMAS = "tao\\_%"
"""The schemas of the shards as a pattern for GRANT. An unescaped underscore would match any character."""

_READS_LEASE = ("SELECT", "tao.*")
"""Critical reads look at the lease of the master. Its table may not exist yet, and a schema need not exist to be named
here."""

_PRIVILEGES: Mapping[str, tuple[tuple[str, str], ...]] = {
    # Migrations create schemas and tables, and operators do what nobody foresaw.
    "administrator": (("ALL PRIVILEGES", "*.*"),),
    "leader": (("SELECT, INSERT, UPDATE, DELETE", f"`{SHARD_SCHEMAS}`.*"), _READS_LEASE),
    "reader": (("SELECT", f"`{SHARD_SCHEMAS}`.*"), _READS_LEASE),
    # MariaDB calls REPLICATION CLIENT "BINLOG MONITOR" since 10.5 and still accepts the old name.
    "replicator": (("REPLICATION SLAVE, REPLICATION CLIENT", "*.*"),),
}


_WATCHES_SHARDS = (
    # The schema `tao` has the lease, which a watcher makes and renews, and its event. A promotion raises the version
    # epochs in the schemas of the shards, and inserts the time up to which a lost master has reserved ids.
    ("SELECT, INSERT, UPDATE, CREATE, EVENT", "tao.*"),
    ("SELECT, INSERT, UPDATE", f"`{SHARD_SCHEMAS}`.*"),
)
_WATCHER_PRIVILEGES: Mapping[Dialect, tuple[tuple[str, str], ...]] = {
    # To attach, detach and position replicas, to open and close servers and to write to closed ones, to set
    # semi-synchronous replication, to keep a lease out of the binlog, and to end connections of a lost master. Without
    # RELOAD a replica cannot forget its master.
    Dialect.MARIADB: (
        ("REPLICATION SLAVE ADMIN, REPLICATION MASTER ADMIN, SLAVE MONITOR", "*.*"),
        ("READ_ONLY ADMIN, BINLOG ADMIN, CONNECTION ADMIN, PROCESS, RELOAD", "*.*"),
        *_WATCHES_SHARDS,
    ),
    Dialect.MYSQL: (
        ("REPLICATION CLIENT, PROCESS, RELOAD", "*.*"),
        ("REPLICATION_SLAVE_ADMIN, SYSTEM_VARIABLES_ADMIN, SESSION_VARIABLES_ADMIN, CONNECTION_ADMIN", "*.*"),
        *_WATCHES_SHARDS,
    ),
}

_FORMER_IN_TAO = (
    ("DELETE, DROP, ALTER, INDEX, REFERENCES, LOCK TABLES, CREATE TEMPORARY TABLES, TRIGGER, EXECUTE", "tao.*"),
    ("CREATE VIEW, SHOW VIEW, CREATE ROUTINE, ALTER ROUTINE", "tao.*"),
)
_FORMER_WATCHER_PRIVILEGES: Mapping[Dialect, tuple[tuple[str, str], ...]] = {
    # What earlier versions granted besides. An account that exists keeps what it has until that is revoked.
    Dialect.MARIADB: (("REPLICATION CLIENT", "*.*"), *_FORMER_IN_TAO),
    Dialect.MYSQL: _FORMER_IN_TAO,
}


@dataclass(frozen=True, slots=True)
class Account:
    """A user and password at a database server. The password is kept out of ``repr``, hence out of logs."""

    user: str
    password: str = field(repr=False)
    tls: DatabaseTls | None = field(default=None, compare=False)
    """How connections with this account are encrypted; None: they are plain. Replicas that connect with it use the
    files of their own servers."""

    def at(self, server: DatabaseServer) -> ServerAccount:
        """Return the account at a server, by the address that ``server`` has."""
        return ServerAccount(server.host, server.port, self.user, self.password, server.socket, self.tls)

    def __post_init__(self) -> None:
        if not _NAME.match(self.user):
            raise OperatorError(f"{self.user!r} is no account name: use 1 to 32 letters, digits and underscores")
        if not self.password:
            raise OperatorError(f"the account {self.user} has no password: give it one")


class TlsDemand(StrEnum):
    """What a server demands of the connections of an account: the words behind REQUIRE."""

    NONE = "none"
    TLS = "ssl"
    CERTIFICATE = "x509"
    """A certificate that the authorities of the server's ``ssl_ca`` have signed."""


@dataclass(frozen=True, slots=True)
class ServiceAccounts:
    """The accounts of one database server, by what they may do."""

    administrator: Account
    """May do everything: migrations, replication, promotion."""
    leader: Account
    """Reads and writes the shards' rows."""
    reader: Account
    """Reads the shards' rows, and the lease."""
    replicator: Account
    """Reads the binlog, for replicas and tailers."""
    watcher: Account | None = None
    """Renews leases and promotes, for watchers. It can also read, add and change the rows of shards, but neither delete
    them nor drop their tables. None: there is none, and watchers use the administrator's."""


class Connection(Protocol):
    """The part of an aiomysql connection that is used here."""

    def cursor(self) -> Any:
        """Return an async context manager that yields a cursor. `Any`, because aiomysql has no types."""


async def create_accounts(
    connection: Connection,
    accounts: ServiceAccounts,
    hosts: Sequence[str] = LOOPBACK_HOSTS,
    demand: TlsDemand | None = None,
) -> None:
    """Create the accounts through ``connection``, whose own account must be allowed to. Idempotent.

    ``hosts``: the hosts they may connect from, in the database's notation (``10.0.%``, or ``%`` for any host).
    ``demand``: what the server demands of their connections; None leaves that as it is, and a new account demands
    nothing. The binlog is off only for these statements of the session. Raises `pymysql.err.MySQLError`.
    """
    async with connection.cursor() as cursor:
        # Diagnostics are off as well: repeating this always reports that accounts exist, and MySQL warns about any
        # account of localhost on a server that resolves no names.
        await cursor.execute("SET SESSION sql_log_bin = 0, max_error_count = 0")
        try:
            await cursor.execute("SELECT VERSION()")
            ((version,),) = await cursor.fetchall()
            privileges_of = {**_PRIVILEGES, "watcher": _WATCHER_PRIVILEGES[dialect_of(version)]}
            former = _FORMER_WATCHER_PRIVILEGES[dialect_of(version)]
            for role, grants in privileges_of.items():
                account: Account | None = getattr(accounts, role)
                for host in hosts if account is not None else ():
                    assert account is not None
                    who = (account.user, host)
                    await cursor.execute("CREATE USER IF NOT EXISTS %s@%s IDENTIFIED BY %s", (*who, account.password))
                    await cursor.execute("ALTER USER %s@%s IDENTIFIED BY %s", (*who, account.password))
                    if demand is not None:
                        await cursor.execute(f"ALTER USER %s@%s REQUIRE {demand}", who)
                    for privileges, target in grants:
                        # Privileges and target come from the table above. The driver wants percent signs doubled.
                        await cursor.execute(f"GRANT {privileges} ON {target.replace('%', '%%')} TO %s@%s", who)
                    for privileges, target in former if role == "watcher" else ():
                        await _revoke(cursor, f"{privileges} ON {target}", who)
        finally:
            await cursor.execute("SET SESSION sql_log_bin = 1, max_error_count = DEFAULT")


async def _revoke(cursor: Any, privileges: str, who: tuple[str, str]) -> None:
    try:
        await cursor.execute(f"REVOKE {privileges} FROM %s@%s", who)
    except pymysql.err.OperationalError as error:
        # MySQL refuses to take what an account does not have; MariaDB takes what there is.
        if error.args[0] != ER.NONEXISTING_GRANT:
            raise


async def ensure_accounts(
    login: ServerAccount,
    server: str,
    accounts: ServiceAccounts,
    hosts: Sequence[str] = LOOPBACK_HOSTS,
    demand: TlsDemand | None = None,
) -> None:
    """Run `create_accounts` at a server that ``login`` may administer. ``server`` is its name for error messages.

    Raises `OperatorError` when the server refuses, `Unavailable` when it cannot be reached.
    """
    try:
        connection = await connect(login, connect_timeout=_CONNECT_SECONDS)
        try:
            await create_accounts(connection, accounts, hosts, demand)
        finally:
            connection.close()
    except (pymysql.err.MySQLError, OSError) as error:
        raise translate(error, f"{server} at {login.address}", locking=False) from error


async def confine_root(connection: Connection) -> None:
    """Remove root accounts for every host but ``localhost``, which is the Unix socket where names are not resolved.

    A fresh data directory may have root without a password at 127.0.0.1, ::1 and the host's name. Idempotent, and not
    written to the binlog. Raises `pymysql.err.MySQLError`.
    """
    async with connection.cursor() as cursor:
        await cursor.execute("SET SESSION sql_log_bin = 0")
        try:
            await cursor.execute("SELECT host FROM mysql.user WHERE user = 'root' AND host <> 'localhost'")
            for (host,) in await cursor.fetchall():
                await cursor.execute("DROP USER %s@%s", ("root", host))
        finally:
            await cursor.execute("SET SESSION sql_log_bin = 1")
