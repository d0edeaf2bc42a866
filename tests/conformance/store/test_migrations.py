"""The initial contents of a shard's tables."""

from __future__ import annotations

import asyncio

from tao.devcluster.database import DatabaseInstance
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.session import ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP
from tests.conformance.store.stores import SERVER, SHARDS


async def test_a_shard_that_comes_after_promotions_begins_at_the_epoch_they_have_reached(
    migrated: DatabaseInstance,
) -> None:
    administrator = migrated.accounts.administrator
    account = ServerAccount("127.0.0.1", migrated.port, administrator.user, administrator.password, socket="", tls=None)
    new = max(SHARDS) + 1
    await migrate(account, [*SHARDS, new], {}, SERVER, version_epoch=4)
    deadline = asyncio.get_running_loop().time() + 10
    session = await open_session(account, SERVER, WRITE_SETUP, deadline=deadline)
    try:
        for shard, epoch in ((new, 4), (SHARDS[0], 1)):
            found = await session.run(f"SELECT version_epoch FROM {schema_name(shard)}.shard", deadline=deadline)
            assert found[0] == [(epoch,)]
        await session.run(f"DROP DATABASE {schema_name(new)}", deadline=deadline)
    finally:
        session.quit()
