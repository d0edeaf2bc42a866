"""The databases of `peers`: tao's own, one MySQL or MariaDB for the peers, and PostgreSQL, each a server of its own.

A server of its own, because the tailer of tao reads the whole binlog of its database, and because a buffer pool that
several contestants fill is nobody's. All sync every commit, keep a log for replicas, and have the same bounds on buffer
pool and redo log.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiomysql

from loadtest.conditions import within
from loadtest.peers.graph_store import SqlAddress
from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Flavour, ServerOptions, find_server_binary
from tao.devcluster.processes import to_the_end
from tao.devcluster.state_folder import service_accounts

REDO_MB: Final = 512
"""The redo log of every database: it holds the writes of a run, so that none is held up by a full log."""
_RESIZE_SECONDS: Final = 120.0
_PAUSE_SECONDS: Final = 0.1
_ROLES: Final = ("administrator", "leader", "reader", "replicator")


def address_of(database: DatabaseInstance) -> SqlAddress:
    """Return a database's address with its administrator's account."""
    account = database.accounts.administrator
    return SqlAddress(host=database.host, port=database.port, user=account.user, password=account.password)


@asynccontextmanager
async def private_mysql(folder: Path, buffer_pool_mb: int) -> AsyncIterator[DatabaseInstance]:
    """Run a MySQL or MariaDB server for the peers until the end of this context. Raises `OperatorError`."""
    database = DatabaseInstance(
        find_server_binary(os.environ),
        InstanceSettings(
            folder=folder,
            accounts=service_accounts({role: secrets.token_hex(16) for role in _ROLES}),
            cache_folder=default_cache_folder(os.environ),
            options=ServerOptions(buffer_pool_mb=buffer_pool_mb),
        ),
    )
    await database.start()
    try:
        await enlarge_redo(database)
        yield database
    finally:
        await to_the_end(database.stop())


async def enlarge_redo(database: DatabaseInstance) -> None:
    """Give a running database a redo log of `REDO_MB`. Raises `pymysql.err.MySQLError`."""
    name = "innodb_log_file_size" if database.binary.flavour is Flavour.MARIADB else "innodb_redo_log_capacity"
    await _ask(database, f"SET GLOBAL {name} = {REDO_MB << 20}")


async def keep_binlog_open(database: DatabaseInstance) -> None:
    """Have a running database write one binlog file of up to 1 GiB, the most that it takes.

    Where commits are not synced, closing a file syncs all of it, and commits wait for that. A server that syncs each
    commit has nothing left to sync then. Raises `pymysql.err.MySQLError`."""
    await _ask(database, "SET GLOBAL max_binlog_size = 1073741824")


async def resize_pool(database: DatabaseInstance, buffer_pool_mb: int) -> None:
    """Change the buffer pool of a running database, and wait until that is done.

    Raises `pymysql.err.MySQLError`, and `OperatorError` when it takes too long."""
    await _ask(database, f"SET GLOBAL innodb_buffer_pool_size = {buffer_pool_mb << 20}")

    async def done() -> bool:
        ((_, status),) = await _ask(database, "SHOW GLOBAL STATUS LIKE 'Innodb_buffer_pool_resize_status'")
        return not status or status.startswith("Completed")

    await within(_RESIZE_SECONDS, done, _PAUSE_SECONDS, "the buffer pool was not resized")


async def io_method(database: DatabaseInstance) -> str:
    """Return how a database reads and writes its data files: ``O_DIRECT`` past the kernel's cache."""
    ((_, method),) = await _ask(database, "SHOW GLOBAL VARIABLES LIKE 'innodb_flush_method'")
    return str(method)


async def _ask(database: DatabaseInstance, statement: str) -> Any:
    # Any: rows of whatever the statement returns.
    connection = await aiomysql.connect(unix_socket=str(database.socket_path), user="root")
    try:
        async with connection.cursor() as cursor:
            await cursor.execute(statement)
            return await cursor.fetchall()
    finally:
        await connection.ensure_closed()


async def disk_bytes(folder: Path, pattern: str) -> int:
    """Return the bytes on disk of the files of this pattern in a folder and those below."""
    return await asyncio.to_thread(lambda: sum(each.stat().st_blocks * 512 for each in folder.rglob(pattern)))
