"""The initial contents of a shard's tables, and shards that earlier versions have migrated."""

from __future__ import annotations

import asyncio

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.storage import migrations
from tao.storage.migrations import load_migrations, migrate
from tao.storage.names import schema_name
from tao.storage.session import ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP
from tests.conformance.store.stores import SERVER, SHARDS

_STATES = ("id1", "atype", "id2", "time", "version", "data", "own_state", "state_us", "payload_us", "changed_unix_s")
_COLUMNS = (
    "SELECT column_name FROM information_schema.columns WHERE table_schema = '{}' AND table_name = '{}' "
    "ORDER BY ordinal_position"
)


async def test_a_shard_that_comes_after_promotions_begins_at_the_epoch_they_have_reached(
    migrated: DatabaseInstance,
) -> None:
    account = _administrator(migrated)
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


async def test_a_shard_that_was_migrated_before_nodes_had_states_keeps_its_edges_and_gets_their_columns(
    migrated: DatabaseInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    account, shard = _administrator(migrated), max(SHARDS) + 2
    schema = schema_name(shard)
    deadline = asyncio.get_running_loop().time() + 60
    session = await open_session(account, SERVER, WRITE_SETUP, deadline=deadline)

    async def columns(table: str) -> tuple[str, ...]:
        (rows,) = await session.run(_COLUMNS.format(schema, table), deadline=deadline)
        return tuple(name for (name,) in rows)

    every = load_migrations()
    try:
        monkeypatch.setattr(migrations, "load_migrations", lambda: every[:3])
        assert await migrate(account, [shard], {}, SERVER) == 1
        assert await columns("assocs_states") == _STATES
        await session.run(
            f"INSERT INTO {schema}.assocs_states VALUES (1, 152, 2, 3, 4, 'x', 2, 5, 6, 7); COMMIT", deadline=deadline
        )
        monkeypatch.undo()
        assert await migrate(account, [shard], {}, SERVER) == 1
        # It may have been cut off before it was recorded.
        await session.run(f"DELETE FROM {schema}.schema_migrations WHERE number = 5; COMMIT", deadline=deadline)
        assert await migrate(account, [shard], {}, SERVER) == 1
        assert await migrate(account, [shard], {}, SERVER) == 0
        assert await columns("assocs_states") == (*_STATES, "id2_state", "id2_state_us")
        assert await columns("node_states") == ("id", "atype", "state", "state_us")
        (rows,) = await session.run(f"SELECT * FROM {schema}.assocs_states", deadline=deadline)
        assert rows == [(1, 152, 2, 3, 4, b"x", 2, 5, 6, 7, 0, 0)]
    finally:
        await session.run(f"DROP DATABASE {schema}", deadline=deadline)
        session.quit()


def _administrator(server: DatabaseInstance) -> ServerAccount:
    account = server.accounts.administrator
    return ServerAccount("127.0.0.1", server.port, account.user, account.password, socket="", tls=None)
