"""A database server whose disk fills up: writes fail with a type that names it. That they go on when there is room,
after the server's own retry of a minute, is shown on a cluster in `tests/e2e`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tao.devcluster.database import DatabaseInstance, InstanceSettings, default_cache_folder
from tao.devcluster.database_program import Durability, ServerOptions, find_server_binary
from tao.model.errors import DatabaseFull, OutcomeUnknown
from tao.model.queries import ObjectQuery
from tao.model.rows import ObjectRow, RowChanges, WriteKeys
from tao.replication.accounts import ServiceAccounts
from tao.storage.migrations import migrate
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tests.conformance.store.stores import CUSTOM_TABLE, SERVER, new_id, server_of, table_of, version
from tests.rigs.pacing import PATIENT_SECONDS
from tests.rigs.small_disk import SmallDisk, small_disk

pytestmark = [pytest.mark.database]

SHARD = 40_100


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


@pytest.fixture
async def database(disk: SmallDisk, database_accounts: ServiceAccounts) -> AsyncIterator[DatabaseInstance]:
    settings = InstanceSettings(
        folder=disk.folder / "db",
        accounts=database_accounts,
        cache_folder=default_cache_folder(os.environ),
        options=ServerOptions(durability=Durability.RELAXED),
        min_free_disk_mb=0,
    )
    instance = DatabaseInstance(find_server_binary(os.environ), settings)
    await instance.start()
    yield instance
    await instance.kill()


def account(database: DatabaseInstance, role: str) -> ServerAccount:
    login = getattr(database.accounts, role)
    return ServerAccount("127.0.0.1", database.port, login.user, login.password, socket="", tls=None)


async def test_a_full_disk_is_named_by_the_errors_of_writes_and_reads_go_on(
    disk: SmallDisk, database: DatabaseInstance
) -> None:
    await migrate(account(database, "administrator"), (SHARD,), {CUSTOM_TABLE: 65_536}, SERVER)
    pools = Pools(lambda _: account(database, "leader"), WRITE_SETUP)
    read_pools = Pools(lambda _: account(database, "reader"), READ_SETUP)
    store = MySqlWriteStore(server_of, pools, table_of)
    reads = MySqlReadStore(server_of, server_of, read_pools, table_of)

    async def write(key: int) -> None:
        async with store.transaction(SERVER, timeout_seconds=30) as transaction:
            await transaction.lock_and_read((SHARD,), WriteKeys())
            await transaction.apply(RowChanges(put_objects=[ObjectRow(key, 3, version(1), False, bytes(2_000))]))
            await transaction.commit()

    async def write_until_it_fails() -> None:
        async with asyncio.timeout(PATIENT_SECONDS):
            while True:
                await write(new_id(SHARD))

    first = new_id(SHARD)
    await write(first)
    assert pools.full() == {SERVER: ""}
    disk.fill()
    named = f"the disk of database server {SERVER} is full"
    with pytest.raises((OutcomeUnknown, DatabaseFull), match=named):
        await write_until_it_fails()
    assert named in pools.full()[SERVER]
    for attempt in (
        write(new_id(SHARD)),
        store.write_heartbeat(SHARD, "leader-1", 1, timeout_seconds=30),
        store.take_ownership([SHARD], "leader-1", timeout_seconds=30),
    ):
        with pytest.raises(DatabaseFull, match=named):
            await attempt
    await reads.read([ObjectQuery(first)], critical=True, timeout_seconds=30)

    disk.make_room()
    await pools.close()
    await read_pools.close()
