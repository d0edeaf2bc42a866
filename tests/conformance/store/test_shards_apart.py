"""The trouble of one shard in a batch: an overloaded, locked, slow or rejected shard waits, fails or is queried by
itself."""

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
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = pytest.mark.database

"""Deadline in seconds for answers that come at once, on a machine that may be slow."""


async def test_an_overloaded_shard_waits_by_itself_and_the_others_are_answered(
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
        others = await store.read(
            [CountQuery(new_id(SHARDS[1]), LIKES)], critical=False, timeout_seconds=PATIENT_SECONDS
        )
        assert others.version_epochs == {SHARDS[1]: 1}
        with pytest.raises(Overloaded):
            await waiting
        with pytest.raises(DeadlineExceeded):
            await stuck
    assert (
        await store.read([CountQuery(new_id(), LIKES)], critical=False, timeout_seconds=PATIENT_SECONDS)
    ).version_epochs


class EachRead:
    """Send one query to each shard, and return the results in the order of the answers."""

    def __init__(self, store: ReadStore, shards: Sequence[int], timeout_seconds: float) -> None:
        self.results: dict[int, str] = {}
        self._shards = shards
        self._some_arrived = asyncio.Event()
        queries = [CountQuery(new_id(shard), LIKES) for shard in shards]
        read = store.read_each(queries, critical=False, timeout_seconds=timeout_seconds, on_read=self._take)
        self._reading = asyncio.create_task(read)

    def _take(self, places: Sequence[int], read: FillRead | TaoError) -> None:
        for place in places:
            assert self._shards[place] not in self.results
            self.results[self._shards[place]] = read.reason if isinstance(read, TaoError) else "answered"
        self._some_arrived.set()

    async def first(self, count: int) -> dict[int, str]:
        while len(self.results) < count:
            self._some_arrived.clear()
            await self._some_arrived.wait()
        return dict(self.results)

    async def all(self) -> dict[int, str]:
        await self._reading
        return self.results


async def test_an_overloaded_shard_delays_no_other_of_its_batch(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    settings = ReadSettings(max_pending_per_shard=1)
    await assert_others_are_answered(migrated, make_pools, settings)


async def test_a_shard_that_has_been_slow_is_queried_by_itself(
    migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    await assert_others_are_answered(migrated, make_pools, ReadSettings(slow_seconds=0.0))


async def assert_others_are_answered(migrated: DatabaseInstance, make_pools: MakePools, settings: ReadSettings) -> None:
    """Query while one shard of the batch is stuck: its own answer is the last, whatever it is."""
    store = MySqlReadStore(server_of, server_of, make_pools(writes=False), table_of, settings)
    async with locked_table(migrated, SHARDS[0]):
        stuck = EachRead(store, SHARDS[:1], PATIENT_SECONDS)
        await asyncio.sleep(0)
        read = EachRead(store, SHARDS, PATIENT_SECONDS)
        assert await read.first(2) == dict.fromkeys(SHARDS[1:], "answered")
    assert [*await read.all()][2:] == [SHARDS[0]]
    await stuck.all()


async def test_a_rejected_shard_fails_alone(stores: Stores, make_pools: MakePools) -> None:
    def nowhere(shard: int) -> str:
        if shard == SHARDS[1]:
            raise Unavailable("no server has it")
        return SERVER

    results = await EachRead(stores.read, (*SHARDS, 65_535), PATIENT_SECONDS).all()
    assert results == dict.fromkeys(SHARDS, "answered") | {65_535: OperatorError.reason}
    store = MySqlReadStore(nowhere, nowhere, make_pools(writes=False), table_of)
    results = await EachRead(store, SHARDS, PATIENT_SECONDS).all()
    assert results == dict.fromkeys(SHARDS, "answered") | {SHARDS[1]: Unavailable.reason}


@asynccontextmanager
async def locked_table(server: DatabaseInstance, shard: int) -> AsyncIterator[None]:
    """Keep a table away from reads, as while an ALTER TABLE swaps it."""
    account = server.accounts.administrator
    connection = await aiomysql.connect(
        host="127.0.0.1", port=server.port, user=account.user, password=account.password
    )
    async with connection.cursor() as cursor:
        await cursor.execute(f"LOCK TABLES {schema_name(shard)}.assoc_lists WRITE")
    try:
        yield
    finally:
        await connection.ensure_closed()
