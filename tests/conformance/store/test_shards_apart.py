"""What one shard's trouble costs the others of a batch: a shard that is asked too much, locked, slow or refused waits,
fails or is asked by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiomysql
import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.errors import (
    DeadlineExceeded,
    OperatorError,
    Overloaded,
    TaoError,
    Unavailable,
)
from tao.model.ports import ReadStore
from tao.model.queries import CountQuery, FillRead
from tao.storage.names import schema_name
from tao.storage.reads import MySqlReadStore, ReadSettings
from tests.conformance.store.stores import (
    LIKES,
    SERVER,
    SHARDS,
    MakePools,
    Stores,
    new_id,
    server_of,
    table_of,
)

pytestmark = pytest.mark.database


async def test_a_shard_asked_too_much_waits_by_itself_and_the_others_are_answered(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    settings = ReadSettings(max_pending_per_shard=1, max_waiting_per_shard=1)
    store = MySqlReadStore(server_of, server_of, make_pools(writes=False), table_of, settings)
    async with locked_table(migrated, SHARDS[0]):
        stuck = asyncio.create_task(store.read([CountQuery(new_id(), LIKES)], critical=False, timeout_seconds=0.9))
        await asyncio.sleep(0)
        waiting = asyncio.create_task(
            store.read([CountQuery(new_id(s), LIKES) for s in SHARDS], critical=False, timeout_seconds=0.2)
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await store.read([CountQuery(new_id(), LIKES)], critical=False, timeout_seconds=0.2)
        others = await store.read([CountQuery(new_id(SHARDS[1]), LIKES)], critical=False, timeout_seconds=5)
        assert others.version_epochs == {SHARDS[1]: 1}
        with pytest.raises(Overloaded):
            await waiting
        with pytest.raises(DeadlineExceeded):
            await stuck
    assert (await store.read([CountQuery(new_id(), LIKES)], critical=False, timeout_seconds=5)).version_epochs


async def read_each(store: ReadStore, shards: Sequence[int], timeout_seconds: float) -> dict[int, str]:
    """One query for each shard: what became of it, in the order of the answers."""
    told: dict[int, str] = {}

    def take(places: Sequence[int], read: FillRead | TaoError) -> None:
        for place in places:
            assert shards[place] not in told
            told[shards[place]] = read.reason if isinstance(read, TaoError) else "answered"

    queries = [CountQuery(new_id(shard), LIKES) for shard in shards]
    await store.read_each(queries, critical=False, timeout_seconds=timeout_seconds, on_read=take)
    return told


async def test_a_shard_asked_too_much_holds_up_no_other_of_its_batch(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    settings = ReadSettings(max_pending_per_shard=1)
    store = MySqlReadStore(server_of, server_of, make_pools(writes=False), table_of, settings)
    async with locked_table(migrated, SHARDS[0]):
        stuck = asyncio.create_task(read_each(store, SHARDS[:1], 0.9))
        await asyncio.sleep(0)
        told = await read_each(store, SHARDS, 0.3)
        assert list(told.items()) == [(SHARDS[1], "answered"), (SHARDS[2], "answered"), (SHARDS[0], Overloaded.reason)]
        assert await stuck == {SHARDS[0]: DeadlineExceeded.reason}


async def test_a_shard_that_has_been_slow_is_asked_by_itself(migrated: DatabaseInstance, make_pools: MakePools) -> None:
    store = MySqlReadStore(server_of, server_of, make_pools(writes=False), table_of, ReadSettings(slow_seconds=0.0))
    async with locked_table(migrated, SHARDS[0]):
        stuck = asyncio.create_task(read_each(store, SHARDS[:1], 0.9))
        await asyncio.sleep(0)
        told = await read_each(store, SHARDS, 0.3)
        assert told == {SHARDS[0]: DeadlineExceeded.reason, SHARDS[1]: "answered", SHARDS[2]: "answered"}
        await stuck


async def test_a_shard_that_is_refused_fails_alone(stores: Stores, make_pools: MakePools) -> None:
    def nowhere(shard: int) -> str:
        if shard == SHARDS[1]:
            raise Unavailable("no server has it")
        return SERVER

    told = await read_each(stores.read, (*SHARDS, 65_535), 5)
    assert told == dict.fromkeys(SHARDS, "answered") | {65_535: OperatorError.reason}
    store = MySqlReadStore(nowhere, nowhere, make_pools(writes=False), table_of)
    told = await read_each(store, SHARDS, 5)
    assert told == dict.fromkeys(SHARDS, "answered") | {SHARDS[1]: Unavailable.reason}


@asynccontextmanager
async def locked_table(server: DatabaseInstance, shard: int) -> AsyncIterator[None]:
    """A table that no read gets at, as while an ALTER TABLE swaps it."""
    account = server.accounts.administrator
    connection = await aiomysql.connect(
        host="127.0.0.1", port=server.port, user=account.user, password=account.password
    )
    async with connection.cursor() as cursor:
        await cursor.execute(f"LOCK TABLES {schema_name(shard)}.assoc_lists WRITE")
    yield
    await connection.ensure_closed()
