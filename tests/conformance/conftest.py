"""The stores that the conformance suites run over: each as a pair of ports over shards of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.graph import Edge, EdgeKey, ListKey
from tao.model.ids import make_id
from tao.model.ports import ReadStore, WriteStore
from tao.model.rows import ListRow, RowChanges, ShardRow, WriteKeys
from tao.model.versions import make_version
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.pools import Pools, PoolSettings, ServerAccount
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore

SERVER = "one"
SHARDS = (40_000, 40_001, 40_002)
CUSTOM_TABLE = "assocs_long"
LIKES, LONG = 5, 9  # association types; edges of the latter lie in the custom table

_sequence = itertools.count(1)


@dataclass(frozen=True)
class Stores:
    """What a suite is given: both ports, over `SHARDS` of the server `SERVER`."""

    read: ReadStore
    write: WriteStore


def new_id(shard: int = SHARDS[0]) -> int:
    """An id that no other test uses."""
    return make_id(shard, 1_700_000_000_000 + next(_sequence), 0)


def table_of(atype: int) -> str:
    return CUSTOM_TABLE if atype == LONG else "assocs"


def version(counter: int) -> int:
    return make_version(1, counter)


async def write(stores: Stores, changes: RowChanges, keys: WriteKeys | None = None) -> dict[int, ShardRow]:
    """Commit ``changes`` in one transaction."""
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
        shards, _ = await transaction.lock_and_read(SHARDS, keys or WriteKeys())
        await transaction.apply(changes)
        await transaction.commit()
    return shards


def list_of(id1: int, atype: int, edges: list[Edge], counter: int = 1) -> RowChanges:
    """Changes that make these edges, with their list."""
    return RowChanges(
        put_lists={ListKey(id1, atype): ListRow(len(edges), version(counter))},
        put_edges={EdgeKey(id1, atype, edge.id2): edge for edge in edges},
    )


def _account(server: DatabaseInstance, role: str) -> ServerAccount:
    account = getattr(server.accounts, role)
    return ServerAccount("127.0.0.1", server.port, account.user, account.password)


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


MakePools = Callable[..., Pools]


@pytest.fixture
async def make_pools(migrated: DatabaseInstance) -> AsyncIterator[MakePools]:
    """Pools of the leader's account (``writes=True``) or the reader's; ``port``: another way to the server."""
    made: list[Pools] = []

    def make(*, writes: bool, port: int | None = None, settings: PoolSettings | None = None) -> Pools:
        account = _account(migrated, "leader" if writes else "reader")
        if port is not None:
            account = ServerAccount("127.0.0.1", port, account.user, account.password)
        made.append(Pools(lambda _: account, WRITE_SETUP if writes else READ_SETUP, settings))
        return made[-1]

    yield make
    for pools in made:
        await pools.close()


@pytest.fixture
async def stores(make_pools: MakePools) -> Stores:
    def server_of(shard: int) -> str:
        return SERVER

    return Stores(
        MySqlReadStore(server_of, server_of, make_pools(writes=False), table_of),
        MySqlWriteStore(server_of, make_pools(writes=True), table_of),
    )
