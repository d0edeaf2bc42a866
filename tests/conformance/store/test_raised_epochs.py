"""What a promotion writes into the rows of shards, also while they lack a table of the newest release."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tao.devcluster.database import DatabaseInstance
from tao.model.ids import CLOCKS_DIFFER_MS, FARTHEST_AHEAD_MS, MAX_AHEAD_MS, WINDOW_MS, LostTimes
from tao.replication.move_statements import fence_shard, unfence_shard
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
    lost_ids = LostIds(LostTimes(5_000, 9_000), 1, reserving)
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


@pytest.mark.parametrize("lacks_epoch", [False, True])
async def test_ids_begin_above_those_that_lost_commits_may_have_reserved(
    administrator: DatabaseSession, lacks_epoch: bool
) -> None:
    now, table = 1_750_000_000_000, f"{schema_name(NEW)}.reserved_ids"
    times, epoch = LostTimes.at(now), 1
    ahead = (MAX_AHEAD_MS + CLOCKS_DIFFER_MS, MAX_AHEAD_MS + 3 * WINDOW_MS, FARTHEST_AHEAD_MS, 2 * FARTHEST_AHEAD_MS)
    right_until = times.right_until_unix_ms
    for stored in (0, now, *(now + each for each in ahead), times.farthest_unix_ms, right_until, right_until + 1):
        keep = f"INSERT INTO {table} VALUES (1, {stored}); " if stored else ""
        await administrator.run(f"DELETE FROM {table}; {keep}COMMIT", deadline=_deadline())
        lost_ids = LostIds(times, epoch + lacks_epoch, {schema_name(NEW)})
        epoch += 2
        await raise_epoch(administrator, (NEW,), "two", epoch, lost_ids=lost_ids, deadline=_deadline())
        found, _ = await administrator.run(f"SELECT reserved_unix_ms FROM {table}; COMMIT", deadline=_deadline())
        assert found == [(times.begin(stored, lacks_epoch=lacks_epoch),)], stored - now


@pytest.mark.parametrize("stored", [0, 1_750_000_050_000])
async def test_ids_of_a_fenced_shard_begin_above_all_that_its_lost_master_may_have_given_out_after_the_move(
    administrator: DatabaseSession, stored: int
) -> None:
    times, table = LostTimes.at(1_750_000_000_000), f"{schema_name(NEW)}.reserved_ids"
    if stored:
        await administrator.run(f"INSERT INTO {table} VALUES (1, {stored}); COMMIT", deadline=_deadline())
    await administrator.run(f"UPDATE {schema_name(NEW)}.shard SET version_epoch = 5; COMMIT", deadline=_deadline())
    await fence_shard(administrator, NEW, SERVER, "target", deadline=_deadline())
    # The promoted replica has all up to here. Its master undid the move, went on, and was lost.
    lost_ids = LostIds(times, 4, {schema_name(NEW)})
    await raise_epoch(
        administrator, (NEW,), "two", 9, other_servers=["target"], lost_ids=lost_ids, deadline=_deadline()
    )
    fenced, found, _ = await administrator.run(
        f"SELECT master_server, version_epoch FROM {schema_name(NEW)}.shard; "
        f"SELECT reserved_unix_ms FROM {table}; COMMIT",
        deadline=_deadline(),
    )
    assert fenced == [(b"target", 5)], "those who undo the move do that"
    assert found == [(times.begin(stored, lacks_epoch=True),)]
    await unfence_shard(administrator, NEW, "two", 9, deadline=_deadline())
    found, _ = await administrator.run(f"SELECT reserved_unix_ms FROM {table}; COMMIT", deadline=_deadline())
    assert found == [(times.begin(stored, lacks_epoch=True),)]


async def test_an_interrupted_promotion_does_not_hide_that_its_rows_lack_the_last_epoch(
    administrator: DatabaseSession,
) -> None:
    begun, known_epoch, table = 1_750_000_000_000, 2, f"{schema_name(NEW)}.reserved_ids"
    for unix_ms, epoch in ((begun, 3), (begun + 3 * WINDOW_MS, 4)):
        times = LostTimes.at(unix_ms)
        lost_ids = LostIds(times, known_epoch, {schema_name(NEW)})
        await raise_epoch(administrator, (NEW,), "two", epoch, lost_ids=lost_ids, deadline=_deadline())
        found, _ = await administrator.run(f"SELECT reserved_unix_ms FROM {table}; COMMIT", deadline=_deadline())
        assert found == [(times.begin(0, lacks_epoch=True),)]


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
