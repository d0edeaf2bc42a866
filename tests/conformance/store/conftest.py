"""The stores that the conformance suites run over: each as a pair of ports over shards of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Final

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.storage.dialect import SessionSetup
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.pools import Pools, PoolSettings
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.session import ServerAccount
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tests.conformance.store.stores import CUSTOM_TABLE, SERVER, SHARDS, MakePools, Stores, server_of, table_of

_PATIENT: Final = replace(WRITE_SETUP, idle_transaction_seconds=60)
"""A test on a busy machine may need seconds between two statements. Those of leaders that hang have their own pools."""


def _account(server: DatabaseInstance, role: str) -> ServerAccount:
    account = getattr(server.accounts, role)
    return ServerAccount("127.0.0.1", server.port, account.user, account.password, socket="", tls=None)


@pytest.fixture(scope="session")
def migrated(database_server: DatabaseInstance) -> Iterator[DatabaseInstance]:
    administrator = _account(database_server, "administrator")
    asyncio.run(migrate(administrator, SHARDS, {CUSTOM_TABLE: 65_536}, SERVER))
    yield database_server
    asyncio.run(_drop(administrator))


async def _drop(administrator: ServerAccount) -> None:
    pools = Pools(lambda _: administrator, WRITE_SETUP)
    deadline = asyncio.get_running_loop().time() + 10
    async with pools.of(SERVER).session(deadline=deadline) as session:
        for shard in SHARDS:
            await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=deadline)
    await pools.close()


@pytest.fixture
async def make_pools(migrated: DatabaseInstance) -> AsyncIterator[MakePools]:
    """Return pools of the leader's account (``writes=True``) or the reader's. ``port``: another way to the server."""
    made: list[Pools] = []

    def make(
        *,
        writes: bool,
        port: int | None = None,
        settings: PoolSettings | None = None,
        setup: SessionSetup | None = None,
    ) -> Pools:
        account = _account(migrated, "leader" if writes else "reader")
        if port is not None:
            account = ServerAccount("127.0.0.1", port, account.user, account.password, socket="", tls=None)
        made.append(Pools(lambda _: account, setup or (WRITE_SETUP if writes else READ_SETUP), settings))
        return made[-1]

    yield make
    for pools in made:
        await pools.close()


@pytest.fixture
async def stores(make_pools: MakePools) -> Stores:
    return Stores(
        MySqlReadStore(server_of, server_of, make_pools(writes=False), table_of),
        MySqlWriteStore(server_of, make_pools(writes=True, setup=_PATIENT), table_of),
    )
