"""What a promotion writes into the rows of shards, also while they lack a table of the newest release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.replication.server_statements import LostIds, highest_epoch, raise_epoch, schemas_with_reserved_ids
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.session import DatabaseSession, ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP
from tests.conformance.store.stores import SERVER
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = pytest.mark.database

OLD, NEW = 40_100, 40_101
"""Shards without and with the table of reserved ids."""


def _deadline() -> float:
    return asyncio.get_running_loop().time() + PATIENT_SECONDS


@pytest.fixture
async def administrator(database_server: DatabaseInstance) -> AsyncIterator[DatabaseSession]:
    user = database_server.accounts.administrator
    account = ServerAccount("127.0.0.1", database_server.port, user.user, user.password, socket="", tls=None)
    await migrate(account, (OLD, NEW), {}, SERVER)
    session = await open_session(account, SERVER, WRITE_SETUP, deadline=_deadline())
    yield session
    for shard in (OLD, NEW):
        await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=_deadline())
    session.quit()


async def test_the_epoch_rises_where_a_shard_has_no_table_of_reserved_ids(administrator: DatabaseSession) -> None:
    await administrator.run(f"DROP TABLE {schema_name(OLD)}.reserved_ids", deadline=_deadline())
    reserving = await schemas_with_reserved_ids(administrator, deadline=_deadline())
    lost_ids = LostIds(5_000, reserving)
    await raise_epoch(administrator, (OLD, NEW), "two", 7, lost_ids=lost_ids, deadline=_deadline())
    for shard in (OLD, NEW):
        rows, _ = await administrator.run(
            f"SELECT master_server, version_epoch, generation FROM {schema_name(shard)}.shard; COMMIT",
            deadline=_deadline(),
        )
        assert rows == [(b"two", 7, 1)]
    reserved, _ = await administrator.run(
        f"SELECT reserved_unix_ms FROM {schema_name(NEW)}.reserved_ids; COMMIT", deadline=_deadline()
    )
    assert reserved == [(5_000,)]


async def test_a_row_says_whether_a_leader_has_taken_the_shard_since_its_epoch_was_raised(
    administrator: DatabaseSession,
) -> None:
    async def taken_under(master: str) -> int:
        return await highest_epoch(administrator, (OLD, NEW), master=master, taken=True, deadline=_deadline())

    for epoch, master in ((7, "two"), (8, "one")):
        await raise_epoch(administrator, (OLD, NEW), master, epoch, deadline=_deadline())
        assert await taken_under(master) == 0
        await administrator.run(f"UPDATE {schema_name(NEW)}.shard SET owner = 'leader'; COMMIT", deadline=_deadline())
        assert await taken_under(master) == epoch
        assert await taken_under("somebody else") == 0
