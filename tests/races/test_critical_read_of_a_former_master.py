"""A critical read reaches a server that was the master, over the statements of a real database server.

    reader (its topology is old)      server "one", the master until now        its successor
    reads the rows           →        rows at version 1
                                      (stands still, or is closed)
                                      its lease ends                            promoted, opened
                                                                                writes version 2
    the check, behind the rows  →     closed, or the lease has ended
    refused: not version 1

A check before the rows would have passed. The second table, of a leader that was held up:

    leader, by topology 1             server "one"                              operator
                                      closed, and follows "two"            ←    promotes "two": topology 2
    (held up for a second)
    reads "one" critically   →        MASTER_READ_ONLY
    reads topology 2, asks "two"
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.errors import MasterReadOnly, TaoError
from tao.model.graph import decode_object
from tao.model.ids import SHARD_SHIFT
from tao.model.ports import OnRead, ReadStore
from tao.model.queries import FillRead, ObjectQuery, Query
from tao.replication.lease import install_lease, remove_lease
from tao.serving.sources import DatabaseReadSettings, DatabaseSource, fetch_and_wait
from tao.storage.migrations import migrate
from tao.storage.names import schema_name
from tao.storage.pools import Pools
from tao.storage.reads import READ_SETUP, MySqlReadStore
from tao.storage.session import DatabaseSession, ServerAccount
from tao.storage.writes import WRITE_SETUP
from tests.rigs.leader_rig import USER, make_id
from tests.rigs.pacing import Tasks, until

SERVER = "one"
SHARDS = (41_010, 41_011)
A, B = make_id(64, SHARDS[0]), make_id(64, SHARDS[1])
LEASE_SECONDS = 60.0


def account(server: DatabaseInstance, role: str) -> ServerAccount:
    found = getattr(server.accounts, role)
    return ServerAccount("127.0.0.1", server.port, found.user, found.password)


@dataclass
class FormerMaster:
    """A database server with a lease, an administrator's sessions there, and a reader of it."""

    reads: MySqlReadStore
    administrator: DatabaseSession
    locker: DatabaseSession

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

    async def is_waiting_for_lease(self) -> bool:
        threads = await self.administrator.named("SHOW PROCESSLIST", deadline=asyncio.get_running_loop().time() + 10)
        return any("metadata lock" in str(thread["State"]) for thread in threads)


@pytest.fixture(scope="module")
def migrated(database_server: DatabaseInstance) -> Iterator[DatabaseInstance]:
    administrator = account(database_server, "administrator")
    asyncio.run(migrate(administrator, SHARDS, {}, SERVER))
    yield database_server

    async def drop() -> None:
        pools = Pools(lambda _: administrator, WRITE_SETUP)
        deadline = asyncio.get_running_loop().time() + 10
        async with pools.of(SERVER).session(deadline=deadline) as session:
            for shard in SHARDS:
                await session.run(f"DROP DATABASE {schema_name(shard)}", deadline=deadline)
        await pools.close()

    asyncio.run(drop())


@pytest.fixture
async def former(migrated: DatabaseInstance) -> AsyncIterator[FormerMaster]:
    administration = Pools(lambda _: account(migrated, "administrator"), WRITE_SETUP)
    read_pools = Pools(lambda _: account(migrated, "reader"), READ_SETUP)
    reads = MySqlReadStore(lambda _: SERVER, lambda _: SERVER, read_pools, lambda _: "assocs")
    deadline = asyncio.get_running_loop().time() + 60
    pool = administration.of(SERVER)
    async with pool.session(deadline=deadline) as session, pool.session(deadline=deadline) as locker:
        await install_lease(session, LEASE_SECONDS, deadline=deadline)
        found = FormerMaster(reads, session, locker)
        await found.run("DROP EVENT tao.close_without_lease")  # the tests close the server when they want to
        await found.run(f"UPDATE tao.lease SET ends_unix_ms = (UNIX_TIMESTAMP() + {LEASE_SECONDS}) * 1000", "COMMIT")
        for each in (A, B):
            await found.write(each, 1)
        yield found
        await found.run("UNLOCK TABLES", session=locker)
        await remove_lease(session, deadline=deadline)
        await found.run("SET GLOBAL read_only = 0", "DROP DATABASE tao")
        for shard in SHARDS:
            await found.run(f"UPDATE {schema_name(shard)}.shard SET master_server = '{SERVER}', version_epoch = 1")
        await found.run("COMMIT")
    for pools in (administration, read_pools):
        await pools.close()


def refused(found: list[int | TaoError]) -> list[bool]:
    return [isinstance(each, MasterReadOnly) for each in found]


@pytest.mark.database
async def test_the_master_answers_critical_reads(former: FormerMaster) -> None:
    assert await former.read(A, B) == [1, 1]


@pytest.mark.database
async def test_a_server_that_was_replaced_between_the_rows_and_the_check_is_refused(former: FormerMaster) -> None:
    """The lock on the lease holds the check up, as a server that stands still between two statements does."""
    await former.run("LOCK TABLES tao.lease WRITE", session=former.locker)
    reading = asyncio.ensure_future(former.read(A))
    while not await former.is_waiting_for_lease():
        assert not reading.done(), "nothing is asked behind the rows"
        await asyncio.sleep(0)
    await former.run("UPDATE tao.lease SET ends_unix_ms = 1", "COMMIT", "UNLOCK TABLES", session=former.locker)
    assert refused(await reading) == [True], "its rows may be older than what a successor has"


@pytest.mark.database
async def test_a_master_whose_lease_has_ended_is_refused_before_it_has_closed_itself(former: FormerMaster) -> None:
    await former.run("UPDATE tao.lease SET ends_unix_ms = 1", "COMMIT")
    assert refused(await former.read(A, B)) == [True, True]
    assert await former.read(A, B, critical=False) == [1, 1], "other reads may be old"
    await remove_lease(former.administrator, deadline=asyncio.get_running_loop().time() + 10)
    assert await former.read(A, B) == [1, 1], "no lease is kept any more"


@pytest.mark.database
async def test_a_closed_server_is_refused(former: FormerMaster) -> None:
    await former.run("SET GLOBAL read_only = 1")
    assert refused(await former.read(A, B)) == [True, True]
    assert await former.read(A, B, critical=False) == [1, 1]


@pytest.mark.database
async def test_a_server_whose_rows_name_another_master_is_refused(former: FormerMaster) -> None:
    for shard in SHARDS:
        await former.run(f"UPDATE {schema_name(shard)}.shard SET master_server = 'two', version_epoch = 2", "COMMIT")
    assert refused(await former.read(A, B, A)) == [True, True, True]
    assert await former.read(A, B, critical=False) == [1, 1]


@pytest.mark.database
async def test_a_server_without_a_lease_or_without_the_right_to_read_it_is_checked_by_the_rest(
    former: FormerMaster, migrated: DatabaseInstance
) -> None:
    await former.run("DROP DATABASE tao")
    await remove_lease(former.administrator, deadline=asyncio.get_running_loop().time() + 10)
    try:
        assert await former.read(A, B) == [1, 1]
        await former.run("SET GLOBAL read_only = 1")
        assert refused(await former.read(A, B)) == [True, True]
    finally:
        deadline = asyncio.get_running_loop().time() + 10
        await install_lease(former.administrator, LEASE_SECONDS, deadline=deadline)


class Masters(ReadStore):
    """Servers "one", which is closed, and "two"; ``master`` is the one that the reader's topology names."""

    def __init__(self) -> None:
        self.master = "one"
        self.asked: list[str] = []

    async def read_each(
        self, queries: Sequence[Query], *, critical: bool, timeout_seconds: float, on_read: OnRead
    ) -> None:
        self.asked.append(self.master)
        if self.master == "one":
            on_read(range(len(queries)), MasterReadOnly("closed"))
        else:
            on_read(range(len(queries)), FillRead([b"\x02" + bytes(9)] * len(queries), {0: 2}))


async def test_a_reader_that_was_refused_reads_the_topology_and_asks_the_new_master() -> None:
    masters, tasks = Masters(), Tasks()

    async def refresh() -> None:
        masters.master = "two"

    source = DatabaseSource(masters, lambda _: "db", tasks, DatabaseReadSettings(), refresh)
    query = ObjectQuery(make_id(64))
    found = await fetch_and_wait(source, query, 0, critical=True, timeout_seconds=5)
    assert masters.asked == ["one", "two"]
    assert found.version_epoch == 2
    await tasks.close()


async def test_a_reader_that_finds_no_new_master_says_so_after_a_bounded_number_of_reads() -> None:
    masters, tasks = Masters(), Tasks()
    refreshed = 0

    async def refresh() -> None:
        nonlocal refreshed
        refreshed += 1

    settings = DatabaseReadSettings(max_rereads=3, first_pause_seconds=0.0)
    source = DatabaseSource(masters, lambda _: "db", tasks, settings, refresh)
    with pytest.raises(MasterReadOnly):
        await fetch_and_wait(source, ObjectQuery(make_id(64)), 0, critical=True, timeout_seconds=5)
    assert masters.asked == ["one"] * 3
    assert refreshed == 2
    await until(lambda: not tasks.errors)
    await tasks.close()
