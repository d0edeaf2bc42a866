"""A private database server with shards whose binlog the real reader reads, and accounts that write to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiomysql
import pymysql.err

from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.changes import Change, ListInvalidation, Message
from tao.model.errors import TaoError
from tao.model.rows import WriteKeys
from tao.model.writes import Write
from tao.observability.logs import logger
from tao.planning.coordination import PlannedWrite, keys_of, shards_of
from tao.planning.retention import oldest_wanted
from tao.planning.row_events import Translated, translate
from tao.planning.write_plan import draft_writes, plan_of
from tao.replication.accounts import ServiceAccounts
from tao.storage.migrations import migrate
from tao.storage.names import edge_tables_of
from tao.storage.pools import Pools
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tao.tailer.binlog import BinlogTransaction, UndecodedRows
from tao.tailer.reader import BinlogReader
from tao.tailer.settings import ReaderSettings
from tests.rigs.pacing import PATIENT_SECONDS
from tests.unit.planning.stored_rows import NOW, SCHEMA

SHARDS = (0, 1, 2)
SERVER = "db-test"


async def until(condition: Callable[[], bool], pause_seconds: float = 0.005) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENT_SECONDS):
        while not condition():  # noqa: ASYNC110 - another process or thread makes the condition true
            await asyncio.sleep(pause_seconds)


class Following:
    """A running reader, and what it has read."""

    def __init__(self, reader: BinlogReader, position: str) -> None:
        self.reader = reader
        self.transactions: list[BinlogTransaction] = []
        self.failure: TaoError | None = None
        self._stop = asyncio.Event()
        self._task = asyncio.create_task(self._follow(position))

    async def _follow(self, position: str) -> None:
        try:
            async with contextlib.aclosing(self.reader.batches(position)) as batches:
                async for batch in batches:
                    self.transactions.extend(batch)
        except TaoError as error:
            self.failure = error

    @property
    def translated(self) -> list[Translated]:
        return [translate(each.events, SCHEMA) for each in self.transactions]

    @property
    def messages(self) -> list[Message]:
        return [message for each in self.translated for of_shard in each.messages for message in of_shard.messages]

    @property
    def gtids(self) -> list[str]:
        return [each.gtid for each in self.transactions]

    @property
    def undecoded(self) -> list[UndecodedRows]:
        return [rows for each in self.transactions for rows in each.undecoded]

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))


class BinlogRig:
    """The server with its shards; `open_rig` makes it."""

    def __init__(self, instance: DatabaseInstance) -> None:
        self.instance = instance
        self._followings: list[Following] = []
        self.gtids: list[str] = []
        """What the server has called the transactions of `write`."""
        self._pools = Pools(lambda _: self.account("leader"), WRITE_SETUP)
        self._store = MySqlWriteStore(lambda _: SERVER, self._pools, edge_tables_of(lambda: SCHEMA))

    def account(self, role: str) -> ServerAccount:
        """Return the account to log in with, by what it may do."""
        account = getattr(self.instance.accounts, role)
        return ServerAccount(
            self.instance.host, self.instance.port, account.user, account.password, socket="", tls=None
        )

    async def migrate(self) -> None:
        await migrate(self.account("administrator"), SHARDS, SCHEMA.custom_tables(), SERVER)

    def reader(self, server_id: int = 4_000_000_001, **settings: float) -> BinlogReader:
        quick = {"heartbeat_seconds": 0.1, "backoff_max_seconds": 0.2} | settings
        return BinlogReader(self.account("replicator"), server_id, ReaderSettings(**quick), logger("test"))  # type: ignore[arg-type]

    async def follow(self, position: str | None = None, reader: BinlogReader | None = None) -> Following:
        reader = reader or self.reader()
        now = await reader.current_position()
        following = Following(reader, now if position is None else position)
        self._followings.append(following)
        await until(lambda: following.reader.connected or following.failure is not None)
        return following

    async def write(self, *writes: Write) -> Sequence[Change | ListInvalidation]:
        """Commit one transaction as a leader does, and return its changeset."""
        planned = [PlannedWrite(write, True) for write in writes]
        shards = sorted({shard for write in writes for shard in shards_of(write, SCHEMA)})
        async with self._store.transaction(SERVER, timeout_seconds=PATIENT_SECONDS) as transaction:
            keys: WriteKeys = keys_of(planned, SCHEMA)
            rows, existing = await transaction.lock_and_read(shards, keys)
            if wanted := oldest_wanted(existing, planned, SCHEMA):
                existing.oldest = await transaction.lock_oldest(wanted)
            drafted = draft_writes(existing, planned, SCHEMA, NOW)
            if unread := drafted.unread_lists(keys):
                existing.lists.update(await transaction.lock_lists(unread))
            made = plan_of(drafted, rows)
            assert [outcome.error for outcome in made.outcomes] == [None] * len(writes)
            await transaction.apply(made.rows)
            self.gtids.append(await transaction.commit())
        return made.changes

    async def sql(self, *statements: str) -> None:
        """Run statements by hand: on one connection, each committed by itself unless a transaction is begun."""
        async with self._as_root() as cursor:
            for statement in statements:
                await cursor.execute(statement)

    async def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        async with self._as_root() as cursor:
            await cursor.execute(query)
            return list(await cursor.fetchall())

    @contextlib.asynccontextmanager
    async def _as_root(self) -> AsyncIterator[Any]:
        connection = await aiomysql.connect(unix_socket=str(self.instance.socket_path), user="root", autocommit=True)
        try:
            with warnings.catch_warnings():
                # Ignore the server's advice on passwords in statements and on deprecated statements.
                warnings.simplefilter("ignore", pymysql.err.Warning)
                async with connection.cursor() as cursor:
                    yield cursor
        finally:
            await connection.ensure_closed()

    async def close(self) -> None:
        for following in self._followings:
            await following.close()
        await self._pools.close()
        await self.instance.stop()


@contextlib.asynccontextmanager
async def open_rig(folder: Path, accounts: ServiceAccounts, server_id: int = 7) -> AsyncIterator[BinlogRig]:
    """Start a fresh server with migrated shards, and stop it at the end."""
    settings = InstanceSettings(
        folder=folder,
        accounts=accounts,
        cache_folder=default_cache_folder(os.environ),
        options=ServerOptions(server_id=server_id, durability=Durability.RELAXED),
    )
    rig = BinlogRig(DatabaseInstance(find_server_binary(os.environ), settings))
    await rig.instance.start()
    try:
        await rig.migrate()
        yield rig
    finally:
        await rig.close()
