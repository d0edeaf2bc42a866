"""A database server that was the master until a test replaces it, with a reader and a leader that still ask it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from tao.devcluster.database import DatabaseInstance
from tao.model.errors import TaoError
from tao.model.graph import decode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.queries import FillRead, ObjectQuery
from tao.model.rows import IntentRow
from tao.replication.lease import LeaseTerms, install_lease, remove_lease
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.session import DatabaseSession, ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tests.rigs.leader_rig import USER, make_id

SERVER: Final = "one"
SHARDS: Final = (41_010, 41_011)
A, B = make_id(64, SHARDS[0]), make_id(64, SHARDS[1])
LEASE_SECONDS: Final = 60.0


def _account(server: DatabaseInstance, role: str) -> ServerAccount:
    found = getattr(server.accounts, role)
    return ServerAccount("127.0.0.1", server.port, found.user, found.password, socket="", tls=None)


@dataclass
class FormerMaster:
    """A database server with a lease, an administrator's sessions there, and the stores of those who ask it."""

    reads: MySqlReadStore
    writes: MySqlWriteStore
    administrator: DatabaseSession
    locker: DatabaseSession
    master: str = SERVER
    """The master that the topology of the stores names."""

    async def run(self, *statements: str, session: DatabaseSession | None = None) -> list[list[tuple[object, ...]]]:
        deadline = asyncio.get_running_loop().time() + 10
        return await (session or self.administrator).run("; ".join(statements), deadline=deadline)

    async def write(self, object_id: int, version: int) -> None:
        schema = schema_name(object_id >> SHARD_SHIFT)
        await self.run(
            f"REPLACE INTO {schema}.objects (id, otype, version, deleted, data) "
            f"VALUES ({object_id}, {USER}, {version}, 0, '')",
            "COMMIT",
        )

    async def read(self, *ids: int, critical: bool = True) -> list[int | TaoError]:
        """Return the versions of objects, or the errors."""
        found: list[int | TaoError] = [0] * len(ids)

        def take(places: Sequence[int], read: FillRead | TaoError) -> None:
            for at, place in enumerate(places):
                found[place] = read if isinstance(read, TaoError) else decode_object(read.values[at])[0]

        await self.reads.read_each(
            [ObjectQuery(each) for each in ids], critical=critical, timeout_seconds=5, on_read=take
        )
        return found

    async def write_intent(self, intent: IntentRow) -> None:
        schema = schema_name(intent.low_id >> SHARD_SHIFT)
        atypes = ",".join(map(str, intent.atypes))
        await self.run(
            f"INSERT INTO {schema}.inverse_intents (low_id, high_id, atypes, token, created_unix_ms) "
            f"VALUES ({intent.low_id}, {intent.high_id}, '{atypes}', {intent.token}, {intent.created_unix_ms})",
            "COMMIT",
        )

    async def renew_lease(self) -> None:
        await self.run(f"UPDATE tao.lease SET ends_unix_ms = (UNIX_TIMESTAMP() + {LEASE_SECONDS}) * 1000", "COMMIT")

    async def end_lease(self, session: DatabaseSession | None = None) -> None:
        """Let the lease be over, as time does. A session that has the lease locked frees it."""
        await self.run("UPDATE tao.lease SET ends_unix_ms = 1", "COMMIT", "UNLOCK TABLES", session=session)

    async def name_master(self, server: str, version_epoch: int) -> None:
        """Let the shards' rows name a master, as a promotion does."""
        for shard in SHARDS:
            await self.run(
                f"UPDATE {schema_name(shard)}.shard SET master_server = '{server}', version_epoch = {version_epoch}",
                "COMMIT",
            )

    async def is_waiting_for_lease(self) -> bool:
        threads = await self.administrator.named("SHOW PROCESSLIST", deadline=asyncio.get_running_loop().time() + 10)
        return any("metadata lock" in str(thread["State"]) for thread in threads)

    async def hold_check(self, reading: asyncio.Future[Any]) -> None:
        """Wait until the lock on the lease, which ``locker`` has, holds the check of a read up."""
        while not await self.is_waiting_for_lease():
            assert not reading.done(), "nothing is asked behind the rows"
            await asyncio.sleep(0)


@contextmanager
def migrated_shards(server: DatabaseInstance) -> Iterator[DatabaseInstance]:
    """Make the shards on a server, and drop them at the end."""
    administrator = _account(server, "administrator")
    asyncio.run(migrate(administrator, SHARDS, {}, SERVER))
    yield server

    async def drop() -> None:
        pools = Pools(lambda _: administrator, WRITE_SETUP)
        deadline = asyncio.get_running_loop().time() + 10
        async with pools.of(SERVER).session(deadline=deadline) as session:
            for shard in SHARDS:
                await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=deadline)
        await pools.close()

    asyncio.run(drop())


@asynccontextmanager
async def former_master(migrated: DatabaseInstance) -> AsyncIterator[FormerMaster]:
    """Give the server a lease that counts, and both objects version 1; undo what a test has done to it at the end."""
    administration = Pools(lambda _: _account(migrated, "administrator"), WRITE_SETUP)
    read_pools = Pools(lambda _: _account(migrated, "reader"), READ_SETUP)
    write_pools = Pools(lambda _: _account(migrated, "leader"), WRITE_SETUP)
    reads = MySqlReadStore(lambda _: SERVER, lambda _: found.master, read_pools, lambda _: "assocs")
    writes = MySqlWriteStore(lambda _: found.master, write_pools, lambda _: "assocs")
    deadline = asyncio.get_running_loop().time() + 60
    pool = administration.of(SERVER)
    async with pool.session(deadline=deadline) as session, pool.session(deadline=deadline) as locker:
        await install_lease(session, LeaseTerms(LEASE_SECONDS), deadline=deadline)
        found = FormerMaster(reads, writes, session, locker)
        await found.run("DROP EVENT tao.close_without_lease")  # the tests close the server when they want to
        await found.renew_lease()
        for each in (A, B):
            await found.write(each, 1)
        yield found
        await found.run("UNLOCK TABLES", session=locker)
        await remove_lease(session, deadline=deadline)
        await found.run("SET GLOBAL read_only = 0", "DROP DATABASE tao")
        await found.name_master(SERVER, 1)
        for shard in SHARDS:
            await found.run(f"DELETE FROM {schema_name(shard)}.inverse_intents", "COMMIT")
    for pools in (administration, read_pools, write_pools):
        await pools.close()
