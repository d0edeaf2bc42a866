"""The store when servers, connections and callers misbehave: typed errors, nothing half-written, nothing left dirty."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.edge_block import decode_block
from tao.model.errors import (
    DeadlineExceeded,
    OperatorError,
    OutcomeUnknown,
    Overloaded,
    ShardBlocked,
    TooLarge,
    Unavailable,
)
from tao.model.graph import Edge
from tao.model.queries import CountQuery, RangeQuery
from tao.model.rows import ExistingRows, ObjectRow, RowChanges, WriteKeys
from tao.storage.failures import ConnectionLost
from tao.storage.migrations import load_migrations, migrate
from tao.storage.names import schema_name
from tao.storage.pools import PoolSettings
from tao.storage.reads import MySqlReadStore, ReadSettings
from tao.storage.session import ServerAccount, open_session
from tao.storage.writes import WRITE_SETUP, MySqlWriteStore
from tests.conformance.store.stores import (
    LIKES,
    SERVER,
    SHARDS,
    MakePools,
    Stores,
    list_of,
    new_id,
    server_of,
    table_of,
    version,
)
from tests.rigs.pacing import PATIENT_SECONDS

pytestmark = pytest.mark.database

Watch = Callable[[bytes], bool]


@asynccontextmanager
async def cutting_proxy(server_port: int, cut_after: Watch) -> AsyncIterator[int]:
    """Passes bytes on to the server; cuts both ways once a chunk for which ``cut_after`` is true has been passed on."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watch: Watch) -> None:
        try:
            while chunk := await reader.read(65_536):
                writer.write(chunk)
                await writer.drain()
                if watch(chunk):
                    return
        except OSError:
            return  # the other direction has cut

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", server_port)
        pumps = {
            asyncio.create_task(pump(reader, to_writer, cut_after)),
            asyncio.create_task(pump(to_reader, writer, lambda chunk: False)),
        }
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for each in pumps:
            each.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        to_writer.close()
        writer.close()

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        proxy.close()


async def edges_now(stores: Stores, id1: int) -> list[Edge]:
    answer = await stores.read.read([RangeQuery(id1, LIKES, 0, 10)], critical=True, timeout_seconds=5)
    return decode_block(answer.values[0])


async def test_a_connection_killed_in_commit_leaves_the_outcome_unknown(
    stores: Stores, migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    id1 = new_id()
    async with cutting_proxy(migrated.port, lambda chunk: b"; COMMIT" in chunk) as port:
        store = MySqlWriteStore(server_of, make_pools(writes=True, port=port), table_of)
        async with store.transaction(SERVER, timeout_seconds=5) as transaction:
            await transaction.lock_and_read(SHARDS, WriteKeys())
            await transaction.apply(list_of(id1, LIKES, [Edge(1, 1)]))
            with pytest.raises(OutcomeUnknown):
                await transaction.commit()
        # The outcome is known again once the shard row has been locked on another connection: it is committed, or never
        # will be.
        async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
            await transaction.lock_and_read(SHARDS, WriteKeys())
        assert await edges_now(stores, id1) in ([], [Edge(1, 1)])


async def test_a_connection_lost_before_commit_is_known_to_have_written_nothing(
    stores: Stores, migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    """The last packet is sent together with COMMIT; these rows fill more than one."""
    ids = [new_id(), new_id()]
    changes = RowChanges(put_objects=[ObjectRow(each, 3, version(1), False, b"x" * (3 << 20)) for each in ids])
    async with cutting_proxy(migrated.port, lambda chunk: b"INSERT INTO" in chunk) as port:
        store = MySqlWriteStore(server_of, make_pools(writes=True, port=port), table_of)
        async with store.transaction(SERVER, timeout_seconds=5) as transaction:
            await transaction.lock_and_read(SHARDS, WriteKeys())
            with pytest.raises(Unavailable):
                await transaction.apply(changes)
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
        _, found = await transaction.lock_and_read(SHARDS, WriteKeys(objects=set(ids)))
    assert found == ExistingRows()


async def test_pooled_connections_that_died_idle_are_replaced_without_the_caller_noticing(
    stores: Stores, migrated: DatabaseInstance, make_pools: MakePools
) -> None:
    id1 = new_id()
    reads, writes = make_pools(writes=False), make_pools(writes=True)
    reader = MySqlReadStore(server_of, server_of, reads, table_of)
    writer = MySqlWriteStore(server_of, writes, table_of)
    for kill in (False, True):
        if kill:
            await kill_sessions(migrated)
        await reader.read([CountQuery(id1, LIKES)], critical=False, timeout_seconds=5)
        assert set(await writer.read_ownership(SHARDS, timeout_seconds=5)) == set(SHARDS)
        if kill:
            await kill_sessions(migrated)
        async with writer.transaction(SERVER, timeout_seconds=5) as transaction:
            await transaction.lock_and_read(SHARDS, WriteKeys())
            await transaction.commit()
        if kill:
            await kill_sessions(migrated)
        await writer.take_ownership(SHARDS[:1], "leader-1", timeout_seconds=5)


async def test_a_stopped_leaders_transaction_keeps_no_shard_from_its_successor(make_pools: MakePools) -> None:
    stopped, successor = (MySqlWriteStore(server_of, make_pools(writes=True), table_of) for _ in range(2))
    async with asyncio.timeout(PATIENT_SECONDS), stopped.transaction(SERVER, timeout_seconds=30) as transaction:
        before, _ = await transaction.lock_and_read(SHARDS, WriteKeys())
        generation = 0
        while not generation:
            with suppress(ShardBlocked):
                taken = await successor.take_ownership(SHARDS[:1], "leader-2", timeout_seconds=5)
                generation = taken[SHARDS[0]].generation
        assert generation == before[SHARDS[0]].generation + 1
        # Time by which the client has noticed that the server has cut the connection.
        with pytest.raises((ConnectionLost, OutcomeUnknown)):
            await transaction.commit()


async def kill_sessions(server: DatabaseInstance) -> None:
    """End all connections of the service accounts, as a restart of the server would."""
    root = ServerAccount("127.0.0.1", server.port, "root", "", str(server.socket_path), tls=None)
    (rows,) = await run_as(root, "SELECT id FROM information_schema.processlist WHERE user LIKE 'tao%%'")
    for (thread,) in rows:
        await run_as(root, f"KILL {thread}")


async def test_a_server_that_cannot_be_reached_is_unavailable(make_pools: MakePools) -> None:
    async with cutting_proxy(1, lambda chunk: True) as port:
        pass
    store = MySqlReadStore(server_of, server_of, make_pools(writes=False, port=port), table_of)
    with pytest.raises(Unavailable):
        await store.read([CountQuery(new_id(), LIKES)], critical=False, timeout_seconds=5)


async def test_a_server_that_never_greets_is_unavailable_within_the_connect_bound(make_pools: MakePools) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pools = make_pools(writes=False, port=port, settings=PoolSettings(connect_seconds=0.05))
    store = MySqlReadStore(server_of, server_of, pools, table_of)
    with pytest.raises(Unavailable):
        await store.read([CountQuery(new_id(), LIKES)], critical=False, timeout_seconds=30)
    await pools.close()
    server.close()


async def test_a_wrong_password_is_an_operators_mistake(migrated: DatabaseInstance) -> None:
    account = ServerAccount("127.0.0.1", migrated.port, migrated.accounts.reader.user, "wrong", socket="", tls=None)
    with pytest.raises(OperatorError, match="Access denied"):
        await migrate(account, SHARDS, {}, SERVER)


async def test_a_shard_without_tables_is_an_operators_mistake(stores: Stores) -> None:
    with pytest.raises(OperatorError, match="migrations"):
        await stores.read.read([CountQuery(new_id(65_535), LIKES)], critical=False, timeout_seconds=5)


async def test_a_query_past_its_deadline_or_cancelled_does_not_return_its_connection(make_pools: MakePools) -> None:
    pools = make_pools(writes=False, settings=PoolSettings(max_connections=1))
    pool = pools.of(SERVER)
    loop = asyncio.get_running_loop()
    threads = []
    for way in ("deadline", "cancel", "clean", "clean"):

        async def sleep_in_the_server(way: str = way) -> None:
            async with pool.session(deadline=loop.time() + 30) as session:
                threads.append(session.thread_id)
                if way == "clean":
                    assert await session.run("SELECT 42", deadline=loop.time() + 30) == [[(42,)]]
                else:
                    await session.run("SELECT SLEEP(5)", deadline=loop.time() + (0.05 if way == "deadline" else 30))

        task = asyncio.create_task(sleep_in_the_server())
        if way == "deadline":
            with pytest.raises(DeadlineExceeded):
                await task
        elif way == "cancel":
            while len(threads) < 2:  # noqa: ASYNC110 - no event says that the server got the query
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
    assert len(set(threads[:3])) == 3
    assert threads[2] == threads[3]


async def test_waiting_for_a_connection_is_bounded_in_number_and_in_time(make_pools: MakePools) -> None:
    pool = make_pools(writes=False, settings=PoolSettings(max_connections=1, max_waiting=1)).of(SERVER)
    loop = asyncio.get_running_loop()

    async def borrow(seconds: float) -> None:
        async with pool.session(deadline=loop.time() + seconds):
            return

    async with pool.session(deadline=loop.time() + 30):
        patient = asyncio.create_task(borrow(30))
        while not pool.waiting:  # noqa: ASYNC110 - only the count shows a waiting task
            await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await borrow(30)
        assert not patient.done()
    await patient
    async with pool.session(deadline=loop.time() + 30):
        with pytest.raises(Overloaded):
            await borrow(0.01)


async def test_data_too_large_for_the_column_are_rejected_and_nothing_is_written(stores: Stores) -> None:
    id1 = new_id()
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:
        await transaction.lock_and_read(SHARDS, WriteKeys())
        await transaction.apply(list_of(id1, LIKES, [Edge(1, 1), Edge(2, 1, b"x" * 256)]))
        with pytest.raises(TooLarge):
            await transaction.commit()
    assert await edges_now(stores, id1) == []
    async with stores.write.transaction(SERVER, timeout_seconds=5) as transaction:  # on the same connection
        await transaction.lock_and_read(SHARDS, WriteKeys())
        await transaction.apply(list_of(id1, LIKES, [Edge(1, 1)]))
        await transaction.commit()
    assert await edges_now(stores, id1) == [Edge(1, 1)]


async def test_migrating_again_changes_nothing_and_finishes_what_was_cut_off(migrated: DatabaseInstance) -> None:
    administrator = migrated.accounts.administrator
    account = ServerAccount("127.0.0.1", migrated.port, administrator.user, administrator.password, socket="", tls=None)
    calls: list[tuple[int, int]] = []
    tables = {"assocs_long": 65_536}
    assert await migrate(account, SHARDS, tables, SERVER, progress=lambda n, of: calls.append((n, of))) == 0
    assert calls == [(len(SHARDS), len(SHARDS))]
    for sql in ("DELETE FROM schema_migrations", "DROP TABLE heartbeat; DELETE FROM schema_migrations"):
        await run_as(account, f"USE {schema_name(SHARDS[1])}; {sql}; COMMIT")
        assert await migrate(account, SHARDS, tables, SERVER) == 1
        (numbers,) = (await run_as(account, f"SELECT number FROM {schema_name(SHARDS[1])}.schema_migrations"))[:1]
        assert [number for (number,) in numbers] == [each.number for each in load_migrations()]
    assert await migrate(account, SHARDS[:1], {"assocs_extra": 1000}, SERVER) == 1
    assert await migrate(account, SHARDS[:1], {"assocs_extra": 1000}, SERVER) == 0
    await run_as(account, f"SELECT data FROM {schema_name(SHARDS[0])}.assocs_extra")


async def run_as(account: ServerAccount, sql: str) -> list[list[tuple[object, ...]]]:
    deadline = asyncio.get_running_loop().time() + 10
    session = await open_session(account, SERVER, WRITE_SETUP, deadline=deadline)
    try:
        return await session.run(sql, deadline=deadline)
    finally:
        session.quit()


@pytest.mark.parametrize("name", ["assocs_; DROP", "objects", "assocs_A", "assocs_", "assocs_" + "x" * 35, "`assocs`"])
async def test_an_invalid_table_name_never_reaches_a_statement(migrated: DatabaseInstance, name: str) -> None:
    administrator = migrated.accounts.administrator
    account = ServerAccount("127.0.0.1", migrated.port, administrator.user, administrator.password, socket="", tls=None)
    with pytest.raises(OperatorError):
        await migrate(account, SHARDS, {name: 10}, SERVER)


async def test_the_readers_account_cannot_write(migrated: DatabaseInstance) -> None:
    reader = migrated.accounts.reader
    account = ServerAccount("127.0.0.1", migrated.port, reader.user, reader.password, socket="", tls=None)
    with pytest.raises(OperatorError, match="denied"):
        await run_as(account, f"DELETE FROM {schema_name(SHARDS[0])}.objects")


async def test_reads_cancelled_at_any_moment_leave_no_shard_blocked(make_pools: MakePools) -> None:
    settings = ReadSettings(max_pending_per_shard=1)
    store = MySqlReadStore(lambda shard: f"{SERVER}-{shard}", server_of, make_pools(writes=False), table_of, settings)
    queries = [CountQuery(new_id(shard), LIKES) for shard in SHARDS]
    for steps in range(12):
        task = asyncio.create_task(store.read(queries, critical=False, timeout_seconds=5))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        answer = await store.read(queries, critical=False, timeout_seconds=5)
        assert set(answer.version_epochs) == set(SHARDS)
